# SPDX-License-Identifier: Apache-2.0
"""A1 step by step: attention by look-ups against a kernel that rebuilds pages inside its loop.

    python benchmarks/native_rebuild.py smollm2 DATA --policy POLICY --out a1-steps.json

Both caches hold the same decision about the same prompt, dense pages beside them, and take turns
token by token on one thread. Processor time, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.runner.session import ReadCase, Session
from sphkv.evaluation.splits import open_split

METHODS = ("joint", "joint:rebuild", "dense")
CALIBRATION = "pg19/calibration/10046.txt"


class ProcessorClock:
    """Adds up processor seconds inside a cache, in the place of the harness's own clock.

    Attributes:
        seconds: Since they were last set to 0.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, call: Callable[[], Any]) -> Any:
        """What a call returns."""
        began = time.process_time()
        found = call()
        self.seconds += time.process_time() - began
        return found


def main() -> None:
    """Measure every budget and write one record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="smollm2, a local folder or a hub name")
    parser.add_argument("data", type=Path, help="folder with pg19")
    parser.add_argument("--policy", type=Path, help="the controller's weights")
    parser.add_argument("--length", type=int, default=7680, help="tokens of the prompt")
    parser.add_argument("--budgets", default="10%,20%,40%", help="byte budgets")
    parser.add_argument("--steps", type=int, default=64, help="tokens after the prompt")
    parser.add_argument("--keep", type=Path, help="folder that keeps the codebooks")
    parser.add_argument("--out", type=Path, required=True, help="file for the record")
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = args.data / CALIBRATION
    session = Session(args.model, calibration_text=text, keep=args.keep, policy=args.policy)
    split = open_split("development", args.data, purpose="development")
    (case,) = split.stretches(
        session.tokenizer, length=args.length, num_following=args.steps, part=slice(1)
    )
    read = session.reader.read(case)
    rows: list[dict[str, Any]] = []
    for budget in args.budgets.split(","):
        rows.append({"budget": budget, **time_steps(session, read, budget)})
        print(json.dumps(rows[-1]), flush=True)
        record = {
            "case": case.case_id,
            "model": args.model,
            "steps": args.steps,
            "calibration": session.calibration_id,
            "policy": session.policy_id,
            "environment": describe_environment(),
            "rows": rows,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def time_steps(session: Session, read: ReadCase, budget: str) -> dict[str, Any]:
    """Milliseconds inside each cache, and how much longer rebuilding takes, step against step."""
    ids = read.states.following
    subjects: dict[str, Any] = {}
    for name in METHODS:
        subjects[name] = session.factory.make(
            name, budget, context=read.case.context, num_new=ids.shape[1], work=read.work
        )
        subjects[name].store_prompt(read.states)
        subjects[name].engine.clock = ProcessorClock()
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    for at in range(ids.shape[1]):
        turn = at % len(METHODS)
        for name in (*METHODS[turn:], *METHODS[:turn]):
            seconds[name].append(subjects[name].feed(ids[:, at : at + 1]).attend_s)
    ratios = [b / a for a, b in zip(seconds["joint"], seconds["joint:rebuild"], strict=True)]
    return {
        "attend_ms": {name: 1e3 * statistics.median(found) for name, found in seconds.items()},
        "least_ms": {name: 1e3 * min(found) for name, found in seconds.items()},
        "rebuild_over_lookup": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2],
        "resident": {name: subject.resident_bytes() for name, subject in subjects.items()},
    }


if __name__ == "__main__":
    main()
