# SPDX-License-Identifier: Apache-2.0
"""The demonstration with a tiny model: every figure it shows is there, and the ceiling holds."""

import json
import re

import pytest

pytest.importorskip("transformers", reason="the extra sphkv[transformers] is not installed")

from sphkv.cli.main import main
from sphkv.evaluation.demo.run import DemoConfig


def test_three_caches_side_by_side(model_folder, tmp_path, capsys):
    page = tmp_path / "new" / "report.html"
    argv = ["demo", "--model", str(model_folder), "--context", "2500", "--budget", "50%"]
    assert main([*argv, "--report", str(page), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    dense, tier, controller = result["caches"]
    assert [cache["name"] for cache in (dense, tier, controller)] == ["dense", "tier", "controller"]
    assert dense["kl"] == 0
    assert dense["peak_bytes"] == result["dense_b_kv"] * dense["steps"]["num_tokens"][-1]
    for cache in (tier, controller):
        assert cache["peak_bytes"] < dense["peak_bytes"]
        assert cache["kl"] > 0
        assert len(cache["answers"]) == len(result["facts"])
    steps = controller["steps"]
    assert steps["num_tokens"][0] == 2500
    assert len(steps["num_tokens"]) > DemoConfig().decode_tokens
    assert all(size <= limit for size, limit in zip(steps["bytes"], steps["limit"], strict=True))
    assert tier["steps"]["limit"] is None
    text = page.read_text(encoding="utf-8")
    assert text.count("<polyline") == 3
    assert "tier map" in text
    assert not re.search("https?://", text)


def test_a_budget_that_does_not_hold_yet_is_refused_before_the_prefill(model_folder, capsys):
    argv = ["demo", "--model", str(model_folder), "--context", "1024", "--budget", "10%"]
    assert main(argv) == 1
    said = capsys.readouterr().err
    assert "budget 10% holds from" in said
    assert "prefill" not in said
