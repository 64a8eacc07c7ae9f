# SPDX-License-Identifier: Apache-2.0
"""Encoding of pages on the GPU: the CUDA kernels, those in Triton, and the codec in torch.

``PYTHONPATH=src python3 benchmarks/gpu_encode.py --output results/gpu/encode.json``

``demotion_to_k1v2`` decodes with the codec in torch and encodes with the kernels, without a store;
``demotion_kernels`` decodes with a kernel instead. ``demotion_of_8`` and ``demotion_of_1000`` are
``PageStore.demote_listed`` on so many pages of four layers, all of it, by the clock on an idle GPU,
and ``..._by_codec`` the same where no kernel decodes.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import triton

from sphkv.attention.cuda.encode import CudaEncoder
from sphkv.attention.cuda.fragments import to_fragment_order
from sphkv.attention.cuda.pages import FragmentCodec, FragmentOrder
from sphkv.attention.triton.encode import TritonEncoder
from sphkv.codec.states import SphericalCodec
from sphkv.core.contract import WriteContract
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import RUN_TOKENS, TierSpec, TierTable, coded_tier
from sphkv.store.config import StoreConfig
from sphkv.store.layout import PageLayout, PageView, write_pages
from sphkv.store.order import PageRuns
from sphkv.store.paging import PageRows, PositionMode
from sphkv.store.store import PageStore
from sphkv.testing.cases import random_calibration, random_states

PAGES = 8192
# pages demoted at once, and how often
DEMOTED = {8: 24, 1000: 9}
# Rounding decides ties: in the codec itself, moved from CPU to GPU, for up to 5e-4 of the bytes.
MOST_UNLIKE = 2e-3


def copy_bandwidth():
    """Bytes per second of a large copy, read and written."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    ms = triton.testing.do_bench(lambda: target.copy_(source), rep=200, return_mode="median")
    return 2 * source.numel() / ms * 1e3


