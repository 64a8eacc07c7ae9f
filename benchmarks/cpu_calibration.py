# SPDX-License-Identifier: Apache-2.0
"""Codebooks on a CPU: fitted by torch operations and by native kernels, and what prompts pay.

    python benchmarks/cpu_calibration.py --data DATA --prompt 8000 --budgets 10% --out RECORD

First both fit the same planes of a model's keys, with the effort of a calibration that is kept and
with that of a first prompt; errors of unit keys are compared, then both are timed in turns.
Then prompts are read in turns into a dense cache and into one that calibrates itself, by either
way, as users make them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from sphkv import SphericalCache
from sphkv.cache.config import PROMPT_CALIBRATION
from sphkv.codec import codebook
from sphkv.codec.codebook import CodebookFit, fit_plane_codebooks
from sphkv.core.devices import require_kernels
from sphkv.evaluation.environment import describe_environment
from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.architecture import describe_model

EFFORTS = {
    "kept": (4096, CodebookFit()),
    "first prompt": (PROMPT_CALIBRATION.max_tokens, PROMPT_CALIBRATION.fit),
}
# Mean error of a cell class over torch's; the last class fits what little others leave over.
MOST_ERROR = 1.01


@contextmanager
def by_torch() -> Iterator[None]:
    """Fits by torch operations."""
    with mock.patch.object(codebook, "point_kernels_for", return_value=None):
        yield


def timed(clock: Callable[[], float], work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what came of it."""
    began = clock()
    found = work()
    return clock() - began, found


def unit_planes(model: PreTrainedModel, ids: Tensor, layers: list[int]) -> list[Tensor]:
    """Keys of some layers before RoPE, of length one: ``[heads, tokens, planes, 2]`` each."""
    layout, cache = describe_model(model), DynamicCache()
    held: Any = cache.layers
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    found = []
    for layer in layers:
        keys, rope = held[layer].keys[0].float(), layout.ropes[layer]
        z = rope.unrotate(rope.to_planes(keys), torch.arange(keys.shape[1]))
        found.append(z / keys.norm(dim=-1)[..., None, None])
    return found


def mean_errors(planes: list[Tensor], metric: Tensor, fit: CodebookFit) -> Tensor:
    """Mean error of every cell class of codebooks that are fitted now."""
    fitted = [fit_plane_codebooks(z, metric, fit).distortion for z in planes]
    return torch.cat(fitted).double().mean((0, 1))


def compare_fits(planes: list[Tensor], rounds: int) -> list[dict[str, Any]]:
    """Errors and processor time of both ways.

    Raises:
        RuntimeError: Native fits err more than those by torch.
    """
    rows = []
    for effort, (samples, fit) in EFFORTS.items():
        step = max(1, planes[0].shape[1] // samples)
        picked = [z[:, 4::step][:, :samples].contiguous() for z in planes]
        heads, _, num_planes, _ = picked[0].shape
        metric = torch.eye(2).expand(heads, num_planes, 2, 2).contiguous()

        fit_all = partial(mean_errors, picked, metric, fit)
        seconds: dict[str, list[float]] = {"torch": [], "native": []}
        for _ in range(rounds):
            with by_torch():
                took, right = timed(time.process_time, fit_all)
                seconds["torch"].append(took)
            took, own = timed(time.process_time, fit_all)
            seconds["native"].append(took)
        errors = (own / right).tolist()
        if max(errors) > MOST_ERROR:
            raise RuntimeError(f"native fits err more than those by torch: {errors}")
        pairs = zip(*seconds.values(), strict=True)
        rows.append(
            {
                "effort": effort,
                "samples": picked[0].shape[1],
                "layers": len(picked),
                "error_over_torch": errors,
                "seconds": seconds,
                "times_faster": statistics.median(a / b for a, b in pairs),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def compare_prompts(
    model: PreTrainedModel, ids: Tensor, budgets: list[str], rounds: int
) -> list[dict[str, Any]]:
    """Seconds of a first prompt with a dense cache and with ours, by the clock."""

    def read(cache: Any) -> float:
        work = lambda: model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)  # noqa: E731
        took, _ = timed(time.perf_counter, work)
        return took

    def read_codes(budget: str) -> float:
        cache = SphericalCache.for_model(model, budget)
        took = read(cache)
        if cache.residency == "dense":
            raise RuntimeError(f"the prompt was not coded at {budget}")
        cache.detach()
        return took

    rows = []
    for budget in budgets:
        seconds: dict[str, list[float]] = {"dense": [], "torch": [], "native": []}
        for _ in range(rounds):
            seconds["dense"].append(read(DynamicCache()))
            with by_torch():
                seconds["torch"].append(read_codes(budget))
            seconds["native"].append(read_codes(budget))
        more = {
            way: statistics.median(
                own / dense - 1 for own, dense in zip(seconds[way], seconds["dense"], strict=True)
            )
            for way in ("torch", "native")
        }
        rows.append({"budget": budget, "tokens": ids.shape[1], "seconds": seconds, "more": more})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Compare fits, then prompts, and write one record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of books")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--book", default="calibration/10046")
    parser.add_argument("--layers", type=int, default=5, help="layers whose planes are fitted")
    parser.add_argument("--budgets", nargs="+", default=["25%", "10%"])
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    require_kernels()
    model, tokenizer = load_model(args.model)
    words = (args.data / f"{args.book}.txt").read_text(encoding="utf-8")
    ids: Tensor = tokenizer(words, return_tensors="pt").input_ids[:, : args.prompt]
    count = model.config.num_hidden_layers
    layers = [int((at + 0.5) * count / args.layers) for at in range(args.layers)]
    with torch.inference_mode():
        fits = compare_fits(unit_planes(model, ids, layers), args.rounds)
        prompts = compare_prompts(model, ids, args.budgets, args.rounds)
    told = " ".join("DATA" if word == str(args.data) else word for word in sys.argv[1:])
    about = {
        "command": f"python benchmarks/cpu_calibration.py {told}",
        "model": args.model,
        "threads": torch.get_num_threads(),
        **describe_environment(),
    }
    record = {**about, "fits": fits, "prompts": prompts}
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
