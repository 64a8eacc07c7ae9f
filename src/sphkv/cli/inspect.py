# SPDX-License-Identifier: Apache-2.0
"""``sphkv inspect``: what a cache holds."""

from __future__ import annotations

import argparse
import json
from typing import Any

from sphkv.cli.generate import add_prompt_flags
from sphkv.cli.output import check_writable, format_table, write_bytes


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
    parser = commands.add_parser(
        "inspect",
        help="ledger, tier histogram and tier map of a saved cache or of a prompt's",
        allow_abbrev=False,
    )
    add_prompt_flags(parser, is_required=False)
    parser.add_argument("--cache", help="folder of a saved cache, instead of model and prompt")
    parser.add_argument("--map", help="PNG file for the tier map (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Open a saved cache, or fill one with a prompt, and describe it."""
    check_writable(args.map)
    found = _look(args)
    if args.map:
        from sphkv.evaluation.inspect import draw_tier_map

        write_bytes(args.map, draw_tier_map(found["tier_map"]))
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    more = found["num_sequences"] - 1
    print(f"{found['tokens']} tokens{f' and {more} more sequences' if more else ''}, "
          f"{found['b_kv']:.0f} bytes per token, "
          f"dense {found['dense_b_kv']}")  # fmt: skip
    ledger = [
        {"kind": kind, "bytes": size, "share": f"{100 * size / found['ledger']['total']:.1f}%"}
        for kind, size in found["ledger"].items()
    ]
    print(format_table(("kind", "bytes", "share"), ledger))
    print()
    print(format_table(("layer", "head", *found["tiers"]), found["histogram"]))
    return 0


def _look(args: argparse.Namespace) -> dict[str, Any]:
    from sphkv.evaluation.generate import GenerateConfig
    from sphkv.evaluation.inspect import inspect_folder, inspect_prompt

    if args.cache is not None:
        given = [name for name in ("model", "prompt", "prompt_file") if getattr(args, name)]
        if given:
            raise ValueError(f"give --cache or --{given[0].replace('_', '-')}, not both")
        return inspect_folder(args.cache)
    if args.model is None:
        raise ValueError("give --cache FOLDER, or --model with --prompt or --prompt-file")
    return inspect_prompt(
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
