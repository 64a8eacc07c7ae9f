# SPDX-License-Identifier: Apache-2.0
"""Slabs of equal pages by slot, and pages by id: where each is, its owners, its live states."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.store.layout import PageLayout
from sphkv.store.paging import PositionMode

Ids = NDArray[np.int64]
"""Page ids, slots or addresses."""

PoolKey = tuple[int, PositionMode]
"""Tier id and position mode: what decides the layout of a page."""


@dataclass(slots=True, eq=False)
class PageCounts:
    """What is counted of all pages, by id; slabs show their part of it.

    Attributes:
        refcounts: ``[slots * stride]`` int32 sequences that hold a page; 0 is free.
        counts: ``[slots * stride]`` int32 live states of a page.
    """

    refcounts: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    counts: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    def reserve(self, num_pages: int) -> None:
        """Have room for so many pages, and half as many more."""
        missing = num_pages - len(self.counts)
        if missing > 0:
            more = np.zeros(missing + num_pages // 2, dtype=np.int32)
            self.refcounts, self.counts = (
                np.concatenate([old, more]) for old in (self.refcounts, self.counts)
            )


# Of slabs that no table has yet.
_UNCOUNTED = (PageCounts(), 0)


@dataclass(slots=True, eq=False)
class Slab:
    """Pages of one pool in one tensor.

    Attributes:
        key: Pool the slab belongs to.
        layout: Layout of its pages.
        data: ``[pages, page_bytes]`` uint8.
        num_free: Pages with no owner.
        buffer: What ``data`` is cut from where pages are aligned; else ``data`` itself.
        owners: Numbers of those who may keep ids of its pages.
        counted: Counts of all pages, and the id of its first one; its table tells it.
    """

    key: PoolKey
    layout: PageLayout
    data: Tensor
    num_free: int
    buffer: Tensor
    owners: set[int] = field(default_factory=set)
    counted: tuple[PageCounts, int] = _UNCOUNTED

    @property
    def num_pages(self) -> int:
        """Pages, free ones included."""
        return self.data.shape[0]

    @property
    def refcounts(self) -> Tensor:
        """``[pages]`` int32 on the CPU: sequences that hold a page; 0 is free."""
        every, first = self.counted
        return torch.from_numpy(every.refcounts[first : first + self.num_pages])

    @property
    def counts(self) -> Tensor:
        """``[pages]`` int32 on the CPU: live states; 0 until the page is sealed."""
        every, first = self.counted
        return torch.from_numpy(every.counts[first : first + self.num_pages])

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Everything the slab keeps alive."""
        return self.buffer, self.refcounts, self.counts


@functools.lru_cache(maxsize=256)
def held_page_bytes(layout: PageLayout) -> int:
    """Bytes of one page in a slab, its reference and state count included."""
    return layout.page_bytes + 2 * torch.int32.itemsize


def slab_bytes(layout: PageLayout, num_pages: int, *, alignment: int = 1) -> int:
    """Bytes of a slab, its reference and state counts included.

    Args:
        layout: Layout of its pages.
        num_pages: Pages it can hold.
        alignment: Bytes that its first page begins at a multiple of, which costs as many.
    """
    return num_pages * held_page_bytes(layout) + spare_bytes(alignment)


def spare_bytes(alignment: int) -> int:
    """Bytes beyond its pages that an aligned slab needs."""
    return alignment if alignment > 1 else 0


