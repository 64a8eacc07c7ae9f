# SPDX-License-Identifier: Apache-2.0
"""W3: a model writes SQL for a table and a task; an SQLite database in memory answers."""

from __future__ import annotations

import hashlib
import json
import random
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sphkv.evaluation.workloads.hub import refuse_hub

MAX_STEPS = 3
# SQLite calls back after so many instructions; a statement that runs longer is stopped.
_INSTRUCTIONS, _MOST_CALLS = 10_000, 200
_FORBIDDEN = {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA}

_EXAMPLE = (
    "You write one SQL statement for each task. The database answers with rows or an error.\n\n"
    'Table "Boats" with columns Name, Port, Year\nName | Port | Year\nSwift | Hull | 1901\n'
    "Gannet | Leith | 1911\n\nTask: In which port is the boat Swift?\n"
    'SQL: SELECT "Port" FROM "Boats" WHERE "Name" = \'Swift\';\nResult: [["Hull"]]\nDone\n\n'
)


@dataclass(frozen=True, slots=True)
class ToolTask:
    """One task on one table.

    Attributes:
        task_id: Unique.
        kind: ``SELECT``, ``INSERT`` or ``UPDATE``.
        question: The task in words.
        table_name: Name of the table.
        columns: Name and type of each column.
        rows: Its rows.
        answer: Values a right SELECT returns, in any order.
        table_after_sha256: Hash of the rows after a right INSERT or UPDATE.
        sql: A right statement.
        again: What follows a reply in the prompt.
    """

    task_id: str
    kind: str
    question: str
    table_name: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[Any, ...], ...]
    answer: tuple[str, ...]
    table_after_sha256: str
    sql: str
    again: str = field(default="\nThat is not right. Try again.\nSQL:", repr=False)

    def respond(self, text: str) -> ToolReply:
        """Run one statement on a fresh table and judge it."""
        return run_statement(self, text)


@dataclass(frozen=True, slots=True)
class ToolReply:
    """What the database said.

    Attributes:
        text: Rows as JSON, or the error.
        is_valid: Whether the statement ran.
        is_solved: Whether it did what the task asks.
    """

    text: str
    is_valid: bool
    is_solved: bool


def quote_name(name: str) -> str:
    """A name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def table_hash(rows: Sequence[Sequence[Any]]) -> str:
    """SHA-256 of the JSON list of rows, as the recorded rollouts have it."""
    text = json.dumps([list(row) for row in rows], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def open_table(task: ToolTask) -> sqlite3.Connection:
    """A database in memory that holds the task's table and can reach no file."""
    connection = sqlite3.connect(":memory:")
    columns = ", ".join(f"{quote_name(name)} {kind} COLLATE NOCASE" for name, kind in task.columns)
    table = quote_name(task.table_name)
    connection.execute(f"CREATE TABLE {table} ({columns})")
    places = ", ".join("?" * len(task.columns))
    connection.executemany(f"INSERT INTO {table} VALUES ({places})", task.rows)
    connection.commit()
    connection.set_authorizer(
        lambda action, *_: sqlite3.SQLITE_DENY if action in _FORBIDDEN else sqlite3.SQLITE_OK
    )
    calls = iter(range(_MOST_CALLS))
    connection.set_progress_handler(lambda: next(calls, None) is None, _INSTRUCTIONS)
    return connection


def run_statement(task: ToolTask, sql: str) -> ToolReply:
    """Run one statement on a fresh table and judge it."""
    connection = open_table(task)
    try:
        rows = connection.execute(sql).fetchmany(50)
        after = connection.execute(f"SELECT * FROM {quote_name(task.table_name)}").fetchall()
    except (sqlite3.Error, sqlite3.Warning) as error:
        return ToolReply(f"Error: {error}", is_valid=False, is_solved=False)
    finally:
        connection.close()
    text = json.dumps([list(row) for row in rows], ensure_ascii=False)
    if task.kind == "SELECT":
        values = sorted(_comparable(value) for row in rows for value in row)
        wanted = sorted(_comparable(value) for value in task.answer)
        return ToolReply(text, is_valid=True, is_solved=values == wanted)
    return ToolReply(text, is_valid=True, is_solved=table_hash(after) == task.table_after_sha256)


