# SPDX-License-Identifier: Apache-2.0
"""``sphkv eval lm``: KL to the dense model on a text."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sphkv.cli.output import check_writable, format_table, write_json

if TYPE_CHECKING:
    from sphkv.evaluation.lm import LMConfig

COLUMNS = ("method", "key_bits", "value_bits", "kl", "nll_delta", "same_top1", "b_kv")

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


def add_parser(workloads: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
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
    print(json.dumps(result, indent=2) if args.json else format_table(COLUMNS, records))
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
