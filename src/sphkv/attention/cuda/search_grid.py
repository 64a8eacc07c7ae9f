# SPDX-License-Identifier: Apache-2.0
"""Which sums of two points can be nearest, by cell of a grid.

A plane of 8 bits has 256 sums of a point of each of its two slots, a plane of 6 bits 64 sums of a
point of its slot and one of its half. A cell keeps those that may be nearest to some point inside
it: a sum is dropped if another one is nearer to all four corners, for then it is nearer to the
whole cell. Cells at the edge reach far out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.attention.triton.search import SearchTable
from sphkv.codec.codebook import PAIR_LEVELS, SLOT_LEVELS

CELLS = 48
"""Cells along each axis."""

CANDIDATES = 8
"""Sums a cell can name; a cell with more of them stands for all sums."""

_MARGIN = 0.06  # beyond the outermost sums, in widths of their range
_REACH = 8.0  # of cells at the edge, likewise


@dataclass(frozen=True, slots=True, eq=False)
class SearchGrid:
    """Grids of the planes that add points, in the order of ``joint_planes``.

    Attributes:
        candidates: ``[heads, grids, 48 * 48, 8]`` uint8 joint codes (first slot in the upper four
            bits), nearest to the cell's middle first; unused places repeat the first. Where the
            second place repeats it and the last does not, all sums must be searched.
        boxes: ``[heads, grids, 4]`` float32 low ends along both axes, then cells per unit.
    """

    candidates: Tensor
    boxes: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class JointPlanes:
    """Planes whose first two stages are searched together.

    Planes of two slots and more, and those of pair slots that have single slots as well.

    Attributes:
        is_joint: ``[heads, planes]`` bool, in the order of ``SearchTable.planes``.
        number: ``[heads, planes]`` int64 number of the plane's grid; 0 without one.
        first: ``[heads, planes]`` int64 first single slot of every plane.
        second: ``[heads, planes]`` int64 slot of its second stage.
        half: ``[heads, planes]`` int64: which half of that slot, or -1 for all of it.
    """

    is_joint: Tensor
    number: Tensor
    first: Tensor
    second: Tensor
    half: Tensor


def joint_planes(table: SearchTable) -> JointPlanes:
    """Which planes of a table need a grid, and what their stages are."""
    singles, counts = table.planes[..., 3].long(), table.counts.long()
    first, num_slots = singles.cumsum(1) - singles, table.seen.shape[1]
    pairs, first_half = counts[:, 3:4], counts[:, :3].sum(1, keepdim=True)
    k = torch.arange(singles.shape[1], device=singles.device) - first_half
    is_paired = (k >= 0) & (k < 2 * pairs)
    is_joint = singles >= torch.where(is_paired, 1, 2)
    has_half = is_paired & (singles == 1)
    second = torch.where(has_half, num_slots - pairs + k // 2, first + 1)
    return JointPlanes(
        is_joint,
        (is_joint.cumsum(1) - 1).clamp(min=0).masked_fill(~is_joint, 0),
        first,
        second.clamp(max=num_slots - 1),
        torch.where(has_half, k % 2, -1),
    )


def build_search_grid(table: SearchTable, joint: JointPlanes | None = None) -> SearchGrid:
    """Grids of all heads; on a GPU it waits for nothing."""
    joint = joint or joint_planes(table)
    heads, num_slots = table.seen.shape[:2]
    num_joint = joint.is_joint.sum(1)
    # a plane with a grid has six bits at least, so there are no more of them than this
    most = max(1, min(joint.is_joint.shape[1], num_slots * 4 // 6))
    # planes that have a grid come first, in order
    plane = (~joint.is_joint).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    is_grid = torch.arange(most, device=plane.device) < num_joint[:, None]
    first, second, half = (
        part.gather(1, plane).clamp(min=0) for part in (joint.first, joint.second, joint.half)
    )
    is_half = joint.half.gather(1, plane) >= 0
    head = torch.arange(heads, device=plane.device)[:, None]
    one = table.seen[head, first.clamp(max=table.seen.shape[1] - 1), 0]
    two = table.seen[head, second, half]
    level = torch.arange(SLOT_LEVELS, device=plane.device)
    # the second plane of a pair steps its code by four
    step = torch.where(is_half, 1 + 3 * half, 1)[..., None]
    two = two.gather(2, (level * step % SLOT_LEVELS)[..., None].expand_as(two))
    is_point = ~is_half[..., None] | (level < PAIR_LEVELS)
    sums = (one[:, :, :, None] + two[:, :, None]).flatten(0, 1).flatten(1, 2)
    is_sum = is_point[:, :, None].expand(-1, -1, SLOT_LEVELS, -1).flatten(0, 1).flatten(1)
    candidates, boxes = find_candidates(sums.contiguous(), is_sum & is_grid.flatten()[:, None])
    return SearchGrid(
        candidates.view(heads, most, CELLS * CELLS, CANDIDATES),
        boxes.view(heads, most, 4).masked_fill(~is_grid[..., None], 0.0),
    )


def find_candidates(sums: Tensor, is_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Candidates of the cells of grids.

    Args:
        sums: ``[grids, 256, 2]`` float32.
        is_sum: ``[grids, 256]`` bool: the sums there are; a grid without any names the first.

    Returns:
        ``[grids, cells, 8]`` uint8, see ``SearchGrid``, and boxes ``[grids, 4]``.
    """
    far = torch.finfo(torch.float32).max
    low = torch.where(is_sum[..., None], sums, far).amin(1)
    high = torch.where(is_sum[..., None], sums, -far).amax(1)
    is_empty = ~is_sum.any(1, keepdim=True)
    low, high = low.masked_fill(is_empty, 0.0), high.masked_fill(is_empty, 0.0)
    width = (high - low).clamp(min=1e-12)
    low, width = low - _MARGIN * width, (1 + 2 * _MARGIN) * width
    edge = torch.arange(CELLS + 1, device=sums.device) / CELLS
    lines = low[:, None] + width[:, None] * edge[:, None]  # [grids, lines, 2]
    middle = (lines[:, 1:] + lines[:, :-1]) / 2
    lines[:, 0] -= _REACH * width
    lines[:, -1] += _REACH * width
    boxes = torch.cat([low, CELLS / width], -1)
    if sums.is_cuda:
        from sphkv.attention.triton.grid import candidates_of_cells

        return candidates_of_cells(sums, is_sum, lines, middle), boxes
    found = [_cell_candidates(*part) for part in zip(sums, is_sum, lines, middle, strict=True)]
    return torch.stack(found), boxes


