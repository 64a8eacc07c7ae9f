# SPDX-License-Identifier: Apache-2.0
"""Pages that move or go: what became of them, and who is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.store.slabs import Ids, PoolKey

# Ids that differ in no higher bit are near each other.
_NEAR_BITS = 7


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
    def of(cls, old_ids: Ids, new_ids: Ids) -> PageMoves:
        """Moves from ids to others, in any order."""
        order = old_ids.argsort()
        is_near = np.zeros((old_ids.max() >> _NEAR_BITS) + 2 if len(old_ids) else 1, np.bool_)
        is_near[old_ids >> _NEAR_BITS] = True
        return cls(torch.from_numpy(old_ids[order]), torch.from_numpy(new_ids[order]), is_near)

    def find(self, page_ids: Ids) -> tuple[Ids, Ids]:
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
    old: Ids
    new: Ids | None


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


class PageOwner(Protocol):
    """What keeps page ids and follows pages that move."""

    def remap(self, moves: PageMoves) -> None:
        """Replace the ids of pages that moved."""
        ...


class PageFollowers:
    """Who keeps ids or addresses of pages, and is told what becomes of them."""

    def __init__(self) -> None:
        """Nobody yet."""
        # owners by number: slabs are many, and a number is all that each keeps
        self._owners: WeakValueDictionary[int, PageOwner] = WeakValueDictionary()
        self._numbers: WeakKeyDictionary[PageOwner, int] = WeakKeyDictionary()
        self._next = 0
        self._journals: WeakSet[PageJournal] = WeakSet()

    def number_of(self, owner: PageOwner) -> int:
        """Number of an owner, which is kept weakly; a new one the first time."""
        number = self._numbers.get(owner)
        if number is None:
            number = self._numbers[owner] = self._next
            self._owners[number] = owner
            self._next += 1
        return number

    def journal(self) -> PageJournal:
        """Begin to tell what becomes of pages; as long as the journal is kept."""
        journal = PageJournal()
        self._journals.add(journal)
        return journal

    @property
    def has_journals(self) -> bool:
        """Whether somebody keeps addresses."""
        return bool(self._journals)

    def tell_gone(self, pages: Iterable[tuple[PoolKey, Ids]], *, is_all: bool) -> None:
        """Note pages that went in every journal.

        Args:
            pages: Addresses they had, pool by pool.
            is_all: Whether no page lost one of several owners besides.
        """
        events = [PageEvent(key, np.sort(addresses), None) for key, addresses in pages]
        for journal in self._journals:
            journal.is_complete &= is_all
            journal.events.extend(events)

    def tell_moved(self, key: PoolKey, old: Ids, new: Ids) -> None:
        """Note the addresses ``[pages]`` of pages of a pool that moved in every journal."""
        order = old.argsort()
        for journal in self._journals:
            journal.events.append(PageEvent(key, old[order], new[order]))

    def remap(self, numbers: Iterable[int], moves: PageMoves) -> None:
        """Have owners of some numbers that are still there replace their ids."""
        for number in sorted(numbers):
            if (owner := self._owners.get(number)) is not None:
                owner.remap(moves)