def measure_tier(tier, codec, limit):
    """Speeds of every way to encode, as a record."""
    rope, geometry = codec.calibration.ropes[0], codec.calibration.geometry
    layout = PageLayout(1, tier, 128, PositionMode.CONTIGUOUS)
    per_head = PAGES // 8
    keys, values = (
        part.view(8, 8, 128, 128).repeat(1, per_head // 8, 1, 1).flatten(0, 1).cuda().bfloat16()
        for part in random_states(geometry, rope, 1024)[:2]
    )
    rows = PageRows(
        torch.arange(1024).view(8, 128).repeat(per_head, 1).cuda(),
        torch.full((PAGES,), 128, device="cuda"),
        torch.zeros(PAGES, 128, dtype=torch.bool, device="cuda"),
    )
    heads = torch.arange(8, device="cuda").repeat_interleave(per_head)
    encoder, portable = CudaEncoder(), TritonEncoder()
    given = (layout, 0, codec, (keys, values), rows, heads)
    pages, other = encoder.encode(*given), portable.encode(*given)
    ordered = encoder.to_fragments(layout, other[:256])
    if not torch.equal(ordered, to_fragment_order(PageView(layout, other[:256]))):
        raise SystemExit(f"{tier.name}: pages are reordered wrongly")
    few = PageRows(rows.positions[:256], rows.counts[:256], rows.flags[:256])

    def by_codec():
        encoded = codec.encode(
            0, tier, keys[:256], values[:256], few.positions, head_ids=heads[:256],
            counts=few.counts,
        )  # fmt: skip
        return write_pages(layout, encoded, few)

    one_page = PageRows(*(part[::per_head] for part in (rows.positions, rows.counts, rows.flags)))
    newest = (keys[::per_head].contiguous(), values[::per_head].contiguous())
    lower = PageLayout(2, coded_tier(1.0, 2), 128, PositionMode.CONTIGUOUS)

    def demote():
        view = PageView(layout, FragmentOrder().from_slab(layout, pages[:256]))
        states = codec.decode(0, tier, view.encoded(), few.positions, head_ids=heads[:256])
        states = tuple(part.bfloat16() for part in states)
        return encoder.encode(lower, 0, codec, states, few, heads[:256])

    kernels = FragmentCodec(FragmentOrder())
    states = tuple(torch.empty_like(part) for part in (keys, values))
    runs = PageRuns(
        pages.data_ptr() + layout.page_bytes * torch.arange(PAGES, device="cuda"),
        heads,
        rows.positions[:, ::RUN_TOKENS].contiguous(),
        torch.arange(8 * PAGES, device="cuda").view(PAGES, 8),
    )

    def demote_by_kernels():
        kernels.decode_runs(layout, codec, runs, tuple(part.flatten(0, 1) for part in states))
        return kernels.encode_layers(lower, codec, states, rows, heads)

    right = by_codec()
    right_ordered = to_fragment_order(PageView(layout, right))
    record = {
        "tier": tier.name,
        "head_dim": 128,
        "bytes_unlike_codec": float((right_ordered != pages[:256]).float().mean()),
        "bytes_of_triton_unlike_codec": float((right != other[:256]).float().mean()),
    }
    if record["bytes_unlike_codec"] > MOST_UNLIKE:
        raise SystemExit(f"wrong pages: {record}")
    work = {
        "cuda_in_fragment_order": (lambda: encoder.encode(*given), PAGES),
        "fragment_order": (lambda: encoder.to_fragments(layout, other), PAGES),
        "seal_of_8_heads": (
            lambda: encoder.encode(layout, 0, codec, newest, one_page, heads[::per_head]), 8
        ),
        "demotion_to_k1v2": (demote, 256),
        "demotion_kernels": (demote_by_kernels, PAGES),
        "triton": (lambda: portable.encode(*given), PAGES),
        "torch_codec": (by_codec, 256),
    }  # fmt: skip
    for name, (call, num_pages) in work.items():
        ms = triton.testing.do_bench(call, warmup=10, rep=60, return_mode="median")
        moved = num_pages * (128 * 128 * 2 * 2 + layout.page_bytes)
        record[name] = {
            "ns_per_state": ms * 1e6 / (num_pages * 128),
            "gb_per_s": moved / ms / 1e6,
            "share_of_copy": moved / ms * 1e3 / limit,
        }
    return record


class WithoutDecoding(FragmentCodec):
    """Leaves decoding to the codec."""

    def decodes(self, *_):
        return False


def demotion_store(tier, codec, kernels):
    """A store of four layers, all of whose pages are of one tier, in runs."""
    geometry, order = codec.calibration.geometry, FragmentOrder()
    tiers = TierTable(
        (
            TierSpec("drop", "drop", 0.0, 0, 0),
            coded_tier(1.0, 2),
            tier,
            TierSpec("max", "dense", 16.0, 16, 16),
        )
    )
    config = StoreConfig(
        geometry, tiers, seal_tier=tier.name, max_slab_pages=256, has_few_kinds=True, device="cuda"
    )
    store = PageStore(config, codec, order=order, kernels=kernels(order))
    store.create(0)
    num_pages = sum(num * (times + 3) for num, times in DEMOTED.items())
    tokens = 128 * (num_pages // (geometry.num_layers * geometry.num_kv_heads) + 1)
    contract = WriteContract.uniform(geometry, tokens, tier_id=2, granularity=RUN_TOKENS)
    rope = codec.calibration.ropes[0]
    keys, values = (
        part.repeat(1, -(-tokens // 1024), 1)[:, :tokens].cuda().bfloat16()
        for part in random_states(geometry, rope, 1024)[:2]
    )
    for layer in range(geometry.num_layers):
        store.write(0, layer, contract.layer(layer), keys, values, torch.arange(tokens))
    return store


def measure_demotion(tier, codec):
    """Nanoseconds per state of demotion through a store, with kernels and without."""
    record = {}
    for kernels, name in ((FragmentCodec, ""), (WithoutDecoding, "_by_codec")):
        store = demotion_store(tier, codec, kernels)
        listed = store.page_list(0)
        layer_ids, page_ids = listed.layer_ids.cpu(), listed.page_ids.cpu()
        # neighbours in a head, and so in a slab, do not go together
        order = torch.randperm(len(page_ids), generator=torch.Generator().manual_seed(0))
        held, at = store.hold(page_ids[order]), 0
        layer_ids = layer_ids[order]
        for num, times in DEMOTED.items():
            seconds, busy = [], []
            for _ in range(times + 3):
                now = slice(at, at + num)
                at += num
                torch.cuda.synchronize()
                began = time.perf_counter()
                store.demote_listed(0, layer_ids[now], held.page_ids[now], 1)
                queued = time.perf_counter()
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - began)
                busy.append(queued - began)
            record[f"demotion_of_{num}{name}"] = {
                "ns_per_state": statistics.median(seconds[3:]) * 1e9 / (num * 128),
                "ms": statistics.median(seconds[3:]) * 1e3,
                "host_ms": statistics.median(busy[3:]) * 1e3,
            }
    return record


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
    args = parser.parse_args()
    rope = RopeSpec.from_config({"rope_theta": 500000.0}, 128)
    codec = SphericalCodec(random_calibration(KVGeometry(1, 8, 32, 128), rope))
    layered = SphericalCodec(random_calibration(KVGeometry(4, 8, 32, 128), rope))
    limit = copy_bandwidth()
    records = []
    for tier in (coded_tier(2.0, 4), coded_tier(2.0, 2), coded_tier(2.0, 3), coded_tier(3.0, 4)):
        record = measure_tier(tier, codec, limit)
        record |= measure_demotion(tier, layered)
        record |= {
            "copy_tb_per_s": limit / 1e12,
            "device": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "commit": args.commit,
            "command": "PYTHONPATH=src python3 benchmarks/gpu_encode.py",
        }
        print(json.dumps(record), flush=True)
        records.append(record)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
