# SPDX-License-Identifier: Apache-2.0
"""What a sweep measures: workloads, methods and budgets, read from a TOML file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sphkv.core.budget import ByteBudget
from sphkv.core.configs import check_name
from sphkv.evaluation.harness.decode import FOLLOWING_TOKENS
from sphkv.evaluation.runner.continuation import DecodeWindow
from sphkv.evaluation.runner.methods import DENSE, check_method
from sphkv.evaluation.splits import Split, open_split
from sphkv.evaluation.workloads.case import Case, check_context
from sphkv.evaluation.workloads.qa import (
    DATASETS,
    MOST_CANDIDATES,
    Question,
    answerable_questions,
    choose_questions,
    qa_cases,
    shared_cases,
)
from sphkv.evaluation.workloads.texts import filler_text, lm_cases, needle_cases
from sphkv.evaluation.workloads.tools import ToolSource, tool_cases

DENSE_BUDGET = "100%"
_MOST_ANSWER = 32
# Characters of a book before its clutter: title pages say little.
_CLUTTER_SKIP = 20_000

AnswerPrompt = Callable[[tuple[int, ...], int], str]
"""From a prompt and a number of tokens to the dense model's answer."""


def _clutter(tokenizer: Any, split: Split | None, count: int) -> list[int]:
    """So many tokens of a split's first book, or of made-up text; no task needs them."""
    if count == 0:
        return []
    if split is None:
        text = filler_text(None, 0, num_characters=8 * count)
    else:
        text = split.text(split.books[0])[_CLUTTER_SKIP:][: 8 * count]
    ids: list[int] = tokenizer(text).input_ids
    return ids[:count]


def _check_positive(workload: object, *names: str) -> None:
    for name in names:
        value = getattr(workload, name)
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")


@dataclass(frozen=True, slots=True)
class LMWorkload:
    """W1: prompts of books and the tokens after them.

    Attributes:
        context: Tokens of a prompt.
        num_following: Tokens to predict.
        num_prompts: How many prompts.
        stride: Tokens between prompts of one book; 0 for ``num_following``.
    """

    context: int
    num_following: int = FOLLOWING_TOKENS
    num_prompts: int = 1
    stride: int = 0

    def __post_init__(self) -> None:
        """Reject a workload without prompts or anything to predict."""
        _check_positive(self, "context", "num_following", "num_prompts")

    def cases(
        self, tokenizer: Any, data: Path | None, *, seed: int, limit: int | None
    ) -> list[Case]:
        """Its prompts; texts do not depend on the seed."""
        check_context(self.context, limit, extra=self.num_following)
        return lm_cases(
            tokenizer,
            data=data,
            context=self.context,
            num_following=self.num_following,
            num_prompts=self.num_prompts,
            stride=self.stride,
        )


