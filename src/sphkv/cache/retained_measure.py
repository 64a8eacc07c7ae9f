# SPDX-License-Identifier: Apache-2.0
"""What the controller is told about one layer of a prompt: attention, features, errors."""

from __future__ import annotations

import torch
from torch import Tensor

from sphkv.cache.retained_config import RetainedConfig
from sphkv.cache.retained_errors import measure_tier_errors, sample_states
from sphkv.core.contract import StateCodec
from sphkv.core.tiers import RUN_TOKENS
from sphkv.retention.features import (
    AttentionRows,
    expect_surprise,
    expected_rows,
    measure_features,
    mix_rows,
    window_rows,
)
from sphkv.retention.pricing import LayerInput

_EXPECTED_STRIDE = 2


def measure_layer(
    config: RetainedConfig, codec: StateCodec, layer: int, states: tuple[Tensor, Tensor, Tensor]
) -> LayerInput:
    """Features, error models and protection of a layer.

    Args:
        config: The cache.
        codec: The encoder it will use.
        layer: Index of the layer.
        states: Queries ``[query_heads, tokens, head_dim]``, keys and values
            ``[heads, tokens, head_dim]``, after RoPE.
    """
    query, keys, values = states
    tokens, scale = keys.shape[1], config.geometry.head_dim**-0.5
    votes, rows = foretell_rows(config, layer, query, keys)
    features = measure_features(
        rows, keys, values, sinks=config.protection.sink_tokens, recent=RUN_TOKENS
    )
    if config.policy.surprise is not None:
        chance = torch.tensor(config.policy.surprise[layer])
        features = expect_surprise(features, rows, values, chance)
    protected = protected_states(config, features.radius)
    sample = sample_states(features.shift, ~protected, config.error_samples)
    seen = query[:, window_positions(config, tokens, query.device)]
    errors = measure_tier_errors(
        codec, layer, config.tiers, (seen, keys, values), votes, sample, scale=scale
    )
    return LayerInput(features, errors, rows, values, protected)


def foretell_rows(
    config: RetainedConfig, layer: int, query: Tensor, keys: Tensor
) -> tuple[AttentionRows, AttentionRows]:
    """Votes of the observation window, and these with what is expected in closed form.

    Args:
        config: The cache.
        layer: Index of the layer.
        query: ``[query_heads, tokens, head_dim]`` after RoPE.
        keys: ``[heads, tokens, head_dim]`` after RoPE.
    """
    share = row_share(config, layer)
    window = window_positions(config, keys.shape[1], keys.device)
    scale = config.geometry.head_dim**-0.5
    votes = window_rows(query[:, window], window, keys, scale=scale, share=share)
    return votes, _with_expected(config, layer, votes, query, keys, share)


def row_share(config: RetainedConfig, layer: int) -> Tensor | None:
    """``[query_heads]`` importance of each query head's rows; None if all count alike."""
    sensitivity = config.policy.sensitivity
    return None if sensitivity is None else torch.tensor(sensitivity[layer])


def protected_states(config: RetainedConfig, radius: Tensor) -> Tensor:
    """States of a prompt that stay dense, ``[heads, tokens]`` bool, from their key norms."""
    protected = config.protection.state_mask(radius)
    # what is not paged is dense anyway, and nothing to decide about
    protected[:, paged_tokens(radius.shape[1]) :] = True
    return protected


def _with_expected(
    config: RetainedConfig,
    layer: int,
    votes: AttentionRows,
    query: Tensor,
    keys: Tensor,
    share: Tensor | None,
) -> AttentionRows:
    """Votes, mixed with what is expected in closed form as the policy says."""
    policy, tokens = config.policy, keys.shape[1]
    if policy.attention_mix == 0:
        return votes
    first = max(0, tokens - 4 * policy.window)
    seen = torch.arange(first, tokens, _EXPECTED_STRIDE, device=keys.device)
    expected = expected_rows(
        unrotated_planes(config, layer, query[:, seen], seen),
        unrotated_planes(config, layer, keys, torch.arange(tokens, device=keys.device)),
        config.ropes[layer].frequencies(),
        scale=config.geometry.head_dim**-0.5,
        horizon=config.horizon,
        share=share,
    )
    return mix_rows(votes, expected, policy.attention_mix)


def window_positions(config: RetainedConfig, tokens: int, device: torch.device) -> Tensor:
    """Positions of the observation window of a prompt."""
    policy = config.policy
    span = min(tokens, policy.window * policy.window_stride)
    last = tokens - 1
    return torch.arange(last, last - span, -policy.window_stride, device=device).flip(0)


def unrotated_planes(
    config: RetainedConfig, layer: int, states: Tensor, positions: Tensor
) -> Tensor:
    """States ``[heads, tokens, head_dim]`` in planes, before RoPE."""
    rope = config.ropes[layer]
    return rope.unrotate(rope.to_planes(states.float()), positions)


def paged_tokens(num_tokens: int) -> int:
    """Tokens of a prompt that are decided about: whole runs of 16 but the last.

    The last run is one dense page per head until newer tokens follow, the rest opens the tail.

    Raises:
        ValueError: The prompt is shorter than sinks, one run and the newest run.
    """
    whole = num_tokens // RUN_TOKENS * RUN_TOKENS
    if whole < 3 * RUN_TOKENS:
        raise ValueError(
            f"retention needs a prompt of at least {3 * RUN_TOKENS} tokens, got {num_tokens}"
        )
    return whole - RUN_TOKENS
