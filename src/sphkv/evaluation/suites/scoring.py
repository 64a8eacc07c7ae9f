# SPDX-License-Identifier: Apache-2.0
"""Scores of answers as RULER, LongBench and GSM8K define them, each between 0 and 1."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from sphkv.evaluation.metrics.answers import best_f1
from sphkv.evaluation.suites.samples import Sample

_CONTROL = re.compile(r"[\x00-\x1f]")
_NUMBERS = re.compile(r"\d+")
_AMOUNT = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_SAID = re.compile(r"answer is:?\s*\$?(-?\d[\d,]*(?:\.\d+)?)", re.IGNORECASE)
_NOT_CODE = ("`", "#", "//")


def score_answer(sample: Sample, answer: str) -> float:
    """Score of an answer by the sample's own metric."""
    text = counted_text(sample, answer)
    metric, truths = sample.metric, sample.answers
    if metric == "all":
        return _share_found(text, truths)
    if metric == "part":
        return max(_share_found(text, (truth,)) for truth in truths)
    if metric == "f1":
        return best_f1(text, truths)
    if metric == "rouge_l":
        return max(rouge_l(text, truth) for truth in truths)
    if metric == "classification":
        return max(_class_score(text, truth, sample.classes) for truth in truths)
    if metric == "code":
        return max(_edit_similarity(text, truth) for truth in truths)
    if metric == "number":
        return float(any(_final_number(text) == _as_number(truth) for truth in truths))
    return max(_number_share(text, truth) for truth in truths)


def counted_text(sample: Sample, answer: str) -> str:
    """The part of an answer that is scored: up to a stop, the first line where only that counts."""
    for stop in sample.stops:
        answer = answer.split(stop, 1)[0]
    return answer.lstrip("\n").split("\n", 1)[0] if sample.is_first_line else answer


def is_settled(sample: Sample, answer: str) -> bool:
    """Whether nothing that may come after this beginning of an answer changes its score."""
    if any(stop in answer for stop in sample.stops):
        return True
    if sample.is_first_line and "\n" in answer.lstrip("\n"):
        return True
    if sample.metric == "all":
        return _share_found(answer, sample.answers) == 1.0
    if sample.metric == "part":
        return any(_share_found(answer, (truth,)) == 1.0 for truth in sample.answers)
    if sample.metric == "code":
        *whole, _ = answer.lstrip("\n").split("\n")
        return any(_is_code(line) for line in whole)
    return False


def _share_found(text: str, truths: Sequence[str]) -> float:
    """RULER's string match: the share of truths that stand in the text, whatever the case."""
    low = _CONTROL.sub("\n", text.strip()).lower()
    return sum(truth.lower() in low for truth in truths) / len(truths)


def rouge_l(answer: str, truth: str) -> float:
    """ROUGE-L of two summaries: sentences end at full stops, every word counts once.

    A word is common if it stands in a longest common subsequence of any two sentences.
    """
    ours, theirs = _sentences(answer), _sentences(truth)
    ours_words = {word for sentence in ours for word in sentence}
    their_words = {word for sentence in theirs for word in sentence}
    common: set[str] = set()
    for sentence in theirs:
        for other in ours:
            common |= _common_words(sentence, other)
    if not common:
        return 0.0
    precision, recall = len(common) / len(ours_words), len(common) / len(their_words)
    return 2 * precision * recall / (precision + recall)


def _sentences(text: str) -> list[list[str]]:
    return [words for part in text.split(".") if (words := part.split())]


def _common_words(first: Sequence[str], second: Sequence[str]) -> set[str]:
    """Words of one longest common subsequence."""
    rows, columns = len(first), len(second)
    longest = [[0] * (columns + 1) for _ in range(rows + 1)]
    for i in range(rows):
        for j in range(columns):
            same = first[i] == second[j]
            longest[i + 1][j + 1] = (
                longest[i][j] + 1 if same else max(longest[i][j + 1], longest[i + 1][j])
            )
    found: set[str] = set()
    i, j = rows, columns
    while i and j:
        if first[i - 1] == second[j - 1]:
            found.add(first[i - 1])
            i, j = i - 1, j - 1
        elif longest[i - 1][j] > longest[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def _class_score(text: str, truth: str, classes: Sequence[str]) -> float:
    """One over the number of classes that are named, if the right one is among them."""
    named = [name for name in classes if name in text and (name == truth or name not in truth)]
    return 1.0 / len(named) if truth in named else 0.0


def _number_share(text: str, truth: str) -> float:
    """Share of the numbers in an answer that are the truth's."""
    wanted = _NUMBERS.findall(truth)
    if not wanted:
        raise ValueError(f"the answer {truth!r} holds no number")
    numbers = _NUMBERS.findall(text)
    return sum(number == wanted[0] for number in numbers) / len(numbers) if numbers else 0.0


def _is_code(line: str) -> bool:
    return not any(mark in line for mark in _NOT_CODE)


def _edit_similarity(text: str, truth: str) -> float:
    """Likeness of the first line that is no comment, in whole per cent as LongBench has it."""
    lines = (line for line in text.lstrip("\n").split("\n") if _is_code(line))
    line = next(lines, "")
    return round(100 * difflib.SequenceMatcher(None, line, truth).ratio()) / 100


def _final_number(text: str) -> float | None:
    """What an answer says it is, or the last number in it."""
    said = _SAID.findall(text) or _AMOUNT.findall(text)
    return _as_number(said[-1]) if said else None


def _as_number(text: str) -> float:
    return float(text.replace(",", "").replace("$", ""))
