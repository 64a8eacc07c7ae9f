# SPDX-License-Identifier: Apache-2.0
import json
import re
from html.parser import HTMLParser

import pytest

from sphkv.cli.main import main
from sphkv.evaluation.records import RecordFile
from sphkv.evaluation.report.charts import Mark, Series, number_text, scatter, stacked_bars
from sphkv.evaluation.report.sections import (
    ablation_part,
    behaviour_rows,
    behaviour_table,
    facet_table,
)

SETUP = {
    "substrate": {"pages": "paged"},
    "window": {"num_warm": 1, "num_measured": 2},
    "seed": 0,
    "decode": {"rule": "greedy"},
    "model_shape": {"num_layers": 2, "num_kv_heads": 1, "head_dim": 8},
    "dense_bytes_per_token": 1000,
    "environment": {"device": "d", "num_threads": 2, "versions": {"torch": "2"}},
}
VOID = {"meta", "input", "line", "circle", "rect", "polyline", "polygon", "br"}


def record(workload, method, budget, case, quality, b_kv, speed, facets):
    return {
        "id": f"{workload}{method}{budget}{case}",
        "model": "m<script>",
        "workload": workload,
        "case": f"{workload}-4096-{case}",
        "context": 4000,
        "method": method,
        "budget": budget,
        "status": "measured",
        "reason": "",
        "facets": facets,
        "quality": quality,
        "memory": {
            "b_kv": b_kv,
            "b_hbm": b_kv,
            "realisation": "kernel-realized",
            "ledger": {"codes": 100, "values": 200, "payload": 300, "total": 300},
            "active_tokens": 10,
            "dense_share": 0.1,
        },
        "times": {"tok_s": speed, "t_prefill_s": 1.0, "t_allocate_write_s": 1.5, "t_decode_s": 2.0},
    }


def lm_quality(kl):
    margins = {"tokens": [4, 0, 0, 10, 100], "tipped": [2, 0, 0, 1, 1]}
    return {"kl": kl, "kl_counts": [1, 0, 2, 0, 0, 0, 0, 1], "by_margin": margins}


# danger 2, 2, 0.2 and 0.1: the gate goes on at once and goes off with the third
GATED = {**lm_quality(0.03)["by_margin"], "drift": 1.0, "margins": [0.5, 0.5, 5.0, 10.0]}
ALLOCATION = {
    "tiers": ["drop", "k2v3", "max"],
    "map": ["cbbaac", "caaaac"],
    "num_tokens": 6,
    "states": [6, 2, 4],
    "head_bytes_per_token": [20.0, 10.0],
    "head_entropy": 0.6,
    "head_gini": 0.17,
    "segments": {"prefix": {"rho": 0.4, "bytes": 5.0, "tokens": 4.0}},
}


def answered(found, drift=0):
    return {
        "found": found,
        "f1": found,
        "f1_reference": 1.0,
        "kl": 0.01,
        "is_same": found,
        "length_drift": drift,
    }


RECORDS = [
    record("lm", "dense", "100%", "a", lm_quality(1e-5), 1000.0, 10.0, {}),
    record("lm", "ours", "10%", "a", lm_quality(0.2), 100.0, 14.0, {}),
    {
        **record("lm", "ours", "20%", "a", lm_quality(0.03), 200.0, 13.0, {}),
        "quality": {**lm_quality(0.03), "by_margin": GATED},
        "allocation": ALLOCATION,
    },
    *(
        record("needle", method, budget, str(depth), answered(found), b_kv, 9.0, {"depth": depth})
        for depth in (0.1, 0.9)
        for method, budget, b_kv, found in (
            ("dense", "100%", 1000.0, 1.0),
            ("ours", "10%", 90, 0.5),
        )
    ),
]


