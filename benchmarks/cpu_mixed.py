# SPDX-License-Identifier: Apache-2.0
"""Mixed tiers in one native call against one tier at equal bytes, and what a demotion costs.

``PYTHONPATH=src python3 benchmarks/cpu_mixed.py --output results/cpu/mixed.json``

Runs of 16 tokens get one of five tiers at random, in pages of 32 states, of 128, and of both in
one table; the whole is read by one call of the native backend. Beside it stand caches of one tier
with as many bytes: in pages without gaps, and in pages with a quarter of the runs dropped, so that
positions lie in runs as in the mixed cache; and the tiers of the mixed cache one by one. Errors are
against float64 over the same codes. Times are processor time of one thread, in interleaved rounds,
so that other work on the machine counts little.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from sphkv.attention.native.backend import NativeBackend
from sphkv.attention.request import AttentionOptions, DecodeRequest
from sphkv.codec.states import SphericalCodec
from sphkv.core.contract import LayerContract
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import DENSE, DROP, RUN_TOKENS, TierTable, coded_tier
from sphkv.evaluation.bench.decode import GEOMETRIES
from sphkv.evaluation.environment import describe_environment
from sphkv.store.config import StoreConfig
from sphkv.store.store import PageStore
from sphkv.testing.cases import dense_oracle, random_calibration, random_states

TIERS = ((1.0, 2), (1.5, 2), (2.0, 3), (3.0, 4), (4.0, 4))
ONE_TIER = (2.0, 3)
PAGES = {"32": (32,) * 5, "128": (128,) * 5, "32 and 128": (128, 32, 128, 32, 128)}
DEMOTIONS = (((4.0, 4), (2.0, 2)), ((2.0, 2), (1.0, 2)))


def make_store(geometry, rope, codec, tiers, tier_id):
    """A store with one sequence whose states have the given tiers, ``[heads, tokens]``."""
    table = TierTable((DROP, *tiers, DENSE))
    store = PageStore(StoreConfig(geometry, table, seal_tier=tiers[-1].name), codec)
    store.create(0)
    tier_id[:, :RUN_TOKENS] = table.dense_id
    tokens = tier_id.shape[1]
    keys, values, _ = random_states(geometry, rope, tokens)
    protected = torch.zeros_like(tier_id, dtype=torch.bool)
    contract = LayerContract(tier_id, protected)
    store.write(0, 0, contract, keys, values, torch.arange(tokens))
    return store


def mixed_store(geometry, rope, codec, tokens, pages, *, only=None):
    """Five tiers, or the part of one of them."""
    tiers = [coded_tier(*bits, page_tokens=size) for bits, size in zip(TIERS, pages, strict=True)]
    draw = torch.Generator().manual_seed(1)
    runs = torch.randint(1, 6, (geometry.num_kv_heads, -(-tokens // RUN_TOKENS)), generator=draw)
    tier_id = runs.repeat_interleave(RUN_TOKENS, 1)[:, :tokens].to(torch.uint8)
    if only is not None:
        tier_id[tier_id != only] = 0
    return make_store(geometry, rope, codec, tiers, tier_id)


def one_tier_store(geometry, rope, codec, num_bytes, page_tokens, *, has_gaps):
    """One tier in full pages, as near to the bytes as whole pages come."""
    tier = coded_tier(*ONE_TIER, page_tokens=page_tokens)
    page_bytes = page_tokens * tier.state_bytes(geometry.head_dim)
    kept = round(num_bytes / geometry.num_kv_heads / page_bytes) * page_tokens // RUN_TOKENS
    runs = 1 + (4 * kept // 3 if has_gaps else kept)
    tier_id = torch.zeros(geometry.num_kv_heads, runs, dtype=torch.uint8)
    for head in range(geometry.num_kv_heads):
        order = torch.randperm(runs - 1, generator=torch.Generator().manual_seed(head))
        tier_id[head, 1 + order[:kept]] = 1
    return make_store(geometry, rope, codec, [tier], tier_id.repeat_interleave(RUN_TOKENS, 1))


def question(store, geometry, rope):
    end = store.num_tokens(0)
    _, _, query = random_states(geometry, rope, 1, first=end - 1, seed=77)
    options = AttentionOptions(scale=geometry.head_dim**-0.5)
    return DecodeRequest(store, 0, 0, query, torch.tensor([end - 1]), options)


def used_bytes(store):
    """Bytes of pages in use, their addresses and tags."""
    return sum(
        int(group.num_pages.sum()) * (group.layout.page_bytes + 9) for group in store.pages(0, 0)
    )


def error_of(backend, request):
    exact = dense_oracle(request)
    return float((backend.attend(request).output - exact).norm() / exact.norm())


def processor_ms(calls, rounds):
    """Milliseconds of processor time of each call, round by round."""
    taken = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.process_time()
            call()
            taken[name].append(1e3 * (time.process_time() - began))
    return taken


def measure_mixed(name, tokens, rounds, backend):
    geometry, theta = GEOMETRIES[name]
    rope = RopeSpec.from_config({"rope_theta": theta}, geometry.head_dim)
    codec = SphericalCodec(random_calibration(geometry, rope))
    rows = []
    for label, pages in PAGES.items():
        mixed = mixed_store(geometry, rope, codec, tokens, pages)
        wanted, size = used_bytes(mixed), max(pages)
        stores = {
            "mixed": mixed,
            "one": one_tier_store(geometry, rope, codec, wanted, 128, has_gaps=False),
            "runs": one_tier_store(geometry, rope, codec, wanted, size, has_gaps=True),
        }
        for tier in range(1, 6):
            stores[tier] = mixed_store(geometry, rope, codec, tokens, pages, only=tier)
        asked = {key: question(store, geometry, rope) for key, store in stores.items()}
        errors = {key: error_of(backend, request) for key, request in asked.items()}
        calls = {key: (lambda r=request: backend.attend(r)) for key, request in asked.items()}
        taken = processor_ms(calls, rounds)
        sizes = {key: used_bytes(store) for key, store in stores.items()}
        row = {
            "geometry": name, "pages": label, "tokens": tokens, "bytes": sizes["mixed"],
            "ms": statistics.median(taken["mixed"]), "error": errors["mixed"],
        }  # fmt: skip
        for key, prefix in (("one", "one_tier"), ("runs", "one_tier_runs")):
            ratios = sorted(
                (a / sizes["mixed"]) / (b / sizes[key])
                for a, b in zip(taken["mixed"], taken[key], strict=True)
            )
            row |= {
                f"{prefix}_bytes": sizes[key],
                f"{prefix}_ms": statistics.median(taken[key]),
                f"{prefix}_error": errors[key],
                f"over_{prefix}": statistics.median(ratios),
                f"over_{prefix}_quartiles": [
                    ratios[len(ratios) // 4],
                    ratios[3 * len(ratios) // 4],
                ],
            }
        row["parts_ms"] = sum(statistics.median(taken[tier]) for tier in range(1, 6))
        rows.append(row)
        print(rows[-1], flush=True)
    return rows


def measure_demotion(name, tokens, rounds):
    """Processor time per state (a key and a value of one head) of re-encoding coded pages."""
    geometry, theta = GEOMETRIES[name]
    rope = RopeSpec.from_config({"rope_theta": theta}, geometry.head_dim)
    codec = SphericalCodec(random_calibration(geometry, rope))
    rows = []
    for page_tokens in (32, 128):
        for before, after in DEMOTIONS:
            tiers = [coded_tier(*bits, page_tokens=page_tokens) for bits in (after, before)]
            taken, states = [], 0
            for _ in range(rounds):
                tier_id = torch.full((geometry.num_kv_heads, tokens), 2, dtype=torch.uint8)
                store = make_store(geometry, rope, codec, tiers, tier_id)
                (group,) = (g for g in store.pages(0, 0) if g.layout.tier_id == 2)
                ids = group.page_ids[group.page_ids >= 0]
                states = int(store.view(group).live().sum())
                began = time.process_time()
                store.demote(0, 0, ids, 1)
                taken.append(1e9 * (time.process_time() - began) / states)
            rows.append(
                {
                    "geometry": name, "from": tiers[1].name, "to": tiers[0].name,
                    "page_tokens": page_tokens, "states": states,
                    "ns_per_state": statistics.median(taken),
                    "least": min(taken), "most": max(taken),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    backend = NativeBackend()
    result = {
        "mixed": [
            row
            for name in GEOMETRIES
            for row in measure_mixed(name, args.tokens, args.rounds, backend)
        ],
        "demotion": [row for name in GEOMETRIES for row in measure_demotion(name, 2048, 3)],
        "kernel": backend.variant,
        "clock": "processor time of one thread, medians of interleaved rounds",
        "environment": describe_environment(),
        "command": "PYTHONPATH=src python3 benchmarks/cpu_mixed.py "
        f"--tokens {args.tokens} --rounds {args.rounds}",
    }
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
