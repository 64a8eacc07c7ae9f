# SPDX-License-Identifier: Apache-2.0
"""``sphkv eval qa``: questions over many passages at one operating point."""

from __future__ import annotations

import argparse

from sphkv.cli.eval_answers import add_point_flags, measure_and_print, point_settings


def add_parser(workloads: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
    parser = workloads.add_parser(
        "qa", help="F1 and EM of answers from many passages", allow_abbrev=False
    )
    add_point_flags(parser)
    parser.add_argument("--questions", type=int, default=3, help="how many")
    parser.add_argument("--distractors", type=int, help="passages beside the needed ones")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure one point."""
    from sphkv.core.configs import build_config
    from sphkv.evaluation.sweep.config import SweepConfig

    part = {"context": args.context, "num_questions": args.questions}
    if args.distractors is not None:
        part["num_distractors"] = args.distractors
    return measure_and_print(
        args, build_config(SweepConfig, {**point_settings(args), "qa": [part]})
    )
