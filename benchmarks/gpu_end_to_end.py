# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a whole model: dense bfloat16 cache against angle codes.

``PYTHONPATH=src python3 benchmarks/gpu_end_to_end.py --output results/gpu/end_to_end.json``

Models with random weights in known shapes; norms, rotation and gate are one kernel each. A prompt
is timed with SDPA and a dense cache, and once more into the coded cache, writing included. Then
both caches are filled with the same random states, layer by layer, a copy per sequence of the
batch. Ours decodes through ``model.generate``, as users do, which captures its steps by itself.
The dense side runs the same modules inside one CUDA graph per token with a split-KV paged kernel
at the limit of HBM, the best of a few configurations, and pays for no ``generate``; where a batch
does not fit in bfloat16, the largest that does is measured too. ``eager_ms`` is a step of
``generate`` with transformers' own dense cache, where that fits.

What happens once: ``t_calibrate_s`` fits codebooks (a file keeps them); ``t_set_up_s`` is what the
first short prompt pays beyond the same one later, to compile or load kernels and to build search
tables. What every prompt pays: ``t_prefill_s``, ``t_allocate_write_s`` (its states are on the GPU;
the clock stops while they are made) and ``t_capture_s`` (the first steps of ``generate``: page
lists, decode tables, self-test, CUDA graph).
``--profile`` prints where the time of a step goes. ``--budget 10%`` measures the controller instead
of one tier, its refreshes among the steps; its prompt is written with random queries.
``--copies 131072x64`` goes on with a batch in which each row beyond those written has copies of the
pages of one of them; no page is shared. ``steps_ahead`` says how many steps were launched before
``generate`` asked for them, and how many of those it asked for; ``host_ms`` passes between the end
of a step and the launch of the next where that one was not ahead: ``generate`` and ours.
``--not-ahead`` leaves all steps to ``generate``.
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
from gpu_dense_model import DenseDecoder, RandomStates
from gpu_models import SHAPES, build_model
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from sphkv import CacheOptions, RetentionOptions, SphericalCache
from sphkv.cache.step import StepTokens
from sphkv.store.pool import EncodedPages, LayerChange

TIER = "k2v4"
LLAMA, QWEN, GPT_OSS = SHAPES
POINTS = {
    LLAMA: ((8192, 1), (8192, 8), (32768, 1), (32768, 8), (131072, 1), (131072, 8)),
    QWEN: ((32768, 8), (131072, 1)),
    GPT_OSS: ((32768, 8), (131072, 1)),
}
# keys per tile, warps, pipeline stages, splits: the winners over longer searches
DENSE_CONFIGS = ((128, 8, 3, 32), (64, 4, 3, 16), (64, 4, 4, 32), (64, 4, 3, 64))
DENSE_STEPS, STEPS, WARM_UP = 32, 256, 4
# what wins of them at some points, for those who have no time to search
DENSE_WINNERS = {
    (32768, 8): (64, 4, 4, 32),
    (131072, 1): (128, 8, 3, 32),
    (131072, 7): (64, 4, 3, 64),
}
# steps of a batch of copied rows
COPIED_STEPS = 256
# steps of generate before the captured one runs by itself, and of an eager one
SETTLE, EAGER_STEPS = 6, 8
SET_UP_TOKENS = 4096
# a prompt before the one that is timed is no longer than this
WARM_TOKENS = 32768
# newest tokens whose queries a controller decides by
WATCHED = 512
# what a dense batch needs beside its pages: a layer of states, buffers of a step
SPARE_BYTES = 6 << 30


