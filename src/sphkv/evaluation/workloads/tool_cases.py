# SPDX-License-Identifier: Apache-2.0
"""W3 as cases of a sweep: one episode per task."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from sphkv.evaluation.workloads.case import Case, check_context
from sphkv.evaluation.workloads.toolbench import (
    ApiTask,
    format_api_task,
    made_up_api_tasks,
    read_api_tasks,
)
from sphkv.evaluation.workloads.tools import (
    MAX_STEPS,
    ToolTask,
    format_task,
    made_up_tool_tasks,
    read_tool_tasks,
)

ToolSource = Literal["dbbench", "toolbench"]

STATEMENT_TOKENS = 48
REPLY_TOKENS = 200
EPISODE_TOKENS = MAX_STEPS * (STATEMENT_TOKENS + REPLY_TOKENS)
"""Most tokens that an episode adds to its prompt."""


def tool_cases(
    tokenizer: Any,
    *,
    data: Path | None,
    source: ToolSource,
    num_tasks: int,
    most_rows: int,
    limit: int | None,
) -> list[Case]:
    """One case per task.

    Args:
        tokenizer: Of the model.
        data: Folder with ``tools/*.jsonl``; None makes tasks up.
        source: SQL on tables, or calls of functions.
        num_tasks: How many.
        most_rows: Most rows of a table in the prompt.
        limit: The model's longest context; None if it states none.
    """
    cases = []
    for task, prompt in _prompts(data, source, num_tasks, most_rows):
        ids = tokenizer(prompt).input_ids
        check_context(len(ids), limit, extra=EPISODE_TOKENS)
        cases.append(
            Case(
                case_id=f"tools-{source}-{task.task_id}",
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
