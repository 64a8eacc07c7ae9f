# SPDX-License-Identifier: Apache-2.0
"""A cache under the controller on a GPU: its budget at every moment, its attention, what it says.

``PYTHONPATH=src python3 benchmarks/gpu_retention.py [--model MODEL --text TEXT] [--output FILE]``

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

from sphkv.attention.reference import ReferenceBackend
from sphkv.attention.request import AttentionOptions, DecodeRequest
from sphkv.integrations.transformers.cache import CacheOptions, RetentionOptions, SphericalCache
from sphkv.retention.gate import GateOptions

# Half-precision products of the Hopper kernel, float32 of the portable one, 8 bits on the CPU.
MOST_ERROR = {"cuda": 5e-3, "triton": 1e-5, "reference": 0.0, "native": 1.2e-2}
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
    """Log-probabilities ``[steps, rows, vocabulary]`` of the tokens after a prompt, and times."""
    device = tokens.device
    start = time.perf_counter()
    model(input_ids=tokens[:, :prompt], past_key_values=cache, use_cache=True, logits_to_keep=1)
    _wait(device)
    times, rows = [time.perf_counter() - start], []
    for at in range(prompt, tokens.shape[1]):
        start = time.perf_counter()
        out = model(
            input_ids=tokens[:, at : at + 1], past_key_values=cache, use_cache=True,
            position_ids=torch.full((tokens.shape[0], 1), at, device=device),
        )  # fmt: skip
        rows.append(out.logits[:, -1].float().log_softmax(-1).cpu())
        _wait(device)
        times.append(time.perf_counter() - start)
    return torch.stack(rows), times


def _wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def attention_error(cache, layer=0):
    """Relative error of the cache's backend against the reference, on the same pages."""
    row, geometry = cache.engine.rows[0], cache.config.geometry
    generator = torch.Generator().manual_seed(0)
    shape = (geometry.num_query_heads, 1, geometry.head_dim)
    query = torch.randn(shape, generator=generator).to(cache.config.device)
    request = DecodeRequest(
        row.store, row.sequence, layer, query, torch.tensor([row.num_tokens() - 1]),
        AttentionOptions(scale=geometry.head_dim**-0.5),
    )  # fmt: skip
    right = ReferenceBackend().attend(request).output
    got = cache.engine.backend.attend(request).output
    return float((got - right).norm() / right.norm())


def measure(model, tokens, prompt, budget, backend, page_tokens, dense):
    """A record of one run."""
    retention = RetentionOptions(page_tokens=page_tokens, gate=GateOptions())
    options = CacheOptions(backend=backend)
    with SphericalCache.for_model(model, budget, retention=retention, options=options) as cache:
        rows, times = run(model, tokens, prompt, cache)
        if cache.residency != "retention":
            raise SystemExit(f"{budget} holds from {cache.holds_from} tokens: give a longer prompt")
        error = attention_error(cache)
    engine, steps = cache.engine, sorted(times[1:])
    is_exact = engine.resident_bytes() == cache.ledger().total
    record = {
        "device": str(tokens.device),
        "backend": cache.backend_name,
        "page_tokens": page_tokens,
        "budget": budget,
        "prompt": prompt,
        "kl": float((dense.exp() * (dense - rows)).sum(-1).mean()),
        "peak_share": engine.peak_share,
        "attention_error": error,
        "rebalances": engine.rows[0].residency.num_rebalances,
        "t_prompt_s": times[0],
        "step_ms": 1e3 * steps[len(steps) // 2],
        "is_right": bool(
            is_exact
            and engine.peak_share <= 1
            and error <= MOST_ERROR.get(cache.backend_name, 1e-4)
        ),
    }
    print(json.dumps(record), flush=True)
    return record


def check_random():
    """Every backend and size of pages on a small model in bfloat16."""
    model = random_model()
    tokens = torch.randint(0, 1000, (2, 3000 + 200), device="cuda")
    dense, _ = run(model, tokens, 3000, dense_cache())
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
    """The same text on both devices; on the CPU alone where there is no other."""
    from sphkv import load_model

    on_cpu, tokenizer = load_model(name)
    words = text.read_text(encoding="utf-8")[20_000:40_000]
    tokens = tokenizer(words, return_tensors="pt").input_ids[:, : prompt + steps]
    dense, _ = run(on_cpu, tokens, prompt, dense_cache())
    kinds = [(on_cpu, "native", 32), (on_cpu, "reference", 32), (on_cpu, "reference", 128)]
    if torch.cuda.is_available():
        on_gpu = copy.deepcopy(on_cpu).cuda()
        kinds += [(on_gpu, "cuda", 32), (on_gpu, "cuda", 128), (on_gpu, "triton", 32)]
    found = []
    for budget in budgets:
        for model, backend, size in kinds:
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
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {"torch": torch.__version__},
        "commit": args.commit,
        "command": "PYTHONPATH=src python3 benchmarks/gpu_retention.py",
    }
    if args.output:
        rows = [record | about for record in records]
        args.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(record["is_right"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
