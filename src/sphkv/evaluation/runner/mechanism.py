# SPDX-License-Identifier: Apache-2.0
"""What a point tells about how it came about: tiers, margins and what tipped over."""

from __future__ import annotations

from typing import Any

import torch

from sphkv.core.tiers import RUN_TOKENS
from sphkv.evaluation.harness.subject import Subject
from sphkv.evaluation.metrics.divergence import TokenDivergence
from sphkv.evaluation.schema import MarginCounts
from sphkv.retention.features import head_spread, segment_spread, state_bytes_of

MARGIN_EDGES = (0.1, 0.3, 1.0, 3.0)
"""Gaps of the two best tokens, in nats, between which tokens are counted; small is brittle."""

_COLUMNS = 96
_FIRST = ord("a")


def describe_allocation(subject: Subject) -> dict[str, Any] | None:
    """Where the controller spent its bytes; None of a method that has no controller.

    ``map`` has one text per layer and head: the tier, by its place in ``tiers`` as a letter, of
    evenly spaced tokens of the prompt.
    """
    decision = subject.decision()
    if decision is None:
        return None
    contract, tiers = decision.contract, decision.tiers
    tier_id = contract.tier_id.flatten(0, 1)
    at = torch.linspace(0, contract.num_tokens - 1, _COLUMNS).round().long()
    each = state_bytes_of(contract.tier_id, tiers.state_bytes(subject.geometry.head_dim))
    spread = head_spread(each)
    labels = decision.segments.label(contract.num_tokens, recent_tokens=RUN_TOKENS)
    return {
        "tiers": [tier.name for tier in tiers],
        "map": ["".join(chr(_FIRST + tier) for tier in row) for row in tier_id[:, at].tolist()],
        "num_tokens": contract.num_tokens,
        "states": contract.state_counts(len(tiers)).sum((0, 1)).tolist(),
        "head_bytes_per_token": [round(size, 3) for size in spread.bytes_per_token],
        "head_entropy": spread.entropy,
        "head_gini": spread.gini,
        "segments": segment_spread(each, labels),
    }


def describe_margins(found: TokenDivergence, subject: Subject) -> MarginCounts:
    """How often the best token changed, by how sure the exact model was of it.

    Args:
        found: The method against the exact model.
        subject: A controller also tells the drift it predicts, to be set against its margins.
    """
    bins = torch.bucketize(found.margin, torch.tensor(MARGIN_EDGES, device=found.margin.device))
    num_bins = len(MARGIN_EDGES) + 1
    counts: MarginCounts = {
        "tokens": torch.bincount(bins, minlength=num_bins).tolist(),
        "tipped": torch.bincount(bins[~found.is_same], minlength=num_bins).tolist(),
    }
    decision = subject.decision()
    if decision is not None:
        counts["drift"] = decision.drift
        counts["margins"] = [round(margin, 4) for margin in found.own_margin.tolist()]
    return counts
