# SPDX-License-Identifier: Apache-2.0
"""What one step of vLLM's scheduler reads and writes on a GPU, planned on the host.

The host knows the length of every sequence before the step runs, so it works out every index
here, with numpy and without asking the device. Block ids are known to the device alone: a plan
names them by their place in the block table.

A row of the batch is a sequence. Rows with one new token come first and are *decoded*: a kernel
adds the token to the row's tail and attends. The others bring *chunks* of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sphkv.attention.cuda.geometry import PAGE_TOKENS

Integers = NDArray[np.int64]

DECODE_FIELDS = 10
"""Numbers of a decoded row, see ``plan_decode``."""

_FIRST_BLOCK, _NUM_PAGES, _LIST_START, _FIRST_BASE = range(2, 6)
_SLOT, _SINK, _KEPT, _GAP = range(6, DECODE_FIELDS)


@dataclass(frozen=True, eq=False)
class BatchRows:
    """The sequences of a step.

    Attributes:
        query_starts: ``[rows + 1]`` first token of each row in the batch, and the end.
        num_tokens: ``[rows]`` length after the step.
        slots: ``[rows]`` slot of each row's tail.
        sinks: ``[rows]`` where the dense first tokens of a row are; -1 if it has none.
        kept: ``[rows]`` blocks of a prompt that was cut to a budget; 0 if it was not.
        gap: ``[rows]`` blocks behind them that are gone.
        table_rows: ``[rows]`` row of the block table.
    """

    query_starts: Integers
    num_tokens: Integers
    slots: Integers
    sinks: Integers
    kept: Integers
    gap: Integers
    table_rows: Integers

    @classmethod
    def of(cls, query_starts: Integers, num_tokens: Integers, slots: Integers) -> BatchRows:
        """Rows without sinks and cuts."""
        none = np.zeros_like(num_tokens)
        number = np.arange(len(num_tokens))
        return cls(query_starts, num_tokens, slots, none - 1, none, none.copy(), number)

    @cached_property
    def num_new(self) -> Integers:
        """``[rows]`` tokens that the step computes."""
        return np.diff(self.query_starts)

    @cached_property
    def before(self) -> Integers:
        """``[rows]`` length before the step."""
        return self.num_tokens - self.num_new

    @cached_property
    def num_decoded(self) -> int:
        """Leading rows with one new token."""
        is_chunk = self.num_new != 1
        return int(np.argmax(is_chunk)) if is_chunk.any() else len(is_chunk)

    def cut_at_blocks(self, first: int) -> BatchRows:
        """Rows from ``first`` on as if the tokens of each block came one after the other."""
        number, ends = list(range(first)), self.num_tokens[:first].tolist()
        for row in range(first, len(self.num_tokens)):
            total = int(self.num_tokens[row])
            block = int(self.before[row]) // PAGE_TOKENS + 1
            own = [*range(block * PAGE_TOKENS, total, PAGE_TOKENS), total]
            number += [row] * len(own)
            ends += own
        picked, lengths = _integers(number), _integers(ends)
        starts = self.query_starts[picked + 1] - (self.num_tokens[picked] - lengths)
        return BatchRows(
            np.concatenate([self.query_starts[:1], starts]),
            lengths,
            self.slots[picked],
            self.sinks[picked],
            self.kept[picked],
            self.gap[picked],
            self.table_rows[picked],
        )

    def seals_first_block(self) -> NDArray[np.bool_]:
        """``[rows]`` whether a row's first block becomes full."""
        return (self.before < PAGE_TOKENS) & (self.num_tokens >= PAGE_TOKENS)


