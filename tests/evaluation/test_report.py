# SPDX-License-Identifier: Apache-2.0
import re
from html.parser import HTMLParser

import pytest

from sphkv.cli.main import main
from sphkv.evaluation.records import RecordFile
from sphkv.evaluation.report_charts import Mark, Series, number_text, scatter, stacked_bars

SETUP = {
    "substrate": {"pages": "paged"},
    "window": {"num_warm": 1, "num_measured": 2},
    "seed": 0,
    "decode": {"rule": "greedy"},
    "model_shape": {"num_layers": 1},
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
        },
        "times": {"tok_s": speed, "t_prefill_s": 1.0, "t_allocate_write_s": 1.5, "t_decode_s": 2.0},
    }


def lm_quality(kl):
    return {"kl": kl, "kl_counts": [1, 0, 2, 0, 0, 0, 0, 1]}


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
    record("lm", "ours", "20%", "a", lm_quality(0.03), 200.0, 13.0, {}),
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
    assert text.count("class='excluded'") == 2
    assert text.count("class='star'") == 3


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
