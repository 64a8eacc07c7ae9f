# SPDX-License-Identifier: Apache-2.0
"""One pool of pages: every change of pages and pointer tables is planned, checked, then done."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.store.allocator import PageAllocator
from sphkv.store.config import ByteMeter, StoreConfig
from sphkv.store.layout import PageLayout
from sphkv.store.order import PageCodec, PageOrder
from sphkv.store.sequence import PointerTable, page_tag
from sphkv.store.slabs import PoolKey

# At most so many pages of several layers are copied together and written at once.
_JOINED_PAGES = 32768


def no_pages() -> Tensor:
    """An empty list of page ids."""
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPages:
    """Pages of one layer and pool that own no memory of the store yet.

    Attributes:
        key: Their tier id and position mode.
        head_ids: ``[rows]`` int64 on the CPU, KV head of each page, not decreasing.
        counts: ``[rows]`` int64 on the CPU, live states of each page.
        pages: ``[rows, page_bytes]`` uint8, as slabs keep them.
        per_head: ``[heads]`` int64, pages of each head.
    """

    key: PoolKey
    head_ids: Tensor
    counts: Tensor
    pages: Tensor
    per_head: NDArray[np.int64]

    @classmethod
    def of(
        cls, key: PoolKey, head_ids: Tensor, counts: Tensor, pages: Tensor, num_heads: int
    ) -> "EncodedPages":
        """Pages whose heads and counts may be on any device."""
        heads = head_ids.cpu()
        per_head = np.bincount(heads.numpy(), minlength=num_heads)
        return cls(key, heads, counts.cpu(), pages, per_head)


def layer_parts(heads: NDArray[np.int64], num_heads: int) -> Iterator[tuple[int, slice]]:
    """Layers that occur in rising heads of all layers, and where."""
    layer_ids = heads // num_heads
    for layer in sorted({*layer_ids.tolist()}):
        yield layer, slice(*np.searchsorted(layer_ids, [layer, layer + 1]).tolist())


def pages_by_layer(
    key: PoolKey, heads: NDArray[np.int64], counts: NDArray[np.int64], pages: Tensor, num_heads: int
) -> Iterator[tuple[int, EncodedPages]]:
    """Pages of every layer that has some, out of those of all layers."""
    for layer, part in layer_parts(heads, num_heads):
        local = heads[part] - layer * num_heads
        per_head = np.bincount(local, minlength=num_heads)
        host = (torch.from_numpy(local), torch.from_numpy(counts[part]))
        yield layer, EncodedPages(key, *host, pages[part], per_head)


def _join_pages(parts: Sequence[EncodedPages]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pages and counts of parts in their order, some parts together."""
    first = 0
    while first < len(parts):
        end, total = first + 1, len(parts[first].pages)
        while end < len(parts) and total + len(parts[end].pages) <= _JOINED_PAGES:
            total += len(parts[end].pages)
            end += 1
        own = parts[first:end]
        if len(own) == 1:
            yield own[0].pages, own[0].counts
        else:
            yield torch.cat([each.pages for each in own]), torch.cat([each.counts for each in own])
        first = end


@dataclass(frozen=True, slots=True, eq=False)
class SealedPages:
    """Full pages of one pool, one for every head of some tables, that own no memory yet.

    Attributes:
        key: Their tier id and position mode.
        tables: Pointer tables of layers of sequences.
        pages: ``[tables * heads, page_bytes]`` uint8, as slabs keep them, table by table.
        count: States of each page.
    """

    key: PoolKey
    tables: Sequence[PointerTable]
    pages: Tensor
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class JoinedPages:
    """Pages of one pool for several tables that own no memory of the store yet.

    Attributes:
        key: Their tier id and position mode.
        heads: ``[rows]`` KV head of each page among those of all tables, not decreasing.
        counts: ``[rows]`` live states of each page.
        parts: The pages in order, as slabs keep them, ``[..., page_bytes]`` uint8 each.
    """

    key: PoolKey
    heads: NDArray[np.int64]
    counts: NDArray[np.int64]
    parts: Sequence[Tensor]


