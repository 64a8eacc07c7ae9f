# SPDX-License-Identifier: Apache-2.0
"""Prefix reuse: sequences that begin alike share the pages of what they have in common.

Automatic prefix caching as in vLLM (Kwon et al., 2023) and RadixAttention in SGLang (Zheng et al.,
2024, "SGLang: Efficient Execution of Structured Language Model Programs"). Whole pages of 16 tokens
whose bfloat16 states are equal to those of an earlier sequence are pointed to, not stored again.

Deviations: pages are found by comparing states with those of the sequence the new one was derived
from, where engines hash token ids; nothing is evicted from the pool. The first sequence pays for
all of its pages, so by itself it costs what a dense cache costs; a sibling pays for its pointers
and for what it does not share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sphkv.baselines.dense import DenseCache
from sphkv.baselines.held_states import HeldStates, Tagged, join_states
from sphkv.baselines.paged_states import PAGE_TOKENS, PagedStates
from sphkv.core.geometry import KVGeometry


class PrefixReuseCache(DenseCache):
    """A dense cache that may stand on the prompt of another.

    Attributes:
        reused_tokens: Tokens of each layer that were found in the other's prompt.
    """

    def __init__(
        self, geometry: KVGeometry, budget: float = 1.0, *, base: PrefixReuseCache | None = None
    ) -> None:
        """Start empty.

        Args:
            geometry: Sizes of the model.
            budget: Share of dense bytes; at least 1, since a first sequence shares nothing.
            base: Sequence whose prompt pages may be shared; it must hold its prompt already.
        """
        super().__init__(geometry, budget)
        self.name = "prefix_reuse"
        self._base = base
        # whole pages of the prompt, never changed once written: others may point to them
        self._prefix: list[PagedStates | None] = [None] * geometry.num_layers
        self._pointers: list[Tensor] = [torch.empty(0, dtype=torch.int64)] * geometry.num_layers
        self._prefix_tokens = [0] * geometry.num_layers
        self.reused_tokens = [0] * geometry.num_layers

    def sibling(self) -> PrefixReuseCache:
        """An empty sequence that shares what it has in common with this one's prompt."""
        return PrefixReuseCache(self.geometry, self.budget, base=self)

    def _store_prompt(
        self, layer: int, keys: Tensor, values: Tensor, scores: Tensor, num_kept: int
    ) -> None:
        heads, tokens, dim = keys.shape
        positions = torch.arange(tokens, device=keys.device).expand(heads, tokens)
        shared = self._common_tokens(layer, keys, values)
        whole = shared if self._base is not None else tokens // PAGE_TOKENS * PAGE_TOKENS
        if self._base is None:
            prefix = PagedStates(heads, dim, device=keys.device)
            prefix.append(keys[:, :whole], values[:, :whole], positions[:, :whole])
            self._prefix[layer] = prefix
        else:
            self._prefix[layer] = self._base._prefix[layer]
            count = heads * whole // PAGE_TOKENS
            self._pointers[layer] = torch.arange(count, device=keys.device)
        own = PagedStates(heads, dim, device=keys.device)
        own.append(keys[:, whole:], values[:, whole:], positions[:, whole:])
        self._layers[layer] = own
        self._given[layer] = tokens
        self.reused_tokens[layer] = shared if self._base is not None else 0
        self._prefix_tokens[layer] = whole

    def _common_tokens(self, layer: int, keys: Tensor, values: Tensor) -> int:
        """Tokens, in whole pages, that the base's prompt begins with as well."""
        prefix = None if self._base is None else self._base._prefix[layer]
        if prefix is None:
            return 0
        theirs = prefix.read()
        count = min(theirs.keys.shape[1], keys.shape[1])
        same = (theirs.keys[:, :count] == keys[:, :count].bfloat16().float()).all(-1)
        same &= (theirs.values[:, :count] == values[:, :count].bfloat16().float()).all(-1)
        first = int(same.all(0).long().cumprod(0).sum())
        return first // PAGE_TOKENS * PAGE_TOKENS

    def read(self, layer: int) -> HeldStates:
        """Shared pages, then those of its own."""
        own, prefix = self._pages(layer).read(), self._prefix[layer]
        assert prefix is not None
        shared, count = prefix.read(), self._prefix_tokens[layer]
        front = HeldStates(
            shared.keys[:, :count], shared.values[:, :count], shared.positions[:, :count]
        )
        return join_states([front, own])

    def crop(self, num_tokens: int) -> None:
        """Forget the tokens from ``num_tokens`` on; shared pages are only let go of."""
        for layer in range(self.geometry.num_layers):
            count = self._prefix_tokens[layer]
            self._prefix_tokens[layer] = min(count, max(0, num_tokens))
        super().crop(num_tokens)

    def tensors(self) -> list[Tagged]:
        """Every live tensor that no earlier sequence pays for."""
        tagged = super().tensors()
        tagged += [("ptr", pointers) for pointers in self._pointers if pointers.numel()]
        if self._base is None:
            for prefix in self._prefix:
                tagged += prefix.tensors() if prefix is not None else []
        return tagged
