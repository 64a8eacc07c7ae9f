# SPDX-License-Identifier: Apache-2.0
"""``sphkv validate``: whether a record file holds what it must."""

from __future__ import annotations

import argparse
from pathlib import Path

_MOST_SHOWN = 40


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
    parser = commands.add_parser(
        "validate", help="check record files field by field; exit 1 at a fault", allow_abbrev=False
    )
    parser.add_argument("records", nargs="+", help="record files of sweeps and comparisons")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Name every fault by file, line and field."""
    from sphkv.evaluation.schema import validate_file

    is_bad = False
    for name in args.records:
        faults = validate_file(Path(name))
        for fault in faults[:_MOST_SHOWN]:
            print(f"{name}, {fault}")
        if len(faults) > _MOST_SHOWN:
            print(f"{name}: and {len(faults) - _MOST_SHOWN} more")
        if not faults:
            print(f"{name}: valid")
        is_bad |= bool(faults)
    return int(is_bad)
