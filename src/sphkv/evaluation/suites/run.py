# SPDX-License-Identifier: Apache-2.0
"""Run a board: every sample with every method, budget and mode; every finished answer is kept.

Samples are the outer loop, because reading a prompt costs more than answering it once, and they
come in rounds over all tasks and lengths, so that a run that is stopped has measured all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sphkv.core.configs import config_to_dict
from sphkv.errors import BudgetError
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.records import content_id
from sphkv.evaluation.runner.methods import JOINT
from sphkv.evaluation.suites.columns import Answer, Bench, ReadSample, counted_bytes
from sphkv.evaluation.suites.config import (
    PRESS,
    QUANTIZED,
    MakeConfig,
    SuiteConfig,
    parse_shard,
)
from sphkv.evaluation.suites.crosscheck import Overlap, cross_check
from sphkv.evaluation.suites.published import load_longbench, make_gsm8k
from sphkv.evaluation.suites.records import AnswerIdentity, Mode, SuiteFile, SuiteSetup
from sphkv.evaluation.suites.ruler import make_ruler
from sphkv.evaluation.suites.samples import (
    PromptSet,
    Sample,
    SampleIds,
    is_settled,
    read_prompts,
    score_answer,
)
from sphkv.integrations.kvpress import OutsideCaches
from sphkv.integrations.models import load_tokenizer

_LEAST_ROOM = 8

Tell = Callable[[str], None]
Column = tuple[Mode, str, str]


@dataclass(frozen=True, slots=True)
class Item:
    """A sample with its tokens and the name of its set."""

    sample: Sample
    ids: SampleIds
    set_id: str
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run did.

    Attributes:
        num_measured: Answers now.
        num_refused: Of these, refused because the budget is too small.
        num_failed: Of these, where the method broke; the next run tries them again.
        num_left: Answers that are still missing because time was up.
        seconds: How long it took.
    """

    num_measured: int
    num_refused: int
    num_failed: int
    num_left: int
    seconds: float


def make_prompts(config: MakeConfig, tokenizer: Any, name: str, tell: Tell) -> PromptSet:
    """One set of prompts.

    Args:
        config: Which.
        tokenizer: Of the model.
        name: The model.
        tell: Takes lines of progress.
    """
    if config.suite == "ruler":
        return make_ruler(tokenizer, config.ruler(), name=name, tell=tell)
    if config.suite == "longbench":
        if config.data is None:
            raise ValueError("longbench needs data: the folder of MiniLongBench's .jsonl files")
        return load_longbench(config.data, tasks=config.tasks, num_samples=config.num_samples)
    return make_gsm8k(
        tokenizer,
        data=config.data,
        lengths=config.lengths,
        num_samples=config.num_samples,
        seed=config.seed,
        name=name,
    )


def make_prompt_file(config: MakeConfig, model: str, out: Path, tell: Tell) -> PromptSet:
    """Make a set and write it.

    Args:
        config: Which.
        model: Whose tokenizer counts the tokens; its weights are not loaded.
        out: The file.
        tell: Takes lines of progress.
    """
    made = make_prompts(config, load_tokenizer(model), model, tell)
    made.write(out)
    return made


def cross_check_prompts(
    model: str, prompts: Path, *, num_samples: int, share: float, device: str
) -> list[tuple[str, Overlap]]:
    """What our eviction baselines and kvpress's keep of the first prompts of a file.

    Args:
        model: The model.
        prompts: File of prompts.
        num_samples: How many of them.
        share: Share of the states that is kept.
        device: Where it runs.
    """
    config = SuiteConfig(model, ("dense",), (), prompts=(prompts,), device=device)
    bench, found = Bench(config), list[tuple[str, Overlap]]()
    given = read_prompts(prompts)
    for sample in given.samples[:num_samples]:
        read = bench.read(sample, given.ids(bench.tokenizer, sample))
        found += [(sample.sample_id, row) for row in cross_check(bench, read, share=share)]
    return found


