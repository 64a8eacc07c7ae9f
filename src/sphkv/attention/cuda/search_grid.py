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


@dataclass(frozen=True, slots=True)
class JointPlane:
    """A plane whose first two stages are searched together.

    Attributes:
        plane: Its row in ``SearchTable.planes``.
        first: Its first slot.
        second: The slot of its second stage.
        half: Which half of that slot, or None for all of it.
    """

    plane: int
    first: int
    second: int
    half: int | None


def joint_planes(table: SearchTable, head: int) -> list[JointPlane]:
    """Planes of two slots and more, then those of pair slots that have single slots as well."""
    num_12, num_8, num_4, pairs, _ = table.counts[head].tolist()
    slot, found = 0, []
    for plane in range(num_12 + num_8):
        found.append(JointPlane(plane, slot, slot + 1, None))
        slot += 3 if plane < num_12 else 2
    slot, first_half = slot + num_4, num_12 + num_8 + num_4
    singles = table.planes[head, first_half : first_half + 2 * pairs, 3].tolist()
    for k, count in enumerate(singles):
        if count == 1:
            shared = table.seen.shape[1] - pairs + k // 2
            found.append(JointPlane(first_half + k, slot, shared, k % 2))
        elif count == 2:
            found.append(JointPlane(first_half + k, slot, slot + 1, None))
        slot += count
    return found


def build_search_grid(table: SearchTable) -> SearchGrid:
    """Grids of all heads."""
    of_head = [joint_planes(table, head) for head in range(len(table.seen))]
    most, device = max(1, *map(len, of_head)), table.seen.device
    candidates = torch.zeros(
        len(of_head), most, CELLS * CELLS, CANDIDATES, dtype=torch.uint8, device=device
    )
    boxes = torch.zeros(len(of_head), most, 4, device=device)
    for head, planes in enumerate(of_head):
        for levels in (SLOT_LEVELS, PAIR_LEVELS):
            at = [i for i, p in enumerate(planes) if (p.half is None) == (levels == SLOT_LEVELS)]
            if not at:
                continue
            one = table.seen[head, [planes[i].first for i in at], 0]
            two = torch.stack([_second_stage(table, head, planes[i]) for i in at])
            sums = (one[:, :, None] + two[:, None, :]).flatten(1, 2)  # [planes, 16 * levels, 2]
            found, box = _plane_grids(sums)
            candidates[head, at] = (found // levels * SLOT_LEVELS + found % levels).to(torch.uint8)
            boxes[head, at] = box
    return SearchGrid(candidates, boxes)


def _second_stage(table: SearchTable, head: int, plane: JointPlane) -> Tensor:
    """Points ``[levels, 2]``; the second plane of a pair steps its code by four."""
    points = table.seen[head, plane.second, plane.half or 0]
    return points if plane.half is None else points[:: 1 + 3 * plane.half][:PAIR_LEVELS]


def _plane_grids(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Candidates ``[planes, cells, 8]`` and boxes ``[planes, 4]`` of sums ``[planes, n, 2]``."""
    low, high = sums.amin(1), sums.amax(1)
    width = (high - low).clamp(min=1e-12)
    low, width = low - _MARGIN * width, (1 + 2 * _MARGIN) * width
    edge = torch.arange(CELLS + 1, device=sums.device) / CELLS
    lines = low[:, None] + width[:, None] * edge[:, None]  # [planes, lines, 2]
    middle = (lines[:, 1:] + lines[:, :-1]) / 2
    lines[:, 0] -= _REACH * width
    lines[:, -1] += _REACH * width
    centre = _cross(middle[..., 0], middle[..., 1])
    corners = [
        _cross(lines[:, i : CELLS + i, 0], lines[:, j : CELLS + j, 1])
        for i in range(2)
        for j in range(2)
    ]
    at_corner = [_squares(point, sums) for point in corners]  # [planes, cells, n] each
    at_centre = _squares(centre, sums)
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
    return found, torch.cat([low, CELLS / width], -1)


def _cross(u: Tensor, v: Tensor) -> Tensor:
    """Points ``[planes, cells, 2]`` of all pairs of ``u`` and ``v``, both ``[planes, 48]``."""
    wide = torch.broadcast_tensors(u[:, :, None], v[:, None, :])
    return torch.stack(wide, -1).flatten(1, 2)


def _squares(points: Tensor, sums: Tensor) -> Tensor:
    """Squared distances ``[planes, cells, n]``."""
    gap = points[:, :, None] - sums[:, None]
    return gap.square().sum(-1)
