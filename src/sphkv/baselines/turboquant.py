# SPDX-License-Identifier: Apache-2.0
"""TurboQuant: a random rotation, then the best scalar levels for a coordinate of the sphere.

Zandieh et al., 2025, "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
the MSE version. A vector is split into its norm, float16, and its direction; the direction is
rotated by one random orthogonal matrix, after which every coordinate follows the same law with
density proportional to ``(1 - x**2) ** ((d - 3) / 2)``, and takes the nearest of the Lloyd-Max
levels of that law. Keys and values are coded alike, token by token.

Deviations: no split into outlier channels with more bits, and no one-bit sketch of the residual
(the inner-product version). Between whole widths, keys take the extra bit before values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.baselines.bit_packing import pack_bits, unpack_bits
from sphkv.baselines.coded_layer import PairCodec
from sphkv.baselines.held_states import HeldStates
from sphkv.baselines.per_channel_int import as_float16, check_bits
from sphkv.baselines.quantised import QuantisedCache
from sphkv.baselines.rotation_lloyd import random_rotation
from sphkv.baselines.scalar_levels import NearestLevel, lloyd_max_levels
from sphkv.core.geometry import KVGeometry

WIDTHS = ((8, 8), (6, 6), (5, 5), (5, 4), (4, 4), (4, 3), (3, 3), (3, 2), (2, 2), (2, 1), (1, 1))
"""Bits of keys and of values, the best first."""

_GRID = 1 << 16
_SEED = 1


@functools.lru_cache(maxsize=64)
def sphere_levels(bits: int, dim: int) -> Tensor:
    """Lloyd-Max levels ``[2**bits]`` float32 of one coordinate of a random unit vector.

    Cached and shared, so callers must not write to them.
    """
    with torch.inference_mode(False):
        # equal steps of the angle, so that the ends, where the density falls, are fine enough
        angle = (torch.arange(_GRID, dtype=torch.float64) + 0.5) * (torch.pi / _GRID)
        x, mass = -angle.cos(), angle.sin() ** (dim - 2)
        return lloyd_max_levels(x, mass, bits=bits).float()


@functools.lru_cache(maxsize=64)
def _nearest(bits: int, dim: int) -> NearestLevel:
    with torch.inference_mode(False):
        return NearestLevel(sphere_levels(bits, dim))


@dataclass(frozen=True)
class RotatedLevels:
    """A norm and one level index per rotated coordinate.

    Attributes:
        bits: Width of an index, 1 to 8.
        head_dim: Channels of a head.
        seed: Seed of the rotation that all layers and heads share.
        turns_back: Whether decoding undoes the rotation.
    """

    bits: int
    head_dim: int
    seed: int = _SEED
    turns_back: bool = True

    def __post_init__(self) -> None:
        """Reject widths that cannot be coded."""
        check_bits(self.bits)

    @property
    def label(self) -> str:
        """The bits."""
        return f"{self.bits}"

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Codes ``[heads, tokens, bytes]``, norms ``[heads, tokens, 1]`` float16."""
        norm = x.norm(dim=-1, keepdim=True)
        kept = as_float16(norm, name="norm").half()
        unit = x / norm.clamp(min=torch.finfo(torch.float32).tiny)
        rotated = unit @ random_rotation(self.head_dim, self.seed).to(x.device)
        codes = _nearest(self.bits, self.head_dim).codes(rotated)
        return {"codes": pack_bits(codes, bits=self.bits), "norm": kept}

    def decode(self, tensors: dict[str, Tensor], num_tokens: int) -> Tensor:
        """``[heads, tokens, head_dim]`` float32."""
        codes = unpack_bits(tensors["codes"], bits=self.bits, count=self.head_dim)
        directions = _nearest(self.bits, self.head_dim).values(codes)
        if self.turns_back:
            directions = directions @ random_rotation(self.head_dim, self.seed).T.to(codes.device)
        return directions.mul_(tensors["norm"].float())

    def tables(self) -> list[Tensor]:
        """The rotation and the levels."""
        return [random_rotation(self.head_dim, self.seed), sphere_levels(self.bits, self.head_dim)]


class RotatedBasisCache(QuantisedCache):
    """Attends in the rotated basis: queries are turned and outputs turned back, states are not."""

    def read(self, layer: int) -> HeldStates:
        """What queries of a layer see, rebuilt from the codes and turned back."""
        held, rotation = super().read(layer), self._rotation()
        return HeldStates(held.keys @ rotation.T, held.values @ rotation.T, held.positions)

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        options: AttentionOptions,
        *,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Store the next tokens and attend."""
        rotation = self._rotation().to(query.device)
        turned = query.float() @ rotation
        return (
            super().attend(layer, turned, keys, values, options, sink_logits=sink_logits)
            @ rotation.T
        )

    def _rotation(self) -> Tensor:
        return random_rotation(self.geometry.head_dim, _SEED)


def turboquant(geometry: KVGeometry, budget: float) -> QuantisedCache:
    """TurboQuant at the widest bits that fit."""
    codecs = [
        PairCodec(
            RotatedLevels(key_bits, geometry.head_dim, turns_back=False),
            RotatedLevels(value_bits, geometry.head_dim, turns_back=False),
        )
        for key_bits, value_bits in WIDTHS
    ]
    return RotatedBasisCache("turboquant", geometry, codecs, budget)
