# SPDX-License-Identifier: Apache-2.0
"""Policies that drop tokens as decoding goes on: StreamingLLM, H2O and TOVA."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.baselines.attention_scores import mean_over_group, received_attention, window_attention
from sphkv.baselines.eviction import PROTECTED, EvictionCache, LayerPrompt, PromptPolicy, Weights
from sphkv.baselines.held_states import HeldStates
from sphkv.baselines.settings import MethodShape
from sphkv.core.rope import RopeSpec


@dataclass(frozen=True)
class SinksAndWindow(PromptPolicy):
    """Scores sinks as protected and every other token by its position.

    StreamingLLM: the first tokens and a window of the latest.

    Xiao et al., 2023, "Efficient Streaming Language Models with Attention Sinks". Four sink tokens;
    positions are counted inside the cache, so the sinks stand directly before the window: their
    keys are turned on by the number of tokens dropped in between. Whenever the window moves they
    are turned anew from the keys of the prompt, which are kept beside the pages and charged, so
    that rounding does not add up.

    Deviations: the window moves on by 16 tokens at a time; the prompt itself is read by the dense
    model, as for every method here.

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


@dataclass(frozen=True)
class HeavyHitters(PromptPolicy):
    """Accumulated attention, with the latest tokens protected.

    H2O: the tokens that received most attention so far, and the latest ones.

    Zhang et al., 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
    Language Models". A token's score is the sum of the attention weights that all queries gave it;
    half of the budget goes to the highest scores, half to the latest tokens. Scores go on adding up
    while decoding, so they are stored beside the states and charged (four bytes each).

    Deviations: with grouped queries a KV head's score sums over its query heads; eviction happens
    once per 16 new tokens instead of at every token. Decode kernels return no weights, so each step
    computes them a second time in torch, which its time includes.

    Attributes:
        recent_share: Share of the kept tokens that are the latest.
    """

    recent_share: float = 0.5

    @property
    def name(self) -> str:
        """Label in reports."""
        return "h2o"

    @property
    def weights(self) -> Weights:
        """Of every step."""
        return "always"

    @property
    def carries_scores(self) -> bool:
        """The sums."""
        return True

    @classmethod
    def trials(cls) -> tuple[HeavyHitters, ...]:
        """Shares of recent tokens."""
        return tuple(cls(recent_share=share) for share in (0.5, 0.1, 0.25, 0.4, 0.65, 0.8))

    def build(self, shape: MethodShape) -> EvictionCache:
        """An empty cache."""
        return EvictionCache(shape, self)

    def least_tokens(self) -> int:
        """A heavy hitter and a recent token."""
        return 2

    def reserved_pages(self, room: int, num_new: int) -> int:
        """None: whatever scores low goes."""
        return 0

    def prompt_scores(self, prompt: LayerPrompt) -> Tensor:
        """Attention received from all queries of the prompt."""
        if prompt.shared is None:
            received = received_attention(prompt.query, prompt.keys)
        else:
            received = prompt.shared.received(prompt.layer, prompt.query, prompt.keys)
        total: Tensor = received.unflatten(0, (prompt.keys.shape[0], -1)).sum(1)
        return total

    def decode_scores(
        self, positions: Tensor, weights: Tensor | None, num_kept: int, prompt: int
    ) -> Tensor:
        """Attention received so far."""
        assert weights is not None
        recent = positions.max() - max(1, int(num_kept * self.recent_share))
        return weights.masked_fill(positions > recent, PROTECTED)


@dataclass(frozen=True)
class LastQuery(PromptPolicy):
    """TOVA: what the newest query looks at least goes.

    Oren et al., 2024, "Transformers are Multi-State RNNs". When the cache is full, the token with
    the smallest attention weight under the newest query is dropped; nothing is protected by its
    age.

    Deviations: each KV head decides by the mean over its query heads, where the paper averages over
    all heads of a layer; 16 tokens go at a time, once per 16 new ones; the newest tokens, 16 by
    default, are protected, since a token that came since the last eviction was never weighed.
    Decode kernels return no weights, so the step that evicts computes them a second time in torch.

    Attributes:
        recent: Newest tokens that stay.
    """

    recent: int = 16

    @property
    def name(self) -> str:
        """Label in reports."""
        return "tova"

    @property
    def weights(self) -> Weights:
        """Of the step that evicts."""
        return "evicting"

    @classmethod
    def trials(cls) -> tuple[LastQuery, ...]:
        """Numbers of protected tokens."""
        return tuple(cls(recent=count) for count in (16, 1, 4, 8, 24, 32))

    def build(self, shape: MethodShape) -> EvictionCache:
        """An empty cache."""
        return EvictionCache(shape, self)

    def least_tokens(self) -> int:
        """The protected tokens and one more."""
        return self.recent + 1

    def reserved_pages(self, room: int, num_new: int) -> int:
        """None: whatever weighs least goes."""
        return 0

    def prompt_scores(self, prompt: LayerPrompt) -> Tensor:
        """Weights of the prompt's last query."""
        weights = window_attention(prompt.query, prompt.keys, 1)[:, 0]
        scores = mean_over_group(weights, prompt.keys.shape[0])
        scores[:, max(0, scores.shape[1] - self.recent) :] = PROTECTED
        return scores

    def decode_scores(
        self, positions: Tensor, weights: Tensor | None, num_kept: int, prompt: int
    ) -> Tensor:
        """Weights of the newest query."""
        assert weights is not None
        return weights.masked_fill(positions > positions.max() - self.recent, PROTECTED)
