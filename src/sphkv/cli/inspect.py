# SPDX-License-Identifier: Apache-2.0
"""``sphkv inspect``: what a cache holds."""

from __future__ import annotations

import argparse
import json

from sphkv.cli.generate import add_prompt_flags
from sphkv.cli.output import check_writable, format_table


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
    parser = commands.add_parser(
        "inspect",
        help="ledger, tier histogram and tier map of a prompt's cache",
        allow_abbrev=False,
    )
    add_prompt_flags(parser)
    parser.add_argument("--map", help="PNG file for the tier map (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Fill a cache with the prompt and describe it."""
    check_writable(args.map)
    from sphkv.evaluation.generate import GenerateConfig
    from sphkv.evaluation.inspect import draw_tier_map, inspect_prompt

    found = inspect_prompt(
        GenerateConfig(
            model=args.model,
            prompt=args.prompt,
            prompt_file=args.prompt_file,
            budget=args.budget,
            tier=args.tier,
            calibration=args.calibration,
            backend=args.backend,
        )
    )
    if args.map:
        draw_tier_map(found["tier_map"], args.map)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"{found['tokens']} tokens, {found['b_kv']:.0f} bytes per token, "
          f"dense {found['dense_b_kv']}")  # fmt: skip
    ledger = [
        {"kind": kind, "bytes": size, "share": f"{100 * size / found['ledger']['total']:.1f}%"}
        for kind, size in found["ledger"].items()
    ]
    print(format_table(("kind", "bytes", "share"), ledger))
    print()
    print(format_table(("layer", "head", *found["tiers"]), found["histogram"]))
    return 0
