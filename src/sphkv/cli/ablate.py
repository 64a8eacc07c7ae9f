# SPDX-License-Identifier: Apache-2.0
"""``sphkv ablate`` compares joint control with its parts; ``sphkv fit-policy`` fits its weights."""

from __future__ import annotations

import argparse
import json
import sys

from sphkv.cli.output import check_writable, format_table, write_json

COLUMNS = (
    "budget",
    "variant",
    "lm_kl",
    "lm_same",
    "qa_kl",
    "qa_same",
    "answers",
    "used",
    "note",
)


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
    parser = commands.add_parser(
        "ablate",
        help="KL and answer agreement of Joint, KeepDrop, Quant and Decoupled at equal bytes",
        allow_abbrev=False,
    )
    parser.add_argument("--model", required=True, help="smollm2, a local folder or a hub name")
    parser.add_argument("--data", required=True, help="folder with pg19 and longbench")
    parser.add_argument("--variants", help="comma-separated; default: the paper's A2")
    parser.add_argument("--budgets", help="comma-separated; default: 20%%,15%%,10%%,7%%,5%%")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--following", type=int, default=512, help="tokens compared after a text")
    parser.add_argument("--texts", type=int, default=3, help="books")
    parser.add_argument("--questions", type=int, default=4, help="questions")
    parser.add_argument("--policy", help="policy file; default: equal weights")
    parser.add_argument("--calibration", help="calibration file; default: pg19/calibration")
    parser.add_argument("--page-tokens", type=int, default=32, help="states of a coded page")
    parser.add_argument("--out", help="file for the JSON record")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)
    _add_fit(commands)


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


def run_fit(args: argparse.Namespace) -> int:
    """Fit a policy on calibration books."""
    for path in (args.out, args.policy_out):
        check_writable(path)
    # imported late, so that `sphkv --help` needs no torch
    from sphkv.evaluation.retention.fit import fit_on_books
    from sphkv.evaluation.retention.study import StudyConfig

    config = StudyConfig(
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
    """Measure every variant at every budget."""
    check_writable(args.out)
    # imported late, so that `sphkv --help` needs no torch
    from sphkv.evaluation.retention.study import BUDGETS, DEFAULT_VARIANTS, StudyConfig, StudyRunner

    config = StudyConfig(
        model=args.model,
        data=args.data,
        variants=tuple(args.variants.split(",")) if args.variants else DEFAULT_VARIANTS,
        budgets=tuple(args.budgets.split(",")) if args.budgets else BUDGETS,
        context=args.context,
        num_following=args.following,
        num_texts=args.texts,
        num_questions=args.questions,
        policy=args.policy,
        calibration=args.calibration,
        page_tokens=args.page_tokens,
    )
    result = StudyRunner(config, report=lambda text: print(text, file=sys.stderr)).run()
    if args.out:
        write_json(args.out, result)
    print(json.dumps(result, indent=2) if args.json else format_table(COLUMNS, result["table"]))
    return 0
