# SPDX-License-Identifier: Apache-2.0
"""Forward passes with any cache, step by step and timed, and caches made of dense ones."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from sphkv.cache.step import StepTokens
from sphkv.integrations.transformers.attachment import AttentionCall, AttentionResult
from sphkv.integrations.transformers.cache import SphericalCache
from sphkv.integrations.transformers.listening import layer_progress, listening


def encode_dense_cache(
    cache: SphericalCache, dense: DynamicCache, *, queries: Sequence[Tensor] | None = None
) -> None:
    """Fill an empty spherical cache from a dense one; the dense cache is left as it is.

    Args:
        cache: Empty, with a calibration: a dense cache holds no queries to calibrate on.
        dense: Holds a prompt without padding.
        queries: ``[batch, query_heads, newest tokens, head_dim]`` after RoPE of every layer, which
            a controller decides by; see ``prefill_with_queries``.

    Raises:
        ValueError: ``cache`` is not empty or has no calibration, layers differ in number, or a
            controller has no queries to decide by.
    """
    engine = cache.engine
    if engine.length:
        raise ValueError(f"the spherical cache holds {engine.length} tokens already")
    if cache.calibration is None:
        raise ValueError("a dense cache holds no queries: give for_model a calibration")
    num_layers = engine.config.geometry.num_layers
    if len(dense.layers) != num_layers:
        raise ValueError(f"the dense cache has {len(dense.layers)} layers, not {num_layers}")
    states = [_states(layer) for layer in dense.layers]
    batch, _, tokens, _ = states[0][0].shape
    positions = torch.arange(tokens).expand(batch, -1)
    engine.begin(StepTokens(torch.ones(batch, tokens, dtype=torch.bool), positions))
    if queries is None and engine.plan is not None and engine.plan.is_retention:
        engine.reset()
        raise ValueError(
            "a dense cache holds no queries, which the controller decides by: give them, or make "
            "the cache with retention=False or with tiers"
        )
    try:
        for index, (keys, values) in enumerate(states):
            engine.update(index, keys, values)
            # with one tier no queries are needed, the codebooks are given
            engine.end_layer(index, keys[:, :, :0] if queries is None else queries[index])
    except BaseException:
        engine.finish(is_failed=True)
        raise
    engine.finish()


def _states(layer: Any) -> tuple[Tensor, Tensor]:
    """Keys and values of a dense layer, ``[batch, kv_heads, tokens, head_dim]``."""
    if getattr(layer, "keys", None) is None:
        raise ValueError(f"a {type(layer).__name__} holds no keys to code")
    return layer.keys, layer.values


def prefill(model: PreTrainedModel, input_ids: Tensor) -> tuple[DynamicCache, float]:
    """A dense cache of a prompt ``[1, tokens]``, and the seconds it took."""
    cache = DynamicCache(config=model.config)
    began = time.perf_counter()
    with layer_progress(model, "prefill", input_ids.shape[1]):
        score(model, cache, input_ids)
    return cache, time.perf_counter() - began


def prefill_with_queries(
    model: PreTrainedModel, input_ids: Tensor, num_queries: int
) -> tuple[DynamicCache, list[Tensor], float]:
    """A dense cache of a prompt, its newest queries, and the seconds it took.

    Args:
        model: A model the cache can serve.
        input_ids: ``[1, tokens]``.
        num_queries: Newest tokens whose queries are kept.

    Returns:
        The cache; ``[1, query_heads, at most num_queries, head_dim]`` after RoPE of every layer;
        seconds.
    """
    queries: list[Tensor] = []

    def keep(call: AttentionCall) -> AttentionResult:
        queries.append(call.query[:, :, -num_queries:].detach().clone())
        return call.dense()

    with listening(model, keep):
        cache, seconds = prefill(model, input_ids)
    return cache, queries, seconds


@torch.no_grad()
def score(
    model: PreTrainedModel, cache: Cache, input_ids: Tensor, *, num_logits: int = 1
) -> Tensor:
    """Feed tokens ``[1, tokens]``; next-token logits ``[num_logits, vocabulary]`` of the last."""
    begin = cache.get_seq_length()
    positions = torch.arange(begin, begin + input_ids.shape[1], device=input_ids.device)
    output = model(
        input_ids=input_ids,
        past_key_values=cache,
        position_ids=positions[None],
        use_cache=True,
        logits_to_keep=num_logits,
    )
    logits: Tensor = output.logits[0].float()
    return logits


def continue_greedily(
    model: PreTrainedModel, cache: Cache, input_ids: Tensor, num_tokens: int
) -> tuple[Tensor, list[float]]:
    """Greedy continuation; the cache is left as it was found.

    Args:
        model: The model.
        cache: Holds the context.
        input_ids: ``[1, tokens]`` appended before the first new token.
        num_tokens: Tokens to generate.

    Returns:
        New ids ``[1, num_tokens]`` and the seconds of every step after the first.
    """
    begin = cache.get_seq_length()
    token = score(model, cache, input_ids).argmax(-1, keepdim=True)
    ids, seconds = [token], []
    for _ in range(num_tokens - 1):
        began = time.perf_counter()
        token = score(model, cache, token).argmax(-1, keepdim=True)
        seconds.append(time.perf_counter() - began)
        ids.append(token)
    cache.crop(begin - cache.get_seq_length())
    return torch.cat(ids, 1), seconds


def score_and_forget(model: PreTrainedModel, cache: Cache, input_ids: Tensor) -> Tensor:
    """Log-probabilities ``[tokens, vocabulary]`` after each token; the cache is left as found."""
    begin = cache.get_seq_length()
    logits = score(model, cache, input_ids, num_logits=input_ids.shape[1])
    cache.crop(begin - cache.get_seq_length())
    return torch.log_softmax(logits, -1)
