# SPDX-License-Identifier: Apache-2.0
"""OTT: KIVI's integers, with the tokens that do not fit their group kept dense.

Su et al., 2025, "Accurate KV Cache Quantization with Outlier Tokens Tracing". In channels where
keys are large, a few tokens have small keys and widen the range of their whole group; they are
found by the smallest sum of absolute key entries, three per group of 128 tokens, kept in full
precision and left out of the integers' range.

Deviations: every group keeps its own three tokens, where the paper lets all groups compete for one
pool of fixed size; keys and values leave the residual of 128 tokens together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.baselines.coded_layer import Coded, PairCodec, StateBlock
from sphkv.baselines.held_states import Tagged
from sphkv.baselines.kivi import WIDTHS, kivi_codec
from sphkv.baselines.quantised import QuantisedCache
from sphkv.core.geometry import KVGeometry

GROUP = 128


@dataclass(frozen=True)
class TracedIntegers:
    """Groups of integers beside their outlier tokens.

    Attributes:
        integers: Codes the tokens that fit; its blocks are multiples of ``group``.
        group: Tokens of a group.
        num_outliers: Tokens of each group that stay dense.
    """

    integers: PairCodec
    group: int = GROUP
    num_outliers: int = 3

    block_tokens = GROUP
    residual_tokens = 0
    sink_tokens = 0

    @property
    def label(self) -> str:
        """Bits and dense tokens."""
        return f"{self.integers.label}o{self.num_outliers}"

    def encode(self, layer: int, block: StateBlock) -> dict[str, Tensor]:
        """The integers of the group, and index, key and value of its outlier tokens."""
        keys = block.keys.unflatten(1, (-1, self.group)).float()
        values = block.values.unflatten(1, (-1, self.group)).float()
        index = keys.abs().sum(-1).topk(self.num_outliers, dim=-1, largest=False).indices
        wide = index[..., None].expand(*index.shape, keys.shape[-1])
        taken = torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device)
        taken.scatter_(2, index, True)
        filled = StateBlock(
            _fill(keys, taken).flatten(1, 2),
            _fill(values, taken).flatten(1, 2),
            block.first_position,
        )
        return {
            **self.integers.encode(layer, filled),
            "prot.index": index.to(torch.uint8),
            "codes.outlier_keys": keys.gather(2, wide).bfloat16(),
            "values.outlier_values": values.gather(2, wide).bfloat16(),
        }

    def decode(self, layer: int, coded: Coded) -> tuple[Tensor, Tensor]:
        """Integers, overwritten by the outlier tokens."""
        own = ("prot.index", "codes.outlier_keys", "values.outlier_values")
        rest = {name: tensor for name, tensor in coded.tensors.items() if name not in own}
        inner = Coded(rest, coded.first_position, coded.num_tokens)
        index, *dense = (coded.tensors[name] for name in own)
        restored = []
        for states, outliers in zip(self.integers.decode(layer, inner), dense, strict=True):
            grouped = states.unflatten(1, (-1, self.group))
            wide = index.long()[..., None].expand_as(outliers)
            restored.append(grouped.scatter(2, wide, outliers.float()).flatten(1, 2))
        return restored[0], restored[1]

    def tables(self) -> list[Tagged]:
        """None."""
        return []


def _fill(states: Tensor, taken: Tensor) -> Tensor:
    """Replace taken tokens ``[heads, groups, tokens]`` by the mean of the others."""
    kept = states.masked_fill(taken[..., None], 0.0)
    mean = kept.sum(2, keepdim=True) / (~taken).sum(2)[..., None, None]
    return torch.where(taken[..., None], mean, states)


def ott(geometry: KVGeometry, budget: float) -> QuantisedCache:
    """OTT with three outlier tokens per group of 128."""
    codecs = [TracedIntegers(kivi_codec(geometry, k, v, group=GROUP)) for k, v in WIDTHS]
    return QuantisedCache("ott", geometry, codecs, budget)
