# SPDX-License-Identifier: Apache-2.0
"""KIVI: keys as integers per channel, values as integers per token, recent tokens dense.

Liu et al., 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache". Keys share a
float16 minimum and spacing per channel and 32 tokens, values per token and 32 channels; the
newest tokens wait in full precision until 128 of them are coded together.

Deviations: keys and values leave the residual window together, where the paper moves values out
one by one and so keeps 128 of them dense; where several widths fit the budget the widest is taken
(the paper has 2 and 4 bits), keys before values.
"""

from __future__ import annotations

from sphkv.baselines.coded_layer import PairCodec
from sphkv.baselines.integer_codes import ChannelIntegers, TokenIntegers
from sphkv.baselines.quantised import QuantisedCache
from sphkv.core.geometry import KVGeometry

WIDTHS = ((8, 8), (8, 4), (4, 4), (4, 3), (3, 3), (3, 2), (2, 2))
"""Bits of keys and of values, the best first."""


def kivi_codec(
    geometry: KVGeometry, key_bits: int, value_bits: int, *, group: int = 32, residual: int = 128
) -> PairCodec:
    """One setting of KIVI."""
    if residual % group:
        raise ValueError(f"residual {residual} is no multiple of the group of {group}")
    return PairCodec(
        ChannelIntegers(key_bits, group),
        TokenIntegers(value_bits, geometry.head_dim, group),
        block_tokens=residual,
    )


def kivi(geometry: KVGeometry, budget: float) -> QuantisedCache:
    """KIVI with groups of 32 and a residual of 128."""
    codecs = [kivi_codec(geometry, *widths) for widths in WIDTHS]
    return QuantisedCache("kivi", geometry, codecs, budget)
