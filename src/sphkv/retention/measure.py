# SPDX-License-Identifier: Apache-2.0
"""What the controller is told about layers of a prompt: attention, features, errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from sphkv.core.devices import constant
from sphkv.core.geometry import KVGeometry
from sphkv.core.prompt_rows import RowKernels
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import RUN_TOKENS, TierTable
from sphkv.retention.errors import (
    RecodingCodec,
    TierErrors,
    measure_tier_errors,
    sample_states,
)
from sphkv.retention.features import TokenFeatures, expect_surprise, measure_features
from sphkv.retention.policy import RetentionPolicy
from sphkv.retention.protection import ProtectionRule
from sphkv.retention.rows import (
    AttentionRows,
    PredictedRows,
    expected_rows,
    mix_rows,
    window_rows,
)
from sphkv.retention.streamed import StreamedRows, expected_part, window_part

Found = TypeVar("Found")

_EXPECTED_STRIDE = 2
# Layers that are measured side by side have at most so many states together: a thousand short
# operations are launched for one or for all of them, but long ones gain nothing and take memory.
# Nor have they more heads together: captured searches keep what the samples of all of them take.
_LEAST_TOGETHER, _MOST_TOGETHER, _STATES_TOGETHER, _HEADS_TOGETHER = 2, 8, 1 << 20, 64


@dataclass(frozen=True, slots=True)
class MeasureConfig:
    """What measuring a prompt needs to know of the cache that will hold it.

    Attributes:
        geometry: Shape of the cache.
        ropes: Rotary embedding of every layer.
        tiers: Precision tiers.
        policy: Weights of the distortion.
        protection: States that stay dense.
        horizon: Tokens after the prompt for which attention is predicted.
        error_samples: States per head on which error models are measured.
        kernels: What finds sums over rows of attention without writing them down; None has
            whole matrices.
    """

    geometry: KVGeometry
    ropes: tuple[RopeSpec, ...]
    tiers: TierTable
    policy: RetentionPolicy = field(default_factory=RetentionPolicy)
    protection: ProtectionRule = field(default_factory=ProtectionRule)
    horizon: tuple[int, ...] = (8, 32, 96)
    error_samples: int = 256
    kernels: RowKernels | None = None

    def __post_init__(self) -> None:
        """Reject parts that belong to different models."""
        if len(self.ropes) != self.geometry.num_layers:
            raise ValueError(f"{len(self.ropes)} ropes for {self.geometry.num_layers} layers")
        geometry = self.geometry
        self.policy.check_shape(
            geometry.num_layers, geometry.num_query_heads, geometry.num_kv_heads
        )


@dataclass(frozen=True, slots=True, eq=False)
class LayerInput:
    """What the controller needs of one layer, or of several whose heads lie one behind the other.

    Attributes:
        features: Measured features.
        errors: Error models.
        rows: Predicted attention, for the loss of dropping; not kept.
        values: ``[heads, tokens, head_dim]``.
        protected: ``[heads, tokens]`` bool.
        token_weight: ``[tokens]`` float32 factor on every loss of a token; None for one.
        output: ``[heads, rows, head_dim]`` float32 what the rows give; None if it was not kept.
        num_layers: How many layers.
    """

    features: TokenFeatures
    errors: TierErrors
    rows: PredictedRows
    values: Tensor
    protected: Tensor
    token_weight: Tensor | None = None
    output: Tensor | None = None
    num_layers: int = 1


def measure_layer(
    config: MeasureConfig, codec: RecodingCodec, layer: int, states: tuple[Tensor, Tensor, Tensor]
) -> LayerInput:
    """Features, error models and protection of a layer; see ``measure_layers``."""
    return measure_layers(config, codec, (layer,), states)


def layers_together(config: MeasureConfig, num_tokens: int, num_left: int) -> int:
    """Layers of a prompt that are best measured side by side.

    Args:
        config: Model, tiers and policy.
        num_tokens: Tokens of the prompt.
        num_left: Layers that are not measured yet. Nothing hides the last ones' time, so these
            are few.
    """
    has_many = paged_tokens(num_tokens) - config.protection.most_states(num_tokens)
    if config.kernels is None or has_many <= config.error_samples:
        return 1
    heads = config.geometry.num_kv_heads
    most = min(_MOST_TOGETHER, _STATES_TOGETHER // (num_tokens * heads), _HEADS_TOGETHER // heads)
    return min(max(1, most), num_left, max(_LEAST_TOGETHER, -(-num_left // 2)))


def measure_layers(
    config: MeasureConfig,
    codec: RecodingCodec,
    layers: Sequence[int],
    states: tuple[Tensor, Tensor, Tensor],
) -> LayerInput:
    """Features, error models and protection of some layers; waits for no device.

    Args:
        config: Model, tiers and policy.
        codec: The encoder it will use.
        layers: Indices of the layers, which share a rotary embedding.
        states: Queries ``[query_heads, queries, head_dim]`` of the newest tokens, all or at
            least those the policy watches; keys and values ``[heads, tokens, head_dim]``; all
            after RoPE, heads layer by layer.
    """
    query, keys, values = states
    tokens, scale = keys.shape[1], config.geometry.head_dim**-0.5
    votes, rows = _predict(config, layers, states)
    near = {"sinks": config.protection.sink_tokens, "recent": RUN_TOKENS}
    totals = rows.totals(values, **near)
    features, output = measure_features(rows, keys, values, **near, totals=totals), totals.output
    policy = config.policy
    if policy.surprise is not None:
        chance = _of_layers(policy.surprise, layers, keys.device)
        even, coded = policy.surprise_even, policy.surprise_coded
        features = expect_surprise(
            features, rows, values, chance, even=even, coded=coded, output=output
        )
    protected = protected_states(config, features.radius)
    least_free = paged_tokens(tokens) - config.protection.most_states(tokens)
    sample = sample_states(
        features.drop_shift,
        ~protected,
        config.error_samples,
        least_free=least_free,
        num_layers=len(layers),
    )
    first = tokens - query.shape[1]
    seen = query[:, window_positions(config, query, tokens) - first]
    # votes are the first rows
    voted = output[:, : votes.share.shape[1]]
    errors = measure_tier_errors(
        codec, layers, config.tiers, (seen, keys, values), votes, sample, scale=scale, output=voted
    )
    return LayerInput(
        features, errors, rows, values, protected, output=output, num_layers=len(layers)
    )


def _of_layers(
    table: Sequence[tuple[float, ...]], layers: Sequence[int], device: torch.device | str
) -> Tensor:
    """``[heads]`` numbers of the heads of some layers."""
    return constant(tuple(chain.from_iterable(table[each] for each in layers)), device=device)


def _predict(
    config: MeasureConfig, layers: Sequence[int], states: tuple[Tensor, Tensor, Tensor]
) -> tuple[PredictedRows, PredictedRows]:
    """Votes of the observation window, and these with what is expected; see ``predict_rows``."""
    query, keys, values = states
    if config.kernels is None:
        return predict_rows(config, layers, query, keys)
    policy, tokens = config.policy, keys.shape[1]
    share, scale = row_share(config, layers, keys.device), config.geometry.head_dim**-0.5
    window, held = window_positions(config, query, tokens), tokens - query.shape[1]
    votes = window_part(query[:, window - held], window, keys, scale=scale, share=share)
    parts = [votes]
    if policy.attention_mix > 0:
        expected = expected_part(
            config.kernels,
            _recent_planes(config, layers, query, tokens),
            keys,
            config.ropes[layers[0]],
            scale=scale,
            horizon=config.horizon,
            share=share,
        )
        mix = policy.attention_mix
        parts = [
            replace(votes, share=(1 - mix) * votes.share),
            replace(expected, share=mix * expected.share),
        ]
    rows = StreamedRows.stream(
        config.kernels,
        parts,
        (keys, values),
        sinks=config.protection.sink_tokens,
        recent=RUN_TOKENS,
    )
    return rows.first_part(votes.share), rows


def predict_rows(
    config: MeasureConfig, layers: Sequence[int], query: Tensor, keys: Tensor
) -> tuple[AttentionRows, AttentionRows]:
    """Votes of the observation window, and these with what is expected in closed form.

    Args:
        config: Model, tiers and policy.
        layers: Indices of the layers, which share a rotary embedding.
        query: ``[query_heads, queries, head_dim]`` of the newest tokens, after RoPE.
        keys: ``[heads, tokens, head_dim]`` after RoPE, heads layer by layer.
    """
    share = row_share(config, layers, keys.device)
    first = keys.shape[1] - query.shape[1]
    window = window_positions(config, query, keys.shape[1])
    scale = config.geometry.head_dim**-0.5
    votes = window_rows(query[:, window - first], window, keys, scale=scale, share=share)
    return votes, _with_expected(config, layers, votes, query, keys, share)


def row_share(
    config: MeasureConfig, layers: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor | None:
    """``[query_heads]`` importance of each query head's rows; None if all count alike."""
    sensitivity = config.policy.sensitivity
    return None if sensitivity is None else _of_layers(sensitivity, layers, device)


