# SPDX-License-Identifier: Apache-2.0
"""W2: questions over many passages, of which a few hold the answer.

A prompt is instructions, passages under separators, and the question. It is fitted to a context by
leaving out whole distractors; supporting passages are never cut. Where several questions share a
document, it is read once and each is asked after it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sphkv.errors import SplitError
from sphkv.evaluation.metrics.answers import best_f1
from sphkv.evaluation.splits import load_manifest
from sphkv.evaluation.workloads.case import Case
from sphkv.evaluation.workloads.texts import made_up_text, refuse_hub
from sphkv.retention.protection import SegmentSpans, find_segments

AnswerPosition = Literal["early", "middle", "late"]
ANSWER_POSITIONS: tuple[AnswerPosition, ...] = ("early", "middle", "late")
Passage = tuple[str, str]
"""Title and text."""

_BEFORE = (
    "Read the passages below and answer the question that follows them. Reply with the answer "
    "alone, in a few words.\n\n"
)
_AFTER = "\n\nUse only the passages above.\n\nQuestion: {question}\nAnswer:"

DATASETS = ("hotpotqa", "2wikimqa")
MOST_CANDIDATES = 30
"""Questions of a dataset that are tried at most for one that dense can answer."""

_PASSAGE_MARKS = ("Passage ", "Document ", "<document>")
_TURN_MARKS = ("Question:", "Use only the passages", "<|im_start|>", "<|im_end|>")


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
    candidates: Sequence[Question],
    count: int,
    least_f1: float,
    max_new_tokens: int,
) -> tuple[str, ...]:
    """The first questions that the dense model answers from their supporting passages alone.

    What a model cannot answer with the evidence before its eyes shows nothing about a cache.

    Args:
        tokenizer: Of the model.
        answer: From a prompt and a number of tokens to the dense model's answer.
        candidates: Questions to try, in order.
        count: Most questions; fewer if the model answers fewer.
        least_f1: F1 from which an answer counts.
        max_new_tokens: Most tokens of an answer.

    Raises:
        ValueError: There is none.
    """
    found: list[str] = []
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


def passage_segments(tokenizer: Any, ids: Sequence[int]) -> SegmentSpans:
    """Where the passages of a prompt lie, found by its separators."""
    marks = [tokenizer(text, add_special_tokens=False).input_ids for text in _PASSAGE_MARKS]
    turns = [tokenizer(text, add_special_tokens=False).input_ids for text in _TURN_MARKS]
    return find_segments(ids, passage_marks=marks, turn_marks=turns)


def qa_cases(
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    context: int,
    num_distractors: int | None = None,
    max_new_tokens: int = 32,
    split: str = "",
    every_position: bool = False,
    clutter: Sequence[int] = (),
) -> list[Case]:
    """Questions over passages, answer positions in turn.

    Args:
        tokenizer: Of the model.
        questions: As ``choose_questions`` gives them.
        context: Most tokens of a prompt.
        num_distractors: Exactly so many; None fills the context.
        max_new_tokens: Most tokens of an answer.
        split: Split of the questions, for the record.
        every_position: Whether each question is asked with its evidence at every place.
        clutter: Token ids of another text in front of every prompt; part of ``context``.
    """
    cases = []
    for index, question in enumerate(questions):
        turn = ANSWER_POSITIONS[index % len(ANSWER_POSITIONS)]
        for position in ANSWER_POSITIONS if every_position else (turn,):
            ids, used = fit_prompt(
                tokenizer,
                question,
                position,
                context=context - len(clutter),
                num_distractors=num_distractors,
            )
            name = f"qa-{context}-{question.question_id}-{position}"
            name += "" if num_distractors is None else f"-d{num_distractors}"
            name += f"-c{len(clutter)}" if clutter else ""
            ids = [*clutter, *ids]
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
                    retrieved=passage_segments(tokenizer, ids).retrieved,
                )
            )
    return cases


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
                retrieved=passage_segments(tokenizer, (*document, *end)).retrieved,
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
