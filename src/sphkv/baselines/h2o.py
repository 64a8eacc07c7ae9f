# SPDX-License-Identifier: Apache-2.0
"""H2O: the tokens that received most attention so far, and the latest ones.

Zhang et al., 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
Language Models". A token's score is the sum of the attention weights that all queries gave it;
half of the budget goes to the highest scores, half to the latest tokens. Scores go on adding up
while decoding, so they are stored beside the states and charged (four bytes each).

Deviations: with grouped queries a KV head's score sums over its query heads; eviction happens
once per 16 new tokens instead of at every token. Decode kernels return no weights, so each step
computes them a second time in torch, which its time includes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sphkv.baselines.attention_scores import received_attention
from sphkv.baselines.eviction import PROTECTED, EvictionCache, LayerPrompt, PromptPolicy, Weights
from sphkv.baselines.settings import MethodShape


@dataclass(frozen=True)
class HeavyHitters(PromptPolicy):
    """Accumulated attention, with the latest tokens protected.

    Attributes:
        recent_share: Share of the kept tokens that are the latest.
    """

    recent_share: float = 0.5

    @property
    def name(self) -> str:
        """Label in reports."""
        return "h2o"

    @property
    def weights(self) -> Weights:
        """Of every step."""
        return "always"

    @property
    def carries_scores(self) -> bool:
        """The sums."""
        return True

    @classmethod
    def trials(cls) -> tuple[HeavyHitters, ...]:
        """Shares of recent tokens."""
        return tuple(cls(recent_share=share) for share in (0.5, 0.1, 0.25, 0.4, 0.65, 0.8))

    def build(self, shape: MethodShape) -> EvictionCache:
        """An empty cache."""
        return EvictionCache(shape, self)

    def least_tokens(self) -> int:
        """A heavy hitter and a recent token."""
        return 2

    def reserved_pages(self, room: int, num_new: int) -> int:
        """None: whatever scores low goes."""
        return 0

    def prompt_scores(self, prompt: LayerPrompt) -> Tensor:
        """Attention received from all queries of the prompt."""
        if prompt.shared is None:
            received = received_attention(prompt.query, prompt.keys)
        else:
            received = prompt.shared.received(prompt.layer, prompt.query, prompt.keys)
        total: Tensor = received.unflatten(0, (prompt.keys.shape[0], -1)).sum(1)
        return total

    def decode_scores(
        self, positions: Tensor, weights: Tensor | None, num_kept: int, prompt: int
    ) -> Tensor:
        """Attention received so far."""
        assert weights is not None
        recent = positions.max() - max(1, int(num_kept * self.recent_share))
        return weights.masked_fill(positions > recent, PROTECTED)
