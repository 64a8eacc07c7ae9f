# SPDX-License-Identifier: Apache-2.0
"""FP8: keys and values as e4m3 floats.

The default 8-bit cache of serving engines such as vLLM (``--kv-cache-dtype fp8``): format e4m3 of
Micikevicius et al., 2022, "FP8 Formats for Deep Learning", with a scale of 1 for the whole tensor.

Deviations: entries beyond the largest e4m3 number, 448, are clamped to it; attention is computed
in float32 from the restored states, where engines on Hopper multiply in FP8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sphkv.baselines.coded_layer import PairCodec
from sphkv.baselines.quantised import CodedSettings
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


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
    """FP8 with scale 1."""

    name: ClassVar[str] = "fp8"

    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> list[PairCodec]:
        """The one format."""
        return [PairCodec(Float8(), Float8())]
