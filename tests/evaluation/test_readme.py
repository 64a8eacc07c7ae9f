# SPDX-License-Identifier: Apache-2.0
"""The README's table says what the records say, and nothing else of the file changes."""

from pathlib import Path
from typing import Any

import pytest

from sphkv.evaluation.records import load_records
from sphkv.evaluation.report.readme import (
    compared_points,
    draw_decoding,
    markers,
    readme_table,
    write_readme,
)
from sphkv.evaluation.report.sections import load_study
from sphkv.evaluation.report.tables import certificate_tables, record_table

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
    joint, snapkv = lines[-2:]
    assert joint.startswith("| `joint` | 5% | 4.60% + 0.80% | 0.035 [")
    assert joint.endswith("| 90.0% | yes | yes |")
    # every prompt differs by 0.1, so the interval of the difference is a point
    assert "| 0.1 [0.1, 0.1] | -0.030 [-0.030, -0.030] |" in snapkv
    # worse by KL, better by loss: the two rules disagree
    assert snapkv.endswith("| no | yes |")
    assert not any("`dense`" in line for line in lines)


def test_only_what_lies_between_the_markers_changes(tmp_path: Path):
    file = tmp_path / "README.md"
    file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for table in ("first", "second"):
        write_readme(file, table)
    assert file.read_text() == f"before\n{BEGIN}\nsecond\n{END}\nafter\n"
    file.write_text("no markers")
    with pytest.raises(ValueError, match="must hold"):
        write_readme(file, "table")


def test_the_readme_has_the_markers():
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1


def test_tables_of_the_evidence_are_those_of_its_records():
    root = Path(__file__).parents[2]
    text = (root / "docs/evidence.md").read_text(encoding="utf-8")
    files = [*root.glob("results/ablations/*.jsonl"), *root.glob("results/workloads/*.jsonl")]
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