def plan_decode(
    rows: BatchRows,
    *,
    padded: int,
    sink_tokens: int,
    spare_slot: int,
    spare_sink: int,
    window: int | None = None,
) -> Integers:
    """Numbers of the decoded rows in the form that one copy takes to the device.

    Args:
        rows: The batch; only its decoded rows count.
        padded: Rows of the graph; those behind the decoded ones touch the spare slot only.
        sink_tokens: Dense tokens of a sequence that has them.
        spare_slot: A slot nobody reads.
        spare_sink: A page of sinks without tokens.
        window: Positions a query sees; None for all.

    Returns:
        ``[10 * padded + 1]`` int64: tail length with the new token and its first position, row by
        row; then, field by field, first block listed, pages listed, start in the list, base of the
        first block, slot, sinks, blocks of a cut prompt and those gone behind them; at the end,
        pages of all rows.
    """
    count = rows.num_decoded
    tokens = rows.num_tokens[:count]
    full = (tokens - 1) // PAGE_TOKENS
    first = np.zeros_like(full)
    if window is not None:
        first = np.maximum(tokens - window, 0) // PAGE_TOKENS
    packed = np.zeros(DECODE_FIELDS * padded + 1, dtype=np.int64)
    extents = packed[: 2 * padded].reshape(padded, 2)
    extents[:, 0] = 1
    extents[:count, 0] = tokens - full * PAGE_TOKENS
    extents[:count, 1] = full * PAGE_TOKENS
    fields = packed[:-1].reshape(DECODE_FIELDS, padded)
    fields[_FIRST_BLOCK, :count] = first
    fields[_NUM_PAGES, :count] = full - first - rows.gap[:count]
    fields[_KEPT, :count], fields[_GAP, :count] = rows.kept[:count], rows.gap[:count]
    ends = np.cumsum(fields[_NUM_PAGES])
    fields[_LIST_START] = ends - fields[_NUM_PAGES]
    # sinks of a block that is not full yet are in the tail
    sinks = np.where(full > 0, rows.sinks[:count], -1)
    fields[_FIRST_BASE, :count] = np.where(sinks >= 0, sink_tokens, 0)
    fields[_SLOT] = spare_slot
    fields[_SLOT, :count] = rows.slots[:count]
    fields[_SINK] = spare_sink
    fields[_SINK, :count] = np.where(sinks >= 0, sinks, spare_sink)
    packed[-1] = ends[-1] if padded else 0
    return packed


@dataclass(frozen=True, slots=True, eq=False)
class SealPlan:
    """Blocks that become full, and where their states lie.

    States are numbered: tokens of the batch first, then, 128 by 128, those of the slots ``held``.

    Attributes:
        held: ``[m]`` slots whose tails the blocks begin with.
        source: ``[blocks, 128]`` numbers of the states of each coded page.
        positions: ``[blocks, 128]`` their positions.
        counts: ``[blocks]`` live states of each page.
        table_row: ``[blocks]`` row of the block table.
        table_column: ``[blocks]`` column there.
        sink_source: ``[sequences, sink_tokens]`` numbers of states that stay dense.
        sink_rows: ``[sequences]`` where they go.
    """

    held: Integers
    source: Integers
    positions: Integers
    counts: Integers
    table_row: Integers
    table_column: Integers
    sink_source: Integers
    sink_rows: Integers

    @property
    def num_blocks(self) -> int:
        """Blocks that become full."""
        return len(self.counts)


class _Seals:
    """Collects full blocks, row by row."""

    def __init__(self, num_batch: int, sink_tokens: int) -> None:
        self._next = num_batch
        self._sink_tokens = sink_tokens
        self._held: list[int] = []
        # source, positions, and count, row and column of each block
        self._blocks: list[tuple[Integers, Integers, Integers]] = []
        self._sinks: list[tuple[Integers, int]] = []

    def hold(self, slot: int) -> int:
        """Number of the first state of a slot."""
        self._held.append(slot)
        self._next += PAGE_TOKENS
        return self._next - PAGE_TOKENS

    def add(self, row: int, first: int, states: Integers, sink: int) -> None:
        """Blocks ``states [blocks, 128]``, from block ``first`` on.

        The first states of block 0 stay dense if ``sink`` is not -1.
        """
        column = np.arange(first, first + len(states))
        positions = column[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)
        facts = np.stack([np.full_like(column, PAGE_TOKENS), np.full_like(column, row), column])
        if first == 0 and sink >= 0:
            self._sinks.append((states[0, : self._sink_tokens], sink))
            pick = np.minimum(np.arange(PAGE_TOKENS) + self._sink_tokens, PAGE_TOKENS - 1)
            states = states.copy()
            states[0], positions[0] = states[0, pick], pick
            facts[0, 0] -= self._sink_tokens
        self._blocks.append((states, positions, facts))

    def plan(self) -> SealPlan:
        """All of them."""
        none = np.zeros((0, PAGE_TOKENS), dtype=np.int64)
        source = np.concatenate([none, *(part[0] for part in self._blocks)])
        positions = np.concatenate([none, *(part[1] for part in self._blocks)])
        facts = _join([part[2] for part in self._blocks])
        sinks, sink_rows = zip(*self._sinks, strict=True) if self._sinks else ((), ())
        return SealPlan(
            _integers(self._held),
            source,
            positions,
            *facts,
            sink_source=_integers(sinks).reshape(len(sink_rows), self._sink_tokens),
            sink_rows=_integers(sink_rows),
        )


