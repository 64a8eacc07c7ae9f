# SPDX-License-Identifier: Apache-2.0
"""One page from a suite's answers: suite by method and budget, with intervals and peak bytes.

Tasks that the dense cache cannot do are listed and left out: a method that answers none of them
would look as good as dense.
"""

from __future__ import annotations

import json
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sphkv.evaluation.metrics.statistics import MeanInterval, quantile
from sphkv.evaluation.records import write_text
from sphkv.evaluation.runner.methods import AUTO, DENSE, JOINT
from sphkv.evaluation.suites.acceptance import acceptance_rows
from sphkv.evaluation.suites.records import answer_place, load_acceptances, load_answers

LEAST_DENSE = 0.3
"""Mean score of dense below which a task does not count."""

_DRAWS = 2000
# Columns that are compared with all others.
_OURS = (AUTO, JOINT)

_Column = tuple[str, str, str, str, str]
_Scores = dict[tuple[str, str, str, int], float | None]


@dataclass(frozen=True, slots=True)
class TaskScore:
    """Dense on one task.

    Attributes:
        model: The model.
        suite: Of the task.
        task: The task.
        length: Tokens; 0 of natural texts.
        dense: Mean score.
        count: Samples.
        is_counted: Whether verdicts use it.
    """

    model: str
    suite: str
    task: str
    length: int
    dense: float
    count: int
    is_counted: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """One method at one budget over the counted tasks of a suite and length.

    Attributes:
        model: The model.
        suite: The suite.
        length: Tokens; 0 of natural texts.
        mode: Whether the question was visible.
        method: The method.
        budget: Its budget; empty for dense.
        score: Mean over tasks of mean scores, with its interval over samples; None if all were
            refused.
        behind: Paired difference to dense; None for dense itself and without a score.
        peak_share: Largest share of dense bytes at any moment of any answer.
        peak_bytes: Most bytes at any moment of any answer.
        by_task: Mean score of every counted task.
        refused: Answers that the budget was too small for; they are left out.
        failed: Answers that broke; they are left out.
    """

    model: str
    suite: str
    length: int
    mode: str
    method: str
    budget: str
    score: MeanInterval | None
    behind: MeanInterval | None
    peak_share: float
    peak_bytes: int
    by_task: Mapping[str, float]
    refused: int
    failed: int


@dataclass(frozen=True, slots=True)
class Duel:
    """Our cache beside another at the same budget, on the samples that both were given.

    Attributes:
        model: The model.
        suite: The suite, all lengths together.
        mode: Whether the question was visible.
        budget: Budget of both; dense has none.
        ours: ``auto``, the cache's own choice, or ``joint``, the controller.
        other: ``dense`` or a method.
        difference: Ours minus the other's, tasks and lengths weighing alike; None where no sample
            was answered by both.
        refused: Of the samples given to both, those that ours refused: its budget was too small.
        other_refused: Those that the other refused.
    """

    model: str
    suite: str
    mode: str
    budget: str
    ours: str
    other: str
    difference: MeanInterval | None
    refused: int = 0
    other_refused: int = 0


