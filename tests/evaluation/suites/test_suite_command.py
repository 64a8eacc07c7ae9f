# SPDX-License-Identifier: Apache-2.0
"""``sphkv suite``: make, run and board from the command line."""

import json
from pathlib import Path

import pytest

from sphkv.cli.main import main
from sphkv.evaluation.suites.samples import read_prompts


@pytest.fixture
def prompts(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """Two prompts of MiniLongBench's form, made by the command."""
    data = tmp_path / "data"
    data.mkdir()
    rows = [
        {
            "id": f"trec-{number}",
            "prompt": "Sort questions.\n" + "Question: how?\nType: Manner\n" * 30 + "Question: who "
            f"was number {number}?\nType:",
            "answers": ["Person"],
            "all_classes": ["Person", "Manner"],
        }
        for number in range(2)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (data / "trec.jsonl").write_text(text, encoding="utf-8")
    out = tmp_path / "prompts.jsonl"
    code = main(
        ["suite", "make", "longbench", "--model", str(tiny_model_folder), "--tasks", "trec",
         "--samples", "2", "--data", str(data), "--out", str(out)]
    )  # fmt: skip
    assert code == 0
    return out


def test_make_run_and_board(
    tiny_model_folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [s.sample_id for s in read_prompts(prompts).samples] == ["trec-0", "trec-1"]
    config = tmp_path / "board.toml"
    lines = [
        f'model = "{tiny_model_folder}"',
        'methods = ["dense", "joint"]',
        'budgets = ["50%"]',
        'modes = ["hidden"]',
        "num_threads = 1",
        "max_new_tokens = 3",
        f'prompts = ["{prompts}"]',
    ]
    config.write_text("\n".join(lines) + "\n", encoding="utf-8")
    records = tmp_path / "records.jsonl"
    assert main(["suite", "run", str(config), "--out", str(records)]) == 0
    assert "4 answers (0 refused, 0 failed), 0 left" in capsys.readouterr().out
    assert main(["suite", "run", str(config), "--out", str(records)]) == 0
    assert "0 answers" in capsys.readouterr().out
    assert main(["suite", "board", str(records)]) == 0
    # a random model classifies nothing, so the task is listed and not counted
    page = capsys.readouterr().out
    assert "| trec | natural | 0.0 | 2 | no |" in page
    assert main(["suite", "board", str(records), "--out", str(tmp_path / "page")]) == 0
    assert (tmp_path / "page" / "board.md").read_text(encoding="utf-8") == page.rstrip("\n") + "\n"


def test_wrong_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "r.jsonl")
    assert main(["suite", "run", "--out", out]) == 1
    assert "give a config file or --preset" in capsys.readouterr().err
    assert main(["suite", "run", "--preset", "tiny", "--out", out]) == 1
    assert "there is no preset 'tiny'" in capsys.readouterr().err
