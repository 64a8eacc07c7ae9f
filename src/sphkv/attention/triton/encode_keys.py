# SPDX-License-Identifier: Apache-2.0
"""Keys of a page to slot codes and radius codes: norm, un-rotate, snap, pack, in one pass.

One program encodes one page. Tokens are handled as ``[2, page / 2]``: the two halves share the
bytes of the slot codes. The arithmetic is that of ``codec/keys.py``, plane by plane.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sphkv.attention.triton.pieces import RADIUS_LO, RADIUS_STEP, turn_angle
from sphkv.attention.triton.search import PLANE_FIELDS, SearchTable
from sphkv.store.layout import PageLayout

# Cosine between a key and its code below which the radius only keeps the norm.
_LEAST_COSINE = tl.constexpr(0.2)
_TINY = tl.constexpr(1.1754943508222875e-38)
_CHANNELS = tl.constexpr(32)
_FIELDS = tl.constexpr(PLANE_FIELDS)


@triton.jit
def quantise_bytes(x, live, page, LO: tl.constexpr, STEP: tl.constexpr):
    """Affine codes of ``x`` over the live states; writes low end and step to the header."""
    low = tl.min(tl.min(tl.where(live, x, float("inf")), 1), 0)
    high = tl.max(tl.max(tl.where(live, x, float("-inf")), 1), 0)
    step = ((high.to(tl.float64) - low.to(tl.float64)) / 255.0).to(tl.float32)
    tl.store((page + LO).to(tl.pointer_type(tl.float32)), low)
    tl.store((page + STEP).to(tl.pointer_type(tl.float32)), step)
    inverse = 1.0 / tl.where(step > 0.0, step, 1.0)
    code = tl.floor((x - low) * tl.where(step > 0.0, inverse, 0.0) + 0.5)
    return tl.minimum(tl.maximum(code, 0.0), 255.0)


@triton.jit
def _unit_plane(key_ptr, plane_ptr, turn_ptr, where, position, inverse, DIM: tl.constexpr):
    """Pre-RoPE components of the unit keys in one plane."""
    plane = tl.load(plane_ptr)
    x = tl.load(key_ptr + where * DIM + tl.load(plane_ptr + 1)).to(tl.float32)
    y = tl.load(key_ptr + where * DIM + tl.load(plane_ptr + 2)).to(tl.float32)
    angle = turn_angle(tl.load(turn_ptr + plane), position)
    cos, sin = tl.cos(angle), tl.sin(angle)
    return (x * cos + y * sin) * inverse, (y * cos - x * sin) * inverse


@triton.jit
def _through_root(root_ptr, x, y):
    """Components as queries see them."""
    u = tl.load(root_ptr) * x + tl.load(root_ptr + 1) * y
    return u, tl.load(root_ptr + 2) * x + tl.load(root_ptr + 3) * y


@triton.jit
def _nearest(seen_ptr, u, v, best, first, LEVELS: tl.constexpr, STRIDE: tl.constexpr,
             MASK: tl.constexpr):  # fmt: skip
    """Improve ``best``: distance in the upper bits, code in the lowest, so a minimum finds it."""
    for level in tl.static_range(LEVELS):
        du = u - tl.load(seen_ptr + level * STRIDE * 2)
        dv = v - tl.load(seen_ptr + level * STRIDE * 2 + 1)
        distance = (du * du + dv * dv).to(tl.int32, bitcast=True)
        best = tl.minimum(best, (distance & MASK) | (first + level))
    return best


@triton.jit
def _nearest_sum(first_ptr, second_ptr, u, v, best, LEVELS: tl.constexpr, STRIDE: tl.constexpr):
    """Joint code ``LEVELS * first + second`` of the nearest sum of two points."""
    for first in range(0, 16):
        best = _nearest(
            second_ptr, u - tl.load(first_ptr + first * 2), v - tl.load(first_ptr + first * 2 + 1),
            best, first * LEVELS, LEVELS, STRIDE, -16 * LEVELS,
        )  # fmt: skip
    return best & (16 * LEVELS - 1)


@triton.jit
def _rest(seen_ptr, one, two, u, v):
    """What a point of each of two adjacent slots leaves over."""
    u -= tl.load(seen_ptr + one * 2) + tl.load(seen_ptr + 64 + two * 2)
    v -= tl.load(seen_ptr + one * 2 + 1) + tl.load(seen_ptr + 64 + two * 2 + 1)
    return u, v


@triton.jit
def _add_point(point_ptr, code, x, y, coded_x, coded_y):
    return coded_x + tl.load(point_ptr + code * 2), coded_y + tl.load(point_ptr + code * 2 + 1)


@triton.jit
def _put_codes(page, slot, code, live, HALF: tl.constexpr, KEY_OFFSET: tl.constexpr):
    """Both halves of a page into the bytes of one slot."""
    shift = tl.arange(0, 2)[:, None] * 4
    packed = tl.sum(tl.where(live, code, 0) << shift, 0)
    tl.store(page + KEY_OFFSET + slot * HALF + tl.arange(0, HALF), packed.to(tl.uint8))


@triton.jit
def _encode_keys_kernel(
    key_ptr,  # [rows, PAGE, DIM]
    position_ptr,  # [rows, PAGE] i64
    count_ptr,  # [rows] i64
    head_ptr,  # [rows] i64
    page_ptr,  # [rows, PAGE_BYTES] u8, header written
    counts_ptr, plane_ptr, root_ptr, seen_ptr, points_ptr, constant_ptr, turn_ptr,
    PAGE: tl.constexpr, DIM: tl.constexpr, SLOTS: tl.constexpr, PAGE_BYTES: tl.constexpr,
    KEY_OFFSET: tl.constexpr, RADIUS_OFFSET: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = PAGE // 2
    PLANES: tl.constexpr = DIM // 2
    token = tl.arange(0, 2)[:, None] * HALF + tl.arange(0, HALF)[None, :]
    live = token < tl.load(count_ptr + row)
    where = row * PAGE + token
    position = tl.load(position_ptr + where)
    page = page_ptr + row * PAGE_BYTES
    head = tl.load(head_ptr + row)
    square = tl.zeros([2, HALF], tl.float32)
    for at in range(0, DIM, _CHANNELS):
        channel = at + tl.arange(0, _CHANNELS)[None, None, :]
        part = tl.load(key_ptr + where[:, :, None] * DIM + channel, mask=channel < DIM, other=0.0)
        part = part.to(tl.float32)
        square += tl.sum(part * part, 2)
    radius = tl.sqrt(square)
    inverse = 1.0 / tl.maximum(radius, _TINY)
    num_12, num_8 = tl.load(counts_ptr + head * 5), tl.load(counts_ptr + head * 5 + 1)
    num_4, num_pairs = tl.load(counts_ptr + head * 5 + 2), tl.load(counts_ptr + head * 5 + 3)
    num_bare = tl.load(counts_ptr + head * 5 + 4)
    planes, roots = plane_ptr + head * PLANES * _FIELDS, root_ptr + head * PLANES * 4
    constants = constant_ptr + head * PLANES * 2
    cosine = tl.zeros([2, HALF], tl.float32)
    length = tl.zeros([2, HALF], tl.float32)
    far = tl.full([2, HALF], 2147483647, tl.int32)
    seen, points = seen_ptr + head * SLOTS * 64, points_ptr + head * SLOTS * 64
    slot = num_12 * 0
    for at in range(0, num_12 + num_8):
        x, y = _unit_plane(key_ptr, planes + at * _FIELDS, turn_ptr, where, position, inverse, DIM)
        u, v = _through_root(roots + at * 4, x, y)
        joint = _nearest_sum(seen + slot * 64, seen + (slot + 1) * 64, u, v, far, 16, 1)
        one, two = joint // 16, joint % 16
        coded_x, coded_y = _add_point(points + slot * 64, one, x, y, 0.0, 0.0)
        coded_x, coded_y = _add_point(points + (slot + 1) * 64, two, x, y, coded_x, coded_y)
        _put_codes(page, slot, one, live, HALF, KEY_OFFSET)
        _put_codes(page, slot + 1, two, live, HALF, KEY_OFFSET)
        if at < num_12:
            rest_u, rest_v = _rest(seen + slot * 64, one, two, u, v)
            three = _nearest(seen + (slot + 2) * 64, rest_u, rest_v, far, 0, 16, 1, -16) & 15
            coded_x, coded_y = _add_point(points + (slot + 2) * 64, three, x, y, coded_x, coded_y)
            _put_codes(page, slot + 2, three, live, HALF, KEY_OFFSET)
            slot += 1
        slot += 2
        cosine += x * coded_x + y * coded_y
        length += coded_x * coded_x + coded_y * coded_y
    for at in range(num_12 + num_8, num_12 + num_8 + num_4):
        x, y = _unit_plane(key_ptr, planes + at * _FIELDS, turn_ptr, where, position, inverse, DIM)
        u, v = _through_root(roots + at * 4, x, y)
        code = _nearest(seen + slot * 64, u, v, far, 0, 16, 1, -16) & 15
        coded_x, coded_y = _add_point(points + slot * 64, code, x, y, 0.0, 0.0)
        _put_codes(page, slot, code, live, HALF, KEY_OFFSET)
        slot += 1
        cosine += x * coded_x + y * coded_y
        length += coded_x * coded_x + coded_y * coded_y
    num_alone = num_12 + num_8 + num_4
    for pair in range(0, num_pairs):
        at, shared = num_alone + 2 * pair, SLOTS - num_pairs + pair
        code = tl.zeros([2, HALF], tl.int32)
        for second in tl.static_range(2):
            plane = planes + (at + second) * _FIELDS
            x, y = _unit_plane(key_ptr, plane, turn_ptr, where, position, inverse, DIM)
            u, v = _through_root(roots + (at + second) * 4, x, y)
            coded_x, coded_y = tl.zeros([2, HALF], tl.float32), tl.zeros([2, HALF], tl.float32)
            side, stride = shared * 64 + second * 32, 1 + 3 * second
            num_singles = tl.load(plane + 3)
            step = far
            if num_singles == 1:
                joint = _nearest_sum(
                    seen + slot * 64, seen + side, u, v, far, 4, 1 + 3 * second
                )  # fmt: skip
                one, step = joint // 4, joint % 4
                coded_x, coded_y = _add_point(points + slot * 64, one, x, y, coded_x, coded_y)
                _put_codes(page, slot, one, live, HALF, KEY_OFFSET)
            else:
                if num_singles == 2:
                    joint = _nearest_sum(seen + slot * 64, seen + (slot + 1) * 64, u, v, far, 16, 1)
                    one, two = joint // 16, joint % 16
                    coded_x, coded_y = _add_point(points + slot * 64, one, x, y, coded_x, coded_y)
                    coded_x, coded_y = _add_point(
                        points + (slot + 1) * 64, two, x, y, coded_x, coded_y
                    )
                    _put_codes(page, slot, one, live, HALF, KEY_OFFSET)
                    _put_codes(page, slot + 1, two, live, HALF, KEY_OFFSET)
                    u, v = _rest(seen + slot * 64, one, two, u, v)
                step = _nearest(seen + side, u, v, far, 0, 4, 1 + 3 * second, -4) & 3
            slot += num_singles
            coded_x, coded_y = _add_point(points + side, step * stride, x, y, coded_x, coded_y)
            code += step * stride
            cosine += x * coded_x + y * coded_y
            length += coded_x * coded_x + coded_y * coded_y
        _put_codes(page, shared, code, live, HALF, KEY_OFFSET)
    for at in range(num_alone + 2 * num_pairs, num_alone + 2 * num_pairs + num_bare):
        x, y = _unit_plane(key_ptr, planes + at * _FIELDS, turn_ptr, where, position, inverse, DIM)
        coded_x, coded_y = tl.load(constants + at * 2), tl.load(constants + at * 2 + 1)
        cosine += x * coded_x + y * coded_y
        length += coded_x * coded_x + coded_y * coded_y
    length = tl.sqrt(length)
    is_near = cosine > _LEAST_COSINE * length
    gain = 1.0 / tl.where(is_near, cosine, tl.maximum(length, 1e-6))
    code = quantise_bytes(radius * gain, live, page, RADIUS_LO, RADIUS_STEP)
    code = tl.where(live, code, 0.0)
    tl.store(page + RADIUS_OFFSET + token, code.to(tl.int32).to(tl.uint8))


def encode_keys_into(
    pages: Tensor,
    layout: PageLayout,
    keys: Tensor,
    positions: Tensor,
    counts: Tensor,
    head_ids: Tensor,
    table: SearchTable,
) -> None:
    """Write slot codes, radius codes and their range into pages.

    Args:
        pages: ``[rows, page_bytes]`` uint8 with headers.
        layout: Layout of a coded tier with a power of two of states.
        keys: ``[rows, tokens, head_dim]`` after rotary embedding; zero past the count.
        positions: ``[rows, tokens]`` int64.
        counts: ``[rows]`` int64.
        head_ids: ``[rows]`` int64.
        table: Slots of the layer and tier.
    """
    _encode_keys_kernel[(len(pages),)](
        keys.contiguous(), positions.contiguous(), counts, head_ids, pages,
        table.counts, table.planes, table.roots, table.seen, table.points, table.constants,
        table.turns,
        PAGE=layout.page_tokens, DIM=layout.head_dim, SLOTS=layout.num_nibbles,
        PAGE_BYTES=layout.page_bytes, KEY_OFFSET=layout.key_offset,
        RADIUS_OFFSET=layout.radius_offset, num_warps=4,
    )  # fmt: skip
