# SPDX-License-Identifier: Apache-2.0
"""W2: questions over many passages, of which a few hold the answer.

A prompt is instructions, passages under separators, and the question. It is fitted to a context by
leaving out whole distractors; supporting passages are never cut.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sphkv.errors import SplitError
from sphkv.evaluation.metrics.answers import best_f1
from sphkv.evaluation.splits import load_manifest
from sphkv.evaluation.workloads.case import Case
from sphkv.evaluation.workloads.filler import made_up_text
from sphkv.evaluation.workloads.hub import refuse_hub
from sphkv.evaluation.workloads.qa_prompt import (
    ANSWER_POSITIONS,
    AnswerPosition,
    Question,
    format_prompt,
    order_passages,
)

DATASETS = ("hotpotqa", "2wikimqa")
_MOST_CANDIDATES = 30


def read_questions(data: Path, dataset: str, limit: int) -> list[Question]:
    """The first questions of ``longbench/<dataset>.jsonl``, each with distractors of the pool.

    A pool passage that holds an answer is left out for that question.
    """
    refuse_hub(data, "questions")
    if dataset not in DATASETS:
        raise ValueError(f"dataset must be one of {', '.join(DATASETS)}, got {dataset!r}")
    pool = [
        (record["title"], record["text"])
        for record in _read_lines(data / "longbench" / f"{dataset}_distractors.jsonl")
    ]
    questions = []
    for number, record in enumerate(_read_lines(data / "longbench" / f"{dataset}.jsonl")):
        if number == limit:
            break
        passages = record["paragraphs"]
        answers = tuple(record["answers"])
        own = [(p["title"], p["text"]) for p in passages if not p["supporting"]]
        draw = random.Random(f"distractors {dataset} {number}")
        others = [
            passage
            for passage in draw.sample(pool, min(len(pool), 120))
            if not any(answer.lower() in passage[1].lower() for answer in answers)
        ]
        questions.append(
            Question(
                question_id=f"{dataset}-{number}",
                text=record["input"],
                answers=answers,
                supporting=tuple((p["title"], p["text"]) for p in passages if p["supporting"]),
                distractors=(*own, *others),
            )
        )
    return questions


def _read_lines(file: Path) -> Iterator[dict[str, Any]]:
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}; the data folder must hold longbench/*.jsonl")
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


_TOWNS = ("Ostrava Bay", "Merrow", "Tansy Cross", "Willowfen", "Northgate", "Saltley")
_BUILDERS = ("Edda Lorne", "Ruben Ash", "Cora Finch", "Milo Drake", "Hester Vane", "Ivo Quill")
_WORKS = ("the Harp Bridge", "the Glass Mill", "the Moon Tower", "the Reed Hall", "the Iron Stair")


def made_up_questions(limit: int) -> list[Question]:
    """Two-hop questions about invented buildings, for runs without data."""
    questions = []
    for number in range(limit):
        draw = random.Random(f"questions {number}")
        work, (builder, other) = draw.choice(_WORKS), draw.sample(_BUILDERS, 2)
        town, elsewhere = draw.sample(_TOWNS, 2)
        supporting = (
            (work, f"{work[0].upper()}{work[1:]} was built by {builder} in {1700 + number}."),
            (builder, f"{builder} was an engineer who was born in {town}."),
        )
        text = made_up_text(60_000, seed=1000 + number).split("\n\n")
        distractors = [(other, f"{other} was a painter who was born in {elsewhere}.")]
        distractors += [(f"Chronicle, part {part}", passage) for part, passage in enumerate(text)]
        questions.append(
            Question(
                question_id=f"made-up-{number}",
                text=f"In which town was the builder of {work} born?",
                answers=(town,),
                supporting=supporting,
                distractors=tuple(distractors),
            )
        )
    return questions


def fit_prompt(
    tokenizer: Any,
    question: Question,
    position: AnswerPosition,
    *,
    context: int,
    num_distractors: int | None = None,
) -> tuple[list[int], int]:
    """Token ids of a prompt of at most ``context`` tokens and the distractors it holds.

    Raises:
        ValueError: Not even the supporting passages fit, or fewer distractors than asked for.
    """
    most = len(question.distractors) if num_distractors is None else num_distractors
    low, high = -1, min(most, len(question.distractors))
    best: list[int] = []
    while low < high:
        middle = (low + high + 1) // 2
        prompt = format_prompt(question, order_passages(question, middle, position))
        ids = tokenizer(prompt).input_ids
        if len(ids) <= context:
            low, best = middle, ids
        else:
            high = middle - 1
    if low < 0:
        raise ValueError(f"question {question.question_id!r} does not fit into {context} tokens")
    if num_distractors is not None and low < num_distractors:
        raise ValueError(
            f"{num_distractors} distractors do not fit into {context} tokens with question "
            f"{question.question_id!r}; {low} do"
        )
    return best, low


def _check_development(most: int) -> None:
    """Refuse questions of the test split to who did not open it."""
    stop = load_manifest().questions["development"][1]
    if most > stop:
        raise SplitError(
            f"question {most - 1} belongs to the test split; development ends at {stop}"
        )


def choose_questions(
    data: Path | None,
    datasets: tuple[str, ...],
    count: int,
    question_ids: tuple[str, ...],
    *,
    is_test: bool = False,
) -> list[Question]:
    """The named questions, or the first ones of each dataset in turn.

    Args:
        data: Data folder; None makes questions up.
        datasets: Names of ``DATASETS``.
        count: Over all datasets.
        question_ids: These questions instead.
        is_test: Whether the test split was opened for them.

    Raises:
        SplitError: A question of the test split is among them, which was not opened.
    """
    if question_ids:
        wanted = [name.rpartition("-") for name in question_ids]
        most = 1 + max(int(number) for _, _, number in wanted)
        if data is not None and not is_test:
            _check_development(most)
        names = sorted({dataset for dataset, _, _ in wanted})
        found = made_up_questions(most) if data is None else []
        if data is not None:
            found = [q for name in names for q in read_questions(data, name, most)]
        by_id = {question.question_id: question for question in found}
        missing = [name for name in question_ids if name not in by_id]
        if missing:
            raise ValueError(f"there is no question {missing[0]!r}")
        return [by_id[name] for name in question_ids]
    if data is None:
        return made_up_questions(count)
    each = -(-count // len(datasets))
    _check_development(each)
    pools = [read_questions(data, dataset, each) for dataset in datasets]
    return [pools[index % len(pools)][index // len(pools)] for index in range(count)]


def answerable_questions(
    tokenizer: Any,
    answer: Callable[[tuple[int, ...], int], str],
    *,
    data: Path | None,
    datasets: tuple[str, ...],
    count: int,
    least_f1: float,
    max_new_tokens: int,
) -> tuple[str, ...]:
    """The first questions that the dense model answers from their supporting passages alone.

    What a model cannot answer with the evidence before its eyes shows nothing about a cache.

    Args:
        tokenizer: Of the model.
        answer: From a prompt and a number of tokens to the dense model's answer.
        data: Data folder; None makes questions up.
        datasets: Names of ``DATASETS``, taken in turn.
        count: Most questions; fewer if the model answers fewer.
        least_f1: F1 from which an answer counts.
        max_new_tokens: Most tokens of an answer.

    Raises:
        ValueError: There is none.
    """
    num_pools = 1 if data is None else len(datasets)
    candidates = choose_questions(data, datasets, num_pools * _MOST_CANDIDATES, ())
    found = []
    for question in candidates:
        prompt = format_prompt(question, order_passages(question, 0, "early"))
        said = answer(tuple(tokenizer(prompt).input_ids), max_new_tokens)
        if best_f1(said.strip().split("\n")[0], question.answers) >= least_f1:
            found.append(question.question_id)
        if len(found) == count:
            break
    if not found:
        raise ValueError(f"the model answers none of {len(candidates)} questions")
    return tuple(found)


def qa_cases(
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    context: int,
    num_distractors: int | None = None,
    max_new_tokens: int = 32,
    split: str = "",
) -> list[Case]:
    """Questions over passages, answer positions in turn.

    Args:
        tokenizer: Of the model.
        questions: As ``choose_questions`` gives them.
        context: Most tokens of a prompt.
        num_distractors: Exactly so many; None fills the context.
        max_new_tokens: Most tokens of an answer.
        split: Split of the questions, for the record.
    """
    cases = []
    for index, question in enumerate(questions):
        position = ANSWER_POSITIONS[index % len(ANSWER_POSITIONS)]
        ids, used = fit_prompt(
            tokenizer, question, position, context=context, num_distractors=num_distractors
        )
        name = f"qa-{context}-{question.question_id}-{position}"
        if num_distractors is not None:
            name += f"-d{num_distractors}"
        cases.append(
            Case(
                case_id=name,
                workload="qa",
                group=name,
                prompt_ids=tuple(ids),
                answers=question.answers,
                max_new_tokens=max_new_tokens,
                facets={"position": position, "num_distractors": used},
                split=split,
            )
        )
    return cases
