# SPDX-License-Identifier: Apache-2.0
"""``sphkv generate``: continue a prompt with a coded cache."""

from __future__ import annotations

import argparse
import json
import sys

from sphkv.cli.output import check_writable, format_table


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
    parser = commands.add_parser(
        "generate", help="continue a prompt with a coded cache", allow_abbrev=False
    )
    add_prompt_flags(parser)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the chat template")
    parser.add_argument("--save-cache", help="folder to save the cache in")
    parser.add_argument(
        "--retention",
        action=argparse.BooleanOptionalAction,
        help="keep, demote or drop per token and head at any budget, or never; default: the "
        "budget says",
    )
    parser.add_argument("--policy", help="policy file for --retention, made by fit-policy")
    parser.add_argument(
        "--gate",
        action="store_true",
        help="with --retention: spare states where decisions are close",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run)


def add_prompt_flags(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    """Flags that name a model, a prompt and a budget."""
    parser.add_argument(
        "--model", required=is_required, help="smollm2, a local folder or a hub name"
    )
    source = parser.add_mutually_exclusive_group(required=is_required)
    source.add_argument("--prompt", help="the prompt itself")
    source.add_argument("--prompt-file", help="UTF-8 file with the prompt")
    parser.add_argument("--budget", help='"25%%" of dense bytes (default), "512B/token" or bytes')
    parser.add_argument("--tier", help="a tier such as k2v3, instead of a budget")
    parser.add_argument("--calibration", help="calibration file; default: calibrate on the prompt")
    parser.add_argument("--backend", default="auto", help="auto, or a name of sphkv ls backends")


def run(args: argparse.Namespace) -> int:
    """Generate and print the text, and what the cache holds on stderr."""
    check_writable(args.save_cache)
    from sphkv.evaluation.generate import GenerateConfig, generate

    result = generate(
        GenerateConfig(
            model=args.model,
            prompt=args.prompt,
            prompt_file=args.prompt_file,
            budget=args.budget,
            tier=args.tier,
            calibration=args.calibration,
            backend=args.backend,
            max_new_tokens=args.max_new_tokens,
            is_chat=args.chat,
            save_cache=args.save_cache,
            retention=args.retention,
            policy=args.policy,
            is_gated=args.gate,
        )
    )
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    print(result["text"])
    columns = ("residency", "tier", "backend", "tokens", "b_kv", "dense_b_kv", "tokens_per_s")
    print(format_table(columns, [result]), file=sys.stderr)
    return 0
