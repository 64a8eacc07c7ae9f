# SPDX-License-Identifier: Apache-2.0
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
