# SPDX-License-Identifier: Apache-2.0
"""Steps that several kernels share: reading a page, masking logits, online softmax."""

import triton
import triton.language as tl

from sphkv.store.layout import (
    COUNT_OFFSET,
    POSITION_BASE_OFFSET,
    RADIUS_LO_OFFSET,
    RADIUS_STEP_OFFSET,
    SCALE_LO_OFFSET,
    SCALE_STEP_OFFSET,
)

CONTIGUOUS, RUNS = tl.constexpr(0), tl.constexpr(1)
RUN_TOKENS = tl.constexpr(16)
COUNT, POSITION_BASE = tl.constexpr(COUNT_OFFSET), tl.constexpr(POSITION_BASE_OFFSET)
RADIUS_LO, RADIUS_STEP = tl.constexpr(RADIUS_LO_OFFSET), tl.constexpr(RADIUS_STEP_OFFSET)
SCALE_LO, SCALE_STEP = tl.constexpr(SCALE_LO_OFFSET), tl.constexpr(SCALE_STEP_OFFSET)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Turns arrive as 64-bit fractions; the upper 32 bits are more than float32 can tell apart.
_RADIANS = tl.constexpr(6.283185307179586 / 4294967296.0)


@triton.jit
def read_float(page, OFFSET: tl.constexpr):
    """A float of the header."""
    return tl.load((page + OFFSET).to(tl.pointer_type(tl.float32)))


@triton.jit
def read_count(page):
    """Live states of a page."""
    return tl.load((page + COUNT).to(tl.pointer_type(tl.uint16))).to(tl.int32)


@triton.jit
def read_positions(page, token, POSITION_OFFSET: tl.constexpr, MODE: tl.constexpr):
    """Positions of tokens of a page, int64."""
    words = (page + POSITION_OFFSET).to(tl.pointer_type(tl.int32))
    if MODE == CONTIGUOUS:
        base = tl.load((page + POSITION_BASE).to(tl.pointer_type(tl.int32)))
        position = base + token
    elif MODE == RUNS:
        position = tl.load(words + token // RUN_TOKENS) + token % RUN_TOKENS
    else:
        position = tl.load(words + token)
    return position.to(tl.int64)


@triton.jit
def turn_angle(turns, position):
    """Angle of a plane at a position; the 64-bit product wraps as the angle does."""
    return ((turns * position) >> 32).to(tl.float32) * _RADIANS


@triton.jit
def mask_logits(logit, seen_from, position, live, softcap, window, HAS_CAP: tl.constexpr):
    """Soft-cap, causality, window and slack; ``logit [ROWS, TILE]`` in natural units."""
    if HAS_CAP:
        # tanh by exp: both of its limits come out right
        logit = softcap - 2.0 * softcap / (tl.exp2(logit * (2.0 * LOG2E / softcap)) + 1.0)
    distance = seen_from[:, None] - position[None, :]
    visible = live[None, :] & (distance >= 0) & (distance < window)
    return tl.where(visible, logit * LOG2E, float("-inf"))


@triton.jit
def soften(logit, most, mass):
    """One step of online softmax in powers of two: weights, new maximum, new mass, shrink."""
    top = tl.maximum(most, tl.max(logit, 1))
    # rows that have seen no key yet must not compute inf - inf
    safe = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(logit - safe[:, None])
    shrink = tl.exp2(most - safe)
    return weight, top, mass * shrink + tl.sum(weight, 1), shrink


@triton.jit
def write_part(part_ptr, lse_ptr, place, acc, most, mass, live_row, dim, DIM: tl.constexpr):
    """Store a normalised partial output and its log-sum-exp at rows ``place``."""
    output = acc / tl.where(mass > 0.0, mass, 1.0)[:, None]
    where = place[:, None] * DIM + dim[None, :]
    tl.store(part_ptr + where, output, mask=live_row[:, None] & (dim < DIM)[None, :])
    lse = (most + tl.log2(tl.where(mass > 0.0, mass, 1.0))) * LN2
    tl.store(lse_ptr + place, tl.where(mass > 0.0, lse, float("-inf")), mask=live_row)
