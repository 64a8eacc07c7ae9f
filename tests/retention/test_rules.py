# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sphkv.retention.errors import TierErrors
from sphkv.retention.features import head_spread, segment_spread
from sphkv.retention.gate import (
    GateOptions,
    StabilityGate,
    danger_score,
    norm_quantile,
    tier_bounds,
)
from sphkv.retention.policy import RetentionPolicy, load_policy, save_policy
from sphkv.retention.protection import (
    ProtectionRule,
    Segment,
    SegmentSpans,
    _middle_and_largest,
    _middle_and_largest_by_sort,
    find_segments,
    widen_to_runs,
)


def test_protection_marks_sinks_spans_suffix_and_outliers():
    radius = torch.ones(2, 100)
    radius[1, 50] = 10
    rule = ProtectionRule(sink_tokens=4, suffix_tokens=3, spans=((20, 22),))
    mask = rule.state_mask(radius)
    everywhere = {0, 1, 2, 3, 20, 21, 97, 98, 99}
    assert set(mask[0].nonzero()[:, 0].tolist()) == everywhere
    assert set(mask[1].nonzero()[:, 0].tolist()) == everywhere | {50}


def test_outliers_are_bounded():
    radius = torch.ones(1, 100)
    radius[0, :30] = torch.arange(30) + 10.0
    mask = ProtectionRule(sink_tokens=0, max_outliers=5).state_mask(radius)
    assert mask[0].nonzero()[:, 0].tolist() == [25, 26, 27, 28, 29]


def test_sorting_finds_the_same_outliers():
    radius = torch.rand(3, 101, generator=torch.Generator().manual_seed(0))
    for tokens, most in ((101, 7), (100, 0), (5, 5)):
        part = radius[:, :tokens]
        (one, few), (two, same) = (
            find(part, most) for find in (_middle_and_largest, _middle_and_largest_by_sort)
        )
        assert torch.equal(one, two)
        assert torch.equal(few.sort(1).values, same.sort(1).values)
        assert few.shape == (3, most)


def test_runs_are_protected_whole():
    mask = torch.zeros(1, 40, dtype=torch.bool)
    mask[0, 20] = mask[0, 39] = True
    assert widen_to_runs(mask)[0].nonzero()[:, 0].tolist() == list(range(16, 40))


def test_a_span_outside_the_prompt_is_refused():
    with pytest.raises(ValueError, match=r"\(90, 120\).*100 tokens"):
        ProtectionRule(spans=((90, 120),)).token_mask(100)


def test_segments_follow_the_separators():
    ids = [1, 2, 7, 8, 3, 3, 7, 8, 4, 4, 4, 9, 5]
    spans = find_segments(ids, passage_marks=[(7, 8)], turn_marks=[(9,)])
    assert spans.retrieved == ((2, 11),)
    labels = spans.label(13)
    assert labels.tolist() == [Segment.PREFIX] * 2 + [Segment.RETRIEVED] * 9 + [Segment.RECENT] * 2
    assert find_segments([1, 2, 3], passage_marks=[(7, 8)]).retrieved == ()
    assert SegmentSpans().label(4, recent_tokens=1).tolist() == [0, 0, 0, 2]


def test_overlapping_spans_are_refused():
    with pytest.raises(ValueError, match="must rise"):
        SegmentSpans(((5, 9), (8, 12)))


def test_equal_heads_have_no_concentration():
    spread = head_spread(torch.full((4, 10), 26))
    assert spread.entropy == pytest.approx(math.log(4))
    assert spread.gini == pytest.approx(0)
    skewed = head_spread(torch.tensor([[4, 4], [0, 0]]))
    assert skewed.entropy == pytest.approx(0)
    assert skewed.gini == pytest.approx(0.5)
    assert skewed.bytes_per_token == (4.0, 0.0)


def test_segment_statistics_count_states_and_bytes():
    each = torch.tensor([[10, 0, 20, 0], [10, 10, 0, 0]])
    found = segment_spread(each, torch.tensor([0, 1, 1, 2]))
    assert found["prefix"] == {"rho": 1.0, "bytes": 10.0, "tokens": 1.0}
    assert found["retrieved"] == {"rho": 0.5, "bytes": 7.5, "tokens": 2.0}
    assert found["recent"]["rho"] == 0