class SlabTable:
    """All live slabs, each in a slot, and what is known of their pages by id.

    A page id is ``slot * stride + index``. Slots of slabs that went are given out again.

    Attributes:
        stride: Pages of the largest slab.
    """

    def __init__(self, stride: int) -> None:
        """Start without slabs."""
        self.stride = stride
        self._slabs: list[Slab | None] = []
        self._empty_slots: list[int] = []
        # by slot: address and bytes of pages, how many there are, and how many are free
        self._address = self._size = np.zeros(0, dtype=np.int64)
        self._pages_at = self._free_at = np.zeros(0, dtype=np.int64)
        self._counts = PageCounts()
        self._pools: dict[PoolKey, dict[int, None]] = {}
        # the same as arrays, as long as no slab comes
        self._listed: dict[PoolKey, Ids] = {}
        # free pages and all pages of each pool
        self._totals: dict[PoolKey, tuple[int, int]] = {}

    def __iter__(self) -> Iterator[Slab]:
        """All live slabs."""
        return (slab for slab in self._slabs if slab is not None)

    def __getitem__(self, slot: int) -> Slab:
        """The slab in a slot.

        Raises:
            ValueError: There is none.
        """
        slab = self._slabs[slot] if 0 <= slot < len(self._slabs) else None
        if slab is None:
            raise ValueError(f"no slab {slot}: a page id is stale")
        return slab

    @property
    def refcounts(self) -> NDArray[np.int32]:
        """``[slots * stride]`` sequences that hold a page, by id; 0 is free."""
        return self._counts.refcounts

    @property
    def counts(self) -> NDArray[np.int32]:
        """``[slots * stride]`` live states of a page, by id."""
        return self._counts.counts

    @property
    def totals(self) -> dict[PoolKey, tuple[int, int]]:
        """Free pages and all pages of every pool that ever had some; a copy."""
        return dict(self._totals)

    def total(self, key: PoolKey) -> tuple[int, int]:
        """Free pages and all pages of a pool."""
        return self._totals.get(key, (0, 0))

    def pools(self) -> list[PoolKey]:
        """Pools that ever had slabs."""
        return list(self._pools)

    def slots(self, key: PoolKey) -> Ids:
        """Slots of a pool's slabs, in the order they came; shared, not to be written to."""
        if key not in self._listed:
            self._listed[key] = np.fromiter(self._pools.get(key, ()), dtype=np.int64)
        return self._listed[key]

    def num_slabs(self, key: PoolKey) -> int:
        """Slabs of a pool."""
        return len(self._pools.get(key, ()))

    def num_pages(self, slots: Ids) -> Ids:
        """Pages of the slabs in some slots."""
        found: Ids = self._pages_at[slots]
        return found

    def num_free(self, slots: Ids) -> Ids:
        """Free pages of the slabs in some slots."""
        found: Ids = self._free_at[slots]
        return found

    def pages_of(self, slots: Ids, *, are_free: bool) -> Ids:
        """Ids of the pages of some slabs that are free, or of those that are not; slab by slab."""
        index = np.arange(self.stride)
        ids = slots[:, None] * self.stride + index
        is_there = index < self._pages_at[slots][:, None]
        found: Ids = ids[is_there & ((self.refcounts[ids] == 0) == are_free)]
        return found

    def place(self, *slabs: Slab) -> None:
        """Add slabs, each in the lowest slot there is."""
        slots = [self._free_slot(slab) for slab in slabs]
        num_slots = len(self._slabs)
        if num_slots > len(self._address):
            room = max(64, 2 * len(self._address), num_slots)
            self._address, self._size, self._pages_at, self._free_at = (
                np.concatenate([old, np.zeros(room - len(old), dtype=np.int64)])
                for old in (self._address, self._size, self._pages_at, self._free_at)
            )
        self._counts.reserve(num_slots * self.stride)
        for slot, slab in zip(slots, slabs, strict=True):
            slab.counted = (self._counts, slot * self.stride)
            num_pages, size = slab.data.shape
            self._address[slot], self._size[slot] = slab.data.data_ptr(), size
            self._pages_at[slot], self._free_at[slot] = num_pages, slab.num_free
            self._pools.setdefault(slab.key, {})[slot] = None
            self._listed.pop(slab.key, None)
            free, pages = self.total(slab.key)
            self._totals[slab.key] = (free + slab.num_free, pages + num_pages)

    def _free_slot(self, slab: Slab) -> int:
        """Put a slab in the lowest slot there is."""
        if self._empty_slots:
            slot = heapq.heappop(self._empty_slots)
            self._slabs[slot] = slab
            return slot
        self._slabs.append(slab)
        return len(self._slabs) - 1

    def take(self, key: PoolKey, wanted: int) -> Ids:
        """Ids ``[wanted]`` of free pages of a pool, which get an owner; there must be as many.

        Slabs are emptied in the order they came.
        """
        slots = self.slots(key)
        slots = slots[self._free_at[slots] > 0]
        # the last of them keeps what is left
        room = self._free_at[slots].cumsum()
        slots = slots[: int(room.searchsorted(wanted)) + 1] if wanted else slots[:0]
        ids = self.pages_of(slots, are_free=True)[:wanted]
        self.refcounts[ids] = 1
        taken = np.bincount(ids // self.stride, minlength=len(self._slabs))
        self.add_free(slots, -taken[slots])
        return ids

    def add_free(self, slots: Ids, num_pages: Ids) -> None:
        """Note that so many more pages of some slabs are free; every slot comes once."""
        totals: dict[PoolKey, int] = {}
        for slot, more in zip(slots.tolist(), num_pages.tolist(), strict=True):
            slab = self[slot]
            slab.num_free += more
            totals[slab.key] = totals.get(slab.key, 0) + more
        self._free_at[slots] += num_pages
        for key, more in totals.items():
            free, pages = self._totals[key]
            self._totals[key] = (free + more, pages)

    def remove(self, slot: int) -> Slab:
        """Give up a slab whose pages are all free."""
        slab = self[slot]
        free, pages = self._totals[slab.key]
        self._totals[slab.key] = (free - slab.num_pages, pages - slab.num_pages)
        del self._pools[slab.key][slot]
        if (listed := self._listed.get(slab.key)) is not None:
            self._listed[slab.key] = listed[listed != slot]
        self._slabs[slot] = None
        self._free_at[slot] = self._size[slot] = 0
        heapq.heappush(self._empty_slots, slot)
        return slab

    def owned(self, page_ids: Tensor) -> Ids:
        """Ids as an array.

        Raises:
            ValueError: A page has no owner, or its slab is gone.
        """
        ids: Ids = page_ids.cpu().numpy()
        slots, index = self._split(ids)
        # asking for a slab that is gone says so
        if ids.size and (ids.min() < 0 or slots.max() >= len(self._slabs)):
            self[int(slots.min() if ids.min() < 0 else slots.max())]
        for slot in slots[self._size[slots] == 0][:1].tolist():
            self[slot]
        if (index >= self._pages_at[slots]).any() or not self.refcounts[ids].all():
            raise ValueError(f"pages {page_ids.tolist()} are not all owned")
        return ids

    def _split(self, page_ids: Ids) -> tuple[Ids, Ids]:
        """Slots of pages and their places in them; numpy is slow at remainders."""
        slots: Ids = page_ids // self.stride
        return slots, page_ids - slots * self.stride

    def addresses(self, page_ids: Ids) -> Ids:
        """Memory addresses of pages ``[pages]``.

        Raises:
            ValueError: A slab is gone.
        """
        slots, index = self._split(page_ids)
        if slots.size and (slots.max() >= len(self._slabs) or not self._size[slots].all()):
            raise ValueError(f"pages {page_ids.tolist()} are not all there: an id is stale")
        found: Ids = self._address[slots] + index * self._size[slots]
        return found

    def by_pool(self, slots: Ids, values: Ids) -> Iterator[tuple[PoolKey, Ids]]:
        """Values of pages in some slots, pool by pool."""
        keys: dict[PoolKey, list[int]] = {}
        for slot in {*slots.tolist()}:
            keys.setdefault(self[slot].key, []).append(slot)
        for key, own in keys.items():
            is_own = np.zeros(len(self._slabs), dtype=np.bool_)
            is_own[own] = True
            yield key, values[is_own[slots]]

    def by_slab(self, page_ids: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Group ids by slab: slot, index in the slab, place in ``page_ids``; all on the CPU.

        Raises:
            ValueError: A page has no owner, or its slab is gone.
        """
        slots, index = np.divmod(page_ids.cpu().numpy(), self.stride)
        parts = []
        if slots.size and (slots == slots[0]).all():
            parts = [np.arange(slots.size)]
        elif slots.size:
            order = slots.argsort(kind="stable")
            parts = np.split(order, np.flatnonzero(np.diff(slots[order])) + 1)
        groups = []
        for rows in parts:
            slab = self[slot := int(slots[rows[0]])]
            in_slab = index[rows]
            owners = self.refcounts[slot * self.stride + in_slab]
            if in_slab.max() >= slab.num_pages or not owners.all():
                raise ValueError(f"pages {page_ids.tolist()} are not all owned")
            groups.append((slot, torch.from_numpy(in_slab), torch.from_numpy(rows)))
        return iter(groups)
