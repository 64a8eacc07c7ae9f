# SPDX-License-Identifier: Apache-2.0
"""StreamingLLM: the first tokens and a window of the latest.

Xiao et al., 2023, "Efficient Streaming Language Models with Attention Sinks". Four sink tokens;
positions are counted inside the cache, so the sinks stand directly before the window: their keys
are turned on by the number of tokens dropped in between. Whenever the window moves they are turned
anew from the keys of the prompt, which are kept beside the pages and charged, so that rounding
does not add up.

Deviations: the window moves on by 16 tokens at a time; the prompt itself is read by the dense
model, as for every method here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.baselines.eviction import PROTECTED, EvictionCache, LayerPrompt, PromptPolicy, Weights
from sphkv.baselines.held_states import HeldStates
from sphkv.baselines.settings import MethodShape
from sphkv.core.rope import RopeSpec


@dataclass(frozen=True)
class SinksAndWindow(PromptPolicy):
    """Scores sinks as protected and every other token by its position.

    Attributes:
        num_sinks: First tokens that always stay.
    """

    num_sinks: int = 4

    @property
    def name(self) -> str:
        """Label in reports."""
        return "streaming_llm"

    @property
    def weights(self) -> Weights:
        """Positions are enough."""
        return "never"

    @property
    def num_moved(self) -> int:
        """The sinks."""
        return self.num_sinks

    @classmethod
    def trials(cls) -> tuple[SinksAndWindow, ...]:
        """Numbers of sinks."""
        return tuple(cls(num_sinks=count) for count in (4, 1, 2, 8, 16, 32))

    def build(self, shape: MethodShape) -> EvictionCache:
        """An empty cache."""
        return EvictionCache(shape, self)

    def least_tokens(self) -> int:
        """The sinks and one token."""
        return self.num_sinks + 1

    def reserved_pages(self, room: int, num_new: int) -> int:
        """None: the window moves."""
        return 0

    def prompt_scores(self, prompt: LayerPrompt) -> Tensor:
        """Positions, sinks first of all."""
        positions = torch.arange(prompt.keys.shape[1], device=prompt.keys.device)
        return self._score(positions.expand(prompt.keys.shape[:2]))

    def decode_scores(
        self, positions: Tensor, weights: Tensor | None, num_kept: int, prompt: int
    ) -> Tensor:
        """The same."""
        return self._score(positions)

    def _score(self, positions: Tensor) -> Tensor:
        is_sink = (positions >= 0) & (positions < self.num_sinks)
        return positions.float().masked_fill(is_sink, PROTECTED)

    def place_keys(self, rope: RopeSpec, held: HeldStates, sinks: Tensor) -> Tensor:
        """Move the sinks up to the window."""
        positions = held.positions[0]
        window = positions[positions >= self.num_sinks]
        gap = int(window.min()) - self.num_sinks if window.numel() else 0
        shift = torch.full((sinks.shape[1],), gap, device=sinks.device)
        moved = rope.from_planes(rope.rotate(rope.to_planes(sinks), shift))
        is_sink = (held.positions >= 0) & (held.positions < self.num_sinks)
        index = held.positions.clamp(0, sinks.shape[1] - 1)[..., None].expand_as(held.keys)
        return torch.where(is_sink[..., None], moved.gather(1, index), held.keys)
