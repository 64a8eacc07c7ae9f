# SPDX-License-Identifier: Apache-2.0
"""``sphkv eval needle``: pass-key and multi-needle retrieval at one operating point."""

from __future__ import annotations

import argparse

from sphkv.cli.eval_answers import add_point_flags, measure_and_print, point_settings


def add_parser(workloads: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
    parser = workloads.add_parser(
        "needle", help="sentences hidden at chosen depths", allow_abbrev=False
    )
    add_point_flags(parser)
    parser.add_argument(
        "--depths",
        type=float,
        nargs="+",
        default=[0.1, 0.5, 0.9],
        help="share of the text before each needle; one depth is a pass key",
    )
    parser.add_argument("--documents", type=int, default=1, help="how many")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure one point."""
    from sphkv.core.configs import build_config
    from sphkv.evaluation.sweep.config import SweepConfig

    part = {"context": args.context, "depths": args.depths, "num_documents": args.documents}
    return measure_and_print(
        args, build_config(SweepConfig, {**point_settings(args), "needle": [part]})
    )
