# SPDX-License-Identifier: Apache-2.0
"""``sphkv demo``: a real model, a long document, three caches side by side."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sphkv.cli.output import check_writable, format_table, write_text


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
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
    columns, rows = table_of(result)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(args.report, render_report(result, columns, rows))
        tell(f"report: {args.report}")
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print(format_table(columns, [dict(zip(columns, row, strict=True)) for row in rows]))
    return 0


def table_of(result: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
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