@dataclass(frozen=True, slots=True)
class QAWorkload:
    """W2: questions over many passages.

    Attributes:
        context: Most tokens of a prompt.
        num_questions: How many questions, over all datasets.
        datasets: Which datasets.
        question_ids: These questions instead of the first ones, such as ``hotpotqa-3``.
        per_document: Questions that share a document, which is then read only once.
        num_distractors: Exactly so many in each prompt; None fills the context.
        max_new_tokens: Most tokens of an answer.
        answerable_f1: Take only questions that dense answers at least so well from the supporting
            passages alone; 0 takes all.
        every_position: Whether each question is asked with its evidence at every place.
        clutter: Tokens of a book of the split in front of the prompt, which no question needs.
        split: ``development`` or ``test``.
        purpose: What the data is for; must be the split's name.
        log: File that counts uses of test data.
    """

    context: int
    num_questions: int = 6
    datasets: tuple[str, ...] = DATASETS
    question_ids: tuple[str, ...] = ()
    per_document: int = 1
    num_distractors: int | None = None
    max_new_tokens: int = 24
    answerable_f1: float = 0.0
    every_position: bool = False
    clutter: int = 0
    split: str = "development"
    purpose: str = "development"
    log: Path | None = None

    def __post_init__(self) -> None:
        """Reject a workload without questions or answers."""
        _check_positive(self, "context", "num_questions", "per_document", "max_new_tokens")
        if not 0 <= self.clutter < self.context:
            raise ValueError(f"clutter must be in 0..{self.context - 1}, got {self.clutter}")
        if self.num_distractors is not None and self.num_distractors < 0:
            raise ValueError(f"num_distractors must not be negative, got {self.num_distractors}")

    def chosen(self, tokenizer: Any, data: Path | None, answer: AnswerPrompt) -> QAWorkload:
        """The same with its questions named, if they depend on what dense can answer."""
        if self.answerable_f1 <= 0.0 or self.question_ids:
            return self
        names = answerable_questions(
            tokenizer,
            answer,
            candidates=self._questions(data, MOST_CANDIDATES * len(self.datasets)),
            count=self.num_questions,
            least_f1=self.answerable_f1,
            max_new_tokens=self.max_new_tokens,
        )
        return replace(self, question_ids=names)

    def cases(
        self, tokenizer: Any, data: Path | None, *, seed: int, limit: int | None
    ) -> list[Case]:
        """Its prompts; questions do not depend on the seed."""
        check_context(self.context, limit, extra=self.max_new_tokens)
        chosen = self._questions(data, self.num_questions)
        if self.per_document > 1:
            return shared_cases(
                tokenizer,
                chosen,
                per_document=self.per_document,
                context=self.context,
                num_distractors=self.num_distractors,
                max_new_tokens=self.max_new_tokens,
            )
        return qa_cases(
            tokenizer,
            chosen,
            context=self.context,
            num_distractors=self.num_distractors,
            max_new_tokens=self.max_new_tokens,
            split="" if data is None else self.split,
            every_position=self.every_position,
            clutter=_clutter(tokenizer, self._book_split(data), self.clutter),
        )

    def _questions(self, data: Path | None, count: int) -> list[Question]:
        """The named questions, or the first ones of the split."""
        names, is_test = self.question_ids, False
        if data is not None and self.split == "test":
            opened = self._open(data)
            pools = [opened.question_ids(dataset) for dataset in self.datasets]
            first = tuple(name for turn in zip(*pools, strict=True) for name in turn)[:count]
            names, is_test = names or first, True
        return choose_questions(data, self.datasets, count, names, is_test=is_test)

    def _book_split(self, data: Path | None) -> Split | None:
        return None if data is None or self.clutter == 0 else self._open(data)

    def _open(self, data: Path) -> Split:
        return open_split(self.split, data, purpose=self.purpose, log=self.log, note="questions")


@dataclass(frozen=True, slots=True)
class NeedleWorkload:
    """Hidden sentences at chosen depths.

    Attributes:
        context: Most tokens of a prompt.
        depths: Depth of each needle of a document; one depth is a pass-key test.
        num_documents: How many documents.
        max_new_tokens: Most tokens of an answer.
    """

    context: int
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    num_documents: int = 1
    max_new_tokens: int = 8

    def __post_init__(self) -> None:
        """Reject a workload without documents or answers."""
        _check_positive(self, "context", "num_documents", "max_new_tokens")

    def cases(
        self, tokenizer: Any, data: Path | None, *, seed: int, limit: int | None
    ) -> list[Case]:
        """Its prompts."""
        check_context(self.context, limit, extra=self.max_new_tokens)
        return needle_cases(
            tokenizer,
            data=data,
            context=self.context,
            depths=self.depths,
            num_documents=self.num_documents,
            seed=seed,
            max_new_tokens=self.max_new_tokens,
        )


