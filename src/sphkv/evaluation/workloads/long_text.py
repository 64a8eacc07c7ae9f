# SPDX-License-Identifier: Apache-2.0
"""Workloads over plain text: W1, language modelling on long books, strided; and needles.

Needles are pass keys and sentences hidden at chosen depths of a long text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sphkv.evaluation.workloads.case import Case
from sphkv.evaluation.workloads.texts import (
    filler_name,
    filler_split,
    filler_text,
    num_fillers,
)

# more than any tokenizer packs into a token on average
_MOST_CHARACTERS = 8

_CITIES = (
    "Valmora", "Brindle", "Castrel", "Dunhaven", "Elsmere", "Farrow", "Gildern", "Harwick",
    "Ilmenau", "Jarrow", "Kestrel", "Lorn",
)  # fmt: skip
_PASSKEY = "The pass key is {number}. Remember it. {number} is the pass key."
_NEEDLE = "One of the special magic numbers for {city} is: {number}."
_PASSKEY_QUESTION = "\n\nWhat is the pass key? The pass key is"
_NEEDLE_QUESTION = (
    "\n\nWhat is the special magic number for {city} mentioned in the text? "
    "The special magic number for {city} mentioned in the text is:"
)


def lm_cases(
    tokenizer: Any,
    *,
    data: Path | None,
    context: int,
    num_following: int,
    num_prompts: int,
    stride: int = 0,
) -> list[Case]:
    """Prompts of ``context`` tokens and what follows them, one text after another.

    When there are more prompts than books, the next round begins ``stride`` tokens later in each
    book; causality holds because a prompt is only what comes before the tokens it predicts.

    Args:
        tokenizer: Of the model.
        data: Folder with ``pg19/*.txt``; None makes texts up.
        context: Tokens of a prompt.
        num_following: Tokens to predict after it.
        num_prompts: How many prompts.
        stride: Tokens between the prompts of one text; ``num_following`` if 0.
    """
    if num_following < 2:
        raise ValueError(f"num_following must be at least 2, got {num_following}")
    from_text = num_fillers(data) if data is not None else num_prompts
    cases = []
    for index in range(num_prompts):
        book, round_ = index % from_text, index // from_text
        skip = round_ * (stride or num_following)
        needed = skip + context + num_following
        text = filler_text(data, book, num_characters=_MOST_CHARACTERS * needed)
        ids = tokenizer(text).input_ids[skip : skip + context + num_following]
        if len(ids) < context + num_following:
            raise ValueError(
                f"text {filler_name(data, book)!r} gave {len(ids)} tokens after {skip}, "
                f"not {context + num_following}"
            )
        name = f"lm-{context}-{filler_name(data, book)}-{skip}"
        cases.append(
            Case(
                case_id=name,
                workload="lm",
                group=name,
                prompt_ids=tuple(ids[:context]),
                following_ids=tuple(ids[context:]),
                facets={"text": filler_name(data, book), "skip": skip},
                split=filler_split(data),
            )
        )
    return cases


@dataclass(frozen=True, slots=True)
class Needle:
    """A hidden sentence.

    Attributes:
        sentence: As it stands in the text.
        question: What is appended to the text; the model continues it.
        answer: What the continuation must begin with.
        depth: Share of the text before it, 0 to 1.
    """

    sentence: str
    question: str
    answer: str
    depth: float


def make_needles(depths: tuple[float, ...], seed: int) -> list[Needle]:
    """One needle per depth; a single one is the pass key."""
    for depth in depths:
        if not 0.0 <= depth <= 1.0:
            raise ValueError(f"depth must lie between 0 and 1, got {depth}")
    if not 1 <= len(depths) <= len(_CITIES):
        raise ValueError(f"there are needles for 1 to {len(_CITIES)} depths, got {len(depths)}")
    draw = random.Random(f"needles {seed}")
    cities = draw.sample(_CITIES, len(depths))
    needles = []
    for city, depth in zip(cities, depths, strict=True):
        number = str(draw.randint(10_000, 99_999))
        if len(depths) == 1:
            sentence, question = _PASSKEY.format(number=number), _PASSKEY_QUESTION
        else:
            sentence = _NEEDLE.format(city=city, number=number)
            question = _NEEDLE_QUESTION.format(city=city)
        needles.append(Needle(sentence, question, number, depth))
    return needles


def hide_needles(paragraphs: list[str], needles: list[Needle]) -> str:
    """The text with each needle as a paragraph of its own at its depth."""
    sizes = [len(paragraph) for paragraph in paragraphs]
    total = sum(sizes)
    parts: list[str] = []
    waiting = sorted(needles, key=lambda needle: needle.depth)
    seen = 0
    for paragraph, size in zip(paragraphs, sizes, strict=True):
        while waiting and seen >= waiting[0].depth * total:
            parts.append(waiting.pop(0).sentence)
        parts.append(paragraph)
        seen += size
    parts.extend(needle.sentence for needle in waiting)
    return "\n\n".join(parts)


def needle_cases(
    tokenizer: Any,
    *,
    data: Path | None,
    context: int,
    depths: tuple[float, ...],
    num_documents: int,
    seed: int,
    max_new_tokens: int = 8,
) -> list[Case]:
    """One case per document and needle; those of a document share its tokens.

    Args:
        tokenizer: Of the model.
        data: Folder with ``pg19/*.txt``; None makes texts up.
        context: Most tokens of a prompt, question included.
        depths: Depth of each needle.
        num_documents: How many documents.
        seed: Draws cities and numbers.
        max_new_tokens: Most tokens of an answer.
    """
    cases = []
    for index in range(num_documents):
        needles = make_needles(depths, seed + index)
        questions = [tokenizer(n.question, add_special_tokens=False).input_ids for n in needles]
        room = context - max(len(ids) for ids in questions)
        document = _document(tokenizer, data, index, needles, room)
        name = f"needle-{context}-{filler_name(data, index)}-{seed + index}"
        for needle, question in zip(needles, questions, strict=True):
            cases.append(
                Case(
                    case_id=f"{name}-{needle.depth:g}",
                    workload="needle",
                    group=name,
                    prompt_ids=(*document, *question),
                    num_shared=len(document),
                    answers=(needle.answer,),
                    max_new_tokens=max_new_tokens,
                    facets={"depth": needle.depth, "num_needles": len(needles)},
                    split=filler_split(data),
                )
            )
    return cases


def _document(
    tokenizer: Any, data: Path | None, index: int, needles: list[Needle], room: int
) -> list[int]:
    """Whole paragraphs, as many as fit with the needles."""
    if room < 64:
        raise ValueError(f"a context must leave at least 64 tokens for the text, got {room}")
    text = filler_text(data, index, num_characters=8 * room, skip=0 if data is None else 3000)
    paragraphs = [part for part in text.split("\n\n") if part.strip()]
    low, high = 0, len(paragraphs)
    best: list[int] = tokenizer(hide_needles([], needles)).input_ids
    while low < high:
        middle = (low + high + 1) // 2
        ids = tokenizer(hide_needles(paragraphs[:middle], needles)).input_ids
        if len(ids) <= room:
            low, best = middle, ids
        else:
            high = middle - 1
    if low == 0:
        raise ValueError(f"{len(needles)} needles and a paragraph do not fit into {room} tokens")
    return best
