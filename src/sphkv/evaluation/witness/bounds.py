# SPDX-License-Identifier: Apache-2.0
"""Witnesses: behaviour that a cache must keep, each with a figure and a bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sphkv.evaluation.metrics.stability import (
    Failure,
    Reply,
    count_failures,
    disagreement,
    drift_summary,
    failure_rate,
    length_drift,
    reply_failures,
    trajectory_sensitivity,
)

_CAN_BE_LOST = ("retrieval", "json", "tool", "termination")
_STRUCTURE: dict[str, Failure] = {"json": "structured output", "tool": "tool corruption"}


@dataclass(frozen=True, slots=True)
class WitnessBounds:
    """How much each witness may move; anything beyond fails the certificate.

    Attributes:
        kl: Mean divergence over a text, in nats per token.
        kl_tail: Share of tokens that diverge by more than ``tail_nats``.
        tail_nats: What counts as the tail.
        delta_t: Mean absolute difference of answer lengths, in tokens.
        s_traj: Increase of the variance over seeds.
        lost: Prompts that may lose a property dense has: needles, JSON, tools, endings.
        refusal_flips: Replies that may change between refusing and answering.
    """

    kl: float = 0.05
    kl_tail: float = 0.02
    tail_nats: float = 0.5
    delta_t: float = 4.0
    s_traj: float = 0.1
    lost: int = 0
    refusal_flips: int = 0

    def __post_init__(self) -> None:
        """Reject bounds that nothing could meet."""
        for name, value in asdict(self).items():
            if value < 0:
                raise ValueError(f"bound {name} must not be negative, got {value}")


@dataclass(frozen=True, slots=True)
class Witness:
    """One judged behaviour.

    Attributes:
        name: What is watched.
        value: The figure of the method.
        dense: The figure of dense, where there is one.
        bound: The most that ``value`` may be.
        exemplar: A prompt and the two answers that show the worst of it; empty if all agree.
    """

    name: str
    value: float
    bound: float
    dense: float | None = None
    exemplar: str = ""

    @property
    def is_held(self) -> bool:
        """Whether the figure is within its bound."""
        return self.value <= self.bound

    @property
    def is_mute(self) -> bool:
        """Whether dense itself fails every prompt of it, so that nothing could be lost."""
        return self.name in _CAN_BE_LOST and self.dense == 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a certificate."""
        return {**asdict(self), "is_held": self.is_held, "is_mute": self.is_mute}


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Dense and method on one prompt.

    Attributes:
        kind: Witness of the prompt.
        case_id: The prompt.
        dense: Dense's reply; valid if it has the property that the witness watches.
        ours: The method's.
    """

    kind: str
    case_id: str
    dense: Reply
    ours: Reply

    @property
    def failures(self) -> list[Failure]:
        """What went wrong that did not with dense."""
        if self.kind in _STRUCTURE:
            return reply_failures(self.ours, self.dense, structure=_STRUCTURE[self.kind])
        # a fact that is lost or a refusal is no broken structure
        return reply_failures(replace(self.ours, is_valid=True), self.dense)


def summarise_pairs(pairs: Sequence[AnswerPair]) -> dict[str, Any]:
    """``Delta T``, ``Disagree`` and ``R_fail`` with its categories over greedy answers."""
    failures = [pair.failures for pair in pairs]
    return {
        "delta_t": _length_drift(pairs),
        "disagree": disagreement(
            [tuple(p.ours.token_ids) for p in pairs], [tuple(p.dense.token_ids) for p in pairs]
        ),
        "r_fail": failure_rate(failures),
        "failures": count_failures(failures),
    }


def _length_drift(pairs: Sequence[AnswerPair]) -> float:
    return length_drift(
        [len(p.ours.token_ids) for p in pairs], [len(p.dense.token_ids) for p in pairs]
    )


def judge_answers(pairs: Sequence[AnswerPair], bounds: WitnessBounds) -> list[Witness]:
    """Retrieval, JSON, tools, refusal, termination and length."""
    found = []
    for kind in ("retrieval", "json", "tool"):
        members = [pair for pair in pairs if pair.kind == kind]
        lost = [pair for pair in members if pair.dense.is_valid and not pair.ours.is_valid]
        found.append(_lost(kind, lost, sum(pair.dense.is_valid for pair in members), bounds.lost))
    refusals = [pair for pair in pairs if pair.kind == "refusal"]
    flips = [pair for pair in refusals if pair.dense.is_valid != pair.ours.is_valid]
    declined = sum(pair.dense.is_valid for pair in refusals)
    found.append(_lost("refusal", flips, declined, bounds.refusal_flips))
    endings = [pair for pair in pairs if pair.dense.is_ended and not pair.ours.is_ended]
    found.append(
        _lost("termination", endings, sum(pair.dense.is_ended for pair in pairs), bounds.lost)
    )
    if pairs:
        drift = _length_drift(pairs)
        worst = max(pairs, key=lambda p: abs(len(p.ours.token_ids) - len(p.dense.token_ids)))
        said = "" if drift == 0 else _exemplar(worst)
        found.append(Witness("length", drift, bounds.delta_t, exemplar=said))
    return found


def _lost(name: str, lost: Sequence[AnswerPair], dense: int, bound: int) -> Witness:
    said = _exemplar(lost[0]) if lost else ""
    return Witness(name, float(len(lost)), float(bound), float(dense), said)


def _exemplar(pair: AnswerPair) -> str:
    return f"{pair.case_id}: dense {pair.dense.text[:80]!r}, method {pair.ours.text[:80]!r}"


def judge_drift(divergences: Sequence[float], bounds: WitnessBounds) -> list[Witness]:
    """Mean and tail of the divergence over a text."""
    summary = drift_summary(divergences, bound=bounds.tail_nats)
    return [
        Witness("drift", summary["mean"], bounds.kl),
        Witness("drift tail", summary["tail"], bounds.kl_tail),
    ]


def judge_seeds(
    ours: dict[str, list[float]], dense: dict[str, list[float]], bounds: WitnessBounds
) -> Witness:
    """Increase of ``S_traj`` over dense, sampled with the same random numbers."""
    before, after = trajectory_sensitivity(dense), trajectory_sensitivity(ours)
    return Witness("seeds", after - before, bounds.s_traj, before)


def judge_budget(broken: Sequence[str]) -> Witness:
    """No prompt may need more than the budget, at any step of its answer.

    Args:
        broken: Each prompt that did, with the reason.
    """
    return Witness("budget", float(len(broken)), 0.0, exemplar=broken[0] if broken else "")


def judge_realisation(realisation: str) -> Witness:
    """A point is safe only if decode reads the stored form."""
    return Witness("kernel realisation", float(realisation != "kernel-realized"), 0.0)
