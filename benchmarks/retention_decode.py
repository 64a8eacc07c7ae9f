# SPDX-License-Identifier: Apache-2.0
"""Share of a decode step that the controller takes: pricing, rebalancing, sealing, the gate.

    python benchmarks/retention_decode.py --text book.txt --calibration c.safetensors --budget 10%

Processor time, so that other work on the machine does not count. ``write_share`` is what coding and
moving pages takes, which any cache that codes new states does; ``controller_share`` is the rest of
what happens beside model and attention: listing pages, predicting, solving, the gate with the
margin of the two best tokens.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sphkv.codec.calibration_file import load_calibration
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.workloads.texts import read_tokens
from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.cache import RetentionOptions, SphericalCache
from sphkv.integrations.transformers.stepping import score
from sphkv.retention.gate import GateOptions


class Stopwatch:
    """Processor seconds of calls, by name; a call inside another counts in both."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def wrap(self, owner: Any, name: str) -> None:
        """Time a method of an object from now on."""
        call: Callable[..., Any] = getattr(owner, name)
        spent = self.seconds.setdefault(name, [])

        def run(*values: Any, **named: Any) -> Any:
            start = time.process_time()
            found = call(*values, **named)
            spent.append(time.process_time() - start)
            return found

        setattr(owner, name, run)

    def total(self, *names: str) -> float:
        """Seconds of all calls of some names."""
        return sum(sum(self.seconds[name]) for name in names)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--budget", default="10%")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)
    ids = read_tokens(tokenizer, args.text, args.context + args.steps, offset=40_000)
    cache = SphericalCache.for_model(
        model,
        args.budget,
        retention=RetentionOptions(gate=GateOptions()),
        calibration=load_calibration(args.calibration),
    )
    if cache.holds_from is None or cache.holds_from > args.context:
        raise SystemExit(f"{args.budget} holds from {cache.holds_from} tokens on")
    began = time.perf_counter()
    with torch.no_grad():
        model(ids[:, : args.context], use_cache=False, logits_to_keep=1)
    dense_s = time.perf_counter() - began
    began = time.perf_counter()
    score(model, cache, ids[:, : args.context])
    store_s = time.perf_counter() - began - dense_s
    engine, watch = cache.engine, Stopwatch()
    residency: Any = engine.rows[0].residency
    for name in ("settle", "observe_logits"):
        watch.wrap(residency, name)
    # coding and moving: what any cache that codes new states does; settling calls the first three,
    # and the rows seal when it is over
    moves = ("demote_listed", "drop_listed", "compact")
    for name in (*moves, "make_room"):
        watch.wrap(engine.store, name)
    began_cpu = time.process_time()
    for at in range(args.context, args.context + args.steps):
        score(model, cache, ids[:, at : at + 1])
    total = time.process_time() - began_cpu
    gate = watch.total("observe_logits")
    moved, settle = watch.total(*moves), watch.total("settle")
    write = moved + watch.total("make_room")
    record = {
        "command": (
            f"python benchmarks/retention_decode.py --model {Path(args.model).name} "
            f"--text {Path(args.text).name} --calibration {Path(args.calibration).name} "
            f"--budget {args.budget} --context {args.context} --steps {args.steps}"
        ),
        "prefill_s": dense_s,
        "store_s": store_s,
        "steps": args.steps,
        "step_cpu_ms": 1000 * total / args.steps,
        "usual_settle_cpu_ms": 1000 * sorted(watch.seconds["settle"])[args.steps // 2],
        "write_share": write / total,
        "controller_share": (settle - moved + gate) / total,
        "gate_share": gate / total,
        "peak_share": engine.peak_share,
        "rebalances": residency.num_rebalances,
        "budget": args.budget,
        "context": args.context,
        "environment": describe_environment(),
    }
    text = json.dumps(record, indent=2)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
