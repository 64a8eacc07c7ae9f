# SPDX-License-Identifier: Apache-2.0
"""One operating point: ``sphkv eval`` measures its quality, ``sphkv certify`` whether it is safe.

Workloads of ``eval`` are lm, needle, qa and tools.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
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
_EPISODE_COLUMNS = (
    "case",
    "method",
    "budget",
    "context",
    "success",
    "success_reference",
    "schema_validity",
    "is_same",
    "length_drift",
    "b_kv",
)
_BOUNDS = ("kl", "kl_tail", "delta_t", "s_traj", "lost", "refusal_flips")
_FAILURE_COLUMNS = (
    "failure", "budget", "is_triggered", "is_recovered", "drift_trigger", "drift_fix",
    "lost_trigger", "lost_fix", "delta_t_trigger", "delta_t_fix", "s_traj_trigger", "s_traj_fix",
    "cost_bytes_per_token",
)  # fmt: skip


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``eval`` with its workloads, and ``certify``."""
    evaluate = commands.add_parser("eval", help="measure quality", allow_abbrev=False)
    workloads = evaluate.add_subparsers(dest="workload", required=True, metavar="WORKLOAD")
    _add_lm(workloads)
    _add_needle(workloads)
    _add_qa(workloads)
    _add_tools(workloads)
    _add_certify(commands)


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


def _add_point_flags(parser: argparse.ArgumentParser, *, budget: str = "25%") -> None:
    """Flags of one operating point."""
    parser.add_argument("--model", required=True, help="smollm2, a local folder or a hub name")
    parser.add_argument("--method", default="spherical", help="dense, ours, or a baseline")
    parser.add_argument("--budget", default=budget, help="byte budget of the cache")
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


def _measure_and_print(
    args: argparse.Namespace, config: SweepConfig, columns: tuple[str, ...] = _ANSWER_COLUMNS
) -> int:
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
        print(format_table(columns, [_row(record) for record in points.records]))
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
    parser.add_argument("--context", type=int, required=True, help="most tokens of a prompt")
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
    parser.add_argument("--context", type=int, required=True, help="most tokens of a prompt")
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
        "tools", help="tasks with SQL or calls, beside the exact model", allow_abbrev=False
    )
    _add_point_flags(parser, budget="40%")
    parser.add_argument("--source", default="dbbench", help="dbbench (SQL) or toolbench (calls)")
    parser.add_argument("--tasks", type=int, default=4, help="how many")
    parser.add_argument("--rows", type=int, default=40, help="most rows of a table in the prompt")
    parser.set_defaults(run=_run_tools)


def _run_tools(args: argparse.Namespace) -> int:
    """Measure one point."""
    from sphkv.core.configs import build_config
    from sphkv.evaluation.sweep.config import SweepConfig

    part = {"source": args.source, "num_tasks": args.tasks, "most_rows": args.rows}
    config = build_config(SweepConfig, {**_point_settings(args), "tools": [part]})
    return _measure_and_print(args, config, _EPISODE_COLUMNS)


def _add_certify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags of ``certify``."""
    parser = commands.add_parser(
        "certify",
        help="run the witnesses against dense; exit 0 only if every one holds",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="smollm2, a local folder or a hub name")
    parser.add_argument("--budget", required=True, help="byte budget of the cache")
    parser.add_argument("--method", default="spherical", help="ours or a baseline")
    parser.add_argument("--context", type=int, default=4096, help="tokens of the document")
    parser.add_argument("--data", help="data folder; made-up text without it")
    parser.add_argument("--calibration-text", help="text to calibrate on; default: made up")
    parser.add_argument("--keep", help="folder that keeps the calibration for the next time")
    parser.add_argument("--policy", help="weights of the controller, by sphkv fit-policy")
    parser.add_argument(
        "--suffix-tokens", type=int, help="newest prompt tokens that joint keeps dense; default 32"
    )
    parser.add_argument("--no-gate", action="store_true", help="joint without its stability gate")
    parser.add_argument(
        "--per-witness", type=int, default=0, help="most prompts of each witness; 0 takes all"
    )
    parser.add_argument("--following", type=int, default=512, help="tokens watched for drift")
    parser.add_argument("--seeds", type=int, default=3, help="sampled answers per prompt")
    for name in _BOUNDS:
        kind = int if name in ("lost", "refusal_flips") else float
        parser.add_argument(f"--bound-{name.replace('_', '-')}", type=kind, metavar="BOUND")
    parser.add_argument("--texts", type=int, default=1, help="stretches watched for drift")
    parser.add_argument("--split", default="development", help="development or test")
    parser.add_argument("--purpose", default="development", help="must be test for test data")
    parser.add_argument("--log", help="file that counts uses of test data; needed for these")
    parser.add_argument(
        "--failures",
        metavar="BUDGETS",
        help="also trigger and fix the failure classes; comma-separated, loosest first",
    )
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for captured steps")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 leaves its default")
    parser.add_argument("--out", help="file for the certificate")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run_certify)


def _run_certify(args: argparse.Namespace) -> int:
    """Examine one operating point."""
    check_writable(args.out)
    import torch

    from sphkv.core.configs import build_config
    from sphkv.evaluation.witness.certify import CertifyConfig, certify

    bounds = {
        name: value for name in _BOUNDS if (value := getattr(args, f"bound_{name}")) is not None
    }
    settings: dict[str, Any] = {
        "model": args.model,
        "budget": args.budget,
        "method": args.method,
        "context": args.context,
        "num_following": args.following,
        "num_seeds": args.seeds,
        "num_texts": args.texts,
        "split": args.split,
        "purpose": args.purpose,
        "has_gate": not args.no_gate,
        "per_witness": args.per_witness,
        "device": args.device,
        "dtype": args.dtype,
        "bounds": bounds,
    }
    for name in ("data", "calibration_text", "policy", "suffix_tokens", "log"):
        if getattr(args, name) is not None:
            settings[name] = getattr(args, name)
    if args.failures is not None:
        settings["failure_budgets"] = args.failures.split(",")
    config = build_config(CertifyConfig, settings)
    if args.threads:
        torch.set_num_threads(args.threads)
    keep = None if args.keep is None else Path(args.keep)
    if keep is not None and not (args.keep and keep.is_dir()):
        raise FileNotFoundError(f"there is no folder {args.keep!r} to keep a calibration in")
    result = certify(config, lambda line: print(line, file=sys.stderr, flush=True), keep=keep)
    if args.out:
        write_json(args.out, result)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        _print_certificate(result, f"{args.method} at {args.budget}")
    return 0 if result["is_safe"] else 1


def _print_certificate(result: dict[str, Any], point: str) -> None:
    """The witnesses, what they leave open, and the verdict."""
    print(format_table(("name", "value", "bound", "dense", "is_held"), result["witnesses"]))
    if "failures" in result:
        print(format_table(_FAILURE_COLUMNS, result["failures"]))
    mute = [witness["name"] for witness in result["witnesses"] if witness["is_mute"]]
    if mute:
        print(f"dense itself fails these, so they show nothing: {', '.join(mute)}")
    for witness in result["witnesses"]:
        if witness["name"] == "budget" and not witness["is_held"]:
            print(f"the budget did not hold: {witness['exemplar']}")
    verdict = "SAFE" if result["is_safe"] else "NOT SAFE"
    print(f"{point} ({_certified_share(result)}): {verdict}")


def _certified_share(result: dict[str, Any]) -> str:
    if result["memory"] is None:
        return "nothing could be stored"
    share = result["memory"]["b_kv"] / result["dense_bytes_per_token"]
    return f"{100 * share:.1f}% of dense bytes"