def _comparable(value: Any) -> str:
    """Text in which 1, "1" and "1.0" are the same."""
    try:
        return repr(float(value))
    except (TypeError, ValueError):
        return str(value)


def format_task(task: ToolTask, *, most_rows: int) -> str:
    """The prompt: an example, the table's first rows, the task, and where SQL begins."""
    names = [name for name, _ in task.columns]
    lines = [" | ".join(names)]
    lines += [" | ".join(str(value) for value in row) for row in task.rows[:most_rows]]
    return (
        f"{_EXAMPLE}Table {quote_name(task.table_name)} with columns {', '.join(names)}\n"
        + "\n".join(lines)
        + f"\n\nTask: {task.question}\nSQL:"
    )


def read_tool_tasks(data: Path, limit: int) -> list[ToolTask]:
    """The first rollouts of ``tools/``, each with its table.

    Raises:
        FileNotFoundError: The folder lacks a file.
    """
    refuse_hub(data, "tool tasks")
    folder = data / "tools"
    sources: dict[str, list[str]] = {}
    tasks = []
    rollouts = folder / "agentbench_dbbench_rollouts.jsonl"
    if not rollouts.is_file():
        raise FileNotFoundError(f"no file {rollouts}")
    for line in rollouts.read_text(encoding="utf-8").splitlines()[:limit]:
        record = json.loads(line)
        name = Path(record["path"]).stem
        if name not in sources:
            file = folder / f"agentbench_dbbench_{name}.jsonl"
            sources[name] = file.read_text(encoding="utf-8").splitlines()
        table = json.loads(sources[name][record["line"]])["table"]
        info = table["table_info"]
        tasks.append(
            ToolTask(
                task_id=record["id"],
                kind=record["kind"],
                question=record["question"],
                table_name=table["table_name"],
                columns=tuple((c["name"], c["type"]) for c in info["columns"]),
                rows=tuple(tuple(row) for row in info["rows"]),
                answer=tuple(str(value) for value in record.get("answer", ())),
                table_after_sha256=record.get("table_after_sha256", ""),
                sql=record["sql"],
            )
        )
    return tasks


def made_up_tool_tasks(limit: int) -> list[ToolTask]:
    """Look-ups and updates in an invented harbour book, for runs without data."""
    ports = ("Hull", "Leith", "Cork", "Bristol", "Dundee")
    tasks = []
    for number in range(limit):
        draw = random.Random(f"tools {number}")
        names = draw.sample(("Petrel", "Kittiwake", "Tern", "Puffin", "Heron", "Plover"), 5)
        rows = tuple((name, draw.choice(ports), draw.randint(1880, 1920)) for name in names)
        wanted = draw.choice(rows)
        port = draw.choice([other for other in ports if other != wanted[1]])
        columns = (("Name", "TEXT"), ("Port", "TEXT"), ("Year", "INT"))
        if number % 2 == 0:
            sql = f'SELECT "Port" FROM "Fleet" WHERE "Name" = \'{wanted[0]}\';'
            question, after, kind = f"In which port is {wanted[0]}?", "", "SELECT"
            answer: tuple[str, ...] = (wanted[1],)
        else:
            sql = f'UPDATE "Fleet" SET "Port" = \'{port}\' WHERE "Name" = \'{wanted[0]}\';'
            changed = [(n, port if n == wanted[0] else p, y) for n, p, y in rows]
            question, answer = f"Set the port of {wanted[0]} to {port}.", ()
            after, kind = table_hash(changed), "UPDATE"
        tasks.append(
            ToolTask(
                f"made-up-{number}", kind, question, "Fleet", columns, rows, answer, after, sql
            )
        )
    return tasks
