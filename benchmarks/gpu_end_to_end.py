# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a whole model: dense bfloat16 cache against angle codes.

``PYTHONPATH=src python3 benchmarks/gpu_end_to_end.py --output results/gpu/end_to_end.json``

A Llama-3.1-8B with random weights prefills a random prompt once. Its keys and values fill both
caches, a copy per sequence of the batch. Both sides decode with the same modules inside one CUDA
graph per token; only attention differs. The dense side is a split-KV paged kernel at the limit of
HBM, the best of a few configurations.
"""

import argparse
import gc
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path

import torch
from gpu_baselines import PAGE_TOKENS, DensePaged
from gpu_models import build_llama
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sphkv import SphericalCache
from sphkv.cache.step import StepTokens
from sphkv.integrations.transformers.graph import GraphDecoder

TIER = "k2v4"
POINTS = ((8192, (1, 8)), (32768, (1, 8)), (131072, (1, 4, 8)))
# keys per tile, warps, pipeline stages, splits: the winners over longer searches
DENSE_CONFIGS = ((128, 8, 3, 32), (64, 4, 3, 16), (64, 4, 4, 32))
DENSE_STEPS, STEPS, WARM_UP = 32, 256, 4


def timed(work):
    """Seconds of some GPU work, and its result."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return time.perf_counter() - began, result


