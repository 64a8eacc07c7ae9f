# SPDX-License-Identifier: Apache-2.0
"""What takes the GPU's records: its jobs are real commands, and it says how each one ended."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def records() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_records", FOLDER / "gpu_records.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    sys.modules["gpu_records"] = module
    spec.loader.exec_module(module)
    return module


def test_every_job_is_a_script_with_the_options_it_is_given(records: Any) -> None:
    for job in records.JOBS.values():
        script, *words = job.command.split()
        text = (FOLDER / script).read_text(encoding="utf-8")
        options = [job.output, "--commit", *(word for word in words if word.startswith("--"))]
        for option in options:
            assert re.search(rf'"{option}"', text), (script, option)
    assert len({job.record for job in records.JOBS.values()}) == len(records.JOBS)


def test_what_ran_is_logged_and_what_is_done_is_not_run_again(
    records: Any, monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "good.py").write_text(
        "import sys, pathlib; pathlib.Path(sys.argv[2]).write_text(sys.argv[4])"
    )
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    jobs = {
        "good": records.Job("good.json", "good.py"),
        "asks": records.Job("asks.json", "good.py {model}"),
        "bad": records.Job("bad.json", "bad.py"),
        "slow": records.Job("slow.json", "slow.py"),
        "late": records.Job("late.json", "good.py"),
    }
    monkeypatch.setattr(records, "HERE", tmp_path)
    monkeypatch.setattr(records, "JOBS", jobs)
    out = tmp_path / "out"
    given = ["gpu_records.py", "--commit", "abc", "--output", str(out), "--seconds", "4"]
    monkeypatch.setattr(sys, "argv", given)
    assert records.main() == 1
    assert (out / "good.json").read_text() == "abc"
    log = json.loads((out / "log.json").read_text())
    assert {name: each["rc"] for name, each in log.items()} == {"good": 0, "bad": 3, "slow": None}
    assert "asks: needs model" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*given, "--only", "good", "late"])
    assert records.main() == 0
    assert "good: done" in capsys.readouterr().out
    assert (out / "late.json").exists()
