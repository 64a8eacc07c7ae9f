# SPDX-License-Identifier: Apache-2.0
"""Prefix reuse: sequences that begin alike share the pages of what they have in common.

Automatic prefix caching as in vLLM (Kwon et al., 2023) and RadixAttention in SGLang (Zheng et al.,
2024, "SGLang: Efficient Execution of Structured Language Model Programs"). A sequence is a fork of
an earlier one in the same page store, cut to the whole pages of 16 tokens whose bfloat16 states
are equal.

Deviations: pages are found by comparing states with those of the sequence the new one was derived
from, where engines hash token ids; nothing is evicted from the pool. The first sequence pays for
all of its pages, so by itself it costs what a dense cache costs; a sibling pays for its pointers,
its tail and the pages that it does not share.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sphkv.baselines.dense import DenseCache, KeepAll
from sphkv.baselines.layer_pages import PAGE_TOKENS, LayerPages
from sphkv.baselines.settings import MethodShape
from sphkv.store.ledger import ByteLedger


@dataclass(frozen=True)
class SharedPrefix(KeepAll):
    """Keeps everything, and what two sequences have in common once."""

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
