# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a layer to predict the importance of new tokens from mean queries.

Importance of every run of 16 tokens and head in half precision, how much of it each tier loses,
and the head's mean query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.core.tiers import RUN_TOKENS
from sphkv.retention.features import mean_output, squared_distance
from sphkv.retention.measure import (
    LayerInput,
    MeasureConfig,
    unrotated_planes,
    window_positions,
)
from sphkv.retention.notes import LEAST_IMPORTANCE
from sphkv.retention.scores import StateScore, tier_ratio

# How far queries to come are from a new token, on average.
EXPECTED_DISTANCE = 64


@dataclass(slots=True, eq=False)
class QueryStatistics:
    """Queries of a layer, averaged over each KV head's group, before RoPE.

    Attributes:
        mean: ``[heads, planes, 2]`` float16.
        spread: ``[heads, planes]`` float16 variance per channel.
        offset: ``[heads]`` float32 log-sum of expected exponentials over the prompt.
        output: ``[heads, head_dim]`` float16 mean output.
    """

    mean: Tensor
    spread: Tensor
    offset: Tensor
    output: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that is kept alive."""
        return self.mean, self.spread, self.offset, self.output

    def to(self, device: torch.device | str) -> QueryStatistics:
        """The same on a device."""
        return QueryStatistics(*(tensor.to(device) for tensor in self.tensors()))

    @classmethod
    def of(cls, query_planes: Tensor, heads: int, output: Tensor) -> QueryStatistics:
        """Statistics of ``[query_heads, samples, planes, 2]`` queries, offset still zero."""
        grouped = query_planes.float().unflatten(0, (heads, -1)).flatten(1, 2)
        return cls(
            grouped.mean(1).half(),
            (grouped.var(1, unbiased=False).sum(-1) / 2).half(),
            torch.zeros(heads, device=query_planes.device),
            output.half(),
        )

    @classmethod
    def join(cls, parts: Sequence[QueryStatistics]) -> QueryStatistics:
        """Heads of several layers as if they were those of one."""
        columns = zip(*(part.tensors() for part in parts), strict=True)
        return cls(*(torch.cat(column) for column in columns))

    def log_weight(
        self, key_planes: Tensor, distance: Tensor, frequencies: Tensor, *, scale: float
    ) -> Tensor:
        """Logarithm of the attention to expect, ``[heads, tokens]``.

        Args:
            key_planes: ``[heads, tokens, planes, 2]`` keys before RoPE.
            distance: ``[tokens]`` how far the queries to come are from each key.
            frequencies: ``[planes]`` radians per position.
            scale: Factor on the dot product.
        """
        x, y = key_planes.float().unbind(-1)
        angle = distance.to(x)[:, None] * frequencies.to(x)
        cos, sin = angle.cos(), angle.sin()
        mean = self.mean.float()
        first, second = x * cos + y * sin, y * cos - x * sin
        logits = first @ mean[..., 0, None] + second @ mean[..., 1, None]
        variance = key_planes.float().square().sum(-1) @ self.spread.float()[..., None]
        total = scale * logits + scale**2 * variance / 2
        return total[..., 0] - self.offset[:, None]


@dataclass(slots=True, eq=False)
class LayerNotes:
    """Importance of a layer's runs, and what tiers lose of it.

    Attributes:
        log_importance: ``[heads, runs]`` float16 log of the mean loss of a state of the run.
        tier_ratio: ``[heads, tiers]`` float32 loss of a tier over the importance; tier 0 is
            the loss of dropping.
        queries: What predicts new tokens.
        gain: ``[heads]`` float32: importance over predicted importance, on the prompt.
    """

    log_importance: Tensor
    tier_ratio: Tensor
    queries: QueryStatistics
    gain: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that is kept alive."""
        return self.log_importance, self.tier_ratio, self.gain, *self.queries.tensors()

    def to(self, device: torch.device | str) -> LayerNotes:
        """The same on a device."""
        importance, ratio = self.log_importance.to(device), self.tier_ratio.to(device)
        return LayerNotes(importance, ratio, self.queries.to(device), self.gain.to(device))

    @property
    def num_runs(self) -> int:
        """Runs that were noted."""
        return self.log_importance.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def extend(self, importance: Tensor) -> None:
        """Note runs that follow, ``[heads, runs]`` mean importance of a state."""
        added = importance.clamp(min=LEAST_IMPORTANCE).log().half()
        self.log_importance = torch.cat([self.log_importance, added], 1)

    def crop(self, num_tokens: int) -> None:
        """Forget runs that begin at ``num_tokens`` or later."""
        runs = -(-num_tokens // RUN_TOKENS)
        self.log_importance = self.log_importance[:, :runs].clone()


def run_importance(per_state: Tensor) -> Tensor:
    """Mean over whole runs of 16: ``[heads, tokens]`` to ``[heads, runs]``."""
    runs = per_state.shape[1] // RUN_TOKENS
    whole: Tensor = per_state[:, : runs * RUN_TOKENS].unflatten(1, (runs, RUN_TOKENS))
    return whole.mean(2)


def log_runs(per_state: Tensor) -> Tensor:
    """``run_importance`` as notes keep it."""
    return run_importance(per_state).clamp(min=LEAST_IMPORTANCE).log().half()


def take_notes(
    config: MeasureConfig,
    layer: int,
    found: LayerInput,
    query: Tensor,
    keys: Tensor,
    score: StateScore,
) -> LayerNotes:
    """Importance of runs, losses of tiers relative to it, and what predicts new tokens.

    Args:
        config: Model, tiers and policy.
        layer: Index of the layer.
        found: What was measured of it.
        query: ``[query_heads, tokens, head_dim]`` after RoPE.
        keys: ``[heads, tokens, head_dim]`` after RoPE.
        score: What values states.
    """
    heads, tokens, _ = keys.shape
    rows, values = found.rows, found.values
    loss = score.losses(found, granularity=1).loss
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
    importance = loss[..., 0]
    predicted = (expected - queries.offset[:, None]).mul(2).exp() * squared_distance(values, output)
    middle = slice(config.protection.sink_tokens, tokens - RUN_TOKENS)
    gain = importance[:, middle].mean(1) / predicted[:, middle].mean(1).clamp(min=1e-30)
    return LayerNotes(log_runs(importance), tier_ratio(loss), queries, gain)