@dataclass(frozen=True, slots=True)
class Board:
    """Everything the page shows.

    Attributes:
        cells: All cells, best first within a suite, length, mode and budget.
        tasks: Dense on every task.
        sources: Record files.
        setups: What was measured with.
        acceptance: Rows of ``acceptance_rows``; empty where none was measured.
        duels: Our cache against dense and every other method.
    """

    cells: tuple[Cell, ...]
    tasks: tuple[TaskScore, ...]
    sources: tuple[str, ...]
    setups: tuple[Mapping[str, Any], ...]
    acceptance: tuple[Mapping[str, Any], ...] = ()
    duels: tuple[Duel, ...] = ()

    def markdown(self) -> str:
        """The page."""
        lists = (self._acceptance_list(), self._task_list(), self._setup_list())
        parts = ["# Suites", *self._duel_tables(), *self._phase(), *self._tables(), *lists]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _duel_tables(self) -> Iterable[str]:
        groups: dict[tuple[str, str], list[Duel]] = defaultdict(list)
        for duel in self.duels:
            groups[duel.model, duel.suite].append(duel)
        for (model, suite), duels in groups.items():
            yield f"## Our cache against the others, all lengths: {suite}, {_short(model)}"
            rows = [
                [
                    duel.mode,
                    duel.budget,
                    duel.ours,
                    duel.other,
                    _points(duel.difference, sign="+"),
                    "0" if duel.difference is None else str(duel.difference.count),
                    str(duel.refused),
                    str(duel.other_refused),
                ]
                for duel in duels
            ]
            head = ["question", "budget", "ours", "other", "ours minus it (95%)", "samples of both"]
            yield _table([*head, "refused by ours", "by the other"], rows)

    def _tables(self) -> Iterable[str]:
        groups: dict[tuple[str, str, int, str], list[Cell]] = defaultdict(list)
        for cell in self.cells:
            groups[cell.model, cell.suite, cell.length, cell.mode].append(cell)
        for (model, suite, length, mode), cells in groups.items():
            names = sorted({task for cell in cells for task in cell.by_task})
            where = f"{length} tokens" if length else "natural lengths"
            yield f"## {suite}, {where}, question {mode}: {_short(model)}"
            head = ["method", "budget", "score (95%)", "to dense (95%)", "samples", "peak bytes"]
            head += names
            yield _table(head, [_row(cell, names) for cell in cells])

    def _phase(self) -> Iterable[str]:
        """Best method by budget and length, with its score and how far it is from dense."""
        groups: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
        for cell in self.cells:
            if cell.behind is not None:
                groups[cell.model, cell.suite, cell.mode].append(cell)
        for (model, suite, mode), cells in groups.items():
            lengths = sorted({cell.length for cell in cells})
            budgets = sorted({cell.budget for cell in cells}, key=_size, reverse=True)
            rows = [
                [budget, *(_best(cells, budget, length) for length in lengths)]
                for budget in budgets
            ]
            yield f"## Best method by budget and length: {suite}, question {mode}, {_short(model)}"
            yield _table(["budget", *(str(length or "natural") for length in lengths)], rows)

    def _acceptance_list(self) -> str:
        if not self.acceptance:
            return ""
        rows = [
            [
                f"{_short(row['draft'])} for {_short(row['model'])}",
                row["method"],
                row["budget"],
                _points(row["rate"]),
                f"{row['per_pass'].mean:.2f}",
                f"{100 * row['peak_share']:.1f}%",
                str(row["count"]),
            ]
            for row in self.acceptance
        ]
        names = ["models", "method", "budget", "accepted, % (95%)", "tokens per pass"]
        head = [*names, "peak bytes", "prompts"]
        return "## Speculative decoding\n\n" + _table(head, rows)

    def _task_list(self) -> str:
        rows = [
            [
                _short(task.model),
                task.suite,
                task.task,
                str(task.length or "natural"),
                f"{100 * task.dense:.1f}",
                str(task.count),
                "yes" if task.is_counted else "no",
            ]
            for task in self.tasks
        ]
        head = ["model", "suite", "task", "length", "dense", "samples", "counted"]
        text = f"## Tasks\n\nA task counts where dense reaches {100 * LEAST_DENSE:.0f}.\n\n"
        return text + _table(head, rows)

    def _setup_list(self) -> str:
        lines = ["## How it was measured", "", f"Records: {', '.join(self.sources)}"]
        for setup in self.setups:
            config, where = setup["config"], setup["environment"]
            lines.append(
                f"- {_short(config['model'])}, {config['dtype']} on "
                f"{where['gpu'] if config['device'] != 'cpu' else where['device']}, prompts "
                f"{', '.join(setup['sets'])}, {_source(where)}"
            )
        # processes that shared a board differ in nothing that is shown here
        return "\n".join(dict.fromkeys(lines))


def _source(environment: Mapping[str, Any]) -> str:
    """What code an answer comes from: a commit, or git's name of the package's folder."""
    if environment["commit"] is None and "tree" in environment:
        return f"source tree {environment['tree']}"
    return f"commit {environment['commit'] or 'not recorded'}"


def build_board(paths: Sequence[Path]) -> Board:
    """The board of some record files.

    Raises:
        ValueError: There is no answer of dense to compare with.
    """
    answers = load_answers(paths)
    _check_places(answers)
    dense = {
        (row["model"], row["set"], row["sample"]): row["score"]
        for row in answers
        if row["method"] == DENSE and row["score"] is not None
    }
    if not dense:
        raise ValueError("a board needs answers of dense: add it to the methods")
    tasks = _task_scores(answers, dense)
    counted = {(t.model, t.suite, t.task, t.length) for t in tasks if t.is_counted}
    groups: dict[tuple[str, str, int, str, str, str], list[dict[str, Any]]] = defaultdict(list)
    modes: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in answers:
        modes[row["model"], row["suite"]].add(row["mode"])
    for row in answers:
        if (row["model"], row["suite"], row["task"], row["length"]) not in counted:
            continue
        is_dense = row["method"] == DENSE
        every = sorted(modes[row["model"], row["suite"]])
        for mode in every if is_dense else (row["mode"],):
            key = (row["model"], row["suite"], row["length"], mode)
            groups[(*key, row["method"], "" if is_dense else row["budget"])].append(row)
    cells = [_cell(key, rows, dense) for key, rows in groups.items()]
    cells.sort(key=_order)
    duels = _duels([row for group in groups.values() for row in group], dense)
    setups = {json.dumps(row["setup"], sort_keys=True): row["setup"] for row in answers}
    names = tuple(str(path) for path in paths)
    accepted = acceptance_rows(load_acceptances(paths))
    return Board(
        tuple(cells), tuple(tasks), names, tuple(setups.values()), tuple(accepted), tuple(duels)
    )


