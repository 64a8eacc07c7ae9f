# SPDX-License-Identifier: Apache-2.0
"""Prompts of a retention study: books, and questions whose evidence lies in the middle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sphkv.evaluation.retention.config import StudyConfig
from sphkv.evaluation.text import read_tokens
from sphkv.evaluation.workloads.qa import fit_prompt, read_questions
from sphkv.integrations.prompt_states import PromptStates, read_prompt
from sphkv.retention.protection import SegmentSpans, find_segments

_OFFSET = 40_000
_ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True, eq=False)
class StudyPrompt:
    """A prompt with its dense states.

    Attributes:
        name: Label in records.
        workload: ``"lm"`` or ``"qa"``.
        states: What the dense model computed, and the tokens it is compared on.
        segments: Retrieved passages.
    """

    name: str
    workload: str
    states: PromptStates
    segments: SegmentSpans


def lm_prompts(model: Any, tokenizer: Any, data: Path, config: StudyConfig) -> list[StudyPrompt]:
    """Stretches of books, followed by what the books say next; the last names come first.

    Weights and tiers were chosen on the first ones.
    """
    prompts = []
    books = sorted((data / "pg19").glob("*.txt"), reverse=True)[: config.num_texts]
    for book in books:
        ids = read_tokens(
            tokenizer, str(book), config.context + config.num_following, offset=_OFFSET
        )
        states = read_prompt(model, ids, num_following=config.num_following)
        prompts.append(StudyPrompt(book.stem, "lm", states, SegmentSpans()))
    return prompts


def qa_prompts(model: Any, tokenizer: Any, data: Path, config: StudyConfig) -> list[StudyPrompt]:
    """Questions over passages, followed by the dense model's own greedy answer."""
    prompts = []
    half = -(-config.num_questions // 2)
    questions = [
        question
        for pair in zip(
            read_questions(data, "hotpotqa", half),
            read_questions(data, "2wikimqa", half),
            strict=True,
        )
        for question in pair
    ][: config.num_questions]
    for question in questions:
        ids, _ = fit_prompt(tokenizer, question, "middle", context=config.context)
        prompt = torch.tensor([ids])
        with torch.no_grad():
            whole = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=_ANSWER_TOKENS,
                min_new_tokens=4,
                do_sample=False,
            )
        states = read_prompt(model, whole, num_following=whole.shape[1] - len(ids))
        prompts.append(
            StudyPrompt(question.question_id, "qa", states, passage_segments(tokenizer, ids))
        )
    return prompts


def passage_segments(tokenizer: Any, ids: list[int]) -> SegmentSpans:
    """Where the passages of a prompt lie, found by its separators."""
    marks = [tokenizer(text, add_special_tokens=False).input_ids for text in _PASSAGE_MARKS]
    turns = [tokenizer(text, add_special_tokens=False).input_ids for text in _TURN_MARKS]
    return find_segments(ids, passage_marks=marks, turn_marks=turns)


_PASSAGE_MARKS = ("Passage ", "Document ", "<document>")
_TURN_MARKS = ("Question:", "Use only the passages", "<|im_start|>", "<|im_end|>")
