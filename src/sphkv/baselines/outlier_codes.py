# SPDX-License-Identifier: Apache-2.0
"""Methods that store outliers apart, so that the rest spans a narrow range: KVQuant and GEAR."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sphkv.baselines.coded_layer import PairCodec, PartCodec
from sphkv.baselines.integer_codes import (
    ChannelIntegers,
    TokenIntegers,
    as_float16,
    check_bits,
    pack_bits,
    unpack_bits,
)
from sphkv.baselines.quantised import CodedSettings
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

_SAMPLES = 1 << 15
_ITERATIONS = 30
SETTINGS = (
    *((8, 8, 0.02), (6, 6, 0.02), (4, 4, 0.02), (4, 3, 0.02), (3, 3, 0.02), (3, 2, 0.02)),
    *((2, 2, 0.02), (2, 2, 0.0)),
)
"""Bits of keys, bits of values and share of outliers, the best first."""

FITTED_WIDTHS = ((6, 6), (5, 5), (5, 4), (4, 4), (4, 3), (3, 3), (3, 2), (2, 2))
"""Bits of keys and of values, the best first."""
CORRECTED_GROUP = 64


def split_outliers(rows: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Take the largest and smallest entries out of each row.

    Args:
        rows: ``[..., count]`` float32.
        share: Share of the entries to take, half from each end, at least one each.

    Returns:
        The rows with those entries replaced by the middle of what is left, their indices
        ``[..., taken]`` in the narrowest integer type, and their values float16.

    Raises:
        ValueError: A row would have no entry left.
    """
    count = rows.shape[-1]
    per_side = max(1, math.ceil(share * count / 2))
    if 2 * per_side >= count:
        raise ValueError(f"{2 * per_side} outliers leave nothing of a row of {count}")
    # one more from each end: the ends of what is left
    low, low_index = rows.topk(per_side + 1, dim=-1, largest=False)
    high, high_index = rows.topk(per_side + 1, dim=-1)
    index = torch.cat([low_index[..., :per_side], high_index[..., :per_side]], -1)
    value = torch.cat([low[..., :per_side], high[..., :per_side]], -1)
    middle = (low[..., per_side:] + high[..., per_side:]) / 2
    rest = rows.scatter(-1, index, middle.expand_as(value))
    return rest, index.to(index_dtype(count)), value.half()


def join_outliers(rest: Tensor, index: Tensor, value: Tensor) -> Tensor:
    """Put outliers back into their rows."""
    return rest.scatter(-1, place(index), value.float())


def place(index: Tensor) -> Tensor:
    """Stored indices as int64; those of 16 bits wrap around at the sign bit."""
    return index.long() % (1 << 16) if index.dtype == torch.int16 else index.long()


def index_dtype(count: int) -> torch.dtype:
    """The narrowest integer type that indexes so many entries; see ``place``."""
    if count <= 1 << 8:
        return torch.uint8
    return torch.int16 if count <= 1 << 16 else torch.int32


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
    """KVQuant with one percent of outliers.

    KVQuant: keys before RoPE, levels fitted to the data, one percent of outliers kept apart.

    Hooper et al., 2024, "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache
    Quantization". Keys are coded per channel before the rotary embedding and values per token; each
    vector gives up its one percent most extreme entries to a sparse float16 list, and what is left
    is scaled to [-1, 1] and takes the nearest of ``2**bits`` levels found by k-means ("nuq"). The
    first token stays dense.

    Deviations: levels and ranges are fitted on the prompt itself, once per layer and block, without
    the Fisher weights of a calibration set; tokens after the prompt wait dense until 128 are coded
    together, each block with its own ranges, where the paper codes them at once with the offline
    ones; short vectors give up at least one entry at each end, which for values of 64 channels is
    3%.
    """

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
            for key_bits, value_bits in FITTED_WIDTHS
        ]


@dataclass(frozen=True)
class CorrectedIntegers:
    """Another codec with outliers taken out before and its error corrected after.

    Attributes:
        backbone: Codes what is left without outliers.
        is_per_channel: Whether outliers are sought along tokens; else along channels.
        share: Share of entries kept as outliers; 0 for none.
        rank: Rank of the correction.
    """

    backbone: PartCodec
    is_per_channel: bool
    share: float = 0.02
    rank: int = 4

    @property
    def label(self) -> str:
        """That of the integers, with an L where there are no outliers."""
        return self.backbone.label + ("" if self.share else "L")

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Backbone tensors, outliers and the two factors."""
        rest, outliers = x, {}
        if self.share:
            rest, index, value = split_outliers(self._rows(x), self.share)
            rest = self._rows(rest).contiguous()
            outliers = {"outlier_index": index, "outlier_value": value}
        tensors = self.backbone.encode(rest)
        error = rest - self.backbone.decode(tensors, x.shape[1])
        # the leading eigenvectors of E'E are the right factor of the best low-rank matrix
        _, vectors = torch.linalg.eigh(error.transpose(1, 2) @ error)
        right = vectors[..., -min(self.rank, x.shape[2]) :]
        return {
            **tensors,
            **outliers,
            "left": (error @ right).half(),
            "right": right.half(),
        }

    def decode(self, tensors: dict[str, Tensor], num_tokens: int) -> Tensor:
        """``[heads, tokens, head_dim]`` float32."""
        rest = self.backbone.decode(tensors, num_tokens)
        rest = rest + tensors["left"].float() @ tensors["right"].float().transpose(1, 2)
        if not self.share:
            return rest
        outliers = (tensors["outlier_index"], tensors["outlier_value"])
        return self._rows(join_outliers(self._rows(rest), *outliers))

    def _rows(self, x: Tensor) -> Tensor:
        """Vectors along the last dimension; the same step leads back."""
        return x.transpose(1, 2) if self.is_per_channel else x

    def tables(self) -> list[Tensor]:
        """Those of the backbone."""
        return self.backbone.tables()


@dataclass(frozen=True)
class Gear(CodedSettings):
    """GEAR: integers, plus a low-rank correction of their error, plus sparse outliers.

    Kang et al., 2024, "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative
    Inference of LLM". Two percent of each vector, half from either end, are kept apart in float16;
    the rest becomes integers, keys per channel and values per token in groups of 64; the error that
    remains is approximated per head by a matrix of rank 4.

    Deviations: the low-rank factors are an exact truncated decomposition, where the paper iterates;
    tokens after the prompt wait dense until 64 are coded together, at rank 4 as well (the paper
    takes blocks of 20 at rank 2). Where even 2 bits do not fit, the outliers are left out, which
    the paper calls GEAR-L.
    """

    name: ClassVar[str] = "gear"

    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> list[PairCodec]:
        """All widths."""
        return [
            PairCodec(
                CorrectedIntegers(ChannelIntegers(k, CORRECTED_GROUP), True, share),
                CorrectedIntegers(
                    TokenIntegers(v, geometry.head_dim, CORRECTED_GROUP), False, share
                ),
                block_tokens=CORRECTED_GROUP,
            )
            for k, v, share in SETTINGS
        ]
