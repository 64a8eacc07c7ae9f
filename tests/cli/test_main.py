# SPDX-License-Identifier: Apache-2.0
"""The commands, end to end on a tiny model."""

import json

import pytest

from sphkv.cli.main import main
from sphkv.cli.output import check_writable, format_table, write_json


def lm(*extra):
    return ["eval", "lm", "--model", "smollm2", "--context", "64", *extra]


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["frobnicate"],
        ["eval"],
        ["eval", "lm"],
        ["eval", "lm", "--model", "smollm2"],
        ["eval", "lm", "--modle", "smollm2"],
        lm("--text", "x", "--context", "many"),
        lm("--text", "x", "--key-bits", "two"),
        ["bench", "decode", "--bits", "2.25"],
        ["bench", "decode", "--bits", "a,b"],
        ["generate", "--model", "smollm2"],
        ["generate", "--model", "smollm2", "--prompt", "a", "--prompt-file", "b"],
        ["calibrate", "--model", "smollm2"],
    ],
)
def test_wrong_flags_exit_with_usage(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert "usage: sphkv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (lm("--text", "x", "--method", "magic"), "'magic'"),
        (lm("--text", "x", "--context", "1"), "got 1"),
        (lm("--text", "x", "--offset", "-3"), "got -3"),
        (lm("--text", "x", "--out", "no/such/folder/r.json"), "no folder no/such/folder"),
        (["bench", "decode", "--geometry", "cube"], "'cube'"),
        (["bench", "decode", "--context", "3"], "got 3"),
        (["bench", "decode", "--backend", "warp", "--context", "512"], "'warp'"),
        (["bench", "decode", "--threads", "0"], "got 0"),
        (["bench", "decode", "--device", "abacus"], "'abacus'"),
        (["demo", "--context", "5"], "got 5"),
        (["calibrate", "--model", "smollm2", "--text", "x", "--out", "y", "--tokens", "7"], "7"),
        (["generate", "--model", "smollm2", "--prompt-file", "absent.txt"], "absent.txt"),
        (
            ["generate", "--model", "smollm2", "--prompt", "a", "--budget", "1%", "--tier", "k2v3"],
            "not both",
        ),
    ],
)
def test_bad_values_are_named_and_nothing_is_written(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 1
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith("sphkv: ")
    assert "Traceback" not in said.err
    assert list(tmp_path.iterdir()) == []


def test_unknown_model_says_how_to_get_one(capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("words " * 50, encoding="utf-8")
    argv = ["eval", "lm", "--model", str(tmp_path / "nothing"), "--text", str(text)]
    assert main([*argv, "--context", "8"]) == 1
    assert "nothing" in capsys.readouterr().err


def test_json_files_appear_whole(tmp_path):
    path = tmp_path / "r.json"
    write_json(path, {"a": 1.5})
    assert json.loads(path.read_text()) == {"a": 1.5}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1.5}
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(IsADirectoryError):
        check_writable(tmp_path)


def test_table():
    table = format_table(("name", "x"), [{"name": "a", "x": 0.123456}, {"name": "long", "x": None}])
    assert table.splitlines() == ["name  x", "----  ------", "a     0.1235", "long  -"]


def test_saved_cache_is_inspected_without_its_model(model_folder, text_file, tmp_path, capsys):
    folder, picture = tmp_path / "cache", tmp_path / "map.png"
    prompt = ["--model", str(model_folder), "--prompt-file", str(text_file)]
    argv = ["generate", *prompt, "--tier", "k2v3", "--max-new-tokens", "3", "--json"]
    assert main([*argv, "--save-cache", str(folder)]) == 0
    made = json.loads(capsys.readouterr().out)
    assert main(["inspect", "--cache", str(folder), "--map", str(picture), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == made["tokens"]
    assert found["ledger"]["payload"] == made["ledger"]["payload"]
    assert found["tier"] == "k2v3"
    for row in found["histogram"]:
        assert sum(row[name] for name in found["tiers"]) == found["tokens"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["inspect", "--cache", str(folder)]) == 0
    assert "k2v3" in capsys.readouterr().out


def test_a_cache_and_a_prompt_are_not_both_inspected(model_folder, tmp_path, capsys):
    assert main(["inspect", "--cache", str(tmp_path), "--model", str(model_folder)]) == 1
    assert "not both" in capsys.readouterr().err
    assert main(["inspect"]) == 1
    assert "--cache" in capsys.readouterr().err


def test_retention_stays_below_its_budget(model_folder, text_file, capsys):
    argv = ["generate", "--model", str(model_folder), "--prompt-file", str(text_file), "--json"]
    argv += ["--max-new-tokens", "3"]
    assert main([*argv, "--retention", "--budget", "70%"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["residency"] == "retention"
    assert made["b_kv"] <= 0.7 * made["dense_b_kv"]
    assert main([*argv, "--no-retention", "--budget", "90%"]) == 0
    assert json.loads(capsys.readouterr().out)["residency"] == "uniform"


def test_the_controller_needs_a_budget_and_its_settings_need_it(text_file, capsys):
    argv = ["generate", "--model", "nowhere", "--prompt-file", str(text_file)]
    assert main([*argv, "--retention", "--tier", "k2v3"]) == 1
    assert "k2v3" in capsys.readouterr().err
    assert main([*argv, "--gate"]) == 1
    assert "retention" in capsys.readouterr().err
    assert main([*argv, "--no-retention", "--policy", "policy.json"]) == 1
    assert "policy.json" in capsys.readouterr().err
