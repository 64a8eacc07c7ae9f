# SPDX-License-Identifier: Apache-2.0
"""The comparison with llama.cpp: what it refuses and how it counts."""

import sys

import pytest

pytest.importorskip("transformers", reason="the coded cache runs inside transformers")

from sphkv.evaluation import bench_llama
from sphkv.evaluation.bench_llama import LlamaBenchConfig, slope_ms_per_1k


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
    with pytest.raises(ValueError, match="steps must be positive, got 0"):
        LlamaBenchConfig(gguf, steps=0)


def test_a_missing_package_is_named(gguf, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ImportError, match="llama-cpp-python"):
        bench_llama.bench_llama(LlamaBenchConfig(gguf))


def test_slope_of_a_line():
    assert slope_ms_per_1k([1000, 2000, 4000], [7.0, 9.0, 13.0]) == pytest.approx(2.0)


def test_every_token_is_fed_once_and_in_order(gguf):
    config = LlamaBenchConfig(gguf, contexts=(700, 1500), steps=3)
    fed: list[int] = []
    ms = bench_llama._time_steps(fed.extend, list(range(1505)), config)
    assert fed == list(range(1505))
    assert len(ms) == 2
