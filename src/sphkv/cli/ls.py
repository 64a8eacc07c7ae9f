# SPDX-License-Identifier: Apache-2.0
"""``sphkv ls``: what can be named."""

from __future__ import annotations

import argparse

from sphkv.cli.output import format_table

KINDS = ("methods", "workloads", "backends", "tiers", "splits")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
    parser = commands.add_parser(
        "ls", help="methods, workloads, backends, tiers or splits", allow_abbrev=False
    )
    parser.add_argument("kind", help=", ".join(KINDS))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one table."""
    from sphkv.evaluation.catalog import list_names
    from sphkv.evaluation.names import check_name

    rows = list_names(check_name("list", args.kind, KINDS))
    print(format_table(tuple(rows[0]), rows))
    return 0
