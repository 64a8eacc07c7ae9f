# SPDX-License-Identifier: Apache-2.0
"""W3, ToolBench: a model calls functions with JSON; recorded responses answer."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sphkv.evaluation.workloads.hub import refuse_hub
from sphkv.evaluation.workloads.tools import MAX_STEPS, ToolReply

FINISH = "Finish"
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "array": (list,), "object": (dict,),
}  # fmt: skip
_EXAMPLE = (
    "You answer tasks by calling functions. Each action is one line of JSON.\n\n"
    'Function: {"name": "get_tide", "parameters": {"harbour": "string"}}\n'
    "Task: How high is the tide in Leith?\n"
    'Action: {"name": "get_tide", "arguments": {"harbour": "Leith"}}\n'
    "Result: The tide in Leith is 4.1 m.\n"
    'Action: {"name": "Finish", "arguments": {"answer": "The tide in Leith is 4.1 m."}}\n\n'
)


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
    return f"{_EXAMPLE}{chr(10).join(lines)}\nTask: {task.question}\nAction:"


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
