# SPDX-License-Identifier: Apache-2.0
"""Small cases with every option of the CUDA decode kernel, against the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sphkv.attention.cuda.block_shares import BlockShares
from sphkv.attention.cuda.decode import CudaDecode, TurnTable
from sphkv.attention.cuda.geometry import PAGE_TOKENS, KernelShape
from sphkv.attention.cuda.pages import PageLists, PagePool
from sphkv.attention.cuda.synthetic import (
    Oracle,
    random_pages,
    set_bases,
    set_counts,
    synthetic_codebook,
    tier_layout,
)
from sphkv.attention.partial import PartialAttention, merge_partials
from sphkv.attention.request import AttentionOptions
from sphkv.codec.codebook import AngleCodebook
from sphkv.core.rope import RopeSpec
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PositionMode

# Relative error of the output against float64: half-precision products and weights.
ERROR_FLOOR = 5e-3
HEADS = 2


@dataclass(frozen=True)
class Case:
    """One small problem.

    Attributes:
        counts: Pages of each head and sequence.
        mode: How pages store positions.
        options: Scale, soft-cap and window; a plain scale if None.
        sinks: Whether learned sinks take weight.
        partial: Whether every last page is only partly filled.
        merge: Whether attention over other keys is merged in.
        group: Query heads per KV head.
        head_dim: Elements of a key.
        nibbles: Slots per key.
        value_bits: Width of value codes.
        blocks: Thread blocks that heads share by their pages; None gives them as many each.
        page_tokens: States of a page.
    """

    counts: tuple[tuple[int, ...], ...] = ((9, 9), (9, 9))
    mode: PositionMode = PositionMode.CONTIGUOUS
    options: AttentionOptions | None = None
    sinks: bool = False
    partial: bool = False
    merge: bool = False
    group: int = 4
    head_dim: int = 128
    nibbles: int = 64
    value_bits: int = 4
    blocks: int | None = None
    page_tokens: int = PAGE_TOKENS

    def codebook(self, device: torch.device) -> AngleCodebook:
        """The same for every case of a shape."""
        return synthetic_codebook(HEADS, self.head_dim // 2, self.nibbles, seed=2, device=device)

    def shape(self, codebook: AngleCodebook) -> KernelShape:
        """The kernel that reads the case's pages."""
        return KernelShape.of_codebook(
            codebook,
            value_bits=self.value_bits,
            group=self.group,
            positions=self.mode,
            page_tokens=self.page_tokens,
        )