class Balance(HTMLParser):
    """Checks that tags close in order and collects what a page would fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "srcset")]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "records.jsonl"
    with RecordFile(path) as file:
        file.begin_run(SETUP)
        for entry in RECORDS:
            file.append(entry)
    out = tmp_path / "report"
    assert main(["report", str(path), "--out", str(out)]) == 0
    return out


def test_the_page_is_whole_and_fetches_nothing(folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Balance()
    page.feed(text)
    assert page.open == []
    assert page.fetched == []
    assert not re.search(r"https?://|@import|url\(", text)
    assert "m<script>" not in text
    words = "".join(page.text)
    assert "ours 10%: 50% differ" in words
    assert "above 1 25 %" in words
    for heading in ("Frontiers at equal quality", "Needles by depth", "Behaviour against budget"):
        assert heading in words
    assert "Fewest bytes at equal quality: ours" in words
    assert "No method but dense kept the quality" in words
    # runs of equal tiers, dropped states left blank
    assert text.count("<title>head 0: ") - text.count("<title>head 0: 20.0 B") == 3
    assert "H_alloc 0.600 nats, G_alloc 0.170" in words
    assert "2 switches, on for 2 of 4 tokens" in words
    assert re.search(r"class='number unstable' title='2 of 4 tokens'>50%<", text)
    assert re.search(r"class='number conservative' title='1 of 10 tokens'>10%<", text)
    assert re.search(r"class='number safe' title='1 of 100 tokens'>1%<", text)
    assert "ours 10%, depth 0.9: 50%" in words
    assert text.count("class='excluded'") == 2
    assert text.count("class='star'") == 3


CERTIFICATE = {
    "config": {"method": "joint", "budget": "9%", "context": 4096, "model": "m"},
    "is_safe": False,
    "memory": {"b_kv": 90.0},
    "dense_bytes_per_token": 1000,
    "witnesses": [
        {"name": "json", "value": 1.0, "bound": 0.0, "dense": 2.0, "is_held": False,
         "is_mute": False, "exemplar": "<lost>"},
    ],
    "failures": [
        {"failure": "refusal flip", "budget": "5%", "is_triggered": True, "is_recovered": True,
         "s_traj_trigger": 0.2, "s_traj_fix": 0.1, "num_prompts": 3,
         "drift_trigger": 0.4, "drift_fix": 0.1, "lost_trigger": 2, "lost_fix": 0,
         "delta_t_trigger": 1.0, "delta_t_fix": 0.0, "cost_bytes_per_token": 12.0},
    ],
}  # fmt: skip


def test_other_records_stand_beside(folder, tmp_path, capsys):
    for name, data in (("other", {}), ("certificate", CERTIFICATE)):
        (tmp_path / name).write_text(json.dumps(data), encoding="utf-8")
    arguments = ["report", str(tmp_path / "records.jsonl"), "--out", str(folder)]
    beside = ["--certificate", str(tmp_path / "certificate")]
    assert main([*arguments, *beside, *beside]) == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text.count("<td>refusal flip</td>") == 2
    assert "<b>NOT SAFE</b>: joint at 9%, 9.0% of dense bytes" in text
    assert "&lt;lost&gt;" in text
    assert main([*arguments, "--certificate", str(tmp_path / "other")]) == 1
    assert "is no record with 'witnesses'" in capsys.readouterr().err


def ablated(method, budget, kl):
    return {
        "method": method,
        "budget": budget,
        "workload": "lm",
        "case": "lm-4096-a",
        "status": "refused" if kl is None else "measured",
        "quality": {"kl": kl, "kl_max": 1.0, "same_top1": 0.9, "nll_delta": 0.0},
        "times": {"tok_s": 10.0, "attend_s": 0.01, "num_measured": 2},
        "memory": {"peak_share": 0.9},
    }


def test_variants_of_the_controller_have_a_part_of_their_own():
    points = (
        ("joint", "10%", 0.02), ("joint:keepdrop", "10%", 0.09), ("joint:decoupled", "10%", 0.05),
        ("joint", "5%", 0.07), ("joint:quant", "5%", None),
    )  # fmt: skip
    text = ablation_part([ablated(*point) for point in points])
    # all run at 10 tokens a second, so the gap is that of the divergences
    assert "<td>10%</td><td class=number>0.03</td><td>joint:decoupled</td>" in text
    assert "<td>5%</td><td>-</td><td>no single lever meets this budget</td>" in text
    assert "1 refused" in text
    assert "<td>0.03</td>" in text
    assert ablation_part([ablated("joint", "10%", 0.02)]) == ""


def test_scores_are_set_against_dense_prompt_by_prompt():
    def asked(method, case, f1, num_distractors):
        quality = {"f1": f1, "f1_reference": 1.0, "length_drift": 0, "failures": []}
        facets = {"num_distractors": num_distractors}
        return record("qa", method, "10%", case, quality, 100.0, 9.0, facets)

    points = [asked("dense", "a", 1.0, 8), asked("dense", "b", 0.5, 23)]
    points += [asked("joint", "a", 0.75, 8), asked("joint", "b", 0.25, 23)]
    assert "<td class=number>50</td><td>-25 [-25, -25]</td>" in behaviour_table(points)
    text = facet_table(points, "qa", "num_distractors")
    assert "<th>distractors up to 8</th><th>distractors more than 16</th>" in text
    assert "<td class=number>75</td><td class=number>25</td>" in text
    # without dense pages the exact model's answers stand for them: right on both prompts
    alone = behaviour_rows(points[2:])
    assert [row["method"] for row in alone] == ["exact model", "joint"]
    assert alone[0]["score"] == 100.0
    assert alone[1]["above dense"] == "-50 [-75, -25]"


def test_tables_of_a_document_are_rebuilt_from_the_files_they_are_named_after(tmp_path, capsys):
    page, study, sweep = (tmp_path / name for name in ("page.md", "a2.jsonl", "needles.jsonl"))
    certificate = tmp_path / "safe.json"
    witness = {"name": "drift", "value": 0.25, "bound": 0.5, "dense": None, "is_held": True,
               "is_mute": False}  # fmt: skip
    certificate.write_text(json.dumps({"witnesses": [witness]}))
    points = [ablated("joint", "10%", 0.02), ablated("joint:quant", "10%", 0.06)]
    needles = [entry for entry in RECORDS if entry["workload"] == "needle"]
    for path, entries in ((study, points), (sweep, needles)):
        with RecordFile(path) as file:
            file.begin_run(SETUP)
            for number, entry in enumerate(entries):
                file.append({**entry, "id": str(number)})
    names = ("a2", "needles", "safe")
    page.write_text("".join(f"<!-- {name}: begin -->\n<!-- {name}: end -->\n" for name in names))
    given = [str(study), str(sweep), "--certificate", str(certificate), "--tables", str(page)]
    assert main(["report", *given]) == 0
    assert "3 tables" in capsys.readouterr().out
    text = page.read_text()
    assert "| 10% | joint:quant | 0.06 | 0.04 |" in text
    assert "| `ours` | 10% |" in text
    assert "| drift | 0.25 | 0.5 | yes | no |" in text
    page.write_text("<!-- a2: begin -->")
    assert main(["report", *given]) == 1
    assert "must hold" in capsys.readouterr().err


def test_the_table_beside_it_holds_every_point(folder):
    lines = (folder / "points.csv").read_text().splitlines()
    assert len(lines) == 1 + 5
    assert any(",20%,200.000," in line and ",1,1,1,1," in line for line in lines)


def test_charts_of_little_data():
    one = scatter("t", "x", "y", [Series("a", (Mark(5.0, 5.0, "m"),))], log_x=True, log_y=True)
    assert one.count("<circle") == 1
    assert "nan" not in one
    none = scatter("t", "x", "y", [], log_x=True, log_y=False)
    assert none.endswith("</svg>")
    bars = stacked_bars("t", "s", [("row", [("part", 2.0)]), ("zero", [("part", 0.0)])])
    assert bars.count("<rect") == 3
    assert number_text(12345.6) == "12,346"
    assert number_text(None) == "-"
