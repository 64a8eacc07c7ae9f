# SPDX-License-Identifier: Apache-2.0
"""A question with its passages, and how both are written into a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

AnswerPosition = Literal["early", "middle", "late"]
ANSWER_POSITIONS: tuple[AnswerPosition, ...] = ("early", "middle", "late")
Passage = tuple[str, str]
"""Title and text."""

_BEFORE = (
    "Read the passages below and answer the question that follows them. Reply with the answer "
    "alone, in a few words.\n\n"
)
_AFTER = "\n\nUse only the passages above.\n\nQuestion: {question}\nAnswer:"


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its passages.

    Attributes:
        question_id: Unique within its dataset.
        text: The question.
        answers: Any of these is right.
        supporting: Passages that are needed, as (title, text).
        distractors: Passages that are not, nearest in topic first.
    """

    question_id: str
    text: str
    answers: tuple[str, ...]
    supporting: tuple[Passage, ...]
    distractors: tuple[Passage, ...]


def order_passages(
    question: Question, num_distractors: int, position: AnswerPosition
) -> list[Passage]:
    """Passages in prompt order, the supporting ones together at an early, middle or late place."""
    if position not in ANSWER_POSITIONS:
        raise ValueError(f"position must be one of {', '.join(ANSWER_POSITIONS)}, got {position!r}")
    kept = list(question.distractors[:num_distractors])
    at = {"early": 0, "middle": len(kept) // 2, "late": len(kept)}[position]
    return [*kept[:at], *question.supporting, *kept[at:]]


def format_passages(passages: Sequence[Passage]) -> str:
    """Instructions and numbered passages."""
    return _BEFORE + "\n\n".join(
        f"Passage {number}: {title}\n{text}" for number, (title, text) in enumerate(passages, 1)
    )


def format_question(question: Question) -> str:
    """What comes after the passages."""
    return _AFTER.format(question=question.text)


def format_prompt(question: Question, passages: Sequence[Passage]) -> str:
    """Instructions, numbered passages, question."""
    return format_passages(passages) + format_question(question)
