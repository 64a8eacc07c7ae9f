# SPDX-License-Identifier: Apache-2.0
"""Page lists of a step from vLLM's block table, in one launch for all layers and heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sphkv.attention.cuda.geometry import PAGE_TOKENS, ceil_div
from sphkv.attention.cuda.pages import PageLists

_CHUNK = 256
_TOKENS = tl.constexpr(PAGE_TOKENS)


@triton.jit(do_not_specialize=["rows", "stride"])
def _list_pages_kernel(
    plan_ptr,  # [8 * rows + 1] int64, see plan_decode
    table_ptr,  # [rows, stride] int32
    entries_ptr,  # [HEADS * total] int64
    starts_ptr,  # [HEADS * rows + 1] int32
    rows,
    stride,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, chunk = tl.program_id(0), tl.program_id(1)
    first = tl.load(plan_ptr + 2 * rows + row)
    pages = tl.load(plan_ptr + 3 * rows + row)
    start = tl.load(plan_ptr + 4 * rows + row)
    first_base = tl.load(plan_ptr + 5 * rows + row)
    total = tl.load(plan_ptr + 8 * rows)
    head = tl.arange(0, PADDED_HEADS)
    is_head = head < HEADS
    if chunk == 0:
        tl.store(starts_ptr + head * rows + row, (head * total + start).to(tl.int32), mask=is_head)
        if row == 0:
            tl.store(starts_ptr + HEADS * rows, (HEADS * total).to(tl.int32))
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    live = at < pages
    column = first + at
    block = tl.load(table_ptr + row.to(tl.int64) * stride + column, mask=live, other=0)
    base = tl.where(column == 0, first_base, column * _TOKENS)
    number = block.to(tl.int64)[None, :] * HEADS + head[:, None]
    place = head[:, None] * total + (start + at)[None, :]
    tl.store(
        entries_ptr + place, number | (base << 32)[None, :], mask=live[None, :] & is_head[:, None]
    )


def list_pages(
    plan: Tensor, table: Tensor, lists: PageLists, *, num_heads: int, most_pages: int
) -> None:
    """Write the lists of decoded rows; page numbers count from a layer's first block.

    Args:
        plan: What ``plan_decode`` made, on the device.
        table: ``[rows, columns]`` int32 block ids.
        lists: Where the lists go, with room for them.
        num_heads: KV heads; the pages of a block's heads follow one another.
        most_pages: Pages of the longest row.
    """
    _list_pages_kernel[(lists.batch, max(1, ceil_div(most_pages, _CHUNK)))](
        plan,
        table,
        lists.entries,
        lists.row_start,
        lists.batch,
        table.stride(0),
        HEADS=num_heads,
        PADDED_HEADS=triton.next_power_of_2(num_heads),
        CHUNK=_CHUNK,
    )
