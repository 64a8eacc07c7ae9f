# SPDX-License-Identifier: Apache-2.0
"""What one step of the scheduler writes and reads, worked out once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.integrations.vllm.tails import TailPool


@dataclass(frozen=True, slots=True, eq=False)
class SequenceStep:
    """New tokens of one sequence and where its states lie.

    Attributes:
        first_row: First of its rows in the batch.
        num_queries: New tokens.
        num_tokens: Tokens after this step.
        blocks: Ids of the blocks that were full before it, first to last.
        stamp: Latest seal of these blocks; the same blocks and stamp mean the same bytes.
        tail_slot: Slot of the tokens after them; -1 if there is none.
        tail_tokens: Tokens of the slot to read: the old ones, and a single new one.
    """

    first_row: int
    num_queries: int
    num_tokens: int
    blocks: tuple[int, ...]
    stamp: int
    tail_slot: int
    tail_tokens: int

    @property
    def first_position(self) -> int:
        """Position of the first new token."""
        return self.num_tokens - self.num_queries


@dataclass(frozen=True, slots=True, eq=False)
class SealedBlock:
    """A block that becomes full.

    Attributes:
        block: Its id.
        first_position: Position of its first token.
        slot: Slot that holds all of it by now; -1 if all its tokens are rows of this batch.
        row: Its first row where ``slot`` is -1.
        sequence: Index of its sequence in the step.
    """

    block: int
    first_position: int
    slot: int
    row: int
    sequence: int


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """What every layer does in one step.

    Attributes:
        sequences: The sequences of the batch.
        sealed: Blocks that become full.
        tail_rows: ``[tokens]`` int64 rows of the batch that go to a slot.
        tail_slots: ``[tokens]`` int64 their slots.
        tail_offsets: ``[tokens]`` int64 their places in the slot.
        positions: ``[rows]`` int64 position of every row of the batch.
        pool: The slots.
    """

    sequences: tuple[SequenceStep, ...]
    sealed: tuple[SealedBlock, ...]
    tail_rows: Tensor
    tail_slots: Tensor
    tail_offsets: Tensor
    positions: Tensor
    pool: TailPool


class _Writes:
    """Collects what the tokens of a step do to the pool."""

    def __init__(self, pool: TailPool, block_tokens: int) -> None:
        self.pool = pool
        self.block_tokens = block_tokens
        self.sealed: list[SealedBlock] = []
        self.places: list[tuple[int, int, int]] = []

    def add(self, block: int, position: int, rows: tuple[int, int], sequence: int) -> None:
        """A row and so many after it go to the block, the first at ``position``."""
        row, count = rows
        tokens = self.block_tokens
        offset = position % tokens
        is_full = offset + count == tokens
        slot = -1
        if not is_full or offset:
            slot = self.pool.open(block, offset)
            self.places += [(row + i, slot, offset + i) for i in range(count)]
        if is_full:
            self.sealed.append(SealedBlock(block, position - offset, slot, row, sequence))
            self.pool.seal(block)

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, slots and offsets of the tokens that go to the pool."""
        table = torch.tensor(self.places, dtype=torch.int64).reshape(-1, 3)
        rows, slots, offsets = table.unbind(1)
        return rows, slots, offsets


def plan_step(
    pool: TailPool,
    query_starts: Sequence[int],
    num_tokens: Sequence[int],
    block_table: Tensor,
    block_tokens: int,
) -> StepPlan:
    """Work out a step.

    Args:
        pool: Slots of the layers that share the block table.
        query_starts: First row of each sequence, and the end.
        num_tokens: Tokens of each sequence after this step.
        block_table: ``[sequences, blocks]`` ids; entries past a sequence's end are anything.
        block_tokens: Tokens of a block.
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
        before, row = total - (end - first), first
        position = before
        positions[first:end] = torch.arange(before, total)
        while row < end:
            count = min(end - row, block_tokens - position % block_tokens)
            writes.add(blocks[position // block_tokens], position, (row, count), len(sequences))
            position, row = position + count, row + count
        full = before // block_tokens
        # new tokens of a prompt see each other before they are stored, a single one in its slot
        tail = before % block_tokens + (end - first == 1)
        slot = pool.slot(blocks[full]) if tail else -1
        old = tuple(blocks[:full])
        sequences.append(SequenceStep(first, end - first, total, old, pool.stamp(old), slot, tail))
    return StepPlan(tuple(sequences), tuple(writes.sealed), *writes.columns(), positions, pool)
