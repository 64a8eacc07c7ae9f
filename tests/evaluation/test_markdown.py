# SPDX-License-Identifier: Apache-2.0
"""The README's table says what the records say, and nothing else of the file changes."""

import re
from pathlib import Path
from typing import Any

import pytest

from sphkv.evaluation.records import load_records
from sphkv.evaluation.report.markdown import (
    bytes_needed,
    certificate_tables,
    compared_points,
    draw_decoding,
    markers,
    readme_table,
    record_table,
    write_readme,
)
from sphkv.evaluation.report.sections import load_study

BEGIN, END = markers("decoding")
SETUP = {
    "substrate": {}, "window": {}, "seed": 0, "decode": {}, "model_shape": {},
    "dense_bytes_per_token": 1000,
    "environment": {"device": "d", "num_threads": 1, "versions": {"torch": "2"}},
}  # fmt: skip


def record(method: str, case: int, kl: float, *, delta: float = 0.0, share: float = 0.05) -> Any:
    return {
        "id": f"{method}{case}", "workload": "lm", "model": "m", "split": "development",
        "context": 4096, "num_following": 512, "case": f"lm-4096-{case}", "method": method,
        "budget": "100%" if method == "dense" else "5%", "status": "measured", "reason": "",
        "setup": SETUP,
        "quality": {
            "kl": kl, "kl_without_worst": kl / 2, "nll_delta": delta, "same_top1": 0.9,
            "kl_max": 8 * kl,
        },
        "memory": {"dense_share": share, "b_kv_tables": 8.0, "realisation": "kernel-realized"},
    }  # fmt: skip


RECORDS = [
    record("dense", 0, 0.0, share=1.0),
    *(record("joint", case, 0.02 + 0.01 * case, share=0.04 + 0.002 * case) for case in range(4)),
    *(record("snapkv", case, 0.12 + 0.01 * case, delta=-0.03) for case in range(4)),
]


def test_a_point_is_the_mean_of_prompts_and_the_worst_peak():
    _, joint, snapkv = compared_points(RECORDS)
    assert joint.kl.mean == pytest.approx(0.035)
    assert joint.kl.low < 0.035 < joint.kl.high
    assert joint.peak == pytest.approx(0.046)
    assert joint.tables == pytest.approx(0.008)
    assert snapkv.kl.count == 4


def test_the_table_shows_both_verdicts_and_paired_differences():
    lines = readme_table(RECORDS).splitlines()
    assert "4 prompts of 4,096 tokens of the development split" in lines[0]
    joint, snapkv = lines[4:6]
    assert joint.startswith("| `joint` | 5% | 4.60% + 0.80% | 0.035 [")
    assert joint.endswith("| 90.0% | yes | yes |")
    # every prompt differs by 0.1, so the interval of the difference is a point
    assert "| 0.1 [0.1, 0.1] | -0.030 [-0.030, -0.030] |" in snapkv
    # worse by KL, better by loss: the two rules disagree
    assert snapkv.endswith("| no | yes |")
    assert not any("`dense`" in line for line in lines)
    assert lines[-2:] == ["| `joint` | < 4.6% | < 4.6% |", "| `snapkv` | > 5% | < 5% |"]


def test_bytes_that_a_bound_needs_lie_between_two_budgets():
    # four times the bytes, a hundredth of the loss: a tenth is half-way in both logarithms
    assert bytes_needed([(0.16, 0.001), (0.04, 0.1)], 0.01) == pytest.approx(0.08)
    # a loss below zero has no logarithm
    assert bytes_needed([(0.04, 0.03), (0.16, -0.01)], 0.01) == pytest.approx(0.08)
    # passing, failing and passing again counts from the last failure on
    assert bytes_needed([(0.01, 0.0), (0.04, 0.1), (0.16, 0.001)], 0.01) == pytest.approx(0.08)
    assert bytes_needed([(0.04, 0.001), (0.16, 0.0001)], 0.01) == "< 4%"
    assert bytes_needed([(0.04, 0.001), (0.16, 0.1)], 0.01) == "> 16%"


def test_only_what_lies_between_the_markers_changes(tmp_path: Path):
    file = tmp_path / "README.md"
    file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for table in ("first", "second"):
        write_readme(file, table)
    assert file.read_text() == f"before\n{BEGIN}\nsecond\n{END}\nafter\n"
    file.write_text("no markers")
    with pytest.raises(ValueError, match="must hold"):
        write_readme(file, "table")


