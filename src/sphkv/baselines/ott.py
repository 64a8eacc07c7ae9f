# SPDX-License-Identifier: Apache-2.0
"""OTT: KIVI's integers, with the tokens that do not fit their group kept dense.

Su et al., 2025, "Accurate KV Cache Quantization with Outlier Tokens Tracing". In channels where
keys are large, a few tokens have small keys and widen the range of their whole group. Each head
has a pool of three tokens that stay in full precision. Every group of 128 that is coded competes
for it: the smallest sums of absolute key entries win and are left out of their group's range.
Tokens that lose their place again stay dense in a second pool of 32, and once that is full,
nothing is traced any more. The newest 32 tokens are dense.

Deviations: the pools compete over the groups of a prompt; a group that fills while decoding has
pools of its own. Every layer has pools, where the paper does best without them in the first two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from sphkv.baselines.coded_layer import Coded, CodedLayer, PairCodec, StateBlock
from sphkv.baselines.held_states import Tagged
from sphkv.baselines.kivi import WIDTHS, kivi_codec
from sphkv.baselines.outliers import index_dtype, place
from sphkv.baselines.quantised import CodedSettings
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

GROUP = 128


@dataclass(frozen=True)
class TracedIntegers:
    """Groups of integers beside their outlier tokens.

    Attributes:
        integers: Codes the tokens that fit; its blocks are multiples of ``group``.
        group: Tokens of a group.
        num_outliers: Places of a head's pool.
        num_spilled: Places for tokens that left the pool.
        residual_tokens: Newest tokens that stay dense.
        sink_tokens: First tokens that stay dense.
    """

    integers: PairCodec
    group: int = GROUP
    num_outliers: int = 3
    num_spilled: int = 32
    residual_tokens: int = 32
    sink_tokens: int = 0

    block_tokens: ClassVar[int] = GROUP

    @property
    def label(self) -> str:
        """Bits and dense tokens."""
        return f"{self.integers.label}o{self.num_outliers}"

    def encode(self, layer: int, block: StateBlock) -> dict[str, Tensor]:
        """The integers of all groups, and index, key and value of the tokens in both pools."""
        magnitude = block.keys.float().abs().sum(-1).unflatten(1, (-1, self.group))
        taken = trace_outliers(magnitude, self.num_outliers, self.num_spilled)
        filled = StateBlock(
            _fill(block.keys, taken), _fill(block.values, taken), block.first_position
        )
        index = self._places(taken.flatten(1))
        wide = index[..., None].expand(*index.shape, block.keys.shape[-1])
        return {
            **self.integers.encode(layer, filled),
            "prot.index": index.to(index_dtype(block.keys.shape[1])),
            "codes.outlier_keys": block.keys.gather(1, wide).bfloat16(),
            "values.outlier_values": block.values.gather(1, wide).bfloat16(),
        }

    def _places(self, taken: Tensor) -> Tensor:
        """Tokens of both pools ``[heads, places]``; a free place repeats another token."""
        most = taken.shape[1] // self.group * self.num_outliers
        size = min(self.num_outliers + self.num_spilled, most)
        index = taken.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :size]
        is_free = torch.arange(size, device=taken.device) >= taken.sum(1, keepdim=True)
        return torch.where(is_free, index[:, :1], index)

    def decode(self, layer: int, coded: Coded) -> tuple[Tensor, Tensor]:
        """Integers, overwritten by the outlier tokens."""
        own = ("prot.index", "codes.outlier_keys", "values.outlier_values")
        rest = {name: tensor for name, tensor in coded.tensors.items() if name not in own}
        inner = Coded(rest, coded.first_position, coded.num_tokens)
        index, *dense = (coded.tensors[name] for name in own)
        wide = place(index)[..., None].expand_as(dense[0])
        keys, values = self.integers.decode(layer, inner)
        return keys.scatter(1, wide, dense[0].float()), values.scatter(1, wide, dense[1].float())

    def layer(self, layer: int, keys: Tensor, values: Tensor) -> CodedLayer:
        """An empty layer."""
        return CodedLayer(self, layer, keys, values)

    def tables(self) -> list[Tagged]:
        """None."""
        return []


def trace_outliers(magnitude: Tensor, num_places: int, num_spilled: int) -> Tensor:
    """Tokens that are in the pool after some group, ``[heads, groups, tokens]`` bool.

    Args:
        magnitude: ``[heads, groups, tokens]`` of the keys, in the order the groups are coded.
        num_places: Places of the pool.
        num_spilled: Tokens of a head that may leave the pool before tracing stops.
    """
    heads, groups = magnitude.shape[:2]
    taken = torch.zeros(magnitude.shape, dtype=torch.bool, device=magnitude.device)
    pool = magnitude.new_full((heads, num_places), torch.inf)
    left = torch.zeros(heads, dtype=torch.int64, device=magnitude.device)
    is_tracing = torch.ones_like(left, dtype=torch.bool)
    for number in range(groups):
        rivals = torch.cat([pool, magnitude[:, number]], 1)
        smallest, winners = rivals.topk(num_places, dim=1, largest=False)
        stays = torch.zeros_like(rivals, dtype=torch.bool).scatter_(1, winners, True)
        leaving = (~stays[:, :num_places] & pool.isfinite()).sum(1)
        is_tracing &= left + leaving <= num_spilled
        taken[:, number] = stays[:, num_places:] & is_tracing[:, None]
        pool = torch.where(is_tracing[:, None], smallest, pool)
        left += leaving * is_tracing
    return taken


def _fill(states: Tensor, taken: Tensor) -> Tensor:
    """Replace taken tokens ``[heads, groups, tokens]`` by the mean of the others of their group."""
    grouped = states.float().unflatten(1, taken.shape[1:])
    kept = grouped.masked_fill(taken[..., None], 0.0)
    mean = kept.sum(2, keepdim=True) / (~taken).sum(2)[..., None, None]
    return torch.where(taken[..., None], mean, grouped).flatten(1, 2)


@dataclass(frozen=True)
class Ott(CodedSettings):
    """OTT with groups of 128 and a residual of 32.

    Attributes:
        num_outliers: Places of a head's pool.
    """

    num_outliers: int = 3

    name: ClassVar[str] = "ott"

    def trials(self) -> tuple[Self, ...]:
        """Two pools, three residuals."""
        return tuple(
            type(self)(num_outliers=count, residual_tokens=residual)
            for count in (3, 6)
            for residual in (32, 0, 64)
        )

    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> list[TracedIntegers]:
        """All widths."""
        return [
            TracedIntegers(kivi_codec(geometry, k, v, group=GROUP), num_outliers=self.num_outliers)
            for k, v in WIDTHS
        ]
