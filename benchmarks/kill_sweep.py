# SPDX-License-Identifier: Apache-2.0
"""Kill a sweep at random moments, resume it every time, and compare its records with a whole run.

    python benchmarks/kill_sweep.py --model FOLDER --folder WORK --out results/sweep/kill-test.json

A small generated grid runs once undisturbed. Then it runs into another file and is killed again and
again before it is left to finish. Times aside, both files must have the same bytes.
"""

import argparse
import hashlib
import importlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from sphkv.cli.main import main as sphkv
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.records import canonical_json, load_records, without_times

_POLL_S = 0.002

GRID = """
model = {model}
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


def stable_bytes(path: Path) -> bytes:
    """A record file without times."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(canonical_json(without_times(json.loads(line))) for line in lines).encode()


def start(arguments: list[str]) -> int:
    """A child process that runs a command; everything is imported already."""
    child = os.fork()
    if child == 0:
        os._exit(sphkv(arguments))
    return child


def run_whole(arguments: list[str]) -> float:
    """Seconds that a command takes when nothing disturbs it."""
    began = time.perf_counter()
    status = os.waitpid(start(arguments), 0)[1]
    if status:
        raise RuntimeError(f"sphkv {' '.join(arguments)} ended with status {status}")
    return time.perf_counter() - began


def kill_after(arguments: list[str], file: Path, num_lines: int, delay_s: float) -> bool:
    """Kill a command some time after its file has so many lines; whether that interrupted it."""
    child = start(arguments)
    while count_lines(file) < num_lines:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(_POLL_S)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def count_lines(file: Path) -> int:
    """Whole lines of a file that may not be there yet."""
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def examine(model: str, folder: Path, kills: int, seed: int) -> dict[str, object]:
    """Both runs, and whether they agree."""
    config = folder / "grid.toml"
    config.write_text(GRID.format(model=json.dumps(model)), encoding="utf-8")
    files = {name: folder / name / "records.jsonl" for name in ("whole", "killed")}
    for file in files.values():
        file.parent.mkdir()
    commands = {name: ["sweep", str(config), "--out", str(file)] for name, file in files.items()}
    whole_s = run_whole(commands["whole"])
    num_points = len(load_records([files["whole"]]))
    draw = random.Random(seed)
    # a random line of the file, and from there a random part of the time that a few points take
    lines = sorted(draw.randrange(num_points) for _ in range(kills))
    moments = [(line, draw.uniform(0.0, 3 * whole_s / num_points)) for line in lines]
    interrupted = sum(kill_after(commands["killed"], files["killed"], *at) for at in moments)
    points_before = len(load_records([files["killed"]]))
    run_whole(commands["killed"])
    whole, killed = (stable_bytes(files[name]) for name in ("whole", "killed"))
    return {
        "kills": kills,
        "interrupted": interrupted,
        "seed": seed,
        "kill_moments": [[line, round(delay_s, 3)] for line, delay_s in moments],
        "num_points": len(load_records([files["killed"]])),
        "points_when_last_killed": points_before,
        "is_identical": whole == killed,
        "sha256": hashlib.sha256(killed).hexdigest(),
        "whole_s": round(whole_s, 3),
    }


def main() -> int:
    """Write the record; 1 if the files differ."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="a small local model folder")
    parser.add_argument("--folder", required=True, help="empty folder for both record files")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--out", required=True, help="file for the JSON record")
    args = parser.parse_args()
    # a commit made meanwhile is not the code that runs; children take over what is found here
    environment = describe_environment()
    # one thread, because a fork does not carry the thread pool over
    torch.set_num_threads(1)
    # imported here, so that a child starts at once
    importlib.import_module("sphkv.evaluation.sweep.grid")
    found = examine(args.model, Path(args.folder), args.kills, args.seed)
    record = {
        "command": f"python benchmarks/kill_sweep.py --model MODEL --kills {args.kills} "
        f"--seed {args.seed}",
        "grid": GRID.strip().splitlines(),
        **found,
        "environment": environment,
    }
    Path(args.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(
        f"{found['interrupted']} of {args.kills} kills interrupted the sweep; "
        f"{found['num_points']} points, identical: {found['is_identical']}"
    )
    return 0 if found["is_identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
