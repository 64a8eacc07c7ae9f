# SPDX-License-Identifier: Apache-2.0
"""Dense: every token in bfloat16 pages, the method the others are measured against.

No deviations: this is the paged cache of common engines (vLLM: Kwon et al., 2023, "Efficient
Memory Management for Large Language Model Serving with PagedAttention") with blocks of 16.
Its page headers, pointers and tail are charged and come on top of the dense bytes that a
budget of 1 stands for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.baselines.eviction import EvictionCache, LayerPrompt, PromptPolicy
from sphkv.baselines.layer_pages import PAGE_TOKENS
from sphkv.baselines.settings import MethodShape


@dataclass(frozen=True)
class KeepAll(PromptPolicy):
    """No token scores less than another."""

    @property
    def name(self) -> str:
        """Label in reports."""
        return "dense"

    @classmethod
    def trials(cls) -> tuple[Self, ...]:
        """There is nothing to choose."""
        return (cls(),)

    def build(self, shape: MethodShape) -> DenseCache:
        """An empty cache."""
        return DenseCache(shape, self)

    def prompt_scores(self, prompt: LayerPrompt) -> Tensor:
        """Zeros."""
        return prompt.keys.new_zeros(prompt.keys.shape[:2])


class DenseCache(EvictionCache):
    """Keeps every token."""

    residency = "dense"

    def __init__(self, shape: MethodShape, policy: KeepAll) -> None:
        """Start empty.

        Raises:
            ValueError: The budget is below 1.
        """
        super().__init__(shape, policy)
        if shape.budget < 1:
            raise ValueError(f"{self.name} needs a budget of at least 1, got {shape.budget:g}")

    def tier_shares(self) -> dict[str, float]:
        """All dense."""
        return {"max": 1.0}

    def plan(self, num_tokens: int) -> int:
        """All tokens."""
        return num_tokens

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, *, query: Tensor | None = None
    ) -> None:
        """Keep a prompt; the query is not read."""
        if query is None:
            query = keys.new_zeros(self.geometry.num_query_heads, *keys.shape[1:])
        super().prefill(layer, keys, values, query=query)

    def _head_pages(self, layer: int, scores: Tensor, num_tokens: int, reserved: int) -> list[int]:
        return [-(-num_tokens // PAGE_TOKENS)] * self.geometry.num_kv_heads

    def _make_room(self, layer: int, query: Tensor, wanted: int, options: AttentionOptions) -> int:
        return wanted
