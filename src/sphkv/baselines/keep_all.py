# SPDX-License-Identifier: Apache-2.0
"""Methods that keep every token in pages: dense, sharing prefixes, or most pages on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sphkv.attention.partial import PartialAttention, merge_partials
from sphkv.attention.request import AttentionOptions
from sphkv.baselines.eviction import EvictionCache, LayerPrompt, PromptPolicy, Weights
from sphkv.baselines.held_states import HeldStates, join_states
from sphkv.baselines.layer_pages import PAGE_TOKENS, LayerPages
from sphkv.baselines.settings import MethodShape
from sphkv.store.ledger import ByteLedger


@dataclass(frozen=True)
class KeepAll(PromptPolicy):
    """No token scores less than another.

    Dense: every token in bfloat16 pages, the method the others are measured against.

    No deviations: this is the paged cache of common engines (vLLM: Kwon et al., 2023, "Efficient
    Memory Management for Large Language Model Serving with PagedAttention") with blocks of 16. Its
    page headers, pointers and tail are charged and come on top of the dense bytes that a budget of
    1 stands for.
    """

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


@dataclass(frozen=True)
class SharedPrefix(KeepAll):
    """Keeps everything, and what two sequences have in common once.

    Prefix reuse: sequences that begin alike share the pages of what they have in common.

    Automatic prefix caching as in vLLM (Kwon et al., 2023) and RadixAttention in SGLang (Zheng et
    al., 2024, "SGLang: Efficient Execution of Structured Language Model Programs"). A sequence is a
    fork of an earlier one in the same page store, cut to the whole pages of 16 tokens whose
    bfloat16 states are equal.

    Deviations: pages are found by comparing states with those of the sequence the new one was
    derived from, where engines hash token ids; nothing is evicted from the pool. The first sequence
    pays for all of its pages, so by itself it costs what a dense cache costs; a sibling pays for
    its pointers, its tail and the pages that it does not share.
    """

    @property
    def name(self) -> str:
        """Label in reports."""
        return "prefix_reuse"

    def build(self, shape: MethodShape) -> PrefixReuseCache:
        """An empty cache."""
        return PrefixReuseCache(shape, self)


class PrefixReuseCache(DenseCache):
    """A dense cache that may stand on the prompt of another.

    Attributes:
        reused_tokens: Tokens of each layer that were found in the other's prompt.
    """

    def __init__(
        self, shape: MethodShape, policy: SharedPrefix, *, base: PrefixReuseCache | None = None
    ) -> None:
        """Start empty.

        Args:
            shape: Model and budget, which is at least 1: a first sequence shares nothing.
            policy: Its settings.
            base: Sequence whose prompt pages may be shared; it must hold its prompt already.
        """
        super().__init__(shape, policy)
        self._base = base
        # bytes of each layer's store that were there before this sequence
        self._others = [0] * self.geometry.num_layers
        self.reused_tokens = [0] * self.geometry.num_layers

    def sibling(self) -> PrefixReuseCache:
        """An empty sequence that shares what it has in common with this one's prompt."""
        return PrefixReuseCache(self.shape, SharedPrefix(), base=self)

    def _store(
        self, layer: int, pages: LayerPages, keys: Tensor, values: Tensor, is_kept: Tensor
    ) -> None:
        if self._base is None:
            super()._store(layer, pages, keys, values, is_kept)
            return
        shared = self._common_tokens(layer, keys, values)
        theirs = self._base._pages(layer)
        before = theirs.nbytes
        own = theirs.fork()
        own.crop(shared)
        if shared < keys.shape[1]:
            own.append(keys[:, shared:], values[:, shared:])
        self._layers[layer] = own
        self._others[layer] = before
        self.reused_tokens[layer] = shared

    def _common_tokens(self, layer: int, keys: Tensor, values: Tensor) -> int:
        """Tokens, in whole pages, that the base begins with as well."""
        assert self._base is not None
        theirs = self._base.read(layer)
        count = min(theirs.keys.shape[1], keys.shape[1])
        same = (theirs.keys[:, :count] == keys[:, :count].bfloat16().float()).all(-1)
        same &= (theirs.values[:, :count] == values[:, :count].bfloat16().float()).all(-1)
        first = int(same.all(0).long().cumprod(0).sum())
        return first // PAGE_TOKENS * PAGE_TOKENS

    def resident_bytes(self) -> int:
        """Bytes that this sequence added to the store."""
        return super().resident_bytes() - sum(self._others)

    def ledger(self) -> ByteLedger:
        """The bytes of a first sequence by kind; of a sibling, all as codes and values.

        What a sibling shares has one page for several owners, so its own bytes have no kinds.
        """
        if self._base is None:
            return super().ledger()
        kinds = dict.fromkeys(ByteLedger.__slots__, 0)
        kinds["codes"] = self.resident_bytes() // 2
        kinds["values"] = self.resident_bytes() - kinds["codes"]
        return ByteLedger(**kinds)


@dataclass(frozen=True)
class NewestPages(PromptPolicy):
    """The newest tokens stay on the device.

    CPU offload: every token is kept, most pages in host memory, fetched for each step.

    The plain form of what FlexGen (Sheng et al., 2023, "FlexGen: High-Throughput Generative
    Inference of Large Language Models with a Single GPU") does to the cache. The newest pages stay
    on the device, as many as the budget allows; each step streams all older pages of a layer
    through the device, so attention is exact and the price is the bytes moved. A step reads every
    page once, and for such a scan least-recently-used replacement would never hit; keeping a fixed
    set resident is the best any rule can do.

    Deviations: both memories are the same here, so only the bytes are accounted, not their transfer
    time. The layer being streamed counts in ``peak_bytes``, not in ``resident_bytes``.
    """

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
