# SPDX-License-Identifier: Apache-2.0
"""What one step of the scheduler writes and reads, worked out once for all layers.

A block is coded when its last token arrives. Until then its states are bfloat16 in a slot of
``TailPool``: a running sequence has one such block per group of layers, so as many slots as
sequences may run are enough. The pool's bytes come off the memory that vLLM may fill with pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor


def tail_bytes(num_slots: int, num_layers: int, shape: tuple[int, int, int]) -> int:
    """Bytes of the pools of ``num_layers`` layers; ``shape`` is heads, tokens, head_dim."""
    heads, tokens, head_dim = shape
    return 2 * torch.bfloat16.itemsize * num_slots * num_layers * heads * tokens * head_dim


class TailPool:
    """Slots of the layers that share a block table.

    Attributes:
        keys: By layer, ``[slots, heads, tokens, head_dim]`` bfloat16.
        values: The same for values.
    """

    def __init__(self, layers: Iterable[int], num_slots: int, shape: tuple[int, int, int]) -> None:
        def zeros() -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=torch.bfloat16)

        self.keys = {layer: zeros() for layer in layers}
        self.values = {layer: zeros() for layer in self.keys}
        self._slot_of: dict[int, int] = {}
        self._free = list(range(num_slots))
        self._sealed: list[int] = []
        self._passed_on: list[int] = []
        self._stamp_of: dict[int, int] = {}
        self._num_seals = 0

    @property
    def num_open(self) -> int:
        """Blocks that have a slot."""
        return len(self._slot_of)

    def begin_step(self) -> None:
        """Give back the slots of blocks that the last step sealed in every layer."""
        self.release(self._sealed)
        self._free += self._passed_on
        self._sealed, self._passed_on = [], []

    def open(self, block: int, offset: int, *, is_late: bool = False) -> int:
        """The slot of a block whose token at ``offset`` comes next.

        Args:
            block: The block.
            offset: Place of the token in it.
            is_late: Whether the token is written after blocks are sealed, so that it may take
                a slot which one of them gives up in this step.

        Raises:
            RuntimeError: The block's earlier tokens are not here, or more sequences run than
                the pool was sized for; either would be our mistake.
        """
        slot = self._slot_of.get(block)
        if slot is not None:
            return slot
        if offset:
            raise RuntimeError(f"tokens of block {block} before offset {offset} are not held")
        free = self._passed_on if is_late and self._passed_on else self._free
        if not free:
            raise RuntimeError(f"all {self.num_open} dense slots are in use")
        self._slot_of[block] = free.pop()
        return self._slot_of[block]

    def slot(self, block: int) -> int:
        """The slot of a block that is open.

        Raises:
            RuntimeError: It is not.
        """
        if block not in self._slot_of:
            raise RuntimeError(f"block {block} is not full and its tokens are not held")
        return self._slot_of[block]

    def seal(self, block: int, *, is_late: bool = False) -> None:
        """Note that the block becomes full in this step.

        Its slot is free in the next step; with ``is_late``, tokens written late may have it in
        this one.
        """
        self._num_seals += 1
        self._stamp_of[block] = self._num_seals
        if not is_late:
            self._sealed.append(block)
        elif block in self._slot_of:
            self._passed_on.append(self._slot_of.pop(block))

    def stamp(self, blocks: Iterable[int]) -> int:
        """Number of the latest seal of some blocks; 0 if none was sealed here."""
        return max((self._stamp_of.get(block, 0) for block in blocks), default=0)

    def release(self, blocks: Iterable[int]) -> None:
        """Forget blocks that are sealed or whose sequence is gone."""
        for block in blocks:
            slot = self._slot_of.pop(block, None)
            if slot is not None:
                self._free.append(slot)


@dataclass(frozen=True, slots=True, eq=False)
class SequenceStep:
    """New tokens of one sequence, or some of them, and where its states lie.

    Attributes:
        first_row: First of its rows in the batch.
        num_queries: New tokens.
        num_tokens: Tokens after them.
        blocks: Ids of the blocks before them that are read, all full, first to last.
        stamp: Latest seal of these blocks; the same blocks and stamp mean the same bytes.
        tail_slot: Slot of the tokens after them; -1 if there is none.
        tail_tokens: Tokens of the slot to read: the old ones, and a single new one.
        is_single: Whether there is one new token, and the slot has it already.
    """

    first_row: int
    num_queries: int
    num_tokens: int
    blocks: tuple[int, ...]
    stamp: int
    tail_slot: int
    tail_tokens: int
    is_single: bool

    @property
    def first_position(self) -> int:
        """Position of the first new token."""
        return self.num_tokens - self.num_queries


@dataclass(frozen=True, slots=True, eq=False)
class SealedBlock:
    """A block that becomes full: its first tokens are in a slot, the others rows of the batch.

    Attributes:
        block: Its id.
        first_position: Position of its first token.
        slot: The slot; -1 if all its tokens are rows.
        num_held: Tokens in the slot.
        row: Row of the first token that is not.
        sequence: Index of its sequence in the step.
    """

    block: int
    first_position: int
    slot: int
    num_held: int
    row: int
    sequence: int


@dataclass(frozen=True, slots=True, eq=False)
class TailWrites:
    """Rows of the batch that go to slots, ``[tokens]`` int64 each.

    Attributes:
        rows: The rows.
        slots: Their slots.
        offsets: Their places in the slot.
    """

    rows: Tensor
    slots: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, places: list[tuple[int, int, int]]) -> TailWrites:
        """From triples of row, slot and offset."""
        return cls(*torch.tensor(places, dtype=torch.int64).reshape(-1, 3).unbind(1))


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What every layer does in one step.

    Attributes:
        sequences: The sequences of the batch.
        sealed: Blocks that become full, coded before any sequence reads.
        early: Single tokens, which their own queries read in the slot.
        late: Tokens of prompts; written after blocks are sealed, because a slot passes from the
            block that becomes full to the one after it.
        positions: ``[rows]`` int64 position of every row of the batch.
        pool: The slots.
    """

    sequences: tuple[SequenceStep, ...]
    sealed: tuple[SealedBlock, ...]
    early: TailWrites
    late: TailWrites
    positions: Tensor
    pool: TailPool


