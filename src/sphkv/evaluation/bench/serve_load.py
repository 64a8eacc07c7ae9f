# SPDX-License-Identifier: Apache-2.0
"""Closed-loop load on an OpenAI endpoint: every client sends its next request after an answer."""

from __future__ import annotations

import http.client
import json
import queue
import statistics
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_SECONDS = 1800
_POLL_SECONDS = 2.0


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


class GaugeWatch:
    """Notes the largest value of a metric while a load runs; use as a context manager."""

    def __init__(self, read: Any) -> None:
        self.largest = 0.0
        self._read = read
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
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
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
