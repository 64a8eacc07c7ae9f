# SPDX-License-Identifier: Apache-2.0
"""``sphkv demo``: a real model, a long document, dense and coded caches side by side."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from sphkv.cli.output import check_writable, format_table, write_text


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the flags."""
    parser = commands.add_parser(
        "demo", help="dense and coded caches answer the same questions", allow_abbrev=False
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, a local folder or a hub name")
    parser.add_argument("--context", type=int, default=8000, help="tokens of the document")
    parser.add_argument("--tier", default="k2v3", help="tier of the coded cache")
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

    result = run_demo(DemoConfig(args.model, args.context, args.tier), tell)
    rows = table_rows(result)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(args.report, render_report(result, rows))
        tell(f"report: {args.report}")
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        columns = ("figure", "dense", "spherical")
        print(format_table(columns, [dict(zip(columns, row, strict=True)) for row in rows]))
    return 0


def table_rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The table of the terminal and of the report."""
    context, dense, coded = result["config"]["context"], result["dense"], result["coded"]
    per_token = [
        (f"  {kind}", "", f"{size / context:,.0f}")
        for kind, size in result["ledger"].items()
        if kind not in ("payload", "total")
    ]
    number = len(result["answers"])
    right = [
        sum(a[which] == a["answer"] for a in result["answers"]) for which in ("dense", "coded")
    ]
    return [
        ("KV bytes per token", f"{result['dense_b_kv']:,}", f"{result['b_kv']:,.0f}"),
        *per_token,
        ("share of dense bf16", "100%", f"{100 * result['share_of_dense']:.1f}%"),
        ("prefill, s", f"{result['prefill_s']:.1f}", "the same pass"),
        ("calibrate + encode, s", "", f"{result['calibrate_s']:.1f} + {result['encode_s']:.1f}"),
        ("decode, tokens/s", f"{dense['tokens_per_s']:.1f}", f"{coded['tokens_per_s']:.1f}"),
        (
            "step ms per 1,000 context tokens",
            f"{dense['step_ms_per_1k_context']:.2f}",
            f"{coded['step_ms_per_1k_context']:.2f}",
        ),
        ("KL to dense, nats per token", "0", f"{result['kl']:.4f}"),
        ("facts answered right", f"{right[0]} of {number}", f"{right[1]} of {number}"),
        ("answers that agree", "", f"{result['num_agreeing']} of {number}"),
    ]
