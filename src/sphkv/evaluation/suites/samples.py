# SPDX-License-Identifier: Apache-2.0
"""A suite's prompts as text, kept in a file that is identified by its content.

A prompt has two parts. What stands before the question may be stored before the question is known;
both parts are tokenised by themselves, so that the tokens do not depend on which mode is measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from sphkv.evaluation.records import canonical_json, content_id, write_text

PROMPT_FORMAT = "sphkv-prompts-1"

Metric = Literal[
    "all", "part", "f1", "rouge_l", "classification", "retrieval", "count", "code", "number"
]
"""How an answer is scored; see ``scoring``."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt with its question and what counts as right.

    Attributes:
        suite: Suite it belongs to, such as ``ruler``.
        task: Task of the suite.
        sample_id: Unique within a set.
        length: Tokens the prompt and its answer were made to fill; 0 for natural texts.
        context: Text before the question.
        question: The question and the beginning of the answer; the model continues it.
        answers: What is right; ``metric`` says whether one or all of them.
        metric: How it is scored.
        max_new_tokens: Most tokens of an answer.
        classes: All classes of a classification.
        is_first_line: Whether only the first line of the answer counts.
        stops: Texts that end the answer.
    """

    suite: str
    task: str
    sample_id: str
    length: int
    context: str
    question: str
    answers: tuple[str, ...]
    metric: Metric
    max_new_tokens: int
    classes: tuple[str, ...] = ()
    is_first_line: bool = False
    stops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Reject a sample that cannot be asked or scored."""
        if not self.context or not self.question:
            raise ValueError(f"sample {self.sample_id!r} needs a context and a question")
        if not self.answers or not all(self.answers):
            raise ValueError(f"sample {self.sample_id!r} needs answers, got {self.answers}")
        if self.metric not in get_args(Metric):
            raise ValueError(f"sample {self.sample_id!r} has no known metric: {self.metric!r}")
        if self.max_new_tokens < 1:
            raise ValueError(f"sample {self.sample_id!r} allows {self.max_new_tokens} tokens")


@dataclass(frozen=True, slots=True)
class SampleIds:
    """Tokens of a sample.

    Attributes:
        context: Of the text before the question.
        question: Of the question.
    """

    context: tuple[int, ...]
    question: tuple[int, ...]

    @property
    def prompt(self) -> tuple[int, ...]:
        """The whole prompt."""
        return (*self.context, *self.question)

    def cut(self, most: int) -> SampleIds:
        """At most so many tokens: the middle of the context goes, as LongBench does it.

        Raises:
            ValueError: The question alone is longer.
        """
        room = most - len(self.question)
        if len(self.context) <= room:
            return self
        if room < 2:
            raise ValueError(f"a question of {len(self.question)} tokens leaves none of {most}")
        head = (room + 1) // 2
        tail = self.context[len(self.context) - (room - head) :]
        return SampleIds((*self.context[:head], *tail), self.question)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Samples that were made or taken together.

    Attributes:
        samples: The prompts.
        tokenizer: Model whose tokens lengths were counted in; empty where none were.
        is_chat: Whether a chat template is part of the texts.
        sources: Where the texts come from: versions, hashes, seeds.
    """

    samples: tuple[Sample, ...]
    tokenizer: str = ""
    is_chat: bool = False
    sources: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reject two samples of one name."""
        names = [sample.sample_id for sample in self.samples]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"sample {twice!r} is in the set twice")

    @property
    def set_id(self) -> str:
        """Sixteen hexadecimal digits that name the content; where it came from does not count."""
        return content_id([self.is_chat, [asdict(sample) for sample in self.samples]])

    def ids(self, tokenizer: Any, sample: Sample) -> SampleIds:
        """Tokens of one of the samples."""
        context = tokenizer(sample.context, add_special_tokens=not self.is_chat).input_ids
        question = tokenizer(sample.question, add_special_tokens=False).input_ids
        return SampleIds(tuple(context), tuple(question))

    def chosen(
        self,
        *,
        tasks: Sequence[str] = (),
        lengths: Sequence[int] = (),
        num_samples: int | None = None,
    ) -> tuple[Sample, ...]:
        """Some of the samples: the first ones of every task and length.

        Args:
            tasks: Names of tasks; all if empty.
            lengths: Of made prompts; all if empty. Natural texts are always there.
            num_samples: Most of each task and length; all if None.
        """
        known = {sample.task for sample in self.samples}
        if wrong := sorted(set(tasks) - known):
            raise ValueError(f"no task {wrong[0]!r} among the prompts: {', '.join(sorted(known))}")
        counts: dict[tuple[str, int], int] = {}
        found = []
        for sample in self.samples:
            if tasks and sample.task not in tasks:
                continue
            if lengths and sample.length and sample.length not in lengths:
                continue
            key = (sample.task, sample.length)
            counts[key] = counts.get(key, 0) + 1
            if num_samples is None or counts[key] <= num_samples:
                found.append(sample)
        return tuple(found)

    def write(self, path: Path) -> None:
        """Write the set: a head line, then a line per sample."""
        head = {
            "kind": "prompts",
            "format": PROMPT_FORMAT,
            "set": self.set_id,
            "tokenizer": self.tokenizer,
            "is_chat": self.is_chat,
            "sources": dict(self.sources),
        }
        lines = [canonical_json(head), *(canonical_json(asdict(one)) for one in self.samples)]
        write_text(path, "\n".join(lines) + "\n")


def read_prompts(path: Path) -> PromptSet:
    """Read what ``PromptSet.write`` wrote.

    Raises:
        ValueError: The file is something else, or is not as it was written.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        head = json.loads(lines[0])
        samples = tuple(_sample(json.loads(line)) for line in lines[1:])
    except (ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is no file of prompts: {error}") from error
    if not isinstance(head, dict) or head.get("format") != PROMPT_FORMAT:
        raise ValueError(f"{path} has no head line of format {PROMPT_FORMAT!r}")
    found = PromptSet(samples, head["tokenizer"], head["is_chat"], head["sources"])
    if found.set_id != head["set"]:
        raise ValueError(f"{path} holds set {found.set_id}, its head says {head['set']}")
    return found


def _sample(data: dict[str, Any]) -> Sample:
    lists = {name: tuple(data[name]) for name in ("answers", "classes", "stops")}
    return Sample(**{**data, **lists})


def in_chat(tokenizer: Any, samples: Iterable[Sample], prefixes: Iterable[str]) -> list[Sample]:
    """Samples as a user's turn of a chat.

    Args:
        tokenizer: Has a chat template.
        samples: Their ``question`` ends with its prefix.
        prefixes: Of each sample, how the answer begins: what the assistant has said already.
    """
    mark = "\x00here\x00"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = text.partition(mark)
    found = []
    for sample, prefix in zip(samples, prefixes, strict=True):
        asked = sample.question.removesuffix(prefix).rstrip()
        question = f"{asked}{after}{prefix.lstrip()}"
        found.append(replace(sample, context=before + sample.context, question=question))
    return found
