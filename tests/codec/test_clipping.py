# SPDX-License-Identifier: Apache-2.0
"""The clipping ratio to begin from: integers that stand for what each ratio explains."""

import pytest
import torch

from sphkv.codec.clipping import (
    CLIP_RANGE,
    NUM_CELLS,
    NUM_RATIOS,
    clip_weights,
    clipped_start,
    odd_levels,
)


def unit_values(tokens=200, dim=128, seed=0):
    x = torch.randn(tokens, dim, generator=torch.Generator().manual_seed(seed))
    return x / x.abs().amax(1, keepdim=True)


@pytest.mark.parametrize("bits", CLIP_RANGE)
def test_levels_rise_with_the_cell_and_fit_the_width(bits):
    levels = odd_levels(bits)
    assert levels.shape == (NUM_RATIOS, NUM_CELLS)
    assert bool((levels % 2 == 1).all())
    assert bool((levels.diff(dim=1) >= 0).all())
    assert bool((levels.diff(dim=0) <= 0).all())  # a wider step has fewer levels
    assert int(levels.max()) == 2**bits - 1
    along, square = clip_weights(bits)
    assert int(along.max()) < 2**12
    assert int(square.max()) < 2**8


@pytest.mark.parametrize("bits", CLIP_RANGE)
def test_the_start_explains_what_the_best_of_all_ratios_does(bits):
    """Judged by brute force on the components themselves."""
    unit = unit_values().double()
    first, last = CLIP_RANGE[bits]
    half = 2 ** (bits - 1)

    def explained(step):
        level = (unit / step).floor().clamp(-half, half - 1) + 0.5
        return (unit * level).sum(1).square() / level.square().sum(1)

    steps = torch.linspace(first, last, NUM_RATIOS).double() / ((2**bits - 1) / 2)
    best = torch.stack([explained(step) for step in steps]).amax(0)
    got = explained(clipped_start(unit.float(), bits).double())
    energy = unit.square().sum(1)
    assert float(((best - got) / energy).mean()) < 0.02 * float((1 - best / energy).mean())


def test_a_value_of_two_levels_is_met_exactly():
    unit = torch.ones(1, 64)
    unit[0, ::3] = -1.0
    step = clipped_start(unit, 4)
    level = (1 / step).floor() + 0.5
    assert float((level * step - 1).abs()) < 1 / NUM_CELLS


def test_a_value_of_zeros_has_a_finite_start():
    assert bool(clipped_start(torch.zeros(3, 64), 2).isfinite().all())
