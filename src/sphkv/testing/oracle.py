# SPDX-License-Identifier: Apache-2.0
"""The slow, obvious answer in float64: decode every page, then attend densely."""

from __future__ import annotations

import torch
from torch import Tensor

from sphkv.attention.partial import PartialAttention
from sphkv.attention.request import DecodeRequest


def stored_states(request: DecodeRequest, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values (float64) and positions of everything one KV head has stored."""
    keys, values, positions = [], [], []
    for group in request.store.pages(request.sequence, request.layer):
        view, head_ids = request.store.view(group), group.head_ids()
        if group.layout.tier.is_coded:
            pair = request.codec().decode(
                request.layer,
                group.layout.tier,
                view.encoded(),
                view.positions(),
                head_ids=head_ids,
            )
        else:
            pair = view.dense_keys().float(), view.dense_values().float()
        chosen = view.live() & (head_ids == head)[:, None]
        keys.append(pair[0][chosen])
        values.append(pair[1][chosen])
        positions.append(view.positions()[chosen])
    tail = request.store.tail(request.sequence, request.layer)
    keys.append(tail.keys[head].float())
    values.append(tail.values[head].float())
    index = torch.arange(tail.num_tokens, device=tail.keys.device)
    positions.append(tail.first_position + index)
    return torch.cat(keys).double(), torch.cat(values).double(), torch.cat(positions)


def exact_attention(
    request: DecodeRequest, *, sink_logits: Tensor | None = None
) -> PartialAttention:
    """Output ``[query_heads, queries, head_dim]`` and its log-sum-exp in float64.

    Where a query sees nothing, not even a sink, they are zero and minus infinity.
    """
    options = request.options
    group_size = request.store.config.geometry.group_size
    outputs, weights = [], []
    for query_head, query in enumerate(request.query.double()):
        keys, values, positions = stored_states(request, query_head // group_size)
        logits = query @ keys.T * options.scale
        if options.softcap is not None:
            logits = options.softcap * torch.tanh(logits / options.softcap)
        distance = request.positions.to(positions.device)[:, None] - positions
        hidden = distance < 0
        if options.window is not None:
            hidden |= distance >= options.window
        logits = logits.masked_fill(hidden, -torch.inf)
        if sink_logits is not None:
            sink = sink_logits[query_head].double().expand(len(query), 1)
            logits = torch.cat([logits, sink], 1)
            values = torch.cat([values, values.new_zeros(1, values.shape[1])])
        seen = ~torch.isneginf(logits).all(1)
        weight = torch.zeros_like(logits)
        weight[seen] = logits[seen].softmax(-1)
        outputs.append(weight @ values)
        weights.append(logits.logsumexp(-1))
    return PartialAttention(torch.stack(outputs), torch.stack(weights))


def dense_oracle(request: DecodeRequest, *, sink_logits: Tensor | None = None) -> Tensor:
    """Attention output ``[query_heads, queries, head_dim]`` float64; zero where nothing is seen."""
    return exact_attention(request, sink_logits=sink_logits).output
