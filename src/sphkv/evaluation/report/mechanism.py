# SPDX-License-Identifier: Apache-2.0
"""Parts of the report that show how points came about: tiers, segments, margins and the gate."""

from __future__ import annotations

import html
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sphkv.evaluation.frontier import PanelFrontier, record_quality
from sphkv.evaluation.report.charts import Mark, Series, number_text, scatter, stacked_bars
from sphkv.evaluation.report.sections import panel_title, table
from sphkv.evaluation.runner.continuation import MARGIN_EDGES
from sphkv.evaluation.runner.methods import DENSE
from sphkv.retention.gate import GateOptions, StabilityGate, danger_score

Record = Mapping[str, Any]

_TIER_COLOURS = (
    "none", "#d9e3f2", "#bcd0ea", "#9dbbe0", "#7da4d3", "#5f8dc4", "#4676b2", "#335f9c", "#244a80",
    "#163763",
)  # fmt: skip
_DENSE_TIER = "#c2410c"
_CELL, _ROW = 6, 5
_SAFE, _UNSTABLE = 0.02, 0.10


def star_records(records: Sequence[Record], frontiers: Sequence[PanelFrontier]) -> Iterator[Record]:
    """The first record with an allocation of each panel, at its method's star if it has one."""
    for frontier in frontiers:
        for method in frontier.methods:
            budget = method.star.budget if method.star else None
            found = [
                record
                for record in records
                if record["method"] == method.method
                and record["model"] == frontier.panel.key.model
                and record.get("allocation") is not None
                and budget in (None, record["budget"])
                and _is_of_panel(record, frontier)
            ]
            yield from found[:1]


def _is_of_panel(record: Record, frontier: PanelFrontier) -> bool:
    """Whether a record belongs to a panel."""
    return any(
        record["case"] in point.case_quality
        for point in frontier.panel.points
        if point.method == record["method"]
    )


def tier_maps(records: Sequence[Record], frontiers: Sequence[PanelFrontier]) -> str:
    """Which token of which head is kept at which tier."""
    return "".join(
        _tier_map(record["allocation"], f"{record['method']} {record['budget']}, {record['case']}")
        for record in star_records(records, frontiers)
    )


def _tier_colour(tier: int, count: int) -> str:
    if tier == count - 1:
        return _DENSE_TIER
    step = (len(_TIER_COLOURS) - 1) / max(1, count - 2)
    return _TIER_COLOURS[min(len(_TIER_COLOURS) - 1, round(tier * step))]


def _tier_map(allocation: Mapping[str, Any], title: str) -> str:
    names, rows = allocation["tiers"], allocation["map"]
    count, columns = len(names), len(rows[0])
    width, height = 60 + columns * _CELL, 60 + len(rows) * _ROW
    parts = [
        f"<svg viewBox='0 0 {max(width, 640)} {height}' role='img' class='tiers' "
        f"aria-label='Tiers of {html.escape(title)}'>",
        f"<text x='0' y='14' class='title'>{html.escape(title)}</text>",
        "<text x='0' y='34' class='name'>head</text>",
        f"<rect x='52' y='22' width='{columns * _CELL}' height='{len(rows) * _ROW}' class='void'/>",
    ]
    for number, row in enumerate(rows):
        at = 0
        for letter, run in itertools.groupby(row):
            size, tier = len(list(run)), ord(letter) - ord("a")
            if tier:
                parts.append(
                    f"<rect x='{52 + at * _CELL}' y='{22 + number * _ROW}' "
                    f"width='{size * _CELL}' height='{_ROW}' fill='{_tier_colour(tier, count)}'>"
                    f"<title>head {number}: {html.escape(names[tier])}</title></rect>"
                )
            at += size
    base, left = height - 22, 52
    parts.append(f"<text x='52' y='{base}' class='name'>first token to last token</text>")
    for tier, name in enumerate(names):
        if tier == 0:
            continue
        parts.append(f"<rect x='{left}' y='{base + 6}' width='11' height='11' ")
        parts.append(f"fill='{_tier_colour(tier, count)}'/><text x='{left + 15}' y='{base + 16}'>")
        parts.append(f"{html.escape(name)}</text>")
        left += 28 + 7 * len(name)
    return "".join(parts) + "</svg>"


def allocation_parts(records: Sequence[Record], frontiers: Sequence[PanelFrontier]) -> str:
    """States by tier, bytes by head and by segment."""
    parts = []
    for record in star_records(records, frontiers):
        found = record["allocation"]
        label = f"{record['method']} {record['budget']}, {record['case']}"
        states = [(name, float(n)) for name, n in zip(found["tiers"], found["states"], strict=True)]
        parts.append(
            stacked_bars(f"{label}: states by tier", "states", [(record["method"], states)])
        )
        sizes = found["head_bytes_per_token"]
        marks = tuple(Mark(i, size, f"head {i}: {size:.1f} B") for i, size in enumerate(sizes))
        line = tuple((mark.x, mark.y) for mark in marks)
        series = [Series(record["method"], marks, line)]
        chart = scatter(f"{label}: by head", "head, first layer to last", "bytes per token a_h",
                        series, log_x=False, log_y=False)  # fmt: skip
        parts.append(f"<div class='panels'>{chart}</div>")
        rows: list[Sequence[object]] = [
            [name, int(part["tokens"]), part["rho"], part["bytes"]]
            for name, part in found["segments"].items()
        ]
        parts.append(table(("segment", "tokens", "retention rho_S", "bytes per state b_S"), rows))
        parts.append(
            f"<p>H_alloc {found['head_entropy']:.3f} nats, G_alloc {found['head_gini']:.3f}.</p>"
        )
    return "".join(parts)


