# SPDX-License-Identifier: Apache-2.0
"""Values of a page to codes and scales: rotate, fit a step per token, snap, pack.

Two passes, because a page's scale range is known only when all its steps are: the first finds
the step of every token, the second quantises the steps, snaps and packs. Rotating twice is
cheaper than keeping the rotated values. The arithmetic is that of ``codec/values.py``.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from sphkv.attention.triton.encode_keys import quantise_bytes
from sphkv.attention.triton.pieces import SCALE_LO, SCALE_STEP, read_float
from sphkv.codec.clipping import CLIP_RANGE, NUM_CELLS, levels_per_middle
from sphkv.codec.hadamard import rotation_matrix
from sphkv.codec.values import COARSE_STEP, NUM_REFINEMENTS, READ_GAIN
from sphkv.store.layout import PageLayout

_TILE = 32


@triton.jit
def _inverse(x):
    """Reciprocal, or 0 where there is none."""
    return tl.where(x > 1.2e-38, 1.0 / tl.where(x > 1.2e-38, x, 1.0), 0.0)


@triton.jit
def _unit_values(value_ptr, rotation_ptr, row, token, dim, scale, DIM: tl.constexpr,
                 HAS_SIGNS: tl.constexpr):  # fmt: skip
    """Rotated values ``[TILE, DIMS]`` with peak 1, and the peaks."""
    in_dim = dim < DIM
    value = tl.load(
        value_ptr + (row + token)[:, None] * DIM + dim[None, :], mask=in_dim[None, :], other=0.0
    )
    square = in_dim[:, None] & in_dim[None, :]
    rotation = tl.load(rotation_ptr + dim[:, None] * DIM + dim[None, :], mask=square, other=0.0)
    # bfloat16 numbers times signs lose nothing in tf32
    PRECISION: tl.constexpr = "tf32" if HAS_SIGNS else "tf32x3"
    rotated = tl.dot(value.to(tl.float32), rotation, input_precision=PRECISION) * scale
    peak = tl.max(tl.abs(rotated), 1)
    return rotated * _inverse(peak)[:, None], peak


@triton.jit
def _snap(unit, step, in_dim, HALF: tl.constexpr):
    """Nearest centred levels; zero outside the head."""
    ratio = tl.floor(unit * _inverse(step)[:, None])
    centred = tl.minimum(tl.maximum(ratio, -HALF), HALF - 1.0) + 0.5
    return tl.where(in_dim[None, :], centred, 0.0)


@triton.jit
def _least_squares(unit, step, in_dim, HALF: tl.constexpr):
    centred = _snap(unit, step, in_dim, HALF)
    along = tl.sum(unit * centred, 1)
    return along / tl.sum(centred * centred, 1)


@triton.jit
def _clipped_start(unit, factor_ptr, in_dim, CELLS: tl.constexpr, RATIOS: tl.constexpr,
                   HALF: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Step of the clipping ratio that explains most; see ``codec/clipping.py``.

    All numbers are whole, and float32 holds their sums exactly.
    """
    middle = 2.0 * tl.minimum(tl.floor(tl.abs(unit) * (CELLS - 0.5)), CELLS - 1.0) + 1.0
    best_step = tl.zeros([TILE], tl.float32)
    best_gain = tl.full([TILE], -1.0, tl.float32)
    for at in range(RATIOS):
        level = tl.minimum(tl.floor(middle * tl.load(factor_ptr + at)), HALF - 1.0)
        level = tl.where(in_dim[None, :], 2.0 * level + 1.0, 0.0)
        along = tl.sum(level * middle, 1)
        step = along / tl.sum(level * level, 1)
        best_step = tl.where(along * step > best_gain, step, best_step)
        best_gain = tl.maximum(along * step, best_gain)
    return best_step / (CELLS - 0.5)


