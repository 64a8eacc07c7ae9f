# SPDX-License-Identifier: Apache-2.0
"""MiniLongBench: sixteen English and code tasks of LongBench, with LongBench's own rules.

The prompts are the authors'. What is added here is where the question begins, so that a context can
be stored before its question is known. Code tasks have no question: there the last lines stand for
it, which is what a completion asks about.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sphkv.core.configs import check_name
from sphkv.evaluation.suites.samples import Metric, PromptSet, Sample

SUITE = "longbench"
_LAST_LINES = 10


@dataclass(frozen=True, slots=True)
class LongBenchTask:
    """How a task of LongBench is asked and scored.

    Attributes:
        metric: How it is scored.
        max_new_tokens: Most tokens of an answer.
        question: Text that begins the question; its last occurrence counts. Empty where the last
            lines of the context stand for a question.
        is_first_line: Whether only the first line of an answer counts.
    """

    metric: Metric
    max_new_tokens: int
    question: str
    is_first_line: bool = False


_PASSAGES = "\n\nAnswer the question based on the given passages."
TASKS = {
    "narrativeqa": LongBenchTask("f1", 128, "\n\nNow, answer the question based on the story"),
    "qasper": LongBenchTask("f1", 128, _PASSAGES),
    "multifieldqa_en": LongBenchTask("f1", 64, "\n\nNow, answer the following question"),
    "hotpotqa": LongBenchTask("f1", 32, _PASSAGES),
    "2wikimqa": LongBenchTask("f1", 32, _PASSAGES),
    "musique": LongBenchTask("f1", 32, _PASSAGES),
    "gov_report": LongBenchTask("rouge_l", 512, "\n\nNow, write a one-page summary"),
    "qmsum": LongBenchTask("rouge_l", 512, "\n\nNow, answer the query based on"),
    "multi_news": LongBenchTask("rouge_l", 512, "\n\nNow, write a one-page summary"),
    "trec": LongBenchTask("classification", 64, "\nQuestion:", is_first_line=True),
    "triviaqa": LongBenchTask("f1", 32, "\nQuestion:", is_first_line=True),
    "samsum": LongBenchTask("rouge_l", 128, "\n\nDialogue:", is_first_line=True),
    "passage_count": LongBenchTask("count", 32, "\n\nPlease enter the final count"),
    "passage_retrieval_en": LongBenchTask("retrieval", 32, "\n\nThe following is an abstract."),
    "lcc": LongBenchTask("code", 64, ""),
    "repobench-p": LongBenchTask("code", 64, ""),
}
"""The tasks by name, in LongBench's order."""


def load_longbench(folder: Path, *, tasks: Sequence[str] = (), num_samples: int = 0) -> PromptSet:
    """Prompts of MiniLongBench.

    Args:
        folder: Holds ``<task>.jsonl`` with ``id``, ``prompt``, ``answers`` and, for
            classification, ``all_classes``.
        tasks: Some of ``TASKS``; all if empty.
        num_samples: First samples of every task; all if 0.

    Raises:
        ValueError: A file or a question is not there.
    """
    samples: list[Sample] = []
    digest = hashlib.sha256()
    for name in tasks or TASKS:
        check_name("LongBench task", name, TASKS)
        file = folder / f"{name}.jsonl"
        if not file.is_file():
            raise ValueError(f"folder {folder} has no {file.name}")
        text = file.read_text(encoding="utf-8")
        digest.update(text.encode())
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        samples += [_sample(name, row) for row in rows[: num_samples or None]]
    return PromptSet(tuple(samples), sources={"files": digest.hexdigest()[:16]})


def _sample(name: str, row: dict[str, Any]) -> Sample:
    task = TASKS[name]
    context, question = cut_question(task, row["prompt"], row["id"])
    return Sample(
        suite=SUITE,
        task=name,
        sample_id=row["id"],
        length=0,
        context=context,
        question=question,
        answers=tuple(answer for answer in row["answers"] if answer),
        metric=task.metric,
        max_new_tokens=task.max_new_tokens,
        classes=tuple(row.get("all_classes") or ()),
        is_first_line=task.is_first_line,
    )


def cut_question(task: LongBenchTask, prompt: str, name: str) -> tuple[str, str]:
    """A prompt's text before its question, and the question.

    Raises:
        ValueError: The question is not where the task's prompts have it.
    """
    if not task.question:
        lines = prompt.splitlines(keepends=True)
        count = min(_LAST_LINES, len(lines) // 2)
        return "".join(lines[:-count]), "".join(lines[-count:])
    at = prompt.rfind(task.question)
    if at <= 0:
        raise ValueError(f"the prompt of {name} has no {task.question.strip()!r}")
    return prompt[:at], prompt[at:]
