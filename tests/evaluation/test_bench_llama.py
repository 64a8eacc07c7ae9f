# SPDX-License-Identifier: Apache-2.0
"""The comparison with llama.cpp: what it refuses and how it counts."""

import sys

import pytest

pytest.importorskip("transformers", reason="the coded cache runs inside transformers")

from sphkv.evaluation.bench import llama as bench_llama
from sphkv.evaluation.bench.llama import LlamaBenchConfig, slope_ms_per_1k, time_steps


@pytest.fixture
def gguf(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    return str(file)


def test_bad_settings_are_named(gguf):
    with pytest.raises(ValueError, match=r"absent\.gguf"):
        LlamaBenchConfig("absent.gguf")
    with pytest.raises(ValueError, match=r"\[1000\]"):
        LlamaBenchConfig(gguf, contexts=(1000,))
    with pytest.raises(ValueError, match=r"\[1000, 1005\]"):
        LlamaBenchConfig(gguf, contexts=(1000, 1005))
    with pytest.raises(ValueError, match="rounds must be positive, got 0"):
        LlamaBenchConfig(gguf, rounds=0)


def test_a_missing_package_is_named(gguf, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ImportError, match="llama-cpp-python"):
        bench_llama.bench_llama(LlamaBenchConfig(gguf))


def test_slope_of_a_line():
    assert slope_ms_per_1k([1000, 2000, 4000], [7.0, 9.0, 13.0]) == pytest.approx(2.0)


class _Held:
    """Keeps what it was fed."""

    def __init__(self, ids: list[int], log: list[str], name: str) -> None:
        self.ids, self.log, self.name = ids, log, name
        self.held: list[int] = []

    def fill(self, context: int) -> None:
        self.held = self.ids[:context]

    def step(self, token: int) -> None:
        self.held.append(token)
        self.log.append(self.name)


def test_engines_take_turns_and_go_on_with_the_same_text(gguf):
    config = LlamaBenchConfig(gguf, contexts=(70, 150), rounds=3)
    ids = list(range(162))
    log: list[str] = []
    engines = {name: _Held(ids, log, name) for name in ("a", "b")}
    times = time_steps(engines, ids, config)
    assert engines["a"].held == engines["b"].held == ids
    assert log[:12] == ["a"] * 4 + ["b"] * 4 + ["a"] * 4
    assert [len(steps) for steps in times["a"]] == [9, 9]
