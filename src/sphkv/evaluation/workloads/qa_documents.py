# SPDX-License-Identifier: Apache-2.0
"""Several questions over one document: it is read once, and each is asked after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sphkv.evaluation.workloads.case import Case
from sphkv.evaluation.workloads.qa_prompt import (
    ANSWER_POSITIONS,
    Passage,
    Question,
    format_passages,
    format_question,
)


def common_distractors(questions: Sequence[Question]) -> list[Passage]:
    """Distractors of all questions in turn; none supports a question or holds an answer."""
    answers = [answer.lower() for question in questions for answer in question.answers]
    seen = {passage for question in questions for passage in question.supporting}
    found: list[Passage] = []
    for rank in range(max(len(question.distractors) for question in questions)):
        for question in questions:
            if rank >= len(question.distractors):
                continue
            passage = question.distractors[rank]
            if passage in seen or any(answer in passage[1].lower() for answer in answers):
                continue
            seen.add(passage)
            found.append(passage)
    return found


def spread_passages(questions: Sequence[Question], distractors: Sequence[Passage]) -> list[Passage]:
    """Passages in prompt order, the evidence of the questions spread from first to last."""
    parts: list[Passage] = []
    at = 0
    for index, question in enumerate(questions):
        stop = round(len(distractors) * index / max(1, len(questions) - 1))
        parts += [*distractors[at:stop], *question.supporting]
        at = stop
    return [*parts, *distractors[at:]]


def document_cases(
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    name: str,
    context: int,
    num_distractors: int | None,
    max_new_tokens: int,
) -> list[Case]:
    """One case per question of a document that holds the evidence of all.

    Args:
        tokenizer: Of the model.
        questions: At least one.
        name: Of the document.
        context: Most tokens of a prompt.
        num_distractors: Exactly so many; None fills the context.
        max_new_tokens: Most tokens of an answer.

    Raises:
        ValueError: Not even the evidence fits, or fewer distractors than asked for.
    """
    ends = [
        tokenizer(format_question(question), add_special_tokens=False).input_ids
        for question in questions
    ]
    pool = common_distractors(questions)
    if num_distractors is not None and num_distractors > len(pool):
        raise ValueError(f"{name} has {len(pool)} distractors, not {num_distractors}")
    room = context - max(len(ids) for ids in ends)
    low, high = -1, len(pool) if num_distractors is None else num_distractors
    document: list[int] = []
    while low < high:
        middle = (low + high + 1) // 2
        ids = tokenizer(format_passages(spread_passages(questions, pool[:middle]))).input_ids
        if len(ids) <= room:
            low, document = middle, ids
        else:
            high = middle - 1
    if low < (num_distractors or 0):
        raise ValueError(
            f"{name} does not fit into {context} tokens with {num_distractors or 0} distractors"
        )
    cases = []
    for index, (question, end) in enumerate(zip(questions, ends, strict=True)):
        position = ANSWER_POSITIONS[index * len(ANSWER_POSITIONS) // len(questions)]
        cases.append(
            Case(
                case_id=f"{name}-{question.question_id}-{position}",
                workload="qa",
                group=name,
                prompt_ids=(*document, *end),
                num_shared=len(document),
                answers=question.answers,
                max_new_tokens=max_new_tokens,
                facets={"position": position, "num_distractors": low},
            )
        )
    return cases


def shared_cases(
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    per_document: int,
    context: int,
    num_distractors: int | None,
    max_new_tokens: int,
) -> list[Case]:
    """Questions in documents of ``per_document`` each; the others as ``document_cases``."""
    cases: list[Case] = []
    count = num_distractors
    for number, at in enumerate(range(0, len(questions), per_document)):
        cases += document_cases(
            tokenizer,
            questions[at : at + per_document],
            name=f"qa-{context}-{number}" + ("" if count is None else f"-d{count}"),
            context=context,
            num_distractors=count,
            max_new_tokens=max_new_tokens,
        )
    return cases
