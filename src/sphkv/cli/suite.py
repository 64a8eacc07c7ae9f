# SPDX-License-Identifier: Apache-2.0
"""``sphkv suite``: benchmarks with any cache: make prompts, run them, show the board."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sphkv.cli.output import check_writable

_MOST = 2**20


def _count(text: str) -> int:
    """A whole number from 1 to 1,048,576, as no loop of these commands is longer."""
    value = int(text)
    if not 1 <= value <= _MOST:
        raise argparse.ArgumentTypeError(f"must be 1 to {_MOST}, got {value}")
    return value


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
    parser = commands.add_parser("suite", help="benchmarks with any cache", allow_abbrev=False)
    steps = parser.add_subparsers(dest="step", required=True, metavar="STEP")
    _add_make(steps)
    _add_run(steps)
    _add_board(steps)
    _add_crosscheck(steps)
    _add_acceptance(steps)


def _add_make(steps: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = steps.add_parser("make", help="make a file of prompts", allow_abbrev=False)
    parser.add_argument("suite", choices=("ruler", "longbench", "gsm8k"))
    parser.add_argument("--model", required=True, help="whose tokenizer counts the tokens")
    parser.add_argument("--out", required=True, help="file to write")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of made prompts")
    parser.add_argument("--tasks", nargs="+", help="tasks of the suite; default: all")
    parser.add_argument("--samples", type=int, help="of every task and length; default: 50")
    parser.add_argument("--seed", type=int, help="draws what is drawn; default: 0")
    parser.add_argument("--data", help="MiniLongBench's folder, or GSM8K's file")
    parser.add_argument("--essays", help="folder of text files for RULER")
    parser.add_argument("--chat", action="store_true", help="use the model's chat template")
    parser.set_defaults(run=run_make)


def _add_run(steps: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = steps.add_parser(
        "run", help="answer the prompts; run again to go on after a kill", allow_abbrev=False
    )
    parser.add_argument("config", nargs="?", help="TOML file of the board")
    parser.add_argument("--preset", help="small-cpu or small-gpu instead of a file")
    parser.add_argument("--out", required=True, help="record file to write or to go on with")
    parser.add_argument("--model", help="overrides the file")
    parser.add_argument("--device", help="overrides the file")
    parser.add_argument("--prompts", nargs="+", help="files of prompts; override the file")
    parser.add_argument("--methods", nargs="+", help="overrides the file")
    parser.add_argument("--budgets", nargs="+", help="overrides the file")
    parser.add_argument("--lengths", type=int, nargs="+", help="overrides the file")
    parser.add_argument("--samples", type=int, help="most of each task and length")
    parser.add_argument("--modes", nargs="+", help="visible, hidden; override the file")
    parser.add_argument("--shard", help="part k/n of the samples, for one of n processes")
    parser.add_argument("--minutes", type=float, help="begin no new sample after so many minutes")
    parser.set_defaults(run=run_run)


def _add_board(steps: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = steps.add_parser("board", help="one page from records", allow_abbrev=False)
    parser.add_argument("records", nargs="+", help="files that `sphkv suite run` wrote")
    parser.add_argument("--out", help="folder for board.md and board.json; default: print")
    parser.set_defaults(run=run_board)


def _add_crosscheck(steps: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = steps.add_parser(
        "crosscheck", help="our eviction baselines against kvpress's code", allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="smollm2, a local folder or a hub name")
    parser.add_argument("--prompts", required=True, help="file of prompts")
    parser.add_argument("--samples", type=_count, default=2, help="prompts to compare on")
    parser.add_argument("--share", type=float, default=0.25, help="share of the states kept")
    parser.add_argument("--device", default="cpu")
    parser.set_defaults(run=run_crosscheck)


def _add_acceptance(steps: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = steps.add_parser(
        "acceptance", help="how often a draft's tokens are the target's", allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="the target")
    parser.add_argument("--draft", required=True, help="the draft; same tokens")
    parser.add_argument("--prompts", required=True, nargs="+", help="files of prompts")
    parser.add_argument(
        "--columns",
        nargs="+",
        default=["dense", "fp8=55%", "auto=25%", "auto=10%", "auto=5%"],
        help="methods with budgets; default: dense fp8=55%% auto=25%% auto=10%% auto=5%%",
    )
    parser.add_argument("--proposed", type=_count, default=4, help="tokens the draft proposes")
    parser.add_argument("--max-new-tokens", type=_count, default=256)
    parser.add_argument("--max-prompt-tokens", type=_count, help="longer prompts lose their middle")
    parser.add_argument("--samples", type=_count, help="most prompts of each task and length")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--out", required=True, help="record file to write or to go on with")
    parser.set_defaults(run=run_acceptance)


def _teller() -> Callable[[str], None]:
    began = time.perf_counter()

    def tell(line: str) -> None:
        print(f"[{time.perf_counter() - began:6.0f} s] {line}", file=sys.stderr, flush=True)

    return tell


def _given(args: argparse.Namespace, **fields: str) -> dict[str, Any]:
    """Flags that were given, by the config's names for them."""
    return {
        field: value for field, flag in fields.items() if (value := getattr(args, flag)) is not None
    }


