# SPDX-License-Identifier: Apache-2.0
"""How much attention a prompt's tokens receive, the raw material of eviction policies."""

from __future__ import annotations

import time

import torch
from torch import Tensor

# Queries whose weights are held at once.
_QUERY_BLOCK = 256


def window_attention(query: Tensor, keys: Tensor, window: int) -> Tensor:
    """Attention weights of the last queries of a prompt.

    Args:
        query: ``[query_heads, tokens, head_dim]`` after RoPE.
        keys: ``[kv_heads, tokens, head_dim]`` after RoPE.
        window: How many queries, at most all.

    Returns:
        ``[query_heads, window, tokens]`` float32; later tokens than the query weigh 0.
    """
    tokens = keys.shape[1]
    return _weights(query, keys, torch.arange(max(0, tokens - window), tokens, device=keys.device))


def received_attention(query: Tensor, keys: Tensor, *, first: int = 0) -> Tensor:
    """Attention each token receives from the queries of a prompt, ``[query_heads, tokens]``.

    Args:
        query: ``[query_heads, tokens, head_dim]`` after RoPE.
        keys: ``[kv_heads, tokens, head_dim]`` after RoPE.
        first: Queries before this one are left out.
    """
    heads, tokens = query.shape[0], keys.shape[1]
    total = torch.zeros(heads, tokens, device=keys.device)
    for at in range(first, tokens, _QUERY_BLOCK):
        stop = min(tokens, at + _QUERY_BLOCK)
        rows = torch.arange(at, stop, device=keys.device)
        total[:, :stop] += _weights(query, keys[:, :stop], rows).sum(1)
    return total


class SharedAttention:
    """What the first tokens of some prompts receive from one another, found once for all of them.

    Several caches store the same prompt, and several prompts begin with the same document.

    Attributes:
        num_tokens: Tokens that the prompts share.
        device: Where it is computed; None computes where the states are.
        reused_s: Seconds that finding it again would have taken, over all uses so far.
    """

    def __init__(self, num_tokens: int, *, device: torch.device | None = None) -> None:
        """Nothing is found yet."""
        self.num_tokens = num_tokens
        self.device = device
        self.reused_s = 0.0
        self._found: dict[int, tuple[Tensor, float]] = {}

    def received(self, layer: int, query: Tensor, keys: Tensor) -> Tensor:
        """As ``received_attention`` of a whole prompt that begins with the shared tokens."""
        shared = self.num_tokens
        if layer in self._found:
            known, seconds = self._found[layer]
            self.reused_s += seconds
        else:
            began = time.perf_counter()
            place = self.device or keys.device
            known = received_attention(query[:, :shared].to(place), keys[:, :shared].to(place)).to(
                keys.device
            )
            self._found[layer] = known, time.perf_counter() - began
        total = received_attention(query, keys, first=shared)
        total[:, :shared] += known
        return total


def probe_attention(query: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    """Attention each token receives from chosen queries, ``[query_heads, tokens]``.

    Args:
        query: ``[query_heads, tokens, head_dim]`` after RoPE.
        keys: ``[kv_heads, tokens, head_dim]`` after RoPE.
        rows: ``[probes]`` int64 positions of the queries.
    """
    total = torch.zeros(query.shape[0], keys.shape[1], device=keys.device)
    for part in rows.split(_QUERY_BLOCK):
        total += _weights(query, keys, part).sum(1)
    return total


def _weights(query: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    """Weights ``[query_heads, rows, tokens]`` of the queries at ``rows``."""
    heads, tokens, dim = keys.shape
    group = query.shape[0] // heads
    chosen = query.index_select(1, rows).float() * dim**-0.5
    logits = chosen.reshape(heads, -1, dim) @ keys.float().transpose(1, 2)
    logits = logits.view(heads * group, rows.shape[0], tokens)
    # tokens before the first row are seen by all: most of a long prompt needs no mask
    first = int(rows.min()) if rows.numel() else 0
    later = torch.arange(first, tokens, device=keys.device) > rows[:, None]
    logits[..., first:].masked_fill_(later, -torch.inf)
    return torch.softmax(logits, -1)


def mean_over_group(scores: Tensor, num_kv_heads: int) -> Tensor:
    """Mean over the query heads of each KV head, ``[kv_heads, ...]``."""
    mean: Tensor = scores.unflatten(0, (num_kv_heads, -1)).mean(1)
    return mean
