# SPDX-License-Identifier: Apache-2.0
"""``sphkv calibrate``: fit a model's codebooks on a text."""

from __future__ import annotations

import argparse
import json

from sphkv.cli.output import check_writable, format_table

COLUMNS = ("file", "bytes", "model", "tokens", "seconds")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
    parser = commands.add_parser(
        "calibrate", help="fit a model's codebooks on a text", allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="smollm2, a local folder or a hub name")
    parser.add_argument("--text", required=True, help="UTF-8 text file")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the text to use")
    parser.add_argument("--out", required=True, help="safetensors file to write")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Calibrate and save."""
    check_writable(args.out)
    from sphkv.evaluation.calibrate import CalibrateConfig, calibrate_to_file

    done = calibrate_to_file(CalibrateConfig(args.model, args.text, args.tokens, args.out))
    print(json.dumps(done, indent=2) if args.json else format_table(COLUMNS, [done]))
    return 0
