# SPDX-License-Identifier: Apache-2.0
"""Code what a dense transformers cache already holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from sphkv.cache.step import StepTokens
from sphkv.integrations.transformers.cache import SphericalCache


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
