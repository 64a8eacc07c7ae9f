# SPDX-License-Identifier: Apache-2.0
"""Which sums of two points may be nearest to some point of a cell; see ``cuda/search_grid.py``.

A thread has a cell and passes over its sums twice: it finds those nearest to the corners and to the
middle, the cell's rivals, then keeps the sums that none of them beats. First this is done in coarse
cells: what loses in one of them loses in all cells inside, so that these look at few sums. A coarse
cell that keeps more of them than its list can hold has its cells look at all.
"""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

_FAR = tl.constexpr(3.0e38)
# What loses in a coarse cell by less, of a square, may win inside of it as rounding has it.
_MARGIN = tl.constexpr(1.0e-6)

_STEP = 4
"""Cells along each axis of a coarse cell."""

_LISTED = 64
"""Sums that the list of a coarse cell can hold; few of them keep more."""

_NAMED = tl.constexpr(8)
"""Candidates that a cell names: a word of bytes."""

_GRIDS_TOGETHER = 2048
"""Grids whose lists are held at once."""


@triton.jit
def _corner_squares(x0, y0, x1, y1, sum_x, sum_y):
    """Squared distances of sums to the corners of cells, alike wherever they are computed."""
    x0, x1, y0, y1 = x0 - sum_x, x1 - sum_x, y0 - sum_y, y1 - sum_y
    y0, y1 = y0 * y0, y1 * y1
    return tl.fma(x0, x0, y0), tl.fma(x0, x0, y1), tl.fma(x1, x1, y0), tl.fma(x1, x1, y1)


@triton.jit
def _take_nearer(best, number, square, own):
    """The smaller of two squares and whose it is; of equal ones the first."""
    is_nearer = square < best
    return tl.where(is_nearer, square, best), tl.where(is_nearer, own, number)


@triton.jit
def _sum_at(at, sums_ptr, is_sum_ptr, list_ptr, counts, LISTED: tl.constexpr):
    """What comes ``at`` in the lists of cells: numbers, places, and whether there is something.

    All sums there are stand for a list that is too long.
    """
    is_whole = counts > LISTED
    own = tl.load(list_ptr + at, mask=(at < counts) & (counts <= LISTED), other=0).to(tl.int32)
    own = tl.where(is_whole, at, own)
    is_there = (at < counts) & (tl.load(is_sum_ptr + own) != 0)
    return own, tl.load(sums_ptr + 2 * own), tl.load(sums_ptr + 2 * own + 1), is_there


@triton.jit
def _find_rivals(
    x0, y0, x1, y1, x, y, sums_ptr, is_sum_ptr, list_ptr, counts, most, LISTED: tl.constexpr
):  # fmt: skip
    """Numbers of the sums nearest to each corner and to the middle of cells."""
    none = tl.zeros_like(counts)
    of_a, of_b, of_c, of_d, of_middle = none, none, none, none, none
    far = none.to(tl.float32) + _FAR
    at_a, at_b, at_c, at_d, at_middle = far, far, far, far, far
    for at in range(0, most):
        own, sum_x, sum_y, is_there = _sum_at(at, sums_ptr, is_sum_ptr, list_ptr, counts, LISTED)
        a, b, c, d = _corner_squares(x0, y0, x1, y1, sum_x, sum_y)
        near = tl.fma(x - sum_x, x - sum_x, (y - sum_y) * (y - sum_y))
        at_a, of_a = _take_nearer(at_a, of_a, tl.where(is_there, a, _FAR), own)
        at_b, of_b = _take_nearer(at_b, of_b, tl.where(is_there, b, _FAR), own)
        at_c, of_c = _take_nearer(at_c, of_c, tl.where(is_there, c, _FAR), own)
        at_d, of_d = _take_nearer(at_d, of_d, tl.where(is_there, d, _FAR), own)
        near = tl.where(is_there, near, _FAR)
        at_middle, of_middle = _take_nearer(at_middle, of_middle, near, own)
    return of_a, of_b, of_c, of_d, of_middle


@triton.jit
def _rival_squares(x0, y0, x1, y1, sums_ptr, rivals, scale):
    """What sums must reach at the corners of cells to be beaten, by rival."""
    limits = ()
    for at in tl.static_range(len(rivals)):
        rival = sums_ptr + 2 * rivals[at]
        a, b, c, d = _corner_squares(x0, y0, x1, y1, tl.load(rival), tl.load(rival + 1))
        limits += ((a * scale, b * scale, c * scale, d * scale),)  # type: ignore[assignment]
    return limits


