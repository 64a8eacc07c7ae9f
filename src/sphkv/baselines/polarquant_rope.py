# SPDX-License-Identifier: Apache-2.0
"""PolarQuant, RoPE pairs: radius and angle of each rotated pair of key channels.

Wu et al., 2025, "PolarQuant: Leveraging Polar Transformation for Efficient Key Cache Quantization
and Decoding Acceleration". The two channels that the rotary embedding turns together form a
vector whose radius and angle, after the embedding, are integers per pair over groups of 128
tokens; four bits each are the paper's default. Values take KIVI's integers per token.

Values share a range per token and up to 128 channels.

Deviations: values are always coded (the paper also reports dense values); the last tokens wait
dense until a group of 128 is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sphkv.baselines.coded_layer import PairCodec
from sphkv.baselines.integer_codes import ChannelIntegers, TokenIntegers
from sphkv.baselines.quantised import CodedSettings
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

GROUP = 128
WIDTHS = ((6, 6, 8), (5, 5, 4), (4, 4, 4), (4, 4, 3), (3, 4, 3), (3, 3, 3), (3, 3, 2), (2, 3, 2))
"""Bits of radii, of angles and of values, the best first."""


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
        return ChannelIntegers(self.angle_bits, GROUP), ChannelIntegers(self.radius_bits, GROUP)

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
    """RoPE-pair PolarQuant; all layers must pair their channels alike."""

    name: ClassVar[str] = "polarquant_rope"

    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> list[PairCodec]:
        """All widths."""
        if len({(rope.layout, rope.rotary_dim) for rope in ropes}) != 1:
            raise ValueError("polarquant_rope needs the same channel pairs in all layers")
        return [
            PairCodec(
                PolarPairs(ropes[0], radius_bits, angle_bits),
                TokenIntegers(value_bits, geometry.head_dim, GROUP),
                block_tokens=GROUP,
            )
            for radius_bits, angle_bits, value_bits in WIDTHS
        ]
