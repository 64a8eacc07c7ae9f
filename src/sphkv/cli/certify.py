# SPDX-License-Identifier: Apache-2.0
"""``sphkv certify``: is an operating point safe to use."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from sphkv.cli.output import check_writable, format_table, write_json

_BOUNDS = ("kl", "kl_tail", "delta_t", "s_traj", "lost", "refusal_flips")
_FAILURE_COLUMNS = (
    "failure", "budget", "is_triggered", "is_recovered", "drift_trigger", "drift_fix",
    "lost_trigger", "lost_fix", "delta_t_trigger", "delta_t_fix", "s_traj_trigger", "s_traj_fix",
    "cost_bytes_per_token",
)  # fmt: skip


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
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
        _print(result, f"{args.method} at {args.budget}")
    return 0 if result["is_safe"] else 1


def _print(result: dict[str, Any], point: str) -> None:
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
    print(f"{point} ({_share(result)}): {verdict}")


def _share(result: dict[str, Any]) -> str:
    if result["memory"] is None:
        return "nothing could be stored"
    share = result["memory"]["b_kv"] / result["dense_bytes_per_token"]
    return f"{100 * share:.1f}% of dense bytes"
