# SPDX-License-Identifier: Apache-2.0
import pytest

from sphkv.evaluation.rollout import Episode, episode_failures, summarise_episodes
from sphkv.evaluation.workloads.tools import (
    format_task,
    made_up_tool_tasks,
    read_tool_tasks,
    run_statement,
)


def test_made_up_tasks_are_solved_by_their_own_statement():
    for task in made_up_tool_tasks(6):
        assert run_statement(task, task.sql).is_solved
        assert not run_statement(task, 'SELECT "Year" FROM "Fleet";').is_solved
        assert format_task(task, most_rows=3).endswith(f"Task: {task.question}\nSQL:")


def test_recorded_tasks_are_solved_by_their_own_statement(shared_data):
    tasks = read_tool_tasks(shared_data, 218)
    assert {task.kind for task in tasks} == {"SELECT", "INSERT", "UPDATE"}
    assert all(run_statement(task, task.sql).is_solved for task in tasks)


def test_a_statement_reaches_no_file_and_ends(tmp_path):
    (task,) = made_up_tool_tasks(1)
    target = tmp_path / "stolen.db"
    reply = run_statement(task, f"ATTACH DATABASE '{target}' AS other")
    assert not reply.is_valid
    assert "not authorized" in reply.text
    assert not target.exists()
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT sum(x) FROM n"
    assert "interrupted" in run_statement(task, endless).text
    assert not run_statement(task, "this is no SQL").is_valid
    assert not run_statement(task, 'DROP TABLE "Fleet"').is_solved
    assert not run_statement(task, "SELECT 1; SELECT 2").is_valid


def test_episodes_by_hand():
    good = Episode(("a",), True, 1, 10, True, False)
    bad = Episode(("b", "c"), False, 1, 30, False, True)
    assert episode_failures(bad, good) == ["tool corruption", "derailment", "termination"]
    assert episode_failures(bad, bad) == []
    summary = summarise_episodes([good, bad], [good, good])
    assert summary["success"] == 0.5
    assert summary["dense_success"] == 1.0
    assert summary["schema_validity"] == pytest.approx(2 / 3)
    assert summary["disagree"] == 0.5
    assert summary["delta_t"] == 10.0
    assert summary["r_fail"] == 0.5
    with pytest.raises(ValueError, match="1 episodes against 2"):
        summarise_episodes([good], [good, good])
