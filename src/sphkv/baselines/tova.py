# SPDX-License-Identifier: Apache-2.0
"""TOVA: what the newest query looks at least goes.

Oren et al., 2024, "Transformers are Multi-State RNNs". When the cache is full, the token with the
smallest attention weight under the newest query is dropped; nothing is protected by its age.

Deviations: each KV head decides by the mean over its query heads, where the paper averages over
all heads of a layer; 16 tokens go at a time, once per 16 new ones; the newest tokens, 16 by
default, are protected, since a token that came since the last eviction was never weighed. Decode
kernels return no weights, so the step that evicts computes them a second time in torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sphkv.baselines.attention_scores import mean_over_group, window_attention
from sphkv.baselines.eviction import PROTECTED, EvictionCache, LayerPrompt, PromptPolicy, Weights
from sphkv.baselines.settings import MethodShape


@dataclass(frozen=True)
class LastQuery(PromptPolicy):
    """Weights of the newest query.

    Attributes:
        recent: Newest tokens that stay.
    """

    recent: int = 16

    @property
    def name(self) -> str:
        """Label in reports."""
        return "tova"

    @property
    def weights(self) -> Weights:
        """Of the step that evicts."""
        return "evicting"

    @classmethod
    def trials(cls) -> tuple[LastQuery, ...]:
        """Numbers of protected tokens."""
        return tuple(cls(recent=count) for count in (16, 1, 4, 8, 24, 32))

    def build(self, shape: MethodShape) -> EvictionCache:
        """An empty cache."""
        return EvictionCache(shape, self)

    def least_tokens(self) -> int:
        """The protected tokens and one more."""
        return self.recent + 1

    def reserved_pages(self, room: int, num_new: int) -> int:
        """None: whatever weighs least goes."""
        return 0

    def prompt_scores(self, prompt: LayerPrompt) -> Tensor:
        """Weights of the prompt's last query."""
        weights = window_attention(prompt.query, prompt.keys, 1)[:, 0]
        scores = mean_over_group(weights, prompt.keys.shape[0])
        scores[:, max(0, scores.shape[1] - self.recent) :] = PROTECTED
        return scores

    def decode_scores(
        self, positions: Tensor, weights: Tensor | None, num_kept: int, prompt: int
    ) -> Tensor:
        """Weights of the newest query."""
        assert weights is not None
        return weights.masked_fill(positions > positions.max() - self.recent, PROTECTED)
