# SPDX-License-Identifier: Apache-2.0
"""Servers for the tests that need vLLM.

vLLM pins its own torch and transformers, so it is not part of the usual environment: there the
files below are not collected. ``make vllm-test`` makes an environment that has it.
"""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sphkv.integrations.vllm.serve import RunningServer, start_server

HAS_VLLM = importlib.util.find_spec("vllm") is not None
_NEED_VLLM = ("backend", "cuda_backend", "engine", "models", "server")
collect_ignore = [] if HAS_VLLM else [f"test_{name}.py" for name in _NEED_VLLM]

HERE = Path(__file__).resolve().parent
# a busy machine takes ten times as long as an idle one
START_SECONDS = 600
CALIBRATION_TOKENS = 1024
WAYS = ("tensor", "pipeline")
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
        logprobs: Of every token, those of the best candidates by their id as a word.
        log: Everything the engine wrote.
    """

    texts: list[str]
    tokens: list[list[int]]
    cached: list[int]
    logprobs: list[list[dict[str, float]]]
    log: str

    def part(self, start: int, end: int) -> "Generation":
        """Some of the prompts."""
        at = slice(start, end)
        lists = (self.texts[at], self.tokens[at], self.cached[at], self.logprobs[at])
        return Generation(*lists, self.log)


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
        log_file = job.with_suffix(".log")
        with log_file.open("wb") as log_to:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "generate.py"), str(job)],
                env=environment(math.prod(engine.get(f"{way}_parallel_size", 1) for way in WAYS)),
                stdout=log_to,
                stderr=log_to,
                start_new_session=True,
            )
            try:
                status = process.wait(START_SECONDS)
            finally:
                # vLLM's own processes would outlive one that was given up
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        log = log_file.read_text(errors="replace")
        assert status == 0, log[-6000:]
        return Generation(log=log, **json.loads(job.with_suffix(".out").read_text()))

    return run


@contextmanager
def server(
    model: Path,
    arguments: Sequence[str],
    log_file: Path,
    *,
    module: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningServer]:
    """Start a small server; it may stop by itself, which the caller sees in ``process``."""
    given = ["--dtype", DTYPE, "--enforce-eager", "--max-model-len", "1024", *arguments]
    with start_server(module, str(model), given, log_file, environment) as running:
        yield running
