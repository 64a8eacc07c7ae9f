# SPDX-License-Identifier: Apache-2.0
"""The ``sphkv`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sphkv import __version__
from sphkv.cli import (
    ablate,
    bench,
    calibrate,
    certify,
    compare,
    demo,
    eval_lm,
    eval_needle,
    eval_qa,
    eval_tools,
    frontier,
    generate,
    inspect,
    ls,
    plan,
    report,
    suite,
    sweep,
    validate,
)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

_EXPECTED_ERRORS = (ValueError, OSError, ImportError, RuntimeError)


def build_parser() -> argparse.ArgumentParser:
    """All sub-commands and their flags."""
    parser = argparse.ArgumentParser(
        prog="sphkv", description="A KV cache in spherical coordinates.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"sphkv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    evaluate = commands.add_parser("eval", help="measure quality", allow_abbrev=False)
    workloads = evaluate.add_subparsers(dest="workload", required=True, metavar="WORKLOAD")
    eval_lm.add_parser(workloads)
    eval_needle.add_parser(workloads)
    eval_qa.add_parser(workloads)
    eval_tools.add_parser(workloads)
    ablate.add_parser(commands)
    bench.add_parser(commands)
    calibrate.add_parser(commands)
    certify.add_parser(commands)
    compare.add_parser(commands)
    demo.add_parser(commands)
    frontier.add_parser(commands)
    generate.add_parser(commands)
    inspect.add_parser(commands)
    ls.add_parser(commands)
    plan.add_parser(commands)
    report.add_parser(commands)
    suite.add_parser(commands)
    sweep.add_parser(commands)
    validate.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; errors that a user can mend are one line on stderr.

    Returns:
        0 on success, 1 on failure; wrong flags exit with 2.
    """
    args = build_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("sphkv: interrupted", file=sys.stderr)
        return EXIT_FAILED
    except _EXPECTED_ERRORS as error:
        print(f"sphkv: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
