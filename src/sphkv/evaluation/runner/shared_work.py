# SPDX-License-Identifier: Apache-2.0
"""What caches that store the same prompt need find out only once.

A sweep stores a prompt many times. Work that depends on the prompt alone is kept, with the seconds
it took, so that every point can still be charged for it.
"""

from __future__ import annotations

from sphkv.baselines.attention_scores import SharedAttention, SharedScores
from sphkv.retention.measure import PromptWork


class SharedWork:
    """Work on one prompt.

    Attributes:
        scores: What policies that drop tokens found out.
        layers: What the controller found out about this prompt.
        sampled: Score of the exact model's answer by seed.
    """

    def __init__(self, attention: SharedAttention) -> None:
        """Nothing is found yet.

        Args:
            attention: What tokens receive, for caches that count it; prompts with the same
                beginning share it.
        """
        self.scores = SharedScores(attention)
        self.layers = PromptWork()
        self.sampled: dict[int, float] = {}

    @property
    def reused_s(self) -> float:
        """Seconds saved so far."""
        return self.scores.attention.reused_s + self.scores.reused_s + self.layers.reused_s
