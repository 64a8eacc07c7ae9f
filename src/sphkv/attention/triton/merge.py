# SPDX-License-Identifier: Apache-2.0
"""Parts of a decode step that were attended to side by side, made one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sphkv.attention.partial import PartialAttention


@triton.jit
def _merge_parts(
    out,
    lse,
    sinks,
    result,
    result_lse,
    rows,
    heads,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One program per query: ``out [PARTS, rows, DIM]`` and ``lse [PARTS, rows]`` to one row."""
    row = tl.program_id(0)
    dims = tl.arange(0, DIM)
    top = tl.full((), -1e30, tl.float32)
    if HAS_SINKS:
        top = tl.maximum(top, tl.load(sinks + row % heads))
    for part in tl.static_range(PARTS):
        top = tl.maximum(top, tl.load(lse + part * rows + row))
    mass = tl.zeros((), tl.float32)
    if HAS_SINKS:
        mass += tl.exp(tl.load(sinks + row % heads) - top)
    total = tl.zeros((DIM,), tl.float32)
    for part in tl.static_range(PARTS):
        at = part * rows + row
        weight = tl.exp(tl.load(lse + at) - top)
        mass += weight
        total += weight * tl.load(out + at * DIM + dims)
    # without any key, as for a part without one: nothing, at minus infinity
    inverse = tl.where(mass > 0, 1 / mass, 0.0)
    tl.store(result + row * DIM + dims, (total * inverse).to(result.dtype.element_ty))
    tl.store(result_lse + row, tl.where(mass > 0, top + tl.log(mass), -float("inf")))


def merge_parts(
    parts: PartialAttention, result: PartialAttention, *, sink_logits: Tensor | None = None
) -> None:
    """Queue the merge of partial results on the current stream.

    Args:
        parts: Output ``[parts, batch, heads, head_dim]`` and log-sum-exp ``[parts, batch, heads]``,
            float32 and contiguous, of disjoint keys.
        result: Where it goes: ``[batch, heads, head_dim]`` float32 or bfloat16, and float32.
        sink_logits: ``[heads]`` float32 learned sinks, which take weight and give no value.
    """
    count, batch, heads, head_dim = parts.output.shape
    rows = batch * heads
    _merge_parts[(rows,)](
        parts.output,
        parts.lse,
        parts.lse if sink_logits is None else sink_logits,
        result.output,
        result.lse,
        rows,
        heads,
        PARTS=count,
        DIM=head_dim,
        HAS_SINKS=sink_logits is not None,
        num_warps=1,
    )


def empty_parts(
    count: int, batch: int, heads: int, head_dim: int, device: torch.device
) -> PartialAttention:
    """Buffers of so many parts, for ``merge_parts``."""
    return PartialAttention(
        torch.empty(count, batch, heads, head_dim, device=device),
        torch.empty(count, batch, heads, device=device),
    )
