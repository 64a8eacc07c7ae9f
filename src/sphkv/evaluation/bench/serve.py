# SPDX-License-Identifier: Apache-2.0
"""vLLM's server with coded blocks beside stock: the same requests, the same cache memory.

The load goes to an OpenAI endpoint. In a closed loop every client sends its next request after an
answer; in an open loop requests come at random times, whatever the server does.
"""

from __future__ import annotations

import http.client
import json
import queue
import random
import re
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sphkv.core.tiers import coded_tier
from sphkv.evaluation.environment import describe_environment
from sphkv.integrations.vllm.options import check_block_size
from sphkv.integrations.vllm.serve import (
    CODED_SERVER,
    STOCK_SERVER,
    RunningServer,
    require_vllm,
    start_server,
)

_TIMEOUT_SECONDS = 1800
_POLL_SECONDS = {"cpu": 2.0, "cuda": 0.1}
# The cache has its bytes by name; vLLM compares this part of a GPU with what is free, and no more.
_GPU_SHARE = 0.05

STOCK = "stock"
DEVICES = ("cpu", "cuda")
DTYPES = {"float32": 4, "bfloat16": 2}
_TIER = re.compile(r"k(\d+(?:\.\d+)?)v(\d+)(?::b(\d+))?")
_START_SECONDS = 600
_CHARACTERS_PER_TOKEN = 6
_LARGEST = 1 << 20
_LOG_TAIL = 4000


@dataclass(slots=True)
class Answer:
    """When one request got what.

    Attributes:
        sent: Seconds of a monotonic clock when it was sent.
        arrivals: The same for every chunk of new text.
        num_tokens: New tokens by the server's own count; 0 if it failed.
        error: Why it failed, or None.
    """

    sent: float
    arrivals: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str | None = None


def tokenize(url: str, text: str) -> list[int]:
    """Token ids of a text, by the server."""
    body = json.dumps({"model": "model", "prompt": text, "add_special_tokens": False}).encode()
    request = urllib.request.Request(url + "/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        tokens: list[int] = json.loads(answer.read())["tokens"]
    return tokens


def complete(url: str, prompt: Sequence[int], num_new: int) -> Answer:
    """Ask for greedy text and note when it comes; a failure is part of the answer."""
    body = {"model": "model", "prompt": list(prompt), "max_tokens": num_new, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_SECONDS)
    answer = Answer(time.monotonic())
    try:
        header = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), header)
        stream = connection.getresponse()
        if stream.status != http.client.OK:
            answer.error = f"status {stream.status}: {stream.read(300)!r}"
            return answer
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            event: dict[str, Any] = json.loads(line[len(b"data: ") :])
            if event.get("choices"):
                answer.arrivals.append(time.monotonic())
            if event.get("usage"):
                answer.num_tokens = int(event["usage"]["completion_tokens"])
        if not answer.num_tokens:
            answer.error = f"the answer broke off after {len(answer.arrivals)} pieces"
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return answer


