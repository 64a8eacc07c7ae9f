# SPDX-License-Identifier: Apache-2.0
"""What ``sphkv eval qa`` and ``sphkv eval needle`` share."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from sphkv.cli.output import check_writable, format_table, write_json

if TYPE_CHECKING:
    from sphkv.evaluation.sweep.config import SweepConfig

COLUMNS = ("case", "method", "budget", "context", "answer", "f1", "found", "kl", "b_kv", "tok_s")


def add_point_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of one operating point."""
    parser.add_argument("--model", required=True, help="smollm2, a local folder or a hub name")
    parser.add_argument("--method", default="spherical", help="dense, ours, or a baseline")
    parser.add_argument("--budget", default="25%", help="byte budget of the cache")
    parser.add_argument("--context", type=int, required=True, help="most tokens of a prompt")
    parser.add_argument("--data", help="data folder, or hub:DATASET; made-up texts without it")
    parser.add_argument("--calibration-text", help="text to calibrate on; default: made up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="file for the JSON records")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def point_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The flags as fields of a sweep with one point."""
    settings = {
        "model": args.model,
        "methods": [args.method],
        "budgets": [args.budget],
        "seed": args.seed,
    }
    if args.data is not None:
        settings["data"] = args.data
    if args.calibration_text is not None:
        settings["calibration_text"] = args.calibration_text
    return settings


def measure_and_print(args: argparse.Namespace, config: SweepConfig) -> int:
    """Run a small sweep in memory and print its points."""
    check_writable(args.out)
    from sphkv.evaluation.sweep.grid import PointList, SweepRunner

    points = PointList()
    SweepRunner(config, keep=None, tell=lambda line: print(line, file=sys.stderr)).run(points)
    refused = [record["reason"] for record in points.records if record["status"] == "refused"]
    if refused:
        raise ValueError(f"{len(refused)} of {len(points.records)} points refused: {refused[0]}")
    if args.out:
        write_json(args.out, points.records)
    if args.json:
        print(json.dumps(points.records, indent=2))
    else:
        print(format_table(COLUMNS, [_row(record) for record in points.records]))
    return 0


def _row(record: dict[str, Any]) -> dict[str, Any]:
    row = {**record, **(record["quality"] or {}), **(record["memory"] or {})}
    return {**row, **(record["times"] or {})}