@triton.jit
def _steps_kernel(
    value_ptr,  # [rows, PAGE, DIM]
    rotation_ptr,  # [DIM, DIM] f32
    factor_ptr,  # [RATIOS] f32, levels per middle of a cell; nothing where no ratio is chosen
    step_ptr,  # [rows, PAGE] f32
    scale,
    PAGE: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, HALF: tl.constexpr,
    RATIOS: tl.constexpr, CELLS: tl.constexpr, REFINEMENTS: tl.constexpr, TILE: tl.constexpr,
    HAS_SIGNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = tl.program_id(0).to(tl.int64) * PAGE
    dim = tl.arange(0, DIMS)
    in_dim = dim < DIM
    unit, peak = _unit_values(value_ptr, rotation_ptr, row, token, dim, scale, DIM, HAS_SIGNS)
    if RATIOS:
        step = _clipped_start(unit, factor_ptr, in_dim, CELLS, RATIOS, HALF, TILE)
    else:
        step = tl.zeros([TILE], tl.float32) + 1 / (HALF - 0.5)
    for _ in range(REFINEMENTS):
        step = _least_squares(unit, step, in_dim, HALF)
    tl.store(step_ptr + row + token, step * peak)


@triton.jit
def _put_stream(start, codes, first_token, dim, in_dim, DIM: tl.constexpr, DIMS: tl.constexpr,
                BITS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Pack codes ``[TILE, DIMS]`` of one stream; see ``pack_value_codes``."""
    PLACES: tl.constexpr = 8 // BITS
    BLOCKS: tl.constexpr = TILE * BITS // 32
    shift = (tl.arange(0, PLACES) * BITS)[None, :, None, None]
    packed = tl.sum(tl.reshape(codes, [BLOCKS, PLACES, 4, DIMS]) << shift, 1)
    block = (first_token * BITS // 32 + tl.arange(0, BLOCKS))[:, None, None]
    where = (block * DIM + dim[None, None, :]) * 4 + tl.arange(0, 4)[None, :, None]
    tl.store(start + where, packed.to(tl.uint8), mask=in_dim[None, None, :])


@triton.jit
def _values_kernel(
    value_ptr,  # [rows, PAGE, DIM]
    rotation_ptr,  # [DIM, DIM] f32
    step_ptr,  # [rows, PAGE] f32
    count_ptr,  # [rows] i64
    page_ptr,  # [rows, PAGE_BYTES] u8, header written
    scale,
    gain,
    coarse,
    PAGE: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, HALF: tl.constexpr,
    BITS: tl.constexpr, PAGE_BYTES: tl.constexpr, SCALE_OFFSET: tl.constexpr,
    VALUE_OFFSET: tl.constexpr, TILE: tl.constexpr, HAS_SIGNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    page, row = page_ptr + program * PAGE_BYTES, program * PAGE
    count = tl.load(count_ptr + program)
    every = tl.arange(0, PAGE)[None, :]
    scale_code = quantise_bytes(
        tl.load(step_ptr + row + every), every < count, page, SCALE_LO, SCALE_STEP
    )
    tl.store(page + SCALE_OFFSET + every, scale_code.to(tl.int32).to(tl.uint8))
    # tiles below read what all threads have written here
    tl.debug_barrier()
    low, step = read_float(page, SCALE_LO), read_float(page, SCALE_STEP)
    dim = tl.arange(0, DIMS)
    in_dim = dim < DIM
    for first in range(0, PAGE, TILE):
        token = first + tl.arange(0, TILE)
        live = token < count
        unit, peak = _unit_values(value_ptr, rotation_ptr, row, token, dim, scale, DIM, HAS_SIGNS)
        to_unit = _inverse(peak)
        nearest = tl.load(page + SCALE_OFFSET + token).to(tl.float32)
        best = nearest
        is_coarse = live & (step > coarse * (low + step * nearest))
        if tl.max(is_coarse.to(tl.int32), 0) > 0:
            least = tl.full([TILE], float("inf"), tl.float32)
            for turn in tl.static_range(3):
                # the nearest code itself, then one below and one above
                offset = (turn == 2) * 1.0 - (turn == 1) * 1.0
                code = tl.minimum(tl.maximum(nearest + offset, 0.0), 255.0)
                size = (low + step * code) * to_unit
                rest = _snap(unit, size, in_dim, HALF) * size[:, None] - unit
                error = tl.sum(rest * rest, 1)
                best = tl.where(is_coarse & (error < least), code, best)
                least = tl.minimum(least, error)
        size = (low + step * best) * to_unit
        codes = (_snap(unit, size, in_dim, HALF) + (HALF - 0.5)).to(tl.int32)
        codes = tl.where(live[:, None] & in_dim[None, :], codes, 0)
        best = tl.where(live, best, 0.0)
        tl.store(page + SCALE_OFFSET + token, best.to(tl.int32).to(tl.uint8))
        start = page + VALUE_OFFSET
        if BITS == 3:
            _put_stream(start, codes & 3, first, dim, in_dim, DIM, DIMS, 2, TILE)
            high = start + PAGE * DIM // 4
            _put_stream(high, codes >> 2, first, dim, in_dim, DIM, DIMS, 1, TILE)
        else:
            _put_stream(start, codes, first, dim, in_dim, DIM, DIMS, BITS, TILE)
    # a reader sees the unbiased steps, once all threads have used the others
    tl.debug_barrier()
    tl.store((page + SCALE_LO).to(tl.pointer_type(tl.float32)), low * gain)
    tl.store((page + SCALE_STEP).to(tl.pointer_type(tl.float32)), step * gain)


def encode_values_into(pages: Tensor, layout: PageLayout, values: Tensor, counts: Tensor) -> None:
    """Write value codes, scale codes and their range into pages.

    Args:
        pages: ``[rows, page_bytes]`` uint8 with headers.
        layout: Layout of a coded tier with value codes and a power of two of states.
        values: ``[rows, tokens, head_dim]``; zero past the count.
        counts: ``[rows]`` int64.
    """
    bits, head_dim, values = layout.tier.value_bits, layout.head_dim, values.contiguous()
    rotation, scale = _scaled_rotation(head_dim, values.device)
    has_signs = scale != 1.0 and values.dtype == torch.bfloat16
    steps = torch.empty(values.shape[:2], device=values.device)
    factors = _level_factors(bits, values.device)
    shape = {
        "PAGE": layout.page_tokens,
        "DIM": head_dim,
        "DIMS": triton.next_power_of_2(max(16, head_dim)),
        "HALF": 1 << (bits - 1),
        "TILE": _TILE,
        "HAS_SIGNS": has_signs,
    }
    _steps_kernel[(len(pages), layout.page_tokens // _TILE)](
        values, rotation, factors, steps, scale,
        RATIOS=len(factors), CELLS=NUM_CELLS, REFINEMENTS=NUM_REFINEMENTS, num_warps=4, **shape,
    )  # fmt: skip
    _values_kernel[(len(pages),)](
        values, rotation, steps, counts, pages, scale, READ_GAIN[bits], COARSE_STEP[bits],
        BITS=bits, PAGE_BYTES=layout.page_bytes, SCALE_OFFSET=layout.scale_offset,
        VALUE_OFFSET=layout.value_offset, num_warps=4, **shape,
    )  # fmt: skip


@functools.lru_cache(maxsize=16)
def _level_factors(bits: int, device: torch.device) -> Tensor:
    """``levels_per_middle``; nothing for a width that is not clipped."""
    return (levels_per_middle(bits) if bits in CLIP_RANGE else torch.empty(0)).to(device)


@functools.lru_cache(maxsize=16)
def _scaled_rotation(head_dim: int, device: torch.device) -> tuple[Tensor, float]:
    """The rotation as signs and one scale where it is a Hadamard matrix; else as it is, and 1."""
    rotation = rotation_matrix(head_dim, device=device)
    if head_dim & (head_dim - 1):
        return rotation, 1.0
    return rotation.sign().contiguous(), head_dim**-0.5
