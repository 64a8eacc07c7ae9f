# SPDX-License-Identifier: Apache-2.0
"""Decode steps of a batch that a CUDA graph can hold.

Everything a step reads or counts lies in tensors that keep their place: lists of pages, lengths
of tails, positions. A step appends the new states to the tails, attends, and needs no word from
the host. Between steps the host counts along, lengthens the lists of rows that sealed a page, and
lists anew what a controller demoted or dropped.

A layer is read by one launch for its dense states and one for every tier and position mode that its
coded pages have. Each launch begins as soon as all blocks of the one before it have begun and
takes as many multiprocessors as its pages are work; one more merges what they find as it comes. The
dense states' launch is the first where one other merges what it found, and else the last that
attends: its many short blocks would keep long ones waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.attention.cuda.block_shares import BlockShares
from sphkv.attention.cuda.decode import CudaDecode
from sphkv.attention.cuda.dense import MAX_GROUP, DenseDecode, DenseStates
from sphkv.attention.cuda.geometry import KernelShape, is_served
from sphkv.attention.cuda.kernel_cache import DecodeKernels, DecodeTables
from sphkv.attention.cuda.merge import MOST_PARTS, PartsMerge
from sphkv.attention.cuda.pages import (
    HOPPER,
    FixedLists,
    LayerLists,
    ListChange,
    PageLists,
    PagePool,
    list_entries,
    page_base,
    page_numbers,
)
from sphkv.attention.cuda.shares import longest_first, share_blocks
from sphkv.attention.partial import PartialAttention
from sphkv.attention.request import AttentionOptions, spherical_codec
from sphkv.attention.triton.dense import TailList
from sphkv.codec.states import SphericalCodec
from sphkv.errors import UnsupportedBatchError
from sphkv.store.layout import PageLayout
from sphkv.store.moves import PageEvent
from sphkv.store.paging import PositionMode
from sphkv.store.sequence import OpenTail, PointerTable, page_tag, pool_of_tag
from sphkv.store.store import PageStore

_Integers = NDArray[np.int64]
# Stores whose pages came to be of kinds that captured steps did not read: they may do so again.
_CHANGING: WeakSet[PageStore] = WeakSet()
DENSE_PROCESSORS = 4
"""Multiprocessors left to the dense states of a layer."""

# Bits of a list's entry that are a page's number.
_NUMBER_MASK = (1 << 32) - 1
# Pages of a list that are not full: of the prompt, of what was demoted, and the newest.
_SPARE_PAGES = 4
# Pages that lists have room for beyond those of now, in parts of a layer's.
_ROOM_PART = 4


def _sealed_layout(store: PageStore, sequence: int) -> PageLayout:
    """Layout of the pages that full tails of a sequence become."""
    tiers, head_dim = store.config.tiers, store.config.geometry.head_dim
    tier = tiers[store.seal_tier(sequence)]
    tier_id = tiers.id_of(tier.name)
    return PageLayout(tier_id, tier, head_dim, store.config.span_mode(tier_id))


def _layout_of_tag(store: PageStore, tag: int) -> PageLayout:
    tier_id, mode = pool_of_tag(tag)
    return PageLayout(tier_id, store.config.tiers[tier_id], store.config.geometry.head_dim, mode)


def why_not_captured(
    store: PageStore, sequences: Sequence[int], windows: Sequence[int | None]
) -> str:
    """Why decode steps of these sequences cannot be captured; empty where they can.

    Args:
        store: Their pages and tails.
        sequences: One per row.
        windows: Sliding window of each layer, None for full attention.
    """
    if not sequences:
        return "there is no sequence"
    if any(window is not None for window in windows):
        return "captured steps do not drop pages behind sliding windows"
    reasons = (
        _why_not_kernels(store, sequences[0]),
        _why_not_batch(store, sequences),
        _why_not_kinds(store, sequences),
    )
    rows = (_why_not_sequence(store, row) for row in sequences)
    return next(filter(None, (*reasons, *rows)), "")


def _why_not_kernels(store: PageStore, sequence: int) -> str:
    """Why kernels cannot do it, by shapes and device."""
    sealed, group = _sealed_layout(store, sequence), store.config.geometry.group_size
    if not is_served(sealed):
        return f"the decode kernel does not read tier {sealed.tier.name!r} of sealed pages"
    if sealed.page_tokens != store.config.seal_tokens:
        return f"{store.config.seal_tokens} tokens are sealed at once, in several pages"
    if store.allocator.order is None:
        return "the store keeps its pages in an order that the decode kernel does not read"
    if next(store.allocator.slabs(), None) is None:
        return "no page is sealed yet"
    if group > MAX_GROUP:
        return f"{group} query heads share a KV head, the dense kernel takes {MAX_GROUP}"
    # no self-test watches over the kernel of dense states: it serves where it was checked
    if torch.cuda.get_device_capability() != HOPPER:
        return f"captured steps need compute capability {HOPPER}"
    return ""


def _why_not_batch(store: PageStore, sequences: Sequence[int]) -> str:
    """Why sequences cannot share a step, by codecs and tiers."""
    if not all(isinstance(store.codec(row), SphericalCodec) for row in sequences):
        return "a sequence has no spherical codec"
    if len({id(store.codec(row)) for row in sequences}) > 1:
        return "the sequences have codecs of their own"
    tiers = sorted({*map(store.seal_tier, sequences)})
    return f"the sequences seal at tiers {tiers}" if len(tiers) > 1 else ""


def _why_not_kinds(store: PageStore, sequences: Sequence[int]) -> str:
    """Why sequences cannot share a step, by how many kinds of pages they have or may get."""
    sealed, tiers = _sealed_layout(store, sequences[0]), store.config.tiers
    tags = {page_tag((sealed.tier_id, sealed.position_mode))}
    for layer in range(store.config.geometry.num_layers):
        for row in sequences:
            tags |= {*store.table(row, layer).present_tags()}
    if store in _CHANGING:
        tags |= _tags_in_runs(store)
    num_coded = len(tags - {page_tag((tiers.dense_id, PositionMode.CONTIGUOUS))})
    if 1 + num_coded > MOST_PARTS:
        return f"a step reads {MOST_PARTS - 1} kinds of coded pages, there are {num_coded}"
    return ""


def _tags_in_runs(store: PageStore) -> set[int]:
    """Tags of all tiers whose pages the kernel reads in runs."""
    tiers = store.config.tiers
    coded = [tier_id for tier_id, tier in enumerate(tiers) if tier.is_coded]
    every = [page_tag((tier_id, PositionMode.RUNS)) for tier_id in coded]
    return {tag for tag in every if is_served(_layout_of_tag(store, tag))}


def _why_not_sequence(store: PageStore, sequence: int) -> str:
    """Why steps of one sequence cannot be captured, by its pages and tails."""
    tiers = store.config.tiers
    extents = set()
    for layer in range(store.config.geometry.num_layers):
        for tag in store.table(sequence, layer).present_tags():
            tier_id, mode = pool_of_tag(tag)
            is_dense = tier_id == tiers.dense_id and mode is PositionMode.CONTIGUOUS
            if not is_dense and not is_served(_layout_of_tag(store, tag)):
                return (
                    f"layer {layer} of sequence {sequence} has pages of tier "
                    f"{tiers[tier_id].name!r} with {mode.name.lower()} positions, which the decode "
                    "kernel does not read"
                )
        tail = store.open_tail(sequence, layer)
        if tail is None:
            return f"layer {layer} of sequence {sequence} has no open tail"
        extents.add((tail.num_tokens, tail.first_position))
    if len(extents) > 1:
        return f"layers of sequence {sequence} differ in length: tails are {sorted(extents)}"
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class _FoundPages:
    """Pages of one tag in all layers.

    Attributes:
        page_ids: Of each layer, head by head, row by row.
        counts: ``[layers, heads, rows]``.
    """

    page_ids: list[_Integers]
    counts: _Integers


def _find_pages(tables: Sequence[Sequence[PointerTable]]) -> dict[int, _FoundPages]:
    """Pages by tag; ``tables`` are those of each layer and row."""
    tags = sorted({tag for layer in tables for table in layer for tag in table.present_tags()})
    layers, heads = len(tables), len(tables[0][0].num_pages)
    found = {
        tag: _FoundPages([], np.zeros((layers, heads, len(tables[0])), dtype=np.int64))
        for tag in tags
    }
    for layer, rows in enumerate(tables):
        ids = np.concatenate([table.page_ids.numpy() for table in rows], 1)
        every = np.concatenate([table.tags.numpy() for table in rows], 1)
        ends = np.cumsum([table.capacity for table in rows])
        for tag, pages in found.items():
            is_mine = every == tag
            pages.page_ids.append(ids[is_mine])
            before = np.concatenate([np.zeros((heads, 1), np.int64), is_mine.cumsum(1)], 1)
            pages.counts[layer] = np.diff(before[:, [0, *ends]], axis=1)
    return found


def _joined(events: Sequence[PageEvent]) -> list[PageEvent]:
    """The same events with neighbours of one kind and pool made one."""
    found: list[PageEvent] = []
    for _, group in groupby(events, key=lambda event: (event.key, event.new is None)):
        alike = list(group)
        if len(alike) > 1 and alike[0].new is None:
            gone = np.sort(np.concatenate([event.old for event in alike]))
            alike = [PageEvent(alike[0].key, gone, None)]
        found += [event for event in alike if len(event.old)]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """One launch over the coded pages of a layer."""

    kernel: CudaDecode
    pool: PagePool
    lists: PageLists


class CapturedSteps:
    """Captured attention of several sequences of one store, each of its own length.

    Attributes:
        positions: ``[rows, 1]`` int64 position of each row's newest token.
        max_tokens: Tokens per sequence that lists and tables have room for.
        kernels: Decode kernels of all layers.
    """

    def __init__(
        self,
        store: PageStore,
        sequences: Sequence[int],
        *,
        max_tokens: int,
        tables: DecodeTables | None = None,
    ) -> None:
        """Lay out the lists.

        Args:
            store: Pages in fragment order, on the GPU.
            sequences: One id per row, for which ``why_not_captured`` finds no reason.
            max_tokens: Tokens a sequence may reach.
            tables: What kernels look up; tables of their own if None.
        """
        geometry, self._device = store.config.geometry, torch.device(store.config.device)
        self._store, self._sequences = store, list(sequences)
        self._sealed = _sealed_layout(store, sequences[0])
        self._codec = spherical_codec(store, sequences[0])
        layers, num_rows = range(geometry.num_layers), len(sequences)
        page = self._sealed.page_tokens
        self.max_tokens = max_tokens
        self.kernels = DecodeKernels(self._device, tables)
        self.kernels.reserve(max_tokens + page, num_rows)
        self.positions = torch.zeros(num_rows, 1, dtype=torch.int64, device=self._device)
        self._positions32 = torch.zeros(num_rows, dtype=torch.int32, device=self._device)
        self._extents = torch.zeros(num_rows, 2, dtype=torch.int64, device=self._device)
        self._dense = DenseDecode(geometry.head_dim, geometry.group_size, self._device)
        self._tables = [[store.table(row, layer) for row in sequences] for layer in layers]
        tiers = store.config.tiers
        self._dense_tag = page_tag((tiers.dense_id, PositionMode.CONTIGUOUS))
        self._sealed_tag = page_tag((self._sealed.tier_id, self._sealed.position_mode))
        found = _find_pages(self._tables)
        self._make_lists(found)
        self._fill(found)
        self._dense_states = [self._tails_of(layer) for layer in layers]
        self._launches = self._with_shares(self._plan(found))
        # all layers use them in turn
        sizes = num_rows, geometry.num_query_heads, geometry.head_dim
        self._merge = PartsMerge(1 + max(map(len, self._launches)), *sizes, self._device)
        # of a layer with one launch, which merges it
        self._dense_part = PartialAttention(
            torch.empty(sizes, device=self._device), torch.empty(sizes[:2], device=self._device)
        )
        self._version = self._table_version()
        self._journal = store.allocator.journal()
        self._load_changes()
        self._shares.find()
        self.recount()

    def _load_changes(self) -> None:
        """Change every list by nothing once: the first use of an operation waits for its code."""
        nobody = np.array([-1])
        for new in (None, nobody):
            change = ListChange.of(nobody, new, self._device)
            self._growing.apply(change)
            for lists in self._fixed.values():
                lists.apply(change)
        layers, heads = len(self._tables), self._store.config.geometry.num_kv_heads
        nothing = torch.zeros(layers, heads, len(self._sequences), dtype=torch.int64)
        self._growing.append(nothing, torch.zeros(len(self._sequences), dtype=torch.bool))

    def _make_lists(self, found: dict[int, _FoundPages]) -> None:
        """Empty lists of every kind of page that is there or may come, with room."""
        store = self._store
        tags = {*found, self._sealed_tag, self._dense_tag}
        self._is_changing = store in _CHANGING
        if self._is_changing:
            # a controller demotes, and may do so to any tier
            tags |= _tags_in_runs(store)
        self._bases = {
            tag: page_base(store.allocator, _layout_of_tag(store, tag))
            for tag in tags - {self._dense_tag}
        }
        layers, heads = len(self._tables), store.config.geometry.num_kv_heads
        num_rows, most = (
            len(self._sequences),
            self.max_tokens // self._sealed.page_tokens + _SPARE_PAGES,
        )
        self._growing = LayerLists(layers, heads, num_rows, most, self._device)
        no_pages = np.zeros((layers, heads, num_rows), dtype=np.int64)
        held = sum((pages.counts for pages in found.values()), no_pages).sum((1, 2)).max()
        # layers in which pages of a kind are read; without a controller that demotes, none come
        self._is_read: dict[int, NDArray[np.bool_]] = {}
        for tag in tags:
            may_come = self._is_changing or tag in (self._sealed_tag, self._dense_tag)
            counts = found[tag].counts if tag in found else no_pages
            self._is_read[tag] = (counts.sum((1, 2)) > 0) | may_come
        self._fixed = {
            tag: FixedLists.with_room(
                found[tag].counts if tag in found else no_pages,
                more=int(held) // _ROOM_PART,
                device=self._device,
                mask=-1 if tag == self._dense_tag else _NUMBER_MASK,
            )
            for tag in sorted(tags - {self._sealed_tag})
        }

    def _table_version(self) -> int:
        """Rises with every change of a pointer table."""
        return sum(table.version for tables in self._tables for table in tables)

    def _is_expected(self, tag: int, pages: _FoundPages) -> bool:
        """Whether pages of a kind are read in every layer that has some."""
        return tag in self._is_read and not pages.counts[~self._is_read[tag]].any()

    def _fill(self, found: dict[int, _FoundPages]) -> bool:
        """Write all lists in place; False if pages are of a kind or number without room."""
        if not all(self._is_expected(tag, pages) for tag, pages in found.items()):
            return False
        store, allocator = self._store, self._store.allocator
        layers, _, rows = next(iter(self._fixed.values())).shape
        heads = store.config.geometry.num_kv_heads
        no_pages = np.zeros((layers, heads, rows), np.int64)
        none = _FoundPages([np.zeros(0, np.int64)] * layers, no_pages)
        for tag in (*self._fixed, self._sealed_tag):
            pages = found.get(tag, none)
            ids = torch.from_numpy(np.concatenate(pages.page_ids))
            addresses = allocator.addresses(ids)
            if tag == self._dense_tag:
                # the dense kernel wants addresses, sequence by sequence
                if not self._fixed[tag].replace(addresses, pages.counts, by_row=True):
                    return False
                continue
            numbers = page_numbers(addresses, self._bases[tag], _layout_of_tag(store, tag))
            positions: Tensor | int = 0
            if pool_of_tag(tag)[1] is PositionMode.CONTIGUOUS:
                # others tell their positions themselves
                positions = allocator.first_positions(ids).cpu()
            entries = list_entries(numbers, positions)
            if tag != self._sealed_tag:
                if not self._fixed[tag].replace(entries, pages.counts):
                    return False
                continue
            if pages.counts.max() > self._growing.most:
                return False
            self._growing.fill(entries, pages.counts)
        return True

    def _plan(self, found: dict[int, _FoundPages]) -> list[list[_Launch]]:
        """Launches of every layer; lists that are empty now may fill."""
        codec, tiers = self._codec, self._store.config.tiers
        layers = range(len(self._tables))
        kinds = [
            (layer, tiers[pool_of_tag(tag)[0]], pool_of_tag(tag)[1])
            for layer in layers
            for tag in self._bases
        ]
        self.kernels.compile(codec, kinds)
        every = sorted(self._bases)
        return [
            self._plan_layer(layer, [tag for tag in every if self._is_read[tag][layer]], found)
            for layer in layers
        ]

    def _with_shares(self, planned: Sequence[Sequence[_Launch]]) -> list[list[_Launch]]:
        """The same launches, whose blocks are told which pages they have."""
        every = [launch for launches in planned for launch in launches]
        self._shares = BlockShares([(each.kernel, each.lists) for each in every], self._device)
        lists = iter(self._shares.lists)
        return [[replace(launch, lists=next(lists)) for launch in launches] for launches in planned]

    def _plan_layer(
        self, layer: int, tags: Sequence[int], found: dict[int, _FoundPages]
    ) -> list[_Launch]:
        launches: list[_Launch] = []
        work: list[tuple[KernelShape, _Integers]] = []
        for tag in tags:
            layout = _layout_of_tag(self._store, tag)
            kernel = self.kernels.get(self._codec, layer, layout.tier, layout.position_mode)
            if tag == self._sealed_tag:
                lists = self._growing.layer(layer)
            else:
                lists = self._fixed[tag].layer(layer)
            blank = torch.empty(1, layout.page_bytes, dtype=torch.uint8, device="meta")
            pool = PagePool(blank, layout.position_mode, self._bases[tag])
            launches.append(_Launch(kernel, pool, lists))
            work.append((kernel.shape, self._pages_planned_for(tag, layer, found)))
        if len(launches) == 1 and launches[0].pool.mode is PositionMode.CONTIGUOUS:
            # heads have as many pages each
            launches[0].kernel.overlaps = True
            return launches
        properties = torch.cuda.get_device_properties(self._device)
        room = properties.multi_processor_count - DENSE_PROCESSORS
        passes = launches[0].kernel.passes
        shares = share_blocks(work, room // passes, DENSE_PROCESSORS // passes)
        # every launch begins a little later than the one before it
        order = longest_first(work, shares)
        for at in order:
            # the first one waits for what made the query, as do all that overlap with it
            launches[at].kernel.overlaps = len(launches) == 1 or at != order[0]
        return [
            replace(launches[at], lists=replace(launches[at].lists, blocks=shares[at]))
            for at in order
        ]

    def _pages_planned_for(self, tag: int, layer: int, found: dict[int, _FoundPages]) -> _Integers:
        """Pages ``[heads, rows]`` that multiprocessors are shared by.

        A launch keeps its thread blocks. If new pages had none, which would begin when all others
        are done, few of them would take as long as all of a prompt.
        """
        shape = self._store.config.geometry.num_kv_heads, len(self._sequences)
        pages = found[tag].counts[layer] if tag in found else np.zeros(shape, np.int64)
        if tag != self._sealed_tag:
            return pages
        longest = max(map(self._store.num_tokens, self._sequences))
        # half of those that may come
        return pages + (self.max_tokens - longest) // 2 // self._sealed.page_tokens

    def _tails_of(self, layer: int) -> DenseStates:
        """Tails and dense pages of a layer."""
        dense = self._fixed[self._dense_tag].layer(layer)
        return DenseStates(
            TailList.of(self._store, self._sequences, layer).addresses.to(self._device),
            self._extents,
            dense.entries,
            dense.row_start,
            _layout_of_tag(self._store, self._dense_tag),
        )

    def _tails(self) -> list[OpenTail]:
        """The tail of each row; all its layers are of one length."""
        tails = [self._store.open_tail(row, 0) for row in self._sequences]
        return [tail for tail in tails if tail is not None]

    def recount(self) -> None:
        """Rewrite positions and tail lengths from the store, in place."""
        extents = [[tail.num_tokens, tail.first_position] for tail in self._tails()]
        # the host need not wait: what it copies from is taken at once
        self._extents.copy_(torch.tensor(extents), non_blocking=True)
        self.positions.copy_(self._extents.sum(1, keepdim=True) - 1)
        self._positions32.copy_(self.positions[:, 0])

    def advance(self) -> None:
        """Count one more token of every row; the first thing a captured step does."""
        self.positions.add_(1)
        self._positions32.add_(1)
        self._extents[:, 0].add_(1)

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        options: AttentionOptions,
        *,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Append the new states of a layer and attend; see ``StepGraph.attend``."""
        if options.window is not None and options.window < self.max_tokens:
            raise UnsupportedBatchError(
                f"captured steps do not drop pages behind a window of {options.window} tokens"
            )
        launches, states = self._launches[layer], self._dense_states[layer]
        query = query[:, :, 0].contiguous()
        if query.dtype != torch.bfloat16:
            query = query.float()
        key, value = (part[:, :, 0].to(torch.bfloat16) for part in (keys, values))
        result = launches[0].kernel.empty_result(len(query), query.dtype)
        sinks = None if sink_logits is None else sink_logits.float()
        if len(launches) == 1:
            self._dense.attend(
                query,
                key,
                value,
                states,
                options,
                result=self._dense_part,
                spare_processors=DENSE_PROCESSORS,
            )
            self._read(
                launches[0], query, options, result, merge_with=self._dense_part, sink_logits=sinks
            )
            return result.output[:, :, None]
        # a launch that merges waits for the one before it, and rows behind that wait with it: with
        # one tier that is short, with several one more takes what all of them find as it comes
        dense_part, *parts = self._merge.parts[: 1 + len(launches)]
        for launch, part in zip(launches, parts, strict=True):
            self._read(launch, query, options, part)
        self._dense.attend(
            query, key, value, states, options, result=dense_part, spare_processors=None
        )
        self._merge.merge(1 + len(launches), result, sink_logits=sinks)
        return result.output[:, :, None]

    def _read(
        self,
        launch: _Launch,
        query: Tensor,
        options: AttentionOptions,
        result: PartialAttention,
        *,
        merge_with: PartialAttention | None = None,
        sink_logits: Tensor | None = None,
    ) -> None:
        """Queue one launch over coded pages."""
        launch.kernel.attend(
            query,
            launch.pool,
            launch.lists,
            options,
            result=result,
            merge_with=merge_with,
            query_positions=self._positions32,
            sink_logits=sink_logits,
        )

    def prepare(self, make_room: Callable[[], bool]) -> bool:
        """Make room for the next step, and follow what that changed; see ``StepGraph.prepare``.

        Raises:
            UnsupportedBatchError: A sequence is as long as it may get, or its pages changed.
        """
        if self._table_version() != self._version:
            raise UnsupportedBatchError("pages were changed since the steps were captured")
        before = [tail.first_position for tail in self._tails()]
        longest = max(map(self._store.num_tokens, self._sequences))
        if longest >= self.max_tokens:
            raise UnsupportedBatchError(
                f"a sequence has {longest} tokens, room is {self.max_tokens}"
            )
        is_only_grown = make_room()
        events, is_all = self._journal.take()
        if self._table_version() == self._version:
            return True
        has_sealed = before != [tail.first_position for tail in self._tails()]
        if is_only_grown and is_all:
            self._follow(events)
            if has_sealed:
                self._list_newest(np.array(before))
        elif not self._fill(_find_pages(self._tables)):
            _CHANGING.add(self._store)
            return False
        self._shares.find()
        self._version = self._table_version()
        if has_sealed:
            self.recount()
        return True

    def _follow(self, events: Sequence[PageEvent]) -> None:
        """Take pages that are gone from the lists, and those that moved at their new places.

        The lists are changed where they are, after the steps that were queued before.
        """
        for event in _joined(events):
            tag = page_tag(event.key)
            if tag not in (*self._fixed, self._sealed_tag):
                continue
            base, size = 0, 1
            if tag != self._dense_tag:
                base, size = self._bases[tag], _layout_of_tag(self._store, tag).page_bytes
            old, new = event.old, event.new
            change = ListChange.of(
                (old - base) // size, None if new is None else (new - base) // size, self._device
            )
            lists = self._growing if tag == self._sealed_tag else self._fixed[tag]
            lists.apply(change)

    def commit(self) -> None:
        """Tell the store about the step that was queued."""
        self._store.absorb(self._sequences)

    def _list_newest(self, bases: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Lengthen the lists of rows whose tails began at ``bases [rows]`` and have sealed."""
        ends = np.array([tail.first_position for tail in self._tails()])
        is_grown = ends > bases
        heads = self._store.config.geometry.num_kv_heads
        ids = np.full((len(self._tables), len(ends), heads), -1)
        for layer, tables in enumerate(self._tables):
            for row in np.flatnonzero(is_grown):
                ids[layer, row] = tables[row].newest()
        addresses = self._store.allocator.addresses(torch.from_numpy(ids)).transpose(1, 2)
        grown = torch.from_numpy(is_grown)
        # unused entries of other rows count from the base as well
        addresses = torch.where(grown, addresses, self._bases[self._sealed_tag])
        numbers = page_numbers(addresses, self._bases[self._sealed_tag], self._sealed)
        self._growing.append(list_entries(numbers, torch.from_numpy(bases)), grown)
