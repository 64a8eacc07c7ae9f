# SPDX-License-Identifier: Apache-2.0
"""SnapKV: the prompt's last queries vote for the tokens to keep.

Li et al., 2024, "SnapKV: LLM Knows What You are Looking for Before Generation". The weights that
the last 32 queries give are summed, pooled over neighbours (max, kernel 7, as in the paper's
LongBench runs), and the highest are kept beside the 32 tokens themselves. Tokens that come after
the prompt are all kept.

Deviations: with grouped queries the vote of a KV head is the mean over its query heads, so that
keys are stored once and not per query head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.baselines.attention_scores import mean_over_group, window_attention
from sphkv.baselines.eviction import PROTECTED, EvictionCache, PromptPolicy
from sphkv.core.geometry import KVGeometry


@dataclass(frozen=True)
class WindowVotes(PromptPolicy):
    """Pooled attention of an observation window.

    Attributes:
        window: Queries that vote; their own tokens are protected.
        kernel: Width of the pooling over neighbouring tokens; odd.
    """

    window: int = 32
    kernel: int = 7

    name = "snapkv"

    def least_tokens(self) -> int:
        """The window and one token."""
        return self.window + 1

    def prompt_scores(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Votes of the window, pooled."""
        votes = window_attention(query, keys, self.window).sum(1)
        votes = mean_over_group(votes, keys.shape[0])
        past = max(0, keys.shape[1] - self.window)
        scores = torch.full_like(votes, PROTECTED)
        if past:
            scores[:, :past] = max_pool(votes[:, :past], self.kernel)
        return scores


def max_pool(scores: Tensor, kernel: int) -> Tensor:
    """Maximum over ``kernel`` neighbours of each entry of ``[rows, tokens]``."""
    return torch.nn.functional.max_pool1d(scores[None], kernel, stride=1, padding=kernel // 2)[0]


def snapkv(geometry: KVGeometry, budget: float) -> EvictionCache:
    """SnapKV with a window of 32 and a kernel of 7."""
    return EvictionCache(geometry, WindowVotes(), budget)
