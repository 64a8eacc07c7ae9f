# SPDX-License-Identifier: Apache-2.0
"""CAKE: layers share the budget by how widely and how restlessly they attend.

Qin et al., 2025, "CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences". The
preference of a layer is ``H ** (1 / tau1) * V ** (1 / tau2)``: the entropies of the attention of
the window's queries over the tokens before it, and the variances over those queries of what each
token receives, both added up. While the prompt is stored layer by
layer, the layers seen so far share the whole budget in proportion, so an earlier layer gives up
tokens as later ones come ("cascade"). Tokens are ranked by mean plus ``gamma`` times variance of
the attention from the last 32 queries, gamma 200, averaged over five neighbours.

Deviations: ``tau1 = tau2 = 1``, where the paper tunes both per model; tokens after the prompt are
all kept, where the published code goes on evicting by the window's mean attention; rooms are whole
pages of 16 tokens; before the last layer has come, a layer may exceed its share by a tenth. Scores
are kept beside the states until then and are charged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.baselines.attention_scores import mean_over_group, window_attention
from sphkv.baselines.eviction import PROTECTED, EvictionCache, PromptPolicy, highest
from sphkv.baselines.held_states import Tagged
from sphkv.baselines.paged_states import PAGE_TOKENS
from sphkv.core.geometry import KVGeometry

_LENIENCE = 0.1


@dataclass(frozen=True)
class MeanAndVariance(PromptPolicy):
    """Scores by mean and variance of the window's attention.

    Attributes:
        window: Queries that are read; their own tokens are protected.
        kernel: Width of the pooling over neighbouring tokens; odd.
        gamma: Weight of the variance.
    """

    window: int = 32
    kernel: int = 5
    gamma: float = 200.0

    name = "cake"

    def least_tokens(self) -> int:
        """The window and one token."""
        return self.window + 1

    def prompt_scores(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Mean and variance over the window, pooled."""
        weights = window_attention(query, keys, self.window)
        scores = weights.mean(1) + self.gamma * _variance(weights)
        scores = mean_over_group(scores, keys.shape[0])
        past = max(0, keys.shape[1] - self.window)
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

    def __init__(self, geometry: KVGeometry, budget: float) -> None:
        """Start empty."""
        self._policy = MeanAndVariance()
        super().__init__(geometry, self._policy, budget)
        self._preference: list[float] = []
        self._ranked: dict[int, Tensor] = {}

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, *, query: Tensor | None = None
    ) -> None:
        """Store a layer, then cut all layers so far to their share."""
        self._check_empty(layer)
        if layer != len(self._preference):
            raise ValueError(f"layers come in order: expected {len(self._preference)}, got {layer}")
        super().prefill(layer, keys, values, query=query)
        assert query is not None
        weights = window_attention(query, keys, self._policy.window)
        past = max(1, keys.shape[1] - self._policy.window)
        self._preference.append(layer_preference(weights[:, :, :past]))
        self._cascade(keys.shape[1])
        if layer == self.geometry.num_layers - 1:
            self._ranked.clear()

    def _store_prompt(
        self, layer: int, keys: Tensor, values: Tensor, scores: Tensor, num_kept: int
    ) -> None:
        # everything first: the layer's share is only known beside the others'
        super()._store_prompt(layer, keys, values, scores, keys.shape[1])
        self._ranked[layer] = scores.contiguous()

    def _cascade(self, tokens: int) -> None:
        rooms = share_pages(
            self._preference,
            total=self.plan(tokens) // PAGE_TOKENS * self.geometry.num_layers,
            least=-(-self._policy.least_tokens() // PAGE_TOKENS),
            most=-(-tokens // PAGE_TOKENS),
        )
        is_last = len(rooms) == self.geometry.num_layers
        for layer, pages in enumerate(rooms):
            ranked, room = self._ranked[layer], pages * PAGE_TOKENS
            # small cuts wait for the next: which tokens stay does not depend on it
            allowed = room if is_last else room * (1 + _LENIENCE)
            if allowed >= ranked.shape[1]:
                continue
            keep = highest(ranked, room)
            held = self._pages(layer)
            padded = torch.zeros_like(held.read().positions, dtype=torch.bool)
            padded[:, : keep.shape[1]] = keep
            held.keep(padded)
            self._ranked[layer] = ranked[keep].view(ranked.shape[0], room)
            self._evicted_at[layer] = tokens

    def tensors(self) -> list[Tagged]:
        """Every live tensor with its ledger kind."""
        return super().tensors() + [("prot", scores) for scores in self._ranked.values()]


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
