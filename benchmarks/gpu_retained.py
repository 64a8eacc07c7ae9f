# SPDX-License-Identifier: Apache-2.0
"""A retained cache on a GPU: its budget at every step, its attention, and what it says.

``PYTHONPATH=src python3 benchmarks/gpu_retained.py [--model MODEL --text TEXT] [--output FILE]``

Without a model: a small one with random weights in bfloat16, every backend against the reference on
the very pages it reads. With one: the same text through the CPU and the GPU in float32, KL to the
dense cache.
"""

import argparse
import copy
import json
import sys
import time
from pathlib import Path

import torch
import triton
from sphkv.integrations.transformers.retained import RetainedCache, RetentionOptions

from sphkv.attention.reference import ReferenceBackend
from sphkv.attention.request import AttentionOptions, DecodeRequest
from sphkv.retention.gate import GateOptions

# Half-precision products of the Hopper kernel, float32 of the portable one.
MOST_ERROR = {"cuda": 5e-3, "triton": 1e-5, "reference": 0.0}
PAGES = (32, 128)


def random_model():
    """Three layers as wide as a served head needs."""
    from gpu_models import build_model

    return build_model(
        "Llama-3.1-8B", num_layers=3, hidden_size=1024, intermediate_size=2048,
        num_attention_heads=8, num_key_value_heads=2, vocab_size=1000,
    )  # fmt: skip


@torch.no_grad()
def run(model, tokens, prompt, cache):
    """Log-probabilities ``[steps, vocabulary]`` of the tokens after a prompt, and times."""
    device = tokens.device
    start = time.perf_counter()
    model(input_ids=tokens[:, :prompt], past_key_values=cache, use_cache=True, logits_to_keep=1)
    _wait(device)
    times, rows, fullest = [time.perf_counter() - start], [], 0.0
    for at in range(prompt, tokens.shape[1]):
        start = time.perf_counter()
        out = model(
            input_ids=tokens[:, at : at + 1], past_key_values=cache, use_cache=True,
            position_ids=torch.full((tokens.shape[0], 1), at, device=device),
        )  # fmt: skip
        rows.append(out.logits[:, -1].float().log_softmax(-1).cpu())
        _wait(device)
        times.append(time.perf_counter() - start)
        for row in getattr(cache, "sequences", ()):
            fullest = max(fullest, row.resident_bytes() / row.limit_bytes())
    return torch.stack(rows), times, fullest


def _wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def attention_error(cache, layer=0):
    """Relative error of the cache's backend against the reference, on the same pages."""
    sequence, geometry = cache.sequences[0], cache.config.geometry
    end = sequence.num_tokens()
    generator = torch.Generator().manual_seed(0)
    shape = (geometry.num_query_heads, 1, geometry.head_dim)
    query = torch.randn(shape, generator=generator).to(cache.config.device)
    request = DecodeRequest(
        sequence.store, 0, layer, query, torch.tensor([end - 1], device=query.device),
        AttentionOptions(scale=geometry.head_dim**-0.5),
    )  # fmt: skip
    right = ReferenceBackend().attend(request).output
    got = cache.engine.backend.attend(request).output
    return float((got - right).norm() / right.norm())


def measure(model, tokens, prompt, budget, backend, page_tokens, dense):
    """A record of one run."""
    options = RetentionOptions(backend=backend, page_tokens=page_tokens, gate=GateOptions())
    cache = RetainedCache.for_model(model, budget, options=options)
    try:
        rows, times, fullest = run(model, tokens, prompt, cache)
        error = attention_error(cache)
    finally:
        cache.detach()
    sequence = cache.sequences[0]
    steps = sorted(times[1:])
    record = {
        "device": str(tokens.device),
        "backend": cache.backend_name,
        "page_tokens": page_tokens,
        "budget": budget,
        "prompt": prompt,
        "kl": float((dense.exp() * (dense - rows)).sum(-1).mean()),
        "fullest": fullest,
        "attention_error": error,
        "rebalances": sequence.refresher.num_rebalances,
        "t_prompt_s": times[0],
        "step_ms": 1e3 * steps[len(steps) // 2],
        "is_right": fullest <= 1 and error <= MOST_ERROR.get(cache.backend_name, 1e-4),
    }
    print(json.dumps(record), flush=True)
    return record


def check_random():
    """Every backend and size of pages on a small model in bfloat16."""
    model = random_model()
    tokens = torch.randint(0, 1000, (2, 3000 + 200), device="cuda")
    dense, _, _ = run(model, tokens, 3000, dense_cache())
    return [
        measure(model, tokens, 3000, "30%", backend, size, dense)
        for backend in ("cuda", "triton", "reference")
        for size in PAGES
    ]


def dense_cache():
    """A dense cache of transformers."""
    from transformers import DynamicCache

    return DynamicCache()


def check_real(name, text, prompt, steps, budgets):
    """The same text on both devices."""
    from sphkv import load_model

    on_cpu, tokenizer = load_model(name)
    words = text.read_text(encoding="utf-8")[20_000:40_000]
    tokens = tokenizer(words, return_tensors="pt").input_ids[:, : prompt + steps]
    on_gpu = copy.deepcopy(on_cpu).cuda()
    dense, _, _ = run(on_cpu, tokens, prompt, dense_cache())
    found = []
    for budget in budgets:
        for model, backend, size in (
            (on_cpu, "reference", 128), (on_gpu, "cuda", 128), (on_gpu, "triton", 32),
            (on_cpu, "reference", 32),
        ):  # fmt: skip
            at = tokens.to(next(model.parameters()).device)
            found.append(measure(model, at, prompt, budget, backend, size, dense))
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--budgets", nargs="*", default=["20%", "10%"])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
    args = parser.parse_args()
    torch.manual_seed(0)
    records = (
        check_random()
        if args.model is None
        else check_real(args.model, args.text, args.prompt, args.steps, args.budgets)
    )
    about = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "commit": args.commit,
        "command": "PYTHONPATH=src python3 benchmarks/gpu_retained.py",
    }
    if args.output:
        rows = [record | about for record in records]
        args.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(record["is_right"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