def protected_states(config: MeasureConfig, radius: Tensor) -> Tensor:
    """States of a prompt that stay dense, ``[heads, tokens]`` bool, from their key norms."""
    protected = config.protection.state_mask(radius)
    # what is not paged is dense anyway, and nothing to decide about
    protected[:, paged_tokens(radius.shape[1]) :] = True
    return protected


def _with_expected(
    config: MeasureConfig,
    layers: Sequence[int],
    votes: AttentionRows,
    query: Tensor,
    keys: Tensor,
    share: Tensor | None,
) -> AttentionRows:
    """Votes, mixed with what is expected in closed form as the policy says."""
    policy, tokens = config.policy, keys.shape[1]
    if policy.attention_mix == 0:
        return votes
    expected = expected_rows(
        _recent_planes(config, layers, query, tokens),
        keys,
        config.ropes[layers[0]],
        scale=config.geometry.head_dim**-0.5,
        horizon=config.horizon,
        share=share,
    )
    return mix_rows(votes, expected, policy.attention_mix)


def _recent_planes(
    config: MeasureConfig, layers: Sequence[int], query: Tensor, tokens: int
) -> Tensor:
    """Some of the newest queries in planes before RoPE, by which others are expected."""
    held = tokens - query.shape[1]
    first = max(held, tokens - 4 * config.policy.window)
    seen = torch.arange(first, tokens, _EXPECTED_STRIDE, device=query.device)
    return unrotated_planes(config, layers[0], query[:, seen - held], seen)


def window_positions(config: MeasureConfig, query: Tensor, tokens: int) -> Tensor:
    """Positions of the observation window of a prompt, among those whose queries are there."""
    policy = config.policy
    span = min(query.shape[1], policy.window * policy.window_stride)
    last = tokens - 1
    return torch.arange(last, last - span, -policy.window_stride, device=query.device).flip(0)


def unrotated_planes(
    config: MeasureConfig, layer: int, states: Tensor, positions: Tensor
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


class PromptWork:
    """Findings about one prompt that do not depend on a budget, with the seconds they took.

    Everything is kept until the object goes: for comparing budgets and variants, not for serving.

    Attributes:
        reused_s: Seconds that finding out again would have taken, over all uses so far.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.reused_s = 0.0
        self._found: dict[Hashable, tuple[Any, float]] = {}

    def once(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """What ``find`` returned when the key was first asked for."""
        if key in self._found:
            found, seconds = self._found[key]
            self.reused_s += seconds
        else:
            began = time.perf_counter()
            found = find()
            self._found[key] = found, time.perf_counter() - began
        result: Found = found
        return result