def _integers(values: Sequence[Any]) -> Integers:
    return np.array(values, dtype=np.int64)


def plan_seals(
    rows: BatchRows, which: Sequence[int], *, num_batch: int, sink_tokens: int
) -> SealPlan:
    """Blocks that some rows fill in a step.

    Args:
        rows: The batch.
        which: Its rows to look at. The token of a decoded row is in its tail when this is used.
        num_batch: Tokens of the batch that have numbers; 0 if all rows are decoded.
        sink_tokens: Dense tokens of a sequence whose ``sinks`` is not -1.
    """
    seals = _Seals(num_batch, sink_tokens)
    decoded, before = rows.num_decoded, rows.before
    for row in which:
        start, total = int(before[row]), int(rows.num_tokens[row])
        first, end = start // PAGE_TOKENS, total // PAGE_TOKENS
        if end == first:
            continue
        in_slot = total if row < decoded else start
        held = seals.hold(int(rows.slots[row])) if in_slot % PAGE_TOKENS or row < decoded else 0
        position = np.arange(first * PAGE_TOKENS, end * PAGE_TOKENS)
        in_batch = int(rows.query_starts[row]) + position - start
        states = np.where(position < in_slot, held + position % PAGE_TOKENS, in_batch)
        seals.add(row, first, states.reshape(-1, PAGE_TOKENS), int(rows.sinks[row]))
    return seals.plan()


@dataclass(frozen=True, slots=True, eq=False)
class TailWrites:
    """Tokens of chunks that stay dense until their block is full, ``[tokens]`` each.

    Attributes:
        tokens: Their places in the batch.
        slots: Their slots.
        offsets: Their places there.
    """

    tokens: Integers
    slots: Integers
    offsets: Integers


