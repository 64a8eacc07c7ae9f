# SPDX-License-Identifier: Apache-2.0
"""Writing the newest state of every sequence into its open tail, at a place the GPU knows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sphkv.attention.triton.dense import TailList


@triton.jit
def _append_kernel(
    key_ptr,  # [sequences, heads, DIM], any strides of the first two
    value_ptr,
    tail_ptr,  # [sequences, heads, 2] i64
    extent_ptr,  # [sequences, 2] i64; the new state is counted already
    key_stride, key_head, value_stride, value_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    sequence, head = lane // HEADS, lane % HEADS
    dim = tl.arange(0, DIMS)
    in_dim = dim < DIM
    place = (tl.load(extent_ptr + sequence * 2) - 1) * DIM + dim
    keys = tl.load(tail_ptr + lane * 2).to(tl.pointer_type(tl.bfloat16))
    values = tl.load(tail_ptr + lane * 2 + 1).to(tl.pointer_type(tl.bfloat16))
    key = tl.load(key_ptr + sequence * key_stride + head * key_head + dim, mask=in_dim)
    value = tl.load(value_ptr + sequence * value_stride + head * value_head + dim, mask=in_dim)
    tl.store(keys + place, key.to(tl.bfloat16), mask=in_dim)
    tl.store(values + place, value.to(tl.bfloat16), mask=in_dim)


def append_states(keys: Tensor, values: Tensor, tails: TailList) -> None:
    """Write one state per sequence and head behind the last one of its tail.

    Args:
        keys: ``[sequences, heads, head_dim]`` after rotary embedding.
        values: ``[sequences, heads, head_dim]``.
        tails: Open tails, whose extents count the new state already; there must be room.
    """
    sequences, heads, head_dim = keys.shape
    for name, states in (("keys", keys), ("values", values)):
        if states.stride(2) != 1:
            raise ValueError(f"{name} must have their elements side by side")
    _append_kernel[(sequences * heads,)](
        keys, values, tails.addresses, tails.extents,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        HEADS=heads, DIM=head_dim, DIMS=triton.next_power_of_2(head_dim), num_warps=1,
    )  # fmt: skip
