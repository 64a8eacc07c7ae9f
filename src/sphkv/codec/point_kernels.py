# SPDX-License-Identifier: Apache-2.0
"""Points of the plane on a GPU: which is nearest, and where samples would have them.

Each row is a plane of its own. A program has one row and goes through all rounds of a fit, so that
neither distances nor memberships are written down; samples stay in the cache between rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from sphkv.codec.codebook import CELL_BITS, PlaneCodebooks

# Pairs of a sample and a point that a program looks at together, and samples searched together.
_PAIRS, _SEARCHED = 2048, 1024
_WARPS = 4
# Samples that a program codes, one to a thread.
_CODED = 128
# Less than any mass of samples; a point that has none stays where it is.
_TINY = tl.constexpr(1e-20)


@triton.jit
def _load_samples(x, weight, first, tokens, row, CHUNK: tl.constexpr):
    """Both components and the weight of some samples; those behind the last weigh nothing."""
    token = first + tl.arange(0, CHUNK)
    is_token = token < tokens
    at = row * tokens + token
    u = tl.load(x + 2 * at, mask=is_token, other=0.0)
    v = tl.load(x + 2 * at + 1, mask=is_token, other=0.0)
    return u, v, tl.load(weight + at, mask=is_token, other=0.0)


@triton.jit
def _load_points(points, row, LEVELS: tl.constexpr):
    at = points + 2 * (row * LEVELS + tl.arange(0, LEVELS))
    return tl.load(at), tl.load(at + 1)


@triton.jit
def _store_points(points, first, px, py, LEVELS: tl.constexpr):
    at = points + 2 * (first + tl.arange(0, LEVELS))
    tl.store(at, px)
    tl.store(at + 1, py)


@triton.jit
def _distances(u, v, px, py):
    """Squared, ``[samples, points]``."""
    along, across = u[:, None] - px[None, :], v[:, None] - py[None, :]
    return along * along + across * across


@triton.jit
def _pick(is_own, px, py):
    """Each sample's own point."""
    x = tl.sum(tl.where(is_own, px[None, :], 0.0), 1)
    return x, tl.sum(tl.where(is_own, py[None, :], 0.0), 1)


@triton.jit
def _means(mass, u, v, px, py):
    """Where points come to lie, from sums ``[samples, points]`` that are not added up yet."""
    total = tl.sum(mass, 0)
    most = tl.maximum(total, _TINY)
    x = tl.where(total > 0, tl.sum(u, 0) / most, px)
    return x, tl.where(total > 0, tl.sum(v, 0) / most, py)


