# SPDX-License-Identifier: Apache-2.0
"""Every flag of every command with bad values: one line of explanation, no file left behind."""

import argparse
import gzip
import json

import pytest

from sphkv.cli.main import build_parser, main
from sphkv.evaluation.suites.samples import PromptSet, Sample

# A command line that works for every command; PLACES are filled in from fixtures.
COMMANDS = {
    "eval lm": ["--model", "MODEL", "--text", "TEXT", "--context", "300", "--out", "OUT"],
    "eval needle": ["--model", "MODEL", "--method", "dense", "--context", "512", "--out", "OUT"],
    "eval qa": ["--model", "MODEL", "--method", "dense", "--context", "512", "--out", "OUT"],
    "eval tools": ["--model", "MODEL", "--method", "dense", "--tasks", "1", "--out", "OUT"],
    "ablate": ["a3", "--model", "MODEL", "--data", "DATA", "--length", "1024", "--out", "OUT"],
    "fit-policy": ["--model", "MODEL", "--data", "DATA", "--policy-out", "OUT"],
    "bench decode": ["--context", "512", "--repeats", "1", "--out", "OUT"],
    "bench llama": ["--gguf", "TEXT", "--out", "OUT"],
    "bench serve": ["--model", "MODEL", "--text", "TEXT", "--requests", "1", "--out", "OUT"],
    "calibrate": ["--model", "MODEL", "--text", "TEXT", "--tokens", "256", "--out", "OUT"],
    "certify": ["--model", "MODEL", "--budget", "50%", "--context", "512", "--out", "OUT"],
    "compare": [
        *("--model", "MODEL", "--data", "DATA", "--methods", "dense", "--length", "1024"),
        *("--out", "OUT"),
    ],
    "demo": ["--model", "MODEL", "--context", "1024", "--budget", "60%", "--report", "OUT"],
    "frontier": ["TEXT", "--out", "OUT"],
    "generate": ["--model", "MODEL", "--prompt-file", "TEXT", "--max-new-tokens", "2"],
    "inspect": ["--model", "MODEL", "--prompt-file", "TEXT", "--map", "OUT"],
    "ls": ["methods"],
    "plan": ["--model", "MODEL", "--prompt-file", "TEXT", "--budget", "50%", "--out", "OUT"],
    "report": ["TEXT", "--out", "OUT"],
    "suite acceptance": [
        *("--model", "MODEL", "--draft", "MODEL", "--prompts", "PROMPTS", "--columns", "dense"),
        *("--max-new-tokens", "2", "--out", "OUT"),
    ],
    "suite board": ["TEXT", "--out", "OUT"],
    "suite crosscheck": ["--model", "MODEL", "--prompts", "PROMPTS"],
    "suite make": ["gsm8k", "--model", "MODEL", "--data", "PROBLEMS", "--out", "OUT"],
    "suite run": [
        *("--model", "MODEL", "--prompts", "PROMPTS", "--methods", "dense", "--out", "OUT"),
    ],
    "sweep": ["TEXT", "--out", "OUT"],
    "tune-policy": ["TEXT", "--policy-out", "OUT"],
    "validate": ["TEXT"],
}
JUNK = ("", "-1", "0", "nan", "inf", "1e99", "99999999999999999999", "k2", "%", "\0", "é\n", "DIR")
# Enough for commands that load a model before they look at every flag.
SOME_JUNK = ("", "-1", "nan", "\0")
SLOW = (
    *("eval needle", "eval qa", "eval tools", "ablate", "fit-policy", "certify", "plan"),
    *("suite acceptance", "suite crosscheck", "suite run"),
)
# A file may have almost any name.
BAD_OUTPUTS = ("", "\0", "DIR", "absent/out")
OUTPUTS = ("--out", "--policy-out", "--report", "--map", "--save-cache", "--png", "--html")
# Junk that a flag rightly takes: a demo makes its folder, a huge budget is no limit, zero new
# tokens only fill a cache.
FINE = {
    ("generate", "--max-new-tokens", "0"),
    ("generate", "--budget", "99999999999999999999"),
    ("inspect", "--budget", "99999999999999999999"),
    ("demo", "--report", "absent/out"),
    ("demo", "--budget", "99999999999999999999"),
    ("eval needle", "--seed", "-1"),
    ("eval qa", "--seed", "-1"),
    ("eval tools", "--seed", "-1"),
    ("eval lm", "--offset", "0"),
    ("eval lm", "--dense-tokens", "0"),
}


