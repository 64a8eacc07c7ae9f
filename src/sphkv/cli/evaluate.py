# SPDX-License-Identifier: Apache-2.0
"""``sphkv eval``: quality of one operating point, by workload: lm, needle, qa or tools."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sphkv.cli.output import check_writable, format_table, write_json

if TYPE_CHECKING:
    from sphkv.evaluation.lm import LMConfig
    from sphkv.evaluation.sweep.config import SweepConfig

_LM_COLUMNS = ("method", "key_bits", "value_bits", "kl", "nll_delta", "same_top1", "b_kv")

# Each comparison codec at its own bits, and ours at most at the same.
_COMPARISONS = (
    ("polar_tree", 2.3),
    ("hyperspherical", 2.3),
    ("rotation-lloyd", 2.25),
    ("per-channel-int", 3.0),
    ("polar_tree", 3.3),
    ("hyperspherical", 3.3),
    ("rotation-lloyd", 3.25),
    ("hadamard-int", 3.5),
    ("per-channel-int", 4.0),
    ("polar_tree", 4.3),
    ("hyperspherical", 4.3),
    ("rotation-lloyd", 4.25),
    ("hadamard-int", 4.5),
)
_ANSWER_COLUMNS = (
    "case",
    "method",
    "budget",
    "context",
    "answer",
    "f1",
    "found",
    "kl",
    "b_kv",
    "tok_s",
)


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``eval`` and its workloads."""
    evaluate = commands.add_parser("eval", help="measure quality", allow_abbrev=False)
    workloads = evaluate.add_subparsers(dest="workload", required=True, metavar="WORKLOAD")
    _add_lm(workloads)
    _add_needle(workloads)
    _add_qa(workloads)
    _add_tools(workloads)


def _add_lm(workloads: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags of ``eval lm``."""
    parser = workloads.add_parser(
        "lm", help="KL to the dense model under teacher forcing", allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="smollm2, a local folder or a hub name")
    parser.add_argument("--text", required=True, help="UTF-8 text file")
    parser.add_argument("--context", type=int, required=True, help="tokens of the text")
    parser.add_argument("--key-bits", type=float, default=2.25, help="per element, all included")
    parser.add_argument("--value-bits", type=float, default=16.0, help="16 keeps values")
    parser.add_argument("--method", default="spherical", help="spherical, spherical-default, "
                        "hyperspherical, polar_tree, rotation-lloyd, per-channel-int or "
                        "hadamard-int")  # fmt: skip
    parser.add_argument("--calibration-text", help="text to calibrate on; default: the context")
    parser.add_argument("--calibration-tokens", type=int, help="tokens of it; default 4096")
    parser.add_argument("--calibration", help="calibration file instead of a text")
    parser.add_argument("--offset", type=int, default=0, help="characters of the text to skip")
    parser.add_argument(
        "--compare", action="store_true", help="every codec at equal bits, one table"
    )
    parser.add_argument("--out", help="file for the JSON record")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run_lm)


def _run_lm(args: argparse.Namespace) -> int:
    """Measure one point, or all codecs at equal bits."""
    check_writable(args.out)
    # imported late, so that `sphkv --help` needs no torch
    from sphkv.evaluation.lm import LMConfig, LMRunner

    given = args.calibration_tokens
    if given is not None and (args.calibration_text is None or given < 1):
        raise ValueError(f"calibration tokens are so many of a calibration text, got {given}")
    config = LMConfig(
        model=args.model,
        text=args.text,
        context=args.context,
        key_bits=args.key_bits,
        value_bits=args.value_bits,
        method=args.method,
        calibration_text=args.calibration_text,
        calibration=args.calibration,
        **({} if given is None else {"calibration_tokens": given}),
        offset=args.offset,
    )
    points = _comparison_points(config) if args.compare else [config]
    runner = LMRunner(config)
    records: list[dict[str, Any]] = []
    for number, point in enumerate(points, 1):
        records.append(runner.run(point))
        if len(points) > 1:
            print(f"{number}/{len(points)} {point.method} {point.key_bits:g}", file=sys.stderr)
    result = records if args.compare else records[0]
    if args.out:
        write_json(args.out, result)
    print(json.dumps(result, indent=2) if args.json else format_table(_LM_COLUMNS, records))
    return 0


def _comparison_points(config: LMConfig) -> list[LMConfig]:
    """Pairs of a comparison codec and ours, at the comparison codec's bits."""
    points = []
    for method, bits in _COMPARISONS:
        points.append(replace(config, method=method, key_bits=bits))
        ours = replace(config, method="spherical", key_bits=bits)
        if ours not in points:
            points.append(ours)
    return points


def _add_point_flags(parser: argparse.ArgumentParser) -> None:
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


def _point_settings(args: argparse.Namespace) -> dict[str, Any]:
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


def _measure_and_print(args: argparse.Namespace, config: SweepConfig) -> int:
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
        print(format_table(_ANSWER_COLUMNS, [_row(record) for record in points.records]))
    return 0


def _row(record: dict[str, Any]) -> dict[str, Any]:
    row = {**record, **(record["quality"] or {}), **(record["memory"] or {})}
    return {**row, **(record["times"] or {})}


def _add_needle(workloads: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags of ``eval needle``."""
    parser = workloads.add_parser(
        "needle", help="sentences hidden at chosen depths", allow_abbrev=False
    )
    _add_point_flags(parser)
    parser.add_argument(
        "--depths",
        type=float,
        nargs="+",
        default=[0.1, 0.5, 0.9],
        help="share of the text before each needle; one depth is a pass key",
    )
    parser.add_argument("--documents", type=int, default=1, help="how many")
    parser.set_defaults(run=_run_needle)


def _run_needle(args: argparse.Namespace) -> int:
    """Measure one point."""
    from sphkv.core.configs import build_config
    from sphkv.evaluation.sweep.config import SweepConfig

    part = {"context": args.context, "depths": args.depths, "num_documents": args.documents}
    return _measure_and_print(
        args, build_config(SweepConfig, {**_point_settings(args), "needle": [part]})
    )


def _add_qa(workloads: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags of ``eval qa``."""
    parser = workloads.add_parser(
        "qa", help="F1 and EM of answers from many passages", allow_abbrev=False
    )
    _add_point_flags(parser)
    parser.add_argument("--questions", type=int, default=3, help="how many")
    parser.add_argument("--distractors", type=int, help="passages beside the needed ones")
    parser.set_defaults(run=_run_qa)


def _run_qa(args: argparse.Namespace) -> int:
    """Measure one point."""
    from sphkv.core.configs import build_config
    from sphkv.evaluation.sweep.config import SweepConfig

    part = {"context": args.context, "num_questions": args.questions}
    if args.distractors is not None:
        part["num_distractors"] = args.distractors
    return _measure_and_print(
        args, build_config(SweepConfig, {**_point_settings(args), "qa": [part]})
    )


def _add_tools(workloads: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags of ``eval tools``."""
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
    parser.set_defaults(run=_run_tools)


def _run_tools(args: argparse.Namespace) -> int:
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
