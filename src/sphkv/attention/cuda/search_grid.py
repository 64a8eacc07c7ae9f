# SPDX-License-Identifier: Apache-2.0
"""Which sums of two points can be nearest, by cell of a grid.

A plane of 8 bits has 256 sums of a point of each of its two slots. A cell keeps those that may be
nearest to some point inside it: a sum is dropped if another one is nearer to all four corners, for
then it is nearer to the whole cell. Cells at the edge reach far out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.attention.triton.search import SearchTable

CELLS = 48
"""Cells along each axis."""

CANDIDATES = 8
"""Sums a cell can name; a cell with more of them stands for all sums."""

_MARGIN = 0.06  # beyond the outermost sums, in widths of their range
_REACH = 8.0  # of cells at the edge, likewise


@dataclass(frozen=True, slots=True, eq=False)
class SearchGrid:
    """Grids of the planes with two slots or more.

    Attributes:
        candidates: ``[heads, planes, 48 * 48, 8]`` uint8 joint codes (first slot in the upper four
            bits), nearest to the cell's middle first; unused places repeat the first. Where the
            second place repeats it and the last does not, all sums must be searched.
        boxes: ``[heads, planes, 4]`` float32 low ends along both axes, then cells per unit.
    """

    candidates: Tensor
    boxes: Tensor


def build_search_grid(table: SearchTable) -> SearchGrid:
    """Grids of all heads; planes in the order of ``table.planes``."""
    counts = table.counts[:, :2].cpu()
    heads, most = len(counts), max(1, int(counts.sum(1).max()))
    device = table.seen.device
    candidates = torch.zeros(
        heads, most, CELLS * CELLS, CANDIDATES, dtype=torch.uint8, device=device
    )
    boxes = torch.zeros(heads, most, 4, device=device)
    for head, (num_12, num_8) in enumerate(counts.tolist()):
        at = torch.arange(num_12 + num_8, device=device)
        if len(at) == 0:
            continue
        slot = torch.where(at < num_12, 3 * at, 2 * at + num_12)
        one, two = table.seen[head, slot, 0], table.seen[head, slot + 1, 0]
        sums = (one[:, :, None] + two[:, None, :]).flatten(1, 2)  # [planes, 256, 2]
        candidates[head, : len(at)], boxes[head, : len(at)] = _plane_grids(sums)
    return SearchGrid(candidates, boxes)


def _plane_grids(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Candidates ``[planes, cells, 8]`` and boxes ``[planes, 4]`` of sums ``[planes, 256, 2]``."""
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
    at_corner = [_squares(point, sums) for point in corners]  # [planes, cells, 256] each
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
    return found.to(torch.uint8), torch.cat([low, CELLS / width], -1)


def _cross(u: Tensor, v: Tensor) -> Tensor:
    """Points ``[planes, cells, 2]`` of all pairs of ``u`` and ``v``, both ``[planes, 48]``."""
    wide = torch.broadcast_tensors(u[:, :, None], v[:, None, :])
    return torch.stack(wide, -1).flatten(1, 2)


def _squares(points: Tensor, sums: Tensor) -> Tensor:
    """Squared distances ``[planes, cells, 256]``."""
    gap = points[:, :, None] - sums[:, None]
    return gap.square().sum(-1)