def timed(work):
    """Seconds of some GPU work, and its result."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return time.perf_counter() - began, result


@torch.no_grad()
def prefill(model, context, cache):
    """Seconds of a random prompt into a cache."""
    tokens = torch.randint(0, model.config.vocab_size, (1, context), device="cuda")
    return timed(
        lambda: model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    )[0]


def measure_prefill(model, cache, context):
    """Seconds of a prompt into a dense cache, and into codes; both are warm."""
    record = {}
    for name, is_coded in (("t_prefill_s", False), ("t_prefill_coded_s", True)):
        for length in (min(context, WARM_TOKENS), context):
            cache.reset()
            into = cache if is_coded else DynamicCache(config=model.config)
            record[name] = prefill(model, length, into)
            del into
            torch.cuda.empty_cache()
    cache.reset()
    return record


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
    busy = sum(sum(each) for each in times.values()) / count / 1e3
    print(f"  {name} {busy:7.3f} ms in all, kernels that overlap counted each")
    for kernel, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:24]:
        ms, us = sum(each) / count / 1e3, sum(each) / len(each)
        print(f"  {name} {ms:7.3f} ms {len(each) / count:6.1f}x {us:7.2f} us {kernel}", flush=True)


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


def measure_dense(model, states, batch, is_profiled, is_quick=False):
    """Best configuration of the dense kernel, as a record."""
    best = None
    decoder = DenseDecoder(model, states, batch)
    known = DENSE_WINNERS.get((states.context, batch)) if is_quick else None
    for config in DENSE_CONFIGS if known is None else (known,):
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
        "t_decode_s": total / 1e3,
        "steps": DENSE_STEPS,
        "config": best[1],
        "kv_bytes": sum(part.nbytes for pool in decoder.pools for part in pool),
    }


def fill_cache(cache, states, batch):
    """Write so many copies of the prompt to the coded cache; the seconds the cache took."""
    engine, length = cache.engine, states.context
    cache.reset()
    positions = torch.arange(length).expand(batch, -1)
    step = StepTokens(torch.ones(batch, length, dtype=torch.bool), positions)
    seconds, _ = timed(lambda: engine.begin(step))
    for layer in range(states.layers):
        keys, values = (part.expand(batch, -1, -1, -1) for part in states.layer(layer))

        def write(layer=layer, keys=keys, values=values):
            engine.update(layer, keys, values)
            group = engine.config.geometry.group_size
            newest = keys[:, :, -WATCHED:].repeat_interleave(group, 1)
            engine.end_layer(layer, newest + torch.randn_like(newest))

        seconds += timed(write)[0]
    return seconds + timed(engine.finish)[0]


def copy_rows(cache, batch):
    """Make so many rows of those that a cache holds, each with pages of its own; the seconds."""
    engine = cache.engine

    def work():
        held = len(engine.rows)
        engine.select_rows(torch.arange(batch) % held)
        for row in engine.rows[held:]:
            for layer in range(engine.config.geometry.num_layers):
                unshare(engine.store, row.sequence, layer)

    seconds, _ = timed(work)
    store = engine.store
    for row in engine.rows:
        owners = store.allocator.refcounts(store.table(row.sequence, 0).all_ids())
        assert bool((owners == 1).all()), "pages are shared"
    return seconds


def unshare(store, sequence, layer):
    """Copy the pages of a layer, byte by byte, and give up those that others hold too."""
    table, pending = store.table(sequence, layer), []
    for group in store.pages(sequence, layer, device="cpu"):
        ids, heads = group.flat_ids(), group.head_ids()
        whole = (slice(0, group.layout.page_bytes),)
        _, pages = store.allocator._gather(ids, lambda _, whole=whole: whole)
        key = (group.layout.tier_id, group.layout.position_mode)
        counts = store.allocator.counts(ids)
        pending.append(EncodedPages.of(key, heads, counts, pages, len(table.num_pages)))
    store._pool.commit([LayerChange(table, removed=table.all_ids(), pending=pending)])


class StepClock(StoppingCriteria):
    """Notes when every step of ``generate`` ends, and never stops it."""

    def __init__(self):
        self.ends = []

    def __call__(self, input_ids, scores, **kwargs):
        # the device may be in the midst of the next step already, on a stream of its own
        torch.cuda.current_stream().synchronize()
        self.ends.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def generate(model, cache, count, batch):
    """Milliseconds of every step of ``generate`` behind a filled cache, the first ones included.

    Also those between the end of a step and the launch of the next one that is replayed, unless it
    was launched ahead.
    """
    context = cache.get_seq_length()
    tokens = torch.randint(1, model.config.vocab_size, (batch, context + 1), device="cuda")
    # random weights mean nothing by the end of a text, and looking for it takes time
    model.generation_config.eos_token_id = None
    clock, waits, replay = StepClock(), [], torch.cuda.CUDAGraph.replay
    asked, captured = torch.cuda.current_stream(), getattr(cache, "_captured", None)

    def noted(graph):
        is_step = captured is not None and graph is captured._graph
        # what is launched ahead waits for no host
        if clock.ends and is_step and torch.cuda.current_stream() == asked:
            waits.append(1e3 * (time.perf_counter() - clock.ends[-1]))
        replay(graph)

    torch.cuda.CUDAGraph.replay = noted
    began = time.perf_counter()
    try:
        model.generate(
            tokens, past_key_values=cache, do_sample=False, max_new_tokens=count,
            stopping_criteria=StoppingCriteriaList([clock]), pad_token_id=0,
        )  # fmt: skip
    finally:
        torch.cuda.CUDAGraph.replay = replay
    if len(clock.ends) != count:
        raise RuntimeError(f"generate made {len(clock.ends)} tokens instead of {count}")
    return [1e3 * (b - a) for a, b in pairwise([began, *clock.ends])], waits


def measure_steps(model, cache, batch, steps):
    """Steps of ``generate`` behind a filled cache, as a record."""
    ledger, tokens = cache.ledger(), sum(cache.engine.num_tokens)
    # what filling left behind is not looked through beside a step
    gc.collect()
    guesses = cache._captured.guesses
    launched, right = guesses.num_launched, guesses.num_right
    each, waits = generate(model, cache, steps + SETTLE, batch)
    if cache.engine.graph is None:
        raise RuntimeError("the steps of generate were not captured")
    first, each = each[:SETTLE], each[SETTLE:]
    geometry = cache.config.geometry
    slowest = sorted(range(len(each)), key=lambda at: -each[at])[:20]
    return {
        "batch": batch,
        "step_ms": statistics.median(each),
        "p95_step_ms": sorted(each)[int(0.95 * len(each))],
        "slowest_step_ms": max(each),
        "host_ms": statistics.median(waits) if waits else None,
        "steps_ahead": {
            "launched": guesses.num_launched - launched,
            "right": guesses.num_right - right,
        },
        "slow_steps": [(at, each[at]) for at in slowest],
        "peak_share": cache.engine.peak_share,
        "refreshes": sum(getattr(row.residency, "num_rebalances", 0) for row in cache.engine.rows),
        "tiers": cache.describe().tiers,
        "tokens_per_s": batch * len(each) / sum(each) * 1e3,
        "t_capture_s": (sum(first) - SETTLE * statistics.median(each)) / 1e3,
        "steps": len(each),
        "kv_bytes": ledger.total,
        "table_bytes": ledger.tables,
        "bytes_per_state": ledger.total / (tokens * geometry.num_layers * geometry.num_kv_heads),
    }


def measure_codes(model, cache, states, batch, args):
    """Decode from codes through ``generate``, as a record."""
    try:
        seconds = fill_cache(cache, states, batch)
        store = cache.engine.store
        looks = [timed(lambda: store.page_list(0))[0] for _ in range(4)] if args.budget else [0.0]
        record = measure_steps(model, cache, batch, args.steps)
        record |= {"t_allocate_write_s": seconds, "t_list_pages_s": min(looks)}
        if args.profile:
            # two steps of a call come before the first that is replayed
            few, many = 4, 12
            print_profile("few", lambda: generate(model, cache, few, batch), count=1)
            print_profile("many", lambda: generate(model, cache, many, batch), count=1)
        if args.copies and batch > 1 and states.context == args.copies[0]:
            print(json.dumps(record), flush=True)
            record["copies"] = try_to(lambda: measure_copies(model, cache, args.copies[1]))
        return record
    finally:
        cache.reset()
        cache._captured.forget()


def measure_copies(model, cache, batch):
    """Steps of a batch that is made of the rows of a cache, as a record."""
    seconds = copy_rows(cache, batch)
    print(f"{batch} rows after {seconds:.1f} s", flush=True)
    return {**measure_steps(model, cache, batch, COPIED_STEPS), "t_copy_rows_s": seconds}


def measure_eager(model, states, batch):
    """A step of ``generate`` with transformers' own dense cache, in milliseconds."""
    dense = DynamicCache(config=model.config)
    for layer in range(states.layers):
        keys, values = (part.expand(batch, -1, -1, -1) for part in states.layer(layer))
        dense.update(keys.to(model.dtype), values.to(model.dtype), layer)
    return statistics.median(generate(model, dense, EAGER_STEPS, batch)[0][2:])


