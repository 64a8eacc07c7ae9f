# SPDX-License-Identifier: Apache-2.0
"""Methods that round every token to the nearest number: FP8, INT4 and INT2, RotateKV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sphkv.baselines.coded_layer import PairCodec
from sphkv.baselines.integer_codes import TokenIntegers
from sphkv.baselines.quantised import CodedSettings
from sphkv.codec.hadamard import rotate, unrotate
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
ROTATED_GROUP = 128
ROTATED_WIDTHS = ((8, 8), (6, 6), (5, 5), (5, 4), (4, 4), (4, 3), (3, 3), (3, 2), (2, 2))
"""Bits of keys and of values, the best first."""


@dataclass(frozen=True)
class Float8:
    """Entries rounded to e4m3, one byte each."""

    @property
    def label(self) -> str:
        """The format."""
        return "fp8"

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Codes ``[heads, tokens, head_dim]`` uint8."""
        rounded = x.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        return {"codes": rounded.view(torch.uint8)}

    def decode(self, tensors: dict[str, Tensor], num_tokens: int) -> Tensor:
        """``[heads, tokens, head_dim]`` float32."""
        return tensors["codes"].view(torch.float8_e4m3fn).float()

    def tables(self) -> list[Tensor]:
        """None."""
        return []


@dataclass(frozen=True)
class Fp8(CodedSettings):
    """FP8: keys and values as e4m3 floats.

    The default 8-bit cache of serving engines such as vLLM (``--kv-cache-dtype fp8``): format e4m3
    of Micikevicius et al., 2022, "FP8 Formats for Deep Learning", with a scale of 1 for the whole
    tensor.

    Deviations: entries beyond the largest e4m3 number, 448, are clamped to it; attention is
    computed in float32 from the restored states, where engines on Hopper multiply in FP8.
    """

    name: ClassVar[str] = "fp8"

    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> list[PairCodec]:
        """The one format."""
        return [PairCodec(Float8(), Float8())]


@dataclass(frozen=True)
class Int4(CodedSettings):
    """Integers of 4 bits for keys and values.

    INT4 and INT2: uniform asymmetric integers, one range per token and head.

    The plain round-to-nearest baseline that the quantisation papers compare with, for instance
    "per-token quantization" in Liu et al., 2024, "KIVI". Minimum and spacing are float16, over all
    channels of a head; every token is coded as it comes.

    Deviations: none to speak of; groups narrower than a head would cost more metadata.
    """

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4

    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> list[PairCodec]:
        """The one width."""
        part = TokenIntegers(self.bits, geometry.head_dim)
        return [PairCodec(part, part)]


@dataclass(frozen=True)
class Int2(Int4):
    """Integers of 2 bits."""

    name: ClassVar[str] = "int2"
    bits: ClassVar[int] = 2


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
    """RotateKV with all KV heads of a layer rotated together.

    RotateKV: keys before RoPE, rotated across heads, then integers per token.

    Su et al., 2025, "RotateKV: Accurate and Robust 2-Bit KV Cache Quantization for LLMs via
    Outlier-Aware Adaptive Rotations". The heads of a layer are rotated together by a Hadamard
    matrix before the rotary embedding, so that outlier channels spread over all of them; each token
    then takes integers in groups of 128. Values are rotated per head. Sink tokens stay dense.

    Deviations: no reordering of channels by calibrated outlier strength before the rotation; the
    sinks are the first four tokens instead of those with massive activations; widths that are no
    power of two use the rotation of ``sphkv.codec.hadamard``.
    """

    name: ClassVar[str] = "rotatekv"

    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> list[PairCodec]:
        """All widths."""
        heads, dim = geometry.num_kv_heads, geometry.head_dim
        return [
            PairCodec(
                RotatedIntegers(TokenIntegers(k, heads * dim, ROTATED_GROUP), heads),
                RotatedIntegers(TokenIntegers(v, dim, ROTATED_GROUP)),
                sink_tokens=4,
                ropes=ropes,
            )
            for k, v in ROTATED_WIDTHS
        ]