def test_gate_holds_between_its_thresholds():
    gate = StabilityGate(GateOptions(tau_drop=0.5, tau_prot=1.0, cooldown_steps=2))
    states = [gate.observe(danger) for danger in (0.7, 1.2, 0.7, 0.2, 0.2, 0.7, 0.9)]
    #           below, on,   held, cooling, off, stays off
    assert states == [False, True, True, True, False, False, False]
    assert gate.num_switches == 2
    assert gate.num_on_steps == 3


@given(st.lists(st.floats(0.51, 0.99), min_size=1, max_size=50), st.booleans())
def test_gate_never_flips_inside_the_band(dangers, is_on):
    gate = StabilityGate(GateOptions(tau_drop=0.5, tau_prot=1.0, cooldown_steps=0))
    gate.observe(2.0 if is_on else 0.0)
    assert {gate.observe(danger) for danger in dangers} == {is_on}


def test_danger_is_drift_over_margin():
    assert danger_score(0.5, 2.0) == 0.25
    assert danger_score(0.5, 0.0) == math.inf
    assert danger_score(0.0, 0.0) == 0.0
    with pytest.raises(ValueError, match="-1"):
        danger_score(-1.0, 1.0)
    with pytest.raises(ValueError, match="tau_drop"):
        GateOptions(tau_drop=1.0, tau_prot=1.0)


def test_tier_bounds_are_the_papers_at_the_radius_that_gets_attention():
    direction = torch.tensor([[9.0, 0.02, 0.0], [9.0, 0.1, 0.0]])
    length = torch.tensor([[9.0, 0.04, 0.0], [9.0, 0.0, 0.0]])
    none = torch.zeros(2, 3)
    errors = TierErrors(none, none, none, none, direction, length)
    query = torch.zeros(2, 20, 4)
    query[0, :, 1], query[1, :, 3] = 2.0, 10.0
    radius = torch.tensor([[1.0, 3.0, 5.0], [4.0, 4.0, 4.0]])
    attention = torch.tensor([[0.0, 3.0, 1.0], [1.0, 1.0, 1.0]])
    bound = tier_bounds(query, radius, attention, errors, scale=0.5)
    # scale |q| (eps_r + r eps_theta) with r = 3.5, and 2 that counts as one
    assert bound[0].tolist() == pytest.approx([1.0, 0.5 * 2 * (0.04 + 3.5 * 0.02), 0.0])
    assert bound[1].tolist() == [1.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="direction"):
        tier_bounds(query, radius, attention, TierErrors(none, none, none, none), scale=0.5)


def test_a_gate_goes_on_where_another_stopped():
    options = GateOptions(cooldown_steps=3)
    gate, other = StabilityGate(options), StabilityGate(options)
    for danger in (0.1, 2.0, 0.1):
        gate.observe(danger)
    other.load_state(gate.state())
    for danger in (0.1, 0.1, 0.1, 0.7, 3.0):
        assert gate.observe(danger) == other.observe(danger)
    assert (gate.num_switches, gate.num_steps, gate.num_on_steps) == (
        other.num_switches,
        other.num_steps,
        other.num_on_steps,
    )
    with pytest.raises(ValueError, match="5 counts"):
        other.load_state(torch.zeros(4, dtype=torch.int64))


def test_norm_quantile_is_over_the_window_of_a_group():
    query = torch.zeros(4, 10, 3)
    query[:2, :, 0] = torch.arange(20.0).view(2, 10)
    query[2:, :, 1] = 7
    assert norm_quantile(query, 2).tolist() == [18.0, 7.0]


def test_policy_survives_a_file(tmp_path):
    policy = RetentionPolicy(
        alpha_drop=2.0, sensitivity=((1.0, 2.0),), surprise=((0.1,),), model_id="m"
    )
    save_policy(policy, tmp_path / "p.json")
    assert load_policy(tmp_path / "p.json") == policy
    policy.check_shape(1, 2, 1)
    with pytest.raises(ValueError, match="2 of 5 query heads"):
        policy.check_shape(2, 5, 1)
    with pytest.raises(ValueError, match="surprise of 1 layers, the model has 1 of 2 KV heads"):
        policy.check_shape(1, 2, 2)
    with pytest.raises(ValueError, match=r"surprise\[0\]\[0\] must be finite and not negative"):
        replace(policy, surprise=((-0.1,),))
    (tmp_path / "bad.json").write_text('{"alpha_omega": 1}', encoding="utf-8")
    with pytest.raises(ValueError, match="alpha_omega"):
        load_policy(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="attention_mix"):
        RetentionPolicy(attention_mix=1.5)