@triton.jit(do_not_specialize=["tokens", "chunks"])
def _nearest_kernel(
    x, points, found, tokens, chunks, LEVELS: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr
):
    """Number of the nearest point of every sample, the first of equally near ones."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    token = tl.program_id(0) % chunks * CHUNK + tl.arange(0, CHUNK)
    is_token = token < tokens
    at = row * tokens + token
    u = tl.load(x + 2 * at, mask=is_token, other=0.0)
    v = tl.load(x + 2 * at + 1, mask=is_token, other=0.0)
    best = tl.full([CHUNK], float("inf"), tl.float32)
    number = tl.zeros([CHUNK], tl.int32)
    for first in range(0, LEVELS, STEP):
        for k in tl.static_range(STEP):
            level = first + k
            one = points + 2 * (row * LEVELS + level)
            along, across = u - tl.load(one), v - tl.load(one + 1)
            distance = along * along + across * across
            number = tl.where(distance < best, level, number)
            best = tl.minimum(distance, best)
    tl.store(found + at, number.to(tl.int64), mask=is_token)


@triton.jit
def _snap(u, v, points, others, roots, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """The nearest of all sums of two points, and what it leaves over, as queries see both."""
    best = tl.zeros_like(u) + float("inf")
    rest_u, rest_v, own_x, own_y = u, v, u, v
    a, b, c, d = roots
    for first in range(FIRST):
        for second in range(SECOND):
            x = tl.load(points + 2 * first)
            y = tl.load(points + 2 * first + 1)
            if SECOND > 1:
                x += tl.load(others + 2 * second)
                y += tl.load(others + 2 * second + 1)
            along, across = u - (a * x + b * y), v - (c * x + d * y)
            distance = along * along + across * across
            is_nearer = distance < best
            best = tl.where(is_nearer, distance, best)
            own_x, own_y = tl.where(is_nearer, x, own_x), tl.where(is_nearer, y, own_y)
            rest_u, rest_v = tl.where(is_nearer, along, rest_u), tl.where(is_nearer, across, rest_v)
    return own_x, own_y, rest_u, rest_v


@triton.jit
def _store_class(coded, number, rows, row, tokens, token, x, y):
    """Coded points of one cell class."""
    at = coded + 2 * ((number * rows + row) * tokens + token)
    tl.store(at, x, mask=token < tokens)
    tl.store(at + 1, y, mask=token < tokens)


@triton.jit(do_not_specialize=["rows", "tokens", "chunks"])
def _cells_kernel(
    x, root, mean, pair, single, joint, halves, stages, coded, rows, tokens, chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Points of all cell classes for some samples of a plane."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    token = tl.program_id(0) % chunks * CHUNK + tl.arange(0, CHUNK)
    at = x + 2 * (row * tokens + token)
    first = tl.load(at, mask=token < tokens, other=0.0)
    second = tl.load(at + 1, mask=token < tokens, other=0.0)
    a, b = tl.load(root + 4 * row), tl.load(root + 4 * row + 1)
    c, d = tl.load(root + 4 * row + 2), tl.load(root + 4 * row + 3)
    roots = (a, b, c, d)
    u, v = a * first + b * second, c * first + d * second
    none = tl.zeros_like(u)
    mean_x, mean_y = tl.load(mean + 2 * row) + none, tl.load(mean + 2 * row + 1) + none
    _store_class(coded, 0, rows, row, tokens, token, mean_x, mean_y)
    own_x, own_y, _, _ = _snap(u, v, pair + 8 * row, pair, roots, 4, 1)
    _store_class(coded, 1, rows, row, tokens, token, own_x, own_y)
    own_x, own_y, _, _ = _snap(u, v, single + 32 * row, single, roots, 16, 1)
    _store_class(coded, 2, rows, row, tokens, token, own_x, own_y)
    half, stage = halves + 16 * row, stages + 96 * row
    own_x, own_y, _, _ = _snap(u, v, joint + 32 * row, half, roots, 16, 4)
    _store_class(coded, 3, rows, row, tokens, token, own_x, own_y)
    sum_x, sum_y, u, v = _snap(u, v, stage, stage + 32, roots, 16, 16)
    _store_class(coded, 4, rows, row, tokens, token, sum_x, sum_y)
    own_x, own_y, _, _ = _snap(u, v, half + 8, half, roots, 4, 1)
    _store_class(coded, 5, rows, row, tokens, token, sum_x + own_x, sum_y + own_y)
    own_x, own_y, _, _ = _snap(u, v, stage + 64, stage, roots, 16, 1)
    _store_class(coded, 6, rows, row, tokens, token, sum_x + own_x, sum_y + own_y)


@triton.jit
def _longer_axis(mass, xx, yy, xy):
    """Standard deviation ``(x, y)`` of clusters along their longer axes, from sums of squares."""
    total = tl.maximum(tl.sum(mass, 0), _TINY)
    middle = (tl.sum(xx, 0) + tl.sum(yy, 0)) / total / 2
    half, mixed = (tl.sum(xx, 0) - tl.sum(yy, 0)) / total / 2, tl.sum(xy, 0) / total
    reach = tl.sqrt(half * half + mixed * mixed)
    # of half the angle of (half, mixed): the larger of sine and cosine, then the other by it
    large = tl.sqrt(tl.maximum((1 + tl.abs(half) / tl.maximum(reach, 1e-30)) / 2, 0.5))
    small = mixed / tl.maximum(2 * reach * large, 1e-30)
    is_level, sign = half >= 0, tl.where(mixed < 0, -1.0, 1.0)
    spread = tl.sqrt(middle + reach)
    step_x = spread * tl.where(is_level, large, tl.abs(small))
    return step_x, spread * tl.where(is_level, small, sign * large)


@triton.jit(do_not_specialize=["tokens", "rounds", "split"])
def _grow_kernel(
    x, weight, points, found, tokens, rounds, split, LEVELS: tl.constexpr, CHUNK: tl.constexpr
):
    """Twice as many points: each moved both ways along its cluster's longer axis, then Lloyd's."""
    row = tl.program_id(0).to(tl.int64)
    level = tl.arange(0, LEVELS)
    px, py = _load_points(points, row, LEVELS)
    mass = tl.zeros([CHUNK, LEVELS], tl.float32)
    xx = tl.zeros([CHUNK, LEVELS], tl.float32)
    yy = tl.zeros([CHUNK, LEVELS], tl.float32)
    xy = tl.zeros([CHUNK, LEVELS], tl.float32)
    for first in range(0, tokens, CHUNK):
        u, v, w = _load_samples(x, weight, first, tokens, row, CHUNK)
        number = tl.argmin(_distances(u, v, px, py), 1)
        own = tl.where(number[:, None] == level[None, :], w[:, None], 0.0)
        along, across = u[:, None] - px[None, :], v[:, None] - py[None, :]
        mass += own
        xx += own * along * along
        yy += own * across * across
        xy += own * along * across
    step_x, step_y = _longer_axis(mass, xx, yy, xy)
    step_x, step_y = split * step_x, split * step_y
    ax, ay, bx, by = px - step_x, py - step_y, px + step_x, py + step_y
    for _ in range(rounds):
        mass_a = tl.zeros([CHUNK, LEVELS], tl.float32)
        mass_b = tl.zeros([CHUNK, LEVELS], tl.float32)
        sum_ax = tl.zeros([CHUNK, LEVELS], tl.float32)
        sum_ay = tl.zeros([CHUNK, LEVELS], tl.float32)
        sum_bx = tl.zeros([CHUNK, LEVELS], tl.float32)
        sum_by = tl.zeros([CHUNK, LEVELS], tl.float32)
        for first in range(0, tokens, CHUNK):
            u, v, w = _load_samples(x, weight, first, tokens, row, CHUNK)
            near_a, a = tl.min(_distances(u, v, ax, ay), 1, return_indices=True)
            near_b, b = tl.min(_distances(u, v, bx, by), 1, return_indices=True)
            is_b = near_b < near_a
            own_a = tl.where(is_b, -1, a)[:, None] == level[None, :]
            own_b = tl.where(is_b, b, -1)[:, None] == level[None, :]
            weight_a = tl.where(own_a, w[:, None], 0.0)
            weight_b = tl.where(own_b, w[:, None], 0.0)
            mass_a += weight_a
            mass_b += weight_b
            sum_ax += weight_a * u[:, None]
            sum_ay += weight_a * v[:, None]
            sum_bx += weight_b * u[:, None]
            sum_by += weight_b * v[:, None]
        ax, ay = _means(mass_a, sum_ax, sum_ay, ax, ay)
        bx, by = _means(mass_b, sum_bx, sum_by, bx, by)
    _store_points(found, row * 2 * LEVELS, ax, ay, LEVELS)
    _store_points(found, row * 2 * LEVELS + LEVELS, bx, by, LEVELS)


@triton.jit(do_not_specialize=["tokens", "rounds"])
def _alternate_kernel(
    x, weight, first, second, chosen, tokens, rounds, LEVELS: tl.constexpr, CHUNK: tl.constexpr
):
    """Two stages in place, each fitted in turn to what the other leaves over."""
    row = tl.program_id(0).to(tl.int64)
    level = tl.arange(0, LEVELS)
    ax, ay = _load_points(first, row, LEVELS)
    bx, by = _load_points(second, row, LEVELS)
    for start in range(0, tokens, CHUNK):
        u, v, _ = _load_samples(x, weight, start, tokens, row, CHUNK)
        a = tl.argmin(_distances(u, v, ax, ay), 1)
        own_x, own_y = _pick(a[:, None] == level[None, :], ax, ay)
        b = tl.argmin(_distances(u - own_x, v - own_y, bx, by), 1)
        token = start + tl.arange(0, CHUNK)
        tl.store(chosen + row * tokens + token, b, mask=token < tokens)
    for turn in range(2 * rounds):
        # what one thread has chosen another one reads
        tl.debug_barrier()
        is_first = turn % 2 == 0
        # the stage that is fitted, and the other one
        px, py = tl.where(is_first, ax, bx), tl.where(is_first, ay, by)
        qx, qy = tl.where(is_first, bx, ax), tl.where(is_first, by, ay)
        mass = tl.zeros([CHUNK, LEVELS], tl.float32)
        sum_x = tl.zeros([CHUNK, LEVELS], tl.float32)
        sum_y = tl.zeros([CHUNK, LEVELS], tl.float32)
        for start in range(0, tokens, CHUNK):
            u, v, w = _load_samples(x, weight, start, tokens, row, CHUNK)
            token = start + tl.arange(0, CHUNK)
            at = chosen + row * tokens + token
            other = tl.load(at, mask=token < tokens, other=0)
            own_x, own_y = _pick(other[:, None] == level[None, :], qx, qy)
            u, v = u - own_x, v - own_y
            number = tl.argmin(_distances(u, v, px, py), 1)
            own = tl.where(number[:, None] == level[None, :], w[:, None], 0.0)
            mass += own
            sum_x += own * u[:, None]
            sum_y += own * v[:, None]
            tl.debug_barrier()
            tl.store(at, number, mask=token < tokens)
        px, py = _means(mass, sum_x, sum_y, px, py)
        ax, ay = tl.where(is_first, px, ax), tl.where(is_first, py, ay)
        bx, by = tl.where(is_first, bx, px), tl.where(is_first, by, py)
    _store_points(first, row * LEVELS, ax, ay, LEVELS)
    _store_points(second, row * LEVELS, bx, by, LEVELS)


@triton.jit
def _rest_of(mass, sums, other, old, AXIS: tl.constexpr):
    """One component of a stage's points given those of the other, which lie along ``AXIS``."""
    own = tl.sum(mass, AXIS)
    held = mass * tl.expand_dims(other, 1 - AXIS)
    rest = (tl.sum(sums, AXIS) - tl.sum(held, AXIS)) / tl.maximum(own, _TINY)
    return tl.where(own > 0, rest, old)


