# SPDX-License-Identifier: Apache-2.0
"""The rows of a padded batch, one sequence each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sphkv.attention.partial import PartialAttention, merge_partials
from sphkv.attention.request import AttentionOptions, BatchRequest
from sphkv.cache.sequence import CacheSequence


def real_states(
    is_real: Tensor, *states: Tensor
) -> Iterator[tuple[int, slice | Tensor, tuple[Tensor, ...]]]:
    """Each row that has tokens: its index, their places, and their states without padding.

    Args:
        is_real: ``[rows, length]`` bool.
        states: ``[rows, heads, length, head_dim]`` each.
    """
    for index, real in enumerate(is_real.cpu()):
        own = tuple(part[index] for part in states)
        if bool(real.all()):
            yield index, slice(None), own
        elif bool(real.any()):
            at = real.nonzero()[:, 0].to(states[0].device)
            yield index, at, tuple(part[:, at] for part in own)


def attend_rows(
    rows: Sequence[CacheSequence],
    is_real: Tensor,
    layer: int,
    states: tuple[Tensor, Tensor, Tensor],
    options: AttentionOptions,
    *,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention of every row's new tokens.

    Args:
        rows: The sequences.
        is_real: ``[rows, tokens]`` bool, false for padding.
        layer: The layer.
        states: Queries, keys and values ``[rows, heads, tokens, head_dim]`` after RoPE.
        options: Scale, soft-cap and window.
        sink_logits: ``[query_heads]`` learned sink logits.

    Returns:
        ``[rows, query_heads, tokens, head_dim]`` in the query's dtype; zero for padding.
    """
    if states[0].shape[2] == 1 and len(rows) > 1 and bool(is_real.all()):
        return _attend_single(rows, layer, states, options, sink_logits)
    output = torch.zeros_like(states[0])
    for index, at, own in real_states(is_real, *states):
        query, keys, values = own
        seen = rows[index].attend(layer, query, keys, values, options, sink_logits=sink_logits)
        output[index][:, at] = seen.to(output.dtype)
    return output


def _attend_single(
    rows: Sequence[CacheSequence],
    layer: int,
    states: tuple[Tensor, Tensor, Tensor],
    options: AttentionOptions,
    sink_logits: Tensor | None,
) -> Tensor:
    """One token of every row: one request of the backend for all of them."""
    query, keys, values = states
    positions = torch.tensor([row.num_tokens(layer) for row in rows])
    for row, own_keys, own_values in zip(rows, keys, values, strict=True):
        row.store.append(row.sequence, layer, own_keys, own_values)
    ids = tuple(row.sequence for row in rows)
    request = BatchRequest(rows[0].store, ids, layer, query[:, :, 0], positions, options)
    partial = rows[0].backend.attend_rows(request)
    if sink_logits is not None:
        sinks = PartialAttention.of_sinks(sink_logits, partial, heads_dim=1)
        partial = merge_partials([partial, sinks])
    return partial.output.unsqueeze(2).to(query.dtype)
