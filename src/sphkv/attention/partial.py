# SPDX-License-Identifier: Apache-2.0
"""Attention over part of the keys, in a form that merges exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PartialAttention:
    """Softmax-weighted values over some keys, and how much weight those keys have.

    Attributes:
        output: ``[..., head_dim]`` float32, normalised over the keys seen; zero if none.
        lse: ``[...]`` float32 log-sum-exp of their logits; minus infinity if none.
    """

    output: Tensor
    lse: Tensor

    @classmethod
    def of_sinks(
        cls, sink_logits: Tensor, like: PartialAttention, *, heads_dim: int = 0
    ) -> PartialAttention:
        """Learned sinks: logits ``[heads]`` that take weight and give no value.

        Args:
            sink_logits: ``[heads]``.
            like: What they are merged with.
            heads_dim: Dimension of its ``lse`` that counts heads.
        """
        shape = [1] * like.lse.dim()
        shape[heads_dim] = -1
        lse = sink_logits.float().reshape(shape).expand_as(like.lse)
        return cls(torch.zeros_like(like.output), lse)


def merge_partials(partials: Sequence[PartialAttention]) -> PartialAttention:
    """Combine partial results over disjoint keys; the order does not matter."""
    if not partials:
        raise ValueError("merge_partials needs at least one partial")
    lse = torch.stack([part.lse for part in partials])
    total = torch.logsumexp(lse, 0)
    # where no key was seen at all, every weight is 0 instead of NaN
    weight = torch.where(torch.isneginf(lse), 0.0, (lse - total).exp())
    output = torch.stack([part.output for part in partials])
    return PartialAttention((weight.unsqueeze(-1) * output).sum(0), total)


def attend_logits(logits: Tensor, values: Tensor) -> PartialAttention:
    """Softmax over the last dimension of logits, then the weighted sum of dense values.

    Args:
        logits: ``[..., queries, tokens]`` float32; masked entries are minus infinity.
        values: ``[..., tokens, head_dim]`` float32.
    """
    weight, lse = softmax_parts(logits)
    return PartialAttention(weight @ values, lse)


def softmax_parts(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax weights and log-sum-exp of masked logits; rows without a key weigh nothing."""
    if logits.shape[-1] == 0:
        return logits, logits.new_full(logits.shape[:-1], -torch.inf)
    lse = torch.logsumexp(logits, -1)
    safe = torch.where(torch.isneginf(lse), 0.0, lse)
    return (logits - safe.unsqueeze(-1)).exp(), lse
