# SPDX-License-Identifier: Apache-2.0
"""Free pages: slabs that grow and go with what is asked for, pages that share and move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from sphkv.store.layout import PageLayout, first_positions, frame_parts
from sphkv.store.moves import PageFollowers, PageJournal, PageMoves, PageOwner
from sphkv.store.order import PageCopier, PageOrder
from sphkv.store.slabs import (
    Ids,
    PoolKey,
    Slab,
    SlabTable,
    held_page_bytes,
    slab_bytes,
    spare_bytes,
)

# A new slab is at least this share of its pool, so that slabs stay few as a pool grows.
_GROWTH_SHARE = 16


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
        self._device = torch.device(device)
        self.order = order
        self._copier = copier
        self._slabs = SlabTable(max_slab_pages)
        self._followers = PageFollowers()
        self._num_moved = 0

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
        return iter(self._slabs)

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
            ids = self._slabs.owned(freed)
            slots = ids[self._slabs.refcounts[ids] == 1] // self._slabs.stride
            per_slot = np.bincount(slots)
            freed_pages = {slot: int(per_slot[slot]) for slot in np.flatnonzero(per_slot).tolist()}
        delta = 0
        emptied = set()
        for slot, num_freed in freed_pages.items():
            slab = self._slabs[slot]
            if slab.num_free + num_freed == slab.num_pages:
                emptied.add(slot)
                delta -= self._slab_bytes(slab.layout, slab.num_pages)
        for key, wanted in requests.items():
            free, total = self._slabs.total(key)
            for slot, num_freed in freed_pages.items():
                slab = self._slabs[slot]
                if slab.key == key:
                    free += num_freed
                    if slot in emptied:
                        free, total = free - slab.num_pages, total - slab.num_pages
            layout = self._layout_of(key)
            sizes = Counter(self._slab_sizes(wanted - free, total))
            delta += sum(num * self._slab_bytes(layout, pages) for pages, num in sizes.items())
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
        totals = self._slabs.totals
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
            delta += pages * held_page_bytes(layout) + slabs * spare_bytes(self._alignment(layout))
        return delta

    def _slab_sizes(self, missing: int, pool_pages: int) -> list[int]:
        """Pages of the slabs to be made for ``missing`` pages of a pool that has some already."""
        if missing <= 0:
            return []
        num_full, rest = divmod(missing, self._slabs.stride)
        sizes = [self._slabs.stride] * num_full
        if rest:
            pool_pages += num_full * self._slabs.stride
            sizes.append(min(self._slabs.stride, max(rest, pool_pages // _GROWTH_SHARE)))
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
            free, total = self._slabs.total(key)
            fresh[key] = self._new_slabs(key, self._slab_sizes(wanted - free, total))
        self._slabs.place(*(slab for slabs in fresh.values() for slab in slabs))
        return {
            key: torch.from_numpy(self._slabs.take(key, wanted)) for key, wanted in requests.items()
        }

    def _new_slabs(self, key: PoolKey, sizes: Sequence[int]) -> list[Slab]:
        """Slabs of so many pages each."""
        layout = self._layout_of(key)
        size, alignment = layout.page_bytes, self._alignment(layout)
        spare, slabs = spare_bytes(alignment), []
        for num_pages in sizes:
            num_bytes = num_pages * size + spare
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            begin = -buffer.data_ptr() % alignment
            # one call instead of three: there are hundreds of slabs
            data = buffer.as_strided((num_pages, size), (size, 1), begin)
            slabs.append(Slab(key, layout, data, num_pages, buffer))
        return slabs

    def own(self, owner: PageOwner, page_ids: Tensor) -> None:
        """Note who keeps ids, so that it is told when the pages move.

        Args:
            owner: Kept weakly.
            page_ids: ``[pages]`` int64 ids on the CPU.
        """
        number = self._followers.number_of(owner)
        slots = page_ids.numpy() // self._slabs.stride
        for slot in {*slots.tolist()}:
            self._slabs[slot].owners.add(number)

    def own_alike(self, owners: Sequence[PageOwner], page_ids: Tensor) -> None:
        """Note who keeps ids where every owner has as many.

        Args:
            owners: Kept weakly.
            page_ids: ``[pages]`` int64 ids on the CPU, owner by owner.
        """
        slots = (page_ids.numpy() // self._slabs.stride).reshape(len(owners), -1)
        numbers = np.repeat([self._followers.number_of(owner) for owner in owners], slots.shape[1])
        flat = slots.ravel()
        for slot in {*flat.tolist()}:
            self._slabs[slot].owners.update(numbers[flat == slot].tolist())

    def own_each(self, owners: Sequence[PageOwner], which: Ids, page_ids: Tensor) -> None:
        """Note who keeps which ids.

        Args:
            owners: Kept weakly.
            which: ``[pages]`` number in ``owners`` of who keeps each page; quick if rising.
            page_ids: ``[pages]`` int64 ids on the CPU.
        """
        slots = page_ids.numpy() // self._slabs.stride
        numbers = [self._followers.number_of(owner) for owner in owners]
        # pages of one owner and slab lie together, so that few pairs come twice
        starts = np.flatnonzero(np.diff(slots, prepend=-1) | np.diff(which, prepend=-1))
        for slot, owner in zip(slots[starts].tolist(), which[starts].tolist(), strict=True):
            self._slabs[slot].owners.add(numbers[owner])

    def journal(self) -> PageJournal:
        """Begin to tell what becomes of pages; as long as the journal is kept."""
        return self._followers.journal()

    def write(self, page_ids: Tensor, pages: Tensor, counts: Tensor) -> None:
        """Fill fresh pages and seal them.

        Args:
            page_ids: ``[pages]`` int64 ids of one pool, none sealed yet.
            pages: ``[pages, page_bytes]`` uint8 as slabs keep them.
            counts: ``[pages]`` int64 live states.

        Raises:
            ValueError: A page is sealed already.
        """
        self.write_parts(page_ids, [pages], counts)

    def write_parts(self, page_ids: Tensor, parts: Sequence[Tensor], counts: Tensor) -> None:
        """``write`` of pages in several tensors, one behind the other."""
        ids = self._slabs.owned(page_ids)
        if self._slabs.counts[ids].any():
            sealed = {*(ids[self._slabs.counts[ids] > 0] // self._slabs.stride).tolist()}
            raise ValueError(f"sealed pages of slabs {sorted(sealed)} cannot be written again")
        if self._copier is None:
            pages = parts[0] if len(parts) == 1 else torch.cat([*parts])
            for slot, index, rows in self._slabs.by_slab(page_ids):
                self._fill(self._slabs[slot], index, pages, rows, counts)
        elif len(ids):
            size, held = parts[0].shape[1], [part.to(self._device).contiguous() for part in parts]
            sources = [part.data_ptr() + size * np.arange(len(part)) for part in held]
            self._copier.copy(np.concatenate(sources), self._slabs.addresses(ids), size)
            self._slabs.counts[ids] = counts.cpu().numpy()

    def copy(self, sources: Ids, targets: Ids, num_bytes: int) -> None:
        """Copy bytes between places of the device, where ``has_copier``; see ``PageCopier``."""
        assert self._copier is not None
        self._copier.copy(sources, targets, num_bytes)

    def collect(self, sources: Tensor, target: Tensor, *, piece: int, stride: int) -> None:
        """Copies from places of the device, where ``has_copier``; see ``PageCopier.gather``."""
        assert self._copier is not None
        self._copier.gather(sources, target, piece=piece, stride=stride)

    def truncate(self, page_ids: Tensor, pages: Tensor, counts: Tensor) -> None:
        """Replace sealed pages of a single owner by shorter ones.

        Args:
            page_ids: ``[pages]`` int64 ids of one pool.
            pages: ``[pages, page_bytes]`` uint8 as slabs keep them.
            counts: ``[pages]`` int64 live states, fewer than before.

        Raises:
            ValueError: A page is shared.
        """
        for slot, index, rows in self._slabs.by_slab(page_ids):
            slab = self._slabs[slot]
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
        self._slabs.refcounts[self._slabs.owned(page_ids)] += 1

    def free(self, page_ids: Tensor) -> int:
        """Take one owner from each page; a page without owners is free, an empty slab goes.

        Args:
            page_ids: ``[pages]`` int64 ids, each at most once.

        Returns:
            Bytes of the slabs that were released.
        """
        ids = self._slabs.owned(page_ids)
        self._slabs.refcounts[ids] -= 1
        gone = np.sort(ids[self._slabs.refcounts[ids] == 0])
        self._slabs.counts[gone] = 0
        slots = gone // self._slabs.stride
        if self._followers.has_journals:
            pages = self._slabs.by_pool(slots, self._slabs.addresses(gone))
            self._followers.tell_gone(pages, is_all=len(gone) == len(ids))
        per_slot = np.bincount(slots)
        touched = np.flatnonzero(per_slot)
        self._slabs.add_free(touched, per_slot[touched])
        is_empty = self._slabs.num_free(touched) == self._slabs.num_pages(touched)
        return sum(map(self._release, touched[is_empty].tolist()))

    def _release(self, slot: int) -> int:
        """Give up a slab whose pages are all free; its bytes."""
        slab = self._slabs.remove(slot)
        return self._slab_bytes(slab.layout, slab.num_pages)

    @property
    def slack_bytes(self) -> int:
        """Bytes of free pages with their counts, and of what slabs lose to alignment."""
        free = sum(
            num_free * held_page_bytes(self._layout_of(key))
            for key, (num_free, _) in self._slabs.totals.items()
        )
        return free + self.alignment_bytes

    @property
    def alignment_bytes(self) -> int:
        """Bytes that slabs lose to alignment."""
        return sum(
            self._slabs.num_slabs(key) * spare_bytes(self._alignment(self._layout_of(key)))
            for key in self._slabs.pools()
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
        for key in self._slabs.pools():
            emptied = [] if left is not None and left <= 0 else self._dispensable(key, left)
            if not emptied:
                continue
            numbers.update(*(self._slabs[slot].owners for slot in emptied))
            moves.append(self._empty(key, emptied))
            released += sum(self._release(slot) for slot in emptied)
            left = None if left is None else left - len(moves[-1][0])
        if not released:
            return None, 0
        old_ids, new_ids = (np.concatenate(each) for each in zip(*moves, strict=True))
        found = PageMoves.of(old_ids, new_ids)
        self._num_moved += len(old_ids)
        if len(old_ids):
            self._followers.remap(numbers, found)
        return found, released

    def _dispensable(self, key: PoolKey, max_pages: int | None) -> list[int]:
        """Slabs whose pages the others of a pool can take, the emptiest first."""
        free, _ = self._slabs.total(key)
        slots = self._slabs.slots(key)
        pages = self._slabs.num_pages(slots)
        if not len(slots) or free < (least := pages.min()):
            return []
        used = pages - self._slabs.num_free(slots)
        # full ones come last, and there are many
        some, full = np.flatnonzero(used < pages), np.flatnonzero(used == pages)
        some = some[(used[some] / pages[some]).argsort(kind="stable")]
        found, moved = [], 0
        for at in chain(some.tolist(), map(int, full)):
            if max_pages is not None and moved >= max_pages:
                break
            # the others have room for its pages: free places are as many as it has places
            if pages[at] <= free:
                free -= int(pages[at])
                moved += int(used[at])
                found.append(int(slots[at]))
            elif free < least:
                break
        return found

    def _empty(self, key: PoolKey, slots: Sequence[int]) -> tuple[Ids, Ids]:
        """Move the pages of some slabs to the others of their pool; old and new ids."""
        every = self._slabs.slots(key)
        # most slabs of a store are full
        every = every[self._slabs.num_free(every) > 0]
        every = every[~np.isin(every, slots)]
        old_ids = self._slabs.pages_of(np.asarray(slots, dtype=np.int64), are_free=False)
        if not len(old_ids):
            return _no_moves()
        # as few of the others as have room, in the order they came
        room = self._slabs.num_free(every).cumsum()
        every = every[: int(np.searchsorted(room, len(old_ids))) + 1]
        new_ids = self._slabs.pages_of(every, are_free=True)[: len(old_ids)]
        old, new = self._slabs.addresses(old_ids), self._slabs.addresses(new_ids)
        if self._copier is not None:
            self._copier.copy(old, new, self._layout_of(key).page_bytes)
        self._move(old_ids, new_ids)
        self._followers.tell_moved(key, old, new)
        return old_ids, new_ids

    def _move(self, old_ids: Ids, new_ids: Ids) -> None:
        """Hand pages to free places; without a copier their bytes too, slab by slab."""
        table = self._slabs
        for held in (table.refcounts, table.counts):
            held[new_ids] = held[old_ids]
            held[old_ids] = 0
        sources, targets = old_ids // table.stride, new_ids // table.stride
        # pages of a slab lie together, so that a pair of slabs comes once
        starts = np.flatnonzero(np.diff(sources, prepend=-1) | np.diff(targets, prepend=-1))
        for first, end in pairwise([*starts.tolist(), len(old_ids)]):
            source, other = table[int(sources[first])], table[int(targets[first])]
            if self._copier is None:
                index, place = (
                    _places(torch.from_numpy(ids[first:end] % table.stride), self._device)
                    for ids in (old_ids, new_ids)
                )
                other.data[place] = source.data[index]
            other.owners.update(source.owners)
        left, taken = (
            np.bincount(slots, minlength=int(max(sources.max(), targets.max())) + 1)
            for slots in (sources, targets)
        )
        touched = np.flatnonzero(left - taken)
        table.add_free(touched, (left - taken)[touched])

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
        first = self._slabs[int(ids[0]) // self._slabs.stride]
        parts = parts_of(first.layout)
        width = sum(part.stop - part.start for part in parts)
        out = first.data.new_empty((len(ids), width))
        if self._copier is not None:
            self._copy_out(ids, parts, out)
            return first.layout, out
        groups = list(self._slabs.by_slab(ids))
        if any(self._slabs[slot].key != first.key for slot, _, _ in groups):
            raise ValueError("gathered pages must share a tier and a position mode")
        for slot, index, rows in groups:
            data = self._slabs[slot].data
            where, to, at = _places(index, self._device), _places(rows, self._device), 0
            for part in parts:
                size = part.stop - part.start
                out[to, at : at + size] = data[where, part]
                at += size
        return first.layout, out

    def _copy_out(self, page_ids: Tensor, parts: Sequence[slice], out: Tensor) -> None:
        """Copy parts of pages, side by side, to rows ``out [pages, bytes]``."""
        assert self._copier is not None
        pages, at = self._slabs.addresses(page_ids.numpy()), 0
        rows = out.data_ptr() + out.shape[1] * np.arange(len(out))
        for part in parts:
            self._copier.copy(pages + part.start, rows + at, part.stop - part.start)
            at += part.stop - part.start

    def first_positions(self, page_ids: Tensor) -> Tensor:
        """``[pages]`` int64 position of each page's first state, where the pages live."""
        out = torch.zeros(page_ids.numel(), dtype=torch.int64, device=self._device)
        for slot, index, rows in self._slabs.by_slab(page_ids):
            found = first_positions(self._slabs[slot].data)
            out[_places(rows, self._device)] = found[_places(index, self._device)]
        return out

    def refcounts(self, page_ids: Tensor) -> Tensor:
        """``[pages]`` int64 owners of each page."""
        return torch.from_numpy(self._slabs.refcounts[self._slabs.owned(page_ids)].astype(np.int64))

    def counts(self, page_ids: Tensor) -> Tensor:
        """``[pages]`` int64 live states of each page."""
        return torch.from_numpy(self._slabs.counts[self._slabs.owned(page_ids)].astype(np.int64))

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
        out[used] = self._slabs.addresses(ids[used])
        return torch.from_numpy(out)


def _no_moves() -> tuple[Ids, Ids]:
    return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)


def _places(index: Tensor, device: torch.device) -> slice | Tensor:
    """Places ``index [n]`` on a device; a slice where they follow one another, which is faster."""
    places = index.numpy()
    if (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return index.to(device, non_blocking=True)
