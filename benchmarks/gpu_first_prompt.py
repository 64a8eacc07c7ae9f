# SPDX-License-Identifier: Apache-2.0
"""What a process pays for its first prompt, and what the controller adds to a later one.

``PYTHONPATH=src python3 benchmarks/gpu_first_prompt.py --side dense``
``PYTHONPATH=src python3 benchmarks/gpu_first_prompt.py --side codes --pairs 3``

The first prompt of 32K tokens comes right after the model with random weights is there: into
transformers' dense cache, or into ours, which then calibrates itself, decides and writes. Kernels
are compiled once for a machine, so a second process tells what the others pay. ``--pairs`` then
reads prompts into both caches in turn, of each length one pair more, whose first prompt is marked.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from gpu_end_to_end import LLAMA, environment, prefill, timed
from gpu_models import build_model
from transformers import DynamicCache

from sphkv import SphericalCache

FIRST_TOKENS = 32768


def read_dense(model, tokens):
    """Seconds of a prompt into transformers' own cache."""
    seconds = prefill(model, tokens, DynamicCache(config=model.config))
    torch.cuda.empty_cache()
    return seconds


def measure_pairs(model, cache, tokens, count):
    """Prompts into both caches in turn, as records."""
    for at in range(count + 1 if count else 0):
        cache.reset()
        torch.cuda.empty_cache()
        dense, ours = read_dense(model, tokens), prefill(model, tokens, cache)
        print(
            f"{tokens}: dense {dense:.3f} s, ours {ours:.3f} s, {ours / dense - 1:+.1%}", flush=True
        )
        found = {"tokens": tokens, "dense_s": dense, "codes_s": ours, "added": ours / dense - 1}
        yield found | {"is_first": at == 0}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=("dense", "codes"), required=True)
    parser.add_argument("--budget", default="10%")
    parser.add_argument("--pairs", type=int, default=0, help="later prompts of each length")
    parser.add_argument("--contexts", type=int, nargs="*", default=[8192, 32768, 131072])
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--commit")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    _, model = timed(lambda: build_model(LLAMA, num_layers=args.layers))
    record = {"side": args.side, "budget": args.budget, "pairs": []}
    if args.side == "dense":
        record["first_s"] = read_dense(model, FIRST_TOKENS)
    else:
        began = time.perf_counter()
        cache = SphericalCache.for_model(model, args.budget)
        record["make_cache_s"] = time.perf_counter() - began
        record["first_s"] = prefill(model, FIRST_TOKENS, cache)
        for tokens in args.contexts:
            record["pairs"] += measure_pairs(model, cache, tokens, args.pairs)
        cache.detach()
    record |= environment(args.commit)
    record["command"] = "PYTHONPATH=src python3 benchmarks/gpu_first_prompt.py --side " + args.side
    record["command"] += f" --pairs {args.pairs}" if args.pairs else ""
    print(json.dumps(record))
    if args.output:
        args.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
