# SPDX-License-Identifier: Apache-2.0
"""Decides what the heads of a block with a budget keep, when the block becomes full.

Blocks that a prompt fills are judged by the newest queries of its chunk. Blocks that fill token by
token are judged by every fourth of its own queries, whose votes are summed while it is open.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sphkv.codec.states import SphericalCodec
from sphkv.integrations.vllm.budgeted import BudgetedBlock
from sphkv.integrations.vllm.observed import (
    WINDOW,
    Votes,
    measure_errors,
    page_losses,
)
from sphkv.integrations.vllm.steps import SealedBlock, StepPlan
from sphkv.retention.errors import TierErrors

States = tuple[Tensor, Tensor, Tensor]
# Every token's vote would cost more than its attention; the last of a block is always one.
_VOTE_STRIDE = 4


class BlockRetention:
    """Votes and decisions of one worker.

    Attributes:
        block: Layout of a block.
    """

    def __init__(self, block: BudgetedBlock, max_sequences: int) -> None:
        self.block = block
        self._slots = max_sequences
        self._errors: dict[int, TierErrors] = {}
        self._votes: dict[int, Votes] = {}

    def learn_errors(
        self, codec: SphericalCodec, layer: int, states: States, *, scale: float
    ) -> None:
        """Measure what the tiers do to a layer; queries, keys, values ``[heads, tokens, dim]``."""
        self._errors[layer] = measure_errors(
            codec, layer, self.block.tiers, states, scale=scale, sinks=self.block.sink_tokens
        )

    def observe(self, layer: int, seen: States, step: StepPlan, scale: float) -> None:
        """Add the votes of single new tokens to the blocks they are in.

        Args:
            layer: Index of the layer.
            seen: Queries and outputs ``[rows, query_heads, head_dim]``, log-sum-exp.
            step: What the batch is.
            scale: Factor on the dot product.
        """
        if layer not in self._votes:
            shape = (self._slots, self.block.heads, self.block.tokens)
            self._votes[layer] = Votes.zeros(*shape)
        votes = self._votes[layer]
        for writes in (step.early, step.late):
            for slot in writes.slots[writes.offsets == 0].tolist():
                votes[slot].clear()
        for sequence in step.sequences:
            if sequence.num_queries != 1 or sequence.num_tokens % _VOTE_STRIDE:
                continue
            row, slot, count = sequence.first_row, sequence.tail_slot, sequence.tail_tokens
            held = (step.pool.keys[layer][slot], step.pool.values[layer][slot])
            votes[slot].add(
                tuple(part[row : row + 1] for part in seen),  # type: ignore[arg-type]
                (held[0][:, :count], held[1][:, :count]),
                torch.arange(count - 1, -1, -1)[None],
                scale,
                skip=0 if sequence.blocks else self.block.sink_tokens,
            )

    def choose(
        self,
        layer: int,
        sealed: SealedBlock,
        states: tuple[Tensor, Tensor],
        seen: States,
        step: StepPlan,
        scale: float,
    ) -> Tensor:
        """Tiers ``[heads, parts]`` of a full block with keys and values ``states``."""
        sequence = step.sequences[sealed.sequence]
        is_first = sealed.first_position == 0
        if sequence.num_queries == 1:
            votes = self._votes[layer][sealed.slot]
        else:
            end = sequence.first_row + sequence.num_queries
            rows = slice(max(sequence.first_row, end - WINDOW), end)
            votes = Votes.zeros(self.block.heads, self.block.tokens)
            at = sealed.first_position + torch.arange(self.block.tokens)
            distance = step.positions[rows, None] - at
            votes.add(
                tuple(part[rows] for part in seen),  # type: ignore[arg-type]
                states,
                distance,
                scale,
                skip=self.block.sink_tokens if is_first else 0,
            )
        num_blocks = sequence.num_tokens // self.block.tokens
        loss = page_losses(votes, states, self._errors[layer], num_blocks=num_blocks)
        return self.block.choose(loss, is_first=is_first)
