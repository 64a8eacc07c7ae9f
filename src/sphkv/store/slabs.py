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
class Slab:
    """Pages of one pool in one tensor.

    Attributes:
        key: Pool the slab belongs to.
        layout: Layout of its pages.
        data: ``[pages, page_bytes]`` uint8.
        refcounts: ``[pages]`` int32 on the CPU: sequences that hold a page; 0 is free.
        counts: ``[pages]`` int32 on the CPU: live states; 0 until the page is sealed.
        num_free: Pages with no owner.
        buffer: What ``data`` is cut from where pages are aligned; else ``data`` itself.
        owners: Numbers of those who may keep ids of its pages.
    """

    key: PoolKey
    layout: PageLayout
    data: Tensor
    refcounts: Tensor
    counts: Tensor
    num_free: int
    buffer: Tensor
    owners: set[int] = field(default_factory=set)

    @property
    def num_pages(self) -> int:
        """Pages, free ones included."""
        return self.data.shape[0]

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
        refcounts: ``[slots * stride]`` int32 sequences that hold a page, by id; 0 is free.
        counts: ``[slots * stride]`` int32 live states of a page, by id.
    """

    def __init__(self, stride: int) -> None:
        """Start without slabs."""
        self.stride = stride
        self._slabs: list[Slab | None] = []
        self._empty_slots: list[int] = []
        # by slot: address and bytes of pages, how many there are, and how many are free
        self._address = self._size = np.zeros(0, dtype=np.int64)
        self._pages_at = self._free_at = np.zeros(0, dtype=np.int64)
        # what slabs show of these are parts of them
        self.refcounts = self.counts = np.zeros(0, dtype=np.int32)
        self._pools: dict[PoolKey, dict[int, None]] = {}
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
        """Slots of a pool's slabs, in the order they came."""
        return np.fromiter(self._pools.get(key, ()), dtype=np.int64)

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

    def place(self, slab: Slab) -> None:
        """Add a slab, in the lowest slot there is."""
        if self._empty_slots:
            slot = heapq.heappop(self._empty_slots)
            self._slabs[slot] = slab
        else:
            slot = len(self._slabs)
            self._slabs.append(slab)
        if slot >= len(self._address):
            room = max(64, 2 * len(self._address))
            self._address, self._size, self._pages_at, self._free_at = (
                np.concatenate([old, np.zeros(room - len(old), dtype=np.int64)])
                for old in (self._address, self._size, self._pages_at, self._free_at)
            )
        if slot >= len(self.refcounts) // self.stride:
            self._reserve_counts(slot + 1)
        self._show_counts(slot)
        self._address[slot] = slab.data.data_ptr()
        self._size[slot] = slab.data.shape[1]
        self._pages_at[slot], self._free_at[slot] = slab.num_pages, slab.num_free
        self._pools.setdefault(slab.key, {})[slot] = None
        free, pages = self.total(slab.key)
        self._totals[slab.key] = (free + slab.num_free, pages + slab.num_pages)

    def _reserve_counts(self, num_slots: int) -> None:
        """Have room for the counts of the pages of so many slots, and half as many more."""
        room = self.stride * (num_slots + num_slots // 2)
        self.refcounts, self.counts = (
            np.concatenate([old, np.zeros(room - len(old), dtype=np.int32)])
            for old in (self.refcounts, self.counts)
        )
        for slot, slab in enumerate(self._slabs[: num_slots - 1]):
            if slab is not None:
                self._show_counts(slot)

    def _show_counts(self, slot: int) -> None:
        """Have a slab show its part of the counts."""
        slab = self[slot]
        own = slice(slot * self.stride, slot * self.stride + slab.num_pages)
        slab.refcounts = torch.from_numpy(self.refcounts[own])
        slab.counts = torch.from_numpy(self.counts[own])

    def add_free(self, slot: int, num_pages: int) -> None:
        """Note that so many more pages of a slab are free."""
        slab = self[slot]
        slab.num_free += num_pages
        self._free_at[slot] += num_pages
        free, pages = self._totals[slab.key]
        self._totals[slab.key] = (free + num_pages, pages)

    def remove(self, slot: int) -> Slab:
        """Give up a slab whose pages are all free."""
        slab = self[slot]
        free, pages = self._totals[slab.key]
        self._totals[slab.key] = (free - slab.num_pages, pages - slab.num_pages)
        del self._pools[slab.key][slot]
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
        slots, index = ids // self.stride, ids % self.stride
        # asking for a slab that is gone says so
        if ids.size and (ids.min() < 0 or slots.max() >= len(self._slabs)):
            self[int(slots.min() if ids.min() < 0 else slots.max())]
        for slot in slots[self._size[slots] == 0][:1].tolist():
            self[slot]
        if (index >= self._pages_at[slots]).any() or not self.refcounts[ids].all():
            raise ValueError(f"pages {page_ids.tolist()} are not all owned")
        return ids

    def addresses(self, page_ids: Ids) -> Ids:
        """Memory addresses of pages ``[pages]``.

        Raises:
            ValueError: A slab is gone.
        """
        slots, index = page_ids // self.stride, page_ids % self.stride
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
            if in_slab.max() >= slab.num_pages or not slab.refcounts.numpy()[in_slab].all():
                raise ValueError(f"pages {page_ids.tolist()} are not all owned")
            groups.append((slot, torch.from_numpy(in_slab), torch.from_numpy(rows)))
        return iter(groups)