def run_make(args: argparse.Namespace) -> int:
    """Make prompts."""
    check_writable(args.out)
    # imported late, so that `sphkv --help` needs no torch
    from sphkv.evaluation.suites.config import make_config
    from sphkv.evaluation.suites.run import make_prompt_file

    config = make_config(
        suite=args.suite,
        is_chat=args.chat,
        **_given(
            args,
            lengths="lengths",
            tasks="tasks",
            num_samples="samples",
            seed="seed",
            data="data",
            essays="essays",
        ),
    )
    made = make_prompt_file(config, args.model, Path(args.out), _teller())
    print(f"{len(made.samples)} prompts, set {made.set_id}: {args.out}")
    return 0


def run_run(args: argparse.Namespace) -> int:
    """Answer what is missing."""
    check_writable(args.out)
    from sphkv.evaluation.suites.config import load_suite_config
    from sphkv.evaluation.suites.records import SuiteFile
    from sphkv.evaluation.suites.run import SuiteRunner

    flags = _given(
        args,
        model="model",
        device="device",
        prompts="prompts",
        methods="methods",
        budgets="budgets",
        lengths="lengths",
        num_samples="samples",
        modes="modes",
        shard="shard",
    )
    path = None if args.config is None else Path(args.config)
    config = load_suite_config(path, args.preset, flags)
    out = Path(args.out)
    runner = SuiteRunner(config, keep=out.parent, tell=_teller())
    with SuiteFile(out) as file:
        done = runner.run(file, max_minutes=args.minutes or config.max_minutes)
    print(
        f"{done.num_measured} answers ({done.num_refused} refused, {done.num_failed} failed), "
        f"{done.num_left} left, {done.seconds:.0f} s: {out}"
    )
    return 1 if done.num_failed else 0


def run_board(args: argparse.Namespace) -> int:
    """Show the board."""
    from sphkv.evaluation.suites.board import build_board, write_board

    board = build_board([Path(name) for name in args.records])
    if args.out is None:
        print(board.markdown())
        return 0
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    for file in write_board(board, folder):
        print(file)
    return 0


def run_crosscheck(args: argparse.Namespace) -> int:
    """Compare what is kept."""
    from dataclasses import asdict

    from sphkv.cli.output import format_table
    from sphkv.evaluation.suites.run import cross_check_prompts

    rows = cross_check_prompts(
        args.model,
        Path(args.prompts),
        num_samples=args.samples,
        share=args.share,
        device=args.device,
    )
    columns = ("sample", "method", "share", "mean", "least", "aligned", "by_chance", "rank")
    print(format_table(columns, [{"sample": name, **asdict(row)} for name, row in rows]))
    return 0


def run_acceptance(args: argparse.Namespace) -> int:
    """Measure acceptance and print it."""
    check_writable(args.out)
    from sphkv.cli.output import format_table
    from sphkv.evaluation.suites.acceptance import AcceptanceRunner, acceptance_rows, parse_columns
    from sphkv.evaluation.suites.config import SuiteConfig
    from sphkv.evaluation.suites.records import SuiteFile, load_acceptances

    columns = parse_columns(args.columns)
    config = SuiteConfig(
        args.model,
        tuple(method for method, _ in columns),
        tuple(budget for _, budget in columns),
        prompts=tuple(Path(name) for name in args.prompts),
        num_samples=args.samples,
        device=args.device,
        dtype=args.dtype,
        max_prompt_tokens=args.max_prompt_tokens,
    )
    runner = AcceptanceRunner(config, args.draft, num_proposed=args.proposed, tell=_teller())
    with SuiteFile(Path(args.out)) as file:
        runner.run(file, columns, max_new_tokens=args.max_new_tokens)
    rows = acceptance_rows(load_acceptances([Path(args.out)]))
    names = ("method", "budget", "rate", "per_pass", "count", "peak_share")
    print(format_table(names, rows))
    return 0
