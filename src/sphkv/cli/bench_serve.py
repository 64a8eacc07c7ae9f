# SPDX-License-Identifier: Apache-2.0
"""``sphkv bench serve``: a vLLM server with coded blocks beside a stock one."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys

from sphkv.cli.output import check_writable, format_table, write_json

_COLUMNS = (
    "server",
    "tokens_held",
    "most_requests_running",
    "preemptions",
    "answered_in_full",
    "output_tokens_per_s",
    "ttft_p50_s",
    "ttft_p95_s",
    "inter_token_p50_ms",
    "inter_token_p95_ms",
    "server_cpu_s",
)


def add_parser(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``bench serve``."""
    serve = kinds.add_parser(
        "serve", help="a vLLM server with coded blocks beside a stock one", allow_abbrev=False
    )
    serve.add_argument("--model", default="smollm2", help="smollm2, a folder, a file or a hub name")
    serve.add_argument("--text", required=True, help="file whose pieces are the prompts")
    serve.add_argument("--tier", action="append", help="such as k2v3; may be repeated")
    serve.add_argument("--calibration", help="file of sphkv calibrate")
    serve.add_argument("--cache-mib", type=int, default=96, help="cache memory of a server")
    serve.add_argument(
        "--prompt-tokens", type=_span, default=(500, 1500), metavar="LEAST,MOST", help="lengths"
    )
    serve.add_argument("--new-tokens", type=int, default=64, help="tokens of every answer")
    serve.add_argument("--requests", type=int, default=8)
    serve.add_argument("--clients", type=int, default=8, help="requests sent at a time")
    serve.add_argument("--max-running", type=int, help="sequences that a server runs at once")
    serve.add_argument("--block-tokens", type=int, default=128, help="32, 64, 96 or 128")
    serve.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    serve.add_argument("--out", help="file for the JSON record")
    serve.add_argument("--json", action="store_true", help="print JSON instead of a table")
    serve.set_defaults(run=run_serve)


def _span(text: str) -> tuple[int, int]:
    try:
        least, most = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected LEAST,MOST such as 500,1500, got {text!r}"
        ) from None
    return least, most


def run_serve(args: argparse.Namespace) -> int:
    """Load both servers, print."""
    check_writable(args.out)
    # asked to end, it ends its server too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    from sphkv.evaluation.bench.serve import ServeBenchConfig, bench_serve

    config = ServeBenchConfig(
        model=args.model,
        text=args.text,
        tiers=tuple(args.tier or ("k2v3",)),
        calibration=args.calibration,
        cache_mib=args.cache_mib,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        requests=args.requests,
        clients=args.clients,
        max_running=args.max_running,
        block_tokens=args.block_tokens,
        dtype=args.dtype,
    )
    record = bench_serve(
        config,
        command="sphkv " + shlex.join(sys.argv[1:]),
        progress=lambda name: print(f"sphkv: serving with {name}", file=sys.stderr),
    )
    if args.out:
        write_json(args.out, record)
    print(json.dumps(record, indent=2) if args.json else format_table(_COLUMNS, record["rows"]))
    return 0
