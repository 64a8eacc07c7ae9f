# SPDX-License-Identifier: Apache-2.0
"""``sphkv sweep`` and ``sphkv compare``: methods, budgets and prompts, measured resumably.

A sweep takes its grid from a file; a comparison takes the stretches of a split.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphkv.cli.output import format_table

if TYPE_CHECKING:
    from sphkv.evaluation.sweep.config import SweepConfig

_COMPARE_COLUMNS = (
    "method",
    "budget",
    "peak",
    "kl",
    "nll_delta",
    "same_top1",
    "prompts",
    "by_kl",
    "by_nll",
)


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``sweep`` and ``compare``."""
    _add_sweep(commands)
    _add_compare(commands)


def _add_sweep(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags of ``sweep``."""
    parser = commands.add_parser(
        "sweep",
        help="measure methods at several budgets; run again to go on after a kill",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="TOML file with the grid")
    parser.add_argument("--out", required=True, help="record file to write or to go on with")
    parser.add_argument("--data", help="data folder, or hub:DATASET; overrides the file")
    parser.add_argument("--model", help="overrides the file")
    parser.set_defaults(run=_run_sweep)


def _run_sweep(args: argparse.Namespace) -> int:
    """Measure what is missing."""
    # imported late, so that `sphkv --help` needs no torch
    from sphkv.core.configs import resolve_config
    from sphkv.evaluation.sweep.config import SweepConfig

    flags: dict[str, Any] = {
        name: value for name in ("data", "model") if (value := getattr(args, name)) is not None
    }
    _check_folder(Path(args.out))
    measure(resolve_config(SweepConfig, path=Path(args.config), flags=flags), Path(args.out))
    return 0


def _check_folder(out: Path) -> None:
    """Fail before long work if a record file could not be written."""
    if not out.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {out.parent} to write {out.name} to")


def measure(config: SweepConfig, out: Path) -> None:
    """Measure the points of a grid that a record file lacks, and say how it goes."""
    from sphkv.evaluation.records import RecordFile
    from sphkv.evaluation.sweep.grid import SweepRunner

    _check_folder(out)
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


def _add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags of ``compare``."""
    parser = commands.add_parser(
        "compare",
        help="methods at budgets on a split, token by token; run again to go on after a kill",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="smollm2, a local folder or a hub name")
    parser.add_argument("--data", required=True, help="data folder with pg19 and longbench")
    parser.add_argument("--out", required=True, help="record file to write or to go on with")
    parser.add_argument("--methods", default="dense,joint,spherical", help="names, see sphkv ls")
    parser.add_argument("--budgets", default="5%,10%,20%", help="byte budgets of all but dense")
    parser.add_argument("--split", default="development", help="development or test")
    parser.add_argument("--purpose", default="development", help="must be test for test data")
    parser.add_argument("--log", help="file that counts uses of test data; needed for these")
    parser.add_argument("--workload", default="lm", help="lm, needle or qa")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--following", type=int, default=512, help="tokens after a stretch")
    parser.add_argument("--count", type=int, default=0, help="most prompts; 0 takes all")
    parser.add_argument("--calibration-text", default="pg19/calibration/10046.txt")
    parser.add_argument("--calibration-tokens", type=int, default=4096)
    parser.add_argument("--policy", help="weights of the controller, by sphkv fit-policy")
    parser.add_argument("--prefill-device", default="cpu", help="where prompts are read")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 leaves its default")
    parser.set_defaults(run=_run_compare)


def _run_compare(args: argparse.Namespace) -> int:
    """Measure what is missing and print the means."""
    from sphkv.core.configs import build_config
    from sphkv.evaluation.records import load_records
    from sphkv.evaluation.report.markdown import comparison_rows
    from sphkv.evaluation.sweep.config import SweepConfig

    part: dict[str, Any] = {
        "length": args.length,
        "split": args.split,
        "purpose": args.purpose,
        "workload": args.workload,
        "count": args.count,
        "num_following": args.following,
    }
    if args.log is not None:
        part["log"] = args.log
    settings: dict[str, Any] = {
        "model": args.model,
        "data": args.data,
        "methods": args.methods.split(","),
        "budgets": args.budgets.split(","),
        "calibration_text": args.calibration_text,
        "calibration_tokens": args.calibration_tokens,
        "num_threads": args.threads,
        "prefill_device": args.prefill_device,
        "split": [part],
    }
    if args.policy is not None:
        settings["policy"] = args.policy
    measure(build_config(SweepConfig, settings), Path(args.out))
    if args.workload == "lm":
        rows = comparison_rows(load_records([Path(args.out)]))
        print(format_table(_COMPARE_COLUMNS, rows))
    return 0
