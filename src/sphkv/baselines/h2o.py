# SPDX-License-Identifier: Apache-2.0
"""H2O: the tokens that received most attention so far, and the latest ones.

Zhang et al., 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
Language Models". A token's score is the sum of the attention weights that all queries gave it;
half of the budget goes to the highest scores, half to the latest tokens. Scores go on adding up
while decoding, so they are stored beside the states and charged (four bytes each).

Deviations: with grouped queries a KV head's score sums over its query heads; eviction happens
once per 16 new tokens instead of at every token.
"""

from __future__ import annotations

from torch import Tensor

from sphkv.baselines.attention_scores import SharedAttention, received_attention
from sphkv.baselines.eviction import PROTECTED, EvictionCache, PromptPolicy
from sphkv.core.geometry import KVGeometry


class HeavyHitters(PromptPolicy):
    """Accumulated attention, with the latest half of the budget protected.

    Attributes:
        shared: Attention that earlier caches of the same prompt have found; None finds all anew.
    """

    name = "h2o"
    evicts_in_decode = True
    has_scores = True

    def __init__(self) -> None:
        """Share nothing."""
        self.shared: SharedAttention | None = None

    def least_tokens(self) -> int:
        """A heavy hitter and a recent token."""
        return 2

    def prompt_scores(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention received from all queries of the prompt."""
        if self.shared is None:
            received = received_attention(query, keys)
        else:
            received = self.shared.received(layer, query, keys)
        total: Tensor = received.unflatten(0, (keys.shape[0], -1)).sum(1)
        return total

    def decode_scores(self, positions: Tensor, carried: Tensor | None, num_kept: int) -> Tensor:
        """Attention received so far."""
        assert carried is not None
        recent = positions.max() - num_kept // 2
        return carried.masked_fill(positions > recent, PROTECTED)


def h2o(geometry: KVGeometry, budget: float) -> EvictionCache:
    """H2O with equal halves of heavy hitters and recent tokens."""
    return EvictionCache(geometry, HeavyHitters(), budget)
