# SPDX-License-Identifier: Apache-2.0
"""Our eviction baselines against kvpress's own code: which states of a prompt would each keep?

Three of ours follow their papers where kvpress does not: SnapKV pools by the maximum and kvpress by
the mean, TOVA averages over the query heads of a KV head and kvpress over all heads, H2O sums the
attention that a token receives and kvpress divides it by the number of queries that could see it.
The choices are compared as they are and once more with that one difference taken out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sphkv.baselines.attention_scores import mean_over_group, window_attention
from sphkv.baselines.eviction import PROTECTED, EvictionCache, LayerPrompt
from sphkv.baselines.registry import make_baseline
from sphkv.evaluation.harness.states import LayerStates
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
        aligned: As ``mean``, with kvpress's definition where ours is the paper's.
        by_chance: What two random choices would have in common.
        rank: Mean rank correlation of the scores.
    """

    method: str
    share: float
    mean: float
    least: float
    aligned: float
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
                _aligned(read, method, ours, theirs, share),
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


def _aligned(
    read: ReadSample, method: str, ours: Sequence[Tensor], theirs: Sequence[Tensor], share: float
) -> float:
    """Share in common when ours are computed by kvpress's definition."""
    found = []
    for part, scores, other in zip(read.states.layers, ours, theirs, strict=True):
        found.append(_common(_by_their_definition(part, method, scores), other, share))
    return float(torch.cat(found).mean())


def _by_their_definition(part: LayerStates, method: str, scores: Tensor) -> Tensor:
    heads, tokens = scores.shape
    if method == "h2o":
        return scores / torch.arange(tokens, 0, -1)
    if method == "tova":
        weights = window_attention(part.query, part.keys, 1)[:, 0].mean(0, keepdim=True)
        found = weights.expand(heads, -1).float().cpu().clone()
        found[:, -1] = PROTECTED
        return found
    if method == "snapkv":
        window, kernel = (PAIRS["snapkv"][1][name] for name in ("window_size", "kernel_size"))
        votes = mean_over_group(window_attention(part.query, part.keys, window).sum(1), heads)
        past = votes[None, :, : tokens - window].float().cpu()
        found = torch.full((heads, tokens), PROTECTED)
        pooled = torch.nn.functional.avg_pool1d(past, kernel, stride=1, padding=kernel // 2)
        found[:, : tokens - window] = pooled[0]
        return found
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
    found: Tensor = (first * second).sum(1) / (first.norm(dim=1) * second.norm(dim=1))
    return found
