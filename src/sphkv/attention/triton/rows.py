# SPDX-License-Identifier: Apache-2.0
"""Queries of a launch, and the slots its partial results go to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions

NO_WINDOW = 1 << 62
_MIN_ROWS, _MAX_ROWS = 16, 64
_MAX_TILE = 64


@dataclass(frozen=True, slots=True, eq=False)
class QueryRows:
    """Queries of a batch, by KV head.

    A *list* is one (sequence, KV head); its rows are the queries of the heads that share it.

    Attributes:
        query: ``[sequences, query_heads, queries, head_dim]`` contiguous, after RoPE.
        positions: ``[sequences, queries]`` int64 on the query's device.
        num_heads: KV heads.
        options: Scale, soft-cap and window.
        precision: ``input_precision`` of the products, as ``tl.dot`` has it.
    """

    query: Tensor
    positions: Tensor
    num_heads: int
    options: AttentionOptions
    precision: str = "tf32x3"

    @property
    def num_lists(self) -> int:
        """(sequence, KV head) pairs."""
        return self.query.shape[0] * self.num_heads

    @property
    def num_queries(self) -> int:
        """Queries of each sequence."""
        return self.query.shape[2]

    @property
    def num_rows(self) -> int:
        """Query rows of each list."""
        return self.query.shape[1] // self.num_heads * self.num_queries

    @property
    def block(self) -> int:
        """Rows one program handles."""
        block = _MIN_ROWS
        while block < self.num_rows and block < _MAX_ROWS:
            block *= 2
        return block

    @property
    def num_blocks(self) -> int:
        """Programs that share the rows of a list."""
        return -(-self.num_rows // self.block)


@dataclass(frozen=True, slots=True, eq=False)
class PartSlots:
    """Where partial results go; a launch fills ``num_splits`` slots from ``first`` on.

    Attributes:
        output: ``[slots, lists, rows, head_dim]`` float32.
        lse: ``[slots, lists, rows]`` float32.
        first: First slot of the launch.
        num_splits: Slots of the launch.
    """

    output: Tensor
    lse: Tensor
    first: int
    num_splits: int

    @classmethod
    def empty(cls, rows: QueryRows, num_slots: int) -> PartSlots:
        """Slots for a batch; every one must be written before they are combined."""
        lead = (num_slots, rows.num_lists, rows.num_rows)
        output = torch.empty(*lead, rows.query.shape[3], device=rows.query.device)
        return cls(output, torch.empty(lead, device=rows.query.device), 0, num_slots)

    def part(self, first: int, num_splits: int) -> PartSlots:
        """The slots of one launch."""
        return PartSlots(self.output, self.lse, first, num_splits)


def tile_tokens(num_tokens: int, head_dim: int) -> int:
    """Tokens handled at once: a power of two that divides ``num_tokens``.

    Wide heads take fewer, so that a tile of values stays in registers.
    """
    limit = _MAX_TILE if head_dim <= 64 else _MAX_TILE // 2
    return min(limit, num_tokens & -num_tokens)
