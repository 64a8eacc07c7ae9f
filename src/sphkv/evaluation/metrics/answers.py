# SPDX-License-Identifier: Apache-2.0
"""Scores of short answers as LongBench defines them, and whether a method changes behaviour."""

from __future__ import annotations

import re
import statistics
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sphkv.evaluation.metrics.statistics import quantile

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

Failure = Literal[
    "refusal flip", "tool corruption", "structured output", "derailment", "termination"
]
FAILURES: tuple[Failure, ...] = (
    "refusal flip",
    "tool corruption",
    "structured output",
    "derailment",
    "termination",
)
_REFUSALS = (
    "i can't", "i cannot", "i can not", "i'm sorry", "i am sorry", "i won't", "unable to help",
    "not able to help", "can't assist", "cannot assist", "i must decline",
)  # fmt: skip


def normalise_answer(text: str) -> str:
    """Lower case without punctuation and articles, single blanks."""
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def token_f1(answer: str, truth: str) -> float:
    """Harmonic mean of the shares of common words, counted with multiplicity."""
    ours, theirs = normalise_answer(answer).split(), normalise_answer(truth).split()
    common = sum((Counter(ours) & Counter(theirs)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)


def best_f1(answer: str, truths: Sequence[str]) -> float:
    """F1 against the truth that fits best."""
    if not truths:
        raise ValueError("an answer needs at least one truth")
    return max(token_f1(answer, truth) for truth in truths)


def exact_match(answer: str, truths: Sequence[str]) -> float:
    """1 if the normalised answer is one of the normalised truths, else 0."""
    if not truths:
        raise ValueError("an answer needs at least one truth")
    return float(normalise_answer(answer) in {normalise_answer(truth) for truth in truths})


def begins_with_answer(text: str, truths: Sequence[str]) -> float:
    """1 if the text begins with a truth, whole words and punctuation around them aside, else 0."""
    if not truths:
        raise ValueError("an answer needs at least one truth")
    words = [word.strip(string.punctuation) for word in text.split()]
    wanted = [truth.split() for truth in truths if truth.split()]
    return float(any(words[: len(each)] == each for each in wanted))


def trajectory_sensitivity(scores: Mapping[str, Sequence[float]]) -> float:
    """``S_traj``: variance of a score over seeds, averaged over prompts.

    Args:
        scores: Of each prompt, one score per seed.
    """
    if not scores:
        raise ValueError("S_traj needs at least one prompt")
    for prompt, values in scores.items():
        if not values:
            raise ValueError(f"prompt {prompt!r} has no score")
    return statistics.fmean(statistics.pvariance(values) for values in scores.values())


def length_drift(ours: Sequence[int], dense: Sequence[int]) -> float:
    """``Delta T``: mean absolute difference of output lengths."""
    if len(ours) != len(dense) or not ours:
        raise ValueError(f"{len(ours)} lengths against {len(dense)} of dense")
    return statistics.fmean(abs(a - b) for a, b in zip(ours, dense, strict=True))


def disagreement(ours: Sequence[object], dense: Sequence[object]) -> float:
    """``Disagree``: share of episodes whose trajectory differs from dense's."""
    if len(ours) != len(dense) or not ours:
        raise ValueError(f"{len(ours)} trajectories against {len(dense)} of dense")
    return sum(a != b for a, b in zip(ours, dense, strict=True)) / len(ours)


def failure_rate(failures: Sequence[Sequence[Failure]]) -> float:
    """``R_fail``: share of episodes with at least one failure."""
    if not failures:
        raise ValueError("R_fail needs at least one episode")
    return sum(bool(found) for found in failures) / len(failures)


def count_failures(failures: Sequence[Sequence[Failure]]) -> dict[str, int]:
    """Episodes with each category of failure."""
    return {name: sum(name in found for found in failures) for name in FAILURES}


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model said to one prompt.

    Attributes:
        text: The answer.
        token_ids: Its tokens.
        is_ended: Whether the model ended it, and not the limit.
        is_valid: Whether it has the structure the prompt asks for; True if it asks for none.
    """

    text: str
    token_ids: Sequence[int]
    is_ended: bool
    is_valid: bool = True


def reply_failures(
    ours: Reply, dense: Reply, *, structure: Failure = "structured output"
) -> list[Failure]:
    """What went wrong that did not with dense.

    Args:
        ours: The method's reply.
        dense: Dense's.
        structure: What it is called if the structure is lost.
    """
    is_cut_short = ours.is_ended and 2 * len(ours.token_ids) < len(dense.token_ids)
    checks: dict[Failure, bool] = {
        "refusal flip": is_refusal(ours.text) != is_refusal(dense.text),
        structure: dense.is_valid and not ours.is_valid,
        "derailment": is_looping(ours.token_ids) and not is_looping(dense.token_ids),
        "termination": dense.is_ended and (is_cut_short or not ours.is_ended),
    }
    return [name for name in FAILURES if checks.get(name, False)]


def is_refusal(text: str) -> bool:
    """Whether a reply declines, judged by its beginning."""
    start = text.lower().replace("\u2019", "'")[:120]
    return any(phrase in start for phrase in _REFUSALS)


def is_looping(token_ids: Sequence[int], *, period: int = 16, times: int = 4) -> bool:
    """Whether the end of a text repeats a piece of at most ``period`` tokens so many times."""
    for size in range(1, period + 1):
        tail = list(token_ids[-size * times :])
        if len(tail) == size * times and tail == tail[:size] * times:
            return True
    return False


def drift_summary(drifts: Sequence[float], *, bound: float) -> dict[str, float]:
    """Mean, quantiles and tail of absolute drifts.

    Args:
        drifts: Signed or absolute.
        bound: The tail is the share above this.
    """
    if not drifts:
        raise ValueError("there are no drifts to summarise")
    sizes = [abs(value) for value in drifts]
    return {
        "mean": statistics.fmean(sizes),
        "p50": quantile(sizes, 0.5),
        "p95": quantile(sizes, 0.95),
        "p99": quantile(sizes, 0.99),
        "max": max(sizes),
        "tail": sum(size > bound for size in sizes) / len(sizes),
    }
