# SPDX-License-Identifier: Apache-2.0
"""Decode attention over what the controller keeps of a layer: tiers, runs and dense pages.

``PYTHONPATH=src python3 benchmarks/gpu_mixed.py --allocation FILE --output results/gpu/mixed.json``

``FILE`` holds the controller's decisions about a real prompt: tier of every run of 16 tokens of
every layer and head, by budget. They are tiled to the length, a shift apart in every sequence,
and filled with random codes; heads of neighbouring layers make up a layer of Llama-3.1-8B's
shape. A few rows are compared with a float64 oracle first. FlashAttention 3 and FlashInfer run
beside, where they are installed. ``--profile`` launches every case once, for a profiler that
counts DRAM bytes of kernels ``regex:sphkv``.
"""

import argparse
import json
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_decode import DEVICE, MODELS, common, copy_bandwidth, dram_ratios, median_us
from gpu_rivals import rivals

from sphkv.attention.cuda.block_shares import BlockShares
from sphkv.attention.cuda.decode import CudaDecode, TurnTable
from sphkv.attention.cuda.dense import DenseDecode, DenseStates
from sphkv.attention.cuda.geometry import PAGE_SIZES, KernelShape
from sphkv.attention.cuda.merge import PartsMerge
from sphkv.attention.cuda.pages import PageLists, PagePool
from sphkv.attention.cuda.shares import longest_first, share_blocks
from sphkv.attention.cuda.steps import DENSE_PROCESSORS
from sphkv.attention.cuda.synthetic import (
    Oracle,
    random_pages,
    set_bases,
    set_counts,
    synthetic_codebook,
)
from sphkv.attention.partial import PartialAttention, merge_partials
from sphkv.attention.request import AttentionOptions
from sphkv.core.tiers import DENSE, parse_tier
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PositionMode
from sphkv.testing.decode_cases import case_rope, error_limit, relative_error

MODEL = MODELS[0]
POINTS = ((1, 131072), (8, 32768), (8, 131072))
RUN = 16
# a codebook's planes without bits, by key bits: as calibrated models have them
OPTIONS = AttentionOptions(scale=MODEL.head_dim**-0.5)


@dataclass
class Kind:
    """Pages of one tier in a layer."""

    layout: PageLayout
    pages: torch.Tensor
    lists: PageLists
    decoder: CudaDecode
    book: object


def tile(tier_id, batch, context, seed):
    """``[heads, batch, runs]`` tiers: a prompt's decision repeated, shifted in every sequence."""
    runs = tier_id.shape[1]
    wanted = context // RUN
    generator = torch.Generator().manual_seed(seed)
    shift = torch.randint(0, runs, (batch,), generator=generator)
    index = (torch.arange(wanted)[None] + shift[:, None]) % runs
    return tier_id[:, index]


def runs_of(tiers, tier):
    """Positions of a tier's runs, list by list: ``(positions [total], counts [lists])``."""
    is_mine = (tiers == tier).flatten(0, 1)
    counts = is_mine.sum(1)
    return RUN * is_mine.nonzero()[:, 1], counts


