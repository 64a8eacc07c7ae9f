# SPDX-License-Identifier: Apache-2.0
"""``sphkv frontier`` and ``sphkv report``: what a sweep's records say, as tables or as a page."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sphkv.cli.output import check_writable, format_table, write_json, write_text

_FRONTIER_COLUMNS = (
    "method", "retained", "least_b_kv", "share", "star_budget", "star_b_kv", "star_tok_s",
    "gamma_s", "gamma_m", "gamma_m_iso", "r_iso_s", "realisation",
)  # fmt: skip


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``frontier`` and ``report``."""
    _add_frontier(commands)
    _add_report(commands)


def _add_frontier(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags of ``frontier``."""
    parser = commands.add_parser(
        "frontier", help="iso-quality frontiers of a sweep's records", allow_abbrev=False
    )
    _add_record_flags(parser)
    parser.add_argument("--out", help="file for the JSON result")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=_run_frontier)


def _add_record_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say which records and how much quality may be lost."""
    parser.add_argument("records", nargs="+", help="record files of sweeps")
    parser.add_argument("--delta", type=float, default=0.8, help="points of 100 below dense")
    parser.add_argument("--kl", type=float, default=0.05, help="nats, for language modelling")
    parser.add_argument("--quality", help="field to judge by, such as agreement_f1")


def _run_frontier(args: argparse.Namespace) -> int:
    """Print one table per panel."""
    check_writable(args.out)
    from sphkv.evaluation.frontier import build_frontier, build_panels, frontier_rows, winner
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
            print(format_table(_FRONTIER_COLUMNS, rows))
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


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags of ``report``."""
    parser = commands.add_parser(
        "report", help="self-contained page of a sweep's records", allow_abbrev=False
    )
    _add_record_flags(parser)
    parser.add_argument("--out", help="folder for report.html, points.csv and PNG")
    parser.add_argument("--readme", help="file whose table of decoding is rebuilt")
    parser.add_argument(
        "--tables",
        help="file whose tables, named as the record files and certificates, are rebuilt",
    )
    parser.add_argument("--picture", help="with --readme: the picture beside it, .svg or .png")
    parser.add_argument(
        "--certificate",
        action="append",
        default=[],
        help="certificate of sphkv certify, to show beside; may be given several times",
    )
    parser.set_defaults(run=_run_report)


def _run_report(args: argparse.Namespace) -> int:
    """Write the page and what lies beside it, or the README's table and picture."""
    if args.out is None and args.readme is None and args.tables is None:
        raise ValueError("give --out FOLDER, --readme FILE or --tables FILE")
    if args.readme is not None:
        _write_readme(args)
    if args.tables is not None:
        _write_tables(args)
    return 0 if args.out is None else _write_page(args)


def _write_readme(args: argparse.Namespace) -> None:
    from sphkv.evaluation.records import load_records
    from sphkv.evaluation.report.markdown import draw_decoding, readme_table, write_readme

    records = load_records([Path(path) for path in args.records])
    write_readme(Path(args.readme), readme_table(records))
    if args.picture is not None:
        draw_decoding(records, Path(args.picture))
    print(f"{len(records)} records: {args.readme}")


def _write_tables(args: argparse.Namespace) -> None:
    from sphkv.evaluation.records import load_records
    from sphkv.evaluation.report.markdown import certificate_tables, record_table, write_readme
    from sphkv.evaluation.report.sections import load_study

    tables = {
        Path(path).stem: load_study(Path(path), field="witnesses") for path in args.certificate
    }
    made = {name: certificate_tables(certificate) for name, certificate in tables.items()}
    for path in args.records:
        name = Path(path).stem
        made[name] = record_table(name, load_records([Path(path)]))
    for name, table in made.items():
        write_readme(Path(args.tables), table, name=name)
    print(f"{len(made)} tables: {args.tables}")


def _write_page(args: argparse.Namespace) -> int:
    from sphkv.evaluation.records import load_records
    from sphkv.evaluation.report.page import draw_png, make_frontiers, points_csv, render_report
    from sphkv.evaluation.report.sections import load_study

    certificates = [load_study(Path(path), field="witnesses") for path in args.certificate]
    folder = Path(args.out)
    records = load_records([Path(path) for path in args.records])
    frontiers = make_frontiers(records, delta=args.delta, kl=args.kl, quality_field=args.quality)
    folder.mkdir(parents=True, exist_ok=True)
    command = f"sphkv sweep ... ; sphkv report {' '.join(args.records)} --out {args.out}"
    page = render_report(records, frontiers, command, certificates=certificates)
    write_text(folder / "report.html", page)
    write_text(folder / "points.csv", points_csv(frontiers))
    try:
        draw_png(frontiers, folder / "frontier.png")
    except ImportError:
        print("no picture: sphkv[plots] is not installed", file=sys.stderr)
    print(f"{len(records)} records, {len(frontiers)} panels: {folder / 'report.html'}")
    return 0
