# SPDX-License-Identifier: Apache-2.0
"""StreamingLLM: the first tokens and a window of the latest.

Xiao et al., 2023, "Efficient Streaming Language Models with Attention Sinks". Four sink tokens;
positions are counted inside the cache, so the sinks stand directly before the window: their keys
are turned on by the number of tokens dropped in between.

Deviations: the window moves on by 16 tokens at a time; the prompt itself is read by the dense
model, as for every method here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.baselines.eviction import PROTECTED, EvictionCache, PromptPolicy
from sphkv.baselines.held_states import HeldStates
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec


@dataclass(frozen=True)
class SinksAndWindow(PromptPolicy):
    """Scores sinks as protected and every other token by its position.

    Attributes:
        ropes: Rotary embedding of each layer.
        num_sinks: First tokens that always stay.
    """

    ropes: Sequence[RopeSpec]
    num_sinks: int = 4

    name = "streaming_llm"
    evicts_in_decode = True

    def least_tokens(self) -> int:
        """The sinks and one token."""
        return self.num_sinks + 1

    def prompt_scores(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Positions, sinks first of all."""
        positions = torch.arange(keys.shape[1], device=keys.device)
        return self._score(positions.expand(keys.shape[:2]))

    def decode_scores(self, positions: Tensor, carried: Tensor | None, num_kept: int) -> Tensor:
        """The same."""
        return self._score(positions)

    def _score(self, positions: Tensor) -> Tensor:
        is_sink = (positions >= 0) & (positions < self.num_sinks)
        return positions.float().masked_fill(is_sink, PROTECTED)

    def place_keys(self, layer: int, held: HeldStates) -> Tensor:
        """Move the sinks up to the window."""
        positions = held.positions[0]
        window = positions[positions >= self.num_sinks]
        gap = int(window.min()) - self.num_sinks if window.numel() else 0
        if gap == 0:
            return held.keys
        rope, sinks = self.ropes[layer], held.keys[:, : self.num_sinks]
        shift = torch.full((sinks.shape[1],), gap, device=sinks.device)
        moved = rope.from_planes(rope.rotate(rope.to_planes(sinks), shift))
        return torch.cat([moved, held.keys[:, self.num_sinks :]], 1)


def streaming_llm(geometry: KVGeometry, ropes: Sequence[RopeSpec], budget: float) -> EvictionCache:
    """StreamingLLM with the paper's four sinks."""
    return EvictionCache(geometry, SinksAndWindow(ropes), budget)
