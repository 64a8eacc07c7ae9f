# SPDX-License-Identifier: Apache-2.0
"""Attention over coded pages, read as they lie in the store.

One program takes one (sequence, KV head), some query rows and a share of the head's pages. A
logit is a sum over entries of the query's product with a point turned by position: a few
entries of a few tokens exist at a time, never a dense key. In pages with contiguous positions
the query is turned back by the tile's first position and points only by their place in the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sphkv.attention.triton.pieces import (
    CONTIGUOUS,
    RADIUS_LO,
    RADIUS_STEP,
    SCALE_LO,
    SCALE_STEP,
    mask_logits,
    read_count,
    read_float,
    read_positions,
    soften,
    turn_angle,
    write_part,
)
from sphkv.attention.triton.rows import NO_WINDOW, PartSlots, QueryRows, tile_tokens
from sphkv.attention.triton.tables import ENTRY_BLOCK, OFFSETS, EntryTable
from sphkv.store.layout import PageLayout

_ENTRY_BLOCK = tl.constexpr(ENTRY_BLOCK)
_OFFSETS = tl.constexpr(OFFSETS)


@triton.jit
def _entry_logits(
    page, query_ptr, row, live_row, head, position, code_column, shift,
    entry_ptr, point_ptr, turn_ptr, offset_ptr,
    DIM: tl.constexpr, PAGE: tl.constexpr, KEY_OFFSET: tl.constexpr, ENTRIES: tl.constexpr,
    MODE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``[ROWS, TILE]`` products of queries with coded directions."""
    place = tl.arange(0, TILE)
    # all positions of a contiguous tile follow its first one
    first = tl.min(position, 0)
    acc = tl.zeros([ROWS, TILE], tl.float32)
    for at in range(0, ENTRIES, _ENTRY_BLOCK):
        entry = head * ENTRIES + at + tl.arange(0, _ENTRY_BLOCK)
        slot = tl.load(entry_ptr + entry * 4)
        plane = tl.load(entry_ptr + entry * 4 + 1)
        x_channel = tl.load(entry_ptr + entry * 4 + 2)
        y_channel = tl.load(entry_ptr + entry * 4 + 3)
        rows = query_ptr + row[:, None] * DIM
        qx = tl.load(rows + x_channel[None, :], mask=live_row[:, None], other=0.0).to(tl.float32)
        qy = tl.load(rows + y_channel[None, :], mask=live_row[:, None], other=0.0).to(tl.float32)
        turns = tl.load(turn_ptr + plane)
        if MODE == CONTIGUOUS:
            angle = turn_angle(turns, first)
            back_cos, back_sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
            qx, qy = qx * back_cos + qy * back_sin, qy * back_cos - qx * back_sin
            offset = offset_ptr + (plane[:, None] * _OFFSETS + place[None, :]) * 2
            cos, sin = tl.load(offset), tl.load(offset + 1)
        else:
            angle = turn_angle(turns[:, None], position[None, :])
            cos, sin = tl.cos(angle), tl.sin(angle)
        packed = tl.load(page + KEY_OFFSET + slot[:, None] * (PAGE // 2) + code_column[None, :])
        code = (packed.to(tl.int32) >> shift) & 15
        point = point_ptr + (entry[:, None] * 16 + code) * 2
        x, y = tl.load(point), tl.load(point + 1)
        acc = tl.dot(qx, x * cos - y * sin, acc, input_precision=PRECISION)
        acc = tl.dot(qy, x * sin + y * cos, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _value_stream(
    start, token, dim, in_dim, DIM: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Codes ``[TILE, DIMS]`` of a stream of 1, 2, 4 or 8 bits."""
    BLOCK: tl.constexpr = 32 // BITS
    within = token % BLOCK
    byte = ((token // BLOCK)[:, None] * DIM + dim[None, :]) * 4 + (within % 4)[:, None]
    packed = tl.load(start + byte, mask=in_dim[None, :], other=0).to(tl.int32)
    return (packed >> (within // 4 * BITS)[:, None]) & ((1 << BITS) - 1)


@triton.jit
def centred_values(
    page, token, live, dim,
    DIM: tl.constexpr, PAGE: tl.constexpr, VALUE_OFFSET: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Values ``[TILE, DIMS]``: codes less their midpoint, or bfloat16 as it is."""
    in_dim = dim < DIM
    start = page + VALUE_OFFSET
    if BITS == 16:
        where = token[:, None] * DIM + dim[None, :]
        # slack may hold any bits, NaN among them
        seen = live[:, None] & in_dim[None, :]
        dense = start.to(tl.pointer_type(tl.bfloat16))
        return tl.load(dense + where, mask=seen, other=0.0).to(tl.float32)
    if BITS == 3:
        low = _value_stream(start, token, dim, in_dim, DIM, 2)
        high = _value_stream(start + PAGE * DIM // 4, token, dim, in_dim, DIM, 1)
        return (low | (high << 2)).to(tl.float32) - 3.5
    return _value_stream(start, token, dim, in_dim, DIM, BITS).to(tl.float32) - (
        ((1 << BITS) - 1) * 0.5
    )


@triton.jit
def _coded_kernel(
    address_ptr,  # [pages] i64 page addresses, list by list
    start_ptr,  # [lists + 1] i32 into address_ptr; a list is a (sequence, KV head)
    entry_ptr,  # [heads, ENTRIES, 4] i32
    point_ptr,  # [heads, ENTRIES, 16, 2] f32
    turn_ptr,  # [planes] i64
    offset_ptr,  # [planes, 64, 2] f32
    query_ptr,  # [lists, rows, DIM]; row = query head of the group * queries + query
    position_ptr,  # [sequences, queries] i64
    part_ptr,  # [slots, lists, rows, DIM] f32
    lse_ptr,  # [slots, lists, rows] f32
    rows, queries, first_slot, scale, softcap, window,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, PAGE: tl.constexpr,
    KEY_OFFSET: tl.constexpr, RADIUS_OFFSET: tl.constexpr, SCALE_OFFSET: tl.constexpr,
    VALUE_OFFSET: tl.constexpr, POSITION_OFFSET: tl.constexpr, BITS: tl.constexpr,
    MODE: tl.constexpr, ENTRIES: tl.constexpr, HAS_CAP: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    live_row = row < rows
    head = (lane % HEADS).to(tl.int32)
    query_row = lane * rows + row
    seen_from = tl.load(
        position_ptr + lane // HEADS * queries + row % queries, mask=live_row, other=-1
    )
    dim = tl.arange(0, DIMS)
    begin, end = tl.load(start_ptr + lane), tl.load(start_ptr + lane + 1)
    share = tl.cdiv(end - begin, num_splits)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for at in range(begin + split * share, tl.minimum(begin + (split + 1) * share, end)):
        page = tl.load(address_ptr + at).to(tl.pointer_type(tl.uint8))
        count = read_count(page)
        for tile in range(0, tl.cdiv(count, TILE)):
            token = tile * TILE + tl.arange(0, TILE)
            live = token < count
            position = read_positions(page, token, POSITION_OFFSET, MODE)
            is_high = (tile * TILE) // (PAGE // 2)
            logit = _entry_logits(
                page, query_ptr, query_row, live_row, head, position,
                token - is_high * (PAGE // 2), is_high * 4,
                entry_ptr, point_ptr, turn_ptr, offset_ptr,
                DIM, PAGE, KEY_OFFSET, ENTRIES, MODE, ROWS, TILE, PRECISION,
            )  # fmt: skip
            radius = tl.load(page + RADIUS_OFFSET + token).to(tl.float32)
            radius = read_float(page, RADIUS_LO) + read_float(page, RADIUS_STEP) * radius
            logit = logit * (radius * scale)[None, :]
            logit = mask_logits(logit, seen_from, position, live, softcap, window, HAS_CAP)
            weight, most, mass, shrink = soften(logit, most, mass)
            if BITS != 16:
                gain = tl.load(page + SCALE_OFFSET + token).to(tl.float32)
                gain = read_float(page, SCALE_LO) + read_float(page, SCALE_STEP) * gain
                weight = weight * gain[None, :]
            value = centred_values(page, token, live, dim, DIM, PAGE, VALUE_OFFSET, BITS)
            acc = tl.dot(weight, value, acc * shrink[:, None], input_precision=PRECISION)
    place = ((first_slot + split) * tl.num_programs(0).to(tl.int64) + lane) * rows + row
    write_part(part_ptr, lse_ptr, place, acc, most, mass, live_row, dim, DIM)


def launch_coded(
    lists: tuple[Tensor, Tensor],
    table: EntryTable,
    layout: PageLayout,
    rows: QueryRows,
    parts: PartSlots,
) -> None:
    """Attend to the coded pages of one layout.

    Args:
        lists: Page addresses ``[pages]`` int64 and starts ``[lists + 1]`` int32.
        table: Entries of the layer and tier.
        layout: Layout of the pages.
        rows: Queries and options.
        parts: Where the partial results go.
    """
    options = rows.options
    # both nibbles of a byte belong to one tile each
    tile = tile_tokens(layout.page_tokens // 2, layout.head_dim)
    grid = (rows.num_lists, parts.num_splits, rows.num_blocks)
    _coded_kernel[grid](
        *lists, table.entries, table.points, table.turns, table.offsets,
        rows.query, rows.positions, parts.output, parts.lse,
        rows.num_rows, rows.num_queries, parts.first, options.scale,
        options.softcap or 1.0, options.window or NO_WINDOW,
        HEADS=rows.num_heads, DIM=layout.head_dim,
        DIMS=triton.next_power_of_2(max(16, layout.head_dim)), PAGE=layout.page_tokens,
        KEY_OFFSET=layout.key_offset, RADIUS_OFFSET=layout.radius_offset,
        SCALE_OFFSET=layout.scale_offset, VALUE_OFFSET=layout.value_offset,
        POSITION_OFFSET=layout.position_offset, BITS=layout.tier.value_bits,
        MODE=int(layout.position_mode), ENTRIES=table.num_entries,
        HAS_CAP=options.softcap is not None, ROWS=rows.block, TILE=tile,
        PRECISION=rows.precision, num_warps=4,
    )  # fmt: skip
