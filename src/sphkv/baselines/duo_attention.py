# SPDX-License-Identifier: Apache-2.0
"""DuoAttention: a few heads keep every token, the others sinks and a window.

Xiao et al., 2024, "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming
Heads". Retrieval heads have a full cache; streaming heads have the first tokens and the latest.

Deviations: the paper finds retrieval heads by optimising a gate per head on synthetic passkeys;
here a head's gate is what the last queries of the prompt give to tokens outside sinks and window,
their reuse of the middle. Retrieval heads are as many as a share of the budget pays for (half by
default), over all layers, found while the layers come in: a head that a later one outdoes is cut
down to sinks and window. The window moves by 16 tokens, and streaming heads grow into what is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.baselines.attention_scores import mean_over_group, window_attention
from sphkv.baselines.eviction import PROTECTED, EvictionCache, LayerPrompt, PromptPolicy, highest
from sphkv.baselines.held_states import HeldStates
from sphkv.baselines.layer_pages import PAGE_TOKENS
from sphkv.baselines.settings import MethodShape


@dataclass(frozen=True)
class HeadKinds(PromptPolicy):
    """Which heads keep everything.

    Attributes:
        full_share: Share of the budget for heads that keep everything.
        num_sinks: First tokens that streaming heads keep.
        window: Queries that say what a head reuses, and latest tokens that do not count.
    """

    full_share: float = 0.5
    num_sinks: int = 4
    window: int = 64

    @property
    def name(self) -> str:
        """Label in reports."""
        return "duo_attention"

    @classmethod
    def trials(cls) -> tuple[Self, ...]:
        """Three shares, two numbers of sinks."""
        return tuple(
            cls(full_share=share, num_sinks=sinks)
            for sinks in (4, 16)
            for share in (0.5, 0.25, 0.75)
        )

    def build(self, shape: MethodShape) -> DuoCache:
        """An empty cache."""
        return DuoCache(shape, self)

    def least_tokens(self) -> int:
        """The sinks and a page of the latest."""
        return self.num_sinks + PAGE_TOKENS

    def reserved_pages(self, room: int, num_new: int) -> int:
        """None: windows move and full heads grow with the budget."""
        return 0

    def reuse(self, query: Tensor, keys: Tensor) -> Tensor:
        """Weight ``[kv_heads]`` that a prompt's last queries give to its middle."""
        weights = window_attention(query, keys, self.window)
        middle = weights[..., self.num_sinks : max(self.num_sinks, keys.shape[1] - self.window)]
        return mean_over_group(middle.sum(-1).mean(1), keys.shape[0])

    def prompt_scores(self, prompt: LayerPrompt) -> Tensor:
        """Positions, sinks first of all."""
        positions = torch.arange(prompt.keys.shape[1], device=prompt.keys.device)
        return self.decode_scores(positions.expand(prompt.keys.shape[:2]), None, 0, 0)

    def decode_scores(
        self, positions: Tensor, weights: Tensor | None, num_kept: int, prompt: int
    ) -> Tensor:
        """The same."""
        is_sink = (positions >= 0) & (positions < self.num_sinks)
        return positions.float().masked_fill(is_sink, PROTECTED)


class DuoCache(EvictionCache):
    """Cuts down heads that later layers outdo."""

    def __init__(self, shape: MethodShape, policy: HeadKinds) -> None:
        """Start empty."""
        super().__init__(shape, policy)
        self._duo = policy
        self._reuse: dict[tuple[int, int], float] = {}
        self._full: set[tuple[int, int]] = set()
        self._num_full = 0

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, *, query: Tensor | None = None
    ) -> None:
        """Store a layer; heads of earlier layers that it outdoes lose their middle."""
        if self._layers[layer] is None and query is not None and query.dim() == keys.dim() == 3:
            self._num_full = self._count_full(keys.shape[1])
            if query.shape[-1] == keys.shape[-1]:
                for head, value in enumerate(self._duo.reuse(query, keys).tolist()):
                    self._reuse[layer, head] = value
        before = self._full
        best = sorted(self._reuse, key=lambda place: self._reuse[place], reverse=True)
        self._full = set(best[: self._num_full])
        super().prefill(layer, keys, values, query=query)
        for outdone in sorted({place[0] for place in before - self._full}):
            pages = self._pages(outdone)
            held = pages.read()
            self._cut(outdone, held, self._head_pages(outdone, held.keys, self._prompt, 0))

    def _count_full(self, num_tokens: int) -> int:
        """Heads that may keep everything, now and after the tokens to come."""
        heads = self.geometry.num_kv_heads
        least = -(-self._duo.least_tokens() // PAGE_TOKENS) + 1
        counts = []
        for tokens in (num_tokens, num_tokens + self.shape.num_new):
            limit = self.shape.limit_bytes(tokens)
            base = self._probe.bytes_for([least] * heads) * self.geometry.num_layers
            room = min(limit - base, self._duo.full_share * limit)
            counts.append(int(max(0, room) // self._full_bytes(tokens, least)))
        return min(*counts, heads * self.geometry.num_layers)

    def _full_bytes(self, num_tokens: int, streaming: int) -> int:
        """Bytes by which a head grows if it keeps everything."""
        heads = self.geometry.num_kv_heads
        uneven = [-(-num_tokens // PAGE_TOKENS), *[streaming] * (heads - 1)]
        grown = self._probe.bytes_for(uneven) - self._probe.bytes_for([streaming] * heads)
        return max(1, grown)

    def _streaming_pages(self, num_tokens: int) -> int:
        """Pages of every streaming head at so many tokens."""
        heads, layers = self.geometry.num_kv_heads, self.geometry.num_layers
        limit = self.shape.limit_bytes(num_tokens)
        pages = self._average_pages(num_tokens)
        while pages > 1:
            full = self._num_full * self._full_bytes(num_tokens, pages)
            if self._probe.bytes_for([pages] * heads) * layers + full <= limit:
                break
            pages -= 1
        return pages

    def _head_pages(self, layer: int, scores: Tensor, num_tokens: int, reserved: int) -> list[int]:
        streaming = max(1, self._streaming_pages(num_tokens) - reserved)
        # a page more, for tokens that come while the streaming heads are packed anew
        every = -(-num_tokens // PAGE_TOKENS) + 1
        heads = range(self.geometry.num_kv_heads)
        return [every if (layer, head) in self._full else streaming for head in heads]

    def _fits(self, layer: int, pages: list[int], num_tokens: int) -> bool:
        streaming = self._streaming_pages(num_tokens)
        return all(
            count <= streaming or (layer, head) in self._full for head, count in enumerate(pages)
        )

    def _evict(self, layer: int, query: Tensor, options: AttentionOptions, num_tokens: int) -> None:
        held = self._pages(layer).read()
        self._cut(layer, held, self._head_pages(layer, held.keys, num_tokens, 1))

    def _cut(self, layer: int, held: HeldStates, head_pages: list[int]) -> None:
        pages = self._pages(layer)
        counts = torch.tensor(head_pages) * PAGE_TOKENS
        keep = highest(self._rank(held.positions, None, 0), counts)
        self._evicted_at[layer] = pages.num_tokens
        pages.keep(held, keep)
