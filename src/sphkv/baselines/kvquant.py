# SPDX-License-Identifier: Apache-2.0
"""KVQuant: keys before RoPE, levels fitted to the data, one percent of outliers kept apart.

Hooper et al., 2024, "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache
Quantization". Keys are coded per channel before the rotary embedding and values per token; each
vector gives up its one percent most extreme entries to a sparse float16 list, and what is left is
scaled to [-1, 1] and takes the nearest of ``2**bits`` levels found by k-means ("nuq"). The first
token stays dense.

Deviations: levels and ranges are fitted on the prompt itself, once per layer and block, without
the Fisher weights of a calibration set; tokens after the prompt wait dense until 128 are coded
together, each block with its own ranges, where the paper codes them at once with the offline ones;
short vectors give up at least one entry at each end, which for values of 64 channels is 3%.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sphkv.baselines.bit_packing import pack_bits, unpack_bits
from sphkv.baselines.coded_layer import PairCodec
from sphkv.baselines.integer_codes import as_float16, check_bits
from sphkv.baselines.outliers import join_outliers, place, split_outliers
from sphkv.baselines.quantised import CodedSettings
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

WIDTHS = ((6, 6), (5, 5), (5, 4), (4, 4), (4, 3), (3, 3), (3, 2), (2, 2))
"""Bits of keys and of values, the best first."""

_SAMPLES = 1 << 15
_ITERATIONS = 30


def fitted_levels(x: Tensor, *, bits: int) -> Tensor:
    """Levels ``[2**bits]`` float16, ascending, of least squared error for entries ``x``."""
    samples = x.flatten()
    samples = samples[:: max(1, samples.numel() // _SAMPLES)].sort().values
    count = 1 << bits
    # equal steps, as integers have them, then moved to the means of their cells
    levels = torch.linspace(-1, 1, count, device=x.device)
    for _ in range(_ITERATIONS):
        cell = torch.bucketize(samples, (levels[1:] + levels[:-1]) / 2)
        size = torch.bincount(cell, minlength=count)
        total = torch.zeros_like(levels).index_add_(0, cell, samples)
        levels = torch.where(size > 0, total / size.clamp(min=1), levels)
    return levels.half()


@dataclass(frozen=True)
class NonuniformRows:
    """Rows scaled to [-1, 1], coded with fitted levels, outliers apart.

    Attributes:
        bits: Width of a code, 1 to 8.
        head_dim: Channels of a head.
        is_per_channel: Whether a row is a channel over all tokens; else it is a token.
        share: Share of each row kept as outliers.
    """

    bits: int
    head_dim: int
    is_per_channel: bool
    share: float = 0.01

    def __post_init__(self) -> None:
        """Reject widths that cannot be coded."""
        check_bits(self.bits)

    @property
    def label(self) -> str:
        """The bits."""
        return f"{self.bits}"

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Codes, range and outliers of each row, and the levels of the block."""
        rows = x.transpose(1, 2) if self.is_per_channel else x
        rest, index, value = split_outliers(rows, self.share)
        low, high = rest.amin(-1, keepdim=True), rest.amax(-1, keepdim=True)
        middle = as_float16((low + high) / 2, name="middle of the range")
        half = as_float16((high - low) / 2, name="half of the range")
        scaled = torch.where(half > 0, (rest - middle) / half, 0.0)
        is_rest = torch.ones_like(rows, dtype=torch.bool).scatter_(-1, place(index), False)
        levels = fitted_levels(scaled[is_rest], bits=self.bits)
        wide = levels.float()
        codes = torch.bucketize(scaled, (wide[1:] + wide[:-1]) / 2).to(torch.uint8)
        return {
            "codes": pack_bits(codes, bits=self.bits),
            "range": torch.cat([middle, half], -1).half(),
            "levels": levels,
            "outlier_index": index,
            "outlier_value": value,
        }

    def decode(self, tensors: dict[str, Tensor], num_tokens: int) -> Tensor:
        """``[heads, tokens, head_dim]`` float32."""
        middle, half = tensors["range"].float().split(1, -1)
        count = num_tokens if self.is_per_channel else self.head_dim
        codes = unpack_bits(tensors["codes"], bits=self.bits, count=count)
        rest = tensors["levels"].float()[codes.int()] * half + middle
        rows = join_outliers(rest, tensors["outlier_index"], tensors["outlier_value"])
        return rows.transpose(1, 2) if self.is_per_channel else rows

    def tables(self) -> list[Tensor]:
        """None."""
        return []


@dataclass(frozen=True)
class KVQuant(CodedSettings):
    """KVQuant with one percent of outliers."""

    name: ClassVar[str] = "kvquant"

    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> list[PairCodec]:
        """All widths."""
        return [
            PairCodec(
                NonuniformRows(key_bits, geometry.head_dim, is_per_channel=True),
                NonuniformRows(value_bits, geometry.head_dim, is_per_channel=False),
                block_tokens=128,
                sink_tokens=1,
                ropes=ropes,
            )
            for key_bits, value_bits in WIDTHS
        ]
