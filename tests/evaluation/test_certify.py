# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from sphkv.cli.main import main
from sphkv.evaluation.session import Session
from sphkv.evaluation.witness_failures import FAILURE_CLASSES, diagnose
from sphkv.evaluation.witness_suite import build_suite

COMMAND = ["certify", "--budget", "90%", "--context", "1700", "--seeds", "2"]


@pytest.fixture
def run(tiny_model_folder, tmp_path):
    def certify(*flags):
        out = tmp_path / "certificate.json"
        code = main([*COMMAND, "--model", str(tiny_model_folder), "--out", str(out), *flags])
        return code, json.loads(out.read_text())

    return certify


def test_dense_is_safe_and_an_impossible_bound_is_not(run):
    code, certificate = run("--method", "dense")
    assert code == 0
    assert certificate["is_safe"]
    names = [witness["name"] for witness in certificate["witnesses"]]
    assert names == [
        "drift", "drift tail", "retrieval", "json", "tool", "refusal", "termination", "length",
        "seeds", "kernel realisation",
    ]  # fmt: skip
    assert certificate["memory"]["b_kv"] >= certificate["dense_bytes_per_token"]
    assert len(certificate["suite_id"]) == 16

    code, certificate = run("--method", "dense", "--bound-kl", "0")
    assert code == 1
    broken = [w["name"] for w in certificate["witnesses"] if not w["is_held"]]
    assert broken == ["drift"]


def test_a_fix_costs_what_it_pins(tiny_model_folder):
    session = Session(str(tiny_model_folder), calibration_tokens=256)
    suite = build_suite(session.tokenizer, data=None, context=1600, seed=0, max_new_tokens=3)
    tool = [failure for failure in FAILURE_CLASSES if failure.kind == "tool"]
    (row,) = diagnose(session, suite, "45%", lambda line: None, classes=tool)
    (prompt,) = [prompt for prompt in suite if prompt.kind == "tool"]
    ((start, stop),) = prompt.evidence
    pinned = stop - start + 64
    states = session.shape.geometry.dense_bytes_per_token
    # the rule's own sinks are pinned with and without the fix
    assert row["cost_bytes_per_token"] == pytest.approx(pinned * states / prompt.case.context)
    assert row["drift_trigger"] > 0.0
    assert row["num_prompts"] == 1


def test_what_cannot_be_examined_is_refused(tiny_model_folder, capsys):
    common = ["certify", "--model", str(tiny_model_folder), "--budget", "50%"]
    assert main([*common, "--context", "100"]) == 1
    assert "context must be at least 256, got 100" in capsys.readouterr().err
    assert main([*common, "--context", "4000"]) == 1
    assert "more than the model's 2048" in capsys.readouterr().err
    assert main([*common, "--context", "1700", "--bound-kl", "-1"]) == 1
    assert "bound kl must not be negative" in capsys.readouterr().err
