# SPDX-License-Identifier: Apache-2.0
"""``sphkv eval tools``: bounded SQL episodes at one operating point, against dense."""

from __future__ import annotations

import argparse
import json
import sys

from sphkv.cli.output import check_writable, format_table, write_json


def add_parser(workloads: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
    parser = workloads.add_parser(
        "tools", help="SQL episodes against a database in memory", allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="smollm2, a local folder or a hub name")
    parser.add_argument("--method", default="spherical", help="ours or a baseline")
    parser.add_argument("--budget", default="40%", help="byte budget of the cache")
    parser.add_argument("--data", help="data folder; made-up tasks without it")
    parser.add_argument("--tasks", type=int, default=4, help="how many")
    parser.add_argument("--rows", type=int, default=40, help="most rows of a table in the prompt")
    parser.add_argument("--out", help="file for the JSON record")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure one point."""
    check_writable(args.out)
    from sphkv.evaluation.eval_tools import ToolsConfig, run_tools

    config = ToolsConfig(
        model=args.model,
        method=args.method,
        budget=args.budget,
        data=args.data,
        num_tasks=args.tasks,
        most_rows=args.rows,
    )
    record = run_tools(config, lambda line: print(line, file=sys.stderr, flush=True))
    if args.out:
        write_json(args.out, record)
    if args.json:
        print(json.dumps(record, indent=2))
    else:
        rows = [
            {"figure": name, "value": value}
            for name, value in record["summary"].items()
            if name != "failures"
        ]
        print(format_table(("figure", "value"), rows))
    return 0
