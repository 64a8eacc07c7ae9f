# SPDX-License-Identifier: Apache-2.0
"""What a store keeps for one sequence: pointer tables, open tails, and what it shows of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.core.contract import StateCodec
from sphkv.store.config import StoreConfig
from sphkv.store.layout import PageLayout
from sphkv.store.moves import PageMoves
from sphkv.store.paging import PositionMode
from sphkv.store.slabs import PoolKey

UNUSED = -1
_MIN_CAPACITY = 4
_TAG_MODES = 4
_Integers = NDArray[np.integer[Any]]


def page_tag(key: PoolKey) -> int:
    """Tag of a page: its tier id and position mode in one small integer."""
    tier_id, mode = key
    return tier_id * _TAG_MODES + int(mode)


def pool_of_tag(tag: int) -> PoolKey:
    """Tier id and position mode of a tag."""
    return tag // _TAG_MODES, PositionMode(tag % _TAG_MODES)


def tier_ids_of(tags: Tensor) -> Tensor:
    """Tier id of each tag, in the shape and dtype of ``tags``."""
    return tags // _TAG_MODES


class PointerTable:
    """Pages of one layer of one sequence, one row per KV head.

    Rows are filled from the left, in no particular order of positions; entries past a head's
    count are -1. The table grows geometrically, so appending a page is cheap on average.

    Attributes:
        page_ids: ``[heads, capacity]`` int64.
        tags: ``[heads, capacity]`` int16, see ``page_tag``; -1 in unused entries.
        num_pages: ``[heads]`` int64 entries in use.
        version: Rises with every change, so that readers can keep what they derived.
        entry_bytes: Bytes of one entry of one head.
    """

    entry_bytes: ClassVar[int] = torch.int64.itemsize + torch.int16.itemsize

    def __init__(self, num_heads: int) -> None:
        """Start empty, with no capacity; tables stay with the host, who reads them."""
        self._hold(
            np.empty((num_heads, 0), dtype=np.int64),
            np.empty((num_heads, 0), dtype=np.int16),
            np.zeros(num_heads, dtype=np.int64),
        )
        self.version = 0
        self._marks: NDArray[np.int64] | None = None
        self._counted: tuple[int, dict[int, int]] = (0, {})
        self._fullest = (0, 0)

    def _hold(self, page_ids: _Integers, tags: _Integers, num_pages: _Integers) -> None:
        """Keep arrays, and tensors of the same memory: small steps are quicker on arrays."""
        self._arrays = (page_ids, tags, num_pages)
        self._row_starts = np.arange(len(page_ids)) * page_ids.shape[1]
        self.page_ids, self.tags, self.num_pages = map(torch.from_numpy, self._arrays)

    @classmethod
    def bytes_for(cls, num_heads: int, capacity: int) -> int:
        """Bytes of a table whose rows have room for ``capacity`` entries."""
        return num_heads * (torch.int64.itemsize + capacity * cls.entry_bytes)

    @staticmethod
    def grown_capacity(capacity: int, needed: int) -> int:
        """Entries of a row that had ``capacity`` once ``needed`` are in use."""
        if needed <= capacity:
            return capacity
        return max(needed, capacity * 3 // 2, _MIN_CAPACITY)

    @property
    def capacity(self) -> int:
        """Entries each row has room for."""
        return int(self._arrays[0].shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the three tensors."""
        return self.bytes_for(len(self._row_starts), self.capacity)

    @property
    def pointer_bytes(self) -> int:
        """Bytes of page ids and counts."""
        return self.page_ids.nbytes + self.num_pages.nbytes

    @property
    def tag_bytes(self) -> int:
        """Bytes of the tags."""
        return self.tags.nbytes

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Everything the table keeps alive."""
        return self.page_ids, self.tags, self.num_pages

    def used(self) -> Tensor:
        """``[heads, capacity]`` bool, true for entries in use."""
        return self.page_ids != UNUSED

    def all_ids(self) -> Tensor:
        """``[pages]`` int64 ids of all heads, head by head."""
        return self.page_ids[self.used()]

    def growth_bytes(self, added: NDArray[np.int64], removed: Tensor | None = None) -> int:
        """Bytes the table grows by if pages are removed and then added.

        Args:
            added: ``[heads]`` int64 new pages of each head.
            removed: ``[pages]`` int64 ids that go first, each in the table.
        """
        if not added.any():
            return 0
        needed = self._arrays[2] + added
        if removed is not None and removed.numel():
            needed -= self._is_among(removed).sum(axis=1)
        capacity = self.grown_capacity(self.capacity, int(needed.max()))
        return self.page_ids.shape[0] * (capacity - self.capacity) * self.entry_bytes

    @property
    def fullest(self) -> int:
        """Pages of the head that has most, found once per version."""
        if self._fullest[0] != self.version:
            self._fullest = (self.version, int(self._arrays[2].max()))
        return self._fullest[1]

    def growth_alike(self, num_pages: int) -> int:
        """Bytes the table grows by if every head gets so many pages."""
        capacity = self.grown_capacity(self.capacity, self.fullest + num_pages)
        return len(self._arrays[0]) * (capacity - self.capacity) * self.entry_bytes

    def check_holds(self, page_ids: Tensor) -> None:
        """Raise unless all pages ``[pages]``, each named once, are in the table."""
        if len(page_ids) and int(self._is_among(page_ids).sum()) != len(page_ids):
            raise ValueError(f"pages {page_ids.tolist()} are not all of this layer")

    def extend(
        self, head_ids: Tensor, page_ids: Tensor, tag: int, added: NDArray[np.int64]
    ) -> None:
        """Append pages that share a tag, for which there must be room.

        Args:
            head_ids: ``[pages]`` int64 on the CPU, not decreasing.
            page_ids: ``[pages]`` int64 on the CPU.
            tag: Their ``page_tag``.
            added: ``[heads]`` int64 pages of each head.
        """
        if page_ids.numel() == 0:
            return
        ids, tags, num_pages = self._arrays
        if (added == added[0]).all() and (num_pages == num_pages[0]).all():
            column = slice(num_pages[0], num_pages[0] + added[0])
            ids[:, column], tags[:, column] = page_ids.numpy().reshape(len(ids), -1), tag
        else:
            # pages before a page among the new ones of its own head
            heads = head_ids.numpy()
            rank = np.arange(len(heads)) - (added.cumsum() - added)[heads]
            ids[heads, num_pages[heads] + rank] = page_ids.numpy()
            tags[heads, num_pages[heads] + rank] = tag
        num_pages += added
        self._count_more({tag: len(page_ids)})

    def fill(
        self, page_ids: NDArray[np.int64], tags: NDArray[np.int16], added: NDArray[np.int64]
    ) -> None:
        """Append pages of any tags, growing as ``growth_bytes`` says.

        Args:
            page_ids: ``[pages]``, head by head.
            tags: ``[pages]`` ``page_tag`` of each.
            added: ``[heads]`` pages of each head.
        """
        if not len(page_ids):
            return
        self.reserve(added)
        ids, all_tags, num_pages = self._arrays
        column = np.arange(self.capacity)
        is_new = (column >= num_pages[:, None]) & (column < (num_pages + added)[:, None])
        ids[is_new], all_tags[is_new] = page_ids, tags
        num_pages += added
        counts = np.bincount(tags)
        self._count_more({tag: int(counts[tag]) for tag in np.flatnonzero(counts).tolist()})

    def push(self, page_ids: NDArray[np.int64], tag: int) -> None:
        """Append a page to every head.

        Args:
            page_ids: ``[heads]``, one page of each.
            tag: Their ``page_tag``.
        """
        most = self.fullest
        if most >= self.capacity:
            self.reserve(np.ones(len(page_ids), dtype=np.int64))
        ids, tags, num_pages = self._arrays
        at = self._row_starts + num_pages
        ids.put(at, page_ids)
        tags.put(at, tag)
        num_pages += 1
        self._count_more({tag: len(page_ids)})
        self._fullest = (self.version, most + 1)

    def _count_more(self, added: Mapping[int, int]) -> None:
        """Raise the version for pages of some tags; what was counted before is counted on."""
        version, counts = self._counted
        if version == self.version:
            for tag, num_pages in added.items():
                counts[tag] = counts.get(tag, 0) + num_pages
            self._counted = (version + 1, counts)
        self.version += 1

    def newest(self) -> NDArray[np.int64]:
        """``[heads]`` ids of the last page of every head, each of which has one."""
        ids, _, num_pages = self._arrays
        found: NDArray[np.int64] = ids.take(self._row_starts + num_pages - 1)
        return found

    def reserve(self, added: NDArray[np.int64] | Tensor) -> None:
        """Grow as ``growth_bytes`` says, once, before calls of ``extend``.

        Args:
            added: ``[heads]`` int64 new pages of each head.
        """
        ids, tags, num_pages = self._arrays
        needed = int((num_pages + np.asarray(added)).max())
        capacity = self.grown_capacity(self.capacity, needed)
        if capacity == self.capacity:
            return
        shape = (len(ids), capacity)
        more_ids, more_tags = (np.full(shape, UNUSED, dtype=old.dtype) for old in (ids, tags))
        more_ids[:, : self.capacity], more_tags[:, : self.capacity] = ids, tags
        self._hold(more_ids, more_tags, num_pages)

    def remove(self, page_ids: Tensor) -> None:
        """Forget pages, moving the rest to the left."""
        if page_ids.numel() == 0:
            return
        ids, tags, _ = self._arrays
        keep = (ids != UNUSED) & ~self._is_among(page_ids)
        if self._marks is not None:
            is_marked = np.arange(self.capacity) < self._marks[:, None]
            self._marks = (keep & is_marked).sum(axis=1, dtype=np.int64)
        ends = keep.cumsum(axis=1)
        head, column = keep.nonzero()
        to = (head, ends[head, column] - 1)
        kept_ids, kept_tags = (np.full(old.shape, UNUSED, dtype=old.dtype) for old in (ids, tags))
        kept_ids[to], kept_tags[to] = ids[head, column], tags[head, column]
        num_pages = ends[:, -1] if self.capacity else np.zeros(len(ids))
        self._hold(kept_ids, kept_tags, num_pages.astype(np.int64))
        self.version += 1

    def _is_among(self, page_ids: Tensor) -> NDArray[np.bool_]:
        """``[heads, capacity]``: whether an entry is one of some pages, one at least."""
        wanted = np.sort(page_ids.cpu().numpy())
        at = np.searchsorted(wanted, self._arrays[0])
        found: NDArray[np.bool_] = wanted[np.minimum(at, len(wanted) - 1)] == self._arrays[0]
        return found

    def find(self, page_ids: Tensor) -> tuple[Tensor, Tensor]:
        """KV head and tag of each page.

        Args:
            page_ids: ``[pages]`` int64 ids, each once.

        Returns:
            Heads and tags, ``[pages]`` int64 each.

        Raises:
            ValueError: A page is not in the table, or is named twice.
        """
        wanted = page_ids.cpu().numpy()
        order = wanted.argsort(kind="stable")
        ranked = wanted[order]
        if (ranked[1:] == ranked[:-1]).any():
            raise ValueError(f"pages {page_ids.tolist()} name one page twice")
        ids, tags, _ = self._arrays
        head, column = self._is_among(page_ids).nonzero() if len(wanted) else ids[:0].nonzero()
        if len(head) != len(wanted):
            raise ValueError(f"pages {page_ids.tolist()} are not all of this layer")
        # as many as are wanted, each once: their ranks are a permutation
        at = order[np.searchsorted(ranked, ids[head, column])]
        heads, found = np.empty_like(wanted), np.empty_like(wanted)
        heads[at], found[at] = head, tags[head, column]
        return torch.from_numpy(heads), torch.from_numpy(found)

    def listed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, tags and whether they came since the last ``mark``, head by head.

        Returns:
            ``[pages]`` int64, int64 and bool.
        """
        used = self.used()
        # rows lose entries in place and gain them at the end, so that marked ones come first
        marks = np.zeros(len(used), np.int64) if self._marks is None else self._marks
        is_new = torch.arange(self.capacity) >= torch.from_numpy(marks)[:, None]
        return self.page_ids[used], self.tags[used].to(torch.int64), is_new[used]

    def entries(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids and tags in use, head by head, ``[pages]`` each."""
        used = self._arrays[0] != UNUSED
        ids, tags = self._arrays[0][used], self._arrays[1][used]
        return ids.astype(np.int64), tags.astype(np.int64)

    def mark(self) -> None:
        """From here on, count the pages of now as no longer new."""
        self._marks = self._arrays[2].astype(np.int64)

    def forget_marks(self) -> None:
        """Count all pages as new."""
        self._marks = None

    @property
    def mark_bytes(self) -> int:
        """Bytes of what ``mark`` keeps, which belong to who asked for it."""
        return 0 if self._marks is None else self._marks.nbytes

    def tag_counts(self) -> dict[int, int]:
        """Pages of each tag in use, counted once per version."""
        version, counts = self._counted
        if version != self.version:
            found = np.bincount(self._arrays[1].ravel() + 1)[1:]
            counts = {int(tag): int(found[tag]) for tag in np.flatnonzero(found)}
            self._counted = (self.version, counts)
        return counts

    def remap(self, moves: PageMoves) -> None:
        """Follow pages that changed their ids; the version rises if one of them is here."""
        ids: NDArray[np.int64] = self._arrays[0].reshape(-1).view(np.int64)
        at, new = moves.find(ids)
        if len(at):
            ids[at] = new
            self.version += 1

    def touch(self) -> None:
        """Say that the content of a page changed."""
        self.version += 1

    def present_tags(self) -> Sequence[int]:
        """Tags in use, rising."""
        return sorted(self.tag_counts())

    def select(self, tag: int) -> tuple[Tensor, Tensor]:
        """Pages of one tag.

        Args:
            tag: A ``page_tag``.

        Returns:
            Ids ``[heads, most pages of a head]`` int64, padded with -1, and ``[heads]`` int64
            pages of each head.
        """
        mask = self.tags == tag
        num_pages = mask.sum(dim=1)
        width = int(num_pages.max())
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
        ids = self.page_ids.gather(1, order).masked_fill(~mask.gather(1, order), UNUSED)
        return ids, num_pages

    def copy(self) -> "PointerTable":
        """A table of the same pages and capacity."""
        other = PointerTable(0)
        other._hold(*(array.copy() for array in self._arrays))
        other._counted, other._fullest = (0, {**self.tag_counts()}), (0, self.fullest)
        return other


@dataclass(frozen=True, slots=True, eq=False)
class TailView:
    """Dense states a kernel reads beside the pages.

    Attributes:
        keys: ``[heads, tokens, head_dim]`` bfloat16, after rotary embedding.
        values: ``[heads, tokens, head_dim]`` bfloat16.
        first_position: Position of the first state; the others follow it.
    """

    keys: Tensor
    values: Tensor
    first_position: int

    @classmethod
    def empty(cls, config: StoreConfig, first_position: int) -> "TailView":
        """A tail without states."""
        shape = (config.geometry.num_kv_heads, 0, config.geometry.head_dim)
        none = torch.empty(shape, dtype=torch.bfloat16, device=config.device)
        return cls(none, none, first_position)

    @property
    def num_tokens(self) -> int:
        """States of each head."""
        return self.keys.shape[1]


class OpenTail:
    """Dense buffer for the newest states of one layer of one sequence.

    Attributes:
        states: ``[2, heads, capacity, head_dim]`` bfloat16, keys then values.
        keys: ``[heads, capacity, head_dim]``, the first half.
        values: ``[heads, capacity, head_dim]``, the second half.
        first_position: Position of the oldest state.
        num_tokens: States in use.
    """

    def __init__(self, states: Tensor, first_position: int, num_tokens: int) -> None:
        """Take over a buffer ``[2, heads, capacity, head_dim]`` of keys and values."""
        self.states = states
        self.keys, self.values = states
        self.first_position = first_position
        self.num_tokens = num_tokens

    @classmethod
    def blank(cls, config: StoreConfig, first_position: int) -> "OpenTail":
        """An empty buffer of the configured capacity."""
        shape = (2, config.geometry.num_kv_heads, config.tail_capacity, config.geometry.head_dim)
        states = torch.zeros(shape, dtype=torch.bfloat16, device=config.device)
        return cls(states, first_position, 0)

    @classmethod
    def of_layers(
        cls, config: StoreConfig, first_position: int, states: Sequence[tuple[Tensor, Tensor]]
    ) -> "list[OpenTail]":
        """Tails of several layers at once, which a GPU makes in a few launches.

        Args:
            config: Their capacity.
            first_position: Position of the oldest state of all.
            states: Keys and values of each, ``[heads, tokens, head_dim]``, as many in all.
        """
        geometry, num_tokens = config.geometry, states[0][0].shape[1]
        shape = (geometry.num_kv_heads, config.tail_capacity, geometry.head_dim)
        every = torch.zeros((len(states), 2, *shape), dtype=torch.bfloat16, device=config.device)
        for at, part in enumerate(zip(*states, strict=True)):
            every[:, at, :, :num_tokens] = torch.stack(part)
        return [cls(own, first_position, num_tokens) for own in every.unbind()]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.states.nbytes

    def tensors(self) -> tuple[Tensor]:
        """Everything the tail keeps alive."""
        return (self.states,)

    def view(self) -> TailView:
        """The states in use, without a copy."""
        live = slice(0, self.num_tokens)
        return TailView(self.keys[:, live], self.values[:, live], self.first_position)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add states; they must fit.

        Args:
            keys: ``[heads, tokens, head_dim]``.
            values: ``[heads, tokens, head_dim]``.
        """
        live = slice(self.num_tokens, self.num_tokens + keys.shape[1])
        self.keys[:, live] = keys
        self.values[:, live] = values
        self.num_tokens += keys.shape[1]

    def restart(self, first_position: int) -> None:
        """Forget all states and begin at another position."""
        self.first_position = first_position
        self.num_tokens = 0

    def forget_oldest(self, num_tokens: int) -> None:
        """Give up the oldest states and move the rest to the front."""
        left = self.num_tokens - num_tokens
        if left == 0:
            self.restart(self.first_position + num_tokens)
            return
        rest = self.states[:, :, num_tokens : self.num_tokens]
        # a copy inside a buffer must not read what it has written
        self.states[:, :, :left] = rest if left <= num_tokens else rest.clone()
        self.first_position += num_tokens
        self.num_tokens = left

    def crop(self, num_tokens: int) -> None:
        """Forget states at positions from ``num_tokens`` on."""
        if num_tokens < self.first_position:
            self.restart(num_tokens)
        else:
            self.num_tokens = min(self.num_tokens, num_tokens - self.first_position)

    def copy(self) -> "OpenTail":
        """A tail of its own with the same states and capacity."""
        return OpenTail(self.states.clone(), self.first_position, self.num_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class PageGroup:
    """Pages of one layer that share a layout, ragged over heads.

    Attributes:
        layout: Tier and position mode of the pages.
        page_ids: ``[heads, most pages of a head]`` int64, padded with -1.
        num_pages: ``[heads]`` int64.
    """

    layout: PageLayout
    page_ids: Tensor
    num_pages: Tensor

    def flat_ids(self) -> Tensor:
        """``[pages]`` int64 ids, head by head."""
        return self.page_ids[self.page_ids >= 0]

    def head_ids(self) -> Tensor:
        """``[pages]`` int64 head of each of ``flat_ids``."""
        return (self.page_ids >= 0).nonzero()[:, 0]


def page_groups(
    table: PointerTable,
    layout_of: Callable[[PoolKey], PageLayout],
    device: torch.device | str = "cpu",
) -> list[PageGroup]:
    """Pages of a table, grouped by tier and position mode, lowest tier first."""
    groups = []
    for tag in table.present_tags():
        page_ids, num_pages = (part.to(device) for part in table.select(tag))
        groups.append(PageGroup(layout_of(pool_of_tag(tag)), page_ids, num_pages))
    return groups


@dataclass(slots=True, eq=False)
class SequenceState:
    """Tables, tails and next position of every layer of one sequence.

    Attributes:
        codec: Encoder of the sequence.
        tables: Pointer table of each layer.
        tails: Open tail of each layer, None until the first append.
        next_position: Position of each layer's next token.
        seal_tier_id: Tier of the pages that full tails become.
        own_seal_tiers: The same of single layers that differ; for the next pages alone, so no file
            keeps it.
    """

    codec: StateCodec | None
    tables: list[PointerTable]
    tails: list[OpenTail | None]
    next_position: list[int]
    seal_tier_id: int
    own_seal_tiers: dict[int, int] = field(default_factory=dict)

    def seal_tier_of(self, layer: int) -> int:
        """Tier of the pages that a full tail of a layer becomes."""
        return self.own_seal_tiers.get(layer, self.seal_tier_id)

    @classmethod
    def blank(
        cls, config: StoreConfig, codec: StateCodec | None, seal_tier: str | None = None
    ) -> "SequenceState":
        """An empty sequence."""
        geometry = config.geometry
        layers = range(geometry.num_layers)
        return cls(
            codec,
            [PointerTable(geometry.num_kv_heads) for _ in layers],
            [None for _ in layers],
            [0 for _ in layers],
            config.seal_tier_id(seal_tier),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of tables and tails; pages excluded."""
        return sum(part.nbytes for part in self._parts())

    def live_tails(self) -> list[OpenTail]:
        """Tails that are allocated."""
        return [tail for tail in self.tails if tail is not None]

    def tensors(self) -> list[Tensor]:
        """Tensors of tables and tails."""
        return [tensor for part in self._parts() for tensor in part.tensors()]

    def _parts(self) -> list[PointerTable | OpenTail]:
        return [*self.tables, *self.live_tails()]

    def all_ids(self) -> Tensor:
        """``[pages]`` int64 ids of all layers, on the CPU."""
        return torch.cat([table.all_ids() for table in self.tables])

    def copy(self) -> "SequenceState":
        """Tables and tails of its own for the same pages."""
        return SequenceState(
            self.codec,
            [table.copy() for table in self.tables],
            [tail.copy() if tail is not None else None for tail in self.tails],
            list(self.next_position),
            self.seal_tier_id,
            dict(self.own_seal_tiers),
        )
