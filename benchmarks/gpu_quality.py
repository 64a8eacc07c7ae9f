# SPDX-License-Identifier: Apache-2.0
"""What a real model says through the GPU kernels, against the CPU reference path.

First write the reference on a CPU, then compare with it on a GPU:

``PYTHONPATH=src python3 benchmarks/gpu_quality.py MODEL TEXT --reference FOLDER --device cpu``
``PYTHONPATH=src python3 benchmarks/gpu_quality.py MODEL TEXT --reference FOLDER --output FILE``

Both sides take the model in float32, the same tokens and the same codebooks. The prompt is coded,
then the text goes on token by token; KL is that of the dense model to the coded one.
"""

import argparse
import json
from pathlib import Path

import torch

from sphkv import SphericalCache, load_model
from sphkv.codec.calibration_file import load_calibration, save_calibration
from sphkv.integrations.transformers.cache import CacheOptions

TIER, PROMPT, STEPS, GREEDY = "k2v3", 1024, 64, 24


@torch.no_grad()
def feed(model, cache, tokens, first):
    positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)[None]
    return model(
        input_ids=tokens, past_key_values=cache, position_ids=positions, use_cache=True
    ).logits[0]


def coded_run(model, tokens, backend, calibration, *, cuda_graphs=False):
    """Log-probabilities of the continuation, greedy ids after the prompt, the cache."""
    options = CacheOptions(backend=backend, cuda_graphs=cuda_graphs)
    cache = SphericalCache.for_model(model, tiers=TIER, calibration=calibration, options=options)
    logits = feed(model, cache, tokens[:, :PROMPT], 0)[-1:]
    rows = [logits]
    branch = cache.fork()
    for at in range(PROMPT, PROMPT + STEPS - 1):
        rows.append(feed(model, cache, tokens[:, at : at + 1], at))
    greedy, token = [], logits.argmax(-1)
    for at in range(GREEDY):
        greedy.append(int(token))
        token = feed(model, branch, token[None], PROMPT + at)[-1:].argmax(-1)
    branch.detach()
    return torch.cat(rows).log_softmax(-1), greedy, cache


def divergence(right, other):
    """KL of each step."""
    return (right.exp() * (right - other)).sum(-1)


def report(name, dense, coded, greedy, expected):
    kl = divergence(dense, coded)
    record = {
        "backend": name,
        "kl": float(kl.mean()),
        "same_top1": float((dense.argmax(-1) == coded.argmax(-1)).float().mean()),
        "kl_by_step": [round(float(x), 6) for x in kl],
        "greedy": greedy,
    }
    if expected is not None:
        there = torch.tensor(expected["kl_by_step"])
        record["kl_of_cpu_reference"] = expected["kl"]
        record["largest_kl_difference"] = float((kl.cpu() - there).abs().max())
        record["greedy_equal"] = greedy == expected["greedy"]
    shown = {k: v for k, v in record.items() if k not in ("kl_by_step", "greedy")}
    print(json.dumps(shown), flush=True)
    return record


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
    args = parser.parse_args()
    device = args.device
    model, tokenizer = load_model(args.model)
    model = model.to(device).eval()
    text = args.text.read_text(encoding="utf-8")[20_000:40_000]
    tokens = tokenizer(text, return_tensors="pt").input_ids[:, : PROMPT + STEPS].to(device)
    with torch.no_grad():
        dense = model(input_ids=tokens).logits[0, PROMPT - 1 : -1].log_softmax(-1)
    args.reference.mkdir(parents=True, exist_ok=True)
    codebooks, figures = args.reference / "codebooks.safetensors", args.reference / "cpu.json"
    if device == "cpu":
        with SphericalCache.for_model(model, tiers=TIER) as cache:
            feed(model, cache, tokens[:, :PROMPT], 0)
            save_calibration(cache.calibration, codebooks)
        calibration = load_calibration(codebooks)
        coded, greedy, _ = coded_run(model, tokens, "reference", calibration)
        record = report("cpu reference", dense, coded, greedy, None)
        figures.write_text(json.dumps(record) + "\n")
        return
    expected, calibration = json.loads(figures.read_text()), load_calibration(codebooks)
    about = {
        "model": Path(args.model).name,
        "tier": TIER,
        "prompt_tokens": PROMPT,
        "steps": STEPS,
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__},
        "commit": args.commit,
        "command": "PYTHONPATH=src python3 benchmarks/gpu_quality.py MODEL TEXT "
        "--reference FOLDER --output FILE",
    }
    records = []
    # the fast ones first: the reference takes longest by far
    for backend in ("cuda", "cuda graph", "triton", "reference"):
        name, _, graph = backend.partition(" ")
        coded, greedy, _ = coded_run(model, tokens, name, calibration, cuda_graphs=bool(graph))
        records.append(report(backend, dense, coded, greedy, expected))
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps({**about, "runs": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