def gate_traces(records: Sequence[Record], frontiers: Sequence[PanelFrontier]) -> str:
    """What the stability gate does with the margins of the tokens after a prompt."""
    parts = []
    for record in star_records(records, frontiers):
        found = record["quality"].get("by_margin", {})
        if "margins" not in found:
            continue
        options = GateOptions()
        gate = StabilityGate(options, trace_steps=len(found["margins"]))
        for margin in found["margins"]:
            gate.observe(min(danger_score(found["drift"], margin), 1e6))
        on: list[Mark] = []
        off: list[Mark] = []
        for step, (danger, is_on) in enumerate(gate.trace):
            mark = Mark(step, max(danger, 1e-3), f"step {step}: danger {danger:.3g}")
            (on if is_on else off).append(mark)
        last = max(1, len(gate.trace) - 1)
        ends = ((0.0, options.tau_prot), (float(last), options.tau_prot))
        low = ((0.0, options.tau_drop), (float(last), options.tau_drop))
        line = tuple((float(s), max(d, 1e-3)) for s, (d, _) in enumerate(gate.trace))
        title = f"{record['method']} {record['budget']}, {record['case']}"
        series = [
            Series("gate off", tuple(off), line),
            Series("gate on", tuple(on)),
            Series("tau_prot", (Mark(last, options.tau_prot, "tau_prot"),), ends),
            Series("tau_drop", (Mark(last, options.tau_drop, "tau_drop"),), low),
        ]
        chart = scatter(title, "token after the prompt", "danger d_t", series,
                        log_x=False, log_y=True)  # fmt: skip
        parts.append(f"<div class='panels'>{chart}</div>")
        parts.append(
            f"<p>{gate.num_switches} switches, on for {gate.num_on_steps} of {gate.num_steps} "
            f"tokens; thresholds {options.tau_drop:g} and {options.tau_prot:g}.</p>"
        )
    return "".join(parts)


def phase_diagram(records: Sequence[Record]) -> str:
    """Share of tokens whose best token tipped, by key bits and by how sure dense was."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record["status"] == "measured" and "by_margin" in record["quality"]:
            groups[record["method"], record["budget"]].append(record)
    rows = []
    for (method, budget), members in groups.items():
        if method == DENSE:
            continue
        margins = [member["quality"]["by_margin"] for member in members]
        tokens = [sum(c) for c in zip(*(m["tokens"] for m in margins), strict=True)]
        tipped = [sum(c) for c in zip(*(m["tipped"] for m in margins), strict=True)]
        bits = statistics.fmean(key_bits(member) for member in members)
        rows.append((method, budget, bits, tokens, tipped))
    if not rows:
        return ""
    edges = ("0", *(f"{edge:g}" for edge in MARGIN_EDGES), "more")
    names = [f"margin {a} to {b}" for a, b in itertools.pairwise(edges)]
    body = []
    for method, budget, bits, tokens, tipped in sorted(rows, key=lambda row: row[2]):
        cells = "".join(_phase_cell(a, b) for a, b in zip(tipped, tokens, strict=True))
        body.append(
            f"<tr><td>{html.escape(method)}</td><td>{html.escape(budget)}</td>"
            f"<td class='number'>{number_text(bits)}</td>{cells}</tr>"
        )
    head = "".join(f"<th>{name}</th>" for name in ("method", "budget", "key bits", *names))
    return (
        "<p class='soft'>Rows by angular precision, columns by brittleness: the gap of dense's two "
        f"best tokens in nats. Safe: at most {100 * _SAFE:g}% of the tokens tip over; unstable: "
        f"more than {100 * _UNSTABLE:g}%; between them the controller should add bits before it "
        f"drops.</p><div class='scroll'><table class='phase'><tr>{head}</tr>{''.join(body)}"
        "</table></div>"
    )


def key_bits(record: Record) -> float:
    """Bits of codes and radii per key channel, over all tokens given; dropped ones count as 0."""
    shape, memory = record["setup"]["model_shape"], record["memory"]
    ledger = memory["ledger"]
    channels = shape["num_layers"] * shape["num_kv_heads"] * shape["head_dim"]
    size = ledger.get("codes", 0) + ledger.get("radii", 0)
    return float(8 * size / (channels * memory["active_tokens"]))


def _phase_cell(tipped: int, tokens: int) -> str:
    if tokens == 0:
        return "<td>-</td>"
    share = tipped / tokens
    kind = "safe" if share <= _SAFE else "unstable" if share > _UNSTABLE else "conservative"
    return f"<td class='number {kind}' title='{tipped} of {tokens} tokens'>{100 * share:.0f}%</td>"


def depth_curves(records: Sequence[Record], frontiers: Sequence[PanelFrontier]) -> str:
    """``Q_depth``: share of needles found by depth, every method at its star."""
    charts = []
    for frontier in frontiers:
        if frontier.panel.key.workload != "needle":
            continue
        series = []
        for method in frontier.methods:
            points = method.retained + method.excluded
            if not points:
                continue
            budget = (method.star or max(points, key=lambda point: point.b_kv)).budget
            found: dict[float, list[float]] = defaultdict(list)
            for record in records:
                if (record["method"], record["budget"]) == (method.method, budget) and any(
                    record["case"] in point.case_quality for point in points
                ):
                    found[record["facets"]["depth"]].append(record_quality(record))
            marks = tuple(
                Mark(depth, statistics.fmean(scores),
                     f"{method.method} {budget}, depth {depth:g}: {statistics.fmean(scores):.0f}%")
                for depth, scores in sorted(found.items())
            )  # fmt: skip
            series.append(Series(method.method, marks, tuple((m.x, m.y) for m in marks)))
        charts.append(
            scatter(panel_title(frontier), "depth", "found, %", series, log_x=False, log_y=False)
        )
    return f"<div class='panels'>{''.join(charts)}</div>" if charts else ""
