# SPDX-License-Identifier: Apache-2.0
"""Decode kernels of a cache, one per codec, layer and tier."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from sphkv.attention.cuda.decode import CudaDecode, TurnTable
from sphkv.attention.cuda.geometry import KernelShape
from sphkv.codec.rope import RopeSpec
from sphkv.codec.states import SphericalCodec
from sphkv.core.tiers import TierSpec

_LEAST_POSITIONS = 8192


class DecodeKernels:
    """Builds each kernel once.

    All layers of a tier share one kernel shape where they can, so that one is compiled.

    Args:
        device: The GPU.
        max_batch: Largest batch of a call.
    """

    def __init__(self, device: torch.device, *, max_batch: int) -> None:
        self._device = device
        self._max_batch = max_batch
        self._turns: dict[RopeSpec, TurnTable] = {}
        self._num_positions = _LEAST_POSITIONS
        self._held: WeakKeyDictionary[SphericalCodec, dict[tuple[int, str], CudaDecode]]
        self._held = WeakKeyDictionary()

    def reserve(self, num_positions: int) -> bool:
        """Make room for positions below ``num_positions``; true if kernels must be asked anew."""
        if num_positions <= self._num_positions:
            return False
        self._num_positions = max(num_positions, 2 * self._num_positions)
        self._turns.clear()
        self._held.clear()
        return True

    def get(self, codec: SphericalCodec, layer: int, tier: TierSpec) -> CudaDecode:
        """The kernel of a layer at a tier."""
        held = self._held.setdefault(codec, {})
        key = (layer, tier.name)
        if key not in held:
            held[key] = self._build(codec, layer, tier)
        return held[key]

    def _build(self, codec: SphericalCodec, layer: int, tier: TierSpec) -> CudaDecode:
        rope, group = codec.calibration.ropes[layer], codec.calibration.geometry.group_size
        if rope not in self._turns:
            self._turns[rope] = TurnTable.build(
                rope, max_positions=self._num_positions, device=self._device
            )
        return CudaDecode(
            codec.codebook(layer, tier, self._device),
            rope,
            self._turns[rope],
            value_bits=tier.value_bits,
            group=group,
            max_batch=self._max_batch,
            shape=_common_shape(codec, layer, tier),
        )


def _common_shape(codec: SphericalCodec, layer: int, tier: TierSpec) -> KernelShape:
    """The shape of the layer itself, with second look-ups rounded up to an even number of steps.

    Layers differ by a step or two; fewer shapes mean fewer compilations.
    """
    book = codec.codebook(layer, tier)
    group = codec.calibration.geometry.group_size
    shape = KernelShape.of_codebook(book, value_bits=tier.value_bits, group=group)
    steps = shape.nibbles // 8
    rounded = replace(shape, double_steps=min(steps, shape.double_steps + shape.double_steps % 2))
    try:
        return rounded.fitted()
    except ValueError:
        return shape
