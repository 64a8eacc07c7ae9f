# SPDX-License-Identifier: Apache-2.0
"""Commands to begin with: ``sphkv demo``, ``calibrate`` and ``generate``.

The first shows three caches side by side, the second fits a model's codebooks, the third continues
a prompt with them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sphkv.cli.output import check_writable, format_table, write_text

COLUMNS = ("file", "bytes", "model", "tokens", "seconds")


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``demo``, ``calibrate`` and ``generate``."""
    _add_demo(commands)
    _add_calibrate(commands)
    _add_generate(commands)


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags of ``demo``."""
    parser = commands.add_parser(
        "demo",
        help="a dense cache, one tier and the controller answer the same questions",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, a local folder or a hub name")
    parser.add_argument("--context", type=int, default=8000, help="tokens of the document")
    parser.add_argument("--tier", default="k2v3", help="tier of the cache with one tier")
    parser.add_argument("--budget", default="10%", help="ceiling of the controller's cache")
    parser.add_argument("--report", help="HTML file to write")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_run_demo)


def _run_demo(args: argparse.Namespace) -> int:
    """Run the demonstration and write the report."""
    folder = None if args.report is None else Path(args.report).parent
    if folder is None or folder.exists():
        check_writable(args.report)
    from sphkv.evaluation.demo.report import render_report
    from sphkv.evaluation.demo.run import DemoConfig, run_demo

    began = time.perf_counter()

    def tell(line: str) -> None:
        print(f"[{time.perf_counter() - began:5.0f} s] {line}", file=sys.stderr, flush=True)

    result = run_demo(DemoConfig(args.model, args.context, args.tier, args.budget), tell)
    columns, rows = _demo_table(result)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(args.report, render_report(result, columns, rows))
        tell(f"report: {args.report}")
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print(format_table(columns, [dict(zip(columns, row, strict=True)) for row in rows]))
    return 0


def _demo_table(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of the table of the terminal and of the report."""
    caches, number = result["caches"], len(result["facts"])

    def row(name: str, show: Callable[[dict[str, Any]], str]) -> tuple[str, ...]:
        return (name, *(show(cache) for cache in caches))

    def share(cache: dict[str, Any]) -> str:
        # of what a dense cache of as many tokens holds, where the share is highest
        steps = cache["steps"]
        worst = max(
            size / (tokens * result["dense_b_kv"])
            for size, tokens in zip(steps["bytes"], steps["num_tokens"], strict=True)
        )
        return f"{100 * worst:.1f}%"

    columns = ("figure", *(f"{cache['name']} {cache['setting']}" for cache in caches))
    rows = [
        row("bytes at the peak", lambda cache: f"{cache['peak_bytes']:,}"),
        row("share of dense bf16, at most", share),
        row("coding, s", lambda cache: f"{cache['encode_s']:.1f}" if "encode_s" in cache else ""),
        row("decode, tokens/s", lambda cache: f"{cache['tokens_per_s']:.1f}"),
        row("KL to dense, nats per token", lambda cache: f"{cache['kl']:.4f}"),
        row("same most likely token", lambda cache: f"{100 * cache['same_top1']:.0f}%"),
        row("facts found", lambda cache: f"{cache['num_found']} of {number}"),
    ]
    return columns, rows


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
