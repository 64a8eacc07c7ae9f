# SPDX-License-Identifier: Apache-2.0
"""Random projections of vectors: TurboQuant's rotated levels and QJL's signs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.baselines.coded_layer import PairCodec
from sphkv.baselines.held_states import HeldStates, check_states
from sphkv.baselines.integer_codes import (
    TokenIntegers,
    as_float16,
    check_bits,
    pack_bits,
    unpack_bits,
)
from sphkv.baselines.quantised import CodedSettings, QuantisedCache
from sphkv.baselines.rotation_lloyd import NearestLevel, lloyd_max_levels, random_rotation
from sphkv.baselines.settings import MethodShape, changed_fields
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

WIDTHS = ((8, 8), (6, 6), (5, 5), (5, 4), (4, 4), (4, 3), (3, 3), (3, 2), (2, 2), (2, 1), (1, 1))
"""Bits of keys and of values, the best first."""

_GRID = 1 << 16
_SEED = 1
SKETCH_BLOCK = 128
SKETCH_WIDTHS = ((8, 8), (6, 4), (4, 4), (4, 3), (4, 2), (2, 2), (1, 2))
"""Signs per key channel and bits of values, the best first."""
_SKETCH_SEED = 1


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
    """TurboQuant: a random rotation, then the best scalar levels for a coordinate of the sphere.

    Zandieh et al., 2025, "TurboQuant: Online Vector Quantization with Near-optimal Distortion
    Rate", the MSE version. A vector is split into its norm, float16, and its direction; the
    direction is rotated by one random orthogonal matrix, after which every coordinate follows the
    same law with density proportional to ``(1 - x**2) ** ((d - 3) / 2)``, and takes the nearest of
    the Lloyd-Max levels of that law. Keys and values are coded alike, token by token. As in the
    presets of serving engines, the norm is corrected for what coding does to it, and four sinks are
    dense.

    Deviations: no split into outlier channels with more bits, and no one-bit sketch of the residual
    (the inner-product version). No layer is dense, where vLLM keeps the first and last two, which
    do not fit small budgets. Between whole widths, keys take the extra bit before values.

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


@functools.lru_cache(maxsize=64)
def sketch_rows(num_rows: int, dim: int) -> Tensor:
    """Projection ``[rows, dim]`` float32 whose blocks of ``dim`` rows are orthogonal.

    Rows have norm ``sqrt(dim)``, as Gaussian rows have on average. Cached and shared.
    """
    with torch.inference_mode(False):
        blocks = [
            random_rotation(dim, _SKETCH_SEED + index) for index in range(-(-num_rows // dim))
        ]
        return (torch.cat(blocks)[:num_rows] * math.sqrt(dim)).contiguous()


@dataclass(frozen=True)
class SignSketch:
    """Signs and norms of keys, with large channels sketched apart.

    Attributes:
        head_dim: Channels of a head.
        ratio: Signs per channel.
        num_outliers: Channels with a sketch of their own.
    """

    head_dim: int
    ratio: int
    num_outliers: int = 8

    @property
    def label(self) -> str:
        """Signs per channel."""
        return f"{self.ratio}"

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.ratio * self.head_dim, (1 if self.ratio >= 4 else 2) * self.head_dim

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Packed signs and float16 norms of both parts, and the outlier channels."""
        index = x.abs().mean(1).topk(min(self.num_outliers, self.head_dim), dim=-1).indices
        wide = index[:, None].expand(-1, x.shape[1], -1)
        outliers = torch.zeros_like(x).scatter_(2, wide, x.gather(2, wide))
        tensors = {"channels": index.to(torch.int16)}
        for name, part, rows in zip(
            ("", "outlier_"), (x - outliers, outliers), self._sizes, strict=True
        ):
            signs = part @ sketch_rows(rows, self.head_dim).to(x.device).T > 0
            tensors[f"{name}codes"] = pack_bits(signs.to(torch.uint8), bits=1)
            norm = part.norm(dim=-1, keepdim=True)
            tensors[f"{name}norm"] = as_float16(norm, name="key norm").half()
        return tensors

    def decode(self, tensors: dict[str, Tensor], num_tokens: int) -> Tensor:
        """``[heads, tokens, head_dim]`` float32."""
        index = tensors["channels"].long()
        is_outlier = torch.zeros(index.shape[0], 1, self.head_dim, device=index.device)
        is_outlier.scatter_(2, index[:, None], 1.0)
        restored = torch.zeros(())
        masks = (1 - is_outlier, is_outlier)
        for name, mask, rows in zip(("", "outlier_"), masks, self._sizes, strict=True):
            signs = unpack_bits(tensors[f"{name}codes"], bits=1, count=rows).float() * 2 - 1
            sketch = sketch_rows(rows, self.head_dim).to(signs.device)
            gain = tensors[f"{name}norm"].float() * (math.sqrt(math.pi / 2) / rows)
            restored = restored + signs @ sketch * gain * mask
        return restored

    def tables(self) -> list[Tensor]:
        """Both projections."""
        return [sketch_rows(rows, self.head_dim) for rows in self._sizes]


@dataclass(frozen=True)
class Qjl(CodedSettings):
    """QJL with eight outlier channels and a buffer of 128 tokens.

    QJL: the signs of a random projection of each key, and its norm.

    Zandieh et al., 2024, "QJL: 1-Bit Quantized JL Transform for KV Cache Quantization with Zero
    Overhead". With rows ``s`` of a random projection, ``sqrt(pi / 2) / m * |k| * sum sign(s k) s``
    is an unbiased estimate of the key for inner products with any query. The eight largest channels
    of a prompt have a sketch of their own. Values are 2-bit integers per token in groups of 32; the
    newest 128 tokens wait dense.

    Deviations: the sketch has a multiple of the head dim many signs in every layer (the paper: 256
    of 128 channels, 512 in the first 15 layers), made of random rotations, which the paper
    recommends ("orthogonalised"); the key norm is float16. The outlier channels' sketch has as many
    signs as in the published code: two per channel of the head, or one where the other sketch has
    four and more.
    """

    name: ClassVar[str] = "qjl"

    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> list[PairCodec]:
        """All sketches."""
        dim = geometry.head_dim
        return [
            PairCodec(
                SignSketch(dim, ratio), TokenIntegers(bits, dim, 32), block_tokens=SKETCH_BLOCK
            )
            for ratio, bits in SKETCH_WIDTHS
        ]
