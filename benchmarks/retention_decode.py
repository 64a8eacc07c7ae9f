# SPDX-License-Identifier: Apache-2.0
"""Share of a decode step that the controller takes: tiers for new pages, rebalancing, the gate.

    python benchmarks/retention_decode.py --text book.txt --calibration c.safetensors --budget 10%

Processor time, so that other work on the machine does not count. ``write_share`` is what coding and
moving pages takes, which any cache that codes new states does; ``controller_share`` is the rest of
what happens beside model and attention: listing pages, foretelling, solving, the gate with the
margin of the two best tokens.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sphkv.cache.retained import RetainedSequence
from sphkv.cache.retained_config import RetainedConfig

from sphkv.attention.api import get_backend
from sphkv.codec.calibration_file import load_calibration
from sphkv.codec.states import SphericalCodec
from sphkv.core.budget import ByteBudget
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.harness.states import log_probabilities, read_prompt
from sphkv.evaluation.harness.subject import MethodSubject
from sphkv.evaluation.text import read_tokens
from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.architecture import model_geometry, model_ropes
from sphkv.retention.gate import GateOptions


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
    geometry, ropes = model_geometry(model), model_ropes(model)
    ids = read_tokens(tokenizer, args.text, args.context + args.steps, offset=40_000)
    began = time.perf_counter()
    states = read_prompt(model, ids[:, : args.context])
    dense_s = time.perf_counter() - began
    codec = SphericalCodec(load_calibration(args.calibration, geometry=geometry, ropes=ropes))
    config = RetainedConfig(geometry, ropes, ByteBudget.parse(args.budget), gate=GateOptions())
    sequence = RetainedSequence(config, codec, get_backend("auto"))
    began = time.perf_counter()
    subject = MethodSubject(model, sequence, geometry)
    subject.store_prompt(states)
    store_s = time.perf_counter() - began
    spent: dict[str, list[float]] = {"settle": [], "demote": [], "gate": []}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*values: object) -> Any:
            start = time.process_time()
            found = call(*values)
            spent[name].append(time.process_time() - start)
            return found

        return run

    refresher, store = sequence.refresher, sequence.store

    gated = timed("gate", refresher.observe_logits)
    refresher.settle = timed("settle", refresher.settle)  # type: ignore[method-assign]
    store.demote = timed("demote", store.demote)  # type: ignore[method-assign]
    began, over = time.process_time(), 0
    for at in range(args.context, args.context + args.steps):
        hidden = subject.feed(ids[:, at : at + 1]).hidden
        gated(next(log_probabilities(model, hidden))[1][0])
        over = max(over, sequence.resident_bytes() - sequence.limit_bytes())
    total = time.process_time() - began
    settle, write, gate = (sum(spent[name]) for name in ("settle", "demote", "gate"))
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
        "usual_settle_cpu_ms": 1000 * sorted(spent["settle"])[args.steps // 2],
        "write_share": write / total,
        "controller_share": (settle - write + gate) / total,
        "gate_share": gate / total,
        "bytes_over_budget": max(0, over),
        "rebalances": refresher.num_rebalances,
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