def run_closed_loop(
    url: str, prompts: Sequence[Sequence[int]], num_new: int, num_clients: int
) -> list[Answer]:
    """Send every prompt once, at most one per client at a time."""
    waiting: queue.SimpleQueue[Sequence[int]] = queue.SimpleQueue()
    for prompt in prompts:
        waiting.put(prompt)
    answers: list[Answer] = []

    def client() -> None:
        while True:
            try:
                prompt = waiting.get_nowait()
            except queue.Empty:
                return
            answers.append(complete(url, prompt, num_new))

    threads = [threading.Thread(target=client) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def run_open_loop(
    url: str, prompts: Sequence[Sequence[int]], num_new: int, rate: float
) -> list[Answer]:
    """Send so many prompts a second on average, at times that do not depend on the answers."""
    pick = random.Random(1)
    answers: list[Answer] = []
    threads: list[threading.Thread] = []
    due = time.monotonic()
    for prompt in prompts:
        time.sleep(max(0.0, due - time.monotonic()))

        def client(own: Sequence[int] = prompt) -> None:
            answers.append(complete(url, own, num_new))

        threads.append(threading.Thread(target=client))
        threads[-1].start()
        due += pick.expovariate(rate)
    for thread in threads:
        thread.join()
    return answers


class GaugeWatch:
    """Notes the largest value of a metric while a load runs; use as a context manager.

    Args:
        read: Gives the value.
        seconds: Time between two looks.
    """

    def __init__(self, read: Callable[[], float], seconds: float) -> None:
        self.largest = 0.0
        self._read, self._seconds = read, seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(self._seconds):
            try:
                self.largest = max(self.largest, float(self._read()))
            except OSError:
                # a busy server may answer late; the next look will do
                continue

    def __enter__(self) -> GaugeWatch:
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Value below which this percentage lies; None if there are fewer than two."""
    if len(values) < 2:
        return None
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def summarise(answers: Sequence[Answer], num_new: int) -> dict[str, Any]:
    """Counts, throughput and latencies of a load."""
    whole = [answer for answer in answers if answer.num_tokens == num_new]
    ended = [answer.arrivals[-1] for answer in whole if answer.arrivals]
    seconds = max(ended) - min(answer.sent for answer in answers) if ended else None
    first = [answer.arrivals[0] - answer.sent for answer in whole]
    gaps = [
        late - early
        for answer in whole
        for early, late in zip(answer.arrivals, answer.arrivals[1:], strict=False)
    ]
    return {
        "requests": len(answers),
        "answered_in_full": len(whole),
        "errors": sorted({answer.error for answer in answers if answer.error})[:5],
        "seconds": seconds,
        "output_tokens_per_s": num_new * len(whole) / seconds if seconds else None,
        "ttft_p50_s": percentile(first, 50),
        "ttft_p95_s": percentile(first, 95),
        "inter_token_p50_ms": _milliseconds(percentile(gaps, 50)),
        "inter_token_p95_ms": _milliseconds(percentile(gaps, 95)),
        "inter_token_p99_ms": _milliseconds(percentile(gaps, 99)),
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


@dataclass(frozen=True, slots=True)
class ServeBenchConfig:
    """What to serve and how to load it.

    Attributes:
        model: ``"smollm2"``, a folder, a GGUF file or a hub name.
        text: File whose pieces are the prompts.
        tiers: Tiers of the coded servers, such as ``k2v3``, or ``k2v4:b51`` with a budget of 51
            bytes per token and KV head; stock always runs too.
        calibration: File of ``sphkv calibrate``; the servers calibrate themselves without it.
        cache_mib: Cache memory of a server; see ``stock_cache_bytes`` for float32.
        prompt_tokens: Least and most tokens of a prompt.
        new_tokens: Tokens that every request asks for.
        requests: Requests in all.
        clients: Clients; each sends its next request when it has its answer.
        max_running: Sequences that a server may run at once; as many as clients if None.
        dtype: Type that the model computes in.
        block_tokens: Tokens of a block.
        device: ``"cpu"`` or ``"cuda"``.
        is_eager: Whether servers on a GPU start without compiling and capturing graphs, sooner and
            to slower steps; those on CPUs always do.
        stock_caches: More stock servers by vLLM's name of their cache type, such as ``fp8``.
        rate: Requests per second of an open loop, in which clients do not count; None for a closed
            loop.
        shared_tokens: Tokens that all prompts begin with, part of their lengths.
    """

    model: str
    text: str
    tiers: tuple[str, ...] = ("k2v3",)
    calibration: str | None = None
    cache_mib: int = 96
    prompt_tokens: tuple[int, int] = (500, 1500)
    new_tokens: int = 64
    requests: int = 8
    clients: int = 8
    max_running: int | None = None
    dtype: str = "float32"
    block_tokens: int = 128
    device: str = "cpu"
    is_eager: bool = False
    stock_caches: tuple[str, ...] = ()
    rate: float | None = None
    shared_tokens: int = 0

    def __post_init__(self) -> None:
        """Reject what no server can be asked for."""
        for name in ("cache_mib", "new_tokens", "requests", "clients", "max_running"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= _LARGEST:
                raise ValueError(f"{name} must be in 1..{_LARGEST}, got {value}")
        check_block_size(self.block_tokens)
        self._check_load()
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {sorted(DTYPES)}, got {self.dtype!r}")
        if self.device not in DEVICES:
            raise ValueError(f"device must be one of {DEVICES}, got {self.device!r}")
        if self.device == "cuda" and self.dtype != "bfloat16":
            raise ValueError(f"on a GPU dtype must be bfloat16, got {self.dtype!r}")
        for name in ("text", "calibration"):
            path = getattr(self, name)
            if path is not None and ("\0" in path or not Path(path).is_file()):
                raise ValueError(f"{name} must be a file, got {path!r}")
        for tier in self.tiers:
            self.tier_options(tier)

    def _check_load(self) -> None:
        least, most = self.prompt_tokens
        if not 0 < least <= most <= _LARGEST:
            raise ValueError(f"prompt_tokens must rise from at least 1, got {least},{most}")
        if not 0 <= self.shared_tokens < least:
            raise ValueError(f"shared_tokens must be in 0..{least - 1}, got {self.shared_tokens}")
        if self.rate is not None and not 0.0 < self.rate <= _LARGEST:
            raise ValueError(f"rate must be above 0 and up to {_LARGEST}, got {self.rate}")

    @property
    def cache_bytes(self) -> int:
        """Cache memory of a coded server."""
        return self.cache_mib << 20

    @property
    def stock_cache_bytes(self) -> int:
        """Cache memory of the stock server: what its states would take as bfloat16.

        A float32 server stores float32, so it gets twice the bytes and holds as many tokens.
        """
        return self.cache_bytes * DTYPES[self.dtype] // DTYPES["bfloat16"]

    def tier_options(self, tier: str) -> dict[str, Any]:
        """Options of a coded server at a tier.

        Raises:
            ValueError: There is no such tier.
        """
        match = _TIER.fullmatch(tier)
        if match is None:
            raise ValueError(f"a tier is written like k2v3 or k2v4:b51, got {tier!r}")
        options: dict[str, Any] = {"key_bits": float(match[1]), "value_bits": int(match[2])}
        coded_tier(options["key_bits"], options["value_bits"], page_tokens=self.block_tokens)
        if match[3] is not None:
            options["budget_bytes"] = int(match[3])
            if not options["budget_bytes"]:
                raise ValueError(f"a budget must be at least 1 byte, got tier {tier!r}")
        if self.calibration is not None:
            options["calibration"] = self.calibration
        return options


def bench_serve(
    config: ServeBenchConfig, *, command: str, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Load the stock servers, then a coded one per tier.

    Args:
        config: What to do.
        command: The command line, for the record.
        progress: Told what is being done.

    Raises:
        ImportError: vLLM is not installed here.
        RuntimeError: A server did not start.
    """
    vllm = require_vllm()
    from sphkv.integrations.models import resolve_source

    model = str(resolve_source(config.model))
    rows = []
    for name in (STOCK, *config.stock_caches, *config.tiers):
        if progress is not None:
            progress(name)
        rows.append(_bench_one(config, model, name))
    return {
        "command": command,
        "config": asdict(config),
        "environment": {**describe_environment(), "vllm": vllm},
        "rows": rows,
    }


def _bench_one(config: ServeBenchConfig, model: str, name: str) -> dict[str, Any]:
    is_stock = name not in config.tiers
    cache_bytes = config.stock_cache_bytes if is_stock else config.cache_bytes
    arguments = ["--dtype", config.dtype]
    if config.device == "cpu" or config.is_eager:
        arguments.append("--enforce-eager")
    if config.device == "cuda":
        arguments += ["--gpu-memory-utilization", str(_GPU_SHARE)]
    arguments += ["--max-model-len", str(config.prompt_tokens[1] + config.new_tokens)]
    arguments += ["--max-num-seqs", str(config.max_running or config.clients)]
    if config.device == "cpu" or not is_stock:
        arguments += ["--block-size", str(config.block_tokens)]
    if name in config.stock_caches:
        arguments += ["--kv-cache-dtype", name]
    arguments += ["--kv-cache-memory-bytes", str(cache_bytes)]
    if not is_stock:
        arguments += ["--sphkv", json.dumps(config.tier_options(name))]
    module = STOCK_SERVER if is_stock else CODED_SERVER
    with (
        tempfile.TemporaryDirectory() as folder,
        start_server(module, model, arguments, Path(folder) / "log") as running,
    ):
        running.wait_until_ready(_START_SECONDS)
        return {"server": name, "cache_bytes": cache_bytes, **_load(config, running)}


def _load(config: ServeBenchConfig, running: RunningServer) -> dict[str, Any]:
    held = re.search(r"KV cache size: ([\d,]+) tokens", running.log)
    prompts = make_prompts(config, lambda text: tokenize(running.url, text))
    # the first request pays for what is made on first use
    complete(running.url, prompts[0][:16], 2)
    before = running.cpu_seconds()
    seconds = _POLL_SECONDS[config.device]
    with GaugeWatch(lambda: running.metric("vllm:num_requests_running"), seconds) as watch:
        if config.rate is None:
            answers = run_closed_loop(running.url, prompts, config.new_tokens, config.clients)
        else:
            answers = run_open_loop(running.url, prompts, config.new_tokens, config.rate)
    if running.process.poll() is not None:
        raise RuntimeError(f"the server stopped under load:\n{running.log[-_LOG_TAIL:]}")
    after = running.cpu_seconds()
    return {
        "tokens_held": int(held[1].replace(",", "")) if held else None,
        "most_requests_running": int(watch.largest),
        "preemptions": int(running.metric("vllm:num_preemptions_total")),
        **summarise(answers, config.new_tokens),
        "prompt_tokens": sum(map(len, prompts)),
        "server_cpu_s": None if before is None or after is None else after - before,
    }


def make_prompts(config: ServeBenchConfig, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Ragged prompts cut from the text one after the other, the same ones for every server.

    All begin with the first ``shared_tokens``; beyond these no two have anything in common.

    Raises:
        ValueError: The text is too short for them.
    """
    pick, shared = random.Random(0), config.shared_tokens
    lengths = [pick.randint(*config.prompt_tokens) - shared for _ in range(config.requests)]
    total = shared + sum(lengths)
    text = Path(config.text).read_text(encoding="utf-8", errors="replace")
    ids = encode(text[: total * _CHARACTERS_PER_TOKEN])
    if len(ids) < total:
        raise ValueError(f"{config.text} gives {len(ids)} tokens; the prompts need {total}")
    ends = [shared + sum(lengths[: at + 1]) for at in range(len(lengths))]
    return [
        ids[:shared] + ids[end - length : end] for length, end in zip(lengths, ends, strict=True)
    ]
