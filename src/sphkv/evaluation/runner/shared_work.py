# SPDX-License-Identifier: Apache-2.0
"""What caches that store the same prompt need find out only once.

A sweep stores a prompt many times. Work that depends on the prompt alone is kept, with the seconds
it took, so that every point can still be charged for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sphkv.baselines.attention_scores import SharedAttention
from sphkv.cache.retained_work import PromptWork


@dataclass(frozen=True, slots=True, eq=False)
class SharedWork:
    """Work on one prompt.

    Attributes:
        attention: What tokens receive, for caches that count it; prompts with the same beginning
            share it.
        layers: What the controller found out about this prompt.
    """

    attention: SharedAttention
    layers: PromptWork = field(default_factory=PromptWork)

    @property
    def reused_s(self) -> float:
        """Seconds saved so far."""
        return self.attention.reused_s + self.layers.reused_s
