# SPDX-License-Identifier: Apache-2.0
"""Attention over bfloat16 states: pages of the dense tier, and open tails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sphkv.attention.triton.pieces import (
    mask_logits,
    read_count,
    read_positions,
    soften,
    write_part,
)
from sphkv.attention.triton.rows import NO_WINDOW, PartSlots, QueryRows, tile_tokens
from sphkv.store.layout import PageLayout
from sphkv.store.store import PageStore

_TAIL_TILE = 16


@dataclass(frozen=True, slots=True, eq=False)
class TailList:
    """Open tails of a batch, as a kernel finds them.

    Attributes:
        addresses: ``[sequences, heads, 2]`` int64 addresses of bfloat16 keys and values.
        extents: ``[sequences, 2]`` int64: states in use, position of the first. A tail may be full.
    """

    addresses: Tensor
    extents: Tensor

    @classmethod
    def of(cls, store: PageStore, sequences: Sequence[int], layer: int) -> TailList:
        """The tails of one layer, one per sequence, listed on the host."""
        addresses, strides, extents = [], [], []
        for sequence in sequences:
            tail = store.open_tail(sequence, layer)
            if tail is None:
                # nothing is read of it
                addresses.append((0, 0))
                strides.append(0)
                extents.append((0, store.num_tokens(sequence, layer)))
            else:
                addresses.append((tail.keys.data_ptr(), tail.values.data_ptr()))
                strides.append(tail.keys.stride(0) * tail.keys.element_size())
                extents.append((tail.num_tokens, tail.first_position))
        heads = torch.arange(store.config.geometry.num_kv_heads)
        offsets = torch.tensor(strides)[:, None] * heads
        return cls(torch.tensor(addresses)[:, None] + offsets[..., None], torch.tensor(extents))


@triton.jit
def _attend_tile(
    query, keys, values, token, live, position, seen_from, acc, most, mass, dim, in_dim,
    scale, softcap, window, DIM: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step over bfloat16 ``keys`` and ``values``, both ``[tokens, DIM]``."""
    where = token[:, None] * DIM + dim[None, :]
    # slack may hold any bits, NaN among them
    seen = live[:, None] & in_dim[None, :]
    key = tl.load(keys + where, mask=seen, other=0.0).to(tl.float32)
    value = tl.load(values + where, mask=seen, other=0.0).to(tl.float32)
    logit = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    logit = mask_logits(logit, seen_from, position, live, softcap, window, HAS_CAP)
    weight, most, mass, shrink = soften(logit, most, mass)
    acc = tl.dot(weight, value, acc * shrink[:, None], input_precision=PRECISION)
    return acc, most, mass


