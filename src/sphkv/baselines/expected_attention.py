# SPDX-License-Identifier: Apache-2.0
"""Expected Attention: rank tokens by the attention that queries to come should give them.

Devoto et al., 2025, "Expected Attention: KV Cache Compression by Estimating Attention from
Future Queries Distribution". Queries before RoPE are taken as Gaussian with the mean and
covariance seen in the prompt; turned by the average rotation of the next 512 positions, they give
a key the expected weight ``exp(mu k / sqrt(d) + k Sigma k / (2 d))``, which is normalised over the
tokens behind the sinks and multiplied by the norm of the value. The first four tokens, the sinks,
are taken out before, and protected.

Deviations: queries before RoPE come from un-rotating what the model computed. Tokens after the
prompt as for SnapKV here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sphkv.baselines.eviction import (
    DECODE_TRIALS,
    PROTECTED,
    EvictionCache,
    LayerPrompt,
    PromptPolicy,
)
from sphkv.baselines.settings import MethodShape
from sphkv.core.rope import RopeSpec


@dataclass(frozen=True)
class ExpectedWeights(PromptPolicy):
    """Scores by closed-form expected attention.

    Attributes:
        future: Positions to come over which the rotation is averaged.
        num_sinks: First tokens that always stay.
        epsilon: Added to the expected weights before values are counted.
    """

    future: int = 512
    num_sinks: int = 4
    epsilon: float = 0.0

    @property
    def name(self) -> str:
        """Label in reports."""
        return "expected_attention"

    @classmethod
    def trials(cls) -> tuple[Self, ...]:
        """Without and with the published code's epsilon; three rules for new tokens."""
        return tuple(
            cls(epsilon=epsilon, decode=decode, new_share=share)
            for epsilon in (0.0, 1e-2)
            for decode, share in DECODE_TRIALS
        )

    def build(self, shape: MethodShape) -> EvictionCache:
        """An empty cache."""
        return EvictionCache(shape, self)

    def least_tokens(self) -> int:
        """The sinks and one token."""
        return self.num_sinks + 1

    def prompt_scores(self, prompt: LayerPrompt) -> Tensor:
        """Expected weight times value norm."""
        sinks = min(self.num_sinks, prompt.keys.shape[1] - 1)
        keys, values = prompt.keys[:, sinks:].float(), prompt.values[:, sinks:].float()
        heads, _, dim = keys.shape
        mean, covariance = self._future_queries(prompt.rope, prompt.query)
        wide = keys.repeat_interleave(prompt.query.shape[0] // heads, 0)
        logits = (wide @ mean[..., None])[..., 0] * dim**-0.5
        logits += ((wide @ covariance) * wide).sum(-1) / (2 * dim)
        expected = torch.softmax(logits, -1).unflatten(0, (heads, -1)).mean(1)
        scores: Tensor = (expected + self.epsilon) * values.norm(dim=-1)
        return torch.nn.functional.pad(scores, (sinks, 0), value=PROTECTED)

    def _future_queries(self, rope: RopeSpec, query: Tensor) -> tuple[Tensor, Tensor]:
        """Mean ``[heads, dim]`` and covariance ``[heads, dim, dim]`` of queries to come."""
        tokens, device = query.shape[1], query.device
        positions = torch.arange(tokens, device=device)
        plain = rope.from_planes(rope.unrotate(rope.to_planes(query.float()), positions))
        seen = plain[:, min(self.num_sinks, tokens - 1) :]
        mean = seen.mean(1)
        centred = seen - mean[:, None]
        covariance = centred.transpose(1, 2) @ centred / seen.shape[1]
        average = mean_rotation(rope, tokens, self.future).to(device)
        return mean @ average.T, average @ covariance @ average.T


@functools.lru_cache(maxsize=64)
def mean_rotation(rope: RopeSpec, first: int, count: int) -> Tensor:
    """Average ``[dim, dim]`` of the rotations of ``count`` positions from ``first`` on.

    Cached and shared, so callers must not write to it.
    """
    with torch.inference_mode(False):
        phases = rope.phases(torch.arange(first, first + count))
        cos, sin = phases.cos().mean(0), phases.sin().mean(0)
        along, across = rope.plane_channels().unbind(-1)
        average = torch.zeros(rope.head_dim, rope.head_dim)
        average[along, along] = average[across, across] = cos
        average[across, along], average[along, across] = sin, -sin
        return average
