# SPDX-License-Identifier: Apache-2.0
"""Scores of short answers: token F1 and exact match, as LongBench defines them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


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
    """1 if the text's first word, stripped of punctuation, is a truth, else 0."""
    if not truths:
        raise ValueError("an answer needs at least one truth")
    words = text.split()
    first = words[0].strip(string.punctuation) if words else ""
    return float(first in truths)