@triton.jit
def _dense_kernel(
    address_ptr,  # [pages] i64 page addresses, list by list
    start_ptr,  # [lists + 1] i32 into address_ptr; a list is a (sequence, KV head)
    tail_ptr,  # [lists, 2] i64 addresses of a tail's keys and values
    extent_ptr,  # [sequences, 2] i64 states and first position of a tail
    query_ptr,  # [lists, rows, DIM]; row = query head of the group * queries + query
    position_ptr,  # [sequences, queries] i64
    part_ptr,  # [slots, lists, rows, DIM] f32
    lse_ptr,  # [slots, lists, rows] f32
    rows, queries, first_slot, scale, softcap, window,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, HAS_PAGES: tl.constexpr,
    HAS_TAIL: tl.constexpr, KEY_OFFSET: tl.constexpr, VALUE_OFFSET: tl.constexpr,
    POSITION_OFFSET: tl.constexpr, MODE: tl.constexpr, HAS_CAP: tl.constexpr, ROWS: tl.constexpr,
    PAGE_TILE: tl.constexpr, TAIL_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    live_row = row < rows
    seen_from = tl.load(
        position_ptr + lane // HEADS * queries + row % queries, mask=live_row, other=-1
    )
    dim = tl.arange(0, DIMS)
    in_dim = dim < DIM
    query = tl.load(
        query_ptr + (lane * rows + row)[:, None] * DIM + dim[None, :],
        mask=live_row[:, None] & in_dim[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    most = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    if HAS_TAIL:
        keys = tl.load(tail_ptr + lane * 2).to(tl.pointer_type(tl.bfloat16))
        values = tl.load(tail_ptr + lane * 2 + 1).to(tl.pointer_type(tl.bfloat16))
        count = tl.load(extent_ptr + lane // HEADS * 2).to(tl.int32)
        first = tl.load(extent_ptr + lane // HEADS * 2 + 1)
        share = tl.cdiv(tl.cdiv(count, TAIL_TILE), num_splits)
        stop = tl.minimum((split + 1) * share, tl.cdiv(count, TAIL_TILE))
        for tile in range(split * share, stop):
            token = tile * TAIL_TILE + tl.arange(0, TAIL_TILE)
            acc, most, mass = _attend_tile(
                query, keys, values, token, token < count, first + token, seen_from,
                acc, most, mass, dim, in_dim, scale, softcap, window, DIM, HAS_CAP, PRECISION,
            )  # fmt: skip
    if HAS_PAGES:
        begin, end = tl.load(start_ptr + lane), tl.load(start_ptr + lane + 1)
        share = tl.cdiv(end - begin, num_splits)
        for at in range(begin + split * share, tl.minimum(begin + (split + 1) * share, end)):
            page = tl.load(address_ptr + at).to(tl.pointer_type(tl.uint8))
            count = read_count(page)
            keys = (page + KEY_OFFSET).to(tl.pointer_type(tl.bfloat16))
            values = (page + VALUE_OFFSET).to(tl.pointer_type(tl.bfloat16))
            for tile in range(0, tl.cdiv(count, PAGE_TILE)):
                token = tile * PAGE_TILE + tl.arange(0, PAGE_TILE)
                position = read_positions(page, token, POSITION_OFFSET, MODE)
                acc, most, mass = _attend_tile(
                    query, keys, values, token, token < count, position, seen_from,
                    acc, most, mass, dim, in_dim, scale, softcap, window, DIM, HAS_CAP, PRECISION,
                )  # fmt: skip
    place = ((first_slot + split) * tl.num_programs(0).to(tl.int64) + lane) * rows + row
    write_part(part_ptr, lse_ptr, place, acc, most, mass, live_row, dim, DIM)


def launch_dense(
    lists: tuple[Tensor, Tensor] | None,
    layout: PageLayout | None,
    tails: TailList | None,
    rows: QueryRows,
    parts: PartSlots,
) -> None:
    """Attend to dense pages of one layout and to the open tails, or to one of the two.

    Args:
        lists: Page addresses ``[pages]`` int64 and starts ``[lists + 1]`` int32.
        layout: Layout of the pages.
        tails: Open tails.
        rows: Queries and options.
        parts: Where the partial results go.
    """
    options, head_dim = rows.options, rows.query.shape[3]
    # what is not there is never read; any pointer will do
    pages = lists or (rows.positions, rows.positions)
    open_tails = (tails.addresses, tails.extents) if tails else (rows.positions, rows.positions)
    offsets = (
        (layout.key_offset, layout.value_offset, layout.position_offset) if layout else (0,) * 3
    )
    _dense_kernel[(rows.num_lists, parts.num_splits, rows.num_blocks)](
        *pages, *open_tails, rows.query, rows.positions, parts.output, parts.lse,
        rows.num_rows, rows.num_queries, parts.first, options.scale,
        options.softcap or 1.0, options.window or NO_WINDOW,
        HEADS=rows.num_heads, DIM=head_dim, DIMS=triton.next_power_of_2(max(16, head_dim)),
        HAS_PAGES=layout is not None, HAS_TAIL=tails is not None, KEY_OFFSET=offsets[0],
        VALUE_OFFSET=offsets[1], POSITION_OFFSET=offsets[2],
        MODE=int(layout.position_mode) if layout else 0, HAS_CAP=options.softcap is not None,
        ROWS=rows.block, PAGE_TILE=tile_tokens(layout.page_tokens, head_dim) if layout else 16,
        TAIL_TILE=_TAIL_TILE, PRECISION=rows.precision, num_warps=4,
    )  # fmt: skip
