# SPDX-License-Identifier: Apache-2.0
"""Which sums of two points may be nearest to some point of a cell; see ``cuda/search_grid.py``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_FAR = tl.constexpr(3.0e38)


@triton.jit
def _squares(x, y, sum_x, sum_y, is_sum):
    """Squared distances ``[cells, sums]`` of points to sums; far where there is no sum."""
    along, across = x[:, None] - sum_x[None, :], y[:, None] - sum_y[None, :]
    return tl.where(is_sum[None, :], along * along + across * across, _FAR)


@triton.jit
def _drop_by(kept, rival, number, a, b, c, d):
    """What is kept once sums go that are nowhere nearer than a cell's rival, at any corner."""
    is_rival = number[None, :] == rival[:, None]
    at_a = tl.sum(tl.where(is_rival, a, 0.0), 1)[:, None]
    at_b = tl.sum(tl.where(is_rival, b, 0.0), 1)[:, None]
    at_c = tl.sum(tl.where(is_rival, c, 0.0), 1)[:, None]
    at_d = tl.sum(tl.where(is_rival, d, 0.0), 1)[:, None]
    nowhere = (a >= at_a) & (b >= at_b) & (c >= at_c) & (d >= at_d)
    farther = (a > at_a) | (b > at_b) | (c > at_c) | (d > at_d)
    return kept & ~(nowhere & farther)


@triton.jit
def _candidates_kernel(
    sums_ptr, is_sum_ptr, lines_ptr, middle_ptr, out_ptr,
    CELLS: tl.constexpr, SUMS: tl.constexpr, WANTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Candidates of ``BLOCK`` cells of one grid, nearest to the middle first."""
    grid = tl.program_id(1).to(tl.int64)
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, SUMS)
    sum_x = tl.load(sums_ptr + 2 * (grid * SUMS + number))
    sum_y = tl.load(sums_ptr + 2 * (grid * SUMS + number) + 1)
    is_sum = tl.load(is_sum_ptr + grid * SUMS + number) != 0
    if tl.max(is_sum.to(tl.int32), 0) == 0:
        return
    u, v = cell // CELLS, cell % CELLS
    lines, middle = lines_ptr + 2 * grid * (CELLS + 1), middle_ptr + 2 * grid * CELLS
    x0, x1 = tl.load(lines + 2 * u), tl.load(lines + 2 * u + 2)
    y0, y1 = tl.load(lines + 2 * v + 1), tl.load(lines + 2 * v + 3)
    a = _squares(x0, y0, sum_x, sum_y, is_sum)
    b = _squares(x0, y1, sum_x, sum_y, is_sum)
    c = _squares(x1, y0, sum_x, sum_y, is_sum)
    d = _squares(x1, y1, sum_x, sum_y, is_sum)
    x, y = tl.load(middle + 2 * u), tl.load(middle + 2 * v + 1)
    near = _squares(x, y, sum_x, sum_y, is_sum)
    kept = near < _FAR
    kept = _drop_by(kept, tl.argmin(a, 1), number, a, b, c, d)
    kept = _drop_by(kept, tl.argmin(b, 1), number, a, b, c, d)
    kept = _drop_by(kept, tl.argmin(c, 1), number, a, b, c, d)
    kept = _drop_by(kept, tl.argmin(d, 1), number, a, b, c, d)
    kept = _drop_by(kept, tl.argmin(near, 1), number, a, b, c, d)
    is_long = tl.sum(kept.to(tl.int32), 1) > WANTED
    near = tl.where(kept, near, _FAR)
    first = tl.argmin(near, 1)
    out = out_ptr + (grid * CELLS * CELLS + cell) * WANTED
    for place in tl.static_range(WANTED):
        best = tl.argmin(near, 1)
        code = tl.where(tl.min(near, 1) < _FAR, best, first)
        # a first one that is repeated says that there are more than can be named
        code = tl.where(is_long & (place == 1), first, code)
        tl.store(out + place, code.to(tl.uint8))
        near = tl.where(number[None, :] == best[:, None], _FAR, near)


def candidates_of_cells(
    sums: Tensor, is_sum: Tensor, lines: Tensor, middle: Tensor, wanted: int, *, block: int = 4
) -> Tensor:
    """Candidates of all cells.

    Args:
        sums: ``[grids, sums, 2]`` float32; a power of two of them.
        is_sum: ``[grids, sums]`` bool: the sums there are.
        lines: ``[grids, cells + 1, 2]`` float32 where cells begin and end along both axes.
        middle: ``[grids, cells, 2]`` float32.
        wanted: Candidates to name.
        block: Cells of a program.

    Returns:
        ``[grids, cells * cells, wanted]`` uint8.
    """
    grids, cells, _ = middle.shape
    out = torch.zeros(grids, cells * cells, wanted, dtype=torch.uint8, device=sums.device)
    _candidates_kernel[(cells * cells // block, grids)](
        sums.contiguous(), is_sum.to(torch.uint8), lines.contiguous(), middle.contiguous(), out,
        CELLS=cells, SUMS=sums.shape[1], WANTED=wanted, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