class _Writes:
    """Collects what the tokens of a step do to the pool."""

    def __init__(self, pool: TailPool, block_tokens: int) -> None:
        self.pool = pool
        self.block_tokens = block_tokens
        self.sealed: list[SealedBlock] = []
        self.early: list[tuple[int, int, int]] = []
        self.late: list[tuple[int, int, int]] = []

    def read_token(self, blocks: list[int], total: int, row: int, sequence: int) -> SequenceStep:
        """A single new token, the last one of a sequence, which it sees in its slot."""
        full = (total - 1) // self.block_tokens
        self.add_token(blocks[full], total - 1, row, sequence)
        tail = total - full * self.block_tokens
        slot = self.pool.slot(blocks[full])
        return SequenceStep(row, 1, total, tuple(blocks[:full]), 0, slot, tail, is_single=True)

    def read_chunk(
        self,
        blocks: list[int],
        total: int,
        rows: tuple[int, int],
        sequence: int,
        *,
        is_repeatable: bool,
    ) -> list[SequenceStep]:
        """New tokens of a prompt, which see each other before they are stored."""
        first, end = rows
        before, row, tokens = total - (end - first), first, self.block_tokens
        tail = before % tokens
        slot = self.pool.slot(blocks[before // tokens]) if tail else -1
        starts = [first]
        while row < end:
            position = before + row - first
            count = min(end - row, tokens - position % tokens)
            self.add_chunk(blocks[position // tokens], position, (row, count), sequence)
            row += count
            if is_repeatable and row < end:
                # they see their own block, and those before it as stored
                starts.append(row)
        parts = []
        for start, stop in pairwise([*starts, end]):
            old = tuple(blocks[: (before + start - first) // tokens])
            # behind the first block of a chunk nothing is in a slot yet
            held = (slot, tail) if start == first else (-1, 0)
            length = before + stop - first
            parts.append(SequenceStep(start, stop - start, length, old, 0, *held, is_single=False))
        return parts

    def add_token(self, block: int, position: int, row: int, sequence: int) -> None:
        """A single new token."""
        offset = position % self.block_tokens
        slot = self.pool.open(block, offset)
        self.early.append((row, slot, offset))
        if offset + 1 == self.block_tokens:
            first = position - offset
            self.sealed.append(SealedBlock(block, first, slot, offset + 1, row, sequence))
            self.pool.seal(block)

    def add_chunk(self, block: int, position: int, rows: tuple[int, int], sequence: int) -> None:
        """Tokens of a prompt that lie in one block: their first row and how many."""
        row, count = rows
        offset = position % self.block_tokens
        if offset + count < self.block_tokens:
            slot = self.pool.open(block, offset, is_late=True)
            self.late += [(row + at, slot, offset + at) for at in range(count)]
            return
        slot = self.pool.open(block, offset, is_late=True) if offset else -1
        self.sealed.append(SealedBlock(block, position - offset, slot, offset, row, sequence))
        self.pool.seal(block, is_late=True)


def plan_step(
    pool: TailPool,
    query_starts: Sequence[int],
    num_tokens: Sequence[int],
    block_table: Tensor,
    block_tokens: int,
    *,
    is_repeatable: bool = False,
) -> StepPlan:
    """Work out a step.

    Args:
        pool: Slots of the layers that share the block table.
        query_starts: First row of each sequence, and the end.
        num_tokens: Tokens of each sequence after this step.
        block_table: ``[sequences, blocks]`` ids; entries past a sequence's end are anything.
        block_tokens: Tokens of a block.
        is_repeatable: Whether tokens of a chunk read those of earlier blocks as stored, too.
    """
    pool.begin_step()
    writes = _Writes(pool, block_tokens)
    sequences: list[SequenceStep] = []
    positions = torch.zeros(query_starts[-1], dtype=torch.int64)
    for index, total in enumerate(num_tokens):
        first, end = query_starts[index], query_starts[index + 1]
        if end == first:
            continue
        blocks = block_table[index, : -(-total // block_tokens)].tolist()
        positions[first:end] = torch.arange(total - (end - first), total)
        if end - first == 1:
            sequences.append(writes.read_token(blocks, total, first, len(sequences)))
            continue
        rows, number = (first, end), len(sequences)
        sequences += writes.read_chunk(blocks, total, rows, number, is_repeatable=is_repeatable)
    return StepPlan(
        # any of them may have found what another fills in this step
        tuple(replace(one, stamp=pool.stamp(one.blocks)) for one in sequences),
        tuple(writes.sealed),
        TailWrites.of(writes.early),
        TailWrites.of(writes.late),
        positions,
        pool,
    )