RAGGED = ((3, 0, 1, 17), (0, 5, 2, 1))
LIMITS = AttentionOptions(0.09, 20.0, 500)
CASES = {
    "ragged, empty, partial": Case(counts=RAGGED, partial=True),
    "runs": Case(mode=PositionMode.RUNS, partial=True),
    "runs, group 8": Case(mode=PositionMode.RUNS, partial=True, group=8),
    "heads of unequal lengths": Case(
        counts=((1, 0, 30), (2, 1, 0)), mode=PositionMode.RUNS, partial=True, blocks=11, merge=True
    ),
    "heads of unequal lengths, group 16": Case(counts=((0, 1), (21, 9)), group=16, blocks=7),
    "a block per head": Case(
        counts=((2, 0, 9), (0, 6, 1)), mode=PositionMode.RUNS, partial=True, blocks=2, merge=True
    ),
    "one head without pages": Case(
        counts=((0, 0, 0), (3, 0, 19)), mode=PositionMode.RUNS, blocks=5, group=8, head_dim=64,
        nibbles=32,
    ),
    "as many blocks for a head without pages": Case(counts=((0, 0), (3, 1)), merge=True),
    "no pages at all": Case(counts=((0, 0), (0, 0)), mode=PositionMode.RUNS, blocks=3, merge=True),
    "a position per token": Case(mode=PositionMode.TOKENS, partial=True),
    "tokens, ragged, window, d=64, group 8": Case(
        counts=RAGGED, mode=PositionMode.TOKENS, options=LIMITS, partial=True,
        group=8, head_dim=64, nibbles=32,
    ),
    "window, soft-cap, sinks": Case(options=LIMITS, sinks=True, partial=True),
    "merged with another partial, sinks": Case(counts=RAGGED, merge=True, sinks=True),
    "all hidden": Case(options=AttentionOptions(0.09, None, 1)),
    "group 1": Case(group=1),
    "group 5": Case(group=5),
    "group 16": Case(group=16),
    "head dim 64": Case(head_dim=64, nibbles=32, group=8),
    **{f"values {b} bits": Case(value_bits=b) for b in (2, 3, 8, 16)},
    **{f"{n} slots": Case(nibbles=n) for n in (32, 48, 96, 128)},
    "128 slots, group 6": Case(nibbles=128, group=6, value_bits=8, counts=RAGGED, merge=True),
    "128 slots, group 6, runs": Case(mode=PositionMode.RUNS, nibbles=128, group=6, value_bits=8),
    "pages of 64": Case(counts=RAGGED, partial=True, page_tokens=64),
    "pages of 64, runs": Case(
        counts=((1, 0, 30), (2, 19, 0)), mode=PositionMode.RUNS, partial=True, blocks=11,
        merge=True, sinks=True, page_tokens=64,
    ),
    "pages of 64, runs, group 6": Case(
        counts=RAGGED, mode=PositionMode.RUNS, partial=True, group=6, value_bits=2, page_tokens=64
    ),
    "pages of 64, d=64, runs, group 3, window": Case(
        mode=PositionMode.RUNS, options=LIMITS, group=3, head_dim=64, nibbles=32, page_tokens=64
    ),
    "pages of 64, d=64, group 7": Case(group=7, head_dim=64, nibbles=64, page_tokens=64),
    "pages of 64, d=64, many in a block": Case(
        counts=((70,), (93,)), blocks=2, group=3, head_dim=64, nibbles=32, page_tokens=64
    ),
    "pages of 64, d=64, runs, many in a block": Case(
        counts=((70,), (93,)), mode=PositionMode.RUNS, blocks=2, group=3, head_dim=64,
        nibbles=32, value_bits=2, page_tokens=64,
    ),
    "pages of 64, 128 slots, group 6, runs": Case(
        mode=PositionMode.RUNS, nibbles=128, group=6, value_bits=8, partial=True, page_tokens=64
    ),
    "pages of 64, 32 slots, runs": Case(
        mode=PositionMode.RUNS, nibbles=32, value_bits=2, partial=True, page_tokens=64
    ),
    "pages of 64, a position per token": Case(
        mode=PositionMode.TOKENS, partial=True, page_tokens=64
    ),
}  # fmt: skip


def error_limit(largest_logit: float) -> float:
    """Error that half precision may bring to an output whose largest logit is so large.

    Queries are turned in it, so a logit is off by a share of itself, and with it the weight of a
    key that outweighs the others.
    """
    return max(ERROR_FLOOR, 2.0**-11 * largest_logit)


def relative_error(got: Tensor, right: Tensor) -> float:
    """Norm of the difference over the norm; NaN counts as infinitely wrong."""
    gap = (got.double() - right).norm() / right.norm().clamp(min=1e-6)
    return float(gap.nan_to_num(9e9))


