# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sphkv.evaluation.records import (
    RecordFile,
    canonical_json,
    content_id,
    load_records,
    without_times,
)

SETUP = {"model": "m", "seed": 0}

GRID = """
model = {model!r}
methods = ["dense", "spherical", "streaming_llm"]
budgets = ["60%", "1%"]
num_threads = 1
backend = "reference"
calibration_tokens = 256

[window]
num_warm = 1
num_measured = 2

[[lm]]
context = 512
num_following = 8
num_prompts = 2

[[needle]]
context = 1500
depths = [0.2, 0.8]
max_new_tokens = 4
"""

# One process imports everything and then forks a child per attempt, which is killed at a random
# moment. One thread, because a fork does not carry the thread pool over.
KILLER = textwrap.dedent(
    """
    import os, random, signal, sys, time
    import torch
    torch.set_num_threads(1)
    import sphkv.evaluation.sweep.grid
    from sphkv.cli.main import main

    config, out, span = sys.argv[1], sys.argv[2], float(sys.argv[3])
    arguments = ["sweep", config, "--out", out]
    draw = random.Random(5)
    killed = 0
    for attempt in range(20):
        child = os.fork()
        if child == 0:
            os._exit(main(arguments))
        time.sleep(draw.uniform(0.0, span))
        os.kill(child, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    print(killed, flush=True)
    sys.exit(main(arguments))
    """
)


def stable_bytes(path: Path) -> bytes:
    """The file without times."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(canonical_json(without_times(json.loads(line))) for line in lines).encode()


def run_python(code: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_killed_sweeps_resume_to_the_same_bytes(tiny_model_folder, tmp_path):
    config = tmp_path / "grid.toml"
    config.write_text(GRID.format(model=str(tiny_model_folder)), encoding="utf-8")
    whole = tmp_path / "whole" / "records.jsonl"
    killed = tmp_path / "killed" / "records.jsonl"
    whole.parent.mkdir()
    killed.parent.mkdir()
    code = "import sys; from sphkv.cli.main import main; sys.exit(main(sys.argv[1:]))"
    assert "20 points measured" in run_python(code, "sweep", config, "--out", whole)
    number = int(run_python(KILLER, config, killed, 0.6).split()[0])
    assert number >= 10, "the kills came too late to interrupt anything"
    assert stable_bytes(killed) == stable_bytes(whole)
    again = run_python(code, "sweep", config, "--out", killed)
    assert "0 points measured (0 refused), 20 known before" in again

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
