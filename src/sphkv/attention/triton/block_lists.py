# SPDX-License-Identifier: Apache-2.0
"""Page lists of a step from vLLM's block table, in one launch for all layers and heads."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sphkv.attention.cuda.geometry import PAGE_TOKENS, ceil_div
from sphkv.attention.cuda.pages import PageLists
from sphkv.attention.triton.pieces import POSITION_BASE

_CHUNK = 256
_TOKENS = tl.constexpr(PAGE_TOKENS)


@triton.jit(do_not_specialize=["rows", "stride", "layer_stride"])
def _list_pages_kernel(
    plan_ptr,  # [10 * rows + 1] int64, see plan_decode
    table_ptr,  # [rows, stride] int32
    entries_ptr,  # [layers, HEADS * total] int64
    starts_ptr,  # [HEADS * rows + 1] int32
    caches_ptr,  # [layers] int64 addresses of blocks, if prompts may be cut
    rows,
    stride,
    layer_stride,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    HAS_CUTS: tl.constexpr,
):
    row, chunk, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(plan_ptr + 2 * rows + row)
    pages = tl.load(plan_ptr + 3 * rows + row)
    start = tl.load(plan_ptr + 4 * rows + row)
    first_base = tl.load(plan_ptr + 5 * rows + row)
    total = tl.load(plan_ptr + 10 * rows)
    head = tl.arange(0, PADDED_HEADS)
    is_head = head < HEADS
    if (chunk == 0) & (layer == 0):
        tl.store(starts_ptr + head * rows + row, (head * total + start).to(tl.int32), mask=is_head)
        if row == 0:
            tl.store(starts_ptr + HEADS * rows, (HEADS * total).to(tl.int32))
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    live = at < pages
    column = first + at
    if HAS_CUTS:
        kept = tl.load(plan_ptr + 8 * rows + row)
        column += tl.where(at >= kept, tl.load(plan_ptr + 9 * rows + row), 0)
    block = tl.load(table_ptr + row.to(tl.int64) * stride + column, mask=live, other=0)
    base = tl.where(column == 0, first_base, column * _TOKENS)
    number = block.to(tl.int64)[None, :] * HEADS + head[:, None]
    is_live = live[None, :] & is_head[:, None]
    base = tl.zeros([PADDED_HEADS, CHUNK], tl.int64) + base[None, :]
    if HAS_CUTS:
        # every head of a layer kept other pages, which say where they belong
        page = tl.load(caches_ptr + layer) + number * PAGE_BYTES + POSITION_BASE
        own = tl.load(page.to(tl.pointer_type(tl.int32)), mask=is_live & (at < kept)[None, :])
        base = tl.where((at < kept)[None, :], own.to(tl.int64), base)
    place = layer.to(tl.int64) * layer_stride + head[:, None] * total + (start + at)[None, :]
    tl.store(entries_ptr + place, number | (base << 32), mask=is_live)


@dataclass(frozen=True, slots=True, eq=False)
class CutLists:
    """What lists need where prompts may be cut: each layer has its own then.

    Attributes:
        caches: ``[layers]`` int64 addresses of each layer's blocks.
        page_bytes: Bytes of a page.
        layer_stride: Entries from one layer's lists to the next one's.
    """

    caches: Tensor
    page_bytes: int
    layer_stride: int


def list_pages(
    plan: Tensor,
    table: Tensor,
    lists: PageLists,
    *,
    num_heads: int,
    most_pages: int,
    cuts: CutLists | None = None,
) -> None:
    """Write the lists of decoded rows; page numbers count from a layer's first block.

    Args:
        plan: What ``plan_decode`` made, on the device.
        table: ``[rows, columns]`` int32 block ids.
        lists: Where the lists go, with room for them; those of the first layer with ``cuts``.
        num_heads: KV heads; the pages of a block's heads follow one another.
        most_pages: Pages of the longest row.
        cuts: Where prompts may be cut; None if the lists are the same for all layers.
    """
    chunks, layers = max(1, ceil_div(most_pages, _CHUNK)), 1 if cuts is None else len(cuts.caches)
    _list_pages_kernel[(lists.batch, chunks, layers)](
        plan,
        table,
        lists.entries,
        lists.row_start,
        plan if cuts is None else cuts.caches,
        lists.batch,
        table.stride(0),
        0 if cuts is None else cuts.layer_stride,
        HEADS=num_heads,
        PADDED_HEADS=triton.next_power_of_2(num_heads),
        CHUNK=_CHUNK,
        PAGE_BYTES=0 if cuts is None else cuts.page_bytes,
        HAS_CUTS=cuts is not None,
    )
