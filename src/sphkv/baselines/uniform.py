# SPDX-License-Identifier: Apache-2.0
"""INT4 and INT2: uniform asymmetric integers, one range per token and head.

The plain round-to-nearest baseline that the quantisation papers compare with, for instance
"per-token quantization" in Liu et al., 2024, "KIVI". Minimum and spacing are float16, over all
channels of a head; every token is coded as it comes.

Deviations: none to speak of; groups narrower than a head would cost more metadata.
"""

from __future__ import annotations

from sphkv.baselines.coded_layer import PairCodec
from sphkv.baselines.integer_codes import TokenIntegers
from sphkv.baselines.quantised import QuantisedCache
from sphkv.core.geometry import KVGeometry


def uniform(geometry: KVGeometry, budget: float, *, bits: int) -> QuantisedCache:
    """Integers of so many bits for keys and values."""
    part = TokenIntegers(bits, geometry.head_dim)
    return QuantisedCache(f"int{bits}", geometry, [PairCodec(part, part)], budget)
