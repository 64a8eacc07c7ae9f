# SPDX-License-Identifier: Apache-2.0
"""Levels of least squared error for a variable whose density is known on a grid."""

from __future__ import annotations

import torch
from torch import Tensor

_ITERATIONS = 300


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
