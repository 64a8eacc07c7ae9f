# SPDX-License-Identifier: Apache-2.0
"""Grids of methods, budgets and prompts, measured resumably, and what their records say.

``sphkv sweep`` takes its grid from a file, ``compare`` the stretches of a split; ``frontier`` and
``report`` show records as tables or as a page.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphkv.cli.output import check_writable, format_table, write_json, write_text

if TYPE_CHECKING:
    from sphkv.evaluation.sweep.config import SweepConfig

_COMPARE_COLUMNS = (
    "method",
    "budget",
    "peak",
    "kl",
    "nll_delta",
    "same_top1",
    "prompts",
    "by_kl",
    "by_nll",
)
_FRONTIER_COLUMNS = (
    "method", "retained", "least_b_kv", "share", "star_budget", "star_b_kv", "star_tok_s",
    "gamma_s", "gamma_m", "gamma_m_iso", "r_iso_s", "realisation",
)  # fmt: skip


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``sweep``, ``compare``, ``frontier`` and ``report``."""
    _add_sweep(commands)
    _add_compare(commands)
    _add_frontier(commands)
    _add_report(commands)


def _add_sweep(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags of ``sweep``."""
    parser = commands.add_parser(
        "sweep",
        help="measure methods at several budgets; run again to go on after a kill",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="TOML file with the grid")
    parser.add_argument("--out", required=True, help="record file to write or to go on with")
    parser.add_argument("--data", help="data folder, or hub:DATASET; overrides the file")
    parser.add_argument("--model", help="overrides the file")
    parser.set_defaults(run=_run_sweep)


def _run_sweep(args: argparse.Namespace) -> int:
    """Measure what is missing."""
    # imported late, so that `sphkv --help` needs no torch
    from sphkv.core.configs import resolve_config
    from sphkv.evaluation.sweep.config import SweepConfig

    flags: dict[str, Any] = {
        name: value for name in ("data", "model") if (value := getattr(args, name)) is not None
    }
    _check_folder(Path(args.out))
    measure(resolve_config(SweepConfig, path=Path(args.config), flags=flags), Path(args.out))
    return 0


def _check_folder(out: Path) -> None:
    """Fail before long work if a record file could not be written."""
    if not out.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {out.parent} to write {out.name} to")


def measure(config: SweepConfig, out: Path) -> None:
    """Measure the points of a grid that a record file lacks, and say how it goes."""
    from sphkv.evaluation.records import RecordFile
    from sphkv.evaluation.sweep.grid import SweepRunner

    _check_folder(out)
    began = time.perf_counter()

    def tell(line: str) -> None:
        print(f"[{time.perf_counter() - began:6.0f} s] {line}", file=sys.stderr, flush=True)

    # prompts are read first, so that a grid that cannot be measured leaves no file
    runner = SweepRunner(config, keep=out.parent, tell=tell)
    with RecordFile(out) as file:
        summary = runner.run(file)
    print(
        f"{summary.num_measured} points measured ({summary.num_refused} refused), "
        f"{summary.num_known} known before, {summary.seconds:.0f} s: {out}"
    )


def _add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags of ``compare``."""
    parser = commands.add_parser(
        "compare",
        help="methods at budgets on a split, token by token; run again to go on after a kill",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="smollm2, a local folder or a hub name")
    parser.add_argument("--data", required=True, help="data folder with pg19 and longbench")
    parser.add_argument("--out", required=True, help="record file to write or to go on with")
    parser.add_argument("--methods", default="dense,joint,spherical", help="names, see sphkv ls")
    parser.add_argument("--budgets", default="5%,10%,20%", help="byte budgets of all but dense")
    parser.add_argument("--split", default="development", help="development or test")
    parser.add_argument("--purpose", default="development", help="must be test for test data")
    parser.add_argument("--log", help="file that counts uses of test data; needed for these")
    parser.add_argument("--workload", default="lm", help="lm, needle or qa")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--following", type=int, default=512, help="tokens after a stretch")
    parser.add_argument("--count", type=int, default=0, help="most prompts; 0 takes all")
    parser.add_argument("--calibration-text", default="pg19/calibration/10046.txt")
    parser.add_argument("--calibration-tokens", type=int, default=4096)
    parser.add_argument("--policy", help="weights of the controller, by sphkv fit-policy")
    parser.add_argument("--prefill-device", default="cpu", help="where prompts are read")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 leaves its default")
    parser.set_defaults(run=_run_compare)


def _run_compare(args: argparse.Namespace) -> int:
    """Measure what is missing and print the means."""
    from sphkv.core.configs import build_config
    from sphkv.evaluation.records import load_records
    from sphkv.evaluation.report.markdown import comparison_rows
    from sphkv.evaluation.sweep.config import SweepConfig

    part: dict[str, Any] = {
        "length": args.length,
        "split": args.split,
        "purpose": args.purpose,
        "workload": args.workload,
        "count": args.count,
        "num_following": args.following,
    }
    if args.log is not None:
        part["log"] = args.log
    settings: dict[str, Any] = {
        "model": args.model,
        "data": args.data,
        "methods": args.methods.split(","),
        "budgets": args.budgets.split(","),
        "calibration_text": args.calibration_text,
        "calibration_tokens": args.calibration_tokens,
        "num_threads": args.threads,
        "prefill_device": args.prefill_device,
        "split": [part],
    }
    if args.policy is not None:
        settings["policy"] = args.policy
    measure(build_config(SweepConfig, settings), Path(args.out))
    if args.workload == "lm":
        rows = comparison_rows(load_records([Path(args.out)]))
        print(format_table(_COMPARE_COLUMNS, rows))
    return 0


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
