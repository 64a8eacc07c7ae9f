# SPDX-License-Identifier: Apache-2.0
"""Probes of a distortion model: small changes of a prompt's states, predicted and measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sphkv.cache.plan import retention_tiers
from sphkv.core.tiers import TierTable
from sphkv.evaluation.harness.decode import follow_text
from sphkv.evaluation.harness.reference import DenseReference
from sphkv.evaluation.harness.states import PromptStates
from sphkv.evaluation.harness.subject import MethodSubject
from sphkv.evaluation.metrics.divergence import token_divergence
from sphkv.retention.features import drop_losses
from sphkv.retention.measure import LayerInput, MeasureConfig, measure_layer
from sphkv.retention.policy import RetentionPolicy

if TYPE_CHECKING:
    from sphkv.evaluation.retention.study import StudyRunner

_PARTS = 6


@dataclass(frozen=True, slots=True)
class Probe:
    """One change of some layers, what was predicted and what happened.

    Attributes:
        name: Layers and change.
        kind: ``"tier"`` or ``"drop"``.
        terms: Predicted angle, value and drop terms, unweighted.
        by_age: What age alone predicts: the sum of 1 / age over dropped states, and bits lost.
        by_votes: The same with attention votes.
        kl: Measured KL.
    """

    name: str
    kind: str
    terms: tuple[float, float, float]
    by_age: float
    by_votes: float
    kl: float


def measure_probes(
    runner: StudyRunner,
    policy: RetentionPolicy,
    prompt: PromptStates,
    report: Callable[[str], None],
) -> list[Probe]:
    """Change a few layers at a time by every tier and by dropping tokens, and measure KL."""
    shape = runner.session.shape
    config = MeasureConfig(
        shape.geometry, shape.ropes, retention_tiers(shape.geometry.head_dim), policy=policy
    )
    tiers = config.tiers
    layers = [
        measure_layer(config, runner.codec, layer, (part.query, part.keys, part.values))
        for layer, part in enumerate(prompt.layers)
    ]
    probes = []
    count = len(layers)
    for part in range(_PARTS):
        chosen = range(part * count // _PARTS, (part + 1) * count // _PARTS)
        for tier in (1, 3):
            probes.append(_tier_probe(runner, prompt, layers, chosen, tiers, tier))
        for number in range(3):
            probes.append(_drop_probe(runner, prompt, layers, chosen, number))
        report(f"layers {chosen[0]}..{chosen[-1]} probed")
    return probes


def _kl(runner: StudyRunner, prompt: PromptStates, method: DenseReference) -> float:
    subject = MethodSubject(runner.session.model, method, prompt.geometry)
    run = follow_text(subject, prompt.following)
    found = token_divergence(runner.session.model, prompt.hidden[1:], run.hidden)
    return max(float(found.kl.mean()), 1e-12)


def _tier_probe(
    runner: StudyRunner,
    prompt: PromptStates,
    layers: Sequence[LayerInput],
    chosen: range,
    tiers: TierTable,
    tier: int,
) -> Probe:
    """Code all states of some layers at one tier, but those that a cache never codes."""
    method = DenseReference(prompt, capacity=prompt.following.shape[1])
    angle = value = votes = age = 0.0
    tokens = prompt.num_tokens
    spec = tiers[tier]
    for layer in chosen:
        part, found = prompt.layers[layer], layers[layer]
        at = torch.arange(tokens).expand(part.keys.shape[0], -1)
        encoded = runner.codec.encode(layer, spec, part.keys, part.values, at)
        keys, values = runner.codec.decode(layer, spec, encoded, at)
        kept = found.protected[..., None]
        method.change(
            layer, torch.where(kept, part.keys, keys), torch.where(kept, part.values, values)
        )
        f, e = found.features, found.errors
        pull, energy, mass = (
            x.masked_fill(found.protected, 0)
            for x in (
                f.shift * f.radius.square(),
                f.energy * f.value_norm.square(),
                f.mass,
            )
        )
        angle += float((pull.sum(1) * (e.angle + e.radius)[:, tier]).sum())
        value += float((energy.sum(1) * e.value[:, tier]).sum())
        value += float((mass.sum(1) * e.common[:, tier]).sum())
        lost = e.angle[:, tier] + e.value[:, tier]
        votes += float((mass.sum(1) * lost).sum())
        age += float(lost.sum()) * float((1 / torch.arange(1, tokens + 1)).sum())
    kl = _kl(runner, prompt, method)
    name = f"{spec.name} in layers {chosen[0]}..{chosen[-1]}"
    return Probe(name, "tier", (angle, value, 0.0), age, votes, kl)


def _drop_probe(
    runner: StudyRunner,
    prompt: PromptStates,
    layers: Sequence[LayerInput],
    chosen: range,
    number: int,
) -> Probe:
    """Drop a third of the older tokens: the least pulling, the oldest, or an arbitrary one."""
    method = DenseReference(prompt, capacity=prompt.following.shape[1])
    tokens = prompt.num_tokens
    middle = torch.arange(16, tokens - 64)
    drop = votes = age = 0.0
    for layer in chosen:
        part, found = prompt.layers[layer], layers[layer]
        kept = torch.ones(part.keys.shape[:2], dtype=torch.bool)
        for head in range(part.keys.shape[0]):
            order = {
                0: found.features.shift[head, middle].argsort(),
                1: torch.arange(middle.numel()),
                2: torch.randperm(
                    middle.numel(), generator=torch.Generator().manual_seed(layer * 100 + head)
                ),
            }[number]
            gone = middle[order[: middle.numel() // 3]]
            kept[head, gone] = False
            drop += float(drop_losses(found.rows, part.values, gone[None], head)[-1])
            if found.features.surprise is not None:
                drop += float(found.features.surprise[head, gone].sum())
            votes += float(found.features.mass[head, gone].sum())
            age += float((1 / (tokens - gone).float()).sum())
        method.change(layer, part.keys, part.values, kept=kept)
    kl = _kl(runner, prompt, method)
    label = ("least pulling", "oldest", "arbitrary")[number]
    name = f"{label} third dropped in layers {chosen[0]}..{chosen[-1]}"
    return Probe(name, "drop", (0.0, 0.0, drop), age, votes, kl)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation; ties share their mean rank."""
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"need two lists of equal length, got {len(first)} and {len(second)}")
    a, b = (_ranks(torch.tensor(x, dtype=torch.float64)) for x in (first, second))
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / (a.norm() * b.norm()).clamp(min=1e-300))


def _ranks(values: Tensor) -> Tensor:
    below = (values[None] < values[:, None]).sum(1)
    equal = (values[None] == values[:, None]).sum(1)
    return below + (equal - 1) / 2.0
