# SPDX-License-Identifier: Apache-2.0
"""Our eviction baselines against kvpress's own code: which states of a prompt would each keep?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sphkv.baselines.eviction import EvictionCache, LayerPrompt
from sphkv.baselines.registry import make_baseline
from sphkv.evaluation.suites.columns import Bench, ReadSample
from sphkv.integrations.kvpress import press_scores

PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "snapkv": ("snapkv", {"window_size": 32, "kernel_size": 7}),
    "expected_attention": ("expected_attention", {}),
    "streaming_llm": ("streaming_llm", {}),
    "tova": ("tova", {}),
    "h2o": ("h2o", {}),
}
"""Our baselines, kvpress's method for each, and its settings where ours are the paper's."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """How alike two methods choose.

    Attributes:
        method: Our baseline.
        share: Share of the states kept.
        mean: Share of the states we keep that kvpress keeps too, mean over layers and heads.
        least: The same of the head where they differ most.
        by_chance: What two random choices would have in common.
        rank: Mean rank correlation of the scores.
    """

    method: str
    share: float
    mean: float
    least: float
    by_chance: float
    rank: float


def cross_check(
    bench: Bench, read: ReadSample, *, share: float, methods: Sequence[str] = tuple(PAIRS)
) -> list[Overlap]:
    """Compare choices on one prompt, without any budget but the share of states.

    Args:
        bench: The model.
        read: A prompt that was read.
        share: Share of the states of every head that is kept.
        methods: Some of ``PAIRS``.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"share must lie between 0 and 1, got {share}")
    found = []
    for method in methods:
        theirs_name, settings = PAIRS[method]
        theirs = press_scores(bench.model, theirs_name, read.ids.prompt, share, settings)
        ours = our_scores(bench, read, method)
        pairs = list(zip(ours, theirs, strict=True))
        shares = torch.cat([_common(a, b, share) for a, b in pairs])
        ranks = torch.cat([_rank_correlation(a, b) for a, b in pairs])
        found.append(
            Overlap(
                method,
                share,
                float(shares.mean()),
                float(shares.min()),
                share,
                float(ranks.mean()),
            )
        )
    return found


def our_scores(bench: Bench, read: ReadSample, method: str) -> list[Tensor]:
    """Scores ``[kv_heads, tokens]`` of every layer that our baseline ranks a prompt by."""
    layout = bench.layout
    cache = make_baseline(method, layout.geometry, layout.ropes, 1.0)
    if not isinstance(cache, EvictionCache):
        raise ValueError(f"{method} ranks no states")
    scores = []
    for layer, part in enumerate(read.states.layers):
        prompt = LayerPrompt(layer, part.query, part.keys, part.values, layout.ropes[layer])
        scores.append(cache.policy.prompt_scores(prompt).float().cpu())
    return scores


def _common(ours: Tensor, theirs: Tensor, share: float) -> Tensor:
    """Share of kept states ``[kv_heads]`` that two scores have in common."""
    count = max(1, int(share * ours.shape[1]))
    marks = []
    for scores in (ours, theirs.to(ours)):
        kept = torch.zeros(ours.shape, dtype=torch.bool)
        marks.append(kept.scatter(1, scores.topk(count, dim=1).indices, value=True))
    return (marks[0] & marks[1]).sum(1) / count


def _rank_correlation(ours: Tensor, theirs: Tensor) -> Tensor:
    """Spearman's correlation ``[kv_heads]`` of two scores ``[kv_heads, tokens]``."""
    ranks = [scores.float().argsort(1).argsort(1).float() for scores in (ours, theirs.to(ours))]
    first, second = (rank - rank.mean(1, keepdim=True) for rank in ranks)
    return (first * second).sum(1) / (first.norm(dim=1) * second.norm(dim=1))
