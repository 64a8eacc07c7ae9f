# SPDX-License-Identifier: Apache-2.0
"""The server on loopback: concurrent clients, prefix hits, errors, a crash, refusals."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai  # type: ignore[import-not-found]
import pytest
from tests.integrations.vllm.conftest import START_SECONDS, server
from tests.integrations.vllm.prompts import long_prompt

from sphkv.integrations.vllm.serve import CODED_SERVER, STOCK_SERVER, RunningServer

ARGUMENTS = ["--max-num-seqs", "16", "--block-size", "64", "--kv-cache-memory-bytes", "128M"]
pytestmark = pytest.mark.timeout(3 * START_SECONDS)


def options(calibration_file: Path) -> list[str]:
    given = {"calibration": str(calibration_file), "key_bits": 3, "value_bits": 4}
    return ["--sphkv", json.dumps(given)]


@pytest.fixture(scope="module")
def running(
    model_folder: Path, calibration_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    arguments = [*ARGUMENTS, *options(calibration_file)]
    with server(model_folder, arguments, log, module=CODED_SERVER) as one:
        one.wait_until_ready(START_SECONDS)
        yield one


def client(running: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=240)


def complete(running: RunningServer, prompt: str, tokens: int = 8) -> str:
    answer = client(running).completions.create(
        model="model", prompt=prompt, max_tokens=tokens, temperature=0
    )
    return str(answer.choices[0].text)


def test_it_says_what_serves(running: RunningServer):
    assert "sphkv serves: backend native" in running.log


def test_concurrent_clients_get_their_own_answers(running: RunningServer):
    prompts = [f"{long_prompt(seed, 2)} number {seed}" for seed in range(24)]
    with ThreadPoolExecutor(24) as pool:
        texts = list(pool.map(lambda prompt: complete(running, prompt), prompts))
    assert all(texts)
    # none of these fills a block, so batching may not change them
    alone = [complete(running, prompt) for prompt in prompts[:3]]
    assert alone == texts[:3]


def test_a_repeated_prompt_hits_the_prefix_cache(running: RunningServer):
    prompt = long_prompt(77, 20)
    texts, hits = [], []
    for _ in range(3):
        texts.append(complete(running, prompt))
        hits.append(running.metric("vllm:prefix_cache_hits_total"))
    assert hits[1] - hits[0] == hits[2] - hits[1] >= 256
    # both read the same blocks; the first run saw its own tokens densely and may differ
    assert texts[0]
    assert texts[1] == texts[2]


def test_bad_requests_get_the_servers_own_errors(running: RunningServer):
    with pytest.raises(openai.BadRequestError, match="1024"):
        complete(running, "word " * 3000)
    with pytest.raises(openai.BadRequestError):
        client(running).completions.create(model="model", prompt="x", max_tokens=-1)
    with pytest.raises(openai.NotFoundError):
        client(running).completions.create(model="other", prompt="x")
    assert complete(running, "The capital of France is", 2) == " Paris."


def workers(session: int) -> list[int]:
    """Processes of a session that run the model."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue
        if int(rest.split()[3]) == session and "Worker" in name:
            found.append(int(stat.parent.name))
    return found


def test_a_killed_worker_ends_the_server_which_starts_again(
    running: RunningServer, model_folder: Path, calibration_file: Path, tmp_path: Path
):
    stream = client(running).completions.create(
        model="model", prompt=long_prompt(5), max_tokens=200, stream=True
    )
    next(iter(stream))
    killed = workers(running.process.pid)
    assert killed
    for worker in killed:
        os.kill(worker, signal.SIGKILL)
    # which error the client makes of it is not ours to say
    with pytest.raises(Exception, match=r"."):
        list(stream)
    running.process.wait(START_SECONDS)
    assert "died unexpectedly" in running.log
    arguments = [*ARGUMENTS, *options(calibration_file)]
    with server(model_folder, arguments, tmp_path / "log", module=CODED_SERVER) as again:
        again.wait_until_ready(START_SECONDS)
        assert complete(again, "The capital of France is", 2) == " Paris."


@pytest.mark.parametrize(
    ("module", "arguments", "reason"),
    [
        (
            CODED_SERVER,
            ["--sphkv", '{"calibration": "/nowhere/c.safetensors"}'],
            "no calibration file",
        ),
        # the plugin is loaded, but not the worker: stock attention must not serve instead
        (
            STOCK_SERVER,
            ["--additional-config", '{"sphkv": {}}'],
            "the worker is not SphericalWorker",
        ),
    ],
)
def test_a_server_that_cannot_code_does_not_serve(
    model_folder: Path, tmp_path: Path, module: str, arguments: list[str], reason: str
):
    given = ["--kv-cache-memory-bytes", "64M", "--max-num-seqs", "4", *arguments]
    with server(model_folder, given, tmp_path / "log", module=module) as one:
        assert one.process.wait(START_SECONDS) != 0
        assert reason in one.log


def test_a_plugin_that_fails_to_load_stops_the_server(model_folder: Path, tmp_path: Path):
    broken = tmp_path / "sitecustomize.py"
    broken.write_text("import sys\nsys.modules['sphkv.integrations.vllm.plugin'] = None\n")
    worker = "sphkv.integrations.vllm.worker.SphericalWorker"
    given = ["--worker-cls", worker, "--additional-config", '{"sphkv": {}}']
    given += ["--kv-cache-memory-bytes", "64M", "--max-num-seqs", "4"]
    path = {"PYTHONPATH": str(tmp_path)}
    log = tmp_path / "log"
    with server(model_folder, given, log, module=STOCK_SERVER, environment=path) as one:
        assert one.process.wait(START_SECONDS) != 0
        # vLLM itself only logs it and would go on with stock attention
        assert "Failed to load plugin" in one.log
        assert "import of sphkv.integrations.vllm.plugin halted" in one.log
