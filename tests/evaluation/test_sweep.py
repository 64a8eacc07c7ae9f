# SPDX-License-Identifier: Apache-2.0
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from sphkv.core.configs import build_config
from sphkv.evaluation.environment import source_tree
from sphkv.evaluation.metrics.answers import FAILURES
from sphkv.evaluation.records import (
    RecordFile,
    content_id,
    load_records,
)
from sphkv.evaluation.sweep.config import SweepConfig
from sphkv.evaluation.sweep.grid import PointList, SweepRunner

SETUP = {"model": "m", "seed": 0}

KILLER = Path(__file__).parents[2] / "benchmarks" / "kill_sweep.py"


def test_killed_sweeps_resume_to_the_same_bytes(tiny_model_folder, tmp_path):
    out = tmp_path / "record.json"
    flags = ["--model", tiny_model_folder, "--folder", tmp_path, "--out", out]
    done = subprocess.run(
        [sys.executable, KILLER, *map(str, flags)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["interrupted"] >= 10, "the kills came too late to interrupt anything"
    assert found["num_points"] == 20

    whole = tmp_path / "whole" / "records.jsonl"
    records = load_records([whole])
    by_method = {(r["method"], r["budget"]): r for r in records if r["workload"] == "lm"}
    dense = by_method["dense", "100%"]
    assert dense["quality"]["kl"] < 1e-4
    assert dense["memory"]["b_kv"] >= dense["setup"]["dense_bytes_per_token"]
    assert by_method["spherical", "1%"]["status"] == "refused"
    assert "needs" in by_method["spherical", "1%"]["reason"]
    ours = by_method["spherical", "60%"]
    assert ours["memory"]["b_kv"] <= 0.6 * ours["setup"]["dense_bytes_per_token"]
    assert ours["memory"]["realisation"] == "kernel-realized"
    assert ours["times"]["num_measured"] == 2
    needles = [r for r in records if r["workload"] == "needle"]
    assert sorted({r["facets"]["depth"] for r in needles}) == [0.2, 0.8]


def test_an_unfinished_line_is_removed(tmp_path):
    path = tmp_path / "records.jsonl"
    with RecordFile(path) as file:
        file.begin_run(SETUP)
        file.append({"id": "a", "x": 1})
    before = path.read_bytes()
    path.write_bytes(before + b'{"kind":"point","id":"b"')
    assert [record["id"] for record in load_records([path])] == ["a"]
    with RecordFile(path) as file:
        assert file.done == {"a"}
        file.begin_run(SETUP)
        file.append({"id": "b", "x": 2})
    assert path.read_bytes().startswith(before)
    records = load_records([path])
    assert [record["id"] for record in records] == ["a", "b"]
    assert records[1]["setup"] == SETUP


def test_points_are_neither_doubled_nor_orphaned(tmp_path):
    path = tmp_path / "records.jsonl"
    with RecordFile(path) as file:
        with pytest.raises(ValueError, match="begin_run"):
            file.append({"id": "a"})
        file.begin_run(SETUP)
        file.append({"id": "a"})
        with pytest.raises(ValueError, match="point a is in"):
            file.append({"id": "a"})
        with pytest.raises(ValueError, match="another process"), RecordFile(path):
            pass
    twice = path.read_text().splitlines()
    path.write_text("\n".join([*twice, twice[-1]]) + "\n")
    with pytest.raises(ValueError, match="line 3: point a is there twice"):
        load_records([path])
    path.write_text('{"kind":"point","id":"z","run":"none"}\n')
    with pytest.raises(ValueError, match="names run none"):
        load_records([path])
    path.write_text("nonsense\n")
    with pytest.raises(ValueError, match="line 1, is no record"):
        load_records([path])


def test_another_setting_is_another_run(tmp_path):
    path = tmp_path / "records.jsonl"
    with RecordFile(path) as file:
        first = file.begin_run(SETUP)
        assert file.begin_run(SETUP) == first
        assert file.begin_run({**SETUP, "seed": 1}) != first
    assert len(path.read_text().splitlines()) == 2


def test_identity_ignores_the_order_of_keys():
    assert content_id({"a": 1, "b": [2]}) == content_id({"b": [2], "a": 1})
    assert content_id({"a": 1}) != content_id({"a": 2})


NEW = {"device": "cpu", "dtype": "float32", "backend": "native", "page_tokens": 32}


@pytest.mark.parametrize(
    ("name", "other"),
    [("device", "cuda"), ("dtype", "bfloat16"), ("backend", "reference"), ("page_tokens", 128)],
)
def test_a_point_of_another_place_is_another_point(tmp_path, name, other):
    identity = {"model": "m", "case": "c", **NEW}
    with RecordFile(tmp_path / "records.jsonl") as file:
        file.begin_run(SETUP)
        file.append({"id": content_id(identity), **identity})
        assert file.has(identity)
        assert not file.has({**identity, name: other})


def test_older_points_are_found_unless_their_run_says_otherwise(tmp_path):
    path, identity = tmp_path / "records.jsonl", {"model": "m", "case": "c"}
    said = {"device": "cuda", "dtype": "bfloat16 compute, bfloat16 dense pages"}
    with RecordFile(path) as file:
        file.begin_run({**SETUP, "substrate": said})
        file.append({"id": content_id(identity), **identity})
    with RecordFile(path) as file:
        place = {**NEW, "device": "cuda", "dtype": "bfloat16"}
        assert file.has({**identity, **place})
        # what the run does not say is unknown
        assert file.has({**identity, **place, "backend": "triton", "page_tokens": 128})
        assert not file.has({**identity, **place, "device": "cpu"})
        assert not file.has({**identity, **place, "dtype": "float32"})
        assert not file.has({**identity, **place, "case": "d"})


def test_a_record_names_its_source_as_git_does():
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip()

    tree = git("rev-parse", "--short=12", "HEAD:src/sphkv")
    if not tree or git("status", "--porcelain", "--", "src/sphkv"):
        pytest.skip("no git, or sources that are not committed")
    assert source_tree() == tree


def test_workloads_take_turns():
    from types import SimpleNamespace

    from sphkv.evaluation.sweep.config import LMWorkload, NeedleWorkload, SweepConfig

    def letters(text, **_):
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])

    config = SweepConfig(
        model="m",
        methods=("dense",),
        budgets=("9%",),
        lm=(LMWorkload(context=300, num_prompts=3, num_following=8),),
        needle=(NeedleWorkload(context=2000, depths=(0.2, 0.8), num_documents=2),),
    )
    kinds = "".join(case.workload[0] for case in config.cases(letters, None))
    assert kinds == "lnnlnnl"