def calibrated_cache(model, args):
    """A cache that has calibrated itself on a random prompt, empty again."""
    tokens = torch.randint(0, model.config.vocab_size, (1, SET_UP_TOKENS), device="cuda")
    retention = RetentionOptions(page_tokens=args.page_tokens)
    options = CacheOptions(steps_ahead=not args.not_ahead)
    cache = (
        SphericalCache.for_model(model, tiers=TIER, options=options)
        if args.budget is None
        else SphericalCache.for_model(
            model, args.budget, retention=retention, tiers=args.tiers, options=options
        )
    )
    with torch.no_grad():
        model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.reset()
    return cache


def short_prompt(model, cache):
    """Seconds to write a short prompt and to capture a step behind it."""
    seconds = fill_cache(cache, RandomStates(model.config, SET_UP_TOKENS), 1)
    seconds += timed(lambda: generate(model, cache, 4, 1))[0]
    cache.reset()
    return seconds


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


def batches_of(states, batch, has_dense):
    """Batches to measure, and whether bfloat16 has room: the largest that has comes first."""
    torch.cuda.empty_cache()
    room = (torch.cuda.mem_get_info()[0] - SPARE_BYTES) // states.dense_bytes
    if not has_dense or room >= batch:
        return ((batch, has_dense),)
    return ((room, True), (batch, False)) if room else ((batch, False),)