def case_rope(head_dim: int) -> RopeSpec:
    """A rotary embedding with base 5e5."""
    return RopeSpec(
        head_dim, head_dim, tuple(5e5 ** (-2 * i / head_dim) for i in range(head_dim // 2))
    )


def run_cases(device: torch.device) -> int:
    """Check all cases; returns their number.

    Raises:
        ValueError: A result is wrong.
    """
    for name, case in CASES.items():
        error = run_case(case, device)
        if not error < ERROR_FLOOR:
            raise ValueError(f"wrong result: {name}: error {error}")
    return len(CASES)


def random_bases(layout: PageLayout, num_pages: int) -> Tensor:
    """Positions of consecutive pages in the form of their mode."""
    mode, words = layout.position_mode, layout.num_position_words
    if mode is PositionMode.CONTIGUOUS:
        return torch.arange(num_pages) * layout.page_tokens + 4
    gaps = torch.randint(1, 4, (num_pages, words))
    if mode is not PositionMode.RUNS:
        return (gaps.flatten().cumsum(0) + 3).view(num_pages, words)
    # pages whose runs are apart, follow each other, stand in any order
    kind = (torch.arange(num_pages) + torch.randint(3, ())) % 3
    gaps[kind == 1] = 1
    bases = 16 * (gaps.flatten().cumsum(0).view(num_pages, words) - 1) + 3
    mixed = bases.gather(1, torch.rand(num_pages, words).argsort(1))
    return torch.where((kind == 2)[:, None], mixed, bases)


def build_pages(
    case: Case, layout: PageLayout, num: Tensor, device: torch.device
) -> tuple[Tensor, Tensor, int]:
    """Pages, block table and largest position."""
    total, batch = max(1, int(num.sum())), num.shape[1]
    pages = random_pages(layout, total, device=device)
    table = torch.zeros(HEADS, batch, int(num.max()), dtype=torch.int64)
    order, at = torch.randperm(total), 0
    width, tokens = random_bases(layout, 1).shape[1:], layout.page_tokens
    bases, live = torch.zeros(total, *width, dtype=torch.int64), torch.full((total,), tokens)
    for h, b in torch.cartesian_prod(torch.arange(HEADS), torch.arange(batch)).tolist():
        n = int(num[h, b])
        ids = table[h, b, :n] = order[at : at + n]
        at += n
        bases[ids] = random_bases(layout, n)
        if case.partial and n:
            live[ids[-1]] = int(torch.randint(1, tokens, (1,)))
    last = int(bases.max()) + tokens
    set_counts(pages, live.to(device))
    set_bases(pages, layout, bases.to(device))
    return pages, table.to(device), last


def launch_in_turn(
    decoder: CudaDecode,
    query: Tensor,
    lists: PageLists,
    attend: Callable[[Tensor, PageLists], Tensor],
) -> None:
    """Attend with blocks that find which pages they have, and with blocks that are told.

    Raises:
        ValueError: These differ, or a launch did not leave its workspace as it must be found.
    """
    shares = BlockShares([(decoder, lists)], query.device)
    shares.find()
    (told,) = shares.lists
    attend(-query, told)  # of which nothing may be left
    found = attend(query, lists)
    if not torch.equal(found, attend(query, told)):
        raise ValueError("blocks that are told which pages they have give another result")
    if not decoder.is_clear():
        raise ValueError("a launch left partial results for the next")


def run_case(case: Case, device: torch.device) -> float:
    """Largest error over the rows of one case.

    Raises:
        ValueError: See ``launch_in_turn``.
    """
    options = case.options or AttentionOptions(scale=case.head_dim**-0.5)
    num = torch.tensor(case.counts)
    batch, group = num.shape[1], case.group
    rope, layout = case_rope(case.head_dim), tier_layout(
        case.head_dim, case.nibbles, case.value_bits, case.mode, case.page_tokens
    )  # fmt: skip
    book = case.codebook(device)
    pages, table, last = build_pages(case, layout, num, device)
    turns = TurnTable.build(rope, max_positions=last, device=device)
    decoder = CudaDecode(
        book, rope, turns, value_bits=case.value_bits, group=group, max_batch=batch,
        shape=case.shape(book),
    )  # fmt: skip
    query = torch.randn(batch, HEADS * group, case.head_dim, device=device)
    sinks = 3 * torch.randn(HEADS * group, device=device) if case.sinks else None
    where = torch.full((batch,), last, dtype=torch.int32, device=device)
    other = decoder.empty_result(batch)
    other = replace(other, output=torch.randn_like(other.output), lse=torch.randn_like(other.lse))
    result = decoder.empty_result(batch)
    result.output.fill_(torch.nan)
    lists = replace(PageLists.from_table(table, num.to(device), pages), blocks=case.blocks)

    def attend(asked: Tensor, own: PageLists) -> Tensor:
        decoder.attend(
            asked, PagePool(pages, case.mode), own, options, result=result,
            query_positions=where, sink_logits=sinks, merge_with=other if case.merge else None,
        )  # fmt: skip
        return result.output.clone()

    launch_in_turn(decoder, query, lists, attend)
    exact, worst = Oracle(book, rope, layout), 0.0
    for h, b in torch.cartesian_prod(torch.arange(HEADS), torch.arange(batch)).tolist():
        rows = slice(h * group, (h + 1) * group)
        mine = pages[table[h, b, : int(num[h, b])]]
        right = exact.attend(query[b, rows], mine, h, options, query_position=last)
        if case.merge:
            extra = PartialAttention(other.output[b, rows].double(), other.lse[b, rows].double())
            right = merge_partials([right, extra])
        if sinks is not None:
            weightless = torch.zeros_like(right.output)
            right = merge_partials([right, PartialAttention(weightless, sinks[rows].double())])
        worst = max(worst, relative_error(result.output[b, rows], right.output))
        lse = right.lse.nan_to_num(neginf=-1e4)
        gap = (result.lse[b, rows].double().nan_to_num(neginf=-1e4) - lse).abs().max()
        worst = max(worst, gap.item() / 10)
    return worst
