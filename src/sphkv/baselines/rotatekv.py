# SPDX-License-Identifier: Apache-2.0
"""RotateKV: keys before RoPE, rotated across heads, then integers per token.

Su et al., 2025, "RotateKV: Accurate and Robust 2-Bit KV Cache Quantization for LLMs via
Outlier-Aware Adaptive Rotations". The heads of a layer are rotated together by a Hadamard matrix
before the rotary embedding, so that outlier channels spread over all of them; each token then
takes integers in groups of 128. Values are rotated per head. Sink tokens stay dense.

Deviations: no reordering of channels by calibrated outlier strength before the rotation; the
sinks are the first four tokens instead of those with massive activations; widths that are no power
of two use the rotation of ``sphkv.codec.hadamard``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sphkv.baselines.coded_layer import PairCodec
from sphkv.baselines.integer_codes import TokenIntegers
from sphkv.baselines.quantised import CodedSettings
from sphkv.codec.hadamard import rotate, unrotate
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

GROUP = 128
WIDTHS = ((8, 8), (6, 6), (5, 5), (5, 4), (4, 4), (4, 3), (3, 3), (3, 2), (2, 2))
"""Bits of keys and of values, the best first."""


@dataclass(frozen=True)
class RotatedIntegers:
    """Integers per token after a Hadamard rotation.

    Attributes:
        integers: Codes the rotated vectors.
        num_heads: Heads that are rotated together.
    """

    integers: TokenIntegers
    num_heads: int = 1

    @property
    def label(self) -> str:
        """The bits."""
        return self.integers.label

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Codes and scales of ``[heads / num_heads, tokens, num_heads * head_dim]``."""
        joined = x.unflatten(0, (-1, self.num_heads)).transpose(1, 2).flatten(2)
        return self.integers.encode(rotate(joined))

    def decode(self, tensors: dict[str, Tensor], num_tokens: int) -> Tensor:
        """``[heads, tokens, head_dim]`` float32."""
        joined = unrotate(self.integers.decode(tensors, num_tokens))
        heads: Tensor = joined.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        return heads.flatten(0, 1)

    def tables(self) -> list[Tensor]:
        """None: the rotation is a formula."""
        return []


@dataclass(frozen=True)
class RotateKV(CodedSettings):
    """RotateKV with all KV heads of a layer rotated together."""

    name: ClassVar[str] = "rotatekv"

    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> list[PairCodec]:
        """All widths."""
        heads, dim = geometry.num_kv_heads, geometry.head_dim
        return [
            PairCodec(
                RotatedIntegers(TokenIntegers(k, heads * dim, GROUP), heads),
                RotatedIntegers(TokenIntegers(v, dim, GROUP)),
                sink_tokens=4,
                ropes=ropes,
            )
            for k, v in WIDTHS
        ]
