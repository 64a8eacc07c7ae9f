# SPDX-License-Identifier: Apache-2.0
"""CPU offload: every token is kept, most pages in host memory, fetched for each step.

The plain form of what FlexGen (Sheng et al., 2023, "FlexGen: High-Throughput Generative Inference
of Large Language Models with a Single GPU") does to the cache. The newest pages stay on the device,
as many as the budget allows; each step streams all older pages of a layer through the device, so
attention is exact and the price is the bytes moved. A step reads every page once, and for such a
scan least-recently-used replacement would never hit; keeping a fixed set resident is the best any
rule can do.

Deviations: both memories are the same here, so only the bytes are accounted, not their transfer
time. The layer being streamed counts in ``peak_bytes``, not in ``resident_bytes``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sphkv.attention.partial import PartialAttention, merge_partials
from sphkv.attention.request import AttentionOptions
from sphkv.baselines.eviction import EvictionCache, LayerPrompt, PromptPolicy, Weights
from sphkv.baselines.held_states import HeldStates, join_states
from sphkv.baselines.layer_pages import LayerPages
from sphkv.baselines.settings import MethodShape


@dataclass(frozen=True)
class NewestPages(PromptPolicy):
    """The newest tokens stay on the device."""

    @property
    def name(self) -> str:
        """Label in reports."""
        return "offload"

    @property
    def weights(self) -> Weights:
        """Positions are enough."""
        return "never"

    @classmethod
    def trials(cls) -> tuple[Self, ...]:
        """There is nothing to choose."""
        return (cls(),)

    def build(self, shape: MethodShape) -> OffloadCache:
        """An empty cache."""
        return OffloadCache(shape, self)

    def reserved_pages(self, room: int, num_new: int) -> int:
        """None: older pages go to the host."""
        return 0

    def prompt_scores(self, prompt: LayerPrompt) -> Tensor:
        """Positions."""
        positions = torch.arange(prompt.keys.shape[1], device=prompt.keys.device)
        return positions.float().expand(prompt.keys.shape[:2])

    def decode_scores(
        self, positions: Tensor, weights: Tensor | None, num_kept: int, prompt: int
    ) -> Tensor:
        """Positions."""
        return positions.float()


class OffloadCache(EvictionCache):
    """Device pages within the budget, host pages without one.

    Attributes:
        moved_bytes: Bytes moved so far between host and device, either way.
    """

    residency = "offloaded"

    def __init__(self, shape: MethodShape, policy: NewestPages) -> None:
        """Start empty."""
        super().__init__(shape, policy)
        self._host: list[LayerPages | None] = [None] * self.geometry.num_layers
        self.moved_bytes = 0

    def tier_shares(self) -> dict[str, float]:
        """All dense, here or there."""
        return {"max": 1.0}

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, *, query: Tensor | None = None
    ) -> None:
        """Keep the newest pages on the device and move the others to the host."""
        if query is None:
            query = keys.new_zeros(self.geometry.num_query_heads, *keys.shape[1:])
        super().prefill(layer, keys, values, query=query)

    def _store(
        self, layer: int, pages: LayerPages, keys: Tensor, values: Tensor, is_kept: Tensor
    ) -> None:
        # by age, so every head keeps the same tokens
        num_old = int((~is_kept[0]).sum())
        self._host[layer] = self._new_layer(torch.device("cpu"))
        self._to_host(layer, keys[:, :num_old], values[:, :num_old])
        super()._store(layer, pages, keys, values, is_kept)
        # nothing is lost: any token can be cropped
        self._evicted_at[layer] = 0

    def _to_host(self, layer: int, keys: Tensor, values: Tensor) -> None:
        host = self._host_pages(layer)
        before = host.nbytes
        if keys.shape[1]:
            host.append(keys.cpu(), values.cpu())
        self.moved_bytes += host.nbytes - before

    def _evict(self, layer: int, query: Tensor, options: AttentionOptions, num_tokens: int) -> None:
        pages = self._pages(layer)
        held = pages.read()
        count = int(self._decode_counts(layer, held, held.positions.float(), num_tokens)[0])
        old = max(0, held.keys.shape[1] - count)
        self._to_host(layer, held.keys[:, :old], held.values[:, :old])
        is_kept = torch.arange(held.keys.shape[1], device=held.keys.device) >= old
        pages.keep(held, is_kept.expand(held.positions.shape))

    def read(self, layer: int) -> HeldStates:
        """Host pages, then device pages."""
        host, device = self._host_pages(layer).read(), self._pages(layer).read()
        where = device.keys.device
        moved = HeldStates(host.keys.to(where), host.values.to(where), host.positions.to(where))
        return join_states([moved, device])

    def _attend_part(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        options: AttentionOptions,
        sink_logits: Tensor | None,
    ) -> Tensor:
        pages, host = self._pages(layer), self._host_pages(layer)
        begin, tokens = pages.num_tokens, keys.shape[1]
        # each token is a step of its own and streams the host pages once
        self.moved_bytes += host.nbytes * tokens
        pages.append(keys, values)
        positions = torch.arange(begin, begin + tokens, device=keys.device)
        parts = [pages.attend_partly(query, positions, options)]
        if host.num_tokens:
            old = host.attend_partly(query.cpu(), positions.cpu(), options)
            parts.append(PartialAttention(old.output.to(keys.device), old.lse.to(keys.device)))
        merged = merge_partials(parts)
        if sink_logits is not None:
            merged = merge_partials([merged, PartialAttention.of_sinks(sink_logits, merged)])
        return merged.output

    def crop(self, num_tokens: int) -> None:
        """Forget the tokens from ``num_tokens`` on, wherever they are."""
        for layer, host in enumerate(self._host):
            if host is not None and num_tokens < self.num_tokens(layer):
                if num_tokens < host.num_tokens:
                    host.crop(num_tokens)
                self._pages(layer).crop(num_tokens)

    def _host_pages(self, layer: int) -> LayerPages:
        host = self._host[layer]
        if host is None:
            raise ValueError(f"layer {layer} has no prompt yet")
        return host

    def host_bytes(self) -> int:
        """Bytes in host memory, which the ledger leaves out."""
        return sum(host.nbytes for host in self._host if host is not None)

    def peak_bytes(self) -> int:
        """Resident bytes and the largest layer that a step brings in."""
        layers = [host.nbytes for host in self._host if host is not None]
        return self.resident_bytes() + max(layers, default=0)
