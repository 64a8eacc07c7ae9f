# SPDX-License-Identifier: Apache-2.0
import copy
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sphkv.cli.main import main
from sphkv.errors import UnfairComparisonError
from sphkv.evaluation.frontier import (
    OperatingPoint,
    Panel,
    PanelKey,
    build_frontier,
    build_panels,
    choose_star,
    is_dominated,
    pareto_envelope,
    psi,
    synergy_gap,
    winner,
)
from sphkv.evaluation.metrics.statistics import bootstrap_interval, paired_sign_flip
from sphkv.evaluation.records import RecordFile


def point(method, budget, b_kv, speed, quality, *, index=0, b_hbm=0.0):
    return OperatingPoint(method, budget, index, b_kv, b_hbm, speed, quality)


# Dense: 1000 bytes, 10 tok/s, 70 points. Worked out by hand below.
POINTS = (
    point("dense", "100%", 1000.0, 10.0, 70.0),
    point("a", "10%", 100.0, 20.0, 60.0),  # fast and small, but 10 points worse
    point("a", "20%", 200.0, 16.0, 69.3),  # star: 0.08
    point("a", "30%", 300.0, 18.0, 69.5),  # 0.06, fastest retained
    point("a", "40%", 400.0, 15.0, 70.0),  # dominated by 20%
    point("b", "20%", 250.0, 8.0, 70.0),  # retained, but slower than dense
    point("b", "50%", 500.0, 12.0, 69.2),  # exactly at the floor
    point("c", "20%", 220.0, 12.0, 69.1),  # nothing retained
)


def panel(points=POINTS, tolerance=0.8, unit="points"):
    return Panel(PanelKey("m", "qa", 4096), tuple(points), (), tolerance, unit)


def test_hand_computed_panel():
    frontier = build_frontier(panel())
    a, b, c = (next(m for m in frontier.methods if m.method == name) for name in "abc")
    assert [p.budget for p in a.retained] == ["20%", "30%", "40%"]
    assert [p.budget for p in a.excluded] == ["10%"]
    assert [p.budget for p in a.envelope] == ["20%", "30%"]
    assert a.star is not None
    assert a.star.budget == "20%"
    assert a.gamma_s == pytest.approx(1.8)
    assert a.g_iso_q == pytest.approx(1.8)
    assert a.gamma_m == pytest.approx(0.1)
    assert a.gamma_m_iso == pytest.approx(0.2)
    assert a.r_iso_s == pytest.approx(5.0)
    assert a.least_b_kv == 200.0
    assert [p.budget for p in b.retained] == ["20%", "50%"]
    assert b.gamma_s == pytest.approx(1.2)
    assert b.gamma_m == pytest.approx(0.5)
    assert b.r_iso_s == pytest.approx(2.0)
    assert c.star is None
    assert c.gamma_s is None
    assert c.gamma_m == pytest.approx(0.22)
    assert c.r_iso_s is None
    best = winner(frontier)
    assert best is not None
    assert best[0] == "a"
    assert best[1] == pytest.approx(1.25)


def test_language_modelling_is_bounded_absolutely():
    points = (
        point("dense", "100%", 1000.0, 10.0, -0.02),
        point("a", "10%", 100.0, 10.0, -0.05),
        point("a", "5%", 50.0, 10.0, -0.051),
    )
    frontier = build_frontier(panel(points, 0.05, "nats"))
    assert [p.budget for p in frontier.methods[1].retained] == ["10%"]


def test_ties_of_the_star():
    same = point("a", "x", 100.0, 10.0, 0.0, index=3, b_hbm=5.0)
    larger = point("a", "y", 200.0, 20.0, 0.0, index=4)
    assert choose_star([same, larger]) is larger
    less_traffic = point("a", "z", 100.0, 10.0, 0.0, index=9, b_hbm=4.0)
    assert choose_star([same, less_traffic]) is less_traffic
    earlier = point("a", "w", 100.0, 10.0, 0.0, index=1, b_hbm=5.0)
    assert choose_star([same, earlier]) is earlier
    assert choose_star([]) is None


def test_a_panel_in_which_dense_scores_nothing_has_no_winner():
    points = (point("dense", "100%", 1000.0, 10.0, 0.0), point("a", "1%", 10.0, 10.0, 0.0))
    frontier = build_frontier(panel(points))
    assert not frontier.is_informative
    assert winner(frontier) is None


def test_a_panel_needs_dense():
    with pytest.raises(ValueError, match="no dense point"):
        build_frontier(panel(POINTS[1:]))


sizes = st.floats(1.0, 1e4)


@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=30))
def test_no_point_of_an_envelope_is_dominated(pairs):
    points = [point("a", str(i), b, s, 0.0, index=i) for i, (b, s) in enumerate(pairs)]
    envelope = pareto_envelope(points)
    assert envelope
    assert not any(is_dominated(p, points) for p in envelope)
    for p in points:
        assert p in envelope or is_dominated(p, points)


def test_psi_and_synergy():
    assert psi(70.0, math.e, beta=2.0) == pytest.approx(72.0)
    assert synergy_gap(3.0, [1.0, 2.5]) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="speed must be positive"):
        psi(1.0, 0.0)
    with pytest.raises(ValueError, match="at least one other"):
        synergy_gap(1.0, [])


