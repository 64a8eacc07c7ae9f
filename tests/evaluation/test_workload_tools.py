# SPDX-License-Identifier: Apache-2.0
import json
from types import SimpleNamespace

import pytest

from sphkv.evaluation.runner.decoding import (
    Episode,
    episode_failures,
    episode_quality,
)
from sphkv.evaluation.workloads.tools import (
    format_task,
    made_up_api_tasks,
    made_up_tool_tasks,
    read_api_tasks,
    read_tool_tasks,
    run_statement,
    tool_cases,
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


def test_tasks_are_cases_of_a_sweep():
    cases = tool_cases(letters, data=None, source="dbbench", num_tasks=2, most_rows=3, limit=4000)
    assert [case.case_id for case in cases] == [
        "tools-dbbench-made-up-0",
        "tools-dbbench-made-up-1",
    ]
    assert [case.facets["kind"] for case in cases] == ["SELECT", "UPDATE"]
    assert cases[0].task is not None
    prompt = "".join(map(chr, cases[0].prompt_ids))
    assert prompt.endswith(f"Task: {cases[0].task.question}\nSQL:")
    with pytest.raises(ValueError, match="more than the model's 1000"):
        tool_cases(letters, data=None, source="dbbench", num_tasks=1, most_rows=3, limit=1000)


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


def test_calls_are_checked_and_answered_from_the_record():
    (task,) = made_up_api_tasks(1)
    town = task.question.split(" at ")[1].rstrip("?")
    call = json.dumps({"name": "get_depth", "arguments": {"town": town.upper()}})
    reply = task.respond(f" {call} and more")
    assert (reply.is_valid, reply.is_solved) == (True, False)
    assert task.answer_values[0] in reply.text
    said = json.dumps({"name": "Finish", "arguments": {"answer": f"It is {reply.text}"}})
    assert task.respond(said).is_solved
    assert not task.respond('{"name": "Finish", "arguments": {"answer": "deep"}}').is_solved
    for bad, message in (
        ("deep", "no JSON"),
        ("[1]", "needs a name"),
        ('{"name": "get_depth", "arguments": [1]}', "must be an object"),
        ('{"name": "get_width"}', "no function 'get_width'"),
        ('{"name": "get_depth"}', "needs 'town'"),
        ('{"name": "get_depth", "arguments": {"town": 3}}', "must be of type string"),
        ('{"name": "get_depth", "arguments": {"town": "x", "y": 1}}', "no argument 'y'"),
    ):
        reply = task.respond(bad)
        assert not reply.is_valid
        assert message in reply.text
    (case,) = tool_cases(
        letters, data=None, source="toolbench", num_tasks=1, most_rows=3, limit=4000
    )
    assert "".join(map(chr, case.prompt_ids)).endswith(f"Task: {task.question}\nAction:")


def test_recorded_calls_lead_to_their_answers(shared_data):
    lines = (shared_data / "tools" / "toolbench_weather.jsonl").read_text().splitlines()
    records = {record["id"]: record for record in map(json.loads, lines)}
    tasks = read_api_tasks(shared_data, 100)
    assert len(tasks) > 30
    for task in tasks:
        record = records[task.task_id]
        for step in record["steps"]:
            call = {"name": step["name"], "arguments": json.loads(step["arguments"])}
            reply = task.respond(json.dumps(call))
            assert reply.is_valid
            assert reply.text == step["response"].strip('"')
        said = {"name": "Finish", "arguments": {"answer": record["answer"]}}
        assert task.respond(json.dumps(said)).is_solved