def leaves(parser: argparse.ArgumentParser, name: str = ""):
    """Every command that can run, with its parser."""
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not groups:
        yield name.strip(), parser
    for group in groups:
        for word, sub in group.choices.items():
            yield from leaves(sub, f"{name} {word}")


def flags():
    """Every flag that takes a value, but those that take any text."""
    for name, parser in leaves(build_parser()):
        for action in parser._actions:
            if action.option_strings and action.nargs != 0 and action.dest != "prompt":
                yield name, action.option_strings[-1]


def test_every_command_is_tried():
    assert {name for name, _ in leaves(build_parser())} == set(COMMANDS)


@pytest.fixture(autouse=True, scope="module")
def one_parser():
    """Thousands of lines are parsed here; a parser is made of all commands, and keeps nothing."""
    parser = build_parser()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sphkv.cli.main.build_parser", lambda: parser)
        yield


@pytest.fixture
def fill(model_folder, text_file, tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (tmp_path / "folder").mkdir()
    sample = Sample("ruler", "one", "one-0", 0, "The word is blue.", "Word?", ("blue",), "all", 2)
    PromptSet((sample,), "words").write(tmp_path / "prompts.jsonl")
    doc = {"question": "How many are 2 and 3?", "answer": "2 + 3 = 5\n#### 5"}
    rows = "\n".join(json.dumps({"doc": doc, "doc_id": at, "idx": 0}) for at in range(60))
    (tmp_path / "problems.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    places = {
        "PROMPTS": str(tmp_path / "prompts.jsonl"),
        "PROBLEMS": str(tmp_path / "problems.jsonl.gz"),
        "MODEL": str(model_folder),
        "TEXT": str(text_file),
        "OUT": str(work / "out"),
        "DIR": str(tmp_path / "folder"),
        "DATA": str(text_file.parent),
    }

    def fill(argv):
        return [places.get(word, word) for word in argv]

    return fill


def run(argv, capsys):
    """Exit status and what was said."""
    status: object
    try:
        status = main(argv)
    except SystemExit as stopped:
        status = stopped.code
    except Exception as error:
        pytest.fail(f"{argv} let {type(error).__name__} escape: {error}")
    return status, capsys.readouterr().err


@pytest.mark.parametrize(("command", "flag"), sorted(flags()))
def test_bad_value(command, flag, fill, capsys, tmp_path):
    base = COMMANDS[command]
    if flag in base:
        at = base.index(flag)
        base = base[:at] + base[at + 2 :]
    junk_values = SOME_JUNK if command in SLOW else JUNK
    for junk in BAD_OUTPUTS if flag in OUTPUTS else junk_values:
        if (command, flag, junk) in FINE:
            continue
        argv = fill([*command.split(), *base, flag, junk])
        status, said = run(argv, capsys)
        assert status in (1, 2), f"{argv} exits with {status}"
        assert "sphkv" in said, f"{argv} says {said!r}"
        assert "Traceback" not in said, said
        assert list((tmp_path / "work").iterdir()) == [], f"{argv} left a file"
        assert list((tmp_path / "folder").iterdir()) == [], f"{argv} wrote into a folder"


@pytest.mark.parametrize("kind", ["text", "empty", "cut"])
def test_damaged_files(kind, fill, capsys, tmp_path, model_folder):
    damaged = tmp_path / "damaged"
    weights = (model_folder / "model.safetensors").read_bytes()
    damaged.write_bytes({"text": b"no file of ours", "empty": b"", "cut": weights[:999]}[kind])
    commands = [
        ["eval", "lm", *COMMANDS["eval lm"], "--calibration", str(damaged)],
        ["generate", *COMMANDS["generate"], "--calibration", str(damaged)],
        ["inspect", "--cache", str(damaged)],
        ["inspect", "--cache", str(tmp_path / "absent")],
    ]
    for argv in commands:
        status, said = run(fill(argv), capsys)
        assert status == 1
        assert said.strip().splitlines()[-1].startswith("sphkv: "), said
        assert list((tmp_path / "work").iterdir()) == []
