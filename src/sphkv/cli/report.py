# SPDX-License-Identifier: Apache-2.0
"""``sphkv report``: a sweep's records as one page, a table and a picture."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sphkv.cli.frontier import add_record_flags
from sphkv.cli.output import write_text


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
    parser = commands.add_parser(
        "report", help="self-contained page of a sweep's records", allow_abbrev=False
    )
    add_record_flags(parser)
    parser.add_argument("--out", help="folder for report.html, points.csv and PNG")
    parser.add_argument("--readme", help="file whose table of decoding is rebuilt")
    parser.add_argument("--picture", help="with --readme: the picture beside it, .svg or .png")
    parser.add_argument("--ablation", help="record of sphkv ablate, to show beside")
    parser.add_argument("--certificate", help="certificate of sphkv certify, to show beside")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page and what lies beside it, or the README's table and picture."""
    if args.out is None and args.readme is None:
        raise ValueError("give --out FOLDER, --readme FILE or both")
    if args.readme is not None:
        _write_readme(args)
    return 0 if args.out is None else _write_page(args)


def _write_readme(args: argparse.Namespace) -> None:
    from sphkv.evaluation.records import load_records
    from sphkv.evaluation.report.readme import draw_decoding, readme_table, write_readme

    records = load_records([Path(path) for path in args.records])
    write_readme(Path(args.readme), readme_table(records))
    if args.picture is not None:
        draw_decoding(records, Path(args.picture))
    print(f"{len(records)} records: {args.readme}")


def _write_page(args: argparse.Namespace) -> int:
    from sphkv.evaluation.records import load_records
    from sphkv.evaluation.report.page import draw_png, make_frontiers, points_csv, render_report
    from sphkv.evaluation.report.studies import load_study

    studies = {
        name: load_study(Path(path), field=field)
        for name, field in (("ablation", "records"), ("certificate", "witnesses"))
        if (path := getattr(args, name)) is not None
    }
    folder = Path(args.out)
    records = load_records([Path(path) for path in args.records])
    frontiers = make_frontiers(records, delta=args.delta, kl=args.kl, quality_field=args.quality)
    folder.mkdir(parents=True, exist_ok=True)
    command = f"sphkv sweep ... ; sphkv report {' '.join(args.records)} --out {args.out}"
    write_text(folder / "report.html", render_report(records, frontiers, command, **studies))
    write_text(folder / "points.csv", points_csv(frontiers))
    try:
        draw_png(frontiers, folder / "frontier.png")
    except ImportError:
        print("no picture: sphkv[plots] is not installed", file=sys.stderr)
    print(f"{len(records)} records, {len(frontiers)} panels: {folder / 'report.html'}")
    return 0