@dataclass(slots=True, eq=False)
class LayerChange:
    """Pages that one layer of a sequence loses and gains in one step.

    Attributes:
        table: Pointer table of the layer.
        removed: ``[pages]`` int64 ids that the sequence gives up.
        pending: New pages.
        truncated: Ids, bytes and counts of pages that are shortened in place.
    """

    table: PointerTable
    removed: Tensor = field(default_factory=no_pages)
    pending: Sequence[EncodedPages] = ()
    truncated: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)


class PagePool:
    """Allocator, layouts and byte meter of a store.

    Attributes:
        config: Sizes, tiers and limit.
        device: Device of the pages.
        allocator: Owner of the slabs.
        kernels: What encodes pages where it can; else a sequence's codec does.
        meter: Bytes of all live tensors of the store.
    """

    def __init__(
        self,
        config: StoreConfig,
        order: PageOrder | None = None,
        kernels: PageCodec | None = None,
    ) -> None:
        """Start without pages."""
        self.config = config
        self.kernels = kernels
        self.device = torch.device(config.device)
        self.meter = ByteMeter(config.max_bytes)
        self.allocator = PageAllocator(
            self.layout,
            max_slab_pages=config.max_slab_pages,
            device=self.device,
            order=order,
            copier=None if kernels is None else kernels.copier(self.device),
        )
        self._layouts: dict[PoolKey, PageLayout] = {}

    def layout(self, key: PoolKey) -> PageLayout:
        """Layout of the pages of a tier id and position mode."""
        if key not in self._layouts:
            tier_id, mode = key
            tier = self.config.tiers[tier_id]
            self._layouts[key] = PageLayout(tier_id, tier, self.config.geometry.head_dim, mode)
        return self._layouts[key]

    def check_room(self, requests: Mapping[PoolKey, int]) -> None:
        """Raise if pages could not be had now.

        Raises:
            BudgetError: They would pass the limit.
        """
        self.meter.check(self.allocator.plan_bytes(requests))

    def commit(self, changes: Sequence[LayerChange], extra_bytes: int = 0) -> None:
        """Carry out changes of several layers, all or none.

        Args:
            changes: One change per layer, of tables that do not repeat.
            extra_bytes: Bytes of tensors the caller adds besides.

        Raises:
            BudgetError: The result would pass the limit; nothing was changed.
        """
        requests: dict[PoolKey, int] = {}
        for part in (part for change in changes for part in change.pending):
            requests[part.key] = requests.get(part.key, 0) + part.pages.shape[0]
        freed = torch.cat([no_pages(), *(c.removed.cpu() for c in changes if len(c.removed))])
        delta = extra_bytes + self.allocator.plan_bytes(requests, freed)
        added = [self._per_head(change) for change in changes]
        for change, per_head in zip(changes, added, strict=True):
            delta += change.table.growth_bytes(per_head, change.removed)
        self.meter.check(delta)

        self.allocator.free(freed)
        fresh = self.allocator.allocate(requests)
        self._write(changes, fresh)
        placed = dict.fromkeys(fresh, 0)
        for change, per_head in zip(changes, added, strict=True):
            change.table.remove(change.removed)
            change.table.reserve(per_head)
            self._place(change, fresh, placed)
        self.meter.add(delta)

    def fill(
        self, tables: Sequence[PointerTable], parts: Sequence[JoinedPages], extra_bytes: int = 0
    ) -> None:
        """Give pages to several tables, all or none; what ``commit`` does, at once for all.

        Args:
            tables: Tables of layers, none twice.
            parts: Their pages, each pool once, in the order that tables have them.
            extra_bytes: Bytes of tensors the caller adds besides.

        Raises:
            BudgetError: The result would pass the limit; nothing was changed.
        """
        num_heads = self.config.geometry.num_kv_heads
        shape = (len(tables), num_heads)
        # as a pool's first page comes, table by table
        order = sorted(parts, key=lambda part: int(part.heads[0]) // num_heads)
        requests = {part.key: len(part.heads) for part in order}
        delta = extra_bytes + self.allocator.plan_bytes(requests)
        heads = np.concatenate([np.zeros(0, np.int64), *(part.heads for part in parts)])
        added = np.bincount(heads, minlength=shape[0] * num_heads).reshape(shape)
        delta += sum(map(PointerTable.growth_bytes, tables, added))
        self.meter.check(delta)

        fresh = self.allocator.allocate(requests)
        ids, tags = [np.zeros(0, np.int64)], [np.zeros(0, np.int16)]
        for part in parts:
            own = fresh[part.key]
            self.allocator.write_parts(own, part.parts, torch.from_numpy(part.counts))
            self.allocator.own_each(tables, part.heads // num_heads, own)
            ids.append(own.numpy())
            tags.append(np.full(len(own), page_tag(part.key), np.int16))
        by_head = heads.argsort(kind="stable")
        all_ids, all_tags = np.concatenate(ids)[by_head], np.concatenate(tags)[by_head]
        ends = pairwise([0, *added.sum(1).cumsum().tolist()])
        for table, per_head, (first, end) in zip(tables, added, ends, strict=True):
            table.fill(all_ids[first:end], all_tags[first:end], per_head)
        self.meter.add(delta)

    def append(self, parts: Sequence[SealedPages]) -> None:
        """Give every head of some tables a page, all or none.

        Args:
            parts: Pages of tables that do not repeat.

        Raises:
            BudgetError: The result would pass the limit; nothing was changed.
        """
        requests: dict[PoolKey, int] = {}
        for part in parts:
            requests[part.key] = requests.get(part.key, 0) + len(part.pages)
        heads = self.config.geometry.num_kv_heads
        delta = self.allocator.plan_bytes(requests)
        delta += sum(table.growth_alike(1) for part in parts for table in part.tables)
        self.meter.check(delta)
        fresh = self.allocator.allocate(requests)
        for part in parts:
            ids, fresh[part.key] = fresh[part.key].split(
                [len(part.pages), len(fresh[part.key]) - len(part.pages)]
            )
            self.allocator.write(ids, part.pages, torch.full_like(ids, part.count))
            self.allocator.own_alike(part.tables, ids)
            tag = page_tag(part.key)
            for table, own in zip(part.tables, ids.numpy().reshape(-1, heads), strict=True):
                table.push(own, tag)
        self.meter.add(delta)

    def _per_head(self, change: LayerChange) -> NDArray[np.int64]:
        """``[heads]`` int64 new pages of each head."""
        if len(change.pending) == 1:
            return change.pending[0].per_head
        total = np.zeros(self.config.geometry.num_kv_heads, dtype=np.int64)
        for part in change.pending:
            total += part.per_head
        return total

    def _write(self, changes: Sequence[LayerChange], fresh: Mapping[PoolKey, Tensor]) -> None:
        """Fill the pages of each pool, in the order ``_place`` hands them out."""
        for key, page_ids in fresh.items():
            parts = [part for change in changes for part in change.pending if part.key == key]
            for pages, counts in _join_pages(parts):
                ids, page_ids = page_ids[: len(pages)], page_ids[len(pages) :]
                self.allocator.write(ids, pages, counts)

    def _place(
        self, change: LayerChange, fresh: Mapping[PoolKey, Tensor], placed: dict[PoolKey, int]
    ) -> None:
        """Enter pages from ``fresh`` behind those ``placed`` already, and count them there."""
        for page_ids, pages, counts in change.truncated:
            self.allocator.truncate(page_ids, pages, counts)
            change.table.touch()
        for part in change.pending:
            begin, end = placed[part.key], placed[part.key] + part.pages.shape[0]
            ids = fresh[part.key][begin:end]
            change.table.extend(part.head_ids, ids, page_tag(part.key), part.per_head)
            self.allocator.own(change.table, ids)
            placed[part.key] = end
