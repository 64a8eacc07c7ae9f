# SPDX-License-Identifier: Apache-2.0
"""W3, tools: a model writes SQL for a table, or calls functions with JSON; one episode per task.

An SQLite database in memory answers the SQL; recorded responses answer the calls (ToolBench).
"""

from __future__ import annotations

import hashlib
import json
import random
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sphkv.evaluation.workloads.case import Case, check_context
from sphkv.evaluation.workloads.texts import refuse_hub

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

_CALL_EXAMPLE = (
    "You answer tasks by calling functions. Each action is one line of JSON.\n\n"
    'Function: {"name": "get_tide", "parameters": {"harbour": "string"}}\n'
    "Task: How high is the tide in Leith?\n"
    'Action: {"name": "get_tide", "arguments": {"harbour": "Leith"}}\n'
    "Result: The tide in Leith is 4.1 m.\n"
    'Action: {"name": "Finish", "arguments": {"answer": "The tide in Leith is 4.1 m."}}\n\n'
)
FINISH = "Finish"
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "array": (list,), "object": (dict,),
}  # fmt: skip
ToolSource = Literal["dbbench", "toolbench"]
STATEMENT_TOKENS = 48
REPLY_TOKENS = 200
EPISODE_TOKENS = MAX_STEPS * (STATEMENT_TOKENS + REPLY_TOKENS)
"""Most tokens that an episode adds to its prompt."""


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


@dataclass(frozen=True, slots=True)
class ApiTask:
    """One task with its functions.

    Attributes:
        task_id: Unique.
        question: The task in words.
        functions: Schemas: name and JSON-schema ``parameters``.
        responses: Recorded response of every call, by ``call_key``.
        answer_values: What the final answer must contain.
        kind: Label in records.
        again: What follows a response in the prompt.
    """

    task_id: str
    question: str
    functions: tuple[Mapping[str, Any], ...]
    responses: Mapping[str, str]
    answer_values: tuple[str, ...]
    kind: str = "API"
    again: str = field(default="\nAction:", repr=False)

    def respond(self, text: str) -> ToolReply:
        """Judge one action and say what was recorded for it."""
        try:
            name, arguments = parse_call(text)
            if name == FINISH:
                said = str(arguments.get("answer", ""))
                is_solved = all(value in said for value in self.answer_values)
                return ToolReply("", is_valid=True, is_solved=is_solved)
            check_call(self.functions, name, arguments)
        except ValueError as error:
            return ToolReply(f"Error: {error}", is_valid=False, is_solved=False)
        known = self.responses.get(call_key(name, arguments))
        reply = "Error: nothing is known about that" if known is None else known
        return ToolReply(reply, is_valid=True, is_solved=False)