def _check_places(answers: Sequence[Mapping[str, Any]]) -> None:
    """Refuse answers of one column that were measured in different places."""
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in answers:
        column = (row["model"], row["suite"], row["mode"], row["method"], row["budget"])
        place = {"dtype": row["dtype"], **answer_place(row, row["setup"])}
        known = seen.setdefault(column, {})
        for name, value in place.items():
            if known.setdefault(name, value) != value:
                raise ValueError(
                    f"answers of {row['method']} at {row['budget']} differ in {name}: "
                    f"{known[name]!r} and {value!r}; a board shows one of them"
                )


def write_board(board: Board, folder: Path) -> list[Path]:
    """Write ``board.md`` and ``board.json``; returns their paths."""
    page, data = folder / "board.md", folder / "board.json"
    write_text(page, board.markdown())
    cells = [asdict(cell) for cell in board.cells]
    tasks = [asdict(task) for task in board.tasks]
    duels = [asdict(duel) for duel in board.duels]
    content = {"cells": cells, "tasks": tasks, "duels": duels}
    text = json.dumps(content, indent=1, sort_keys=True, default=dict)
    write_text(data, text + "\n")
    return [page, data]


def _task_scores(
    answers: Sequence[Mapping[str, Any]], dense: Mapping[tuple[str, str, str], float]
) -> list[TaskScore]:
    scores: dict[tuple[str, str, str, int], list[float]] = defaultdict(list)
    for row in answers:
        if row["method"] == DENSE and row["score"] is not None:
            key = (row["model"], row["suite"], row["task"], row["length"])
            scores[key].append(dense[row["model"], row["set"], row["sample"]])
    return [
        TaskScore(*key, mean := statistics.fmean(values), len(values), mean >= LEAST_DENSE)
        for key, values in sorted(scores.items())
    ]


def _cell(
    key: tuple[str, str, int, str, str, str],
    rows: Sequence[Mapping[str, Any]],
    dense: Mapping[tuple[str, str, str], float],
) -> Cell:
    """A cell. Tasks weigh alike, whatever their samples."""
    usable = [row for row in rows if row["status"] == "measured"]
    own, reference, weights, by_task = _scores(usable, dense)
    measured = [row["bytes"] for row in usable]
    *_, method, _ = key
    weight = [weights[name] for name in own]
    score = weighted_interval(list(own.values()), weight) if own else None
    behind = None
    if own and method != DENSE:
        behind = weighted_interval([own[name] - reference[name] for name in own], weight)
    return Cell(
        *key,
        score,
        behind,
        max((part["dense_share"] for part in measured), default=0.0),
        max((part["peak"] for part in measured), default=0),
        by_task,
        sum(row["status"] == "refused" for row in rows),
        sum(row["status"] == "failed" for row in rows),
    )


def _scores(
    rows: Sequence[Mapping[str, Any]], dense: Mapping[tuple[str, str, str], float]
) -> tuple[dict[str, float], dict[str, float], dict[str, float], dict[str, float]]:
    """Scores by sample, dense's, weights whose mean is 1 and make tasks alike, means by task."""
    own: dict[str, float] = {}
    reference: dict[str, float] = {}
    task_of: dict[str, str] = {}
    for row in rows:
        key = (row["model"], row["set"], row["sample"])
        if key not in dense:
            continue
        name = f"{row['set']} {row['sample']}"
        own[name] = row["score"]
        reference[name] = dense[key]
        task_of[name] = row["task"]
    counts: dict[str, int] = defaultdict(int)
    for task in task_of.values():
        counts[task] += 1
    weights = {name: len(own) / len(counts) / counts[task] for name, task in task_of.items()}
    by_task = {
        task: statistics.fmean(own[name] for name in own if task_of[name] == task)
        for task in counts
    }
    return own, reference, weights, by_task


