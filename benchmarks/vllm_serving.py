# SPDX-License-Identifier: Apache-2.0
"""Coded blocks in vLLM beside stock: tokens held and greedy text; ``sphkv bench serve`` has speed.

    python benchmarks/vllm_serving.py capacity --model FOLDER --calibration FILE --output DIR
    python benchmarks/vllm_serving.py text --book FILE (and the same)

Run it in the environment that ``make vllm-test`` makes.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sphkv.evaluation.environment import describe_environment
from sphkv.integrations.vllm.serve import require_vllm

HERE = Path(__file__).resolve().parent
WORKER = "sphkv.integrations.vllm.worker.SphericalWorker"
TIERS: dict[str, dict[str, Any]] = {
    "k2v3": {"key_bits": 2.0, "value_bits": 3},
    "k3v4": {"key_bits": 3.0, "value_bits": 4},
    "k4v4": {"key_bits": 4.0, "value_bits": 4},
    "k6v16": {"key_bits": 6.0, "value_bits": 16},
    "bfloat16_pages": {"key_bits": 16.0, "value_bits": 16},
    # the bytes of k2v3, and fewer
    "budget_51": {"budget_bytes": 51},
    "budget_36": {"budget_bytes": 36},
}
ROUNDED = {"fp8_rounding": "float8_e4m3fn", "bfloat16_rounding": "bfloat16"}


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(HERE),
    }


def coded(arguments: argparse.Namespace, tier: str = "k2v3") -> dict[str, Any]:
    config = {"calibration": str(arguments.calibration), **TIERS[tier]}
    given = {"worker_cls": WORKER, "additional_config": {"sphkv": config}}
    return {**given, "enable_prefix_caching": "budget_bytes" not in config}


def run_engine(job_file: Path) -> None:
    """The part that runs in a process of its own."""
    from vllm import LLM, SamplingParams

    job = json.loads(job_file.read_text())
    llm = LLM(**job["engine"])
    result: dict[str, Any] = {"tokens": [], "seconds": 0.0}
    if job["prompts"]:
        sampling = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        start = time.perf_counter()
        for answer in llm.generate(prompts, sampling, use_tqdm=False):
            result["tokens"].append(list(answer.outputs[0].token_ids))
        result["seconds"] = time.perf_counter() - start
    job_file.with_suffix(".out").write_text(json.dumps(result))


def engine(arguments: argparse.Namespace, prompts: list[list[int]], **given: Any) -> dict[str, Any]:
    """Run an engine and read its answers and what its log says it holds."""
    settings = {
        "model": str(arguments.model),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "kv_cache_memory_bytes": arguments.cache_bytes,
        "block_size": 128,
        **given,
    }
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.json"
        job.write_text(json.dumps({"engine": settings, "prompts": prompts, "max_tokens": 32}))
        done = subprocess.run(
            [sys.executable, __file__, "engine", str(job)],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        log = done.stdout + done.stderr
        if done.returncode:
            sys.exit(log[-4000:])
        result: dict[str, Any] = json.loads(job.with_suffix(".out").read_text())
    held = re.search(r"KV cache size: ([\d,]+) tokens", log)
    line = re.search(r"sphkv serves: .*", log)
    result["tokens_held"] = int(held[1].replace(",", "")) if held else None
    result["start_up_line"] = line[0] if line else None
    # results that are kept may be older than the record
    result["commit"] = describe_environment()["commit"]
    return result


def kept(
    arguments: argparse.Namespace, name: str, prompts: list[list[int]], **given: Any
) -> dict[str, Any]:
    """The result of an engine, from an earlier run of this part if ``--keep`` has it."""
    file = arguments.keep / f"{name}.json" if arguments.keep else None
    if file is not None and file.is_file():
        result: dict[str, Any] = json.loads(file.read_text())
        return result
    result = engine(arguments, prompts, **given)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result))
    return result


def capacity(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens that the same bytes of cache hold."""
    stock = kept(arguments, "empty-stock", [], dtype="bfloat16")
    record: dict[str, Any] = {"stock_bfloat16": stock["tokens_held"]}
    for tier in arguments.variants or TIERS:
        got = kept(arguments, f"empty-{tier}", [], **coded(arguments, tier))
        record[tier] = {
            "tokens": got["tokens_held"],
            "line": got["start_up_line"],
            "ratio": got["tokens_held"] / stock["tokens_held"],
        }
    return record


def read_prompts(arguments: argparse.Namespace, count: int, tokens: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    text = arguments.book.read_text(encoding="utf-8")[20_000:]
    ids: list[int] = tokenizer(text[: count * tokens * 12]).input_ids
    return [ids[at : at + tokens] for at in range(0, 2 * count * tokens, 2 * tokens)][:count]


def compare(ours: list[list[int]], theirs: list[list[int]]) -> dict[str, Any]:
    starts = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(ours, theirs, strict=True)
    ]
    length = len(theirs[0])
    return {
        "same_text": sum(start == length for start in starts),
        "same_first_token": sum(start > 0 for start in starts),
        "mean_tokens_before_a_difference": sum(starts) / len(starts),
        "of_tokens": length,
        "prompts": len(starts),
    }


def text(arguments: argparse.Namespace) -> dict[str, Any]:
    """Greedy text of long prompts beside stock, with fp8's rounding as a yardstick."""
    prompts = read_prompts(arguments, 20, arguments.prompt_tokens)
    variants: dict[str, dict[str, Any]] = {
        **{
            name: {
                "worker_cls": "vllm_rounding.RoundingWorker",
                "additional_config": {"round_to": dtype},
            }
            for name, dtype in ROUNDED.items()
        },
        **{tier: coded(arguments, tier) for tier in TIERS},
    }
    stock = kept(arguments, "text-stock", prompts)
    record: dict[str, Any] = {"stock_seconds": stock["seconds"]}
    for name in variants if arguments.variants is None else arguments.variants:
        got = kept(arguments, f"text-{name}", prompts, **variants[name])
        record[name] = {
            **compare(got["tokens"], stock["tokens"]),
            "seconds": got["seconds"],
            "tokens_held": got["tokens_held"],
            "start_up_line": got["start_up_line"],
            "commit": got.get("commit"),
        }
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["capacity", "text", "engine"])
    parser.add_argument("job", nargs="?", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--book", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--cache-bytes", type=int, default=1 << 30)
    parser.add_argument("--prompt-tokens", type=int, default=384)
    parser.add_argument("--variants", nargs="*")
    parser.add_argument("--keep", type=Path, help="folder of engine results, to go on from")
    arguments = parser.parse_args()
    if arguments.part == "engine":
        run_engine(arguments.job)
        return
    parts = {"capacity": capacity, "text": text}
    record = parts[arguments.part](arguments)
    record["cache_bytes"] = arguments.cache_bytes
    record["command"] = "python benchmarks/vllm_serving.py " + shlex.join(sys.argv[1:])
    record["environment"] = {**describe_environment(), "vllm": require_vllm()}
    shown = json.dumps(record, indent=2)
    print(shown)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / f"{arguments.part}.json").write_text(shown + "\n")


if __name__ == "__main__":
    main()