def build_kind(layout, tiers, tier, rope, turns, seed, batch):
    """Pages, lists and a kernel for the runs of one tier; None if there are none."""
    positions, counts = runs_of(tiers, tier)
    if not len(positions):
        return None
    page_runs = layout.page_tokens // RUN
    pages_of = -(-counts // page_runs)
    total = int(pages_of.sum())
    rank = torch.arange(len(positions)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    first = (pages_of.cumsum(0) - pages_of).repeat_interleave(counts)
    row, column = first + rank // page_runs, rank % page_runs
    bases = torch.zeros(total, page_runs, dtype=torch.int64)
    bases[row, column] = positions
    live = RUN * row.bincount(minlength=total)
    pages = random_pages(layout, total, device=DEVICE)
    set_counts(pages, live.to(DEVICE))
    set_bases(pages, layout, bases.to(DEVICE))
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32)
    starts[1:] = pages_of.cumsum(0)
    order = torch.randperm(total)
    shuffled = torch.empty_like(pages)
    shuffled[order.to(DEVICE)] = pages
    lists = PageLists(order.to(DEVICE), starts.to(DEVICE), batch)
    nibbles = layout.num_nibbles
    book = synthetic_codebook(
        MODEL.kv_heads, MODEL.head_dim // 2, nibbles, seed=seed, device=DEVICE
    )
    shape = KernelShape.of_codebook(
        book, value_bits=layout.tier.value_bits, group=MODEL.group, positions=PositionMode.RUNS,
        page_tokens=layout.page_tokens,
    )  # fmt: skip
    decoder = CudaDecode(
        book, rope, turns, value_bits=layout.tier.value_bits, group=MODEL.group, max_batch=batch,
        shape=shape,
    )  # fmt: skip
    return Kind(layout, shuffled, lists, decoder, book)


class Layer:
    """What a captured step reads of one layer, and how."""

    def __init__(self, names, tiers, rope, turns, seed, page_tokens):
        heads, batch, runs = tiers.shape
        self.batch, self.context, self.tail = batch, runs * RUN, page_tokens // 2
        kinds = []
        for tier, name in enumerate(names):
            spec = parse_tier(name, page_tokens=page_tokens)
            if spec.is_coded:
                layout = PageLayout(tier, spec, MODEL.head_dim, PositionMode.RUNS)
                kinds.append(build_kind(layout, tiers, tier, rope, turns, seed, batch))
        self.kinds = [kind for kind in kinds if kind is not None]
        work = [
            (kind.decoder.shape, kind.lists.row_start.diff().view(heads, batch).cpu().numpy())
            for kind in self.kinds
        ]
        room = torch.cuda.get_device_properties(DEVICE).multi_processor_count - DENSE_PROCESSORS
        shares = share_blocks(work, room, DENSE_PROCESSORS)
        for kind, share in zip(self.kinds, shares, strict=True):
            kind.lists = PageLists(kind.lists.entries, kind.lists.row_start, batch, share)
        self.kinds = [self.kinds[i] for i in longest_first(work, shares)]
        for at, kind in enumerate(self.kinds):
            kind.decoder.overlaps = len(self.kinds) == 1 or at > 0
        told = BlockShares(
            [(kind.decoder, kind.lists) for kind in self.kinds], torch.device(DEVICE)
        )
        told.find()
        for kind, lists in zip(self.kinds, told.lists, strict=True):
            kind.lists = lists
        self._dense_pages(tiers, len(names) - 1)
        self.coded_bytes = sum(kind.pages.numel() for kind in self.kinds)
        self.num_bytes = self.coded_bytes + self.pages.numel() + self.tails.numel() * 2
        self.query = torch.randn(batch, MODEL.query_heads, MODEL.head_dim, device=DEVICE).bfloat16()
        self.merge = PartsMerge(
            1 + len(self.kinds), batch, MODEL.query_heads, MODEL.head_dim, torch.device(DEVICE)
        )
        self.result = self.kinds[0].decoder.empty_result(batch, torch.bfloat16)
        self.result.output.fill_(torch.nan)
        self.where = torch.full(
            (batch,), self.context + self.tail, device=DEVICE, dtype=torch.int32
        )

    def _dense_pages(self, tiers, dense_id):
        """Dense pages of one run each, and tails that are half full."""
        heads, batch, _ = tiers.shape
        positions, counts = runs_of(tiers.transpose(0, 1).contiguous(), dense_id)
        self.layout = PageLayout(dense_id, DENSE, MODEL.head_dim, PositionMode.CONTIGUOUS)
        pages = torch.zeros(max(1, len(positions)), self.layout.page_bytes, dtype=torch.uint8)
        states = torch.randn(len(pages), 2 * RUN * MODEL.head_dim).bfloat16()
        first, last = self.layout.key_offset, self.layout.position_offset
        pages[:, first:last] = states.view(torch.uint8)
        pages = pages.to(DEVICE)
        set_counts(pages, torch.full((len(pages),), RUN, device=DEVICE))
        if len(positions):
            set_bases(pages, self.layout, positions.to(DEVICE))
        self.pages = pages
        starts = torch.zeros(heads * batch + 1, dtype=torch.int32)
        starts[1:] = counts.cumsum(0)
        addresses = pages.data_ptr() + self.layout.page_bytes * torch.arange(len(pages))
        self.tails = torch.randn(
            2, batch, heads, self.tail, MODEL.head_dim, device=DEVICE
        ).bfloat16()
        size = self.tail * MODEL.head_dim * 2
        at = self.tails.data_ptr() + size * torch.arange(2 * batch * heads).view(2, batch, heads)
        self.states = DenseStates(
            at.permute(1, 2, 0).contiguous().to(DEVICE),
            torch.tensor([[self.tail, self.context]] * batch, device=DEVICE),
            addresses.to(DEVICE), starts.to(DEVICE), self.layout,
        )  # fmt: skip
        self.page_start = starts
        self.dense = DenseDecode(MODEL.head_dim, MODEL.group, DEVICE)

    def attend(self):
        """Queue the layer as a captured step does."""
        newest, own = self.tails[:, :, :, -1], self.merge.parts
        is_single = len(self.kinds) == 1
        if is_single:
            self._attend_dense(newest, own[0], DENSE_PROCESSORS)
        for kind, part in zip(self.kinds, own[1:], strict=True):
            kind.decoder.attend(
                self.query, PagePool(kind.pages, PositionMode.RUNS), kind.lists, OPTIONS,
                result=self.result if is_single else part,
                merge_with=own[0] if is_single else None, query_positions=self.where,
            )  # fmt: skip
        if not is_single:
            self._attend_dense(newest, own[0], None)
            self.merge.merge(len(own), self.result)

    def _attend_dense(self, newest, result, spare_processors):
        self.dense.attend(
            self.query, newest[0], newest[1], self.states, OPTIONS, result=result,
            spare_processors=spare_processors,
        )  # fmt: skip

    def error(self, rope):
        """Of a few rows against float64: largest error, that over its limit, largest logit."""
        worst, over, most, group = 0.0, 0.0, 0.0, MODEL.group
        for b, h in {(0, 0), (self.batch - 1, MODEL.kv_heads - 1), (self.batch // 2, 3)}:
            query = self.query[b, h * group : (h + 1) * group].float()
            parts, largest = [self._dense_part(query, b, h)], 0.0
            for kind in self.kinds:
                starts = kind.lists.row_start[h * self.batch + b : h * self.batch + b + 2].tolist()
                mine = kind.pages[kind.lists.page_ids[starts[0] : starts[1]]]
                oracle = Oracle(kind.book, rope, kind.layout)
                parts.append(oracle.attend(query, mine, h, OPTIONS))
                if len(mine):
                    largest = max(largest, oracle.largest_logit(query, mine, h, OPTIONS))
            right = merge_partials(parts).output
            got = self.result.output[b, h * group : (h + 1) * group]
            error = relative_error(got, right)
            worst, over = max(worst, error), max(over, error / error_limit(largest))
            most = max(most, largest)
        return worst, over, most

    def _dense_part(self, query, b, h):
        keys, values = self.tails[:, b, h].double()
        at = b * MODEL.kv_heads + h
        mine = self.pages[int(self.page_start[at]) : int(self.page_start[at + 1])]
        if len(mine):
            first, last = self.layout.key_offset, self.layout.position_offset
            states = mine[:, first:last].contiguous().view(torch.bfloat16).double()
            states = states.view(len(mine), 2, RUN, MODEL.head_dim)
            keys = torch.cat([keys, states[:, 0].flatten(0, 1)])
            values = torch.cat([values, states[:, 1].flatten(0, 1)])
        logits = query.double() @ keys.T * OPTIONS.scale
        return PartialAttention(logits.softmax(-1) @ values, logits.logsumexp(-1))


def layers_of(tier_id, names, batch, context, rope, turns, count, page_tokens):
    """Layers of eight KV heads, from the heads of neighbouring layers of the real model."""
    heads = tier_id.flatten(0, 1)
    groups = [heads[at : at + MODEL.kv_heads] for at in range(0, len(heads), MODEL.kv_heads)]
    step = max(1, len(groups) // count)
    return [
        Layer(names, tile(own, batch, context, seed), rope, turns, seed, page_tokens)
        for seed, own in list(enumerate(groups))[::step][:count]
    ]


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--allocation", type=Path, required=True)
    parser.add_argument("--budgets", default="20,10,5")
    parser.add_argument("--points", nargs="+", default=[], help="CONTEXTxBATCH; all if none")
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--page-tokens", type=int, choices=PAGE_SIZES, default=PAGE_SIZES[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--dram", type=Path, help="output of the profiler on --profile")
    parser.add_argument("--profile", action="store_true")
    return parser.parse_args()


def main():
    args = read_arguments()
    torch.manual_seed(args.seed)
    print(f"seed {args.seed}", flush=True)
    held = load_file(args.allocation)
    names = bytes(held["tiers"].tolist()).decode().split(",")
    rope = case_rope(MODEL.head_dim)
    turns = TurnTable.build(rope, max_positions=131072 + args.page_tokens, device=DEVICE)
    dram = dram_ratios(args.dram) if args.dram else {}
    copy = 0.0 if args.profile else copy_bandwidth()
    rows, wrong = [], []
    wanted = [tuple(map(int, point.split("x")))[::-1] for point in args.points]
    for batch, context in wanted or POINTS:
        beside = {} if args.profile else rivals(MODEL, batch, context, median_us)
        dense_bytes = 2 * 2 * batch * context * MODEL.kv_heads * MODEL.head_dim
        for budget in args.budgets.split(","):
            count = 1 if args.profile else args.layers
            layers = layers_of(
                held[budget], names, batch, context, rope, turns, count, args.page_tokens
            )
            layers[0].attend()
            torch.cuda.synchronize()
            if args.profile:
                launches = 1 + len(layers[0].kinds)
                case = (MODEL.name, budget, batch, context, layers[0].num_bytes, launches)
                print("CASE", *case, flush=True)
                continue
            for layer in layers:
                layer.attend()
            torch.cuda.synchronize()
            found = [layer.error(rope) for layer in layers]
            error, over, largest = (max(each) for each in zip(*found, strict=True))
            if over >= 1:
                wrong.append(f"{budget}% {(batch, context)}: error {error}, {over} of its limit")
            us = median_us(lambda i, own=layers: own[i].attend(), 2 * len(layers), len(layers))
            num_bytes = sum(layer.num_bytes for layer in layers) / len(layers)
            states = sum(
                int(kind.lists.row_start[-1]) * args.page_tokens
                for layer in layers
                for kind in layer.kinds
            ) / len(layers)
            row = {
                "budget": int(budget) / 100, "batch": batch, "context": context, "us": us,
                "shape": MODEL.name, "page_tokens": args.page_tokens,
                "share_of_dense": num_bytes / dense_bytes,
                "kept": states / (batch * context * MODEL.kv_heads), "error": error,
                "error_over_limit": over, "largest_logit": largest,
                "tb_per_s": num_bytes / us / 1e6, "share_of_copy": num_bytes / us / 1e6 / copy,
                "launches": [len(layer.kinds) for layer in layers],
                "blocks": [[kind.lists.blocks for kind in layer.kinds] for layer in layers],
                "dram_over_ledger": dram.get((MODEL.name, int(budget), batch, context)),
                **beside, **common(args.commit, copy),
            }  # fmt: skip
            row |= {name.replace("_us", "_ratio"): value / us for name, value in beside.items()}
            row["command"] = (
                f"PYTHONPATH=src python3 benchmarks/gpu_mixed.py --allocation {args.allocation}"
                f" --page-tokens {args.page_tokens}"
            )
            rows.append(row)
            ratios = " ".join(f"{k[:-3]} {v:.0f} us x{v / us:.2f}" for k, v in beside.items())
            dense, kept, speed = (row[k] for k in ("share_of_dense", "kept", "share_of_copy"))
            print(
                f"{budget}% {(batch, context)} {us:.1f} us, {dense:.1%} of dense bytes, kept "
                f"{kept:.0%}, {speed:.0%} of copy, error {error:.1e} {ratios} "
                f"launches {row['launches']}",
                flush=True,
            )
            del layers
            torch.cuda.empty_cache()
            if args.output:
                args.output.write_text(json.dumps(rows, indent=1) + "\n")
    if wrong:
        raise SystemExit("\n".join(["wrong results:", *wrong]))


if __name__ == "__main__":
    main()
