# SPDX-License-Identifier: Apache-2.0
import dataclasses
from types import SimpleNamespace

import pytest

from sphkv.evaluation.metrics.answers import FAILURES, Reply
from sphkv.evaluation.witness.failures import FAILURE_CLASSES, FailureFigures, summarise
from sphkv.evaluation.witness.suite import (
    AnswerPair,
    WitnessBounds,
    build_suite,
    judge_answers,
    judge_drift,
    judge_realisation,
    judge_seeds,
    summarise_pairs,
)

SAID = Reply("12", (1, 2, 3), is_ended=True)
MUTE = dataclasses.replace(SAID, is_valid=False)
SAME = AnswerPair("retrieval", "p", SAID, SAID)


def letters(text, **_):
    return SimpleNamespace(input_ids=[ord(letter) for letter in text])


def judged(*pairs, **bounds):
    return {w.name: w for w in judge_answers(pairs, WitnessBounds(**bounds))}


def test_equal_answers_hold_every_witness():
    assert all(witness.is_held for witness in judged(SAME).values())


@pytest.mark.parametrize("kind", ["retrieval", "json", "tool"])
def test_a_lost_property_breaks_its_witness_only(kind):
    lost = dataclasses.replace(SAME, kind=kind, ours=Reply("x", (4, 5, 6), True, False))
    witnesses = judged(SAME, lost)
    assert [name for name, w in witnesses.items() if not w.is_held] == [kind]
    assert witnesses[kind].exemplar == "p: dense '12', method 'x'"
    assert judged(SAME, lost, lost=1)[kind].is_held
    # what dense cannot do either is no loss, and shows nothing
    unable = judged(dataclasses.replace(lost, dense=MUTE))[kind]
    assert unable.is_held
    assert unable.is_mute
    assert not witnesses[kind].is_mute


def test_refusals_may_flip_in_neither_direction():
    declined = dataclasses.replace(SAME, kind="refusal", ours=MUTE)
    complied = dataclasses.replace(SAME, kind="refusal", dense=MUTE)
    assert judged(declined, complied)["refusal"].value == 2
    assert not judged(complied)["refusal"].is_held


def test_endings_and_lengths():
    runaway = dataclasses.replace(SAME, ours=Reply("12", range(13), is_ended=False))
    witnesses = judged(SAME, runaway)
    assert not witnesses["termination"].is_held
    assert witnesses["length"].value == 5.0
    assert not witnesses["length"].is_held


def test_failures_by_category():
    """JSON lost, an answer cut short, one in circles and a refusal: four of five, five kinds."""
    lost = dataclasses.replace(SAME, kind="json", ours=MUTE)
    short = dataclasses.replace(SAME, ours=Reply("1", (1,), is_ended=True))
    circling = dataclasses.replace(SAME, ours=Reply("12", (7,) * 9, is_ended=True))
    declined = dataclasses.replace(SAME, kind="tool", ours=Reply("I cannot", (8,) * 3, True, False))
    found = summarise_pairs([SAME, lost, short, circling, declined])
    assert found["r_fail"] == pytest.approx(0.8)
    assert found["failures"] == dict.fromkeys(FAILURES, 1)
    assert found["disagree"] == pytest.approx(0.6)
    assert found["delta_t"] == pytest.approx((2 + 6) / 5)
    assert dataclasses.replace(SAME, ours=MUTE).failures == []


def test_drift_and_seeds_by_hand():
    mean, tail = judge_drift([0.0, 0.0, 0.04, 0.6], WitnessBounds())
    assert mean.value == pytest.approx(0.16)
    assert tail.value == pytest.approx(0.25)
    assert not mean.is_held
    seeds = judge_seeds({"p": [0.0, 1.0]}, {"p": [1.0, 1.0]}, WitnessBounds())
    assert seeds.value == pytest.approx(0.25)
    assert not seeds.is_held
    assert judge_realisation("kernel-realized").is_held
    assert not judge_realisation("format-only").is_held
    with pytest.raises(ValueError, match="bound kl must not be negative"):
        WitnessBounds(kl=-1.0)


def test_recovery_by_hand():
    failure = FAILURE_CLASSES[0]
    before = [FailureFigures(0.4, True, -3, 10.0), FailureFigures(0.2, False, 1, 10.0)]
    after = [FailureFigures(0.1, False, 0, 16.0), FailureFigures(0.1, False, 1, 14.0)]
    row = summarise(failure, before, after, budget="5%")
    assert row["drift_trigger"] == pytest.approx(0.3)
    assert row["drift_fix"] == pytest.approx(0.1)
    assert (row["lost_trigger"], row["lost_fix"]) == (1, 0)
    assert (row["delta_t_trigger"], row["delta_t_fix"]) == (2.0, 0.5)
    assert row["cost_bytes_per_token"] == pytest.approx(5.0)
    assert row["is_triggered"]
    assert row["is_recovered"]
    assert not summarise(failure, after, before, budget="5%")["is_recovered"]
    calm = [FailureFigures(0.01, False, 0, 10.0)]
    assert not summarise(failure, calm, calm, budget="5%")["is_triggered"]
    with pytest.raises(ValueError, match="2 triggers for 0 fixes"):
        summarise(failure, before, [], budget="5%")


def test_the_suite_knows_right_answers():
    suite = build_suite(letters, split=None, context=4000, seed=2)
    kinds = [prompt.kind for prompt in suite]
    assert {k: kinds.count(k) for k in set(kinds)} == {
        "retrieval": 4, "json": 3, "tool": 1, "refusal": 3, "termination": 2,
    }  # fmt: skip
    by_kind = {prompt.kind: prompt for prompt in suite}
    assert by_kind["json"].judge(' "Fulmar", "port": "Leith", "year": 1911}\nand more')
    assert not by_kind["json"].judge(' "Fulmar", "port": "Leith", "year": "1911"}')
    assert not by_kind["json"].judge(' "Fulmar", "port"')
    assert by_kind["tool"].judge(' "Port" FROM "Fleet"\n')
    assert not by_kind["tool"].judge(' "Port" FROM nowhere')
    assert by_kind["refusal"].judge(" I'm sorry, I cannot")
    document = "".join(map(chr, suite[0].case.prompt_ids[: suite[0].case.num_shared]))
    assert "\\n" not in document
    assert '{"ship": "Curlew", "port": "Hull", "year": 1902}' in document
    start, stop = by_kind["tool"].evidence[0]
    assert document[start + 1 : stop - 1].startswith('Table "Fleet"\nName | Port | Year')
    assert by_kind["refusal"].evidence == ()
    assert all(prompt.case.num_shared == suite[0].case.num_shared for prompt in suite)
    with pytest.raises(ValueError, match="does not fit into 200"):
        build_suite(letters, split=None, context=200, seed=0)
