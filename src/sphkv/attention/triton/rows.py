# SPDX-License-Identifier: Apache-2.0
"""Queries of a launch, the slots its partial results go to, and how these are merged.

Parts are merged by their log-sum-exp, coded and dense values apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sphkv.attention.partial import PartialAttention
from sphkv.attention.request import AttentionOptions
from sphkv.attention.triton.pieces import LN2, LOG2E
from sphkv.codec.hadamard import rotation_matrix

NO_WINDOW = 1 << 62
_MIN_ROWS, _MAX_ROWS = 16, 64
_MAX_TILE = 64
# Up to this many dimensions one program holds the whole rotation.
_FUSED_DIMS = 128


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


@triton.jit
def _combine_kernel(
    part_ptr,  # [slots, lists, rows, DIM] f32
    lse_ptr,  # [slots, lists, rows] f32
    rotation_ptr,  # [DIM, DIM] f32
    out_ptr,  # [lists, rows, DIM]
    rotated_ptr,  # [lists, rows, DIM] f32, written where the rotation is not undone here
    out_lse_ptr,  # [lists, rows] f32
    slots, num_rotated,
    DIM: tl.constexpr, DIMS: tl.constexpr, SLOT_BLOCK: tl.constexpr, IS_FUSED: tl.constexpr,
):  # fmt: skip
    place, num_places = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    dim = tl.arange(0, DIMS)
    in_dim = dim < DIM
    most = tl.full([SLOT_BLOCK], float("-inf"), tl.float32)
    for at in range(0, slots, SLOT_BLOCK):
        slot = at + tl.arange(0, SLOT_BLOCK)
        part = slot * num_places + place
        most = tl.maximum(most, tl.load(lse_ptr + part, mask=slot < slots, other=float("-inf")))
    top = tl.max(most, 0)
    # no key at all: every weight is zero, not NaN
    safe = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.zeros([SLOT_BLOCK], tl.float32)
    rotated = tl.zeros([DIMS], tl.float32)
    plain = tl.zeros([DIMS], tl.float32)
    for at in range(0, slots, SLOT_BLOCK):
        slot = at + tl.arange(0, SLOT_BLOCK)
        part = slot * num_places + place
        lse = tl.load(lse_ptr + part, mask=slot < slots, other=float("-inf"))
        weight = tl.exp2((lse - safe) * LOG2E)
        mass += weight
        seen = (slot < slots)[:, None] & in_dim[None, :]
        output = tl.load(part_ptr + part[:, None] * DIM + dim[None, :], mask=seen, other=0.0)
        output *= weight[:, None]
        is_rotated = (slot < num_rotated)[:, None]
        rotated += tl.sum(tl.where(is_rotated, output, 0.0), 0)
        plain += tl.sum(tl.where(is_rotated, 0.0, output), 0)
    total = tl.sum(mass, 0)
    share = 1.0 / tl.where(total > 0.0, total, 1.0)
    if IS_FUSED:
        square = in_dim[:, None] & in_dim[None, :]
        matrix = tl.load(rotation_ptr + dim[:, None] * DIM + dim[None, :], mask=square, other=0.0)
        plain += tl.sum(rotated[:, None] * matrix, 0)
    else:
        tl.store(rotated_ptr + place * DIM + dim, rotated * share, mask=in_dim)
    tl.store(out_ptr + place * DIM + dim, plain * share, mask=in_dim)
    lse = safe + tl.log2(tl.where(total > 0.0, total, 1.0)) * LN2
    tl.store(out_lse_ptr + place, tl.where(total > 0.0, lse, float("-inf")))


def combine_parts(
    parts: PartSlots, rows: QueryRows, num_rotated: int, result: PartialAttention | None = None
) -> PartialAttention:
    """Merge all slots.

    Args:
        parts: Partial results, every slot written.
        rows: Queries they belong to.
        num_rotated: The first slots, whose values are in the rotated basis.
        result: Where the answer goes; made if None. Its output may have any dtype.

    Returns:
        Output ``[sequences, query_heads, queries, head_dim]`` and its log-sum-exp.
    """
    head_dim, shape = rows.query.shape[3], rows.query.shape
    if result is None:
        output = torch.empty(shape, device=parts.output.device)
        result = PartialAttention(output, parts.lse.new_empty(shape[:3]))
    is_fused = head_dim <= _FUSED_DIMS
    rotated = _scratch(parts, is_fused=is_fused)
    matrix = rotation_matrix(head_dim, device=parts.output.device)
    _combine_kernel[(shape[0] * shape[1] * shape[2],)](
        parts.output, parts.lse, matrix, result.output, rotated, result.lse,
        parts.output.shape[0], num_rotated,
        DIM=head_dim, DIMS=triton.next_power_of_2(head_dim), SLOT_BLOCK=16, IS_FUSED=is_fused,
        num_warps=8,
    )  # fmt: skip
    if not is_fused:
        result.output.add_((rotated @ matrix).reshape(shape))
    return result


def _scratch(parts: PartSlots, *, is_fused: bool) -> Tensor:
    """Room for the rotated sums; none is needed where the kernel undoes the rotation."""
    return parts.output if is_fused else torch.empty_like(parts.output[0]).flatten(0, 1)
