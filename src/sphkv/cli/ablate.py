# SPDX-License-Identifier: Apache-2.0
"""``sphkv ablate`` compares joint control with its parts; ``fit-`` and ``tune-policy`` weigh it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sphkv.cli.output import check_writable, format_table, write_json
from sphkv.cli.sweep import measure

COLUMNS = (
    "budget",
    "variant",
    "lm_kl",
    "lm_above",
    "lm_worst",
    "lm_same",
    "qa_kl",
    "qa_above",
    "qa_same",
    "r_fail",
    "delta_t",
    "s_traj",
    "attend_ms",
    "peak",
    "note",
)


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
    parser = commands.add_parser(
        "ablate",
        help="the paper's ablations, token by token; run again to go on after a kill",
        allow_abbrev=False,
    )
    parser.add_argument("study", nargs="?", default="a2", help="a1 to a5; default: a2")
    parser.add_argument("--model", required=True, help="smollm2, a local folder or a hub name")
    parser.add_argument("--data", required=True, help="folder with pg19 and longbench")
    parser.add_argument("--out", required=True, help="record file to write or to go on with")
    parser.add_argument("--variants", help="comma-separated, instead of the study's")
    parser.add_argument("--budgets", help="comma-separated; default: 5%%,10%%,20%%")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--following", type=int, default=512, help="tokens compared after a text")
    parser.add_argument("--texts", type=int, default=4, help="stretches of books")
    parser.add_argument("--questions", type=int, default=4, help="questions over passages")
    parser.add_argument(
        "--answerable", type=float, default=0.5,
        help="F1 from which dense must answer a question; 0 takes the first ones",
    )  # fmt: skip
    parser.add_argument("--needles", type=int, default=0, help="hidden sentences")
    parser.add_argument("--clutter", type=int, default=0, help="tokens of a book before passages")
    parser.add_argument("--seeds", type=int, default=0, help="sampled answers of each prompt")
    parser.add_argument("--split", default="development", help="development or test")
    parser.add_argument("--purpose", default="development", help="must be test for test data")
    parser.add_argument("--log", help="file that counts uses of test data; needed for these")
    parser.add_argument("--policy", help="policy file; default: equal weights")
    parser.add_argument("--calibration-text", default="pg19/calibration/10046.txt")
    parser.add_argument("--calibration-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 leaves its default")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)
    _add_fit(commands)
    _add_tune(commands)


def _add_fit(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "fit-policy",
        help="fit the controller's weights and print how well they predict measured loss",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="smollm2, a local folder or a hub name")
    parser.add_argument("--data", required=True, help="folder with pg19/calibration")
    parser.add_argument("--policy-out", required=True, help="policy file to write")
    parser.add_argument("--context", type=int, default=1024, help="tokens of the probed prompt")
    parser.add_argument("--text-tokens", type=int, default=512, help="tokens of a gradient pass")
    parser.add_argument("--calibration", help="calibration file; default: pg19/calibration")
    parser.add_argument("--out", help="file for the JSON record")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run_fit)


def _add_tune(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "tune-policy",
        help="choose segment weights and the gate's scale by records of development data",
        allow_abbrev=False,
    )
    parser.add_argument("records", nargs="+", help="record files of sphkv ablate a4 and a5")
    parser.add_argument("--policy", help="policy file to start from; default: equal weights")
    parser.add_argument("--policy-out", required=True, help="policy file to write")
    parser.add_argument("--out", help="file for the JSON record")
    parser.set_defaults(run=run_tune)


def run_tune(args: argparse.Namespace) -> int:
    """Choose what records decide, and say by how much."""
    for path in (args.out, args.policy_out):
        check_writable(path)
    from sphkv.evaluation.retention.study import tune_by_files

    policy = None if args.policy is None else Path(args.policy)
    records = [Path(path) for path in args.records]
    record = tune_by_files(records, policy, Path(args.policy_out))
    if args.out:
        write_json(args.out, record)
    print(format_table(("variant", "kl", "better", "prompts"), record["segments"]))
    print(json.dumps({name: record[name] for name in ("segment_weights", "gate")}, indent=1))
    return 0


def run_fit(args: argparse.Namespace) -> int:
    """Fit a policy on calibration books."""
    for path in (args.out, args.policy_out):
        check_writable(path)
    # imported late, so that `sphkv --help` needs no torch
    from sphkv.evaluation.retention.fit import FitConfig, fit_on_books

    config = FitConfig(
        model=args.model, data=args.data, context=args.context, calibration=args.calibration
    )
    record = fit_on_books(
        config,
        args.policy_out,
        text_tokens=args.text_tokens,
        report=lambda text: print(text, file=sys.stderr),
    )
    if args.out:
        write_json(args.out, record)
    if args.json:
        print(json.dumps(record, indent=2))
        return 0
    print(format_table(("kind", "measured", "predicted", "probe"), record["curve"]))
    rows = [
        {"score": name, "all probes": value, "drops": record["rank_correlation_drops"][name]}
        for name, value in record["rank_correlation"].items()
    ]
    print("\nrank correlation with measured KL")
    print(format_table(("score", "all probes", "drops"), rows))
    print("\nheads whose later queries were predicted least")
    print(format_table(("layer", "head", "surprise"), record["surprise"]))
    return 0


def run(args: argparse.Namespace) -> int:
    """Measure what is missing of every variant at every budget, and print the means."""
    # imported late, so that `sphkv --help` needs no torch
    from sphkv.core.configs import build_config, check_name
    from sphkv.evaluation.records import load_records
    from sphkv.evaluation.retention.study import BUDGETS, STUDIES, AblationConfig, ablation_rows

    check_name("study", args.study, tuple(STUDIES))
    settings = {
        "model": args.model,
        "data": args.data,
        "variants": args.variants.split(",") if args.variants else list(STUDIES[args.study]),
        "budgets": args.budgets.split(",") if args.budgets else list(BUDGETS),
        "length": args.length,
        "num_following": args.following,
        "num_texts": args.texts,
        "num_questions": args.questions,
        "answerable_f1": args.answerable,
        "num_needles": args.needles,
        "clutter": args.clutter,
        "num_seeds": args.seeds,
        "split": args.split,
        "purpose": args.purpose,
        "calibration_text": args.calibration_text,
        "calibration_tokens": args.calibration_tokens,
        "num_threads": args.threads,
    }
    for name in ("log", "policy"):
        if getattr(args, name) is not None:
            settings[name] = getattr(args, name)
    measure(build_config(AblationConfig, settings).grid(), Path(args.out))
    rows = ablation_rows(load_records([Path(args.out)]))
    print(json.dumps(rows, indent=2) if args.json else format_table(COLUMNS, rows))
    return 0
