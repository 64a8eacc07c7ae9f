# SPDX-License-Identifier: Apache-2.0
"""The decode benchmark: what it refuses, how it shares its time, what a row says."""

import pytest

from sphkv.evaluation.bench import decode as bench_decode
from sphkv.evaluation.bench.decode import BenchConfig


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="'gpt-5'"):
        BenchConfig(geometries=("gpt-5",))
    with pytest.raises(ValueError, match="255"):
        BenchConfig(contexts=(255,))
    with pytest.raises(ValueError, match=r"threads .*got 0"):
        BenchConfig(threads=0)


def test_a_slow_contestant_sits_out_after_three_rounds(monkeypatch):
    monkeypatch.setattr(bench_decode, "_PATIENCE_SECONDS", 0.0)
    calls = {"quick": 0, "slow": 0}

    def call(name):
        calls[name] += 1

    medians = bench_decode._medians(
        {"quick": lambda: call("quick"), "slow": lambda: call("slow")}, 10
    )
    # one warm-up, then at least three timed rounds for everybody
    assert calls == {"quick": 4, "slow": 4}
    assert set(medians) == {"quick", "slow"}
    monkeypatch.setattr(bench_decode, "_PATIENCE_SECONDS", 60.0)
    bench_decode._medians({"quick": lambda: call("quick")}, 10)
    assert calls["quick"] == 15


def test_a_row_carries_ratios_and_bytes():
    config = BenchConfig(contexts=(512,), bits=((2.25, 3.25),), repeats=1, threads=1)
    (row,) = bench_decode.bench_decode(config, command="test")
    assert row["geometry"] == "smollm2"
    assert row["key_bits"] <= 2.25
    assert row["value_bits"] <= 3.25
    assert row["ratio_vs_sdpa_fp32"] > 0
    assert row["ratio_vs_sdpa_bf16"] > 0
    assert 0.5 < row["bytes_read_over_ledger"] <= 1.05
    assert row["environment"]["command"] == "test"
