# SPDX-License-Identifier: Apache-2.0
"""What a method holds of a layer, and plain attention over it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.attention.partial import PartialAttention, merge_partials, softmax_parts
from sphkv.attention.reference import mask_logits
from sphkv.attention.request import AttentionOptions
from sphkv.core.geometry import KVGeometry
from sphkv.store.ledger import ByteLedger

UNUSED = -1

# Logits held at once: bounds the memory of a long chunk over a long cache.
_MOST_LOGITS = 1 << 24

Tagged = tuple[str, Tensor]
"""A live tensor and the ledger kind its bytes belong to."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldStates:
    """States a query of one layer can see, each head with its own number of them.

    Attributes:
        keys: ``[kv_heads, most, head_dim]`` float32 after RoPE, as attention reads them.
        values: ``[kv_heads, most, head_dim]`` float32.
        positions: ``[kv_heads, most]`` int64; -1 marks entries that hold nothing.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor


def join_states(parts: Iterable[HeldStates]) -> HeldStates:
    """Several sets of states of the same heads, one after the other."""
    every = list(parts)
    # mostly all but one are empty, and a copy of that one would cost as much as attending to it
    full = [part for part in every if part.positions.shape[1]] or every[:1]
    if len(full) == 1:
        return full[0]
    return HeldStates(
        torch.cat([part.keys for part in full], 1),
        torch.cat([part.values for part in full], 1),
        torch.cat([part.positions for part in full], 1),
    )


def dense_states(keys: Tensor, values: Tensor, first_position: int) -> HeldStates:
    """States ``[kv_heads, tokens, head_dim]`` at consecutive positions."""
    heads, tokens, _ = keys.shape
    positions = torch.arange(first_position, first_position + tokens, device=keys.device)
    return HeldStates(keys.float(), values.float(), positions.expand(heads, tokens))


def held_logits(
    query: Tensor, held: HeldStates, query_positions: Tensor, options: AttentionOptions
) -> Tensor:
    """Masked logits ``[kv_heads, group * queries, most]`` float32.

    Args:
        query: ``[query_heads, queries, head_dim]`` after RoPE.
        held: States to score.
        query_positions: ``[queries]`` int64.
        options: Scale, soft-cap and window.
    """
    heads, group = held.keys.shape[0], query.shape[0] // held.keys.shape[0]
    grouped = query.float().reshape(heads, -1, query.shape[-1]) * options.scale
    logits = grouped @ held.keys.transpose(1, 2)
    beyond = query_positions.max() + 1
    positions = torch.where(held.positions < 0, beyond, held.positions)
    return mask_logits(logits, positions, query_positions.repeat(group), options)


def attend_held(
    query: Tensor,
    held: HeldStates,
    query_positions: Tensor,
    options: AttentionOptions,
    *,
    sink_logits: Tensor | None = None,
    received: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Attention ``[query_heads, queries, head_dim]`` float32 over what is held.

    Args:
        query: ``[query_heads, queries, head_dim]`` after RoPE.
        held: States to attend to.
        query_positions: ``[queries]`` int64; a query sees its own position and before.
        options: Scale, soft-cap and window.
        sink_logits: ``[query_heads]`` learned sink logits.
        received: ``[kv_heads, most]`` to which the weight of each state, sinks aside, is added.
        weight: ``[queries]`` how much of each query's weights is added; all of it if None.
    """
    query_heads, tokens, dim = query.shape
    step = max(1, _MOST_LOGITS // (query_heads * max(1, held.keys.shape[1])))
    outputs = []
    for at in range(0, tokens, step):
        rows = slice(at, at + step)
        logits = held_logits(query[:, rows], held, query_positions[rows], options)
        weights, lse = softmax_parts(logits)
        if received is not None:
            group = query_heads // weights.shape[0]
            by_query = weights.unflatten(1, (group, -1)).sum(1)  # [kv_heads, queries, most]
            if weight is not None:
                by_query = by_query * weight[rows, None]
            received += by_query.sum(1)
        output = (weights @ held.values).reshape(query_heads, -1, dim)
        partial = PartialAttention(output, lse.reshape(query_heads, -1))
        if sink_logits is not None:
            partial = merge_partials([partial, PartialAttention.of_sinks(sink_logits, partial)])
        outputs.append(partial.output)
    return torch.cat(outputs, 1)


def held_weights(
    query: Tensor,
    held: HeldStates,
    query_positions: Tensor,
    options: AttentionOptions,
    *,
    is_mean: bool = True,
) -> Tensor:
    """Attention ``[kv_heads, most]`` float32 that held states receive from queries.

    Args:
        query: ``[query_heads, queries, head_dim]`` after RoPE.
        held: The states.
        query_positions: ``[queries]`` int64.
        options: Scale, soft-cap and window.
        is_mean: Mean over queries and the query heads of a KV head; else their sum.
    """
    weights, _ = softmax_parts(held_logits(query, held, query_positions, options))
    return weights.mean(1) if is_mean else weights.sum(1)


def add_ledgers(ledgers: Iterable[ByteLedger]) -> ByteLedger:
    """Bytes of several ledgers, kind by kind."""
    kinds = dict.fromkeys(ByteLedger.__slots__, 0)
    for ledger in ledgers:
        for kind in kinds:
            kinds[kind] += getattr(ledger, kind)
    return ByteLedger(**kinds)


def ledger_of(tensors: Iterable[Tagged], slack: int = 0) -> ByteLedger:
    """Bytes of live tensors by kind.

    Args:
        tensors: Kind and tensor.
        slack: Bytes of ``"codes"`` and ``"values"``, half each, that hold no state.
    """
    kinds = dict.fromkeys(ByteLedger.__slots__, 0)
    for kind, tensor in tensors:
        kinds[kind] += tensor.nbytes
    kinds["codes"] -= slack // 2
    kinds["values"] -= slack // 2
    kinds["frag"] += slack // 2 * 2
    return ByteLedger(**kinds)


def check_states(geometry: KVGeometry, keys: Tensor, values: Tensor) -> None:
    """Reject states that do not fit the geometry or are not finite."""
    expected = (geometry.num_kv_heads, geometry.head_dim)
    for name, states in (("keys", keys), ("values", values)):
        shape = tuple(states.shape)
        if len(shape) != 3 or (shape[0], shape[2]) != expected:
            raise ValueError(f"{name} must be [{expected[0]}, tokens, {expected[1]}], got {shape}")
        # of single tokens a GPU would have to be waited for in every layer
        is_free = states.device.type == "cpu" or shape[1] > 1
        if is_free and not bool(torch.isfinite(states).all()):
            raise ValueError(f"{name} hold entries that are not finite")
    if keys.shape != values.shape:
        raise ValueError(f"{keys.shape[1]} keys for {values.shape[1]} values")


def check_query(geometry: KVGeometry, query: Tensor, tokens: int) -> None:
    """Reject queries that are not ``[query_heads, tokens, head_dim]``."""
    expected = (geometry.num_query_heads, tokens, geometry.head_dim)
    if tuple(query.shape) != expected:
        raise ValueError(f"query must be {list(expected)}, got {tuple(query.shape)}")
