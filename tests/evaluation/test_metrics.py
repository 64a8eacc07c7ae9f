# SPDX-License-Identifier: Apache-2.0
import pytest

from sphkv.evaluation.metrics.answers import (
    Failure,
    begins_with_answer,
    best_f1,
    count_failures,
    disagreement,
    drift_summary,
    exact_match,
    failure_rate,
    is_looping,
    is_refusal,
    length_drift,
    normalise_answer,
    token_f1,
    trajectory_sensitivity,
)
from sphkv.evaluation.metrics.statistics import (
    DecodeTimes,
    bootstrap_interval,
    mean_interval,
    paired_interval,
    quantile,
)
from sphkv.evaluation.runner.decoding import StopRule


def test_answers_by_hand():
    assert normalise_answer("The  Cat's,  a hat!") == "cats hat"
    # 2 of 3 words right, 2 of 2 found: P = 2/3, R = 1
    assert token_f1("New York City", "new york") == pytest.approx(0.8)
    # a word counts as often as it stands in both
    assert token_f1("go go go", "go go stop") == pytest.approx(2 / 3)
    assert token_f1("", "x") == 0.0
    assert token_f1("the", "the") == 0.0
    assert best_f1("paris", ["london", "Paris."]) == 1.0
    assert exact_match("The Paris", ["paris"]) == 1.0
    assert exact_match("Paris, France", ["paris"]) == 0.0
    assert begins_with_answer(" 12345. And", ["12345"]) == 1.0
    assert begins_with_answer("123456", ["12345"]) == 0.0
    assert begins_with_answer("", ["12345"]) == 0.0
    assert begins_with_answer("amber kelp. Remember", ["kelp", "amber kelp"]) == 1.0
    assert begins_with_answer("amber", ["amber kelp"]) == 0.0
    assert begins_with_answer("amber kelpie", ["amber kelp"]) == 0.0
    for score in (best_f1, exact_match, begins_with_answer):
        with pytest.raises(ValueError, match="at least one truth"):
            score("x", [])


def test_stability_by_hand():
    # variances 0 and 0.25
    assert trajectory_sensitivity({"a": [1.0, 1.0], "b": [0.0, 1.0]}) == pytest.approx(0.125)
    assert length_drift([10, 4], [8, 5]) == pytest.approx(1.5)
    assert disagreement([("a",), ("b",)], [("a",), ("c",)]) == 0.5
    episodes: list[list[Failure]] = [["termination"], [], ["termination", "derailment"], []]
    assert failure_rate(episodes) == 0.5
    assert count_failures(episodes)["termination"] == 2
    assert count_failures(episodes)["tool corruption"] == 0
    assert is_refusal("I\u2019m sorry, but I can't do that")
    assert not is_refusal("Sure, here is the recipe")
    assert is_looping([9, 1, 2, 1, 2, 1, 2, 1, 2])
    assert not is_looping([1, 2, 3, 4, 5, 6, 7, 8])
    summary = drift_summary([-1.0, 1.0, 3.0], bound=2.0)
    assert summary["mean"] == pytest.approx(5 / 3)
    assert summary["p50"] == 1.0
    assert summary["tail"] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="2 lengths against 1"):
        length_drift([1, 2], [1])
    with pytest.raises(ValueError, match="'b' has no score"):
        trajectory_sensitivity({"b": []})


def test_times_by_hand():
    times = DecodeTimes(2.0, 1.0, (9.0, 0.5, 0.25, 0.25), num_warm=1).to_dict()
    # one over the median: a step that something else slowed down does not count
    assert times["tok_s"] == pytest.approx(4.0)
    assert times["num_measured"] == 3
    assert times["step_p50_s"] == 0.25
    assert times["ttft_s"] == pytest.approx(12.0)
    assert times["t_decode_s"] == pytest.approx(10.0)
    assert DecodeTimes(1.0, 1.0, (0.5,), num_warm=1).to_dict()["tok_s"] is None
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    with pytest.raises(ValueError, match="share must lie"):
        quantile([1.0], 2.0)


def test_a_line_end_ends_an_answer_that_has_begun():
    rule = StopRule(end_ids=frozenset({0}), line_ids=frozenset({5}))
    assert rule.ends(0, [])
    assert not rule.ends(5, [])
    assert not rule.ends(5, [5])
    assert rule.ends(5, [5, 7])
    assert not rule.ends(7, [7])


def test_intervals_shrink_with_prompts_and_pairs_cancel_what_is_common():
    few, many = [0.0, 1.0] * 3, [0.0, 1.0] * 60
    wide, narrow = mean_interval(few), mean_interval(many)
    assert wide.mean == narrow.mean == 0.5
    assert wide.low < narrow.low < 0.5 < narrow.high < wide.high
    # the standard error of 120 coins is 0.046
    assert narrow.high - narrow.low == pytest.approx(4 * 0.0456, rel=0.15)
    assert bootstrap_interval([0.3]) == (0.3, 0.3)
    hard = {f"p{at}": float(at) for at in range(12)}
    ours = {name: value + 0.1 + 0.01 * (at % 2) for at, (name, value) in enumerate(hard.items())}
    found = paired_interval(ours, hard)
    assert found.mean == pytest.approx(0.105)
    assert 0.09 < found.low < found.high < 0.12
    assert found.count == 12
    assert paired_interval({"a": 2.0, "b": 9.0}, {"a": 1.5, "c": 0.0}).count == 1
    with pytest.raises(ValueError, match="no prompt in common"):
        paired_interval({"a": 1.0}, {"b": 1.0})
