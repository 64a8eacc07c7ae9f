# SPDX-License-Identifier: Apache-2.0
"""Coded pages back to bfloat16, for chunks of a prompt that read what was stored before them.

Many queries read the same context there, so it is cheaper to rebuild it once per layer and step
than to look codes up for every query. Decoding never does this.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sphkv.attention.cuda.fragments import _three_bit_places
from sphkv.attention.cuda.geometry import LANES, PAGE_TOKENS
from sphkv.attention.triton.pieces import (
    POSITION_BASE,
    RADIUS_LO,
    RADIUS_STEP,
    SCALE_LO,
    SCALE_STEP,
    read_count,
    read_float,
    turn_angle,
)
from sphkv.attention.triton.tables import turn_steps
from sphkv.codec.codebook import SLOT_LEVELS, AngleCodebook
from sphkv.codec.hadamard import rotation_matrix
from sphkv.core.rope import RopeSpec
from sphkv.store.layout import PageLayout

_WORD_BYTES = 4
_CHUNK_WORDS = (4, 2, 1)
_TOKENS = tl.constexpr(PAGE_TOKENS)
_LEVELS = tl.constexpr(SLOT_LEVELS)


def _word_places(num_words: int) -> tuple[list[int], list[int]]:
    """Byte of each word of lane 0 inside a tile, and bytes from lane to lane there."""
    places, strides, start = [], [], 0
    for size in _CHUNK_WORDS:
        while num_words - start >= size:
            for word in range(size):
                places.append(start * LANES * _WORD_BYTES + word * _WORD_BYTES)
                strides.append(size * _WORD_BYTES)
            start += size
    return places, strides


@dataclass(frozen=True, slots=True, eq=False)
class RebuildTables:
    """What the kernel reads besides pages, for heads that share a rotary embedding.

    Attributes:
        terms: ``[heads, planes, terms, 2]`` int32: byte of a slot of lane group 0 in the codes of a
            tile, and bytes from one group of lanes to the next.
        points: ``[heads, planes, terms, 16, 2]`` float32; zero for terms that a plane lacks.
        constants: ``[heads, planes, 2]`` float32.
        turns: ``[planes]`` int64, see ``turn_steps``.
        channels: ``[planes, 2]`` int32.
        value_bits: ``[head_dim, 2, fields, 2]`` int32 by upper half of a tile: byte of a code's
            field at the first lane of its dimension, and shift; a field is a code, or one bit of
            three.
        value_strides: ``[head_dim, 2, fields]`` int32 bytes from lane to lane.
        rotation: ``[head_dim, head_dim]`` float16 signs of the inverse rotation.
    """

    terms: Tensor
    points: Tensor
    constants: Tensor
    turns: Tensor
    channels: Tensor
    value_bits: Tensor
    value_strides: Tensor
    rotation: Tensor


def build_rebuild_tables(
    book: AngleCodebook, rope: RopeSpec, layout: PageLayout, device: torch.device | str
) -> RebuildTables:
    """Tables of a codebook's heads.

    Raises:
        ValueError: Values are not coded, or the head dimension is no power of two.
    """
    head_dim = layout.head_dim
    if not layout.tier.has_value_codes or head_dim & (head_dim - 1):
        raise ValueError(f"pages of {layout.tier} with {head_dim} channels cannot be rebuilt")
    book = book.to("cpu")
    slots, points = plane_slots(book)
    terms = fragment_terms(slots, book.num_slots)
    bits, strides = value_fields(layout)
    signs = rotation_matrix(head_dim).sign().to(torch.float16)
    parts = (
        terms,
        points,
        book.constant.float(),
        turn_steps(rope),
        rope.plane_channels().to(torch.int32),
        bits,
        strides,
        signs,
    )
    return RebuildTables(*(part.contiguous().to(device) for part in parts))


def plane_slots(book: AngleCodebook) -> tuple[Tensor, Tensor]:
    """Slots of every plane, most of them one or two, and their points.

    Returns:
        ``[heads, planes, most]`` int64, and ``[heads, planes, most, 16, 2]`` float32, which is zero
        where a plane has fewer.
    """
    heads, planes = book.plane_bits.shape
    slots = torch.arange(book.num_slots)
    is_pair = slots >= book.num_slots - book.num_pairs[:, None]  # [heads, slots]
    # the second half of a single slot repeats the plane with points of zero
    owner = book.slot_plane.clone()
    owner[..., 1] = torch.where(is_pair, owner[..., 1], planes)
    flat = owner.flatten(1)  # [heads, 2 * slots]
    order = torch.argsort(flat, dim=1, stable=True)
    ordered = flat.gather(1, order)
    counts = torch.zeros(heads, planes + 1, dtype=torch.int64)
    counts.scatter_add_(1, ordered, torch.ones_like(ordered))
    starts = counts.cumsum(1) - counts
    rank = torch.arange(flat.shape[1]) - starts.gather(1, ordered)
    most = int(counts[:, :planes].max())
    live = ordered < planes
    head = torch.arange(heads)[:, None].expand_as(ordered)[live]
    at = (head, ordered[live], rank[live])
    slot, half = order[live] // 2, order[live] % 2
    found = torch.zeros(heads, planes, most, dtype=torch.int64)
    found[at] = slot
    points = torch.zeros(heads, planes, most, SLOT_LEVELS, 2)
    points[at] = book.points[head, slot, half].float()
    return found, points


def fragment_terms(slots: Tensor, num_slots: int) -> Tensor:
    """Where the codes of slots begin in a tile, and bytes from one group of lanes to the next.

    Args:
        slots: Int64 of any shape.
        num_slots: Slots of a key.

    Returns:
        ``[..., 2]`` int32.
    """
    places, strides = (torch.tensor(each) for each in _word_places(num_slots // 16))
    word, byte, t = slots // 16, slots % 16 // 4, slots % 4
    first = places[word] + byte + t * strides[word]
    return torch.stack([first, 4 * strides[word]], -1).to(torch.int32)


def value_fields(layout: PageLayout) -> tuple[Tensor, Tensor]:
    """Where the codes of every dimension lie."""
    bits, head_dim = layout.tier.value_bits, layout.head_dim
    num_words = head_dim * bits // 64
    places, strides = _word_places(num_words)
    three = _three_bit_places(num_words) if bits == 3 else []
    fields = 3 if bits == 3 else 1
    found = torch.zeros(head_dim, 2, fields, 2, dtype=torch.int32)
    steps = torch.zeros(head_dim, 2, fields, dtype=torch.int32)
    for dim in range(head_dim):
        feature, g = dim // 8, dim % 8
        for upper in range(2):
            if bits == 3:
                where = [(w, bit // 8, bit % 8) for w, bit in three[2 * feature + upper]]
            elif bits == 16:
                where = [(feature // 2 * 4 + upper * 2 + feature % 2, 0, 0)]
            else:
                per_byte = 8 // bits
                where = [(feature // per_byte, upper, feature % per_byte * bits)]
            for field, (word, byte, shift) in enumerate(where):
                first = places[word] + byte + 4 * g * strides[word]
                found[dim, upper, field, 0], found[dim, upper, field, 1] = first, shift
                steps[dim, upper, field] = strides[word]
    return found, steps


@triton.jit(do_not_specialize=["first_head"])
def _rebuild_kernel(
    cache_ptr,  # [blocks, HEADS, page_bytes] uint8
    blocks_ptr,  # [pages] int64
    places_ptr,  # [pages] int64
    keys_ptr,  # [room, HEADS, head_dim] bfloat16
    values_ptr,
    terms_ptr,
    points_ptr,
    constants_ptr,
    turns_ptr,
    channels_ptr,
    fields_ptr,
    strides_ptr,
    rotation_ptr,
    first_head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    TERMS: tl.constexpr,
    BITS: tl.constexpr,
    FIELDS: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    KEY_OFFSET: tl.constexpr,
    RADIUS_OFFSET: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    TILE: tl.constexpr,
):
    PLANES: tl.constexpr = HEAD_DIM // 2
    page_id, head = tl.program_id(0), tl.program_id(1)
    token = tl.program_id(2) * TILE + tl.arange(0, TILE)
    block = tl.load(blocks_ptr + page_id)
    page = cache_ptr + (block * HEADS + head) * PAGE_BYTES
    live = token < read_count(page)
    base = tl.load((page + POSITION_BASE).to(tl.pointer_type(tl.int32)))
    position = (base + token).to(tl.int64)
    row = (tl.load(places_ptr + page_id) + token) * HEADS + head
    # a token's tile, its lane group for keys, and which nibble it has
    tile, group, nibble = token // 16, token % 8, token % 16 // 8
    gains = page + RADIUS_OFFSET + tile * 32 + group * 4 + nibble
    radius = read_float(page, RADIUS_LO) + read_float(page, RADIUS_STEP) * tl.load(gains).to(
        tl.float32
    )
    scale = read_float(page, SCALE_LO) + read_float(page, SCALE_STEP) * tl.load(gains + 2).to(
        tl.float32
    )
    plane = tl.arange(0, PLANES)
    table = (first_head + head).to(tl.int64) * PLANES + plane  # [PLANES]
    codes = page + KEY_OFFSET + tile * (SLOTS * 8)  # [TILE]
    x = tl.zeros([TILE, PLANES], tl.float32) + tl.load(constants_ptr + table * 2)[None, :]
    y = tl.zeros([TILE, PLANES], tl.float32) + tl.load(constants_ptr + table * 2 + 1)[None, :]
    for term in tl.static_range(TERMS):
        at = table * TERMS + term
        first = tl.load(terms_ptr + at * 2)
        step = tl.load(terms_ptr + at * 2 + 1)
        byte = tl.load(codes[:, None] + first[None, :] + group[:, None] * step[None, :])
        code = (byte.to(tl.int32) >> (4 * nibble)[:, None]) & 15
        point = points_ptr + (at[None, :] * _LEVELS + code) * 2
        x += tl.load(point)
        y += tl.load(point + 1)
    angle = turn_angle(tl.load(turns_ptr + plane)[None, :], position[:, None])
    cos, sin = tl.cos(angle) * radius[:, None], tl.sin(angle) * radius[:, None]
    to = keys_ptr + row[:, None] * HEAD_DIM
    first = tl.load(channels_ptr + plane * 2)[None, :]
    second = tl.load(channels_ptr + plane * 2 + 1)[None, :]
    tl.store(to + first, (x * cos - y * sin).to(tl.bfloat16), mask=live[:, None])
    tl.store(to + second, (x * sin + y * cos).to(tl.bfloat16), mask=live[:, None])
    dim = tl.arange(0, HEAD_DIM)
    lane, odd = token % 8 // 2, token % 2
    stream = page + VALUE_OFFSET + tile * (HEAD_DIM * BITS * 2)
    value = tl.zeros([TILE, HEAD_DIM], tl.int32)
    for field in tl.static_range(FIELDS):
        at = (dim[None, :] * 2 + nibble[:, None]) * FIELDS + field
        place = tl.load(fields_ptr + at * 2) + lane[:, None] * tl.load(strides_ptr + at)
        byte = tl.load(stream[:, None] + place + 2 * odd[:, None]).to(tl.int32)
        part = byte >> tl.load(fields_ptr + at * 2 + 1)
        if FIELDS == 1:
            value += part & ((1 << BITS) - 1)
        else:
            value += (part & 1) << field
    centred = (value.to(tl.float32) - ((1 << BITS) - 1) * 0.5).to(tl.float16)
    signs = tl.load(rotation_ptr + dim[:, None] * HEAD_DIM + dim[None, :])
    turned = tl.dot(centred, signs) * (scale * (HEAD_DIM**-0.5))[:, None]
    tl.store(
        values_ptr + row[:, None] * HEAD_DIM + dim[None, :],
        turned.to(tl.bfloat16),
        mask=live[:, None],
    )


def rebuild_pages(
    cache: Tensor,
    blocks: Tensor,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: RebuildTables,
    layout: PageLayout,
    *,
    first_head: int,
) -> None:
    """Write the states of some blocks of a layer to a workspace.

    Args:
        cache: ``[blocks, heads, page_bytes]`` uint8 pages in fragment order, contiguous.
        blocks: ``[pages]`` int64 blocks.
        places: ``[pages]`` int64: where the first state of each goes.
        keys: ``[room, heads, head_dim]`` bfloat16 workspace.
        values: The same for values.
        tables: Tables of the layer's heads and others.
        layout: Layout of the pages.
        first_head: The layer's first head in the tables.
    """
    heads, head_dim = keys.shape[1:]
    tile = 32
    _rebuild_kernel[(len(blocks), heads, PAGE_TOKENS // tile)](
        cache,
        blocks,
        places,
        keys,
        values,
        tables.terms,
        tables.points,
        tables.constants,
        tables.turns,
        tables.channels,
        tables.value_bits,
        tables.value_strides,
        tables.rotation,
        first_head,
        HEADS=heads,
        HEAD_DIM=head_dim,
        SLOTS=layout.num_nibbles,
        TERMS=tables.terms.shape[2],
        BITS=layout.tier.value_bits,
        FIELDS=tables.value_bits.shape[2],
        PAGE_BYTES=layout.page_bytes,
        KEY_OFFSET=layout.key_offset,
        RADIUS_OFFSET=layout.radius_offset,
        VALUE_OFFSET=layout.value_offset,
        TILE=tile,
        num_warps=4,
    )
