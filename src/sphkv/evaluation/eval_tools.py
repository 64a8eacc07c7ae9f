# SPDX-License-Identifier: Apache-2.0
"""W3 at one operating point: the same episodes with dense and with a method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sphkv.core.budget import ByteBudget
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.harness.states import PromptStates, read_prompt
from sphkv.evaluation.runner.decoding import Episode, run_episode, summarise_episodes
from sphkv.evaluation.runner.methods import DENSE
from sphkv.evaluation.runner.session import Session
from sphkv.evaluation.workloads.case import check_context
from sphkv.evaluation.workloads.tools import (
    EPISODE_TOKENS,
    STATEMENT_TOKENS,
    ToolTask,
    format_task,
    made_up_tool_tasks,
    read_tool_tasks,
)


@dataclass(frozen=True, slots=True)
class ToolsConfig:
    """One measurement.

    Attributes:
        model: ``smollm2``, a local folder, or a hub name.
        method: Method to compare with dense.
        budget: Its byte budget.
        data: Data folder; made-up tasks if None.
        num_tasks: How many tasks.
        most_rows: Most rows of a table in the prompt.
    """

    model: str
    method: str = "spherical"
    budget: str = "40%"
    data: str | None = None
    num_tasks: int = 4
    most_rows: int = 40

    def __post_init__(self) -> None:
        """Reject an empty measurement."""
        for name in ("num_tasks", "most_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        ByteBudget.parse(self.budget)


def run_tools(config: ToolsConfig, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run the episodes; the prompt of a task is read once for both caches."""
    session = Session(config.model)
    if config.data is None:
        tasks = made_up_tool_tasks(config.num_tasks)
    else:
        tasks = read_tool_tasks(Path(config.data), config.num_tasks)
    ours: list[Episode] = []
    dense: list[Episode] = []
    for task in tasks:
        states = _read(session, task, config.most_rows)
        for name, budget, episodes in (
            (DENSE, "100%", dense),
            (config.method, config.budget, ours),
        ):
            method = session.factory.make(
                name, budget, context=states.num_tokens, num_new=EPISODE_TOKENS
            )
            method.store_prompt(states)
            episodes.append(
                run_episode(
                    session.model,
                    session.tokenizer,
                    task,
                    method,
                    states.hidden[-1:],
                    max_new_tokens=STATEMENT_TOKENS,
                )
            )
        tell(f"{task.task_id}: dense {dense[-1].is_solved}, {config.method} {ours[-1].is_solved}")
    return {
        "workload": "tools",
        "config": asdict(config),
        "summary": summarise_episodes(ours, dense),
        "episodes": [
            {"task": task.task_id, "dense": asdict(d), "method": asdict(o)}
            for task, d, o in zip(tasks, dense, ours, strict=True)
        ],
        "environment": describe_environment(),
    }


def _read(session: Session, task: ToolTask, most_rows: int) -> PromptStates:
    ids = session.tokenizer(format_task(task, most_rows=most_rows)).input_ids
    extra = EPISODE_TOKENS
    check_context(len(ids), session.shape.max_tokens, extra=extra)
    return read_prompt(session.model, torch.tensor([ids]))
