# SPDX-License-Identifier: Apache-2.0
"""vLLM on a GPU: stock caches and coded blocks on the same requests, no network.

python3 benchmarks/gpu_vllm.py time --kv auto,fp8,turboquant_k3v4_nc,sphkv --batch 8 --prompt 32000
python3 benchmarks/gpu_vllm.py text --kv auto,sphkv           # greedy text and logprobs, compared
python3 benchmarks/gpu_vllm.py loop --kv auto,fp8,sphkv       # clients that ask again and again
python3 benchmarks/gpu_vllm.py time --loop-bytes 9663676416   # both, in one engine per cache
python3 benchmarks/gpu_vllm.py held --kv auto,sphkv:k2v4:b51  # requests that run at once
python3 benchmarks/gpu_vllm.py quality --folder MODEL --data DATA   # logprobs of true text
python3 benchmarks/gpu_vllm.py stress --kv sphkv --watch 1    # many requests, cancelled at random
python3 benchmarks/gpu_vllm.py failures --model tiny --kv sphkv     # what goes wrong

Every cache runs in a process of its own, so that a crash of one leaves the others. A line of JSON
per run goes to stdout and to the file ``--out`` names. ``gpu_vllm.py jobs FILE`` runs a command per
line of a file at once. ``--kv sphkv:k3v4`` names another tier, and
``--kv sphkv:k2v4:b51`` a budget of 51 bytes per token and KV head that complete prompts are cut
to, ``--kv sphkv:k2v4:r`` the option ``repeatable``. Weights are random unless ``--folder`` names a
model.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shlex
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu_vllm_checks import (
    compare_held,
    compare_quality,
    compare_text,
    run_failures,
    run_held,
    run_quality,
    run_stress,
    run_text,
    scheduler_of,
)
from gpu_vllm_engines import (
    ENVIRONMENT,
    MODELS,
    describe,
    engine_options,
    random_prompts,
    use_flash_3,
)

_SHORT_TOKENS = 8000


@contextmanager
def turn(given: argparse.Namespace) -> Iterator[None]:
    """Wait until all have loaded their engines or it is late, then for those before this one."""
    if not given.turns:
        yield
        return
    folder = Path(given.turns)
    (folder / f"ready-{given.turn_order}").touch()
    while time.time() < given.turn_until and len(list(folder.glob("ready-*"))) < given.turn_count:
        time.sleep(0.1)
    while not all((folder / f"done-{at}").exists() for at in range(given.turn_order)):
        time.sleep(0.1)
    print("TURN begins", flush=True)
    yield


def end_turn(given: argparse.Namespace) -> None:
    """Let the next one begin; also where this one failed before its turn."""
    if given.turns:
        for word in ("ready", "done"):
            (Path(given.turns) / f"{word}-{given.turn_order}").touch()


def time_requests(
    given: argparse.Namespace, llm: Any, batch: int, prompt: int, new: int, seed: int
) -> dict[str, Any]:
    """Time to the first tokens, then milliseconds per step while all requests decode."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    sampling = SamplingParams(
        temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False
    )
    prompts = random_prompts(given, batch, prompt, seed)
    begin = time.perf_counter()
    for at, one in enumerate(prompts):
        engine.add_request(f"{seed}-{at}", one, sampling)
    first: dict[str, float] = {}
    marks: list[float] = []
    is_full = True
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for one in outputs:
            if one.outputs[0].token_ids:
                first.setdefault(one.request_id, now)
            is_full &= not one.finished
        if len(first) == batch and is_full and outputs:
            marks.append(now)
    gaps = sorted(b - a for a, b in pairwise(marks))
    mean = (marks[-1] - marks[0]) / (len(marks) - 1) if gaps else 0.0
    return {
        "batch": batch,
        "prompt": prompt,
        "ttft_first_s": round(min(first.values()) - begin, 4),
        "ttft_last_s": round(max(first.values()) - begin, 4),
        "ms_per_step": round(1e3 * mean, 3),
        "ms_per_step_p50": round(1e3 * gaps[len(gaps) // 2], 3) if gaps else None,
        "tokens_per_s": round(batch / mean, 1) if mean else None,
        "steps": len(marks),
    }


def warm_up(given: argparse.Namespace, llm: Any) -> None:
    """Let everything that is made on first use be made: short requests, long ones, several."""
    points = [int(point.split("x")[1]) for point in given.points.split(",") if point]
    longest = max(points, default=given.prompt)
    time_requests(given, llm, 8, min(600, longest), 8, 1)
    for seed, prompt in ((2, 4000), (3, 17000)):
        if prompt <= longest:
            time_requests(given, llm, 1, prompt, 8, seed)


def run_time(given: argparse.Namespace, llm: Any) -> dict[str, Any]:
    """Times of one point, the best of several."""
    # a short prompt alone is timed more often: it takes little time, and a jitter counts for more
    repeat = given.repeat * (3 if given.batch * given.prompt <= _SHORT_TOKENS else 1)
    found = [
        time_requests(given, llm, given.batch, given.prompt, given.new, 10 + at)
        for at in range(repeat)
    ]
    best = min(found, key=lambda one: float(one["ms_per_step"]))
    waits = sorted(one["ttft_last_s"] for one in found)
    return {
        **best,
        "ttft_first_s": min(one["ttft_first_s"] for one in found),
        "ttft_last_s": waits[0],
        "ttft_last_median_s": waits[len(waits) // 2],
        "repeats": repeat,
    }


def run_loop(given: argparse.Namespace, llm: Any) -> dict[str, Any]:
    """Clients that each ask the next question when they have the answer to the last one.

    Answers of the first round are cut short at random, so that requests end one by one from the
    start. Time counts from the moment when as many requests run as ever will.
    """
    from vllm import SamplingParams

    engine, draw = llm.llm_engine, random.Random(0)
    high = min(MODELS[given.model]["vocab_size"], 30000)
    load = _Load()

    def ask(count: int) -> None:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
        )
        prompt = [draw.randrange(10, high) for _ in range(given.prompt)]
        engine.add_request(load.begin(), {"prompt_token_ids": prompt}, sampling)

    for _ in range(given.clients):
        ask(draw.randrange(given.new // 8, given.new))
    started = time.perf_counter()
    while time.perf_counter() - started < given.seconds + given.warm_up:
        outputs = engine.step()
        if time.perf_counter() - started > given.warm_up:
            load.counts = True
        for _ in range(load.note(outputs)):
            ask(given.new)
    return {"clients": given.clients, "window_s": given.seconds, **load.summary()}


def run_loop_in(given: argparse.Namespace, llm: Any) -> dict[str, Any]:
    """The loop in ``--loop-bytes`` of memory: blocks beyond these are taken out of the pool."""
    left = argparse.Namespace(**vars(given))
    left.prompt, left.new = given.loop_prompt, given.loop_new
    pool = scheduler_of(llm).kv_cache_manager.block_pool
    config = scheduler_of(llm).kv_cache_config
    block_bytes = max(one.size for one in config.kv_cache_tensors) // config.num_blocks
    # what a cache has beside blocks is part of its memory
    beside = given.kv_bytes - config.num_blocks * block_bytes
    kept = (given.loop_bytes - beside) // block_bytes
    held = pool.get_new_blocks(max(0, pool.get_num_free_blocks() - kept))
    result = run_loop(left, llm)
    size = llm.llm_engine.vllm_config.cache_config.block_size
    result |= {"prompt": left.prompt, "new": left.new, "loop_bytes": given.loop_bytes}
    return result | {"tokens_held": kept * size, "blocks": kept, "blocks_taken_away": len(held)}


class _Load:
    """When requests got what; counts from a moment on."""

    def __init__(self) -> None:
        self.counts = False
        self._asked = 0
        self._begun: dict[str, float] = {}
        self._seen: dict[str, tuple[float, int]] = {}
        self._first: list[float] = []
        self._gaps: list[float] = []
        self._marks: list[float] = []
        self._tokens = self._most = self._ended = 0

    def begin(self) -> str:
        """Name of a new request."""
        self._asked += 1
        name = f"loop-{self._asked}"
        self._begun[name] = time.perf_counter()
        return name

    def note(self, outputs: list[Any]) -> int:
        """Take note of a step; how many requests ended."""
        now, ended = time.perf_counter(), 0
        for one in outputs:
            name, count = one.request_id, len(one.outputs[0].token_ids)
            before, had = self._seen.get(name, (now, 0))
            if self.counts:
                self._tokens += count - had
                (self._gaps if had else self._first).append(
                    now - (before if had else self._begun[name])
                )
            self._seen[name] = (now, count)
            if one.finished:
                ended += 1
                del self._seen[name]
        self._most = max(self._most, len(self._seen))
        self._ended += ended * self.counts
        if self.counts:
            self._marks.append(now)
        return ended

    def summary(self) -> dict[str, Any]:
        """Throughput and latencies."""
        seconds = self._marks[-1] - self._marks[0] if len(self._marks) > 1 else 0.0
        return {
            "tokens_per_s": round(self._tokens / seconds, 1) if seconds else None,
            "requests_ended": self._ended,
            "ttft_p50_s": quantile(self._first, 0.5),
            "gap_p50_ms": quantile(self._gaps, 0.5, 1e3),
            "gap_p95_ms": quantile(self._gaps, 0.95, 1e3),
            "gap_p99_ms": quantile(self._gaps, 0.99, 1e3),
            "most_running": self._most,
        }


def quantile(values: list[float], share: float, factor: float = 1.0) -> float | None:
    if not values:
        return None
    return round(factor * sorted(values)[min(len(values) - 1, int(share * len(values)))], 3)


RUNS = {
    "time": run_time,
    "text": run_text,
    "loop": run_loop,
    "held": run_held,
    "quality": run_quality,
    "stress": run_stress,
    "failures": run_failures,
}
# What a mode compares when all caches are done, and what of their results is only for that.
COMPARE = {"text": compare_text, "held": compare_held, "quality": compare_quality}
BULKY = ("first", "again", "alone", "texts", "lengths", "kinds")


def run_child(given: argparse.Namespace) -> dict[str, Any]:
    kv = given.kv
    if kv.startswith("turboquant"):
        use_flash_3()
    begin = time.time()
    from vllm import LLM
    from vllm import __version__ as version

    imported = time.time()
    llm = LLM(**engine_options(given, kv))
    loaded = time.time()
    model = Path(given.folder).name or given.model
    result = {"kv": kv, "mode": given.mode, "model": model, "batch": given.batch}
    result |= {"prompt": given.prompt, "new": given.new, "vllm": version, "eager": given.eager}
    result |= {"import_s": round(imported - begin, 1), "load_s": round(loaded - imported, 1)}
    result |= describe(llm)
    if given.mode == "time":
        warm_up(given, llm)
    print(f"READY after {time.time() - begin:.1f} s", flush=True)
    with turn(given):
        result = _run_points(given, llm, result)
        if given.loop_bytes:
            result["loop"] = run_loop_in(given, llm)
            print("POINT " + json.dumps({"kv": kv, "loop": result["loop"]}), flush=True)
        return result


def _run_points(given: argparse.Namespace, llm: Any, result: dict[str, Any]) -> dict[str, Any]:
    for at, point in enumerate(given.points.split(",") if given.points else [""]):
        if point:
            given.batch, given.prompt = (int(part) for part in point.split("x"))
        found = {"batch": given.batch, "prompt": given.prompt, **RUNS[given.mode](given, llm)}
        if not given.points:
            return result | found
        result.setdefault("points", []).append(found)
        print("POINT " + json.dumps({"kv": given.kv, "at": at, **found}), flush=True)
    return result


def run_parent(given: argparse.Namespace) -> None:
    """Run every cache in a process of its own, then compare them."""
    work = Path(given.work)
    work.mkdir(parents=True, exist_ok=True)
    kinds = given.kv.split(",")
    logs = [
        work / f"{given.mode}-{given.model}-{kv.replace(':', '-')}-{os.getpid()}.log"
        for kv in kinds
    ]
    os.environ.update({**ENVIRONMENT, **os.environ})
    start = fork_context()
    started, results = [], []
    for kv, log in zip(kinds, logs, strict=True):
        own = argparse.Namespace(**{**vars(given), "kv": kv})
        process = start.Process(target=_be_child, args=(own, log))
        process.start()
        started.append(process)
        if not given.parallel:
            _wait(process, given.timeout)
    end = time.time() + given.timeout
    for kv, log, process in zip(kinds, logs, started, strict=True):
        code = _wait(process, max(1.0, end - time.time()))
        result = _read_log(log, {"kv": kv, "mode": given.mode, "failed": code}, given.log_lines)
        results.append(result)
        _record(given, {k: v for k, v in result.items() if k not in BULKY})
        if given.mode in COMPARE and len(results) > 1:
            _compare(given, results[0], result)


def _compare(given: argparse.Namespace, first: dict[str, Any], result: dict[str, Any]) -> None:
    """Note how a cache stands beside the first one, if there is something to compare."""
    if "failed" in first or "failed" in result:
        return
    try:
        for row in COMPARE[given.mode]([first, result]):
            _record(given, {"mode": given.mode, "beside": first["kv"], **row})
    except Exception:
        traceback.print_exc()


def fork_context() -> Any:
    """Starts copies of this process, which has vLLM and no device: it is imported once for all."""
    import torch
    from vllm import LLM  # noqa: F401

    # a device does not survive a copy
    return multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")


def _be_child(given: argparse.Namespace, log: Path) -> None:
    """Run one cache; everything it says goes to its log."""
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    # lines are there even if the process is killed
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    code = 0
    try:
        print("RESULT " + json.dumps(run_child(given)), flush=True)
    except Exception:
        traceback.print_exc()
        code = 1
    end_turn(given)
    # whatever an engine has left to do at the end is of no interest
    os._exit(code)


def _wait(process: Any, seconds: float) -> int:
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join(5)
    return int(process.exitcode if process.exitcode is not None else -9)


def run_jobs(lines: list[str]) -> None:
    """Several commands at once, in copies of this process, so that vLLM is imported once.

    Args:
        lines: Each is what would follow the script's name; ``--after`` seconds and the file
            ``--behind`` say when it begins, ``--text`` where its lines go.
    """
    os.environ.update({**ENVIRONMENT, **os.environ})
    start, started = fork_context(), []
    for line in lines:
        arguments = shlex.split(line, comments=True)
        if arguments:
            process = start.Process(target=_be_job, args=(arguments,))
            process.start()
            started.append(process)
    for process in started:
        process.join()


def _be_job(arguments: list[str]) -> None:
    given = read_arguments(arguments)
    time.sleep(given.after)
    while given.behind and not Path(given.behind).exists():
        time.sleep(0.2)
    try:
        with Path(given.text or os.devnull).open("a", buffering=1) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            run_parent(given)
    except Exception:
        traceback.print_exc()
    os._exit(0)


def _record(given: argparse.Namespace, row: dict[str, Any]) -> None:
    print("RESULT " + json.dumps(row), flush=True)
    if given.out:
        with Path(given.out).open("a") as file:
            file.write(json.dumps(row) + "\n")


def _read_log(log: Path, failed: dict[str, Any], log_lines: int) -> dict[str, Any]:
    """The result of a run; its log goes to stdout where it has none."""
    lines = log.read_text(errors="replace").splitlines()
    found = [line[7:] for line in lines if line.startswith("RESULT ")]
    if not found:
        print("\n".join(lines[-log_lines:]), flush=True)
    for line in lines:
        if "sphkv serves" in line or line.startswith(("POINT", "READY", "TURN")):
            print(line, flush=True)
    return dict(json.loads(found[-1])) if found else failed


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("mode", choices=sorted(RUNS))
    parser.add_argument("--kv", default="auto,fp8,turboquant_k3v4_nc,sphkv")
    parser.add_argument("--model", default="llama8b", choices=sorted(MODELS))
    parser.add_argument("--dtype", default="bfloat16", help="float32 where vLLM is that of a CPU")
    parser.add_argument("--points", default="", help="batch x prompt, such as 8x32000,1x4000")
    parser.add_argument("--out", default=None)
    parser.add_argument("--text", default="", help="file for what a job prints")
    parser.add_argument("--work", default="/tmp/gpu_vllm")
    parser.add_argument("--gpu-mem", type=float, default=0.85)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument(
        "--no-compile", action="store_true", help="graphs of decode steps without torch.compile"
    )
    parser.add_argument(
        "--quick", action="store_true", help="do not prepare kernels that no greedy request needs"
    )
    parser.add_argument("--prefix", action="store_true", help="keep prefixes of prompts")
    parser.add_argument("--folder", default="", help="a model with weights and a tokenizer")
    parser.add_argument("--data", default=".", help="folder with pg19/*.txt")
    parser.add_argument("--turns", default="", help="folder by which processes take turns")
    parser.add_argument("--behind", default="", help="file that a job waits for")
    parser.add_argument("--parallel", action="store_true", help="all caches at once, for checks")
    for name, value in (
        ("batch", 8), ("prompt", 32000), ("new", 128), ("repeat", 2), ("layers", 0),
        ("max-model-len", 33000), ("max-num-seqs", 0), ("kv-bytes", 0), ("batched-tokens", 0),
        ("timeout", 420), ("clients", 64), ("requests", 128), ("seconds", 120),
        ("warm-up", 15), ("log-lines", 60), ("calibration-tokens", 512),
        ("turn-count", 0), ("turn-until", 0), ("turn-order", 0), ("watch", 0),
        ("after", 0), ("alone", 40), ("request-budget", 0),
        ("loop-bytes", 0), ("loop-prompt", 8192), ("loop-new", 1024),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args(arguments)


def main() -> None:
    """Run one command, or those of a file: ``gpu_vllm.py jobs FILE``."""
    if sys.argv[1:2] == ["jobs"]:
        run_jobs(Path(sys.argv[2]).read_text().splitlines())
        return
    run_parent(read_arguments(sys.argv[1:]))


if __name__ == "__main__":
    main()