def test_the_readme_shows_its_records_and_nothing_else(tmp_path: Path):
    root = Path(__file__).parents[2]
    records = load_records([root / "results/decoding/smollm2-4096-test.jsonl"])
    table = readme_table(records)
    text = (root / "README.md").read_text(encoding="utf-8")
    assert f"{BEGIN}\n{table}\n{END}" in text
    begin, end = markers("qwen-32k-test")
    qwen = load_records([root / "results/decoding/qwen-32k-test.jsonl"])
    assert f"{begin}\n{record_table('qwen-32k-test', qwen)}\n{end}" in text
    mpl = pytest.importorskip("matplotlib", reason="the extra sphkv[plots] is not installed")
    shown = (root / "docs/images/decoding.svg").read_text(encoding="utf-8")
    if f"Matplotlib v{mpl.__version__}" not in shown:
        pytest.skip(f"the picture was drawn by another matplotlib than {mpl.__version__}")
    draw_decoding(records, tmp_path / "decoding.svg")
    drawn = (tmp_path / "decoding.svg").read_text(encoding="utf-8")
    # processors round the last digits of coordinates differently, and names of parts are hashes
    words, places = zip(*(_split_numbers(text) for text in (drawn, shown)), strict=True)
    assert words[0] == words[1]
    assert places[0] == pytest.approx(places[1], abs=1e-3)


def _split_numbers(svg: str) -> tuple[str, list[float]]:
    """A picture without its numbers and the names of its parts, and the numbers."""
    named = re.sub(r'(?<=["#])[a-z][0-9a-f]{8,}', "", svg)
    number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
    return re.sub(number, "", named), [float(each) for each in re.findall(number, named)]


def test_tables_of_the_evidence_are_those_of_its_records():
    root = Path(__file__).parents[2]
    text = (root / "docs/evidence.md").read_text(encoding="utf-8")
    places = ("ablations/*.jsonl", "workloads/*.jsonl", "decoding/qwen-*.jsonl")
    files = [file for place in places for file in root.glob(f"results/{place}")]
    made = {file.stem: record_table(file.stem, load_records([file])) for file in files}
    for file in root.glob("results/certificates/*.json"):
        made[file.stem] = certificate_tables(load_study(file, field="witnesses"))
    assert made
    for name, table in made.items():
        begin, end = markers(name)
        assert f"{begin}\n{table}\n{end}" in text, name


def test_what_differs_in_more_than_the_method_is_not_compared():
    other = {**record("kivi", 0, 0.1), "split": "test"}
    with pytest.raises(ValueError, match="the records have 2"):
        compared_points([*RECORDS, other])


def test_the_picture_is_the_same_for_the_same_records(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="the extra sphkv[plots] is not installed")
    pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for picture in pictures:
        draw_decoding(RECORDS, picture)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert pictures[0].stat().st_size > 5000


def test_texts_are_told_with_their_worst_token():
    lines = record_table("qwen", RECORDS).splitlines()
    assert lines[0].startswith("| method | budget | peak | KL | above `joint` | worst token |")
    assert lines[3].startswith("| `joint` | 5% | 4.60% | 0.035 [")
    # 0.05 is the KL of the worst prompt, and its worst token has eight times as much
    assert "| - | 0.4 | +0.0000 " in lines[3]
    assert "| 0.1 [0.1, 0.1] | 1.2 | -0.0300 " in lines[4]


def test_long_texts_are_told_by_distance():
    long = record("joint", 0, 0.02)
    bins = {"edges": [32, 128, 512, 2048], "tokens": [32, 96, 384, 1536], "kl": [0.1, 0.2, 0.4, 1]}
    long = {**long, "num_following": 2048, "quality": {**long["quality"], "kl_by_distance": bins}}
    _, _, row = record_table("drift", [long]).splitlines()
    # (32 * 0.1 + 96 * 0.2 + 384 * 0.4) / 512, and 1 behind it
    assert "| 0.1 | 0.2 | 0.4 | 1 | 0.344 | 1 | 2.91 |" in row


def test_needles_are_counted_by_length_and_against_dense():
    def needle(method: str, case: int, found: float, context: int) -> Any:
        quality = {"found": found, "is_same": found, "kl": 0.5}
        text = record(method, case, 0.0)
        return {**text, "workload": "needle", "context": context, "quality": quality}

    cases = [
        *(needle("dense", case, 1.0, 8064 if case else 31744) for case in range(3)),
        *(needle("joint", case, float(case > 0), 8064 if case else 31744) for case in range(3)),
    ]
    _, _, dense, joint = record_table("needles", cases).splitlines()
    assert "| 2 of 2 | 1 of 1 | 3 of 3 | 0 | 0 | 3 of 3 | 0.5 |" in dense
    assert "| 2 of 2 | 0 of 1 | 2 of 3 | 1 | 0 | 2 of 3 | 0.5 |" in joint


def test_questions_are_told_by_place_and_distractors():
    def question(method: str, case: int, f1: float, place: str, others: int) -> Any:
        quality = {"f1": f1, "is_same": f1, "kl": 0.5, "length_drift": 0, "failures": []}
        facets = {"position": place, "num_distractors": others}
        text = record(method, case, 0.0)
        return {**text, "workload": "qa", "quality": quality, "facets": facets}

    cases = [question("joint", 0, 1.0, "late", 8), question("joint", 1, 0.5, "early", 30)]
    head, _, row = record_table("w2", cases).splitlines()
    assert head.endswith(
        "| position early | position late | distractors up to 8 | distractors more than 16 |"
    )
    assert row.endswith("| 50 | 100 | 100 | 50 |")