def prefill(model, tokens):
    """Dense states of a prompt, layer by layer, and the seconds it took."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        seconds, _ = timed(
            lambda: model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        )
    return seconds, [(layer.keys, layer.values) for layer in cache.layers]


def random_states(config, context):
    """States of a prompt that no model has read; only decode and writing can be timed on them."""
    shape = (1, config.num_key_value_heads, context, config.head_dim)
    return [
        tuple(torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        for _ in range(config.num_hidden_layers)
    ]


class PassThrough(CacheLayerMixin):
    """Hands states to the attention function, which keeps them."""

    is_sliding = False

    def lazy_initialization(self, *_):
        self.is_initialized = True

    def update(self, keys, values, *_, **__):
        return keys, values

    def get_seq_length(self):
        return 0

    def get_mask_sizes(self, query_length):
        return query_length, 0

    def get_max_length(self):
        return -1

    def get_max_cache_shape(self):
        return -1


class DenseDecoder:
    """The same step over dense pages, in a CUDA graph."""

    def __init__(self, model, states, batch):
        self.model, self.batch = model, batch
        self.length = states[0][0].shape[2]
        pages = self.length // PAGE_TOKENS + 1
        heads, dim = states[0][0].shape[1], states[0][0].shape[3]
        query = torch.empty(batch, model.config.num_attention_heads, dim, device="cuda")
        self.pools = []
        for keys, values in states:
            pool = [
                torch.empty(
                    batch * pages, heads, PAGE_TOKENS, dim, dtype=torch.bfloat16, device="cuda"
                )
                for _ in range(2)
            ]
            for part, source in zip(pool, (keys, values), strict=True):
                paged = source[0].view(heads, -1, PAGE_TOKENS, dim).transpose(0, 1)
                part.view(batch, pages, heads, PAGE_TOKENS, dim)[:, : pages - 1] = paged
                part.view(batch, pages, heads, PAGE_TOKENS, dim)[:, pages - 1] = 0
            self.pools.append(pool)
        self.table = torch.arange(batch * pages, dtype=torch.int32, device="cuda").view(batch, -1)
        self.query, self.heads, self.kernel = query.bfloat16(), heads, None
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")
        self.position = torch.full((batch, 1), self.length, device="cuda")
        self.last_page = self.table[:, -1].long()
        self.graph = None

    def attend(self, module, query, keys, values, mask, **options):
        pool = self.pools[module.layer_idx]
        # the newest state goes to the first place of the last page
        pool[0][self.last_page, :, 0] = keys[:, :, 0]
        pool[1][self.last_page, :, 0] = values[:, :, 0]
        kernel = self.kernel
        kernel.query, kernel.keys, kernel.values = query[:, :, 0].contiguous(), *pool
        kernel.out = torch.empty(query.shape[0], query.shape[1], query.shape[3], device="cuda")
        output = kernel(self.table, self.length + PAGE_TOKENS, options["scaling"])
        return output.to(query.dtype)[:, None], None

    @torch.no_grad()
    def forward(self):
        cache = Cache(layers=[PassThrough() for _ in self.pools])
        output = self.model(
            input_ids=self.tokens,
            past_key_values=cache,
            position_ids=self.position,
            use_cache=True,
            logits_to_keep=1,
        )
        self.tokens.copy_(output.logits[:, -1].argmax(-1, keepdim=True))

    def capture(self, config):
        self.kernel = DensePaged(self.query, *self.pools[0], self.heads, config[:3], config[3])
        ALL_ATTENTION_FUNCTIONS.register("dense_paged", self.attend)
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation("dense_paged")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.forward()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.forward()
        self.model.set_attn_implementation(before)


def step_times(step, count):
    """Milliseconds of each step between events, and of all steps together by the clock."""
    for _ in range(WARM_UP):
        step()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    began = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    total = 1e3 * (time.perf_counter() - began)
    each = [a.elapsed_time(b) for a, b in pairwise(events)]
    return each, total


def measure_dense(model, states, batch):
    """Best configuration of the dense kernel, as a record."""
    best = None
    decoder = DenseDecoder(model, states, batch)
    for config in DENSE_CONFIGS:
        decoder.capture(config)
        each, _ = step_times(decoder.graph.replay, 8)
        if best is None or statistics.median(each) < best[0]:
            best = (statistics.median(each), config, decoder.graph)
        decoder.graph = None
    each, total = step_times(best[2].replay, DENSE_STEPS)
    return {
        "step_ms": statistics.median(each),
        "tokens_per_s": batch * DENSE_STEPS / total * 1e3,
        "config": best[1],
        "kv_bytes": sum(part.nbytes for pool in decoder.pools for part in pool),
    }


def fill_cache(cache, states, batch):
    """Write so many copies of the prompt to the coded cache; the seconds it took."""
    engine, length = cache.engine, states[0][0].shape[2]
    cache.reset()

    def write():
        positions = torch.arange(length).expand(batch, -1)
        engine.begin(StepTokens(torch.ones(batch, length, dtype=torch.bool), positions))
        for layer, (keys, values) in enumerate(states):
            engine.update(layer, keys.expand(batch, -1, -1, -1), values.expand(batch, -1, -1, -1))
            engine.settle(layer, keys)
        engine.finish()

    return timed(write)[0]


def measure_codes(model, cache, states, batch):
    """Decode from codes, as a record."""
    try:
        seconds = fill_cache(cache, states, batch)
        ledger = cache.ledger()
        decoder = GraphDecoder(model, cache, max_new_tokens=STEPS + WARM_UP + 8)
        capture_s, _ = timed(decoder.step)
        each, total = step_times(decoder.step, STEPS)
        num_states = batch * states[0][0].shape[2] * len(states) * states[0][0].shape[1]
        return {
            "step_ms": statistics.median(each),
            "slowest_step_ms": max(each),
            "tokens_per_s": batch * STEPS / total * 1e3,
            "t_allocate_write_s": seconds,
            "capture_s": capture_s,
            "kv_bytes": ledger.total,
            "bytes_per_state": ledger.total / num_states,
        }
    finally:
        cache.reset()


def calibrated_cache(model):
    """A cache that has calibrated itself on a random prompt, empty again."""
    tokens = torch.randint(0, model.config.vocab_size, (1, 2048), device="cuda")
    cache = SphericalCache.for_model(model, tiers=TIER)
    with torch.no_grad():
        model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.reset()
    return cache


def environment(commit):
    import transformers
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
        },
        "commit": commit,
        "command": "PYTHONPATH=src python3 benchmarks/gpu_end_to_end.py",
    }


def try_to(work):
    """A record, or why there is none."""
    try:
        return work()
    except torch.OutOfMemoryError:
        return {"error": "does not fit in memory"}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--contexts", type=int, nargs="*", default=[n for n, _ in POINTS])
    parser.add_argument("--no-dense", action="store_true", help="skip the dense cache")
    parser.add_argument("--no-prefill", action="store_true", help="random states, no prompt")
    args = parser.parse_args()
    began = time.perf_counter()
    build_s, model = timed(lambda: build_llama(num_hidden_layers=args.layers))
    calibrate_s, cache = timed(lambda: calibrated_cache(model))
    # kernels and tables are made before anything is timed
    _, states = prefill(model, torch.randint(0, 1000, (1, 2048), device="cuda"))
    fill_s = fill_cache(cache, states, 1)
    print(f"built in {build_s:.1f} s, calibrated in {calibrate_s:.1f}, filled in {fill_s:.1f}")
    records = []
    for context in args.contexts:
        batches = dict(POINTS)[context]
        seconds = None
        if args.no_prefill:
            states = random_states(model.config, context)
        else:
            tokens = torch.randint(0, model.config.vocab_size, (1, context), device="cuda")
            seconds, states = prefill(model, tokens)
        print(f"{time.perf_counter() - began:.0f} s: states of {context} tokens", flush=True)
        for batch in batches:
            dense = {"error": "not run"}
            if not args.no_dense:
                dense = try_to(lambda b=batch, s=states: measure_dense(model, s, b))
                print(f"{time.perf_counter() - began:.0f} s: dense {dense}", flush=True)
            ours = try_to(lambda b=batch, s=states: measure_codes(model, cache, s, b))
            record = {
                "shape": "Llama-3.1-8B",
                "layers": args.layers,
                "context": context,
                "batch": batch,
                "tier": TIER,
                "t_prefill_s": seconds,
                "t_calibrate_s": calibrate_s,
                "dense": dense,
                "codes": ours,
            }
            if "step_ms" in dense and "step_ms" in ours:
                record["ratio"] = ours["tokens_per_s"] / dense["tokens_per_s"]
            records.append({**record, **environment(args.commit)})
            print(json.dumps({k: v for k, v in record.items() if k != "shape"}), flush=True)
            if args.output:
                args.output.parent.mkdir(parents=True, exist_ok=True)
                args.output.write_text(json.dumps(records, indent=1) + "\n")
        del states
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
