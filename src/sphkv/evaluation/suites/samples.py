# SPDX-License-Identifier: Apache-2.0
"""A suite's prompts as text, kept in a file that is identified by its content, and their scores.

A prompt has two parts. What stands before the question may be stored before the question is known;
both parts are tokenised by themselves, so that the tokens do not depend on which mode is measured.
Answers are scored as RULER, LongBench and GSM8K define it, each between 0 and 1.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from sphkv.evaluation.metrics.answers import best_f1
from sphkv.evaluation.records import canonical_json, content_id, write_text

PROMPT_FORMAT = "sphkv-prompts-1"

Metric = Literal[
    "all", "part", "f1", "rouge_l", "classification", "retrieval", "count", "code", "number"
]
"""How an answer is scored; see ``score_answer``."""
_CONTROL = re.compile(r"[\x00-\x1f]")
_NUMBERS = re.compile(r"\d+")
_AMOUNT = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_SAID = re.compile(r"answer is:?\s*\$?(-?\d[\d,]*(?:\.\d+)?)", re.IGNORECASE)
_NOT_CODE = ("`", "#", "//")


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
