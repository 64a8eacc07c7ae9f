# SPDX-License-Identifier: Apache-2.0
"""``sphkv bench``: coded pages against dense attention, llama.cpp and a stock vLLM server."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from sphkv.cli.output import check_writable, format_table, write_json

_DECODE_COLUMNS = (
    "geometry",
    "context",
    "key_bits",
    "value_bits",
    "backend",
    "ms",
    "ratio_vs_sdpa_bf16",
    "ratio_vs_sdpa_fp32",
    "us_per_1k_tokens",
    "bytes_read_over_ledger",
    "error",
)
_SERVE_COLUMNS = (
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


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare ``bench`` and what it can time."""
    bench = commands.add_parser("bench", help="time kernels", allow_abbrev=False)
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="WHAT")
    decode = kinds.add_parser(
        "decode", help="decode attention over coded pages against torch SDPA", allow_abbrev=False
    )
    decode.add_argument(
        "--geometry", action="append", help="smollm2 or llama-3.1-8b; may be repeated"
    )
    decode.add_argument("--context", action="append", type=int, help="tokens; may be repeated")
    decode.add_argument(
        "--bits", action="append", type=_bits, help="KEY,VALUE bits per element; may be repeated"
    )
    decode.add_argument(
        "--device", default="cpu", help="cpu, or cuda: the GPU benchmark of a source checkout"
    )
    decode.add_argument("--backend", default="auto", help="auto, or a name of sphkv ls backends")
    decode.add_argument("--threads", type=int, default=2)
    decode.add_argument("--repeats", type=int, default=15)
    decode.add_argument("--out", help="file for the JSON rows")
    decode.add_argument("--json", action="store_true", help="print JSON instead of a table")
    decode.set_defaults(run=_run_decode)
    llama = kinds.add_parser(
        "llama", help="whole decode steps against llama.cpp", allow_abbrev=False
    )
    llama.add_argument("--gguf", required=True, help="model file that both sides read")
    llama.add_argument("--context", action="append", type=int, help="tokens, rising; repeated")
    llama.add_argument("--tier", default="k2v3", help="tier of the coded cache")
    llama.add_argument("--threads", type=int, default=2)
    llama.add_argument("--rounds", type=int, default=5, help="turns of each engine at a context")
    llama.add_argument("--out", help="file for the JSON record")
    llama.add_argument("--json", action="store_true", help="print JSON instead of a table")
    llama.set_defaults(run=_run_llama)
    _add_serve(kinds)


def _bits(text: str) -> tuple[float, float]:
    parts = text.split(",")
    try:
        key, value = (float(part) for part in parts)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected KEY,VALUE such as 2.25,3.25, got {text!r}"
        ) from None
    return key, value


def _run_decode(args: argparse.Namespace) -> int:
    """Check, time, print."""
    check_writable(args.out)
    if args.device != "cpu":
        return _run_gpu_decode(args)
    from sphkv.evaluation.bench.decode import BenchConfig, bench_decode

    defaults = BenchConfig()
    config = BenchConfig(
        geometries=tuple(args.geometry or defaults.geometries),
        contexts=tuple(args.context or defaults.contexts),
        bits=tuple(args.bits or defaults.bits),
        backend=args.backend,
        threads=args.threads,
        repeats=args.repeats,
    )
    rows = bench_decode(config, command="sphkv " + shlex.join(sys.argv[1:]))
    if args.out:
        write_json(args.out, rows)
    print(json.dumps(rows, indent=2) if args.json else format_table(_DECODE_COLUMNS, rows))
    return 0


def _run_gpu_decode(args: argparse.Namespace) -> int:
    """``benchmarks/gpu_decode.py``, whose baselines and cases are no part of the package."""
    if args.device != "cuda":
        raise ValueError(f"device must be cpu or cuda, got {args.device!r}")
    script = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu_decode.py"
    if not script.is_file():
        raise ValueError(f"--device cuda needs a source checkout: there is no {script}")
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--device cuda needs an NVIDIA GPU, and torch sees none")
    command = [sys.executable, str(script)] + (["--rows", args.out] if args.out else [])
    return subprocess.run(command, check=False).returncode


def _run_llama(args: argparse.Namespace) -> int:
    """Time both sides, print."""
    check_writable(args.out)
    from sphkv.evaluation.bench.llama import LlamaBenchConfig, bench_llama

    config = LlamaBenchConfig(args.gguf, tier=args.tier, threads=args.threads, rounds=args.rounds)
    if args.context:
        config = dataclasses.replace(config, contexts=tuple(args.context))
    record = bench_llama(config, command="sphkv " + shlex.join(sys.argv[1:]))
    if args.out:
        write_json(args.out, record)
    if args.json:
        print(json.dumps(record, indent=2))
    else:
        columns = ("engine", "ms_per_1k_tokens", "least_ms_per_1k_tokens")
        print(format_table(columns, record["rows"]))
        print(f"lowest of llama.cpp over ours: {record['lowest_llama_over_ours']:.2f}")
    return 0


def _add_serve(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    serve.add_argument("--rate", type=float, help="open loop: requests per second, not clients")
    serve.add_argument("--shared-tokens", type=int, default=0, help="what all prompts begin with")
    serve.add_argument("--max-running", type=int, help="sequences that a server runs at once")
    serve.add_argument("--block-tokens", type=int, default=128, help="32, 64, 96 or 128")
    serve.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    serve.add_argument("--device", default="cpu", help="cpu or cuda")
    serve.add_argument("--eager", action="store_true", help="on a GPU, do not compile")
    serve.add_argument(
        "--stock-cache", action="append", help="a stock server of this cache type too, such as fp8"
    )
    serve.add_argument("--out", help="file for the JSON record")
    serve.add_argument("--json", action="store_true", help="print JSON instead of a table")
    serve.set_defaults(run=_run_serve)


def _span(text: str) -> tuple[int, int]:
    try:
        least, most = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected LEAST,MOST such as 500,1500, got {text!r}"
        ) from None
    return least, most


def _run_serve(args: argparse.Namespace) -> int:
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
        device=args.device,
        is_eager=args.eager,
        stock_caches=tuple(args.stock_cache or ()),
        rate=args.rate,
        shared_tokens=args.shared_tokens,
    )
    record = bench_serve(
        config,
        command="sphkv " + shlex.join(sys.argv[1:]),
        progress=lambda name: print(f"sphkv: serving with {name}", file=sys.stderr),
    )
    if args.out:
        write_json(args.out, record)
    print(
        json.dumps(record, indent=2) if args.json else format_table(_SERVE_COLUMNS, record["rows"])
    )
    return 0
