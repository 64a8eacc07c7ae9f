# SPDX-License-Identifier: Apache-2.0
"""W3 as cases of a sweep: one episode per task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphkv.evaluation.workloads.case import Case, check_context
from sphkv.evaluation.workloads.tools import (
    MAX_STEPS,
    format_task,
    made_up_tool_tasks,
    read_tool_tasks,
)

STATEMENT_TOKENS = 48
REPLY_TOKENS = 200
EPISODE_TOKENS = MAX_STEPS * (STATEMENT_TOKENS + REPLY_TOKENS)
"""Most tokens that an episode adds to its prompt."""


def tool_cases(
    tokenizer: Any, *, data: Path | None, num_tasks: int, most_rows: int, limit: int | None
) -> list[Case]:
    """One case per task.

    Args:
        tokenizer: Of the model.
        data: Folder with ``tools/*.jsonl``; None makes tasks up.
        num_tasks: How many.
        most_rows: Most rows of a table in the prompt.
        limit: The model's longest context; None if it states none.
    """
    tasks = made_up_tool_tasks(num_tasks) if data is None else read_tool_tasks(data, num_tasks)
    cases = []
    for task in tasks:
        ids = tokenizer(format_task(task, most_rows=most_rows)).input_ids
        check_context(len(ids), limit, extra=EPISODE_TOKENS)
        cases.append(
            Case(
                case_id=f"tools-{most_rows}-{task.task_id}",
                workload="tools",
                group=f"tools-{task.task_id}",
                prompt_ids=tuple(ids),
                max_new_tokens=EPISODE_TOKENS,
                facets={"kind": task.kind},
                task=task,
            )
        )
    return cases