@triton.jit
def _is_unbeaten(own, squares, rivals, limits):
    """Whether no rival beats sums: is nowhere farther, at any corner, and nearer at some."""
    a, b, c, d = squares
    is_unbeaten = own >= 0
    for at in tl.static_range(len(rivals)):
        at_a, at_b, at_c, at_d = limits[at]
        nowhere = (a >= at_a) & (b >= at_b) & (c >= at_c) & (d >= at_d)
        farther = (a > at_a) | (b > at_b) | (c > at_c) | (d > at_d)
        # rounding must not have a rival beat itself
        is_unbeaten &= ~(nowhere & farther & (own != rivals[at]))
    return is_unbeaten


@triton.jit
def _list_kernel(
    sums_ptr, is_sum_ptr, lines_ptr, list_ptr, count_ptr,
    CELLS: tl.constexpr, STEP: tl.constexpr, SUMS: tl.constexpr, LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums that may be nearest somewhere in ``BLOCK`` coarse cells of one grid, and their counts.

    A count is larger than a list where it does not hold all.
    """
    grid, side = tl.program_id(1).to(tl.int64), CELLS // STEP
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_cell = cell < side * side
    u, v = cell // side * STEP, cell % side * STEP
    lines = lines_ptr + 2 * grid * (CELLS + 1)
    sums, is_sum = sums_ptr + 2 * grid * SUMS, is_sum_ptr + grid * SUMS
    x0 = tl.load(lines + 2 * u, mask=is_cell, other=0.0)
    x1 = tl.load(lines + 2 * (u + STEP), mask=is_cell, other=0.0)
    y0 = tl.load(lines + 2 * v + 1, mask=is_cell, other=0.0)
    y1 = tl.load(lines + 2 * (v + STEP) + 1, mask=is_cell, other=0.0)
    # any point inside would do
    x = tl.load(lines + 2 * (u + STEP // 2), mask=is_cell, other=0.0)
    y = tl.load(lines + 2 * (v + STEP // 2) + 1, mask=is_cell, other=0.0)
    number = tl.arange(0, SUMS)
    is_any = tl.load(is_sum + number) != 0
    most = tl.max(tl.where(is_any, number + 1, 0), 0)
    # more than a list can hold: all
    every, listed = tl.zeros_like(cell) + SUMS, list_ptr + tl.zeros_like(cell)
    rivals = _find_rivals(x0, y0, x1, y1, x, y, sums, is_sum, listed, every, most, LISTED)
    limits = _rival_squares(x0, y0, x1, y1, sums, rivals, 1 + _MARGIN)
    place = grid * side * side + cell
    count = tl.zeros_like(cell)
    for at in range(0, most):
        own, sum_x, sum_y, is_kept = _sum_at(at, sums, is_sum, listed, every, LISTED)
        squares = _corner_squares(x0, y0, x1, y1, sum_x, sum_y)
        is_kept &= _is_unbeaten(own, squares, rivals, limits)
        is_room = is_cell & is_kept & (count < LISTED)
        tl.store(list_ptr + place * LISTED + count, own.to(tl.uint8), mask=is_room)
        count += is_kept.to(tl.int32)
    tl.store(count_ptr + place, tl.where(count > LISTED, SUMS, count), mask=is_cell)


@triton.jit
def _candidates_kernel(
    sums_ptr, is_sum_ptr, lines_ptr, middle_ptr, list_ptr, count_ptr, out_ptr,
    CELLS: tl.constexpr, STEP: tl.constexpr, SUMS: tl.constexpr, LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Candidates of ``BLOCK`` cells of one grid, nearest to the middle first, one word each."""
    grid, side = tl.program_id(1).to(tl.int64), CELLS // STEP
    # cells of a coarse cell follow each other, so that lists of a block are as long
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_cell = cell < CELLS * CELLS
    coarse, inner = cell // (STEP * STEP), cell % (STEP * STEP)
    u = coarse // side * STEP + inner // STEP
    v = coarse % side * STEP + inner % STEP
    lines, middle = lines_ptr + 2 * grid * (CELLS + 1), middle_ptr + 2 * grid * CELLS
    sums, is_sum = sums_ptr + 2 * grid * SUMS, is_sum_ptr + grid * SUMS
    x0 = tl.load(lines + 2 * u, mask=is_cell, other=0.0)
    x1 = tl.load(lines + 2 * u + 2, mask=is_cell, other=0.0)
    y0 = tl.load(lines + 2 * v + 1, mask=is_cell, other=0.0)
    y1 = tl.load(lines + 2 * v + 3, mask=is_cell, other=0.0)
    x = tl.load(middle + 2 * u, mask=is_cell, other=0.0)
    y = tl.load(middle + 2 * v + 1, mask=is_cell, other=0.0)
    place = grid * side * side + coarse
    counts = tl.load(count_ptr + place, mask=is_cell, other=0)
    most, listed = tl.max(counts, 0), list_ptr + place * LISTED
    rivals = _find_rivals(x0, y0, x1, y1, x, y, sums, is_sum, listed, counts, most, LISTED)
    limits = _rival_squares(x0, y0, x1, y1, sums, rivals, 1.0)
    num_kept = tl.zeros_like(counts)
    none, far = tl.zeros_like(counts), tl.zeros_like(x) + _FAR
    squares_of, names = (far,) * _NAMED, (none,) * _NAMED
    for at in range(0, most):
        own, sum_x, sum_y, is_kept = _sum_at(at, sums, is_sum, listed, counts, LISTED)
        squares = _corner_squares(x0, y0, x1, y1, sum_x, sum_y)
        is_kept &= _is_unbeaten(own, squares, rivals, limits)
        num_kept += is_kept.to(tl.int32)
        near = tl.fma(x - sum_x, x - sum_x, (y - sum_y) * (y - sum_y))
        near = tl.where(is_kept, near, _FAR)
        squares_of, names = _insert(squares_of, names, near, own)
    word = names[0].to(tl.int64)
    for at in tl.static_range(1, _NAMED):
        code = tl.where(squares_of[at] < _FAR, names[at], names[0])
        if at == 1:
            # a first one that is repeated says that there are more than can be named
            code = tl.where(num_kept > _NAMED, names[0], code)
        word |= code.to(tl.int64) << (8 * at)
    tl.store(out_ptr + grid * CELLS * CELLS + u * CELLS + v, word, mask=is_cell)


@triton.jit
def _insert(squares, names, square, own):
    """Sorted squares, and whose they are, with one more; the largest goes."""
    new_squares, new_names = (), ()
    for at in tl.static_range(_NAMED):
        is_nearer = square < squares[at]
        new_squares += (tl.where(is_nearer, square, squares[at]),)  # type: ignore[assignment]
        new_names += (tl.where(is_nearer, own, names[at]),)  # type: ignore[assignment]
        square = tl.where(is_nearer, squares[at], square)
        own = tl.where(is_nearer, names[at], own)
    return new_squares, new_names


def candidates_of_cells(
    sums: Tensor, is_sum: Tensor, lines: Tensor, middle: Tensor, *, block: int = 32
) -> Tensor:
    """Candidates of all cells.

    Args:
        sums: ``[grids, sums, 2]`` float32; a power of two of them, more than a list holds.
        is_sum: ``[grids, sums]`` bool: the sums there are.
        lines: ``[grids, cells + 1, 2]`` float32 where cells begin and end along both axes.
        middle: ``[grids, cells, 2]`` float32.
        block: Cells of a program.

    Returns:
        ``[grids, cells * cells, 8]`` uint8.
    """
    grids, cells, _ = middle.shape
    num_sums, num_lists = sums.shape[1], (cells // _STEP) ** 2
    sums, lines, middle = (part.contiguous() for part in (sums, lines, middle))
    is_sum = is_sum.to(torch.uint8)
    out = torch.empty(grids, cells * cells, dtype=torch.int64, device=sums.device)
    most = min(grids, _GRIDS_TOGETHER)
    lists = torch.empty(most, num_lists, _LISTED, dtype=torch.uint8, device=sums.device)
    counts = torch.empty(most, num_lists, dtype=torch.int32, device=sums.device)
    shape = {"CELLS": cells, "STEP": _STEP, "SUMS": num_sums, "LISTED": _LISTED, "BLOCK": block}
    for first in range(0, grids, _GRIDS_TOGETHER):
        part = slice(first, first + _GRIDS_TOGETHER)
        given, num = (sums[part], is_sum[part], lines[part]), len(sums[part])
        _list_kernel[(triton.cdiv(num_lists, block), num)](
            *given, lists, counts, **shape, num_warps=1
        )
        _candidates_kernel[(triton.cdiv(cells * cells, block), num)](
            *given, middle[part], lists, counts, out[part], **shape, num_warps=1
        )
    return out.view(torch.uint8).view(grids, cells * cells, 8)


def trials(device: torch.device) -> list[Callable[[], object]]:
    """The kernels on one grid, which compiles them for all."""
    sums, is_sum = torch.zeros(1, 256, 2, device=device), torch.zeros(1, 256, device=device)
    lines, middle = torch.zeros(1, 49, 2, device=device), torch.zeros(1, 48, 2, device=device)
    return [partial(candidates_of_cells, sums, is_sum, lines, middle)]
