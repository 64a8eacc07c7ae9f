# SPDX-License-Identifier: Apache-2.0
"""Free pages: slabs of equal pages under one byte limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.store.layout import PageLayout, first_positions
from sphkv.store.order import PageOrder
from sphkv.store.paging import PositionMode

_Ids = NDArray[np.int64]
PoolKey = tuple[int, PositionMode]
"""Tier id and position mode: what decides the layout of a page."""

# A new slab is at least this share of its pool, so that slabs stay few as a pool grows.
_GROWTH_SHARE = 16


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
    """

    key: PoolKey
    layout: PageLayout
    data: Tensor
    refcounts: Tensor
    counts: Tensor
    num_free: int
    buffer: Tensor

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
        id_after: Id of every page afterwards, by its id before, up to the last that moved.
    """

    old_ids: Tensor
    new_ids: Tensor
    id_after: _Ids

    @classmethod
    def of(cls, old_ids: _Ids, new_ids: _Ids) -> PageMoves:
        """Moves from ids to others, in any order."""
        order = old_ids.argsort()
        old_ids, new_ids = old_ids[order], new_ids[order]
        id_after = np.arange(old_ids[-1] + 1 if len(old_ids) else 0)
        id_after[old_ids] = new_ids
        return cls(torch.from_numpy(old_ids), torch.from_numpy(new_ids), id_after)

    def apply(self, page_ids: Tensor) -> Tensor:
        """Ids after the move, of any shape; those of pages that stayed and -1 are kept."""
        ids = page_ids.numpy()
        is_known = (ids >= 0) & (ids < len(self.id_after))
        found = self.id_after[np.where(is_known, ids, 0)] if len(self.id_after) else ids
        return torch.from_numpy(np.where(is_known, found, ids))


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
    ) -> None:
        """Start without slabs.

        Args:
            layout_of: Layout of each pool.
            max_slab_pages: Pages of the largest slab.
            device: Where pages live.
            order: How slabs keep the bytes of a page; as ``store/layout.py`` has them if None.
        """
        if max_slab_pages < 1:
            raise ValueError(f"max_slab_pages must be positive, got {max_slab_pages}")
        self._layout_of = layout_of
        self._stride = max_slab_pages
        self._device = torch.device(device)
        self.order = order
        self._slabs: list[Slab | None] = []
        self._pools: dict[PoolKey, list[int]] = {}
        # free pages and all pages of each pool
        self._totals: dict[PoolKey, tuple[int, int]] = {}

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
        if freed is not None:
            for slot, index, _ in self._by_slab(freed):
                freed_pages[slot] = int((self._slab(slot).refcounts[index] == 1).sum())
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
                self._pools.setdefault(key, []).append(self._place(slab))
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
        for slot, held in enumerate(self._slabs):
            if held is None:
                self._slabs[slot] = slab
                return slot
        self._slabs.append(slab)
        return len(self._slabs) - 1

    def _take(self, key: PoolKey, wanted: int) -> Tensor:
        parts = [np.empty(0, dtype=np.int64)]
        self._count(key, -wanted)
        for slot in self._pools.get(key, []):
            slab = self._slab(slot)
            if wanted == 0 or slab.num_free == 0:
                continue
            refcounts = slab.refcounts.numpy()
            index = np.flatnonzero(refcounts == 0)[:wanted]
            refcounts[index] = 1
            slab.num_free -= len(index)
            wanted -= len(index)
            parts.append(slot * self._stride + index)
        return torch.from_numpy(np.concatenate(parts))

    def write(self, page_ids: Tensor, pages: Tensor, counts: Tensor) -> None:
        """Fill fresh pages and seal them.

        Args:
            page_ids: ``[pages]`` int64 ids of one pool, none sealed yet.
            pages: ``[pages, page_bytes]`` uint8 as slabs keep them.
            counts: ``[pages]`` int64 live states.

        Raises:
            ValueError: A page is sealed already.
        """
        for slot, index, rows in self._by_slab(page_ids):
            slab = self._slab(slot)
            if slab.counts.numpy()[index.numpy()].any():
                raise ValueError(f"sealed pages of slab {slot} cannot be written again")
            self._fill(slab, index, pages, rows, counts)

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
        for slot, index, _ in self._by_slab(page_ids):
            self._slab(slot).refcounts[index] += 1

    def free(self, page_ids: Tensor) -> int:
        """Take one owner from each page; a page without owners is free, an empty slab goes.

        Args:
            page_ids: ``[pages]`` int64 ids, each at most once.

        Returns:
            Bytes of the slabs that were released.
        """
        released = 0
        for slot, index, _ in self._by_slab(page_ids):
            slab = self._slab(slot)
            slab.refcounts[index] -= 1
            gone = index[slab.refcounts[index] == 0]
            slab.counts[gone] = 0
            slab.num_free += gone.numel()
            self._count(slab.key, gone.numel())
            if slab.num_free == slab.num_pages:
                released += self._release(slot)
        return released

    def _release(self, slot: int) -> int:
        """Give up a slab whose pages are all free; its bytes."""
        slab = self._slab(slot)
        self._count(slab.key, -slab.num_pages, -slab.num_pages)
        self._pools[slab.key].remove(slot)
        self._slabs[slot] = None
        return self._slab_bytes(slab.layout, slab.num_pages)

    @property
    def slack_bytes(self) -> int:
        """Bytes of free pages with their counts, and of what slabs lose to alignment."""
        slack = 0
        for key, (num_free, _) in self._totals.items():
            layout = self._layout_of(key)
            slack += num_free * held_page_bytes(layout)
            slack += len(self._pools.get(key, ())) * _spare_bytes(self._alignment(layout))
        return slack

    def compact(self) -> tuple[PageMoves | None, int]:
        """Move pages out of slabs that a pool can do without, and release those.

        Afterwards every pool has fewer free pages than its smallest slab has pages, so that no
        slab's pages would fit into the free places of the others. Owners, counts and bytes of a
        page stay; whoever keeps its id must apply the moves.

        Returns:
            The moves, None if no slab was released, and the bytes of the released slabs.
        """
        moves = [_no_moves()]
        released = 0
        for key in self._pools:
            emptied = self._dispensable(key)
            if not emptied:
                continue
            moves.append(self._empty(key, emptied))
            released += sum(self._release(slot) for slot in emptied)
        if not released:
            return None, 0
        old_ids, new_ids = (np.concatenate(each) for each in zip(*moves, strict=True))
        return PageMoves.of(old_ids, new_ids), released

    def _dispensable(self, key: PoolKey) -> list[int]:
        """Slabs whose pages the others of a pool can take, the emptiest first."""

        def used_share(slot: int) -> float:
            slab = self._slab(slot)
            return 1 - slab.num_free / slab.num_pages

        free = self._totals[key][0]
        found = []
        for slot in sorted(self._pools[key], key=used_share):
            # the others have room for its pages: free places are as many as it has places
            if self._slab(slot).num_pages <= free:
                free -= self._slab(slot).num_pages
                found.append(slot)
        return found

    def _empty(self, key: PoolKey, slots: Sequence[int]) -> tuple[_Ids, _Ids]:
        """Move the pages of some slabs to the others of their pool; old and new ids."""
        kept = iter([slot for slot in self._pools[key] if slot not in slots])
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
        return old_ids, new_ids

    def _move(self, slot: int, pages: _Ids, target: int, places: _Ids) -> None:
        """Copy pages of one slab to free places of another, where the pages live."""
        source, other = self._slab(slot), self._slab(target)
        index, place = torch.from_numpy(pages), torch.from_numpy(places)
        other.data[_places(place, self._device)] = source.data[_places(index, self._device)]
        for old, new in ((source.refcounts, other.refcounts), (source.counts, other.counts)):
            new[place] = old[index]
            old[index] = 0
        source.num_free += len(pages)
        other.num_free -= len(pages)

    def gather(self, page_ids: Tensor) -> Tensor:
        """Copy of pages of one pool.

        Args:
            page_ids: ``[pages]`` int64 ids.

        Returns:
            ``[pages, page_bytes]`` uint8.
        """
        groups = list(self._by_slab(page_ids))
        if not groups:
            return torch.empty((0, 0), dtype=torch.uint8, device=self._device)
        first = self._slab(groups[0][0])
        if any(self._slab(slot).key != first.key for slot, _, _ in groups):
            raise ValueError("gathered pages must share a tier and a position mode")
        out = first.data.new_empty((page_ids.numel(), first.layout.page_bytes))
        for slot, index, rows in groups:
            data = self._slab(slot).data
            out[_places(rows, self._device)] = data[_places(index, self._device)]
        return out if self.order is None else self.order.from_slab(first.layout, out)

    def first_positions(self, page_ids: Tensor) -> Tensor:
        """``[pages]`` int64 position of each page's first state, where the pages live."""
        out = torch.zeros(page_ids.numel(), dtype=torch.int64, device=self._device)
        for slot, index, rows in self._by_slab(page_ids):
            found = first_positions(self._slab(slot).data)
            out[_places(rows, self._device)] = found[_places(index, self._device)]
        return out

    def refcounts(self, page_ids: Tensor) -> Tensor:
        """``[pages]`` int64 owners of each page."""
        return self._lookup(page_ids, lambda slab: slab.refcounts)

    def counts(self, page_ids: Tensor) -> Tensor:
        """``[pages]`` int64 live states of each page."""
        return self._lookup(page_ids, lambda slab: slab.counts)

    def _lookup(self, page_ids: Tensor, column: Callable[[Slab], Tensor]) -> Tensor:
        out = torch.zeros(page_ids.numel(), dtype=torch.int64)
        for slot, index, rows in self._by_slab(page_ids):
            out[rows] = column(self._slab(slot))[index].to(torch.int64)
        return out

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
        flat = page_ids.cpu().numpy().reshape(-1)
        out = np.zeros(len(flat), dtype=np.int64)
        used = flat >= 0
        slots, index = np.divmod(flat[used], self._stride)
        present, which = np.unique(slots, return_inverse=True)
        slabs = [self._slab(slot).data for slot in present.tolist()]
        first = np.array([data.data_ptr() for data in slabs], dtype=np.int64)
        size = np.array([data.shape[1] for data in slabs], dtype=np.int64)
        if slabs:
            out[used] = first[which] + index * size[which]
        return torch.from_numpy(out).reshape(page_ids.shape)

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