class SuiteRunner:
    """Holds the model and answers until nothing is left."""

    def __init__(self, config: SuiteConfig, *, keep: Path, tell: Tell) -> None:
        """Load the model and the prompts.

        Args:
            config: The board.
            keep: Folder for prompts that are made, so that they are made once.
            tell: Takes lines of progress.
        """
        self._config, self._tell = config, tell
        self._bench = Bench(config)
        self._outside: OutsideCaches | None = None
        self._sets = [*map(read_prompts, config.prompts)]
        self._sets += [self._made(part, keep) for part in config.make if not config.prompts]
        self._items = self._all_items()

    def _made(self, part: MakeConfig, keep: Path) -> PromptSet:
        name = content_id([self._config.model, config_to_dict(part)])
        file = keep / f"prompts-{part.suite}-{name}.jsonl"
        if file.is_file():
            return read_prompts(file)
        self._tell(f"making the prompts of {part.suite}")
        made = make_prompts(part, self._bench.tokenizer, self._config.model, self._tell)
        made.write(file)
        return made

    def _all_items(self) -> list[Item]:
        """In rounds over tasks and lengths, the short ones first."""
        config, rounds = self._config, dict[tuple[str, int], int]()
        found: list[tuple[int, Item]] = []
        for prompts in self._sets:
            known = {sample.task for sample in prompts.samples}
            tasks = [task for task in config.tasks if task in known]
            if config.tasks and not tasks:
                continue
            for sample in prompts.chosen(
                tasks=tasks, lengths=config.lengths, num_samples=config.num_samples
            ):
                key = (sample.task, sample.length)
                rounds[key] = rounds.get(key, 0) + 1
                found.append((rounds[key], self._item(prompts, sample)))
        if not found:
            raise ValueError(f"no prompt has a task of {config.tasks} or length {config.lengths}")
        found.sort(key=lambda pair: (pair[0], len(pair[1].ids.prompt)))
        part, count = parse_shard(config.shard)
        return [item for _, item in found][part::count]

    def _item(self, prompts: PromptSet, sample: Sample) -> Item:
        config, limit = self._config, self._bench.layout.max_tokens
        count = min(sample.max_new_tokens, config.max_new_tokens or sample.max_new_tokens)
        ids = prompts.ids(self._bench.tokenizer, sample)
        if config.max_prompt_tokens is not None:
            ids = ids.cut(config.max_prompt_tokens)
        if limit is not None and len(ids.prompt) + count > limit:
            raise ValueError(
                f"sample {sample.sample_id} has {len(ids.prompt)} tokens and {count} to come, "
                f"more than the model's {limit}: set max_prompt_tokens or choose other lengths"
            )
        return Item(sample, ids, prompts.set_id, count)

    def run(self, file: SuiteFile, *, max_minutes: float | None = None) -> RunSummary:
        """Answer everything that a file lacks.

        Args:
            file: Where answers go.
            max_minutes: No new sample is begun after so many minutes; None for no end.
        """
        began = time.perf_counter()
        file.begin_run(self._setup())
        todo = [
            (item, [c for c in self._config.grid() if not file.has(self._identity(item, c))])
            for item in self._items
        ]
        total = sum(len(item.ids.prompt) * (1 + len(cols)) for item, cols in todo if cols)
        progress = _Progress(total, sum(len(columns) for _, columns in todo), self._tell)
        counts = {"measured": 0, "refused": 0, "failed": 0}
        for item, columns in todo:
            if not columns:
                continue
            if max_minutes is not None and time.perf_counter() - began > 60 * max_minutes:
                break
            for record in self._all_answers(item, columns, progress):
                file.append(record)
                counts[record["status"]] += 1
                progress.step(len(item.ids.prompt), record)
                # what broke may have taken the device with it; then only a new process helps
                if record["status"] == "failed":
                    self._bench.check_device()
            self._bench.free_memory()
        done = sum(counts.values())
        left = sum(len(columns) for _, columns in todo) - done
        seconds = time.perf_counter() - began
        return RunSummary(done, counts["refused"], counts["failed"], left, seconds)

    def _all_answers(
        self, item: Item, columns: Sequence[Column], progress: _Progress
    ) -> Iterator[dict[str, Any]]:
        """Read a prompt and answer it with some columns; the prompt's states go at the end."""
        self._tell(f"reading {item.sample.sample_id}: {len(item.ids.prompt)} tokens")
        read = self._bench.read(item.sample, item.ids)
        progress.pass_by(len(item.ids.prompt))
        for column in columns:
            yield self._answer(read, item, column)

    def _setup(self) -> SuiteSetup:
        return {
            "config": config_to_dict(self._config),
            "sets": [prompts.set_id for prompts in self._sets],
            "dense_bytes_per_token": self._bench.layout.geometry.dense_bytes_per_token,
            "environment": describe_environment(),
        }

    def _identity(self, item: Item, column: Column) -> AnswerIdentity:
        mode, method, budget = column
        return {
            "model": self._config.model,
            "dtype": self._config.dtype,
            "suite": item.sample.suite,
            "task": item.sample.task,
            "sample": item.sample.sample_id,
            "set": item.set_id,
            "length": item.sample.length,
            "context_tokens": len(item.ids.context),
            "question_tokens": len(item.ids.question),
            "max_new_tokens": item.max_new_tokens,
            "mode": mode,
            "method": method,
            "budget": budget,
            "calibration": self._bench.calibration_id,
            "device": self._config.device,
            "backend": self._bench.backend_name(method),
            "page_tokens": self._config.page_tokens if method == JOINT else None,
        }

    def _answer(self, read: ReadSample, item: Item, column: Column) -> dict[str, Any]:
        identity = self._identity(item, column)
        record: dict[str, Any] = {
            "id": content_id(identity),
            **identity,
            "status": "measured",
            "reason": "",
            "answer": "",
            "num_tokens": 0,
            "score": None,
            "bytes": None,
            "times": None,
        }
        is_outside = column[1].startswith((PRESS, QUANTIZED))
        try:
            said = self._said(read, item, column)
        except (BudgetError, ValueError) as error:
            return {**record, "status": "refused", "reason": str(error)}
        except (RuntimeError, AssertionError, TypeError) as error:
            if not is_outside and not isinstance(error, RuntimeError):
                raise  # a fault of this package's own code, not of a method on this machine
            # one broken method must not end a board of many hours; the summary counts it
            return {**record, "status": "failed", "reason": f"{type(error).__name__}: {error}"}
        return {
            **record,
            "answer": said.text,
            "num_tokens": said.num_tokens,
            "score": score_answer(item.sample, said.text),
            "bytes": said.bytes,
            "times": said.times,
        }

    def _said(self, read: ReadSample, item: Item, column: Column) -> Answer:
        mode, method, budget = column
        if not method.startswith((PRESS, QUANTIZED)):
            limit = item.max_new_tokens
            return self._bench.answer(read, mode, method, budget, max_new_tokens=limit)
        if self._outside is None:
            self._outside = OutsideCaches(self._bench.model, self._bench.tokenizer)
        parts: tuple[Sequence[int], Sequence[int]] = (item.ids.context, item.ids.question)
        if mode == "visible":
            parts = (item.ids.prompt, ())

        def is_done(text: str) -> bool:
            return is_settled(item.sample, text)

        # These methods leave the answer dense and must know its room beforehand: they get as much
        # as their answer needs, not as much as any may.
        room = min(_LEAST_ROOM, item.max_new_tokens)
        while True:
            said = self._outside.answer(
                method, budget, *parts, max_new_tokens=room, is_done=is_done
            )
            if said["num_tokens"] < room or room == item.max_new_tokens or is_done(said["text"]):
                break
            room = min(2 * room, item.max_new_tokens)
        times = said["times"]
        return Answer(said["text"], said["num_tokens"], counted_bytes(said["bytes"]), times)


class _Progress:
    """Says how far a run is, judging by tokens stored."""

    def __init__(self, total: int, num_answers: int, tell: Tell) -> None:
        self._total, self._num, self._tell = total, num_answers, tell
        self._done = self._count = 0
        self._began = time.perf_counter()

    def pass_by(self, weight: int) -> None:
        """Work that gives no answer was done."""
        self._done += weight

    def step(self, weight: int, record: dict[str, Any]) -> None:
        """An answer was measured."""
        self._done += weight
        self._count += 1
        left = (time.perf_counter() - self._began) * (self._total - self._done) / self._done
        said = f"{record['status']}: {record['reason'][:60]}"
        if record["score"] is not None:
            said = f"{record['score']:.2f} at {record['bytes']['dense_share']:.1%} of dense"
        self._tell(
            f"{self._count}/{self._num} ({100 * self._done / self._total:.0f}%), "
            f"{left / 60:.1f} min left: {record['sample']} {record['mode']} {record['method']} "
            f"{record['budget']}: {said}"
        )
