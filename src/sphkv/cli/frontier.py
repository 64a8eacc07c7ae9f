# SPDX-License-Identifier: Apache-2.0
"""``sphkv frontier``: what a sweep's records say at equal quality."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sphkv.cli.output import check_writable, format_table, write_json

COLUMNS = (
    "method", "retained", "least_b_kv", "share", "star_budget", "star_b_kv", "star_tok_s",
    "gamma_s", "gamma_m", "gamma_m_iso", "r_iso_s", "realisation",
)  # fmt: skip


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
    parser = commands.add_parser(
        "frontier", help="iso-quality frontiers of a sweep's records", allow_abbrev=False
    )
    add_record_flags(parser)
    parser.add_argument("--out", help="file for the JSON result")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def add_record_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say which records and how much quality may be lost."""
    parser.add_argument("records", nargs="+", help="record files of sweeps")
    parser.add_argument("--delta", type=float, default=0.8, help="points of 100 below dense")
    parser.add_argument("--kl", type=float, default=0.05, help="nats, for language modelling")
    parser.add_argument("--quality", help="field to judge by, such as agreement_f1")


def run(args: argparse.Namespace) -> int:
    """Print one table per panel."""
    check_writable(args.out)
    from sphkv.evaluation.frontier.envelope import build_frontier, frontier_rows, winner
    from sphkv.evaluation.frontier.points import build_panels
    from sphkv.evaluation.records import load_records

    records = load_records([Path(path) for path in args.records])
    panels = build_panels(records, delta=args.delta, kl=args.kl, quality_field=args.quality)
    result = []
    for panel in panels:
        frontier = build_frontier(panel)
        rows, best = frontier_rows(frontier), winner(frontier)
        key = panel.key
        result.append(
            {
                "model": key.model,
                "workload": key.workload,
                "context": key.context,
                "tolerance": panel.tolerance,
                "unit": panel.unit,
                "least_b_kv": None if best is None else {"method": best[0], "margin": best[1]},
                "methods": rows,
                "left_out": list(panel.left_out),
                "refused": [list(refusal) for refusal in panel.refused],
            }
        )
        if not args.json:
            print(f"\n{key.model}, {key.workload}, {key.context} tokens: ", end="")
            print(f"within {panel.tolerance:g} {panel.unit} of dense")
            print(format_table(COLUMNS, rows))
            if panel.left_out:
                print(f"{len(panel.left_out)} prompts are not finished and were left out")
            if not frontier.is_informative:
                print("dense itself scores nothing here: no method can be told from another")
            if best is not None:
                margin = "no other retained" if best[1] is None else f"next needs {best[1]:.2f}x"
                print(f"least bytes at equal quality: {best[0]} ({margin})")
    if args.out:
        write_json(args.out, result)
    if args.json:
        print(json.dumps(result, indent=2))
    return 0