def _duels(
    rows: Sequence[Mapping[str, Any]], dense: Mapping[tuple[str, str, str], float]
) -> list[Duel]:
    """Our cache against dense, then against every other method of the same budget."""
    columns: dict[_Column, _Scores] = defaultdict(dict)
    for row in rows:
        is_known = (row["model"], row["set"], row["sample"]) in dense
        if is_known and row["status"] in ("measured", "refused"):
            key = (row["model"], row["suite"], row["mode"], row["budget"], row["method"])
            columns[key][row["set"], row["sample"], row["task"], row["length"]] = row["score"]
    found = []
    for key, ours in sorted(columns.items()):
        model, suite, mode, budget, method = key
        if method not in _OURS:
            continue
        exact: _Scores = {name: dense[model, name[0], name[1]] for name in ours}
        rivals = {
            other: theirs
            for (*place, other), theirs in sorted(columns.items())
            if (*place,) == key[:-1] and other not in (*_OURS, DENSE)
        }
        for other, theirs in {DENSE: exact, **rivals}.items():
            found += _duel(Duel(model, suite, mode, budget, method, other, None), ours, theirs)
    found.sort(key=lambda duel: (duel.model, duel.suite, duel.mode, -_size(duel.budget), duel.ours))
    return found


def _duel(duel: Duel, ours: _Scores, theirs: _Scores) -> list[Duel]:
    """The duel on the samples that both were given; none if there are none."""
    given = [name for name in ours if name in theirs]
    gaps = {
        name: mine - its
        for name in given
        if (mine := ours[name]) is not None and (its := theirs[name]) is not None
    }
    counts: dict[tuple[str, int], int] = defaultdict(int)
    for *_, task, length in gaps:
        counts[task, length] += 1
    # every task and length weighs alike
    weights = [1.0 / counts[task, length] for *_, task, length in gaps]
    difference = weighted_interval([*gaps.values()], weights) if gaps else None
    own, other = (sum(scores[name] is None for name in given) for scores in (ours, theirs))
    made = replace(duel, difference=difference, refused=own, other_refused=other)
    return [made] if given else []


def weighted_interval(values: Sequence[float], weights: Sequence[float]) -> MeanInterval:
    """Weighted mean with its 95% bootstrap interval: samples are drawn with their weights.

    Args:
        values: One per sample.
        weights: Positive; one per sample.
    """
    draw, places = random.Random(0), range(len(values))
    means = []
    for _ in range(_DRAWS):
        chosen = draw.choices(places, k=len(values))
        total = sum(weights[at] for at in chosen)
        means.append(sum(weights[at] * values[at] for at in chosen) / total)
    mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    return MeanInterval(mean, quantile(means, 0.025), quantile(means, 0.975), len(values))


def _order(cell: Cell) -> tuple[Any, ...]:
    place = (cell.model, cell.suite, cell.length, cell.mode, cell.method != DENSE)
    score = -1.0 if cell.score is None else cell.score.mean
    return (*place, -_size(cell.budget) if cell.budget else 0.0, -score, cell.method)


def _size(budget: str) -> float:
    """For sorting: per cent, else bytes."""
    digits = "".join(c for c in budget if c.isdigit() or c == ".")
    return float(digits) if digits else 0.0


def _row(cell: Cell, names: Sequence[str]) -> list[str]:
    notes = [f"{cell.refused} refused"] if cell.refused else []
    notes += [f"{cell.failed} failed"] if cell.failed else []
    peak = f"{100 * cell.peak_share:.1f}% ({cell.peak_bytes / 2**20:.1f} MiB)"
    return [
        cell.method + (f" ({', '.join(notes)})" if notes else ""),
        cell.budget or "-",
        _points(cell.score),
        _points(cell.behind, sign="+"),
        "0" if cell.score is None else str(cell.score.count),
        "-" if cell.score is None else peak,
        *(f"{100 * cell.by_task[name]:.0f}" if name in cell.by_task else "-" for name in names),
    ]


def _points(value: MeanInterval | None, *, sign: str = "") -> str:
    if value is None:
        return "-"
    numbers = (format(100 * part, f"{sign}.1f") for part in (value.mean, value.low, value.high))
    mean, low, high = numbers
    return f"{mean} [{low}, {high}]"


def _best(cells: Sequence[Cell], budget: str, length: int) -> str:
    """Of the methods with at least half as many samples as the one with most."""
    here = [
        (cell.score.mean, cell.behind.mean, cell.method, cell.score.count)
        for cell in cells
        if cell.budget == budget and cell.length == length and cell.score and cell.behind
    ]
    if not here:
        return "-"
    most = max(count for *_, count in here)
    score, behind, method, _ = max(one for one in here if 2 * one[-1] >= most)
    return f"{method} {100 * score:.1f} ({100 * behind:+.1f})"


def _short(model: str) -> str:
    return Path(model).name


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
