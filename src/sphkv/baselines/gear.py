# SPDX-License-Identifier: Apache-2.0
"""GEAR: integers, plus a low-rank correction of their error, plus sparse outliers.

Kang et al., 2024, "GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative
Inference of LLM". Two percent of each vector, half from either end, are kept apart in float16;
the rest becomes integers, keys per channel and values per token in groups of 64; the error that
remains is approximated per head by a matrix of rank 4.

Deviations: the low-rank factors are an exact truncated decomposition, where the paper iterates;
tokens after the prompt wait dense until 64 are coded together, at rank 4 as well (the paper takes
blocks of 20 at rank 2). Where even 2 bits do not fit, the outliers are left out, which the paper
calls GEAR-L.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sphkv.baselines.coded_layer import PairCodec, PartCodec
from sphkv.baselines.integer_codes import ChannelIntegers, TokenIntegers
from sphkv.baselines.outliers import join_outliers, split_outliers
from sphkv.baselines.quantised import CodedSettings
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

GROUP = 64
SETTINGS = (
    *((8, 8, 0.02), (6, 6, 0.02), (4, 4, 0.02), (4, 3, 0.02), (3, 3, 0.02), (3, 2, 0.02)),
    *((2, 2, 0.02), (2, 2, 0.0)),
)
"""Bits of keys, bits of values and share of outliers, the best first."""


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
    """GEAR with 2% outliers and rank 4."""

    name: ClassVar[str] = "gear"

    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> list[PairCodec]:
        """All widths."""
        return [
            PairCodec(
                CorrectedIntegers(ChannelIntegers(k, GROUP), True, share),
                CorrectedIntegers(TokenIntegers(v, geometry.head_dim, GROUP), False, share),
                block_tokens=GROUP,
            )
            for k, v, share in SETTINGS
        ]