@triton.jit(do_not_specialize=["tokens", "rounds", "relaxation"])
def _refine_kernel(
    x,
    weight,
    first,
    second,
    tokens,
    rounds,
    relaxation,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    SWEEPS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Two stages in place: Lloyd's algorithm over all their sums."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, FIRST * SECOND)
    ax, ay = _load_points(first, row, FIRST)
    bx, by = _load_points(second, row, SECOND)
    for turn in range(rounds):
        sum_x = tl.reshape(ax[:, None] + bx[None, :], [FIRST * SECOND])
        sum_y = tl.reshape(ay[:, None] + by[None, :], [FIRST * SECOND])
        mass = tl.zeros([CHUNK, FIRST * SECOND], tl.float32)
        along = tl.zeros([CHUNK, FIRST * SECOND], tl.float32)
        across = tl.zeros([CHUNK, FIRST * SECOND], tl.float32)
        for start in range(0, tokens, CHUNK):
            u, v, w = _load_samples(x, weight, start, tokens, row, CHUNK)
            joint = tl.argmin(_distances(u, v, sum_x, sum_y), 1)
            own = tl.where(joint[:, None] == number[None, :], w[:, None], 0.0)
            mass += own
            along += own * u[:, None]
            across += own * v[:, None]
        masses = tl.reshape(tl.sum(mass, 0), [FIRST, SECOND])
        us = tl.reshape(tl.sum(along, 0), [FIRST, SECOND])
        vs = tl.reshape(tl.sum(across, 0), [FIRST, SECOND])
        cx, cy, dx, dy = ax, ay, bx, by
        for _ in tl.static_range(SWEEPS):
            cx, cy = _rest_of(masses, us, dx, cx, 1), _rest_of(masses, vs, dy, cy, 1)
            dx, dy = _rest_of(masses, us, cx, dx, 0), _rest_of(masses, vs, cy, dy, 0)
        is_last = turn == rounds - 1
        ax = tl.where(is_last, cx, ax + relaxation * (cx - ax))
        ay = tl.where(is_last, cy, ay + relaxation * (cy - ay))
        bx = tl.where(is_last, dx, bx + relaxation * (dx - bx))
        by = tl.where(is_last, dy, by + relaxation * (dy - by))
    _store_points(first, row * FIRST, ax, ay, FIRST)
    _store_points(second, row * SECOND, bx, by, SECOND)


def find_nearest(x: Tensor, points: Tensor) -> Tensor:
    """Index ``[n, tokens]`` int64 of the closest of ``points [n, levels, 2]``.

    Levels are a power of two.
    """
    rows, tokens, _ = x.shape
    levels = points.shape[1]
    found = torch.empty(rows, tokens, dtype=torch.int64, device=x.device)
    chunks = triton.cdiv(tokens, _SEARCHED)
    _nearest_kernel[(rows * chunks,)](
        x.contiguous(), points.contiguous(), found, tokens, chunks,
        LEVELS=levels, STEP=min(4, levels), CHUNK=_SEARCHED, num_warps=_WARPS,
    )  # fmt: skip
    return found


def code_cells(by_plane: Tensor, planes: PlaneCodebooks) -> Tensor:
    """``[classes, heads, planes, tokens, 2]`` points that code ``[heads, planes, tokens, 2]``.

    Of equally near points the first is taken.
    """
    rows, tokens = by_plane.shape[0] * by_plane.shape[1], by_plane.shape[2]
    coded = by_plane.new_empty(len(CELL_BITS), *by_plane.shape)
    names = ("metric_root", "mean", "pair", "single", "joint", "halves", "stages")
    chunks = triton.cdiv(tokens, _CODED)
    _cells_kernel[(rows * chunks,)](
        by_plane.contiguous(), *(getattr(planes, name).contiguous() for name in names), coded,
        rows, tokens, chunks, CHUNK=_CODED, num_warps=_CODED // 32,
    )  # fmt: skip
    return coded


def grow_points(x: Tensor, weight: Tensor, points: Tensor, rounds: int, split: float) -> Tensor:
    """``[n, 2 * levels, 2]`` points from ``points [n, levels, 2]``, see ``fit_points``."""
    rows, levels, _ = points.shape
    found = torch.empty(rows, 2 * levels, 2, device=x.device)
    _grow_kernel[(rows,)](
        x.contiguous(), weight.contiguous(), points.contiguous(), found, x.shape[1], rounds, split,
        LEVELS=levels, CHUNK=_PAIRS // levels, num_warps=_WARPS,
    )  # fmt: skip
    return found


def alternate_stages(
    x: Tensor, weight: Tensor, stages: tuple[Tensor, Tensor], rounds: int
) -> tuple[Tensor, Tensor]:
    """Stages ``[n, levels, 2]`` fitted in turn, so many rounds."""
    first, second = (each.clone(memory_format=torch.contiguous_format) for each in stages)
    rows, levels, _ = first.shape
    chosen = torch.empty(rows, x.shape[1], dtype=torch.int32, device=x.device)
    _alternate_kernel[(rows,)](
        x.contiguous(), weight.contiguous(), first, second, chosen, x.shape[1], rounds,
        LEVELS=levels, CHUNK=_PAIRS // levels, num_warps=_WARPS,
    )  # fmt: skip
    return first, second


def refine_stages(
    x: Tensor,
    weight: Tensor,
    stages: tuple[Tensor, Tensor],
    rounds: int,
    *,
    sweeps: int,
    relaxation: float,
) -> tuple[Tensor, Tensor]:
    """Stages ``[n, levels, 2]``, which may differ in size, fitted by all their sums."""
    first, second = (each.clone(memory_format=torch.contiguous_format) for each in stages)
    one, two = first.shape[1], second.shape[1]
    _refine_kernel[(len(first),)](
        x.contiguous(), weight.contiguous(), first, second, x.shape[1], rounds, relaxation,
        FIRST=one, SECOND=two, SWEEPS=sweeps, CHUNK=_PAIRS // (one * two), num_warps=_WARPS,
    )  # fmt: skip
    return first, second


def trials(device: torch.device) -> list[Callable[[], object]]:
    """Every kernel on a few samples, which compiles it for any number of them."""
    x, weight = torch.zeros(1, 16, 2, device=device), torch.ones(1, 16, device=device)

    def points(levels: int) -> Tensor:
        return torch.zeros(1, levels, 2, device=device)

    stages, ones = (points(16), points(16)), torch.zeros(1, 1, 2, 2, device=device)
    sets = (points(levels)[None] for levels in (4, 16, 16, 8, 48))
    planes = PlaneCodebooks(*[ones, ones[:, :, 0], *sets, ones])
    refine = partial(refine_stages, x, weight, rounds=1, sweeps=3, relaxation=1.0)
    return [
        *(partial(find_nearest, x, points(levels)) for levels in (4, 16, 64, 256)),
        partial(code_cells, x[None], planes),
        *(partial(grow_points, x, weight, points(levels), 1, 1.0) for levels in (1, 2, 4, 8)),
        partial(alternate_stages, x, weight, stages, 1),
        partial(refine, stages),
        partial(refine, (points(16), points(4))),
    ]
