# SPDX-License-Identifier: Apache-2.0
"""Two methods named PolarQuant: a tree of radii and angles, and the pairs of channels of RoPE."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sphkv.baselines.coded_layer import PairCodec
from sphkv.baselines.integer_codes import (
    ChannelIntegers,
    TokenIntegers,
    as_float16,
    pack_bits,
    unpack_bits,
)
from sphkv.baselines.quantised import CodedSettings
from sphkv.baselines.rotation_lloyd import lloyd_max_levels, random_rotation
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

TREE_WIDTHS = ((8, 6), (6, 4), (5, 3), (4, 3), (4, 2), (3, 2), (3, 1), (2, 1))
"""Bits of first-level angles and of the others, the best first; the paper's is (4, 2)."""

_MOST_LEVELS = 4
_GRID = 1 << 14
PAIR_GROUP = 128
PAIR_WIDTHS = (
    (6, 6, 8),
    (5, 5, 4),
    (4, 4, 4),
    (4, 4, 3),
    (3, 4, 3),
    (3, 3, 3),
    (3, 3, 2),
    (2, 3, 2),
)
"""Bits of radii, of angles and of values, the best first."""


@functools.lru_cache(maxsize=64)
def angle_levels(level: int, bits: int) -> Tensor:
    """Levels ``[2**bits]`` float32 of an angle at a level from 2 on, in (0, pi / 2).

    Cached and shared, so callers must not write to them.
    """
    with torch.inference_mode(False):
        angle = (torch.arange(_GRID, dtype=torch.float64) + 0.5) * (math.pi / 2 / _GRID)
        mass = (2 * angle).sin() ** (2 ** (level - 1) - 1)
        return lloyd_max_levels(angle, mass, bits=bits).float()


def num_levels(head_dim: int) -> int:
    """How often channels can be paired, at most four times."""
    levels = 0
    while levels < _MOST_LEVELS and head_dim % (2 ** (levels + 1)) == 0:
        levels += 1
    return levels


