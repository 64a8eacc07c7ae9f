# SPDX-License-Identifier: Apache-2.0
"""KVzip: tokens that would be needed to write the prompt once more.

Kim et al., 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction". The
model is made to repeat its prompt; a token's score is the largest weight that any query of the
repetition gives it, over the query heads of its KV head. Heads compete for the room of a layer.

Deviations: the repetition is not run. The prompt's own queries stand for it, turned on as if they
came after the prompt, so that they see all of it at the distances they would have; what deeper
layers would know of the repetition is missing. One query in four is asked. Heads compete inside a
layer and not over all layers, in whole pages. The newest 16 tokens are protected. Tokens after the
prompt as for SnapKV here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sphkv.baselines.adakv import adaptive_units
from sphkv.baselines.eviction import (
    DECODE_TRIALS,
    PROTECTED,
    EvictionCache,
    LayerPrompt,
    PromptPolicy,
)
from sphkv.baselines.layer_pages import PAGE_TOKENS
from sphkv.baselines.settings import MethodShape

_QUERY_BLOCK = 128


@dataclass(frozen=True)
class ReconstructionVotes(PromptPolicy):
    """Largest weights under queries that follow the prompt.

    Attributes:
        stride: One query in so many is asked.
        recent: Newest tokens that stay.
        safeguard: Share of a layer's room that heads share equally.
    """

    stride: int = 4
    recent: int = PAGE_TOKENS
    safeguard: float = 0.0

    @property
    def name(self) -> str:
        """Label in reports."""
        return "kvzip"

    @classmethod
    def trials(cls) -> tuple[Self, ...]:
        """Two safeguards; new tokens in half or a quarter of the room, or under votes."""
        return tuple(
            cls(safeguard=safeguard, decode=decode, new_share=share)
            for safeguard in (0.0, 0.2)
            for decode, share in DECODE_TRIALS
        )

    def build(self, shape: MethodShape) -> EvictionCache:
        """An empty cache."""
        return EvictionCache(shape, self)

    def least_tokens(self) -> int:
        """The newest and one token."""
        return self.recent + 1

    def head_pages(self, scores: Tensor, total: int) -> list[int]:
        """By joint scores."""
        return adaptive_units(scores, total, unit=PAGE_TOKENS, safeguard=self.safeguard)

    def prompt_scores(self, prompt: LayerPrompt) -> Tensor:
        """Largest weights over the queries of a repetition."""
        heads, tokens, dim = prompt.keys.shape
        rows = torch.arange(0, tokens, self.stride, device=prompt.keys.device)
        planes = prompt.rope.to_planes(prompt.query.index_select(1, rows).float())
        # turned on by the length of the prompt, token t stands where its repetition would
        after = torch.full_like(rows, tokens)
        query = prompt.rope.from_planes(prompt.rope.rotate(planes, after)) * dim**-0.5
        keys = prompt.keys.float().transpose(1, 2)
        best = torch.zeros(heads, tokens, device=keys.device)
        for part in query.split(_QUERY_BLOCK, 1):
            logits = part.reshape(heads, -1, dim) @ keys
            best = torch.maximum(best, torch.softmax(logits, -1).amax(1))
        best[:, max(0, tokens - self.recent) :] = PROTECTED
        return best
