# SPDX-License-Identifier: Apache-2.0
"""TurboQuant: a random rotation, then the best scalar levels for a coordinate of the sphere.

Zandieh et al., 2025, "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate",
the MSE version. A vector is split into its norm, float16, and its direction; the direction is
rotated by one random orthogonal matrix, after which every coordinate follows the same law with
density proportional to ``(1 - x**2) ** ((d - 3) / 2)``, and takes the nearest of the Lloyd-Max
levels of that law. Keys and values are coded alike, token by token. As in the presets of serving
engines, the norm is corrected for what coding does to it, and four sinks are dense.

Deviations: no split into outlier channels with more bits, and no one-bit sketch of the residual
(the inner-product version). No layer is dense, where vLLM keeps the first and last two, which do
not fit small budgets. Between whole widths, keys take the extra bit before values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.baselines.bit_packing import pack_bits, unpack_bits
from sphkv.baselines.coded_layer import PairCodec
from sphkv.baselines.held_states import HeldStates, check_states
from sphkv.baselines.integer_codes import as_float16, check_bits
from sphkv.baselines.quantised import CodedSettings, QuantisedCache
from sphkv.baselines.rotation_lloyd import random_rotation
from sphkv.baselines.scalar_levels import NearestLevel, lloyd_max_levels
from sphkv.baselines.settings import MethodShape, changed_fields
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

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
        rotates: Whether coding rotates and decoding undoes it; else states come rotated.
        corrects_norm: Whether the stored norm is divided by that of the coded direction, so that
            restored vectors have the length of the originals.
    """

    bits: int
    head_dim: int
    seed: int = _SEED
    rotates: bool = True
    corrects_norm: bool = False

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
        unit = x / norm.clamp(min=torch.finfo(torch.float32).tiny)
        if self.rotates:
            unit = unit @ random_rotation(self.head_dim, self.seed).to(x.device)
        codes = _nearest(self.bits, self.head_dim).codes(unit)
        if self.corrects_norm:
            norm = norm / _nearest(self.bits, self.head_dim).values(codes).norm(
                dim=-1, keepdim=True
            )
        kept = as_float16(norm, name="norm").half()
        return {"codes": pack_bits(codes, bits=self.bits), "norm": kept}

    def decode(self, tensors: dict[str, Tensor], num_tokens: int) -> Tensor:
        """``[heads, tokens, head_dim]`` float32."""
        codes = unpack_bits(tensors["codes"], bits=self.bits, count=self.head_dim)
        directions = _nearest(self.bits, self.head_dim).values(codes)
        if self.rotates:
            directions = directions @ random_rotation(self.head_dim, self.seed).T.to(codes.device)
        return directions.mul_(tensors["norm"].float())

    def tables(self) -> list[Tensor]:
        """The rotation and the levels."""
        return [random_rotation(self.head_dim, self.seed), sphere_levels(self.bits, self.head_dim)]


class RotatedBasisCache(QuantisedCache):
    """Keeps every state in the rotated basis: what comes is turned, outputs are turned back."""

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, *, query: Tensor | None = None
    ) -> None:
        """Code a prompt."""
        check_states(self.geometry, keys, values)
        super().prefill(layer, self._turn(keys), self._turn(values), query=query)

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
        check_states(self.geometry, keys, values)
        query, keys, values = (self._turn(part) for part in (query, keys, values))
        output = super().attend(layer, query, keys, values, options, sink_logits=sink_logits)
        return output @ self._rotation().T.to(output.device)

    def _turn(self, states: Tensor) -> Tensor:
        return states.float() @ self._rotation().to(states.device)

    def _rotation(self) -> Tensor:
        return random_rotation(self.geometry.head_dim, _SEED)


@dataclass(frozen=True)
class TurboQuant(CodedSettings):
    """TurboQuant with four dense sinks.

    Attributes:
        corrects_norm: Whether stored norms undo what coding does to the length of a vector.
    """

    corrects_norm: bool = True

    name: ClassVar[str] = "turboquant"

    def trials(self) -> tuple[Self, ...]:
        """With and without norm correction; dense tokens at both ends."""
        return tuple(
            type(self)(sinks, residual, corrects_norm=corrects)
            for corrects in (True, False)
            for sinks, residual in ((None, None), (16, 0), (4, 32))
        )

    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> list[PairCodec]:
        """All widths."""
        own = {"rotates": False, "corrects_norm": self.corrects_norm}
        return [
            PairCodec(
                RotatedLevels(key_bits, geometry.head_dim, **own),
                RotatedLevels(value_bits, geometry.head_dim, **own),
                sink_tokens=4,
            )
            for key_bits, value_bits in WIDTHS
        ]

    def build(self, shape: MethodShape) -> QuantisedCache:
        """An empty cache."""
        codecs = self.chosen_codecs(shape)
        return RotatedBasisCache(self.name, shape, codecs, changed_fields(self))
