# SPDX-License-Identifier: Apache-2.0
"""Resident bytes of a contract before anything is encoded, by the store's own bookkeeping."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sphkv.core.contract import WriteContract
from sphkv.store.allocator import PoolKey, slab_bytes
from sphkv.store.config import StoreConfig
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PositionMode, plan_pages, select_states
from sphkv.store.sequence import PointerTable

# The allocator makes a slab at least this part of its pool.
GROWTH_SHARE = 16
# Units whose pages are planned at once: bounds the memory of counting a long prompt.
_PLANNED_UNITS = 1 << 22


def contract_bytes(
    config: StoreConfig, contract: WriteContract, num_tokens: int, *, is_aligned: bool = False
) -> int:
    """Bytes of pages, free pages and tables once the layers are written one after another.

    Args:
        config: The store.
        contract: Decision of all layers; only its first ``num_tokens`` are written.
        num_tokens: Tokens that the contract writes; one dense page per head is sealed after.
        is_aligned: Whether slabs begin at multiples of the page size.

    Returns:
        Exactly what the store's live tensors will take, open tails included.
    """
    twin = _StoreTwin(config, is_aligned=is_aligned)
    layers, heads, _ = contract.tier_id.shape
    pages = count_pages(config, contract, num_tokens)
    for layer in range(layers):
        twin.write({key: each[layer] for key, each in pages.items()})
    tail = heads * config.tail_capacity * config.geometry.dense_state_bytes
    return twin.num_bytes + layers * tail


def count_pages(
    config: StoreConfig, contract: WriteContract, num_tokens: int
) -> dict[PoolKey, Tensor]:
    """Pages ``[layers, heads]`` int64 of every pool that a contract fills; those that occur."""
    # runs of 16 share a tier, so counting runs is counting states
    unit = contract.granularity if num_tokens % contract.granularity == 0 else 1
    tier_id = contract.tier_id[..., :num_tokens:unit]
    protected = contract.protected[..., :num_tokens:unit]
    layers, heads, units = tier_id.shape
    positions = torch.arange(units)
    found: dict[PoolKey, Tensor] = {}
    step = max(1, _PLANNED_UNITS // (heads * max(1, units)))
    for first in range(0, layers, step):
        part = slice(first, first + step)
        # heads of several layers are planned as if they were those of one
        flat = (tier_id[part].flatten(0, 1), protected[part].flatten(0, 1))
        for tier, spec in enumerate(config.tiers):
            if spec.kind == "drop":
                continue
            states = select_states(*flat, positions, tier)
            for batch in plan_pages(states, tier_id=tier, page_tokens=spec.page_tokens // unit):
                mode = batch.position_mode
                if unit > 1 and mode is not PositionMode.CONTIGUOUS:
                    mode = PositionMode.RUNS
                pages = batch.head_ids.bincount(minlength=flat[0].shape[0]).view(-1, heads)
                total = found.setdefault((tier, mode), torch.zeros(layers, heads).long())
                total[part] += pages
    return found


class _StoreTwin:
    """Pages and tables counted as a store's allocator would make them."""

    def __init__(self, config: StoreConfig, *, is_aligned: bool) -> None:
        self._config = config
        self._is_aligned = is_aligned
        # pages made, pages free and slabs of every pool
        self._pools: dict[PoolKey, tuple[int, int, int]] = {}
        self._table_bytes = 0

    @property
    def num_bytes(self) -> int:
        total = self._table_bytes
        for (tier_id, mode), (made, _, slabs) in self._pools.items():
            tier = self._config.tiers[tier_id]
            layout = PageLayout(tier_id, tier, self._config.geometry.head_dim, mode)
            total += slab_bytes(layout, made)
            if self._is_aligned:
                total += slabs * layout.page_bytes
        return total

    def write(self, pages: Mapping[PoolKey, Tensor]) -> None:
        """Write a layer with so many pages ``[heads]`` of every pool, and seal a page per head."""
        heads = self._config.geometry.num_kv_heads
        for key, each in pages.items():
            self._take(key, int(each.sum()))
        per_head = torch.stack([torch.zeros(heads, dtype=torch.int64), *pages.values()]).sum(0)
        # the store makes room for all pages of a write at once, then for those it seals
        table = PointerTable(heads)
        table.reserve(per_head)
        table.num_pages += per_head
        self._take((self._config.tiers.dense_id, PositionMode.CONTIGUOUS), heads)
        table.reserve(torch.ones(heads, dtype=torch.int64))
        self._table_bytes += table.nbytes

    def _take(self, key: PoolKey, wanted: int) -> None:
        """Take pages of a pool, making slabs as ``PageAllocator`` does."""
        made, free, slabs = self._pools.get(key, (0, 0, 0))
        most = self._config.max_slab_pages
        while free < wanted:
            missing = wanted - free
            if made // GROWTH_SHARE >= most:
                size = -(-missing // most) * most
            else:
                size = min(most, max(missing, made // GROWTH_SHARE))
            made, free, slabs = made + size, free + size, slabs + -(-size // most)
        self._pools[key] = (made, free - wanted, slabs)