def test_paired_test_by_hand():
    # of 8 sign patterns only +++ and --- reach |sum| = 3
    assert paired_sign_flip([1.0, 1.0, 1.0]) == pytest.approx(0.25)
    assert paired_sign_flip([1.0, -1.0]) == pytest.approx(1.0)
    assert paired_sign_flip([0.0, 0.0]) == 1.0
    assert paired_sign_flip([1.0] * 20) < 0.001
    low, high = bootstrap_interval([1.0, 2.0, 3.0])
    assert 1.0 <= low < 2.0 < high <= 3.0
    assert bootstrap_interval([5.0]) == (5.0, 5.0)


SETUP = {
    "substrate": {"pages": "paged"},
    "window": {"num_warm": 1, "num_measured": 2},
    "seed": 0,
    "decode": {"rule": "greedy"},
    "model_shape": {"num_layers": 1},
    "dense_bytes_per_token": 1000,
    "environment": {"device": "d", "num_threads": 2, "versions": {"torch": "2"}},
}


def record(method, budget, case, f1, b_kv, speed, **changes):
    return {
        "id": f"{method}{budget}{case}",
        "model": "m",
        "workload": "qa",
        "case": f"qa-4096-{case}",
        "context": 4000,
        "method": method,
        "budget": budget,
        "status": "measured",
        "reason": "",
        "facets": {"position": "early"},
        "quality": {"f1": f1, "agreement_f1": 1.0, "kl": 0.0, "length_drift": 0},
        "memory": {"b_kv": b_kv, "b_hbm": b_kv, "realisation": "kernel-realized"},
        "times": {"tok_s": speed, "t_prefill_s": 1.0, "t_allocate_write_s": 1.0, "ttft_s": 2.0},
        **changes,
    }


RECORDS = [
    record("dense", "100%", "x", 0.4, 1000.0, 10.0),
    record("dense", "100%", "y", 0.6, 1000.0, 12.0),
    record("a", "20%", "x", 0.4, 200.0, 20.0),
    record("a", "20%", "y", 0.6, 220.0, 22.0),
    record("b", "20%", "x", 0.2, 100.0, 20.0),
    record("b", "20%", "y", 0.6, 100.0, 20.0),
    record("b", "1%", "y", None, 0, 0, status="refused", reason="too small", quality=None),
    record("b", "1%", "x", None, 0, 0, status="refused", reason="too small", quality=None),
]


def with_setup(records):
    return [{**copy.deepcopy(r), "setup": copy.deepcopy(SETUP)} for r in records]


def test_points_average_prompts():
    (found,) = build_panels(with_setup(RECORDS))
    by_name = {p.method: p for p in found.points}
    assert by_name["dense"].quality == pytest.approx(50.0)
    assert by_name["a"].b_kv == pytest.approx(210.0)
    assert by_name["a"].speed == pytest.approx(21.0)
    assert found.refused == (("b", "1%", "too small"),)
    frontier = build_frontier(found)
    retained = {m.method: len(m.retained) for m in frontier.methods}
    assert retained == {"dense": 1, "a": 1, "b": 0}
    (agreeing,) = build_panels(with_setup(RECORDS), quality_field="agreement_f1")
    assert {m.method: len(m.retained) for m in build_frontier(agreeing).methods}["b"] == 1


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("substrate", "pages"), "contiguous"),
        (("window", "num_warm"), 9),
        (("seed",), 1),
        (("decode", "rule"), "sampled"),
        (("environment", "num_threads"), 8),
    ],
)
def test_unfair_records_are_refused(path, value):
    records = with_setup(RECORDS)
    place = records[2]["setup"]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(UnfairComparisonError, match=f"records differ in {path[0]}"):
        build_panels(records)


def test_questions_that_dense_cannot_answer_are_judged_by_agreement():
    mute = copy.deepcopy(RECORDS)
    for entry in mute:
        if entry["quality"] is not None:
            entry["quality"].update(f1=0.0, agreement_f1=0.5 if entry["method"] == "b" else 1.0)
    (found,) = build_panels(with_setup(mute))
    assert found.key.workload == "qa, agreement with dense"
    assert {p.method: p.quality for p in found.points} == {"dense": 100.0, "a": 100.0, "b": 50.0}
    assert build_panels(with_setup(RECORDS))[0].key.workload == "qa"


def test_points_are_judged_by_the_same_prompts():
    (found,) = build_panels(with_setup(RECORDS))
    assert found.left_out == ()
    (found,) = build_panels(with_setup([r for r in RECORDS if r["id"] != "a20%y"]))
    assert found.left_out == ("qa-4096-y",)
    by_name = {p.method: p for p in found.points}
    assert by_name["dense"].quality == pytest.approx(40.0)
    assert {p.num_cases for p in found.points} == {1}
    with pytest.raises(UnfairComparisonError, match="no prompt of m, qa was measured with every"):
        build_panels(with_setup([r for r in RECORDS if r["id"] not in ("a20%y", "b20%x")]))


def test_command(tmp_path, capsys):
    path, out = tmp_path / "records.jsonl", tmp_path / "frontier.json"
    with RecordFile(path) as file:
        file.begin_run(SETUP)
        for entry in RECORDS:
            file.append(entry)
    assert main(["frontier", str(path), "--out", str(out)]) == 0
    assert "least bytes at equal quality: a (no other retained)" in capsys.readouterr().out
    (result,) = json.loads(out.read_text())
    assert result["least_b_kv"] == {"method": "a", "margin": None}
    assert result["methods"][1]["star_interval"] == "40 to 60"
    assert result["methods"][1]["gamma_s"] == pytest.approx(21.0 / 11.0)
    assert main(["frontier", str(path), "--delta", "15"]) == 0
    assert "least bytes at equal quality: b (next needs 2.10x)" in capsys.readouterr().out
