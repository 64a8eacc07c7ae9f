# SPDX-License-Identifier: Apache-2.0
"""From what a layer of a prompt told to the notes that decoding keeps of it."""

from __future__ import annotations

import torch
from torch import Tensor

from sphkv.cache.retained_config import RetainedConfig
from sphkv.cache.retained_measure import unrotated_planes, window_positions
from sphkv.core.tiers import RUN_TOKENS
from sphkv.retention.distortion import state_distortion
from sphkv.retention.features import mean_output, squared_distance
from sphkv.retention.notes import LayerNotes, QueryStatistics, log_runs
from sphkv.retention.policy import RetentionPolicy
from sphkv.retention.pricing import LayerInput

# How far queries to come are from a new token, on average.
EXPECTED_DISTANCE = 64


def take_notes(
    config: RetainedConfig, layer: int, found: LayerInput, query: Tensor, keys: Tensor
) -> LayerNotes:
    """Importance of runs, losses of tiers relative to it, and what foretells new tokens.

    Args:
        config: The cache.
        layer: Index of the layer.
        found: What was measured of it.
        query: ``[query_heads, tokens, head_dim]`` after RoPE.
        keys: ``[heads, tokens, head_dim]`` after RoPE.
    """
    heads, tokens, _ = keys.shape
    features, rows, values = found.features, found.rows, found.values
    scale = 1.0
    if config.policy.sensitivity is None:
        scale = 1.0 / max(float(features.output_energy.sum()), 1e-30)
    output = mean_output(rows, values)
    every = torch.arange(tokens, device=keys.device)
    window = window_positions(config, tokens, keys.device)
    queries = QueryStatistics.of(
        unrotated_planes(config, layer, query[:, window], window), heads, output
    )
    expected = queries.log_weight(
        unrotated_planes(config, layer, keys, every),
        EXPECTED_DISTANCE + every.flip(0),
        config.ropes[layer].frequencies(),
        scale=config.geometry.head_dim**-0.5,
    )
    queries.offset = expected.logsumexp(1)
    importance = scale * features.shift
    foretold = (expected - queries.offset[:, None]).mul(2).exp() * squared_distance(values, output)
    middle = slice(config.protection.sink_tokens, tokens - RUN_TOKENS)
    gain = importance[:, middle].mean(1) / foretold[:, middle].mean(1).clamp(min=1e-30)
    return LayerNotes(log_runs(importance), _ratios(found, config.policy), queries, gain)


def _ratios(found: LayerInput, policy: RetentionPolicy) -> Tensor:
    """``[heads, tiers]`` loss of each tier per unit of importance, averaged over states."""
    ratios = []
    for head, shift in enumerate(found.features.shift):
        loss = state_distortion(found.features, found.errors, policy, head=head)
        ratios.append(loss.sum(0) / shift.sum().clamp(min=1e-30))
    return torch.stack(ratios)
