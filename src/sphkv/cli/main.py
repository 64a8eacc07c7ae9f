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
    evaluate,
    generate,
    inspect,
    suite,
    sweep,
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
    # as they are listed: try it, use it, measure it, read what was measured
    for module in (generate, inspect, evaluate, sweep, suite, ablate, bench):
        module.add_parsers(commands)
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