def call_key(name: str, arguments: Mapping[str, Any]) -> str:
    """The same text for the same call."""
    return json.dumps([name, arguments], sort_keys=True).lower()


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of an action; what follows its JSON is ignored.

    Raises:
        ValueError: It is no call.
    """
    try:
        call, _ = json.JSONDecoder().raw_decode(text.strip())
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError("an action needs a name")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    return call["name"], arguments


def check_call(
    functions: Sequence[Mapping[str, Any]], name: str, arguments: Mapping[str, Any]
) -> None:
    """Reject calls that do not follow the schemas.

    Raises:
        ValueError: The function is unknown, or an argument is missing, unknown or of another type.
    """
    schemas = {function["name"]: function["parameters"] for function in functions}
    if name not in schemas:
        raise ValueError(f"there is no function {name!r}")
    known = schemas[name].get("properties", {})
    missing = [key for key in schemas[name].get("required", ()) if key not in arguments]
    if missing:
        raise ValueError(f"{name} needs {missing[0]!r}")
    for key, value in arguments.items():
        if key not in known:
            raise ValueError(f"{name} has no argument {key!r}")
        wanted = _TYPES.get(known[key].get("type", ""), (object,))
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise ValueError(f"{key!r} of {name} must be of type {known[key]['type']}")


def format_api_task(task: ApiTask) -> str:
    """The prompt: an example, the functions, the task, and where the action begins."""
    lines = []
    for function in task.functions:
        properties = function["parameters"].get("properties", {})
        kinds = {name: part.get("type", "any") for name, part in properties.items()}
        lines.append("Function: " + json.dumps({"name": function["name"], "parameters": kinds}))
    return f"{_CALL_EXAMPLE}{chr(10).join(lines)}\nTask: {task.question}\nAction:"


def read_api_tasks(data: Path, limit: int) -> list[ApiTask]:
    """The first tasks of ``tools/toolbench_weather.jsonl`` that can be judged in a few steps.

    Raises:
        FileNotFoundError: The folder lacks the file.
    """
    refuse_hub(data, "tool tasks")
    file = data / "tools" / "toolbench_weather.jsonl"
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}")
    tasks: list[ApiTask] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if len(tasks) == limit:
            break
        # one more step is the answer
        if not record["answer_values"] or len(record["steps"]) >= MAX_STEPS:
            continue
        responses = {
            call_key(step["name"], json.loads(step["arguments"])): step["response"].strip('"')
            for step in record["steps"]
        }
        functions, values = tuple(record["tools"]), tuple(record["answer_values"])
        tasks.append(ApiTask(record["id"], record["query"], functions, responses, values))
    return tasks


def made_up_api_tasks(limit: int) -> list[ApiTask]:
    """Questions about an invented tide table, for runs without data."""
    schema = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
    functions = ({"name": "get_depth", "parameters": schema},)
    tasks = []
    for number in range(limit):
        draw = random.Random(f"functions {number}")
        town, depth = draw.choice(("Merrow", "Saltley", "Northgate")), f"{draw.randint(20, 99)}.5"
        responses = {call_key("get_depth", {"town": town}): f"The depth at {town} is {depth} m."}
        question = f"How deep is the water at {town}?"
        tasks.append(ApiTask(f"made-up-api-{number}", question, functions, responses, (depth,)))
    return tasks


def tool_cases(
    tokenizer: Any,
    *,
    data: Path | None,
    source: ToolSource,
    num_tasks: int,
    most_rows: int,
    limit: int | None,
    clutter: Sequence[int] = (),
) -> list[Case]:
    """One case per task.

    Args:
        tokenizer: Of the model.
        data: Folder with ``tools/*.jsonl``; None makes tasks up.
        source: SQL on tables, or calls of functions.
        num_tasks: How many.
        most_rows: Most rows of a table in the prompt.
        limit: The model's longest context; None if it states none.
        clutter: Token ids of another text in front of every task.
    """
    cases = []
    suffix = f"-c{len(clutter)}" if clutter else ""
    for task, prompt in _prompts(data, source, num_tasks, most_rows):
        ids = [*clutter, *tokenizer(prompt).input_ids]
        check_context(len(ids), limit, extra=EPISODE_TOKENS)
        cases.append(
            Case(
                case_id=f"tools-{source}-{task.task_id}{suffix}",
                workload="tools",
                group=f"tools-{task.task_id}",
                prompt_ids=tuple(ids),
                max_new_tokens=EPISODE_TOKENS,
                facets={"kind": task.kind},
                task=task,
            )
        )
    return cases


def _prompts(
    data: Path | None, source: ToolSource, num_tasks: int, most_rows: int
) -> list[tuple[ToolTask | ApiTask, str]]:
    if source == "toolbench":
        calls = made_up_api_tasks(num_tasks) if data is None else read_api_tasks(data, num_tasks)
        return [(call, format_api_task(call)) for call in calls]
    tasks = made_up_tool_tasks(num_tasks) if data is None else read_tool_tasks(data, num_tasks)
    return [(task, format_task(task, most_rows=most_rows)) for task in tasks]
