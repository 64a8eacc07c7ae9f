# SPDX-License-Identifier: Apache-2.0
"""Free pages: slabs of equal pages under one byte limit."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.store.layout import PageLayout, first_positions, frame_parts
from sphkv.store.order import PageCopier, PageOrder
from sphkv.store.paging import PositionMode

_Ids = NDArray[np.int64]
PoolKey = tuple[int, PositionMode]
"""Tier id and position mode: what decides the layout of a page."""

# Ids that differ in no higher bit are near each other.
_NEAR_BITS = 7
# A new slab is at least this share of its pool, so that slabs stay few as a pool grows.
_GROWTH_SHARE = 16


class PageOwner(Protocol):
    """What keeps page ids and follows pages that move."""

    def remap(self, moves: PageMoves) -> None:
        """Replace the ids of pages that moved."""
        ...


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


@dataclass(frozen=True, slots=True, eq=False)
class PageMoves:
    """Pages that changed their place, and so their id.

    Attributes:
        old_ids: ``[pages]`` int64 on the CPU, rising.
        new_ids: ``[pages]`` int64 on the CPU, none of them among ``old_ids``.
    """

    old_ids: Tensor
    new_ids: Tensor
    _is_near: NDArray[np.bool_]

    @classmethod
    def of(cls, old_ids: _Ids, new_ids: _Ids) -> PageMoves:
        """Moves from ids to others, in any order."""
        order = old_ids.argsort()
        is_near = np.zeros((old_ids.max() >> _NEAR_BITS) + 2 if len(old_ids) else 1, np.bool_)
        is_near[old_ids >> _NEAR_BITS] = True
        return cls(torch.from_numpy(old_ids[order]), torch.from_numpy(new_ids[order]), is_near)

    def find(self, page_ids: _Ids) -> tuple[_Ids, _Ids]:
        """Places in ``page_ids [n]`` of pages that moved, and their new ids; -1 never does."""
        old, new = self.old_ids.numpy(), self.new_ids.numpy()
        # most ids are far from all that moved, and searching for each would take longer
        near = np.flatnonzero(
            self._is_near[np.minimum(page_ids >> _NEAR_BITS, len(self._is_near) - 1)]
        )
        if not len(near):
            return near, near
        place = np.minimum(np.searchsorted(old, page_ids[near]), len(old) - 1)
        is_moved = old[place] == page_ids[near]
        return near[is_moved], new[place[is_moved]]

    def apply(self, page_ids: Tensor) -> Tensor:
        """Ids after the move, of any shape; those of pages that stayed and -1 are kept."""
        found = page_ids.clone()
        ids = found.numpy().reshape(-1)
        at, new = self.find(ids)
        ids[at] = new
        return found


@dataclass(frozen=True, slots=True, eq=False)
class PageEvent:
    """Pages of one pool that went, or moved.

    Attributes:
        key: Their pool.
        old: ``[pages]`` int64 addresses they had, rising.
        new: ``[pages]`` int64 addresses they have now; None if they are gone.
    """

    key: PoolKey
    old: _Ids
    new: _Ids | None


@dataclass(eq=False)
class PageJournal:
    """What became of pages since it was read last, for whoever keeps their addresses.

    Attributes:
        events: In the order they happened.
        is_complete: False once a page lost one of several owners, which addresses do not tell.
    """

    events: list[PageEvent] = field(default_factory=list)
    is_complete: bool = True

    def take(self) -> tuple[list[PageEvent], bool]:
        """The events and whether they tell all; it is empty and complete afterwards."""
        found = (self.events, self.is_complete)
        self.events, self.is_complete = [], True
        return found


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
    return num_pages * held_page_bytes(layout) + _spare_bytes(alignment)


def _spare_bytes(alignment: int) -> int:
    """Bytes beyond its pages that an aligned slab needs."""
    return alignment if alignment > 1 else 0


class PageAllocator:
    """Hands out pages by id, with reference counts.

    A page id is ``slab * max_slab_pages + index`` and stays valid until the page is freed.
    A page is written once; from then on it is sealed and its bytes change only through
    ``truncate``, which a page with two owners refuses.
    """

    def __init__(
        self,
        layout_of: Callable[[PoolKey], PageLayout],
        *,
        max_slab_pages: int = 64,
        device: torch.device | str = "cpu",
        order: PageOrder | None = None,
        copier: PageCopier | None = None,
    ) -> None:
        """Start without slabs.

        Args:
            layout_of: Layout of each pool.
            max_slab_pages: Pages of the largest slab.
            device: Where pages live.
            order: How slabs keep the bytes of a page; as ``store/layout.py`` has them if None.
            copier: Copies pages of all slabs at once; slab by slab if None.
        """
        if max_slab_pages < 1:
            raise ValueError(f"max_slab_pages must be positive, got {max_slab_pages}")
        self._layout_of = layout_of
        self._stride = max_slab_pages
        self._device = torch.device(device)
        self.order = order
        self._copier = copier
        self._slabs: list[Slab | None] = []
        self._empty_slots: list[int] = []
        # by slot: address and bytes of pages, how many there are, and how many are free
        self._address = self._size = np.zeros(0, dtype=np.int64)
        self._pages_at = self._free_at = np.zeros(0, dtype=np.int64)
        # owners and live states by page id: what slabs show of them are parts of these
        self._owners_of = self._states_of = np.zeros(0, dtype=np.int32)
        self._pools: dict[PoolKey, dict[int, None]] = {}
        self._journals: WeakSet[PageJournal] = WeakSet()
        # owners by number: slabs are many, and a number is all that each keeps
        self._owners: WeakValueDictionary[int, PageOwner] = WeakValueDictionary()
        self._owner_numbers: WeakKeyDictionary[PageOwner, int] = WeakKeyDictionary()
        self._next_owner = 0
        self._num_moved = 0
        # free pages and all pages of each pool
        self._totals: dict[PoolKey, tuple[int, int]] = {}

    @property
    def has_copier(self) -> bool:
        """Whether pages of many slabs are copied at once."""
        return self._copier is not None

    @property
    def num_moved(self) -> int:
        """Pages that have got another id so far."""
        return self._num_moved

    def slabs(self) -> Iterator[Slab]:
        """All live slabs."""
        return (slab for slab in self._slabs if slab is not None)

    def plan_bytes(self, requests: Mapping[PoolKey, int], freed: Tensor | None = None) -> int:
        """Bytes by which tensors grow if ``freed`` pages go and then new ones come.

        Args:
            requests: Pages wanted from each pool.
            freed: ``[pages]`` int64 ids that lose one owner first.

        Returns:
            Bytes of new slabs minus those of slabs that end up empty.
        """
        freed_pages: dict[int, int] = {}
        if freed is not None and len(freed):
            ids = self._owned(freed)
            slots = ids[self._owners_of[ids] == 1] // self._stride
            per_slot = np.bincount(slots)
            freed_pages = {slot: int(per_slot[slot]) for slot in np.flatnonzero(per_slot).tolist()}
        delta = 0
        emptied = set()
        for slot, num_freed in freed_pages.items():
            slab = self._slab(slot)
            if slab.num_free + num_freed == slab.num_pages:
                emptied.add(slot)
                delta -= self._slab_bytes(slab.layout, slab.num_pages)
        for key, wanted in requests.items():
            free, total = self._totals.get(key, (0, 0))
            for slot, num_freed in freed_pages.items():
                slab = self._slab(slot)
                if slab.key == key:
                    free += num_freed
                    if slot in emptied:
                        free, total = free - slab.num_pages, total - slab.num_pages
            layout = self._layout_of(key)
            delta += sum(
                self._slab_bytes(layout, pages) for pages in self._slab_sizes(wanted - free, total)
            )
        return delta

    def _slab_bytes(self, layout: PageLayout, num_pages: int) -> int:
        return slab_bytes(layout, num_pages, alignment=self._alignment(layout))

    def _alignment(self, layout: PageLayout) -> int:
        return 1 if self.order is None else self.order.alignment(layout)

    def forecast(self, requests: Sequence[Mapping[PoolKey, int]]) -> int:
        """Bytes by which slabs grow if requests come one after another; takes nothing.

        Args:
            requests: Pages wanted from each pool at a time.

        Returns:
            What ``plan_bytes`` of each would add up to if the ones before it were allocated.
        """
        totals = dict(self._totals)
        new: dict[PoolKey, tuple[int, int]] = {}  # slabs and their pages
        for request in requests:
            for key, wanted in request.items():
                free, total = totals.get(key, (0, 0))
                sizes = self._slab_sizes(wanted - free, total)
                made, held = sum(sizes), new.get(key, (0, 0))
                new[key] = (held[0] + len(sizes), held[1] + made)
                totals[key] = (free + made - wanted, total + made)
        delta = 0
        for key, (slabs, pages) in new.items():
            layout = self._layout_of(key)
            delta += pages * held_page_bytes(layout) + slabs * _spare_bytes(self._alignment(layout))
        return delta

    def _slab_sizes(self, missing: int, pool_pages: int) -> list[int]:
        """Pages of the slabs to be made for ``missing`` pages of a pool that has some already."""
        if missing <= 0:
            return []
        num_full, rest = divmod(missing, self._stride)
        sizes = [self._stride] * num_full
        if rest:
            pool_pages += num_full * self._stride
            sizes.append(min(self._stride, max(rest, pool_pages // _GROWTH_SHARE)))
        return sizes

    def allocate(self, requests: Mapping[PoolKey, int]) -> dict[PoolKey, Tensor]:
        """Take pages from several pools, all or none.

        Args:
            requests: Pages wanted from each pool.

        Returns:
            ``[pages]`` int64 ids on the CPU for each pool, each owned once and unsealed.
        """
        # Tensors first: if memory runs out here, nothing has been handed out.
        fresh = {}
        for key, wanted in requests.items():
            free, total = self._totals.get(key, (0, 0))
            fresh[key] = [self._new_slab(key, n) for n in self._slab_sizes(wanted - free, total)]
        for key, slabs in fresh.items():
            for slab in slabs:
                self._pools.setdefault(key, {})[self._place(slab)] = None
                self._count(key, slab.num_pages, slab.num_pages)
        return {key: self._take(key, wanted) for key, wanted in requests.items()}

    def _count(self, key: PoolKey, free: int, pages: int = 0) -> None:
        """Note that a pool has so many more free pages, and pages at all."""
        held = self._totals.get(key, (0, 0))
        self._totals[key] = (held[0] + free, held[1] + pages)

    def _new_slab(self, key: PoolKey, num_pages: int) -> Slab:
        layout = self._layout_of(key)
        size, alignment = layout.page_bytes, self._alignment(layout)
        num_bytes = num_pages * size + _spare_bytes(alignment)
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        begin = -buffer.data_ptr() % alignment
        return Slab(
            key,
            layout,
            buffer[begin : begin + num_pages * size].view(num_pages, size),
            torch.zeros(num_pages, dtype=torch.int32),
            torch.zeros(num_pages, dtype=torch.int32),
            num_pages,
            buffer,
        )

    def _place(self, slab: Slab) -> int:
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
        if slot >= len(self._owners_of) // self._stride:
            self._reserve_counts(slot + 1)
        self._show_counts(slot)
        self._address[slot] = slab.data.data_ptr()
        self._size[slot] = slab.data.shape[1]
        self._pages_at[slot], self._free_at[slot] = slab.num_pages, slab.num_free
        return slot

    def _reserve_counts(self, num_slots: int) -> None:
        """Have room for the counts of the pages of so many slots, and half as many more."""
        room = self._stride * (num_slots + num_slots // 2)
        self._owners_of, self._states_of = (
            np.concatenate([old, np.zeros(room - len(old), dtype=np.int32)])
            for old in (self._owners_of, self._states_of)
        )
        for slot, slab in enumerate(self._slabs[: num_slots - 1]):
            if slab is not None:
                self._show_counts(slot)

    def _show_counts(self, slot: int) -> None:
        """Have a slab show its part of the counts."""
        slab = self._slab(slot)
        own = slice(slot * self._stride, slot * self._stride + slab.num_pages)
        slab.refcounts = torch.from_numpy(self._owners_of[own])
        slab.counts = torch.from_numpy(self._states_of[own])

    def _owned(self, page_ids: Tensor) -> _Ids:
        """Ids as an array.

        Raises:
            ValueError: A page has no owner, or its slab is gone.
        """
        ids: _Ids = page_ids.cpu().numpy()
        slots, index = ids // self._stride, ids % self._stride
        if ids.size and (ids.min() < 0 or slots.max() >= len(self._slabs)):
            self._slab(int(slots.min() if ids.min() < 0 else slots.max()))
        for slot in slots[self._size[slots] == 0][:1].tolist():
            self._slab(slot)
        if (index >= self._pages_at[slots]).any() or not self._owners_of[ids].all():
            raise ValueError(f"pages {page_ids.tolist()} are not all owned")
        return ids

    def _add_free(self, slot: int, num_pages: int) -> None:
        """Note that so many more pages of a slab are free."""
        self._slab(slot).num_free += num_pages
        self._free_at[slot] += num_pages

    def _take(self, key: PoolKey, wanted: int) -> Tensor:
        parts = [np.empty(0, dtype=np.int64)]
        self._count(key, -wanted)
        slots = np.fromiter(self._pools.get(key, ()), dtype=np.int64) if wanted else parts[0]
        for slot in slots[self._free_at[slots] > 0].tolist():
            if wanted == 0:
                break
            refcounts = self._slab(slot).refcounts.numpy()
            index = np.flatnonzero(refcounts == 0)[:wanted]
            refcounts[index] = 1
            self._add_free(slot, -len(index))
            wanted -= len(index)
            parts.append(slot * self._stride + index)
        return torch.from_numpy(np.concatenate(parts))

    def own(self, owner: PageOwner, page_ids: Tensor) -> None:
        """Note who keeps ids, so that it is told when the pages move.

        Args:
            owner: Kept weakly.
            page_ids: ``[pages]`` int64 ids on the CPU.
        """
        number = self._number_of(owner)
        slots = page_ids.numpy() // self._stride
        for slot in {*slots.tolist()}:
            self._slab(slot).owners.add(number)

    def own_alike(self, owners: Sequence[PageOwner], page_ids: Tensor) -> None:
        """Note who keeps ids where every owner has as many.

        Args:
            owners: Kept weakly.
            page_ids: ``[pages]`` int64 ids on the CPU, owner by owner.
        """
        slots = (page_ids.numpy() // self._stride).reshape(len(owners), -1)
        numbers = np.repeat([self._number_of(owner) for owner in owners], slots.shape[1])
        flat = slots.ravel()
        for slot in {*flat.tolist()}:
            self._slab(slot).owners.update(numbers[flat == slot].tolist())

    def _number_of(self, owner: PageOwner) -> int:
        """Number of an owner, a new one the first time."""
        number = self._owner_numbers.get(owner)
        if number is None:
            number = self._owner_numbers[owner] = self._next_owner
            self._owners[number] = owner
            self._next_owner += 1
        return number

    def journal(self) -> PageJournal:
        """Begin to tell what becomes of pages; as long as the journal is kept."""
        journal = PageJournal()
        self._journals.add(journal)
        return journal

    def write(self, page_ids: Tensor, pages: Tensor, counts: Tensor) -> None:
        """Fill fresh pages and seal them.

        Args:
            page_ids: ``[pages]`` int64 ids of one pool, none sealed yet.
            pages: ``[pages, page_bytes]`` uint8 as slabs keep them.
            counts: ``[pages]`` int64 live states.

        Raises:
            ValueError: A page is sealed already.
        """
        ids = self._owned(page_ids)
        if self._states_of[ids].any():
            sealed = {*(ids[self._states_of[ids] > 0] // self._stride).tolist()}
            raise ValueError(f"sealed pages of slabs {sorted(sealed)} cannot be written again")
        if self._copier is None:
            for slot, index, rows in self._by_slab(page_ids):
                self._fill(self._slab(slot), index, pages, rows, counts)
        elif len(ids):
            pages, size = pages.to(self._device).contiguous(), pages.shape[1]
            source = pages.data_ptr() + size * np.arange(len(pages))
            self._copier.copy(source, self._addresses(ids), size)
            self._states_of[ids] = counts.cpu().numpy()

    def copy(self, sources: _Ids, targets: _Ids, num_bytes: int) -> None:
        """Copy bytes between places of the device, where ``has_copier``; see ``PageCopier``."""
        assert self._copier is not None
        self._copier.copy(sources, targets, num_bytes)

    def truncate(self, page_ids: Tensor, pages: Tensor, counts: Tensor) -> None:
        """Replace sealed pages of a single owner by shorter ones.

        Args:
            page_ids: ``[pages]`` int64 ids of one pool.
            pages: ``[pages, page_bytes]`` uint8 as slabs keep them.
            counts: ``[pages]`` int64 live states, fewer than before.

        Raises:
            ValueError: A page is shared.
        """
        for slot, index, rows in self._by_slab(page_ids):
            slab = self._slab(slot)
            if bool((slab.refcounts[index] != 1).any()):
                raise ValueError(f"shared pages of slab {slot} cannot be truncated")
            self._fill(slab, index, pages, rows, counts)

    def to_slab(self, layout: PageLayout, pages: Tensor) -> Tensor:
        """Bytes that slabs keep for pages as ``store/layout.py`` orders them."""
        return pages if self.order is None else self.order.to_slab(layout, pages.to(self._device))

    def _fill(self, slab: Slab, index: Tensor, pages: Tensor, rows: Tensor, counts: Tensor) -> None:
        """Write ``pages[rows]`` to the places ``index`` of a slab."""
        place = _places(index, self._device)
        slab.data[place] = pages[_places(rows, pages.device)].to(self._device)
        slab.counts[index] = counts.cpu()[rows].to(torch.int32)

    def share(self, page_ids: Tensor) -> None:
        """Add one owner to each page."""
        self._owners_of[self._owned(page_ids)] += 1

    def free(self, page_ids: Tensor) -> int:
        """Take one owner from each page; a page without owners is free, an empty slab goes.

        Args:
            page_ids: ``[pages]`` int64 ids, each at most once.

        Returns:
            Bytes of the slabs that were released.
        """
        ids = self._owned(page_ids)
        self._owners_of[ids] -= 1
        gone = np.sort(ids[self._owners_of[ids] == 0])
        self._states_of[gone] = 0
        slots = gone // self._stride
        for journal in self._journals:
            journal.is_complete &= len(gone) == len(ids)
            for key, events in self._by_pool(slots, self._addresses(gone)):
                journal.events.append(PageEvent(key, np.sort(events), None))
        released, per_slot = 0, np.bincount(slots)
        for slot in np.flatnonzero(per_slot).tolist():
            slab, num_pages = self._slab(slot), int(per_slot[slot])
            self._add_free(slot, num_pages)
            self._count(slab.key, num_pages)
            if slab.num_free == slab.num_pages:
                released += self._release(slot)
        return released

    def _by_pool(self, slots: _Ids, addresses: _Ids) -> Iterator[tuple[PoolKey, _Ids]]:
        """Addresses of pages in some slots, pool by pool."""
        keys: dict[PoolKey, list[int]] = {}
        for slot in {*slots.tolist()}:
            keys.setdefault(self._slab(slot).key, []).append(slot)
        for key, own in keys.items():
            is_own = np.zeros(len(self._slabs), dtype=np.bool_)
            is_own[own] = True
            yield key, addresses[is_own[slots]]

    def _release(self, slot: int) -> int:
        """Give up a slab whose pages are all free; its bytes."""
        slab = self._slab(slot)
        self._count(slab.key, -slab.num_pages, -slab.num_pages)
        del self._pools[slab.key][slot]
        self._slabs[slot] = None
        self._free_at[slot] = self._size[slot] = 0
        heapq.heappush(self._empty_slots, slot)
        return self._slab_bytes(slab.layout, slab.num_pages)

    @property
    def slack_bytes(self) -> int:
        """Bytes of free pages with their counts, and of what slabs lose to alignment."""
        free = sum(
            num_free * held_page_bytes(self._layout_of(key))
            for key, (num_free, _) in self._totals.items()
        )
        return free + self.alignment_bytes

    @property
    def alignment_bytes(self) -> int:
        """Bytes that slabs lose to alignment."""
        return sum(
            len(slots) * _spare_bytes(self._alignment(self._layout_of(key)))
            for key, slots in self._pools.items()
        )

    def compact(self, max_pages: int | None = None) -> tuple[PageMoves | None, int]:
        """Move pages out of slabs that a pool can do without, and release those.

        Afterwards every pool has fewer free pages than its smallest slab has pages, so that no
        slab's pages would fit into the free places of the others. Owners, counts and bytes of a
        page stay; whoever keeps its id is told (``own``) or must apply the moves.

        Args:
            max_pages: Stop when so many were moved, a slab's more at most; None moves all.

        Returns:
            The moves, None if no slab was released, and the bytes of the released slabs.
        """
        moves = [_no_moves()]
        released = 0
        numbers: set[int] = set()
        left = max_pages
        for key in list(self._pools):
            emptied = [] if left is not None and left <= 0 else self._dispensable(key, left)
            if not emptied:
                continue
            numbers.update(*(self._slab(slot).owners for slot in emptied))
            moves.append(self._empty(key, emptied))
            released += sum(self._release(slot) for slot in emptied)
            left = None if left is None else left - len(moves[-1][0])
        if not released:
            return None, 0
        old_ids, new_ids = (np.concatenate(each) for each in zip(*moves, strict=True))
        found = PageMoves.of(old_ids, new_ids)
        self._num_moved += len(old_ids)
        for number in sorted(numbers) if len(old_ids) else ():
            if (owner := self._owners.get(number)) is not None:
                owner.remap(found)
        return found, released

    def _dispensable(self, key: PoolKey, max_pages: int | None) -> list[int]:
        """Slabs whose pages the others of a pool can take, the emptiest first."""
        free = self._totals[key][0]
        slots = np.fromiter(self._pools[key], dtype=np.int64)
        pages = self._pages_at[slots]
        if not len(slots) or free < pages.min():
            return []
        used = pages - self._free_at[slots]
        found, moved = [], 0
        for at in (used / pages).argsort(kind="stable").tolist():
            if max_pages is not None and moved >= max_pages:
                break
            # the others have room for its pages: free places are as many as it has places
            if pages[at] <= free:
                free -= int(pages[at])
                moved += int(used[at])
                found.append(int(slots[at]))
            elif free < pages.min():
                break
        return found

    def _empty(self, key: PoolKey, slots: Sequence[int]) -> tuple[_Ids, _Ids]:
        """Move the pages of some slabs to the others of their pool; old and new ids."""
        gone = set(slots)
        every = np.fromiter((slot for slot in self._pools[key] if slot not in gone), np.int64)
        kept = iter(every[self._free_at[every] > 0].tolist())
        moves = [_no_moves()]
        target, places = -1, np.empty(0, dtype=np.int64)
        for slot in slots:
            pages = np.flatnonzero(self._slab(slot).refcounts.numpy())
            while pages.size:
                if not places.size:
                    target = next(kept)
                    places = np.flatnonzero(self._slab(target).refcounts.numpy() == 0)
                    continue
                num = min(pages.size, places.size)
                self._move(slot, pages[:num], target, places[:num])
                ids = (slot * self._stride + pages[:num], target * self._stride + places[:num])
                moves.append(ids)
                pages, places = pages[num:], places[num:]
        old_ids, new_ids = (np.concatenate(each) for each in zip(*moves, strict=True))
        if len(old_ids):
            old, new = self._addresses(old_ids), self._addresses(new_ids)
            if self._copier is not None:
                self._copier.copy(old, new, self._layout_of(key).page_bytes)
            order = old.argsort()
            for journal in self._journals:
                journal.events.append(PageEvent(key, old[order], new[order]))
        return old_ids, new_ids

    def _move(self, slot: int, pages: _Ids, target: int, places: _Ids) -> None:
        """Hand pages of one slab to free places of another; a copier copies their bytes later."""
        source, other = self._slab(slot), self._slab(target)
        if self._copier is None:
            index, place = torch.from_numpy(pages), torch.from_numpy(places)
            other.data[_places(place, self._device)] = source.data[_places(index, self._device)]
        for old, new in ((source.refcounts, other.refcounts), (source.counts, other.counts)):
            new.numpy()[places] = old.numpy()[pages]
            old.numpy()[pages] = 0
        other.owners.update(source.owners)
        self._add_free(slot, len(pages))
        self._add_free(target, -len(pages))

    def gather(self, page_ids: Tensor) -> Tensor:
        """Copy of pages of one pool.

        Args:
            page_ids: ``[pages]`` int64 ids.

        Returns:
            ``[pages, page_bytes]`` uint8.
        """
        layout, out = self._gather(page_ids, lambda layout: (slice(0, layout.page_bytes),))
        if layout is None or self.order is None:
            return out
        return self.order.from_slab(layout, out)

    def gather_frames(self, page_ids: Tensor) -> Tensor:
        """Copy of what frames the codes of pages of one pool: headers and position streams.

        No order of a page moves them, and they are a hundredth of it.

        Args:
            page_ids: ``[pages]`` int64 ids.

        Returns:
            ``[pages, frame_bytes]`` uint8, see ``sphkv.store.layout.PageFrames``.
        """
        return self._gather(page_ids, frame_parts)[1]

    def _gather(
        self, page_ids: Tensor, parts_of: Callable[[PageLayout], Sequence[slice]]
    ) -> tuple[PageLayout | None, Tensor]:
        """Layout of pages of one pool, None without any, and some of their bytes, side by side."""
        if not page_ids.numel():
            return None, torch.empty((0, 0), dtype=torch.uint8, device=self._device)
        ids = page_ids.cpu()
        first = self._slab(int(ids[0]) // self._stride)
        parts = parts_of(first.layout)
        width = sum(part.stop - part.start for part in parts)
        out = first.data.new_empty((len(ids), width))
        if self._copier is not None:
            self._copy_out(ids, parts, out)
            return first.layout, out
        groups = list(self._by_slab(ids))
        if any(self._slab(slot).key != first.key for slot, _, _ in groups):
            raise ValueError("gathered pages must share a tier and a position mode")
        for slot, index, rows in groups:
            data = self._slab(slot).data
            where, to, at = _places(index, self._device), _places(rows, self._device), 0
            for part in parts:
                size = part.stop - part.start
                out[to, at : at + size] = data[where, part]
                at += size
        return first.layout, out

    def _copy_out(self, page_ids: Tensor, parts: Sequence[slice], out: Tensor) -> None:
        """Copy parts of pages, side by side, to rows ``out [pages, bytes]``."""
        assert self._copier is not None
        pages, at = self._addresses(page_ids.numpy()), 0
        rows = out.data_ptr() + out.shape[1] * np.arange(len(out))
        for part in parts:
            self._copier.copy(pages + part.start, rows + at, part.stop - part.start)
            at += part.stop - part.start

    def first_positions(self, page_ids: Tensor) -> Tensor:
        """``[pages]`` int64 position of each page's first state, where the pages live."""
        out = torch.zeros(page_ids.numel(), dtype=torch.int64, device=self._device)
        for slot, index, rows in self._by_slab(page_ids):
            found = first_positions(self._slab(slot).data)
            out[_places(rows, self._device)] = found[_places(index, self._device)]
        return out

    def refcounts(self, page_ids: Tensor) -> Tensor:
        """``[pages]`` int64 owners of each page."""
        return torch.from_numpy(self._owners_of[self._owned(page_ids)].astype(np.int64))

    def counts(self, page_ids: Tensor) -> Tensor:
        """``[pages]`` int64 live states of each page."""
        return torch.from_numpy(self._states_of[self._owned(page_ids)].astype(np.int64))

    def address(self, page_id: int) -> int:
        """Memory address of a page; valid until the page is freed."""
        return int(self.addresses(torch.tensor([page_id]))[0])

    def addresses(self, page_ids: Tensor) -> Tensor:
        """Memory addresses of pages, for native kernels.

        Args:
            page_ids: Int64 ids of any shape; -1 marks unused entries.

        Returns:
            Int64 addresses of the same shape on the CPU; 0 where the id is -1.
        """
        ids = page_ids.cpu().numpy()
        used = ids >= 0
        out = np.zeros(ids.shape, dtype=np.int64)
        out[used] = self._addresses(ids[used])
        return torch.from_numpy(out)

    def _addresses(self, page_ids: _Ids) -> _Ids:
        """Addresses of pages ``[pages]``."""
        slots, index = page_ids // self._stride, page_ids % self._stride
        if slots.size and (slots.max() >= len(self._slabs) or not self._size[slots].all()):
            raise ValueError(f"pages {page_ids.tolist()} are not all there: an id is stale")
        found: _Ids = self._address[slots] + index * self._size[slots]
        return found

    def _slab(self, slot: int) -> Slab:
        slab = self._slabs[slot] if 0 <= slot < len(self._slabs) else None
        if slab is None:
            raise ValueError(f"no slab {slot}: a page id is stale")
        return slab

    def _by_slab(self, page_ids: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Group ids by slab: slot, index in the slab, place in ``page_ids``; all on the CPU."""
        slots, index = np.divmod(page_ids.cpu().numpy(), self._stride)
        parts = []
        if slots.size and (slots == slots[0]).all():
            parts = [np.arange(slots.size)]
        elif slots.size:
            order = slots.argsort(kind="stable")
            parts = np.split(order, np.flatnonzero(np.diff(slots[order])) + 1)
        groups = []
        for rows in parts:
            slab = self._slab(slot := int(slots[rows[0]]))
            in_slab = index[rows]
            if in_slab.max() >= slab.num_pages or not slab.refcounts.numpy()[in_slab].all():
                raise ValueError(f"pages {page_ids.tolist()} are not all owned")
            groups.append((slot, torch.from_numpy(in_slab), torch.from_numpy(rows)))
        return iter(groups)


def _no_moves() -> tuple[_Ids, _Ids]:
    return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)


def _places(index: Tensor, device: torch.device) -> slice | Tensor:
    """Places ``index [n]`` on a device; a slice where they follow one another, which is faster."""
    places = index.numpy()
    if (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return index.to(device, non_blocking=True)
