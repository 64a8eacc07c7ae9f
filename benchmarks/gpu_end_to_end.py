# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a whole model: dense bfloat16 cache against angle codes.

``PYTHONPATH=src python3 benchmarks/gpu_end_to_end.py --output results/gpu/end_to_end.json``

A Llama-3.1-8B with random weights; norms, rotation and gate are one kernel each. The time of a
prompt is measured with SDPA. Then both caches are filled with the same random states, layer by
layer, a copy per sequence of the batch, and both sides decode with the same modules inside one
CUDA graph per token; only attention differs. The dense side is a split-KV paged kernel at the limit
of HBM, the best of a few configurations. ``--profile`` prints where the time of a step goes.
"""

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import torch
from gpu_baselines import PAGE_TOKENS, DensePaged, append_state
from gpu_models import build_llama
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sphkv import SphericalCache
from sphkv.cache.step import StepTokens
from sphkv.integrations.transformers.graph import GraphDecoder

TIER = "k2v4"
# 8 sequences of 128K tokens take 137 GB in bfloat16, more than the GPU has beside the weights
POINTS = ((8192, (1, 8)), (32768, (1, 8)), (131072, (1, 4, 6, 8)))
# keys per tile, warps, pipeline stages, splits: the winners over longer searches
DENSE_CONFIGS = ((128, 8, 3, 32), (64, 4, 3, 16), (64, 4, 4, 32), (64, 4, 3, 64))
DENSE_STEPS, STEPS, WARM_UP = 32, 256, 4


def timed(work):
    """Seconds of some GPU work, and its result."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return time.perf_counter() - began, result


def prefill(model, context):
    """Seconds of the model's own attention over a random prompt; the second run counts."""
    tokens = torch.randint(0, model.config.vocab_size, (1, context), device="cuda")
    with torch.no_grad():
        for length in (1024, context):
            cache = DynamicCache(config=model.config)
            seconds, _ = timed(
                lambda n=length, c=cache: model(
                    input_ids=tokens[:, :n], past_key_values=c, use_cache=True, logits_to_keep=1
                )
            )
            del cache
    return seconds


class RandomStates:
    """Keys and values of a prompt, made when a layer asks: all at once would not fit."""

    def __init__(self, config, context):
        self.context, self.layers = context, config.num_hidden_layers
        self.heads, self.dim = config.num_key_value_heads, config.head_dim

    def layer(self, layer):
        generator = torch.Generator("cuda").manual_seed(layer)
        shape = (1, self.heads, self.context, self.dim)
        return tuple(
            torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator)
            for _ in range(2)
        )


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
        self.length = states.context
        pages = self.length // PAGE_TOKENS + 1
        heads, dim = states.heads, states.dim
        query = torch.empty(batch, model.config.num_attention_heads, dim, device="cuda")
        self.pools = []
        for layer in range(states.layers):
            keys, values = states.layer(layer)
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
        self.last_page = self.table[:, -1].contiguous()
        self.graph = None

    def attend(self, module, query, keys, values, mask, **options):
        pool = self.pools[module.layer_idx]
        append_state(keys[:, :, 0], values[:, :, 0], pool, self.last_page)
        kernel = self.kernel
        kernel.query, kernel.keys, kernel.values = query[:, :, 0].contiguous(), *pool
        kernel.out = torch.empty_like(kernel.query)
        output = kernel(self.table, self.length + PAGE_TOKENS, options["scaling"])
        return output[:, None], None

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
        # the registry must not keep the pages of this decoder alive
        ALL_ATTENTION_FUNCTIONS.register("dense_paged", None)


def print_profile(name, step, count=3):
    """Where the time of a step goes, kernel by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    times = defaultdict(list)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:60]].append(event.device_time)
    for kernel, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:12]:
        ms, us = sum(each) / count / 1e3, sum(each) / len(each)
        print(f"  {name} {ms:7.3f} ms {len(each) // count:4d}x {us:7.2f} us {kernel}")


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


def measure_dense(model, states, batch, is_profiled):
    """Best configuration of the dense kernel, as a record."""
    best = None
    decoder = DenseDecoder(model, states, batch)
    for config in DENSE_CONFIGS:
        decoder.capture(config)
        each, _ = step_times(decoder.graph.replay, 8)
        if best is None or statistics.median(each) < best[0]:
            # the graph writes into the kernel's buffers, so they stay alive together
            best = (statistics.median(each), config, decoder.graph, decoder.kernel)
        decoder.graph = None
    if is_profiled:
        print_profile("dense", best[2].replay)
    each, total = step_times(best[2].replay, DENSE_STEPS)
    return {
        "step_ms": statistics.median(each),
        "tokens_per_s": batch * DENSE_STEPS / total * 1e3,
        "config": best[1],
        "kv_bytes": sum(part.nbytes for pool in decoder.pools for part in pool),
    }


def fill_cache(cache, states, batch):
    """Write so many copies of the prompt to the coded cache; the seconds it took."""
    engine, length = cache.engine, states.context
    cache.reset()

    def write():
        positions = torch.arange(length).expand(batch, -1)
        engine.begin(StepTokens(torch.ones(batch, length, dtype=torch.bool), positions))
        for layer in range(states.layers):
            keys, values = states.layer(layer)
            engine.update(layer, keys.expand(batch, -1, -1, -1), values.expand(batch, -1, -1, -1))
            engine.settle(layer, keys)
        engine.finish()

    return timed(write)[0]


def measure_codes(model, cache, states, batch, is_profiled):
    """Decode from codes, as a record."""
    try:
        seconds = fill_cache(cache, states, batch)
        ledger = cache.ledger()
        decoder = GraphDecoder(model, cache, max_new_tokens=STEPS + WARM_UP + 16)
        capture_s, _ = timed(decoder.step)
        if is_profiled:
            print_profile("codes", decoder.step)
        each, total = step_times(decoder.step, STEPS)
        num_states = batch * states.context * states.layers * states.heads
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
    parser.add_argument("--profile", action="store_true", help="print where a step's time goes")
    parser.add_argument("--no-dense", action="store_true", help="skip the dense cache")
    parser.add_argument("--no-prefill", action="store_true", help="do not time the prompt")
    args = parser.parse_args()
    began = time.perf_counter()
    build_s, model = timed(lambda: build_llama(num_hidden_layers=args.layers))
    calibrate_s, cache = timed(lambda: calibrated_cache(model))
    # kernels and tables are made before anything is timed
    fill_s = fill_cache(cache, RandomStates(model.config, 2048), 1)
    print(f"built in {build_s:.1f} s, calibrated in {calibrate_s:.1f}, filled in {fill_s:.1f}")
    records = []
    for context in args.contexts:
        batches = dict(POINTS)[context]
        seconds = None if args.no_prefill else prefill(model, context)
        torch.cuda.empty_cache()
        states = RandomStates(model.config, context)
        print(f"{time.perf_counter() - began:.0f} s: prefill of {context} {seconds}", flush=True)
        for batch in batches:
            dense = {"error": "not run"}
            if not args.no_dense:
                dense = try_to(lambda b=batch, s=states: measure_dense(model, s, b, args.profile))
                print(f"{time.perf_counter() - began:.0f} s: dense {dense}", flush=True)
            ours = try_to(lambda b=batch, s=states: measure_codes(model, cache, s, b, args.profile))
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
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
