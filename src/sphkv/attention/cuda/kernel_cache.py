# SPDX-License-Identifier: Apache-2.0
"""Decode kernels of a cache, one per codec, layer and tier."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from sphkv.attention.cuda.decode import CudaDecode, TurnTable
from sphkv.attention.cuda.geometry import KernelShape
from sphkv.attention.cuda.selftest import self_test
from sphkv.codec.states import SphericalCodec
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import TierSpec

_LEAST_POSITIONS = 8192
# Product steps a layer may do in vain to share its kernel with others.
_SPARE_STEPS = 2


class DecodeKernels:
    """Builds each kernel once.

    All layers of a tier share one kernel shape where they can, so that one is compiled. Every shape
    is checked against the float64 oracle before it serves anything.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._max_batch = 1
        self._turns: dict[RopeSpec, TurnTable] = {}
        self._num_positions = _LEAST_POSITIONS
        self._held: WeakKeyDictionary[SphericalCodec, dict[tuple[int, str], CudaDecode]]
        self._held = WeakKeyDictionary()
        self._shapes: WeakKeyDictionary[SphericalCodec, dict[str, list[KernelShape]]]
        self._shapes = WeakKeyDictionary()
        self._checked: set[tuple[KernelShape, int]] = set()

    def reserve(self, num_positions: int, batch: int) -> None:
        """Make room for positions below ``num_positions`` and calls of so many sequences.

        Kernels that had less are made anew when they are next asked for.
        """
        if num_positions > self._num_positions:
            self._num_positions = max(num_positions, 2 * self._num_positions)
            self._turns.clear()
            self._held.clear()
        if batch > self._max_batch:
            self._max_batch = max(batch, 2 * self._max_batch)
            self._held.clear()

    def get(self, codec: SphericalCodec, layer: int, tier: TierSpec) -> CudaDecode:
        """The kernel of a layer at a tier.

        Raises:
            KernelMismatchError: It does not give what the oracle gives.
        """
        held = self._held.setdefault(codec, {})
        key = (layer, tier.name)
        if key not in held:
            held[key] = self._build(codec, layer, tier)
        return held[key]

    def table_bytes(self, codec: SphericalCodec) -> int:
        """Bytes of the look-up tables made for a codec; those by position may serve others too."""
        by_position = sum(
            self._turns[rope].rows.nbytes
            for rope in set(codec.calibration.ropes)
            if rope in self._turns
        )
        return by_position + sum(
            kernel.table_bytes for kernel in self._held.get(codec, {}).values()
        )

    def _build(self, codec: SphericalCodec, layer: int, tier: TierSpec) -> CudaDecode:
        rope, group = codec.calibration.ropes[layer], codec.calibration.geometry.group_size
        if rope not in self._turns:
            self._turns[rope] = TurnTable.build(
                rope, max_positions=self._num_positions, device=self._device
            )
        codebook, shape = codec.codebook(layer, tier, self._device), self._shape(codec, layer, tier)
        if (shape, group) not in self._checked:
            # random pages must not move the caller's random numbers
            with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
                self_test(codebook, rope, value_bits=tier.value_bits, group=group, shape=shape)
            self._checked.add((shape, group))
        return CudaDecode(
            codebook,
            rope,
            self._turns[rope],
            value_bits=tier.value_bits,
            group=group,
            max_batch=self._max_batch,
            shape=shape,
        )

    def _shape(self, codec: SphericalCodec, layer: int, tier: TierSpec) -> KernelShape:
        """One shape for all layers where that costs little: every shape is a compilation."""
        held = self._shapes.setdefault(codec, {})
        if tier.name not in held:
            held[tier.name] = _layer_shapes(codec, tier)
        own, common = held[tier.name][layer], _largest(held[tier.name])
        return common if common is not None and common.steps <= own.steps + _SPARE_STEPS else own


def _layer_shapes(codec: SphericalCodec, tier: TierSpec) -> list[KernelShape]:
    """The shape that fits each layer."""
    geometry = codec.calibration.geometry
    return [
        KernelShape.of_codebook(
            codec.codebook(layer, tier), value_bits=tier.value_bits, group=geometry.group_size
        )
        for layer in range(geometry.num_layers)
    ]


def _largest(shapes: list[KernelShape]) -> KernelShape | None:
    """A shape that fits every layer; None if no multiprocessor has room for it."""
    try:
        return replace(
            shapes[0],
            double_steps=max(shape.double_steps for shape in shapes),
            constant_steps=max(shape.constant_steps for shape in shapes),
        ).fitted()
    except ValueError:
        return None
