# SPDX-License-Identifier: Apache-2.0
"""Prompts of a retention study: books, and questions whose evidence lies among many passages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sphkv.evaluation.harness.states import PromptStates
from sphkv.evaluation.retention.config import StudyConfig
from sphkv.evaluation.runner.session import Session
from sphkv.evaluation.workloads.lm import lm_cases
from sphkv.evaluation.workloads.qa import DATASETS, choose_questions, qa_cases
from sphkv.retention.protection import SegmentSpans, find_segments

_ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True, eq=False)
class StudyPrompt:
    """A prompt with its dense states.

    Attributes:
        name: Label in records.
        workload: ``"lm"`` or ``"qa"``.
        states: What the dense model computed.
        following: ``[1, tokens]`` that are fed after it: of the book, or the dense model's answer.
        reference: ``[tokens, width]`` hidden states of the dense model after each of them.
        segments: Retrieved passages.
    """

    name: str
    workload: str
    states: PromptStates
    following: Tensor
    reference: Tensor
    segments: SegmentSpans


def lm_prompts(session: Session, config: StudyConfig) -> list[StudyPrompt]:
    """Stretches of books, followed by what the books say next."""
    cases = lm_cases(
        session.tokenizer,
        data=Path(config.data),
        context=config.context,
        num_following=config.num_following,
        num_prompts=config.num_texts,
    )
    prompts = []
    for case in cases:
        read = session.reader.read(case)
        following = read.states.following
        prompts.append(
            StudyPrompt(case.case_id, "lm", read.states, following, read.reference, SegmentSpans())
        )
    return prompts


def qa_prompts(session: Session, config: StudyConfig) -> list[StudyPrompt]:
    """Questions over passages, followed by the dense model's own greedy answer.

    A question to which the dense model says nothing is left out.
    """
    if config.num_questions == 0:
        return []
    cases = qa_cases(
        session.tokenizer,
        choose_questions(Path(config.data), DATASETS, config.num_questions, ()),
        context=config.context,
        max_new_tokens=_ANSWER_TOKENS,
    )
    prompts = []
    for case in cases:
        read = session.reader.read(case)
        if not read.answer_ids:
            continue
        following = read.states.input_ids.new_tensor([read.answer_ids])
        segments = passage_segments(session.tokenizer, list(case.prompt_ids))
        prompts.append(
            StudyPrompt(case.case_id, "qa", read.states, following, read.reference[1:], segments)
        )
    return prompts


def passage_segments(tokenizer: Any, ids: list[int]) -> SegmentSpans:
    """Where the passages of a prompt lie, found by its separators."""
    marks = [tokenizer(text, add_special_tokens=False).input_ids for text in _PASSAGE_MARKS]
    turns = [tokenizer(text, add_special_tokens=False).input_ids for text in _TURN_MARKS]
    return find_segments(ids, passage_marks=marks, turn_marks=turns)


_PASSAGE_MARKS = ("Passage ", "Document ", "<document>")
_TURN_MARKS = ("Question:", "Use only the passages", "<|im_start|>", "<|im_end|>")