def test_grids_that_make_no_sense_are_refused():
    from sphkv.core.configs import build_config
    from sphkv.evaluation.sweep.config import SweepConfig

    good = {
        "model": "m",
        "methods": ["dense", "h2o"],
        "budgets": ["20%", "30%"],
        "lm": [{"context": 512}],
    }
    config = build_config(SweepConfig, good)
    assert config.grid() == [("dense", "100%"), ("h2o", "20%"), ("h2o", "30%")]
    own = build_config(SweepConfig, {**good, "method_budgets": {"h2o": ["9%"]}})
    assert own.grid() == [("dense", "100%"), ("h2o", "9%")]
    for change, message in (
        ({"methods": []}, "at least one method"),
        ({"lm": []}, "at least one of lm"),
        ({"budgets": ["20%", "20%"]}, "budgets must differ"),
        ({"budgets": ["much"]}, "budget must look like"),
        ({"window": {"num_measured": 0}}, "measured >= 1"),
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"method_budgets": {"kivi": ["9%"]}}, "names 'kivi'"),
        ({"method_budgets": {"h2o": ["9%", "9%"]}}, "budgets of h2o must differ"),
    ):
        with pytest.raises(ValueError, match=message):
            build_config(SweepConfig, {**good, **change})


def test_answers_over_seeds(tiny_model_folder):
    grid = {
        "model": str(tiny_model_folder),
        "methods": ["dense", "streaming_llm"],
        "budgets": ["60%"],
        "calibration_tokens": 128,
        "num_seeds": 2,
        "needle": [{"context": 1500, "depths": [0.5], "max_new_tokens": 3}],
    }
    points = PointList()
    SweepRunner(build_config(SweepConfig, grid), keep=None, tell=lambda line: None).run(points)
    assert [record["method"] for record in points.records] == ["dense", "streaming_llm"]
    for record in points.records:
        quality = record["quality"]
        assert record["num_seeds"] == len(quality["sampled"]) == 2
        assert quality["s_traj"] == statistics.pvariance(quality["sampled"])
        # bytes drawn at random name no pass key, with either cache
        assert quality["sampled_reference"] == [0.0, 0.0]
        assert set(quality["failures"]) <= set(FAILURES)
    with pytest.raises(ValueError, match="num_seeds must be 0 or at least 2, got 1"):
        build_config(SweepConfig, {**grid, "num_seeds": 1})
