# SPDX-License-Identifier: Apache-2.0
"""``sphkv sweep``: a grid of methods, budgets and prompts, resumable."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphkv.evaluation.sweep.config import SweepConfig


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
    parser = commands.add_parser(
        "sweep",
        help="measure methods at several budgets; run again to go on after a kill",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="TOML file with the grid")
    parser.add_argument("--out", required=True, help="record file to write or to go on with")
    parser.add_argument("--data", help="data folder, or hub:DATASET; overrides the file")
    parser.add_argument("--model", help="overrides the file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure what is missing."""
    # imported late, so that `sphkv --help` needs no torch
    from sphkv.core.configs import resolve_config
    from sphkv.evaluation.sweep.config import SweepConfig

    flags: dict[str, Any] = {
        name: value for name in ("data", "model") if (value := getattr(args, name)) is not None
    }
    check_folder(Path(args.out))
    measure(resolve_config(SweepConfig, path=Path(args.config), flags=flags), Path(args.out))
    return 0


def check_folder(out: Path) -> None:
    """Fail before long work if a record file could not be written."""
    if not out.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {out.parent} to write {out.name} to")


def measure(config: SweepConfig, out: Path) -> None:
    """Measure the points of a grid that a record file lacks, and say how it goes."""
    from sphkv.evaluation.records import RecordFile
    from sphkv.evaluation.sweep.grid import SweepRunner

    check_folder(out)
    began = time.perf_counter()

    def tell(line: str) -> None:
        print(f"[{time.perf_counter() - began:6.0f} s] {line}", file=sys.stderr, flush=True)

    # prompts are read first, so that a grid that cannot be measured leaves no file
    runner = SweepRunner(config, keep=out.parent, tell=tell)
    with RecordFile(out) as file:
        summary = runner.run(file)
    print(
        f"{summary.num_measured} points measured ({summary.num_refused} refused), "
        f"{summary.num_known} known before, {summary.seconds:.0f} s: {out}"
    )