def plan_tails(rows: BatchRows) -> TailWrites:
    """What chunks leave behind their last full block."""
    parts: list[Integers] = []
    for row in range(rows.num_decoded, len(rows.num_tokens)):
        total, start = int(rows.num_tokens[row]), int(rows.before[row])
        position = np.arange(max(start, total // PAGE_TOKENS * PAGE_TOKENS), total)
        token = int(rows.query_starts[row]) + position - start
        slot = np.full_like(position, rows.slots[row])
        parts.append(np.stack([token, slot, position % PAGE_TOKENS]))
    joined = np.concatenate(parts, 1) if parts else np.zeros((3, 0), dtype=np.int64)
    return TailWrites(joined[0], joined[1], joined[2])


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPlan:
    """Chunks of consecutive rows, and the context that is rebuilt beside them for the step.

    States of a row lie side by side in the workspace: those of full blocks, rebuilt from codes,
    with the dense first ones; those of the tail; those of the chunk.

    Attributes:
        first_row: First of the rows.
        first: First token of the chunks in the batch.
        end: Behind the last one.
        query_starts: ``[rows + 1]`` first token of each chunk, counted from ``first``.
        key_starts: ``[rows + 1]`` first state of each row in the workspace.
        most_queries: Tokens of the longest chunk.
        most_keys: States of the longest row.
        page_row: ``[pages]`` row of the block table of every page to rebuild.
        page_column: ``[pages]`` column there.
        page_place: ``[pages]`` where its first state goes in the workspace.
        sink_rows: ``[states]`` dense first states: row of the sinks.
        sink_offsets: ``[states]`` place there.
        sink_places: ``[states]`` place in the workspace.
        tail_slots: ``[states]`` states of tails: slot.
        tail_offsets: ``[states]`` place there.
        tail_places: ``[states]`` place in the workspace.
        chunk_places: ``[end - first]`` places of the chunks' own states.
    """

    first_row: int
    first: int
    end: int
    query_starts: Integers
    key_starts: Integers
    most_queries: int
    most_keys: int
    page_row: Integers
    page_column: Integers
    page_place: Integers
    sink_rows: Integers
    sink_offsets: Integers
    sink_places: Integers
    tail_slots: Integers
    tail_offsets: Integers
    tail_places: Integers
    chunk_places: Integers

    @property
    def has_context(self) -> bool:
        """Whether any row has states before its chunk."""
        return bool(self.key_starts[-1] > self.query_starts[-1])


def plan_chunks(
    rows: BatchRows,
    *,
    room: int,
    sink_tokens: int,
    window: int | None = None,
    is_repeatable: bool = False,
) -> list[ChunkPlan]:
    """Group the chunks of a step so that each group fits the workspace.

    Without any context all chunks are one group, whatever their length: nothing is rebuilt.

    Args:
        rows: The batch.
        room: States of the workspace; at least as many as the longest row has.
        sink_tokens: Dense tokens of a row whose ``sinks`` is not -1.
        window: Positions a query sees; None for all.
        is_repeatable: Whether tokens read all before their own block from codes, so that these
            must be written first, and context is rebuilt for each block.
    """
    first = rows.num_decoded
    if first == len(rows.num_tokens):
        return []
    if is_repeatable:
        rows = rows.cut_at_blocks(first)
    count = len(rows.num_tokens)
    oldest = np.zeros_like(rows.before)
    if window is not None:
        oldest = np.maximum(rows.before + 1 - window, 0) // PAGE_TOKENS * PAGE_TOKENS
    sizes = rows.num_tokens - oldest - rows.gap * PAGE_TOKENS
    if not rows.before[first:].any():
        return [_plan_group(rows, oldest, first, count, sink_tokens)]
    groups, begin = [], first
    for row in range(first, count):
        if row > begin and sizes[begin : row + 1].sum() > room:
            groups.append(_plan_group(rows, oldest, begin, row, sink_tokens))
            begin = row
    groups.append(_plan_group(rows, oldest, begin, count, sink_tokens))
    return groups


def _plan_group(
    rows: BatchRows, oldest: Integers, begin: int, end: int, sink_tokens: int
) -> ChunkPlan:
    starts, before = rows.query_starts[begin : end + 1], rows.before
    sizes = (rows.num_tokens - oldest - rows.gap * PAGE_TOKENS)[begin:end]
    key_starts = np.concatenate([[0], np.cumsum(sizes)])
    pages: list[Integers] = []
    sinks: list[Integers] = []
    tails: list[Integers] = []
    chunks: list[Integers] = []
    for row in range(begin, end):
        start, gap = int(key_starts[row - begin]), int(rows.gap[row])
        full = int(before[row]) // PAGE_TOKENS
        column = np.arange(int(oldest[row]) // PAGE_TOKENS, full)
        if gap:
            column = np.delete(column, np.s_[int(rows.kept[row]) : int(rows.kept[row]) + gap])
        to = start + np.arange(len(column)) * PAGE_TOKENS
        if len(column) and column[0] == 0 and rows.sinks[row] >= 0:
            offset = np.arange(sink_tokens)
            sinks.append(_columns(int(rows.sinks[row]), offset, start + offset))
            to[0] += sink_tokens
        pages.append(_columns(int(rows.table_rows[row]), column, to))
        # where position 0 would lie, if all behind the full blocks lay as it does
        place = start - int(oldest[row]) - gap * PAGE_TOKENS
        position = np.arange(full * PAGE_TOKENS, int(before[row]))
        tails.append(_columns(int(rows.slots[row]), position % PAGE_TOKENS, place + position))
        chunks.append(place + np.arange(int(before[row]), int(rows.num_tokens[row])))
    return ChunkPlan(
        begin,
        int(starts[0]),
        int(starts[-1]),
        starts - starts[0],
        key_starts,
        int(np.diff(starts).max()),
        int(sizes.max()),
        *_join(pages),
        *_join(sinks),
        *_join(tails),
        chunk_places=np.concatenate(chunks),
    )


def _columns(number: int, offset: Integers, place: Integers | int) -> Integers:
    """``[3, n]``: the same number for all, offsets, places."""
    return np.stack([np.full_like(offset, number), offset, np.zeros_like(offset) + place])


def _join(parts: list[Integers]) -> tuple[Integers, Integers, Integers]:
    joined = np.concatenate([np.zeros((3, 0), dtype=np.int64), *parts], 1)
    return joined[0], joined[1], joined[2]
