# SPDX-License-Identifier: Apache-2.0
"""Dense: every token in bfloat16 pages, the method the others are measured against.

No deviations: this is the paged cache of common engines (vLLM: Kwon et al., 2023, "Efficient
Memory Management for Large Language Model Serving with PagedAttention") with blocks of 16.
Its page headers, pointers and positions are charged and come on top of the dense bytes that a
budget of 1 stands for.
"""

from __future__ import annotations

from torch import Tensor

from sphkv.baselines.eviction import EvictionCache, PromptPolicy
from sphkv.core.geometry import KVGeometry


class KeepAll(PromptPolicy):
    """No token scores less than another."""

    name = "dense"

    def prompt_scores(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Zeros."""
        return keys.new_zeros(keys.shape[:2])


class DenseCache(EvictionCache):
    """Keeps every token."""

    def __init__(self, geometry: KVGeometry, budget: float = 1.0) -> None:
        """Start empty.

        Raises:
            ValueError: The budget is below 1.
        """
        super().__init__(geometry, KeepAll(), budget)
        if budget < 1:
            raise ValueError(f"dense needs a budget of at least 1, got {budget:g}")

    def plan(self, num_tokens: int) -> int:
        """All tokens."""
        return num_tokens

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, *, query: Tensor | None = None
    ) -> None:
        """Keep a prompt; the query is not read."""
        if query is None:
            shape = (self.geometry.num_query_heads, *keys.shape[1:])
            query = keys.new_zeros(shape)
        super().prefill(layer, keys, values, query=query)