@dataclass(frozen=True, slots=True)
class ToolsWorkload:
    """W3: tasks, each solved in a few steps.

    Attributes:
        source: ``dbbench`` for SQL on tables, ``toolbench`` for calls with recorded responses.
        num_tasks: How many tasks.
        most_rows: Most rows of a table in the prompt.
        clutter: Tokens of a development book in front of the task, so that a tight budget holds.
    """

    source: ToolSource = "dbbench"
    num_tasks: int = 4
    most_rows: int = 40
    clutter: int = 0

    def __post_init__(self) -> None:
        """Reject a workload without tasks or tables."""
        _check_positive(self, "num_tasks", "most_rows")
        if self.clutter < 0:
            raise ValueError(f"clutter must not be negative, got {self.clutter}")

    def cases(
        self, tokenizer: Any, data: Path | None, *, seed: int, limit: int | None
    ) -> list[Case]:
        """Its prompts; tasks do not depend on the seed."""
        split = None
        if data is not None and self.clutter:
            split = open_split("development", data, purpose="development")
        return tool_cases(
            tokenizer,
            data=data,
            source=self.source,
            num_tasks=self.num_tasks,
            most_rows=self.most_rows,
            limit=limit,
            clutter=_clutter(tokenizer, split, self.clutter),
        )


