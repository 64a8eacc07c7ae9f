# SPDX-License-Identifier: Apache-2.0
"""``sphkv calibrate`` fits a model's codebooks; ``sphkv generate`` continues a prompt with them."""

from __future__ import annotations

import argparse
import json
import sys

from sphkv.cli.output import check_writable, format_table

COLUMNS = ("file", "bytes", "model", "tokens", "seconds")


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``calibrate`` and ``generate``."""
    _add_calibrate(commands)
    _add_generate(commands)


def _add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags of ``calibrate``."""
    parser = commands.add_parser(
        "calibrate", help="fit a model's codebooks on a text", allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="smollm2, a local folder or a hub name")
    parser.add_argument("--text", required=True, help="UTF-8 text file")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the text to use")
    parser.add_argument("--out", required=True, help="safetensors file to write")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run_calibrate)


def _run_calibrate(args: argparse.Namespace) -> int:
    """Calibrate and save."""
    check_writable(args.out)
    from sphkv.evaluation.generate import CalibrateConfig, calibrate_to_file

    done = calibrate_to_file(CalibrateConfig(args.model, args.text, args.tokens, args.out))
    print(json.dumps(done, indent=2) if args.json else format_table(COLUMNS, [done]))
    return 0


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags of ``generate``."""
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
    parser.set_defaults(run=_run_generate)


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


def _run_generate(args: argparse.Namespace) -> int:
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
