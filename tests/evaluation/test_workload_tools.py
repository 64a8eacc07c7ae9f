# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import pytest

from sphkv.evaluation.rollout import (
    Episode,
    episode_failures,
    episode_quality,
    summarise_episodes,
)
from sphkv.evaluation.workloads.tool_cases import tool_cases
from sphkv.evaluation.workloads.tools import (
    format_task,
    made_up_tool_tasks,
    read_tool_tasks,
    run_statement,
)


def letters(text, **_):
    return SimpleNamespace(input_ids=[ord(letter) for letter in text])


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


def test_tasks_are_cases_of_a_sweep():
    cases = tool_cases(letters, data=None, num_tasks=2, most_rows=3, limit=4000)
    assert [case.case_id for case in cases] == ["tools-3-made-up-0", "tools-3-made-up-1"]
    assert [case.facets["kind"] for case in cases] == ["SELECT", "UPDATE"]
    prompt = "".join(map(chr, cases[0].prompt_ids))
    assert prompt.endswith(f"Task: {cases[0].task.question}\nSQL:")
    with pytest.raises(ValueError, match="more than the model's 1000"):
        tool_cases(letters, data=None, num_tasks=1, most_rows=3, limit=1000)


def test_an_episode_is_recorded_beside_denses():
    dense = Episode(("SELECT 1", "SELECT 2"), True, 2, 20, True, False)
    ours = Episode(("SELECT 1", "SELEC", "x"), False, 1, 26, False, True)
    found = episode_quality(ours, dense)
    assert (found["success"], found["success_reference"]) == (0.0, 1.0)
    assert found["schema_validity"] == pytest.approx(1 / 3)
    assert found["is_same"] == 0.0
    assert found["length_drift"] == 6
    assert found["failures"] == ["tool corruption", "derailment", "termination"]
    assert episode_quality(dense, dense)["failures"] == []
