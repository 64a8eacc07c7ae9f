# SPDX-License-Identifier: Apache-2.0
"""Servers for the tests that need vLLM.

vLLM pins its own torch and transformers, so it is not part of the usual environment: there the
files below are not collected. ``make vllm-test`` makes an environment that has it.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore = [] if HAS_VLLM else ["test_backend.py", "test_engine.py", "test_server.py"]

HERE = Path(__file__).resolve().parent
START_SECONDS = 280
CALIBRATION_TOKENS = 1024
# the stock bfloat16 kernels stop with an illegal instruction on processors without bfloat16
DTYPE = "float32"


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """SmolLM2 as safetensors, converted on first use."""
    from sphkv.integrations.models import converted_folder, smollm2_gguf

    return converted_folder(smollm2_gguf(), name="smollm2")


@pytest.fixture(scope="session")
def calibration_file(model_folder: Path) -> Path:
    """Codebooks of SmolLM2 from the plugin's own text, kept beside the model."""
    from sphkv.codec.calibration_file import save_calibration
    from sphkv.integrations.models import load_model
    from sphkv.integrations.transformers.calibrate import calibrate_model
    from sphkv.integrations.vllm.calibrate import START_UP_CALIBRATION, built_in_text

    path = model_folder.parent / f"{model_folder.name}-vllm-test.safetensors"
    if not path.is_file():
        model, tokenizer = load_model(str(model_folder))
        ids = tokenizer(built_in_text(), return_tensors="pt").input_ids[:, :CALIBRATION_TOKENS]
        calibration = calibrate_model(model, ids, model_id="smollm2", options=START_UP_CALIBRATION)
        save_calibration(calibration, path)
    return path


def environment(ranks: int = 1) -> dict[str, str]:
    """Offline, quiet about usage, and with a core named for each of several ranks."""
    given = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if ranks > 1:
        # vLLM binds ranks to memory nodes by itself, and most machines have only one
        cores = sorted(os.sched_getaffinity(0))
        bound = [str(cores[rank % len(cores)]) for rank in range(ranks)]
        given["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(bound)
    return given


@dataclass
class Generation:
    """What an engine made of some prompts.

    Attributes:
        texts: One greedy continuation per prompt.
        tokens: Its token ids.
        cached: Prompt tokens that were found in the prefix cache.
        log: Everything the engine wrote.
    """

    texts: list[str]
    tokens: list[list[int]]
    cached: list[int]
    log: str


@pytest.fixture(scope="session")
def generate(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Generation]:
    """Run an engine in a process of its own over batches of prompts."""

    def run(model: Path, batches: Sequence[Sequence[str]], **engine: Any) -> Generation:
        job = tmp_path_factory.mktemp("generate") / "job.json"
        engine = {
            "model": str(model),
            "dtype": DTYPE,
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 128 << 20,
            **engine,
        }
        job.write_text(json.dumps({"engine": engine, "batches": batches, "max_tokens": 24}))
        done = subprocess.run(
            [sys.executable, str(HERE / "generate.py"), str(job)],
            env=environment(engine.get("tensor_parallel_size", 1)),
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )
        log = done.stdout + done.stderr
        assert done.returncode == 0, log[-6000:]
        return Generation(log=log, **json.loads(job.with_suffix(".out").read_text()))

    return run


@dataclass
class RunningServer:
    """A server on this machine.

    Attributes:
        url: Its address.
        process: The process that was started; it leads a session of its own.
        log_file: What it writes.
    """

    url: str
    process: subprocess.Popen[bytes]
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """Sum of a counter over its labels."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def kill(self) -> None:
        """End the whole session at once, as a crash would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@contextmanager
def server(
    model: Path, arguments: Sequence[str], log_file: Path, *, module: str
) -> Iterator[RunningServer]:
    """Start a server; it may stop by itself, which the caller sees in ``process``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    named = [str(model)] if module.startswith("sphkv") else ["--model", str(model)]
    command = [sys.executable, "-m", module, *named, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--served-model-name", "smollm2", "--dtype", DTYPE]
    command += ["--enforce-eager", "--max-model-len", "1024", *arguments]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command, env=environment(), stdout=log, stderr=log, start_new_session=True
        )
    running = RunningServer(f"http://127.0.0.1:{port}", process, log_file)
    try:
        yield running
    finally:
        if process.poll() is None:
            running.kill()


def wait_until_ready(running: RunningServer) -> None:
    """Wait for the health check, or fail with the end of the log."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if running.process.poll() is not None:
            break
        try:
            running.get("/health")
            return
        except OSError:
            time.sleep(1)
    pytest.fail(f"the server did not start:\n{running.log[-6000:]}")
