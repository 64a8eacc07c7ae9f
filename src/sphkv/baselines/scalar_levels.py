# SPDX-License-Identifier: Apache-2.0
"""Levels of least squared error for a variable whose density is known, and the nearest of them."""

from __future__ import annotations

import torch
from torch import Tensor

_ITERATIONS = 300

# Fewest and most cells of the grid by which codes are looked up.
_LEAST_CELLS = 1 << 13
_MOST_CELLS = 1 << 21


def lloyd_max_levels(x: Tensor, mass: Tensor, *, bits: int) -> Tensor:
    """Lloyd-Max levels ``[2**bits]`` float64, ascending.

    Starts from the high-rate solution, whose levels are spread like the cube root of the density.

    Args:
        x: ``[points]`` float64, ascending.
        mass: ``[points]`` float64 probability of each point, up to a factor.
        bits: Width of a level index.
    """
    count = 1 << bits
    zero = torch.zeros(1, dtype=torch.float64)
    weight = torch.cat([zero, mass.cumsum(0)])
    moment = torch.cat([zero, (x * mass).cumsum(0)])
    # points need not be evenly spaced: mass per width is the density
    width = torch.gradient(x)[0]
    spread = ((mass / width) ** (1 / 3) * width).cumsum(0)
    start = torch.arange(1, 2 * count, 2, dtype=torch.float64) / (2 * count)
    levels = x[torch.searchsorted(spread / spread[-1], start).clamp(max=x.shape[0] - 1)]
    ends = torch.tensor([0, x.shape[0]])
    for _ in range(_ITERATIONS):
        inner = torch.searchsorted(x, (levels[1:] + levels[:-1]) / 2)
        cut = torch.cat([ends[:1], inner, ends[1:]])
        held = weight[cut].diff()
        levels = torch.where(held > 0, moment[cut].diff() / held.clamp(min=1e-300), levels)
    return levels


class NearestLevel:
    """Codes and levels of entries between -1 and 1, by look-up.

    A grid tells how many edges lie below each of its cells, and which edge lies in it: one
    comparison then settles what a search over all edges would find.
    """

    def __init__(self, levels: Tensor) -> None:
        """Prepare the grid.

        Args:
            levels: ``[count]`` float32, ascending, at most 256.

        Raises:
            ValueError: Two edges are too close for any grid.
        """
        self._levels = levels
        edges = (levels[1:] + levels[:-1]) / 2
        self._cells = _LEAST_CELLS
        while bool((self._cell(edges).diff() < 1).any()):
            self._cells *= 2
            if self._cells > _MOST_CELLS:
                raise ValueError(f"levels lie closer than {2 / _MOST_CELLS:g}: {levels.tolist()}")
        at = self._cell(edges).long()
        # a cell without an edge has one that nothing exceeds
        self._edge = torch.full((self._cells,), torch.inf).index_copy_(0, at, edges)
        below = torch.zeros(self._cells + 1, dtype=torch.uint8).index_fill_(0, at + 1, 1)
        self._below = below.cumsum(0, dtype=torch.uint8)[:-1].contiguous()

    def _cell(self, x: Tensor) -> Tensor:
        """Cell of each entry, flat; it never falls where the entry rises, whatever the rounding."""
        return ((x.flatten() + 1) * (self._cells / 2)).int().clamp_(0, self._cells - 1)

    def codes(self, x: Tensor) -> Tensor:
        """Number of edges below each entry, uint8: the index of its nearest level."""
        cells = self._cell(x)
        is_above = x.flatten() > self._edge.to(x.device).index_select(0, cells)
        return (self._below.to(x.device).index_select(0, cells) + is_above).view(x.shape)

    def values(self, codes: Tensor) -> Tensor:
        """Levels of codes, float32."""
        levels = self._levels.to(codes.device)
        return levels.index_select(0, codes.flatten().int()).view(codes.shape)
