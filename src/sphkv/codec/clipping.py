# SPDX-License-Identifier: Apache-2.0
"""The step to begin from when a value is coded: the best of sixteen clipping ratios.

A ratio is judged by the energy that its levels explain. Components count as the middle of one of
128 cells, so that all sums over a value are products of small integers with a histogram: the same
on every device, and no pass over the value for each ratio. See ``docs/math/values.md``.
"""

import functools

import torch
from torch import Tensor

from sphkv.core.devices import send

NUM_CELLS = 128
NUM_RATIOS = 16
CELLS_PER_UNIT = NUM_CELLS - 0.5
"""The largest component, 1 but for rounding, lies amid the last cell."""

# Smallest and largest clipping ratio tried for each width. A ratio of 1 puts the outermost level on
# the token's largest component; rotated components are near Gaussian, and their best ratio at head
# dims 64 to 256 lies inside these ranges. At 8 bits nothing is gained by clipping.
CLIP_RANGE: dict[int, tuple[float, float]] = {2: (0.30, 0.90), 3: (0.45, 1.00), 4: (0.62, 1.05)}


def levels_per_middle(bits: int) -> Tensor:
    """What the middle of a cell is multiplied with to find its level, ratio by ratio.

    Returns:
        ``[NUM_RATIOS]`` float32. The level is the whole part of the float32 product.
    """
    first, last = CLIP_RANGE[bits]
    ratio = torch.linspace(first, last, NUM_RATIOS, dtype=torch.float64)
    step = ratio / ((2**bits - 1) / 2)
    factor: Tensor = 1 / (2 * CELLS_PER_UNIT * step)
    return factor.float()


def odd_levels(bits: int) -> Tensor:
    """Twice the level that each ratio gives each cell.

    Returns:
        ``[NUM_RATIOS, NUM_CELLS]`` int64, odd, below ``2**bits``.
    """
    level: Tensor = (_middles().float() * levels_per_middle(bits)[:, None]).floor()
    return (2 * level.clamp(max=2 ** (bits - 1) - 1) + 1).long()


@functools.lru_cache(maxsize=8)
def clip_weights(bits: int) -> tuple[Tensor, Tensor]:
    """What a component of each cell adds to the two sums of each ratio.

    Returns:
        The component times its level, and the level squared: ``[NUM_RATIOS, NUM_CELLS]`` int64,
        below ``2**12`` and ``2**8``, in units such that the step is the first sum over the second
        and over ``CELLS_PER_UNIT``.
    """
    level = odd_levels(bits)
    return level * _middles(), level * level


def clipped_start(unit: Tensor, bits: int) -> Tensor:
    """Step of the ratio that explains most.

    Args:
        unit: ``[..., tokens, head_dim]`` float32 with peak 1 (or 0).
        bits: Width of a code, one of ``CLIP_RANGE``.

    Returns:
        ``[..., tokens, 1]`` float32, relative to the peak.
    """
    return clipped_starts(unit, (bits,))[0]


def clipped_starts(unit: Tensor, widths: tuple[int, ...]) -> Tensor:
    """``clipped_start`` of several widths, ``[len(widths), ..., tokens, 1]``."""
    cell = (unit.abs().double() * CELLS_PER_UNIT).floor().long().clamp_(max=NUM_CELLS - 1)
    counts = torch.zeros(*unit.shape[:-1], NUM_CELLS, dtype=torch.float64, device=unit.device)
    counts.scatter_add_(-1, cell, torch.ones_like(cell, dtype=torch.float64))
    # [..., tokens, widths * ratios] each
    sums = ((counts @ table).float() for table in _weight_tables(widths, unit.device))
    along, square = (part.unflatten(-1, (len(widths), NUM_RATIOS)).movedim(-2, 0) for part in sums)
    step = along / square
    best = (along * step).argmax(dim=-1, keepdim=True)
    start: Tensor = step.gather(-1, best) / CELLS_PER_UNIT
    return start


# without a limit: captured graphs hold addresses of these
@functools.cache
def _weight_tables(widths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """``clip_weights`` of several widths, ``[NUM_CELLS, widths * NUM_RATIOS]`` float64 each."""
    # a tensor first made under inference mode could never meet autograd again
    with torch.inference_mode(False):
        parts = zip(*(clip_weights(bits) for bits in widths), strict=True)
        along, square = (send(torch.cat(part).double().mT.contiguous(), device) for part in parts)
        return along, square


def _middles() -> Tensor:
    """Middles of the cells, in halves of a cell."""
    return 2 * torch.arange(NUM_CELLS) + 1
