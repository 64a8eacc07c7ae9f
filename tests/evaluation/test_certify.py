# SPDX-License-Identifier: Apache-2.0
import json
from typing import Any

import pytest
import torch

from sphkv.cache.engine import CacheEngine
from sphkv.cache.retention import RetentionResidency
from sphkv.cli.main import main
from sphkv.errors import BudgetError
from sphkv.evaluation.harness.subject import EngineSubject, ProductSubject
from sphkv.evaluation.report.sections import certificate_part
from sphkv.evaluation.runner.decoding import StopRule, decode_tokens
from sphkv.evaluation.runner.session import Session
from sphkv.evaluation.schema import Certificate, FailureRow
from sphkv.evaluation.validate import check_value
from sphkv.evaluation.witness.failures import FAILURE_CLASSES, diagnose
from sphkv.evaluation.witness.suite import Witness, build_suite
from sphkv.evaluation.workloads.case import Case
from sphkv.retention.gate import GateOptions
from sphkv.retention.protection import ProtectionRule

COMMAND = ["certify", "--budget", "90%", "--context", "1700", "--seeds", "2", "--following", "32"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A calibration that the first test fits and all others find."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def run(tiny_model_folder, tmp_path, kept):
    def certify(*flags):
        out = tmp_path / "certificate.json"
        where = ["--model", str(tiny_model_folder), "--keep", str(kept), "--out", str(out)]
        code = main([*COMMAND, *where, *flags])
        return code, json.loads(out.read_text())

    return certify


def test_an_impossible_bound_breaks_its_witness_only(run):
    code, certificate = run("--method", "dense", "--bound-kl", "0")
    assert code == 1
    assert not certificate["is_safe"]
    names = [witness["name"] for witness in certificate["witnesses"]]
    assert names == [
        "budget", "drift", "drift tail", "retrieval", "json", "tool", "refusal", "termination",
        "length", "seeds", "kernel realisation",
    ]  # fmt: skip
    assert [w["name"] for w in certificate["witnesses"] if not w["is_held"]] == ["drift"]
    assert certificate["memory"]["b_kv"] >= certificate["dense_bytes_per_token"]
    assert len(certificate["suite_id"]) == 16


def test_joint_is_examined_with_its_safeguards(run):
    """Prompts end inside a run of 16 tokens, so the protected suffix begins inside one too."""
    _, certificate = run("--method", "joint", "--per-witness", "1", "--no-gate")
    assert not certificate["config"]["has_gate"]
    assert certificate["config"]["suffix_tokens"] == 32
    kinds = ("retrieval", "json", "tool", "refusal", "termination")
    assert certificate["prompts"] == dict.fromkeys(kinds, 1)
    assert not list(check_value(certificate, Certificate))
    assert set(certificate["stability"]) == {"delta_t", "disagree", "r_fail", "failures"}
    (drift,) = [w for w in certificate["witnesses"] if w["name"] == "drift"]
    assert 0.0 < drift["value"] < 0.05


def test_on_a_gpu_the_public_cache_is_told_what_to_protect(tiny_model_folder):
    factory = Session(str(tiny_model_folder)).factory
    factory._device = torch.device("cuda")  # nothing is stored, so none is needed
    rule = ProtectionRule(suffix_tokens=32, spans=((5, 9),))
    subject = factory.controlled("50%", protection=rule, gate=GateOptions(), context=400)
    assert isinstance(subject, ProductSubject)
    retention = subject.engine.config.retention
    assert retention.protection.spans == ((5, 9), (368, 400))
    assert retention.gate == GateOptions()
    subject.close()
    with pytest.raises(ValueError, match="on the CPU only"):
        factory.controlled("50%", protection=ProtectionRule(outlier_ratio=None))


def test_a_budget_that_breaks_while_decoding_is_recorded(run, monkeypatch, capsys):
    begin, passes = CacheEngine.begin, []

    def grow(self, step):
        # the first cache watches the drift; the third token of the second one is one too many
        if self.is_coded:
            passes.append(self)
            if len(set(map(id, passes))) == 2 and passes.count(self) == 3:
                raise BudgetError(96, 0, 1000)
        begin(self, step)

    monkeypatch.setattr(CacheEngine, "begin", grow)
    code, certificate = run("--method", "joint", "--per-witness", "1", "--no-gate")
    assert code == 1
    assert not certificate["is_safe"]
    (budget,) = [w for w in certificate["witnesses"] if w["name"] == "budget"]
    assert (budget["value"], budget["is_held"]) == (1.0, False)
    assert "the request needs 96 bytes and exceeds the 0 bytes that are free" in budget["exemplar"]
    assert "the budget did not hold: " + budget["exemplar"] in capsys.readouterr().out
    # the others were examined all the same
    assert any(w["name"] == "drift" and w["value"] > 0 for w in certificate["witnesses"])
    assert certificate["stability"]["delta_t"] >= 0


def test_a_budget_that_holds_nothing_is_recorded(run, capsys):
    code, certificate = run("--method", "joint", "--per-witness", "1", "--budget", "1%")
    assert code == 1
    assert certificate["memory"] is None
    assert certificate["stability"] is None
    (budget,) = [w for w in certificate["witnesses"] if not w["is_held"]]
    assert budget["name"] == "budget"
    assert budget["value"] == 6
    assert "tokens, dense, needs" in budget["exemplar"]
    assert "nothing could be stored" in capsys.readouterr().out
    assert "nothing could be stored" in certificate_part(certificate)


@pytest.mark.parametrize("is_safe", [True, False])
def test_only_a_safe_point_exits_with_zero(run, monkeypatch, capsys, is_safe):
    witness = Witness("tool", 0.0 if is_safe else 1.0, 0.0, 0.0)
    made = {
        "is_safe": is_safe,
        "witnesses": [witness.to_dict()],
        "memory": {"b_kv": 25.0},
        "dense_bytes_per_token": 100,
    }
    monkeypatch.setattr("sphkv.evaluation.witness.certify.certify", lambda config, tell, keep: made)
    code, certificate = run()
    assert code == (0 if is_safe else 1)
    assert certificate["is_safe"] == is_safe
    said = capsys.readouterr().out
    assert ("90% (25.0% of dense bytes): SAFE" in said) == is_safe
    assert "show nothing: tool" in said


def test_a_fix_costs_what_it_pins(tiny_model_folder):
    session = Session(str(tiny_model_folder), calibration_tokens=256)
    suite = build_suite(session.tokenizer, split=None, context=1600, seed=0, max_new_tokens=3)
    tool = [failure for failure in FAILURE_CLASSES if failure.kind == "tool"]
    lines: list[str] = []
    (row,) = diagnose(session, suite, ["60%", "45%"], lines.append, classes=tool, seeds=(0, 1))
    (prompt,) = [prompt for prompt in suite if prompt.kind == "tool"]
    ((start, stop),) = prompt.evidence
    pinned = stop - start + 64
    states = session.shape.geometry.dense_bytes_per_token
    # sinks are pinned either way, and tokens of an unfinished page are dense without being pinned
    most = pinned * states / prompt.case.context
    assert most - 16 * states / prompt.case.context <= row["cost_bytes_per_token"] <= most
    assert row["drift_trigger"] > 0.0
    assert row["num_prompts"] == 1
    # a random model has nothing to lose, so that only other signs can show a failure
    assert row["num_shown"] == 0
    assert row["budget"] == ("60%" if row["delta_t_trigger"] > 0 else "45%")
    assert not list(check_value(row, FailureRow))
    assert "tool corruption at" in lines[0]


def test_what_cannot_be_examined_is_refused(tiny_model_folder, capsys):
    common = ["certify", "--model", str(tiny_model_folder), "--budget", "50%"]
    assert main([*common, "--context", "100"]) == 1
    assert "context must be at least 256, got 100" in capsys.readouterr().err
    assert main([*common, "--context", "4000"]) == 1
    assert "more than the model's 2048" in capsys.readouterr().err
    assert main([*common, "--context", "1700", "--bound-kl", "-1"]) == 1
    assert "bound kl must not be negative" in capsys.readouterr().err


def test_the_gate_is_told_every_margin(tiny_model_folder):
    session = Session(str(tiny_model_folder), calibration_tokens=256)
    read = session.reader.read(
        Case(
            "p",
            "needle",
            "p",
            tuple(3 + at % 200 for at in range(400)),
            answers=("",),
            max_new_tokens=3,
        )
    )
    cache: Any = session.factory.controlled("60%", gate=GateOptions())
    cache.store_prompt(read.states)
    got = decode_tokens(session.model, cache, read.states.hidden[-1:], 3, StopRule(frozenset()))
    assert len(got.token_ids) == 3
    # three tokens, and the one after them that the limit cut off
    assert isinstance(cache, EngineSubject)
    residency = cache.engine.rows[0].residency
    assert isinstance(residency, RetentionResidency)
    gate = residency.gate
    assert gate is not None
    assert gate.num_steps == 4
