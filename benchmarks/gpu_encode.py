# SPDX-License-Identifier: Apache-2.0
"""Encoding of pages on the GPU: fused kernels, the codec in torch, and the kernel's page order.

``PYTHONPATH=src python3 benchmarks/gpu_encode.py --output results/gpu/encode.json``
"""

import argparse
import json
from pathlib import Path

import torch
import triton

from sphkv.attention.cuda.pages import FragmentOrder
from sphkv.attention.triton.encode import PageEncoder
from sphkv.attention.triton.encode_keys import encode_keys_into
from sphkv.attention.triton.encode_values import encode_values_into
from sphkv.attention.triton.search import build_search_table
from sphkv.codec.rope import RopeSpec
from sphkv.codec.states import SphericalCodec
from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import coded_tier
from sphkv.store.layout import PageLayout, blank_pages, write_pages
from sphkv.store.paging import PageRows, PositionMode
from sphkv.testing.cases import random_calibration, random_states

PAGES = 8192


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
    encoder, order = PageEncoder(), FragmentOrder()
    pages = encoder.encode(layout, 0, codec, (keys, values), rows, heads)
    table = build_search_table(codec.codebook(0, tier), rope, pages.device)
    few = PageRows(rows.positions[:256], rows.counts[:256], rows.flags[:256])

    def by_codec():
        encoded = codec.encode(
            0, tier, keys[:256], values[:256], few.positions, head_ids=heads[:256],
            counts=few.counts,
        )  # fmt: skip
        return write_pages(layout, encoded, few)

    differing = float((by_codec() != pages[:256]).float().mean())
    record = {"tier": tier.name, "head_dim": 128, "bytes_unlike_codec": differing}
    where = (rows.positions, rows.counts, heads)
    work = {
        "fused": (lambda: encoder.encode(layout, 0, codec, (keys, values), rows, heads), PAGES),
        "keys": (lambda: encode_keys_into(pages, layout, keys, *where, table), PAGES),
        "values": (lambda: encode_values_into(pages, layout, values, rows.counts), PAGES),
        "headers": (lambda: blank_pages(layout, rows), PAGES),
        "fragment_order": (lambda: order.to_slab(layout, pages), PAGES),
        "torch_codec": (by_codec, 256),
    }
    for name, (call, num_pages) in work.items():
        ms = triton.testing.do_bench(call, warmup=10, rep=60, return_mode="median")
        moved = num_pages * (128 * 128 * 2 * 2 + layout.page_bytes)
        record[name] = {
            "ns_per_state": ms * 1e6 / (num_pages * 128),
            "gb_per_s": moved / ms / 1e6,
            "share_of_copy": moved / ms * 1e3 / limit,
        }
    return record


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
    args = parser.parse_args()
    rope = RopeSpec.from_config({"rope_theta": 500000.0}, 128)
    codec = SphericalCodec(random_calibration(KVGeometry(1, 8, 32, 128), rope))
    limit = copy_bandwidth()
    records = []
    for tier in (coded_tier(2.0, 4), coded_tier(2.0, 2), coded_tier(3.0, 4)):
        record = measure_tier(tier, codec, limit) | {
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
