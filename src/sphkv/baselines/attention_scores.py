# SPDX-License-Identifier: Apache-2.0
"""How much attention a prompt's tokens receive, the raw material of eviction policies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

# Queries whose weights are held at once.
_QUERY_BLOCK = 256

# Weights of a block of queries: few enough that passes over them are cheap.
_CPU_LOGITS = 3 << 18
_GPU_LOGITS = 1 << 25


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
    kv_heads, tokens, dim = keys.shape
    total = torch.zeros(query.shape[0], tokens, device=keys.device)
    grouped = query.unflatten(0, (kv_heads, -1))
    for head, own in enumerate(total.unflatten(0, (kv_heads, -1))):
        # powers of two are cheaper than powers of e
        scaled = grouped[head].float() * (dim**-0.5 * math.log2(math.e))
        _add_received(own, scaled, keys[head].float(), first)
    return total


def _add_received(total: Tensor, query: Tensor, keys: Tensor, first: int) -> None:
    """Add to ``[group, tokens]`` what the queries of one KV head give to its tokens.

    Args:
        total: What they received so far.
        query: ``[group, tokens, head_dim]``, scaled so that weights are powers of two.
        keys: ``[tokens, head_dim]``.
        first: Queries before this one are left out.
    """
    group, tokens = total.shape
    room = _CPU_LOGITS if keys.device.type == "cpu" else _GPU_LOGITS
    block = max(1, room // max(1, group * tokens))
    held = keys.new_empty(group * min(block, tokens) * tokens)
    for at in range(first, tokens, block):
        stop = min(tokens, at + block)
        rows = stop - at
        weights = held[: group * rows * stop].view(group * rows, stop)
        torch.mm(query[:, at:stop].flatten(0, 1), keys[:stop].T, out=weights)
        by_query = weights.view(group, rows, stop)
        # tokens before the block are seen by all of it
        later = torch.ones(rows, rows, dtype=torch.bool, device=keys.device).triu(1)
        by_query[..., at:].masked_fill_(later, -torch.inf)
        weights.sub_(weights.amax(-1, keepdim=True)).exp2_()
        # one product normalises the rows and adds them up
        share = weights.sum(-1).reciprocal_().view(group, 1, rows)
        total[:, :stop] += (share @ by_query)[:, 0]


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


class SharedScores:
    """Scores of the tokens of one prompt, found once for all caches that store it.

    Attributes:
        attention: What policies that count attention share; a score that used it is charged for it.
        reused_s: Seconds that finding scores again would have taken, over all uses so far.
    """

    def __init__(self, attention: SharedAttention) -> None:
        """Nothing is found yet."""
        self.attention = attention
        self.reused_s = 0.0
        self._found: dict[tuple[str, int], tuple[Tensor, float]] = {}

    def find(self, policy: str, layer: int, score: Callable[[], Tensor]) -> Tensor:
        """Scores ``[kv_heads, tokens]`` of a layer; nobody may write to them.

        Args:
            policy: Name of the policy.
            layer: The layer.
            score: Finds the scores.
        """
        if (policy, layer) in self._found:
            known, seconds = self._found[policy, layer]
            self.reused_s += seconds
            return known
        began, reused_s = time.perf_counter(), self.attention.reused_s
        scores = score()
        seconds = time.perf_counter() - began + self.attention.reused_s - reused_s
        self._found[policy, layer] = scores, seconds
        return scores


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
