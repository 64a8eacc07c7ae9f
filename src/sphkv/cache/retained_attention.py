# SPDX-License-Identifier: Apache-2.0
"""Attention of new tokens over pages whose newest ones are dense."""

from __future__ import annotations

import torch
from torch import Tensor

from sphkv.attention.api import decode_attention
from sphkv.attention.request import AttentionOptions, DecodeBackend, DecodeRequest
from sphkv.store.store import PageStore

# Queries given to a backend at once: bounds the logits it holds.
_QUERY_BLOCK = 128


def attend_and_append(
    store: PageStore,
    backend: DecodeBackend,
    place: tuple[int, int],
    states: tuple[Tensor, Tensor, Tensor],
    options: AttentionOptions,
    *,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Store new tokens, which stay dense for now, and attend with them by position.

    Args:
        store: A store whose seal tier is the dense one.
        backend: What runs decode attention.
        place: Sequence and layer.
        states: Queries ``[query_heads, tokens, head_dim]``, keys and values
            ``[kv_heads, tokens, head_dim]``, after RoPE.
        options: Scale, soft-cap and window.
        sink_logits: ``[query_heads]`` learned sink logits.

    Returns:
        ``[query_heads, tokens, head_dim]`` float32.
    """
    sequence, layer = place
    query, keys, values = states
    first = store.num_tokens(sequence, layer)
    store.append(sequence, layer, keys, values)
    outputs = []
    for at in range(0, query.shape[1], _QUERY_BLOCK):
        part = query[:, at : at + _QUERY_BLOCK]
        positions = torch.arange(first + at, first + at + part.shape[1])
        request = DecodeRequest(store, sequence, layer, part, positions, options)
        outputs.append(decode_attention(request, sink_logits=sink_logits, backend=backend))
    return torch.cat(outputs, 1)