@dataclass(frozen=True)
class PolarTree:
    """Radii of blocks of channels and the angles below them.

    Attributes:
        head_dim: Channels of a head; even.
        first_bits: Width of first-level angles.
        upper_bits: Width of all other angles.
        seed: Seed of the rotation that all layers and heads share.
    """

    head_dim: int
    first_bits: int
    upper_bits: int
    seed: int = 1

    @property
    def label(self) -> str:
        """Bits of the first level and of the others."""
        return f"{self.first_bits}/{self.upper_bits}"

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Angle codes of each level ``[heads, tokens, bytes]``, radii ``[heads, tokens, n]``."""
        radius = x @ random_rotation(self.head_dim, self.seed).to(x.device)
        tensors = {}
        for level in range(1, num_levels(self.head_dim) + 1):
            left, right = radius[..., 0::2], radius[..., 1::2]
            codes = self._code(torch.atan2(right, left), level)
            name = "codes" if level == 1 else f"level{level}"
            tensors[name] = pack_bits(codes, bits=self._bits(level))
            radius = torch.hypot(left, right)
        return {**tensors, "radius": as_float16(radius, name="radius").half()}

    def decode(self, tensors: dict[str, Tensor], num_tokens: int) -> Tensor:
        """``[heads, tokens, head_dim]`` float32."""
        radius = tensors["radius"].float()
        for level in range(num_levels(self.head_dim), 0, -1):
            packed = tensors["codes" if level == 1 else f"level{level}"]
            codes = unpack_bits(packed, bits=self._bits(level), count=self.head_dim >> level)
            angle = self._angle(codes, level)
            pair = torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
            radius = pair.flatten(-2)
        return radius @ random_rotation(self.head_dim, self.seed).to(radius.device).T

    def _bits(self, level: int) -> int:
        return self.first_bits if level == 1 else self.upper_bits

    def _code(self, angle: Tensor, level: int) -> Tensor:
        if level == 1:
            count = 1 << self.first_bits
            turn = angle * (count / (2 * math.pi))
            return torch.remainder(turn.floor(), count).to(torch.uint8)
        levels = angle_levels(level, self.upper_bits).to(angle.device)
        return torch.bucketize(angle, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)

    def _angle(self, codes: Tensor, level: int) -> Tensor:
        if level == 1:
            return (codes.float() + 0.5) * (2 * math.pi / (1 << self.first_bits))
        return angle_levels(level, self.upper_bits).to(codes.device)[codes.int()]

    def tables(self) -> list[Tensor]:
        """The rotation and the levels."""
        upper = range(2, num_levels(self.head_dim) + 1)
        levels = [angle_levels(level, self.upper_bits) for level in upper]
        return [random_rotation(self.head_dim, self.seed), *levels]


@dataclass(frozen=True)
class PolarQuantRecursive(CodedSettings):
    """Recursive PolarQuant for keys and values.

    PolarQuant, recursive: radii pair up into radii, and only angles are coded.

    Han et al., 2025, "PolarQuant: Quantizing KV Caches with Polar Transformation". After a random
    rotation the channels are paired, each pair becomes a radius and an angle, the radii are paired
    again, four times over; one float16 radius per 16 channels is left. First-level angles take 4
    bits, the others 2, with levels optimal for the angles of a Gaussian vector: the first level is
    uniform, level ``l`` has density proportional to ``sin(2 x) ** (2 ** (l - 1) - 1)``.

    Deviations: levels are computed from that law instead of clustered on a sample (the paper offers
    both); head dims that are no multiple of 16 use fewer levels.
    """

    name: ClassVar[str] = "polarquant_recursive"

    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> list[PairCodec]:
        """All widths."""
        parts = [PolarTree(geometry.head_dim, *widths) for widths in TREE_WIDTHS]
        return [PairCodec(part, part) for part in parts]


@dataclass(frozen=True)
class PolarPairs:
    """Radius and angle of every channel pair.

    Attributes:
        rope: Says which channels are pairs.
        radius_bits: Width of a radius.
        angle_bits: Width of an angle.
    """

    rope: RopeSpec
    radius_bits: int
    angle_bits: int

    @property
    def label(self) -> str:
        """Both widths."""
        return f"{self.radius_bits}+{self.angle_bits}/2"

    @property
    def _parts(self) -> tuple[ChannelIntegers, ChannelIntegers]:
        return ChannelIntegers(self.angle_bits, PAIR_GROUP), ChannelIntegers(
            self.radius_bits, PAIR_GROUP
        )

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Codes and ranges of angles and of radii."""
        first, second = self.rope.to_planes(x).unbind(-1)
        angles, radii = self._parts
        tensors = angles.encode(torch.atan2(second, first))
        for name, tensor in radii.encode(torch.hypot(first, second)).items():
            tensors[f"radius_{name}"] = tensor
        return tensors

    def decode(self, tensors: dict[str, Tensor], num_tokens: int) -> Tensor:
        """``[heads, tokens, head_dim]`` float32."""
        angles, radii = self._parts
        angle = angles.decode(tensors, num_tokens)
        own = {name: tensors[f"radius_{name}"] for name in ("codes", "scale")}
        radius = radii.decode(own, num_tokens)
        planes = torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
        return self.rope.from_planes(planes)

    def tables(self) -> list[Tensor]:
        """None."""
        return []


@dataclass(frozen=True)
class PolarQuantRope(CodedSettings):
    """RoPE-pair PolarQuant; all layers must pair their channels alike.

    PolarQuant, RoPE pairs: radius and angle of each rotated pair of key channels.

    Wu et al., 2025, "PolarQuant: Leveraging Polar Transformation for Efficient Key Cache
    Quantization and Decoding Acceleration". The two channels that the rotary embedding turns
    together form a vector whose radius and angle, after the embedding, are integers per pair over
    groups of 128 tokens; four bits each are the paper's default. Values take KIVI's integers per
    token.

    Values share a range per token and up to 128 channels.

    Deviations: values are always coded (the paper also reports dense values); the last tokens wait
    dense until a group of 128 is full.
    """

    name: ClassVar[str] = "polarquant_rope"

    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> list[PairCodec]:
        """All widths."""
        if len({(rope.layout, rope.rotary_dim) for rope in ropes}) != 1:
            raise ValueError("polarquant_rope needs the same channel pairs in all layers")
        return [
            PairCodec(
                PolarPairs(ropes[0], radius_bits, angle_bits),
                TokenIntegers(value_bits, geometry.head_dim, PAIR_GROUP),
                block_tokens=PAIR_GROUP,
            )
            for radius_bits, angle_bits, value_bits in PAIR_WIDTHS
        ]