def _cell_candidates(sums: Tensor, is_sum: Tensor, lines: Tensor, middle: Tensor) -> Tensor:
    """Candidates ``[cells, 8]`` uint8 of one grid; see ``find_candidates``."""
    corners = [
        _cross(lines[i : CELLS + i, 0], lines[j : CELLS + j, 1]) for i in range(2) for j in range(2)
    ]
    chosen = is_sum.nonzero()[:, 0]
    if len(chosen) == 0:
        return torch.zeros(CELLS * CELLS, CANDIDATES, dtype=torch.uint8)
    at_corner = [_squares(point, sums[chosen]) for point in corners]  # [cells, n] each
    at_centre = _squares(_cross(middle[:, 0], middle[:, 1]), sums[chosen])
    is_kept = torch.ones_like(at_centre, dtype=torch.bool)
    for distance in (*at_corner, at_centre):
        rival = distance.argmin(-1, keepdim=True)
        gaps = [part - part.gather(-1, rival) for part in at_corner]
        is_nowhere_nearer = torch.stack([gap >= 0 for gap in gaps]).all(0)
        is_farther = torch.stack([gap > 0 for gap in gaps]).any(0)
        is_kept &= ~(is_nowhere_nearer & is_farther)
    order = at_centre.masked_fill(~is_kept, torch.inf).sort(-1)
    found, distance = order.indices[..., :CANDIDATES], order.values[..., :CANDIDATES]
    found = torch.where(distance.isinf(), found[..., :1], found)
    is_long = is_kept.sum(-1) > CANDIDATES
    found[..., 1] = torch.where(is_long, found[..., 0], found[..., 1])
    return chosen[found].to(torch.uint8)


def _cross(u: Tensor, v: Tensor) -> Tensor:
    """Points ``[cells, 2]`` of all pairs of ``u`` and ``v``, both ``[48]``."""
    wide = torch.broadcast_tensors(u[:, None], v[None, :])
    return torch.stack(wide, -1).flatten(0, 1)


def _squares(points: Tensor, sums: Tensor) -> Tensor:
    """Squared distances ``[cells, n]``."""
    gap = points[:, None] - sums[None]
    return gap.square().sum(-1)
