# SPDX-License-Identifier: Apache-2.0
"""What the encode kernel reads of a layer: a record per plane and per slot, and search grids."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from sphkv.attention.cuda.geometry import LANES
from sphkv.attention.cuda.search_grid import build_search_grid
from sphkv.attention.triton.search import SearchTable
from sphkv.codec.codebook import PAIR_LEVELS, SLOT_LEVELS
from sphkv.codec.values import CLIP_GRID

PLANE_WORDS = 12
SLOT_WORDS = 96
BINNED_BITS = (2, 3, 4)
"""Widths whose clipping ratios are judged from one histogram; others try them one by one."""

_CENTRE, _POINT = 48, 64  # words of a slot


@dataclass(frozen=True, slots=True, eq=False)
class EncodeTables:
    """Tables of one layer and tier.

    Attributes:
        kinds: ``[heads, 5]`` int32, see ``SearchTable.counts``.
        planes: ``[heads, planes, 12]`` int32, ``Plane`` of the kernel.
        slots: ``[heads, slots, 96]`` float32, ``Slot`` of the kernel.
        grid: ``[heads, most, 48 * 48, 8]`` uint8, see ``SearchGrid.candidates``.
    """

    kinds: Tensor
    planes: Tensor
    slots: Tensor
    grid: Tensor


def build_encode_tables(table: SearchTable) -> EncodeTables:
    """Records of all heads."""
    grid = build_search_grid(table)
    heads, num_slots = table.seen.shape[:2]
    planes = torch.zeros(heads, table.planes.shape[1], PLANE_WORDS, dtype=torch.int32)
    planes = planes.to(table.planes.device)
    planes[..., :2] = _shared_rows(table.planes[..., 1:])
    turn = table.turns[table.planes[..., 0].long()]
    planes[..., 2:4] = turn[..., None].view(torch.int32)
    planes[..., 4:8] = table.roots.view(torch.int32)
    slots = torch.zeros(heads, num_slots, SLOT_WORDS, device=table.seen.device)
    places = torch.zeros(*planes.shape[:2], 4, device=table.seen.device)
    for head in range(heads):
        _fill_head(table, head, grid.boxes[head], places[head], slots[head])
    planes[..., 8:] = places.view(torch.int32)
    return EncodeTables(table.counts, planes, slots, grid.candidates)


def _shared_rows(channel: Tensor) -> Tensor:
    """Rows of shared memory that the kernel's transposed load leaves channels in."""
    return channel // 32 * 32 + channel % 8 // 2 * 8 + channel % 32 // 8 * 2 + channel % 2


def _fill_head(table: SearchTable, head: int, boxes: Tensor, places: Tensor, slots: Tensor) -> None:
    """Write the places of planes ``[planes, 4]`` and the slots ``[slots, 96]`` of one head."""
    num_12, num_8, num_4, pairs, _ = table.counts[head].tolist()
    seen, points = table.seen[head], table.points[head]
    joint, first_4 = num_12 + num_8, 3 * num_12 + 2 * num_8
    first_pair, last = first_4 + num_4, len(slots)
    places[:joint] = boxes[:joint]
    bare = joint + num_4 + 2 * pairs
    places[bare:, :2] = table.constants[head, bare:]
    # sums of points are searched as they are, points alone by their scores
    slots[:first_4, : 2 * SLOT_LEVELS] = seen[:first_4, 0].flatten(1)
    slots[:first_pair, _POINT:] = points[:first_pair, 0].flatten(1)
    single = [*range(2, 3 * num_12, 3), *range(first_4, first_pair)]
    scores, centre = _scores(seen[single, 0])
    slots[single, : 3 * SLOT_LEVELS] = scores
    slots[single, _CENTRE : _CENTRE + 2] = centre
    places[joint : joint + num_4, :2] = -centre[num_12:]
    for half, stride in ((0, 1), (1, PAIR_LEVELS)):
        rows = torch.arange(PAIR_LEVELS, device=seen.device) * stride
        scores, centre = _scores(seen[first_pair:last, half][:, rows])
        words = 3 * PAIR_LEVELS
        slots[first_pair:last, half * words : (half + 1) * words] = scores
        places[joint + num_4 + half : bare : 2, :2] = -centre
        at = _POINT + half * 2 * PAIR_LEVELS
        stored = points[first_pair:last, half][:, rows].flatten(1)
        slots[first_pair:last, at : at + 2 * PAIR_LEVELS] = stored