@dataclass(frozen=True, slots=True)
class SplitWorkload:
    """Stretches, needles or questions that the manifest lists for a split.

    Attributes:
        length: Tokens of a prompt; of stretches one of the manifest's.
        split: ``development`` or ``test``.
        purpose: What the data is for; must be the split's name.
        log: File that counts uses of test data.
        workload: ``lm``, ``needle`` or ``qa``.
        count: Only so many prompts; 0 for all.
        skip: Prompts of the manifest's list that are left out before them.
        num_following: Tokens after a stretch.
    """

    length: int
    split: str = "development"
    purpose: str = "development"
    log: Path | None = None
    workload: str = "lm"
    count: int = 0
    skip: int = 0
    num_following: int = FOLLOWING_TOKENS

    def __post_init__(self) -> None:
        """Reject a workload that the manifest does not have."""
        _check_positive(self, "length", "num_following")
        check_name("workload", self.workload, ("lm", "needle", "qa"))
        for name in ("count", "skip"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    def cases(
        self, tokenizer: Any, data: Path | None, *, seed: int, limit: int | None
    ) -> list[Case]:
        """Its prompts; nothing depends on the seed."""
        if data is None:
            raise ValueError(f"the {self.split} split lies in a data folder; none was given")
        extra = self.num_following if self.workload == "lm" else _MOST_ANSWER
        check_context(self.length, limit, extra=extra)
        note = f"{self.workload} {self.length}"
        split = open_split(self.split, data, purpose=self.purpose, log=self.log, note=note)
        part = slice(self.skip, self.skip + self.count if self.count else None)
        if self.workload == "lm":
            return split.stretches(
                tokenizer, length=self.length, num_following=self.num_following, part=part
            )
        if self.workload == "needle":
            return split.needles(tokenizer, length=self.length, part=part)
        return self._questions(tokenizer, split, part)

    def _questions(self, tokenizer: Any, split: Split, part: slice) -> list[Case]:
        pools = [split.question_ids(dataset) for dataset in DATASETS]
        names = tuple(name for turn in zip(*pools, strict=True) for name in turn)[part]
        is_test = split.name == "test"
        chosen = choose_questions(split.data, DATASETS, len(names), names, is_test=is_test)
        return qa_cases(tokenizer, chosen, context=self.length, split=split.name)


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """A grid of points.

    Attributes:
        model: ``smollm2``, a local folder, or a hub name.
        methods: Names of methods; ``dense`` is measured once, at 100%.
        budgets: Byte budgets of the others.
        method_budgets: Budgets of single methods instead, where theirs lie elsewhere.
        data: Data folder; None uses made-up texts.
        lm: W1 parts.
        qa: W2 parts.
        needle: Needle parts.
        tools: W3 parts.
        split: Parts that the manifest lists.
        window: How decoding is timed.
        seed: Draws what is drawn.
        num_seeds: Answers drawn beside the greedy one, for ``S_traj``; 0 for none, else at least 2.
        calibration_text: Text to calibrate on, inside the data folder or a path of its own; None
            calibrates on made-up text.
        calibration_tokens: Tokens of it.
        policy: File with the controller's weights; None takes equal weights.
        backend: Decode backend of our methods.
        num_threads: Threads of torch; 0 leaves its default.
        prefill_device: Where prompts are read, such as ``cuda``, if methods run on the CPU.
        device: Where methods run; on ``cuda`` ours are the public cache with its captured steps.
        dtype: Type of the model's weights, ``float32`` or ``bfloat16``.
    """

    model: str
    methods: tuple[str, ...]
    budgets: tuple[str, ...]
    method_budgets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    data: Path | None = None
    lm: tuple[LMWorkload, ...] = ()
    qa: tuple[QAWorkload, ...] = ()
    needle: tuple[NeedleWorkload, ...] = ()
    tools: tuple[ToolsWorkload, ...] = ()
    split: tuple[SplitWorkload, ...] = ()
    window: DecodeWindow = field(default_factory=DecodeWindow)
    seed: int = 0
    num_seeds: int = 0
    calibration_text: str | None = None
    calibration_tokens: int = 2048
    policy: Path | None = None
    backend: str = "auto"
    num_threads: int = 0
    prefill_device: str = "cpu"
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Reject an empty grid, a method or budget named twice, and budgets that do not parse."""
        if not self.methods or not self.budgets:
            raise ValueError("a sweep needs at least one method and one budget")
        if not (self.lm or self.qa or self.needle or self.tools or self.split):
            raise ValueError("a sweep needs at least one of lm, qa, needle, tools and split")
        for method in self.methods:
            check_method(method)
        check_name("dtype", self.dtype, ("float32", "bfloat16"))
        if self.num_seeds < 0 or self.num_seeds == 1:
            raise ValueError(f"num_seeds must be 0 or at least 2, got {self.num_seeds}")
        own = [(f"method_budgets of {name}", v) for name, v in self.method_budgets.items()]
        for name, values in (("methods", self.methods), ("budgets", self.budgets), *own):
            if len(set(values)) != len(values):
                raise ValueError(f"{name} must differ, got {values}")
        for method in self.method_budgets:
            if method not in self.methods or method == DENSE:
                raise ValueError(f"method_budgets names {method!r}, which takes no budget here")
        for budget in (*self.budgets, *(b for _, values in own for b in values)):
            ByteBudget.parse(budget)

    @property
    def read_device(self) -> str:
        """Where prompts are read: where methods run, unless that is the CPU."""
        return self.prefill_device if self.device == "cpu" else self.device

    def grid(self) -> list[tuple[str, str]]:
        """(method, budget) of every point of a case, in order."""
        points = []
        for method in self.methods:
            budgets = self.method_budgets.get(method, self.budgets)
            if method == DENSE:
                budgets = (DENSE_BUDGET,)
            points += [(method, budget) for budget in budgets]
        return points

    def cases(self, tokenizer: Any, limit: int | None) -> list[Case]:
        """Every prompt: a document of each workload in turn, so that a part of a sweep has all.

        Raises:
            ValueError: A context is longer than the model's, or two cases have the same name.
        """
        parts: list[LMWorkload | QAWorkload | NeedleWorkload | ToolsWorkload | SplitWorkload] = []
        parts += [*self.lm, *self.needle, *self.qa, *self.tools, *self.split]
        documents = []
        for part in parts:
            cases = part.cases(tokenizer, self.data, seed=self.seed, limit=limit)
            grouped = itertools.groupby(cases, key=lambda case: case.group)
            documents.append([list(members) for _, members in grouped])
        turns = itertools.zip_longest(*documents, fillvalue=())
        found = [case for turn in turns for document in turn for case in document]
        names = [case.case_id for case in found]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"cases {', '.join(twice)} are there twice")
        return found
