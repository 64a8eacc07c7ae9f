# SPDX-License-Identifier: Apache-2.0
"""How far a method's predictions lie from the exact model's, token by token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sphkv.evaluation.harness.states import log_probabilities
from sphkv.evaluation.schema import DistanceBins, KLSummary

KL_TOLERANCE = 0.05
"""Nats per token that a text may diverge and still count as continued like dense."""

NLL_TOLERANCE = 0.01
"""Nats per token that the loss may rise."""

DISTANCE_EDGES = (32, 128, 512, 2048)
"""Last distance from the prompt, in tokens, of every bin."""

DRIFT_EDGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Nats between which tokens are counted."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenDivergence:
    """Two runs over the same tokens.

    Attributes:
        kl: ``[rows]`` float64 divergence in nats.
        is_same: ``[rows]`` bool, whether the best token is the same.
        margin: ``[rows]`` gap of the exact model's two best tokens, in nats.
        own_margin: ``[rows]`` the same of the method.
        nll: ``[targets]`` float64 loss of the method on the true next tokens.
        dense_nll: ``[targets]`` float64 loss of the exact model.
    """

    kl: Tensor
    is_same: Tensor
    margin: Tensor
    own_margin: Tensor
    nll: Tensor
    dense_nll: Tensor

    def summary(self) -> KLSummary:
        """Means, tails and both verdicts."""
        count, rows = max(1, len(self.nll)), len(self.kl)
        nll, dense = float(self.nll.sum()) / count, float(self.dense_nll.sum()) / count
        mean, worst = float(self.kl.mean()), float(self.kl.max())
        return {
            "kl": mean,
            "kl_without_worst": (float(self.kl.sum()) - worst) / max(1, rows - 1),
            "kl_p95": float(self.kl.quantile(0.95)),
            "kl_max": worst,
            "kl_by_distance": self.by_distance(),
            "kl_counts": self.counts(),
            "nll": nll,
            "nll_dense": dense,
            "nll_delta": nll - dense,
            "same_top1": float(self.is_same.double().mean()),
            "num_tokens": rows,
            "verdicts": {"kl": mean <= KL_TOLERANCE, "nll": nll - dense <= NLL_TOLERANCE},
        }

    def by_distance(self) -> DistanceBins:
        """Mean divergence by distance from the prompt; what lies farther is in no bin."""
        starts = (0, *DISTANCE_EDGES[:-1])
        bins = [self.kl[a:b] for a, b in zip(starts, DISTANCE_EDGES, strict=True)]
        return {
            "edges": list(DISTANCE_EDGES),
            "tokens": [len(part) for part in bins],
            "kl": [float(part.mean()) if len(part) else None for part in bins],
        }

    def counts(self) -> list[int]:
        """Tokens by divergence: below each of ``DRIFT_EDGES`` in turn, and above the last."""
        edges = torch.tensor(DRIFT_EDGES, dtype=self.kl.dtype, device=self.kl.device)
        found = torch.bincount(torch.bucketize(self.kl, edges), minlength=len(DRIFT_EDGES) + 1)
        return [int(count) for count in found]


def token_divergence(
    model: Any, reference: Tensor, hidden: Tensor, targets: Tensor | None = None
) -> TokenDivergence:
    """Compare two runs; the vocabulary is gone through once.

    Args:
        model: Its output head makes logits.
        reference: ``[rows, width]`` hidden states of the exact model.
        hidden: ``[rows, width]`` of the method.
        targets: True next tokens of the first rows, where they are known.
    """
    wanted = targets if targets is not None else hidden.new_empty(0, dtype=torch.int64)
    parts = []
    pairs = zip(log_probabilities(model, reference), log_probabilities(model, hidden), strict=True)
    for (rows, dense), (_, ours) in pairs:
        best, own_best = dense.topk(2, -1), ours.topk(2, -1)
        true = wanted[rows]
        pick = (torch.arange(len(true), device=true.device), true)
        parts.append(
            (
                (dense.exp() * (dense - ours)).sum(-1).double(),
                best.indices[:, 0] == own_best.indices[:, 0],
                best.values[:, 0] - best.values[:, 1],
                own_best.values[:, 0] - own_best.values[:, 1],
                -ours[pick].double(),
                -dense[pick].double(),
            )
        )
    return TokenDivergence(*(torch.cat(column) for column in zip(*parts, strict=True)))


def answer_divergence(
    model: Any,
    hidden: Tensor,
    token_ids: Sequence[int],
    reference: Tensor,
    reference_ids: Sequence[int],
) -> float:
    """Mean divergence in nats while an answer follows the exact model's, first parting included.

    Args:
        model: Its output head makes logits.
        hidden: ``[steps, width]`` hidden states of the method's answer.
        token_ids: Its tokens.
        reference: ``[steps, width]`` hidden states of the exact model's answer.
        reference_ids: Its tokens.
    """
    pairs = zip(token_ids, reference_ids, strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    rows = min(common + 1, hidden.shape[0], reference.shape[0])
    return float(token_divergence(model, reference[:rows], hidden[:rows]).kl.mean())
