# SPDX-License-Identifier: Apache-2.0
"""GPU kernels over real stores against the float64 answer.

``PYTHONPATH=src python3 benchmarks/gpu_check.py [--only CASE | --skip CASE] [--output FILE]``;
several cases run at a time.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import triton

from sphkv.attention.api import get_backend
from sphkv.attention.cuda.backend import CudaBackend
from sphkv.attention.cuda.pages import FragmentCodec, FragmentOrder
from sphkv.attention.reference import ReferenceBackend
from sphkv.attention.request import AttentionOptions, DecodeRequest
from sphkv.attention.triton.encode import TritonEncoder
from sphkv.core.tiers import TierSpec, TierTable, coded_tier
from sphkv.testing.attention_cases import CASES as TABLE
from sphkv.testing.attention_cases import assert_attention, make_batch
from sphkv.testing.attention_cases import make_request as make_one
from sphkv.testing.cases import CacheCase, build_store, dense_oracle, random_states, rope_of

DROP = TierSpec("drop", "drop", 0.0, 0, 0)
DENSE = TierSpec("max", "dense", 16.0, 16, 16)
SERVED = TierTable((DROP, coded_tier(1.0, 2), coded_tier(2.0, 3), coded_tier(3.0, 4), DENSE))
VALUES = TierTable((DROP, coded_tier(2.0, 4), coded_tier(2.0, 8), coded_tier(4.0, 16), DENSE))
WIDE = CacheCase(tiers=SERVED, mix="k2v3", head_dim=128, group_size=4, num_tokens=2000)
PLAIN = AttentionOptions(scale=0.1)
CASES = {
    "mixed": (CacheCase(), PLAIN, 1),
    "runs": (CacheCase(tiers=SERVED, mix="runs", num_tokens=700), PLAIN, 1),
    "d80": (CacheCase(mix="k2v3", head_dim=80), PLAIN, 1),
    "d256": (CacheCase(mix="k1v2", head_dim=256, group_size=2), PLAIN, 1),
    "wide": (WIDE, PLAIN, 1),
    "queries": (WIDE, PLAIN, 5),
    "window": (WIDE, AttentionOptions(scale=0.1, window=300), 3),
    "softcap": (WIDE, AttentionOptions(scale=0.3, softcap=5.0), 1),
    "k3v4": (CacheCase(tiers=SERVED, mix="k3v4", head_dim=128, num_tokens=900), PLAIN, 1),
    "k1v2": (CacheCase(tiers=SERVED, mix="k1v2", num_tokens=900, group_size=8), PLAIN, 1),
    "v8": (CacheCase(tiers=VALUES, mix="k2v8", head_dim=128, num_tokens=900), PLAIN, 1),
    "v16": (CacheCase(tiers=VALUES, mix="k4v16", num_tokens=900), PLAIN, 1),
}
# Steps that are compared with those launched ahead, what else is done then, how long each sleeps.
GREEDY_STEPS, STAGES = 320, ("greedy", "sampled", "crop", "new prompt")
SLEEP_CYCLES = 3_000_000
# Half-precision products of the Hopper kernel, float32 of the portable one.
BOUND = {"cuda": 5e-3, "triton": 1e-5, "reference": 1e-5}


def make_request(case, options, num_queries, store):
    end = store.num_tokens(0)
    first = max(0, end - num_queries)
    _, _, query = random_states(case.geometry(), rope_of(store), end - first, first=first, seed=50)
    positions = torch.arange(first, end)
    return DecodeRequest(store, 0, 0, query.cuda(), positions, options)


def differing_codes(store, other):
    """Share of page bytes in which two stores of the same states differ."""
    total = different = 0
    for one, two in zip(store.pages(0, 0), other.pages(0, 0), strict=True):
        left, right = store.view(one).pages.cpu(), other.view(two).pages.cpu()
        different += int((left != right).sum())
        total += left.numel()
    return different / max(1, total)


def check(name):
    """Records of a case, one per backend."""
    case, options, num_queries = CASES[name]
    on_cpu = build_store(case)
    records = []
    for backend in (ReferenceBackend(), get_backend("triton"), get_backend("cuda")):
        store = build_store(
            case,
            device="cuda",
            order=backend.page_order,
            kernels=backend.page_codec,
        )
        request = make_request(case, options, num_queries, store)
        expected = dense_oracle(request)
        got = backend.attend(request)
        lse = ReferenceBackend().attend(request).lse
        error = float((got.output - expected).norm() / expected.norm())
        lse_error = float((got.lse - lse).abs().max())
        ties = differing_codes(store, on_cpu)
        total = sum(tensor.nbytes for tensor in store.live_tensors())
        ok = error <= BOUND[backend.name] and total == store.ledger().total
        records.append(
            {
                "case": name,
                "backend": backend.name,
                "error": error,
                "lse_error": lse_error,
                "bytes_unlike_cpu": ties,
                "is_right": ok,
            }
        )
        print(
            f"{'ok ' if ok else 'BAD'} {name:8s} {backend.name:9s} error {error:.1e} "
            f"lse {lse_error:.1e} bytes unlike the CPU's {ties:.1e}",
            flush=True,
        )
    return records


def check_table():
    """Every case that all backends share, single sequences and batches, by the rule of tests."""
    precision = {"reference": "float32", "triton": "float32", "cuda": "half"}
    records = []
    for backend in (ReferenceBackend(), get_backend("triton"), get_backend("cuda")):
        for make, (name, case) in itertools.product((make_one, make_batch), TABLE.items()):
            request = make(case, backend, device="cuda")
            sinks = case.sink_logits()
            try:
                assert_attention(
                    request, backend, precision=precision[backend.name], sink_logits=sinks
                )
                wrong = ""
            except AssertionError as error:
                wrong = str(error)
            name = f"{name}, {make.__name__}"
            print(f"{'BAD' if wrong else 'ok '} {name} {backend.name} {wrong}", flush=True)
            records.append({"case": name, "backend": backend.name, "is_right": not wrong})
    return records


def check_demotion():
    """Pages of mixed tiers coded again at a lower one, by kernels and by the codec."""
    kinds = {
        "demotion, fragments": (CacheCase(tiers=SERVED, head_dim=128), "cuda"),
        "demotion, values": (CacheCase(tiers=VALUES, head_dim=128), "cuda"),
        "demotion, 64": (CacheCase(tiers=SERVED), "cuda"),
        "demotion, small pages": (CacheCase(), "cuda"),
        "demotion, portable": (CacheCase(), "triton"),
    }
    for case, _ in kinds.values():
        # all at once, while codebooks are fitted
        CudaBackend().prepare([case.tiers], case.geometry())
    return [compare_demotion(name, *kind) for name, kind in kinds.items()]


def compare_demotion(name, case, backend_name):
    """Positions and counts must be alike, and codes but for those that rounding decides."""
    case = replace(case, mix="runs", num_tokens=3008, num_layers=2)
    stores, decoded = [], []
    for is_fused in (True, False):
        order = FragmentOrder() if backend_name == "cuda" else None
        kernels = TritonEncoder() if order is None else FragmentCodec(order)
        # what is decoded by a kernel is noted, or there is nothing
        decode = kernels.decode_runs
        kernels.decode_runs = lambda *given, decode=decode: decoded.append(decode(*given))
        if not is_fused:
            kernels.decodes = lambda *_: False
        store = build_store(case, device="cuda", order=order, kernels=kernels)
        for tier_id in (2, 1):
            listed = store.page_list(0)
            chosen = (listed.tier_ids > tier_id) & ~listed.is_protected
            ids = listed.page_ids[chosen].cpu()
            store.demote_listed(0, listed.layer_ids[chosen].cpu(), ids, tier_id)
        stores.append(store)
    unlike, is_same = [], bool(decoded)
    for layer in range(2):
        groups = (store.pages(0, layer) for store in stores)
        for one, other in zip(*groups, strict=True):
            a, b = stores[0].view(one), stores[1].view(other)
            a, b = (
                view.select((group.head_ids() << 32 | view.positions()[:, 0]).argsort())
                for view, group in ((a, one), (b, other))
            )
            is_same &= torch.equal(a.positions() * a.live(), b.positions() * b.live())
            is_same &= torch.equal(a.counts(), b.counts()) and one.layout == other.layout
            if one.layout.tier.is_coded:
                unlike.append(float((a.key_codes() != b.key_codes()).float().mean()))
    ok = is_same and max(unlike) < 0.05
    print(
        f"{'ok ' if ok else 'BAD'} {name}: {len(decoded)} launches, same pages: {is_same}, "
        f"{max(unlike):.1e} of the codes unlike the codec's",
        flush=True,
    )
    return {"case": name, "backend": backend_name, "codes_unlike": max(unlike), "is_right": ok}


def check_graph(group=4):
    """Captured steps against eager ones on a small model, through sealing pages.

    Once with one tier, once under the controller, which demotes and drops between the steps.
    """
    from gpu_models import build_model

    model = build_model(
        "Llama-3.1-8B", num_layers=3, hidden_size=1024, intermediate_size=2048,
        num_attention_heads=2 * group, num_key_value_heads=2, vocab_size=1000,
    )  # fmt: skip
    return [
        compare_graph(model, f"graph, group {group}", prompt=700, tiers="k2v4"),
        compare_graph(
            model, f"graph, retention, group {group}", prompt=2500, budget="30%", num_steps=280
        ),
    ]


@torch.no_grad()
def compare_graph(model, name, *, prompt, tiers=None, budget=None, num_steps=180):
    """The same tokens through two caches, of which one has its steps captured.

    Under a budget captured steps drop old pages earlier than eager ones do, so logits are alike up
    to then. After that a step is taken back every now and then, and repeated by a graph that is
    captured anew over lists that are made anew.
    """
    from sphkv.integrations.transformers.cache import CacheOptions, SphericalCache

    tokens = torch.randint(0, 1000, (2, prompt), device="cuda")
    caches, calibration = [], None
    for is_captured in (False, True):
        caches.append(
            SphericalCache.for_model(
                model, budget, tiers=tiers, retention=True if budget else None,
                calibration=calibration, options=CacheOptions(cuda_graphs=is_captured),
            )
        )  # fmt: skip
        model(input_ids=tokens, past_key_values=caches[-1], use_cache=True, logits_to_keep=1)
        calibration = caches[-1].calibration
    captured = caches[1]
    same, again, num_captured = [], [], 0
    for step in range(num_steps):
        token = torch.randint(0, 1000, (2, 1), device="cuda")
        positions = torch.full((2, 1), prompt + step, device="cuda")
        right, got = (logits_after(model, cache, token, positions) for cache in caches)
        was_captured = captured.engine.graph is not None
        num_captured += was_captured
        if len(same) == step and not has_dropped(captured):
            same.append(relative_error(got, right))
        elif was_captured and step % 8 == 0:
            held = page_ids(captured)
            captured.crop(-1)
            is_whole = page_ids(captured) == held
            repeated = logits_after(model, captured, token, positions)
            if is_whole:
                # else what a shorter length allows was less
                again.append(relative_error(got, repeated))
    worst, peak = max(same + again), max(cache.engine.peak_share for cache in caches)
    ok = worst < 2e-2 and peak <= 1 and num_captured > num_steps // 2
    ok = ok and (len(same) == num_steps if budget is None else len(same) > 32 and len(again) > 8)
    # slabs are cut differently, what they hold must be the same
    held = [(led.codes, led.radii, led.values) for led in (cache.ledger() for cache in caches)]
    ok = ok and (budget is not None or held[0] == held[1])
    for cache in caches:
        cache.detach()
    print(
        f"{'ok ' if ok else 'BAD'} {name}: logits differ by {max(same):.1e} at most in {len(same)} "
        f"steps before pages do and by {max(again, default=0.0):.1e} in {len(again)} repeated, "
        f"{num_captured} steps captured, {peak:.3f} of the budget",
        flush=True,
    )
    return {
        "case": name,
        "backend": "cuda",
        "error": worst,
        "steps": len(same),
        "steps_repeated": len(again),
        "steps_captured": num_captured,
        "peak_share": peak,
        "is_right": ok,
    }


def check_ahead():
    """Steps that are launched before ``generate`` asks for them, against those that are not.

    Once with one tier, once under the controller. Every step is made long enough that the host is
    done with what lies between two of them while the one that was launched ahead still runs.
    """
    from gpu_models import build_model

    model = build_model(
        "Llama-3.1-8B", num_layers=3, hidden_size=1024, intermediate_size=2048,
        num_attention_heads=8, num_key_value_heads=2, vocab_size=1000,
    )  # fmt: skip
    model.generation_config.eos_token_id = None
    # the first thing of a step, so that what it reads and writes comes late
    model.model.layers[0].register_forward_pre_hook(lambda *_: torch.cuda._sleep(SLEEP_CYCLES))
    return [
        compare_ahead(model, "ahead, one tier", prompt=700, tiers="k2v4"),
        compare_ahead(model, "ahead, retention", prompt=2500, budget="30%"),
    ]


@torch.no_grad()
def compare_ahead(model, name, *, prompt, tiers=None, budget=None):
    """The same texts with and without steps ahead, from one cache that was saved."""
    from sphkv import SphericalCache

    text = torch.randint(0, 1000, (2, prompt + 1), device=model.device)
    retention = True if budget else None
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "cache"
        with SphericalCache.for_model(model, budget, tiers=tiers, retention=retention) as first:
            model(input_ids=text[:, :-1], past_key_values=first, logits_to_keep=1)
            first.save(folder)
        plain, ahead = (follow_text(model, folder, text, is_ahead=each) for each in (False, True))
    wrong = [
        f"{part} of {stage}"
        for stage in STAGES
        # a decision about a prompt may round otherwise when it is made again
        if budget is None or stage != "new prompt"
        for part in ("text", "contents")
        if not is_same(plain[stage][part], ahead[stage][part])
    ]
    wrong += [f"counters of {stage}" for stage in STAGES if not ahead[stage]["is_counted"]]
    greedy, sampled = ahead["greedy"]["guesses"], ahead["sampled"]["guesses"]
    # beside steps in which pages change none is launched
    least, right = (GREEDY_STEPS - 10, 10) if budget is None else (GREEDY_STEPS // 4, 0)
    if greedy[1] < least or greedy[0] - greedy[1] > 1:
        wrong.append("guesses of greedy")
    if not right <= sampled[1] < sampled[0] - right:
        wrong.append("guesses of sampled")
    peak = max(run["crop"]["peak_share"] for run in (plain, ahead))
    ok = not wrong and peak <= 1 and plain["greedy"]["guesses"] == (0, 0)
    ms = [run["greedy"]["ms"] for run in (plain, ahead)]
    print(
        f"{'ok ' if ok else 'BAD'} {name}: {greedy[1]} of {greedy[0]} steps ahead were asked for, "
        f"{sampled[1]} of {sampled[0]} while sampling, {ahead['crop']['refreshes']} refreshes, "
        f"{peak:.3f} of the budget, {ms[0]:.2f} ms a step without and {ms[1]:.2f} with them; "
        f"unlike: {wrong or 'nothing'}",
        flush=True,
    )
    return {
        "case": name, "backend": "cuda", "launched": greedy[0], "right": greedy[1],
        "launched_sampling": sampled[0], "right_sampling": sampled[1], "peak_share": peak,
        "unlike": wrong, "step_ms": ms, "is_right": ok,
    }  # fmt: skip


def follow_text(model, folder, text, *, is_ahead):
    """Continue a saved cache greedily, by sampling, after a crop, and with a new prompt."""
    from sphkv import SphericalCache
    from sphkv.integrations.transformers.guesses import GuessHistory

    class AlwaysSure(GuessHistory):
        """Takes every guess for worth a step, so that many steps are wrong."""

        is_trusted = True

        def is_due(self):
            return True

    loaded = SphericalCache.load(folder, model)
    cache = SphericalCache(model, loaded.engine, steps_ahead=is_ahead)
    loaded.detach()
    stages, length = {}, text.shape[1]

    def go_on(stage, text, count, **options):
        torch.manual_seed(5)
        options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0, **options}
        # any token may be the one that stands for padding
        options["attention_mask"] = torch.ones_like(text)
        began = time.perf_counter()
        text = model.generate(text, past_key_values=cache, **options)
        seconds = time.perf_counter() - began
        rows, guesses = cache.engine.rows, cache._captured.guesses
        stages[stage] = {
            "text": text,
            "contents": contents(cache),
            "is_counted": is_counted(cache),
            "guesses": (guesses.num_launched, guesses.num_right),
            "peak_share": cache.engine.peak_share,
            "refreshes": sum(getattr(row.residency, "num_rebalances", 0) for row in rows),
            "ms": 1e3 * seconds / count,
        }
        return text

    text = go_on("greedy", text, GREEDY_STEPS)
    cache._captured.guesses = AlwaysSure()
    text = go_on("sampled", text, 120, do_sample=True, top_k=2)
    cache._captured.guesses = GuessHistory()
    # what was launched for the token behind the last one is under way
    cache.crop(-1)
    go_on("crop", text, 40)
    cache.reset()
    other = torch.arange(2 * length, device=text.device).view(2, -1) * 7919 % 1000
    go_on("new prompt", other, 40)
    cache.detach()
    return stages


def contents(cache):
    """Copies of all that a cache holds of its tokens."""
    engine, store = cache.engine, cache.engine.store
    held = [engine.num_tokens, cache.ledger()]
    for row in store.sequences:
        for layer in range(engine.config.geometry.num_layers):
            tail = store.tail(row, layer)
            held += [tail.first_position, tail.keys.clone(), tail.values.clone()]
            for group in store.pages(row, layer):
                held += [group.layout, store.view(group).pages.clone()]
    return held


def is_counted(cache):
    """Whether the device counts what the store does, and one more if a step was launched."""
    engine = cache.engine
    torch.cuda.synchronize()
    counted = engine.graph.positions[:, 0].tolist()
    return counted == [count - 1 + engine.ahead.is_launched for count in engine.num_tokens]


def is_same(held, other):
    """Whether tensors, or lists with tensors in them, are the very same."""
    if isinstance(held, torch.Tensor):
        return torch.equal(held, other)
    if isinstance(held, list):
        return len(held) == len(other) and all(map(is_same, held, other))
    return held == other


def logits_after(model, cache, token, positions):
    """Logits ``[rows, vocabulary]`` after one more token of every row."""
    output = model(input_ids=token, past_key_values=cache, use_cache=True, position_ids=positions)
    return output.logits[:, -1].float()


def has_dropped(cache):
    """Whether the controller has made room since the prompt, or begun to."""
    return any(getattr(row.residency, "num_rebalances", 0) for row in cache.engine.rows)


def page_ids(cache):
    """All pages of a cache."""
    store = cache.engine.store
    return [store.page_list(sequence).page_ids.tolist() for sequence in store.sequences]


def relative_error(got, right):
    return float((got - right).norm() / right.norm())


CHECKS = {
    "graph": check_graph,
    "ahead": check_ahead,
    "table": check_table,
    "demotion": check_demotion,
}


def run_all(jobs, output, commit, skipped):
    """All cases, a process each; what has ended is in the output, also if others are cut off."""
    about = {
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "commit": commit,
        "command": "PYTHONPATH=src python3 benchmarks/gpu_check.py"
        + "".join(f" --skip {name}" for name in skipped),
    }
    names = [name for name in (*CASES, *CHECKS) if name not in skipped]
    found, lock = {}, threading.Lock()

    def one(name, folder):
        target = Path(folder) / f"{name}.json"
        command = [sys.executable, str(Path(__file__)), "--only", name, "--output", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        text = done.stdout + ("" if done.returncode == 0 else done.stderr[-1500:])
        print(text, end="", flush=True)
        with lock:
            found[name] = json.loads(target.read_text()) if target.exists() else []
            records = [record | about for each in names for record in found.get(each, [])]
            if output:
                output.write_text(json.dumps(records, indent=1) + "\n")
        return done.returncode

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        return max(pool.map(lambda name: one(name, folder), names))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=[*CASES, *CHECKS])
    parser.add_argument("--skip", choices=[*CASES, *CHECKS], action="append", default=[])
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
    args = parser.parse_args()
    if args.only is None:
        return run_all(args.jobs, args.output, args.commit, args.skip)
    torch.set_num_threads(1)
    records = CHECKS[args.only]() if args.only in CHECKS else check(args.only)
    if args.output:
        args.output.write_text(json.dumps(records))
    return 0 if all(record["is_right"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
