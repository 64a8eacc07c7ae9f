# SPDX-License-Identifier: Apache-2.0
"""SnapKV: the prompt's last queries vote for the tokens to keep.

Li et al., 2024, "SnapKV: LLM Knows What You are Looking for Before Generation". The weights that
the last 32 queries give are summed, pooled over neighbours (max, kernel 7, as in the paper's
LongBench runs), and the highest are kept beside the 32 tokens themselves.

Deviations: with grouped queries the vote of a KV head is the mean over its query heads, so that
keys are stored once and not per query head. The paper keeps all tokens after the prompt, whatever
they cost; here the budget holds, by one of the rules of ``sphkv.baselines.eviction``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sphkv.baselines.attention_scores import mean_over_group, window_attention
from sphkv.baselines.eviction import (
    DECODE_TRIALS,
    PROTECTED,
    EvictionCache,
    LayerPrompt,
    PromptPolicy,
)
from sphkv.baselines.settings import MethodShape


@dataclass(frozen=True)
class WindowVotes(PromptPolicy):
    """Pooled attention of an observation window.

    Attributes:
        window: Queries that vote; their own tokens are protected.
        kernel: Width of the pooling over neighbouring tokens; odd.
    """

    window: int = 32
    kernel: int = 7

    def __post_init__(self) -> None:
        """Reject kernels without a middle."""
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, got {self.kernel}")

    @property
    def name(self) -> str:
        """Label in reports."""
        return "snapkv"

    @classmethod
    def trials(cls) -> tuple[Self, ...]:
        """Two kernels; new tokens in half or a quarter of the room, or under votes."""
        return tuple(
            cls(kernel=kernel, decode=decode, new_share=share)
            for kernel in (7, 17)
            for decode, share in DECODE_TRIALS
        )

    def build(self, shape: MethodShape) -> EvictionCache:
        """An empty cache."""
        return EvictionCache(shape, self)

    def least_tokens(self) -> int:
        """The window and one token."""
        return self.window + 1

    def prompt_scores(self, prompt: LayerPrompt) -> Tensor:
        """Votes of the window, pooled."""
        votes = window_attention(prompt.query, prompt.keys, self.window).sum(1)
        votes = mean_over_group(votes, prompt.keys.shape[0])
        past = max(0, prompt.keys.shape[1] - self.window)
        scores = torch.full_like(votes, PROTECTED)
        if past:
            scores[:, :past] = max_pool(votes[:, :past], self.kernel)
        return scores


def max_pool(scores: Tensor, kernel: int) -> Tensor:
    """Maximum over ``kernel`` neighbours of each entry of ``[rows, tokens]``."""
    return torch.nn.functional.max_pool1d(scores[None], kernel, stride=1, padding=kernel // 2)[0]