def measure_point(model, cache, states, batch, has_room, args):
    """Both sides of one batch, as a record."""
    dense = {"error": "not run" if args.no_dense else "does not fit in memory"}
    if has_room:
        dense = try_to(lambda: measure_dense(model, states, batch, args.profile, args.quick_dense))
    ours = try_to(lambda: measure_codes(model, cache, states, batch, args))
    record = {"batch": batch, "dense": dense, "codes": ours}
    if has_room and args.eager:
        record["eager_ms"] = try_to(lambda: measure_eager(model, states, batch))
    if "step_ms" in dense and "step_ms" in ours:
        record["ratio"] = ours["tokens_per_s"] / dense["tokens_per_s"]
    return record


def measure_shape(shape, args):
    """Records of one model, as they come."""
    began = time.perf_counter()
    build_s, model = timed(lambda: build_model(shape, num_layers=args.layers))
    calibrate_s, cache = timed(lambda: calibrated_cache(model, args))
    first_s, later_s = (short_prompt(model, cache) for _ in range(2))
    print(f"{shape}: built {build_s:.1f} s, calibrated {calibrate_s:.1f}, set up {first_s:.1f}")
    common = {
        "shape": shape,
        "layers": model.config.num_hidden_layers,
        "layers_of_shape": SHAPES[shape]["num_hidden_layers"],
        "tier": TIER if args.budget is None else None,
        "budget": args.budget,
        "page_tokens": args.page_tokens,
        "t_calibrate_s": calibrate_s,
        "t_set_up_s": first_s - later_s,
    }
    prompts = {}
    for context, wanted in args.points or POINTS[shape]:
        if not args.points and context not in args.contexts:
            continue
        if context not in prompts:
            prompts[context] = {} if args.no_prefill else measure_prefill(model, cache, context)
            print(f"{time.perf_counter() - began:.0f} s: {context} {prompts[context]}", flush=True)
        states = RandomStates(model.config, context)
        for batch, has_room in batches_of(states, wanted, not args.no_dense):
            point = measure_point(model, cache, states, batch, has_room, args)
            print(f"{time.perf_counter() - began:.0f} s: {context} {json.dumps(point)}", flush=True)
            yield {**common, "context": context, **prompts[context], **point}
    cache.detach()


def read_point(text):
    """Tokens and sequences of a text such as ``32768x8``."""
    return tuple(map(int, text.split("x")))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--contexts", type=int, nargs="*", default=[8192, 32768, 131072])
    parser.add_argument("--profile", action="store_true", help="print where a step's time goes")
    parser.add_argument("--no-dense", action="store_true", help="skip the dense cache")
    parser.add_argument("--eager", action="store_true", help="time transformers' own cache too")
    parser.add_argument("--no-prefill", action="store_true", help="do not time the prompt")
    parser.add_argument("--budget", help="let the controller decide under this budget")
    parser.add_argument("--page-tokens", type=int, help="states of the controller's coded pages")
    parser.add_argument("--tiers", nargs="*", help="the tiers that it chooses from")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--not-ahead", action="store_true", help="launch no step ahead")
    parser.add_argument(
        "--points", type=read_point, nargs="*", help="tokens x sequences instead of the usual ones"
    )
    parser.add_argument("--copies", type=read_point, help="tokens x sequences of a larger batch")
    parser.add_argument("--quick-dense", action="store_true", help="known best kernels only")
    args = parser.parse_args()
    records = []
    for shape in args.shapes:
        for record in measure_shape(shape, args):
            records.append({**record, **environment(args.commit)})
            if args.output:
                args.output.parent.mkdir(parents=True, exist_ok=True)
                args.output.write_text(json.dumps(records, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
