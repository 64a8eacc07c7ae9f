# SPDX-License-Identifier: Apache-2.0
"""CAKE: layers share the budget by how widely and how restlessly they attend.

Qin et al., 2025, "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences". The
preference of a layer is ``H ** (1 / tau1) * V ** (1 / tau2)``: the entropies of the attention of
the window's queries over the tokens before it, and the variances over those queries of what each
token receives, both added up. While the prompt is stored layer by layer, the layers seen so far
share the whole budget in proportion, so an earlier layer gives up tokens as later ones come
("cascade"). Tokens are ranked by mean plus ``gamma`` times variance of the attention from the last
32 queries, gamma 200, averaged over five neighbours.

Deviations: ``tau1 = tau2 = 1``, where the paper tunes both per model (trials have others); the
published code goes on evicting by the window's mean attention, here tokens after the prompt are
treated as for SnapKV; rooms are whole pages of 16 tokens. Scores are kept beside the states until
the last layer has come and are charged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sphkv.baselines.attention_scores import mean_over_group, window_attention
from sphkv.baselines.eviction import (
    PROTECTED,
    EvictionCache,
    LayerPrompt,
    PromptPolicy,
    highest,
)
from sphkv.baselines.held_states import Tagged, check_query
from sphkv.baselines.layer_pages import PAGE_TOKENS
from sphkv.baselines.settings import MethodShape


@dataclass(frozen=True)
class MeanAndVariance(PromptPolicy):
    """Scores by mean and variance of the window's attention.

    Attributes:
        window: Queries that are read; their own tokens are protected.
        kernel: Width of the pooling over neighbouring tokens; odd.
        gamma: Weight of the variance.
        tau1: Temperature of the entropy.
        tau2: Temperature of the variance.
    """

    window: int = 32
    kernel: int = 5
    gamma: float = 200.0
    tau1: float = 1.0
    tau2: float = 1.0

    @property
    def name(self) -> str:
        """Label in reports."""
        return "cake"

    @classmethod
    def trials(cls) -> tuple[Self, ...]:
        """Two kernels, three pairs of temperatures."""
        return tuple(
            cls(kernel=kernel, tau1=tau1, tau2=tau2)
            for kernel in (5, 17)
            for tau1, tau2 in ((1.0, 1.0), (1.6, 0.4), (1.0, 2.0))
        )

    def build(self, shape: MethodShape) -> CakeCache:
        """An empty cache."""
        return CakeCache(shape, self)

    def least_tokens(self) -> int:
        """The window and one token."""
        return self.window + 1

    def prompt_scores(self, prompt: LayerPrompt) -> Tensor:
        """Mean and variance over the window, pooled."""
        weights = window_attention(prompt.query, prompt.keys, self.window)
        scores = weights.mean(1) + self.gamma * _variance(weights)
        scores = mean_over_group(scores, prompt.keys.shape[0])
        past = max(0, prompt.keys.shape[1] - self.window)
        ranked = torch.full_like(scores, PROTECTED)
        if past:
            ranked[:, :past] = torch.nn.functional.avg_pool1d(
                scores[None, :, :past], self.kernel, stride=1, padding=self.kernel // 2
            )[0]
        return ranked


def _variance(weights: Tensor) -> Tensor:
    """Variance over the queries of ``[heads, queries, tokens]``; 0 of a single query."""
    return weights.var(1, correction=int(weights.shape[1] > 1))


def layer_preference(weights: Tensor, *, tau1: float = 1.0, tau2: float = 1.0) -> float:
    """Preference of a layer from the attention ``[heads, queries, tokens]`` of its window."""
    entropy = -(weights * weights.clamp(min=1e-30).log()).sum((1, 2)).mean()
    variance = _variance(weights).sum(-1).mean()
    return float(entropy ** (1 / tau1) * variance ** (1 / tau2))


class CakeCache(EvictionCache):
    """Evicts in cascade while the layers of a prompt come in."""

    def __init__(self, shape: MethodShape, policy: MeanAndVariance) -> None:
        """Start empty."""
        super().__init__(shape, policy)
        self._cake = policy
        self._preference: list[float] = []
        self._rooms: list[int] = []
        self._ranked: dict[int, Tensor] = {}

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, *, query: Tensor | None = None
    ) -> None:
        """Store a layer, then cut all layers so far to their share."""
        if layer > len(self._preference):
            raise ValueError(f"layers come in order: expected {len(self._preference)}, got {layer}")
        if layer == len(self._preference) and query is not None:
            check_query(self.geometry, query, keys.shape[1])
            self._share(query, keys)
        try:
            super().prefill(layer, keys, values, query=query)
        except ValueError:
            if self._layers[layer] is None:
                del self._preference[layer:], self._rooms[layer:]
            raise
        self._cascade()
        if layer == self.geometry.num_layers - 1:
            self._ranked.clear()

    def _share(self, query: Tensor, keys: Tensor) -> None:
        """Divide the budget among the layers seen so far and the one that comes."""
        policy, tokens = self._cake, keys.shape[1]
        if keys.shape[-1] != query.shape[-1]:
            return
        weights = window_attention(query, keys, policy.window)
        past = max(1, tokens - policy.window)
        self._preference.append(
            layer_preference(weights[:, :, :past], tau1=policy.tau1, tau2=policy.tau2)
        )
        self._rooms = share_pages(
            self._preference,
            total=self._average_pages(tokens) * self.geometry.num_layers,
            least=-(-policy.least_tokens() // PAGE_TOKENS) + 1,
            most=-(-(tokens + self.shape.num_new) // PAGE_TOKENS),
        )

    def _layer_pages(self, layer: int, num_tokens: int) -> int:
        if layer >= len(self._rooms):
            return super()._layer_pages(layer, num_tokens)
        # later on, all layers grow alike
        return (
            self._rooms[layer]
            * self._average_pages(num_tokens)
            // self._average_pages(self._prompt)
        )

    def _note_prompt(self, layer: int, ranked: Tensor, is_kept: Tensor) -> None:
        self._ranked[layer] = ranked[is_kept].view(len(ranked), -1)

    def _cascade(self) -> None:
        for layer, ranked in self._ranked.items():
            counts = self._prompt_counts(layer, ranked)
            if int(counts[0]) >= ranked.shape[1]:
                continue
            pages = self._pages(layer)
            keep = highest(ranked, counts)
            pages.keep(pages.read(), keep)
            self._ranked[layer] = ranked[keep].view(len(ranked), -1)
            self._evicted_at[layer] = self._prompt

    def extra_tensors(self) -> list[Tagged]:
        """Live tensors beside the pages, with their ledger kind."""
        return super().extra_tensors() + [("prot", scores) for scores in self._ranked.values()]


def share_pages(preference: list[float], *, total: int, least: int, most: int) -> list[int]:
    """Pages of each layer in proportion to its preference, between two bounds.

    Args:
        preference: One positive number per layer.
        total: Pages to share; not exceeded unless the lower bound asks for it.
        least: Pages every layer gets.
        most: Pages a layer can use.
    """
    pages = [least] * len(preference)
    left = total - sum(pages)
    open_layers = [index for index in range(len(preference)) if least < most]
    while left > 0 and open_layers:
        weight = sum(preference[index] for index in open_layers) or 1.0
        added = 0
        for index in list(open_layers):
            extra = min(int(left * preference[index] / weight), most - pages[index])
            pages[index] += extra
            added += extra
            if pages[index] == most:
                open_layers.remove(index)
        left -= added
        if added == 0:
            break
    return pages