def _scores(points: Tensor) -> tuple[Tensor, Tensor]:
    """Factors that rank points by their distance to ``w``: the nearest has the largest score.

    With ``s`` counted from the centre, ``s . w - |s|^2 / 2`` falls as the distance grows. The bias
    makes the largest score of any ``w`` positive: the centre is a mean, so that some point has
    ``s . w >= 0``.

    Args:
        points: ``[slots, levels, 2]``.

    Returns:
        x, y and bias of all levels, ``[slots, 3 * levels]``, and the centres ``[slots, 2]``.
    """
    centre = points.mean(1)
    around = points - centre[:, None]
    half_square = around.square().sum(-1) / 2
    bias = half_square.amax(1, keepdim=True) - half_square
    return torch.cat([around[..., 0], around[..., 1], bias], 1), centre


@dataclass(frozen=True, slots=True)
class ClipCells:
    """Thresholds of all clipping ratios of a width, as multiples of one number.

    Ratio ``i`` puts the threshold of level ``k`` at ``k * (first + i * step) / cells`` of the peak.
    """

    first: int
    step: int
    cells: int
    num_ratios: int
    num_levels: int

    @classmethod
    def of_bits(cls, bits: int) -> ClipCells:
        """The thresholds that ``CLIP_GRID`` stands for."""
        first, last, count = CLIP_GRID[bits]
        low, high = Fraction(str(first)), Fraction(str(last))
        half_range = Fraction(2**bits - 1, 2)
        start, step = low / half_range, (high - low) / (count - 1) / half_range
        cells = math.lcm(start.denominator, step.denominator)
        return cls(int(start * cells), int(step * cells), cells, count, 1 << (bits - 1))

    @property
    def num_bins(self) -> int:
        """Bins that the thresholds make, rounded up to whole products of 16."""
        return (self.num_ratios * (self.num_levels - 1) + 16) // 16 * 16

    def _thresholds(self) -> Tensor:
        """``[ratios, levels - 1]`` int64."""
        ratio = self.first + self.step * torch.arange(self.num_ratios)
        return ratio[:, None] * torch.arange(1, self.num_levels)

    def bins(self) -> Tensor:
        """Thresholds at or below each cell, ``[cells + 1]`` uint8, padded to 16 bytes."""
        padded = (self.cells + 16) // 16 * 16
        cell = torch.arange(padded).clamp(max=self.cells)
        return torch.searchsorted(self._thresholds().flatten().sort().values, cell, right=True).to(
            torch.uint8
        )

    def weights(self) -> Tensor:
        """What a component of each bin counts for, as lanes of the kernel hold it.

        Returns:
            ``[bins / 16, 32, 4, 4]`` uint8: of lane ``(g, t)`` levels ``k`` of ratios ``g`` and
            ``g + 8``, then ``k * k + k`` of both, for bins ``4 * t ...`` of each 16. Row 15 of the
            levels is all ones, so that it sums everything.
        """
        rank = self._thresholds().flatten().argsort(stable=True).argsort().view(self.num_ratios, -1)
        bin_number = torch.arange(self.num_bins)
        level = (rank[:, :, None] < bin_number).sum(1)  # [ratios, bins]
        rows = torch.zeros(2, 16, self.num_bins, dtype=torch.uint8)
        rows[0, : self.num_ratios] = level
        rows[0, 15] = 1
        rows[1, : self.num_ratios] = level * level + level
        # [kind, upper, g, step, t, bin] to [step, g, t, kind, upper, bin]
        split = rows.view(2, 2, 8, -1, 4, 4).permute(3, 2, 4, 0, 1, 5)
        return split.reshape(-1, LANES, 4, 4).contiguous()
