# SPDX-License-Identifier: Apache-2.0
"""INT4 and INT2: uniform asymmetric integers, one range per token and head.

The plain round-to-nearest baseline that the quantisation papers compare with, for instance
"per-token quantization" in Liu et al., 2024, "KIVI". Minimum and spacing are float16, over all
channels of a head; every token is coded as it comes.

Deviations: none to speak of; groups narrower than a head would cost more metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sphkv.baselines.coded_layer import PairCodec
from sphkv.baselines.integer_codes import TokenIntegers
from sphkv.baselines.quantised import CodedSettings
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec


@dataclass(frozen=True)
class Int4(CodedSettings):
    """Integers of 4 bits for keys and values."""

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
