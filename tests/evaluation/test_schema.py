# SPDX-License-Identifier: Apache-2.0
"""A record that was just made is valid, and a spoilt one is named by line and field."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from sphkv.cli.main import main
from sphkv.core.configs import build_config
from sphkv.evaluation.records import RecordFile, canonical_json
from sphkv.evaluation.sweep.config import SweepConfig
from sphkv.evaluation.sweep.grid import SweepRunner
from sphkv.evaluation.validate import validate_file


@pytest.fixture(scope="module")
def record_file(tiny_model_folder, tmp_path_factory) -> Path:
    path = Path(tmp_path_factory.mktemp("records")) / "records.jsonl"
    common = {
        "model": str(tiny_model_folder),
        "budgets": ["60%"],
        "calibration_tokens": 128,
        "window": {"num_warm": 1, "num_measured": 2},
    }
    texts = {
        "methods": ["dense", "spherical", "joint", "streaming_llm"],
        "method_budgets": {"spherical": ["60%", "1%"]},
        "num_seeds": 2,
        "lm": [{"context": 300, "num_following": 40}],
        "needle": [{"context": 800, "depths": [0.5], "max_new_tokens": 3}],
    }
    tools = {"methods": ["dense", "kivi"], "tools": [{"num_tasks": 1, "most_rows": 3}]}
    with RecordFile(path) as file:
        for part in (texts, tools):
            config = build_config(SweepConfig, {**common, **part})
            SweepRunner(config, keep=None, tell=lambda line: None).run(file)
    return path


def test_a_fresh_record_is_valid(record_file, capsys):
    assert validate_file(record_file) == []
    assert main(["validate", str(record_file)]) == 0
    assert capsys.readouterr().out == f"{record_file}: valid\n"
    lines = [json.loads(line) for line in record_file.read_text().splitlines()]
    points = [line for line in lines if line["kind"] == "point"]
    assert {point["workload"] for point in points} == {"lm", "needle", "tools"}
    assert {point["status"] for point in points} == {"measured", "refused"}
    for point in points:
        if point["status"] == "measured" and point["method"] in ("spherical", "joint", "dense"):
            memory = point["memory"]
            assert memory["setting"]
            assert memory["tiers"]
            assert memory["residency"] in ("uniform", "retention")
            assert memory["peak_bytes"] == max(memory["steps"]["peak"])


def spoil(record_file: Path, tmp_path: Path, number: int, path: str, value: Any) -> Path:
    lines = [json.loads(line) for line in record_file.read_text().splitlines()]
    place: Any = lines[number - 1]
    *outer, last = path.split(".")
    for name in outer:
        place = place[name]
    if value is None:
        del place[last]
    else:
        place[last] = copy.copy(value)
    other = tmp_path / "spoilt.jsonl"
    other.write_text("".join(canonical_json(line) + "\n" for line in lines), encoding="utf-8")
    return other


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("memory.setting", "", "must not be empty"),
        ("memory.setting", None, "is missing"),
        ("memory.b_kv", "many", "is 'many', not float"),
        ("memory.peak_bytes", 7, "the steps say"),
        ("quality.kl", None, "is missing"),
        ("quality.verdicts.kl", 1, "is 1, not bool"),
        ("quality.kl_by_distance.tokens", [1.5], "quality.kl_by_distance.tokens.0: is 1.5"),
        ("times.tok_s", "fast", "is 'fast', not float"),
        ("colour", "red", "is no known field"),
        ("status", "done", "not one of 'measured', 'refused'"),
        ("run", "none", "no line before has that run"),
    ],
)
def test_a_fault_is_named_by_line_and_field(record_file, tmp_path, capsys, path, value, problem):
    # line 2 is dense on a text
    other = spoil(record_file, tmp_path, 2, path, value)
    assert main(["validate", str(other)]) == 1
    said = capsys.readouterr().out
    assert f"{other}, line 2, {path}" in said
    assert problem in said


def test_what_is_no_record_is_named_too(record_file, tmp_path, capsys):
    other = tmp_path / "old.jsonl"
    first, second, *_ = record_file.read_text().splitlines()
    old = json.loads(first) | {"format": "sphkv-records-1"}
    other.write_text("\n".join([canonical_json(old), second, second, "nonsense", "[]"]) + "\n")
    assert main(["validate", str(other)]) == 1
    said = capsys.readouterr().out
    assert "line 1, format: is 'sphkv-records-1'" in said
    assert "line 3, id:" in said
    assert "is there twice" in said
    assert "line 4: is no JSON" in said
    assert "line 5, kind: must be 'run' or 'point'" in said
