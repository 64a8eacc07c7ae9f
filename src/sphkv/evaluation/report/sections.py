# SPDX-License-Identifier: Apache-2.0
"""The parts of the report: from a sweep's records, an ablation and a certificate."""

from __future__ import annotations

import html
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sphkv.evaluation.frontier import (
    QUALITY_FIELD,
    OperatingPoint,
    PanelFrontier,
    frontier_rows,
    psi,
    record_quality,
    synergy_gap,
    winner,
)
from sphkv.evaluation.metrics.divergence import DRIFT_EDGES
from sphkv.evaluation.metrics.statistics import mean_interval, paired_interval
from sphkv.evaluation.report.charts import Mark, Series, number_text, scatter, stacked_bars
from sphkv.evaluation.retention.study import ablation_rows
from sphkv.evaluation.runner.methods import DENSE, JOINT, UNIFORM
from sphkv.evaluation.sweep.config import DENSE_BUDGET

Record = Mapping[str, Any]

SINGLE_LEVERS = ("joint:keepdrop", "joint:quant", "joint:decoupled")
BETA = 0.01
"""Nats of divergence that a factor e of throughput is worth in Psi."""

_ABLATION_COLUMNS = {
    "budget": "budget",
    "variant": "variant",
    "lm_kl": "KL",
    "lm_above": "KL above joint",
    "lm_worst": "worst token",
    "lm_same": "same top-1",
    "nll_delta": "NLL change",
    "tok_s": "tok/s",
    "attend_ms": "attention, ms",
    "qa_kl": "KL of answers",
    "qa_above": "above joint",
    "qa_same": "same answers",
    "r_fail": "R_fail",
    "delta_t": "Delta T",
    "s_traj": "S_traj",
    "psi": "Psi",
    "num_texts": "texts",
    "num_asked": "answers",
    "num_answered": "of these answered by dense",
    "qa_f1": "F1 of these",
    "qa_f1_dense": "dense's",
    "note": "",
}
_POSITIONS = ("early", "middle", "late")
_DISTRACTORS = "num_distractors"
_DISTRACTOR_RANGES = ((8, "up to 8"), (16, "9 to 16"), (math.inf, "more than 16"))
_FAILURE_COLUMNS = {
    "failure": "failure",
    "budget": "budget",
    "num_prompts": "prompts",
    "is_triggered": "triggered",
    "is_recovered": "recovered",
    "drift_trigger": "KL, triggered",
    "drift_fix": "KL, fixed",
    "lost_trigger": "lost, triggered",
    "lost_fix": "lost, fixed",
    "delta_t_trigger": "Delta T, triggered",
    "delta_t_fix": "Delta T, fixed",
    "s_traj_trigger": "S_traj, triggered",
    "s_traj_fix": "S_traj, fixed",
    "cost_bytes_per_token": "bytes per token pinned",
}


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """An HTML table; numbers are set right."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = []
    for row in rows:
        cells = []
        for cell in row:
            is_number = isinstance(cell, (int, float)) and not isinstance(cell, bool)
            text = number_text(float(cell)) if is_number else html.escape(str(cell))  # type: ignore[arg-type]
            cells.append(f"<td{' class=number' if is_number else ''}>{text}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f"<div class='scroll'><table><tr>{head}</tr>{''.join(body)}</table></div>"


def panel_title(frontier: PanelFrontier) -> str:
    """Model, workload and context."""
    key = frontier.panel.key
    return f"{key.model}, {key.workload}, {key.context:,} tokens"


def frontier_panels(frontiers: Sequence[PanelFrontier]) -> str:
    """Bytes against speed: excluded points grey, envelopes as lines, a star for each method."""
    charts = []
    for frontier in frontiers:
        series = []
        for method in frontier.methods:
            marks = [
                Mark(p.b_kv, p.speed, _label(p, frontier), is_star=p is method.star)
                for p in method.retained
            ]
            marks += [
                Mark(p.b_kv, p.speed, _label(p, frontier), is_excluded=True)
                for p in method.excluded
            ]
            line = tuple((p.b_kv, p.speed) for p in method.envelope)
            series.append(Series(method.method, tuple(marks), line))
        charts.append(
            scatter(
                panel_title(frontier), "KV bytes per token", "decode tokens/s", series,
                log_x=True, log_y=False,
            )
        )  # fmt: skip
    return f"<div class='panels'>{''.join(charts)}</div>"


def _label(point: OperatingPoint, frontier: PanelFrontier) -> str:
    gap = frontier.dense.quality - point.quality
    return (
        f"{point.method} {point.budget}: {point.b_kv:,.0f} B/token, {point.speed:.2f} tok/s, "
        f"quality {point.quality:.4g} ({gap:.3g} {frontier.panel.unit} below dense), "
        f"{point.realisation}"
    )


def budget_curves(frontiers: Sequence[PanelFrontier]) -> str:
    """Degradation curves ``Q(T, B)``: quality against bytes, one chart per workload and context."""
    charts = []
    for frontier in frontiers:
        is_nats = frontier.panel.unit == "nats"
        series = []
        for method in frontier.methods:
            points = sorted(method.retained + method.excluded, key=lambda p: p.b_kv)
            marks = tuple(
                Mark(p.b_kv, abs(p.quality) if is_nats else p.quality, _label(p, frontier))
                for p in points
            )
            series.append(Series(method.method, marks, tuple((m.x, m.y) for m in marks)))
        name = "KL to dense, nats" if is_nats else "score, points"
        charts.append(
            scatter(
                panel_title(frontier), "KV bytes per token", name, series,
                log_x=True, log_y=is_nats,
            )
        )  # fmt: skip
    return f"<div class='panels'>{''.join(charts)}</div>"


def facet_means(
    records: Sequence[Record], workload: str, facet: str
) -> dict[tuple[str, str], dict[str, float | None]]:
    """Quality by depth, place of the answer or number of distractors, of a method and budget.

    Empty if no record says it; None where a method has no prompt of a kind.
    """
    found: dict[tuple[str, str], dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    values: set[Any] = set()
    for record in records:
        if record["workload"] != workload or record["status"] != "measured":
            continue
        if facet not in record["facets"]:
            continue
        value = record["facets"][facet]
        if facet == _DISTRACTORS:
            value = next(name for most, name in _DISTRACTOR_RANGES if value <= most)
        values.add(value)
        found[record["method"], record["budget"]][value].append(record_quality(record))
    named = [*_POSITIONS, *(name for _, name in _DISTRACTOR_RANGES)]
    order = sorted(values, key=lambda v: named.index(v) if v in named else v)
    label = facet.replace("num_", "")
    return {
        key: {f"{label} {v}": statistics.fmean(cell[v]) if cell.get(v) else None for v in order}
        for key, cell in found.items()
    }


def facet_table(records: Sequence[Record], workload: str, facet: str) -> str:
    """What ``facet_means`` found; empty if it is nothing."""
    found = facet_means(records, workload, facet)
    if not found:
        return ""
    header = ["method", "budget", *next(iter(found.values()))]
    rows = [
        [*key, *("-" if mean is None else mean for mean in means.values())]
        for key, means in found.items()
    ]
    return table(header, rows)


def behaviour_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Score, length drift, disagreement and failures of answered workloads, by budget.

    Differences of scores are paired, with their 95% intervals over prompts; None where there is
    nothing to compare with.
    """
    groups: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record["status"] == "measured" and "length_drift" in record["quality"]:
            groups[record["workload"], record["method"], record["budget"]].append(record)
    dense = {
        record["case"]: record_quality(record)
        for (_, method, _), group in groups.items()
        for record in group
        if method == DENSE
    }
    if dense or not groups:
        return [_behaviour(*key, group, dense) for key, group in groups.items()]
    # dense pages were not measured: the exact model's own answers stand for them
    measured = [record for group in groups.values() for record in group]
    exact = {workload: _exact_scores(measured, workload) for workload, _, _ in groups}
    dense = {case: score for scores in exact.values() for case, score in scores.items()}
    rows = [_behaviour(*key, group, dense) for key, group in groups.items()]
    told = [
        {
            **dict.fromkeys(rows[0]),
            "workload": workload,
            "method": "exact model",
            "budget": DENSE_BUDGET,
            "prompts": len(scores),
            "score": statistics.fmean(scores.values()),
        }
        for workload, scores in exact.items()
        if scores
    ]
    return [*told, *rows]


def _exact_scores(records: Sequence[Record], workload: str) -> dict[str, float]:
    """What the exact model scores, in points of 100, by prompt of a workload that says so."""
    name = f"{QUALITY_FIELD[workload]}_reference"
    return {
        record["case"]: 100.0 * record["quality"][name]
        for record in records
        if record["workload"] == workload and name in record["quality"]
    }


def _behaviour(
    workload: str, method: str, budget: str, group: Sequence[Record], dense: Mapping[str, float]
) -> dict[str, Any]:
    quality = [record["quality"] for record in group]
    own = {record["case"]: record_quality(record) for record in group}
    is_paired = method != DENSE and any(case in dense for case in own)
    agreement = [q.get("agreement_f1", q.get("is_same", 0.0)) for q in quality]
    drawn = [q["s_traj"] - q["s_traj_reference"] for q in quality if "s_traj" in q]
    return {
        "workload": workload,
        "method": method,
        "budget": budget,
        "prompts": len(group),
        "score": statistics.fmean(own.values()),
        "above dense": str(paired_interval(own, dense)) if is_paired else None,
        "Delta T, tokens": statistics.fmean(abs(q["length_drift"]) for q in quality),
        "Disagree, %": 100 * statistics.fmean(1.0 - q.get("is_same", 1.0) for q in quality),
        "F1 against dense's answer": 100 * statistics.fmean(agreement),
        "R_fail, %": 100 * statistics.fmean(float(_has_failed(q)) for q in quality),
        "KL": statistics.fmean(q["kl"] for q in quality) if "kl" in quality[0] else None,
        "S_traj over dense's": str(mean_interval(drawn)) if drawn else None,
    }


def behaviour_table(records: Sequence[Record]) -> str:
    """What ``behaviour_rows`` found; empty without answers."""
    rows = behaviour_rows(records)
    if not rows:
        return ""
    cells = [["-" if cell is None else cell for cell in row.values()] for row in rows]
    return table(list(rows[0]), cells)


def behaviour_curves(records: Sequence[Record], frontiers: Sequence[PanelFrontier]) -> str:
    """Share of answers that differ from dense's, against bytes: failure versus budget."""
    charts = []
    for frontier in frontiers:
        if frontier.panel.key.workload == "lm":
            continue
        same = {
            (record["case"], record["method"], record["budget"]): record["quality"]["is_same"]
            for record in records
            if record["status"] == "measured" and "is_same" in record["quality"]
        }
        series = []
        for method in frontier.methods:
            points = sorted(method.retained + method.excluded, key=lambda p: p.b_kv)
            marks = []
            for p in points:
                found = [same[case, p.method, p.budget] for case in p.case_quality]
                share = 100 * (1.0 - statistics.fmean(found))
                marks.append(Mark(p.b_kv, share, f"{p.method} {p.budget}: {share:.0f}% differ"))
            series.append(Series(method.method, tuple(marks), tuple((m.x, m.y) for m in marks)))
        charts.append(
            scatter(
                panel_title(frontier), "KV bytes per token", "answers that differ, %", series,
                log_x=True, log_y=False,
            )
        )  # fmt: skip
    return f"<div class='panels'>{''.join(charts)}</div>" if charts else ""


def drift_bars(records: Sequence[Record], frontiers: Sequence[PanelFrontier]) -> str:
    """Tokens of a text by divergence from dense, for every point of the language workloads."""
    charts = []
    names = [f"below {edge:g}" for edge in DRIFT_EDGES] + [f"above {DRIFT_EDGES[-1]:g}"]
    for frontier in frontiers:
        rows = []
        for method in frontier.methods:
            for p in method.retained + method.excluded:
                found = [
                    record["quality"]["kl_counts"]
                    for record in records
                    if record["case"] in p.case_quality
                    and (record["method"], record["budget"]) == (p.method, p.budget)
                    and "kl_counts" in record["quality"]
                ]
                if found:
                    sums = [sum(column) for column in zip(*found, strict=True)]
                    shares = [100 * count / sum(sums) for count in sums]
                    label = f"{p.method} {p.budget}"
                    rows.append((label, list(zip(names, shares, strict=True))))
        if rows:
            title = f"{panel_title(frontier)}: tokens by divergence, nats"
            charts.append(stacked_bars(title, "%", rows))
    return "".join(charts)


def _has_failed(quality: Mapping[str, Any]) -> bool:
    """Whether an answer that dense got right was lost, or it stopped ending."""
    if quality.get("failures"):
        return True
    if "success" in quality:
        return bool(quality["success"] < quality["success_reference"])
    was_right = quality.get("f1_reference", 0.0) > 0.0
    lost = was_right and quality.get("f1", 0.0) == 0.0
    return bool(lost or quality["length_drift"] > 8)


def time_bars(records: Sequence[Record], frontiers: Sequence[PanelFrontier]) -> str:
    """Where the time of each method's star went, in every panel."""

    def parts(times: Mapping[str, Any]) -> list[tuple[str, float]]:
        count = times.get("num_measured") or 1
        step = 1000 * (times.get("decode_s") or 0.0) / count
        inside = 1000 * (times.get("attend_s") or 0.0) / count
        return [
            ("cache: read, scores, softmax, values", inside),
            ("rest of the model", step - inside),
        ]

    def before(times: Mapping[str, Any]) -> list[tuple[str, float]]:
        return [("prefill", times["t_prefill_s"]), ("allocate/write", times["t_allocate_write_s"])]

    return _bars(records, frontiers, "times", parts, "one decode step", "ms") + _bars(
        records, frontiers, "times", before, "before the first token", "s"
    )


def byte_bars(records: Sequence[Record], frontiers: Sequence[PanelFrontier]) -> str:
    """The ledger of each method's star, in every panel."""

    def parts(memory: Mapping[str, Any]) -> list[tuple[str, float]]:
        ledger = memory.get("ledger", {})
        tokens = memory.get("active_tokens", 1)
        return [
            (kind, size / tokens)
            for kind, size in ledger.items()
            if kind not in ("payload", "total") and size
        ]

    return _bars(records, frontiers, "memory", parts, "bytes per token by kind", "B")


def _bars(
    records: Sequence[Record],
    frontiers: Sequence[PanelFrontier],
    field: str,
    parts: Callable[[Mapping[str, Any]], list[tuple[str, float]]],
    name: str,
    unit: str,
) -> str:
    charts = []
    for frontier in frontiers:
        rows = []
        for method in frontier.methods:
            if method.star is None:
                continue
            members = [
                record
                for record in records
                if record["method"] == method.method
                and record["budget"] == method.star.budget
                and record["case"] in method.star.case_quality
            ]
            sums: dict[str, float] = defaultdict(float)
            for record in members:
                for part, size in parts(record[field]):
                    sums[part] += size / len(members)
            if method.method != frontier.dense.method or field == "times":
                rows.append((f"{method.method} {method.star.budget}", list(sums.items())))
        if rows:
            charts.append(stacked_bars(f"{panel_title(frontier)}: {name}", unit, rows))
    return "".join(charts)


def readoff_tables(frontiers: Sequence[PanelFrontier]) -> str:
    """The matched-quality read-off of every panel."""
    columns = (
        ("method", "method"), ("retained", "points retained"), ("least_b_kv", "least b_KV"),
        ("share", "of dense"), ("star_budget", "star"), ("star_b_kv", "b_KV"),
        ("star_b_hbm", "b_HBM (counted)"), ("star_tok_s", "tok/s"), ("star_quality", "Q"),
        ("star_interval", "95% over prompts"),
        ("gamma_s", "Gamma_s"), ("gamma_m", "Gamma_m"), ("gamma_m_iso", "Gamma_m, iso-quality"),
        ("g_iso_q", "G_isoQ"), ("r_iso_s", "R_isoS"), ("p_value", "p against dense"),
        ("realisation", "decode"),
    )  # fmt: skip
    parts = []
    for frontier in frontiers:
        rows = [
            ["-" if row[key] is None else row[key] for key, _ in columns]
            for row in frontier_rows(frontier)
        ]
        best = winner(frontier)
        said = "No method but dense kept the quality."
        if not frontier.is_informative:
            said = "Dense itself scores nothing here, so equal quality says nothing."
        if best is not None:
            next_best = (
                "no other method did" if best[1] is None else f"the next needs {best[1]:.2f}x"
            )
            said = f"Fewest bytes at equal quality: <b>{html.escape(best[0])}</b>; {next_best}."
        parts.append(
            f"<h3>{html.escape(panel_title(frontier))}</h3><p>Within "
            f"{frontier.panel.tolerance:g} {frontier.panel.unit} of dense, over "
            f"{frontier.dense.num_cases} prompts ({len(frontier.panel.left_out)} unfinished ones "
            f"left out). {said}</p>" + table([name for _, name in columns], rows)
        )
        if frontier.panel.refused:
            refusals = [list(refusal) for refusal in frontier.panel.refused]
            parts.append(
                "<details><summary>Points that could not be made</summary>"
                + table(("method", "budget", "reason"), refusals)
                + "</details>"
            )
    return "".join(parts)


def load_study(path: Path, *, field: str) -> dict[str, Any]:
    """A JSON record that must hold ``field``.

    Raises:
        ValueError: The file is no such record.
    """
    try:
        study = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON record: {error}") from error
    if not isinstance(study, dict) or field not in study:
        raise ValueError(f"{path} is no record with {field!r}")
    return study


def ablation_points(records: Sequence[Record], *, beta: float = BETA) -> list[dict[str, Any]]:
    """Variants of the controller at each budget, as ``ablation_rows`` has them, with Psi."""
    rows = ablation_rows(records)
    for row in rows:
        is_whole = row["lm_kl"] is not None and row["tok_s"]
        row["psi"] = psi(-row["lm_kl"], row["tok_s"], beta=beta) if is_whole else None
    return rows


def synergy_gaps(points: Sequence[Mapping[str, Any]]) -> list[tuple[str, float | None, str]]:
    """Budget, ``Delta_joint`` and the best single lever of each budget that has the joint variant.

    The gap is None where no single lever could meet the budget.
    """
    by_budget: dict[str, dict[str, float]] = defaultdict(dict)
    for point in points:
        if point["psi"] is not None:
            by_budget[point["budget"]][point["variant"]] = point["psi"]
    gaps: list[tuple[str, float | None, str]] = []
    for budget, found in by_budget.items():
        if JOINT not in found:
            continue
        others = {name: found[name] for name in found if name.startswith(SINGLE_LEVERS)}
        if not others:
            gaps.append((budget, None, "no single lever meets this budget"))
            continue
        best = max(others, key=lambda name: others[name])
        gaps.append((budget, synergy_gap(found[JOINT], list(others.values())), best))
    return gaps


def ablation_part(records: Sequence[Record], *, beta: float = BETA) -> str:
    """Tables of the controller's variants; empty if no record is of one."""
    ours = [record for record in records if record["method"].startswith((JOINT, UNIFORM))]
    if not any(record["method"].startswith(f"{JOINT}:") for record in ours):
        return ""
    points = ablation_points(ours, beta=beta)
    rows = [
        ["-" if point[name] is None else point[name] for name in _ABLATION_COLUMNS]
        for point in points
    ]
    gaps = [
        [budget, "-" if gap is None else gap, best] for budget, gap, best in synergy_gaps(points)
    ]
    return (
        f"<p class='soft'>Psi is minus the KL plus {beta:g} times the logarithm of the speed. The "
        "synergy gap is Psi of the joint variant minus the best of KeepDrop, Quant and Decoupled "
        "at the same budget. R_fail is the share of answers with a failure that dense does not "
        "have. Differences from the joint variant are paired, with 95% intervals over prompts.</p>"
        + table(list(_ABLATION_COLUMNS.values()), rows)
        + table(("budget", "synergy gap", "best single lever"), gaps)
    )


def certificate_part(certificate: Mapping[str, Any]) -> str:
    """The witnesses of a certificate."""
    config, verdict = certificate["config"], "SAFE" if certificate["is_safe"] else "NOT SAFE"
    share = "nothing could be stored"
    if certificate["memory"] is not None:
        part = certificate["memory"]["b_kv"] / certificate["dense_bytes_per_token"]
        share = f"{100 * part:.1f}% of dense bytes"
    rows = [
        [
            witness["name"],
            witness["value"],
            witness["bound"],
            "-" if witness["dense"] is None else witness["dense"],
            "holds" if witness["is_held"] else "fails",
            "dense itself fails it" if witness["is_mute"] else witness["exemplar"],
        ]
        for witness in certificate["witnesses"]
    ]
    return (
        f"<p><b>{verdict}</b>: {html.escape(str(config['method']))} at "
        f"{html.escape(str(config['budget']))}, {share}, "
        f"{config['context']:,} tokens, {html.escape(str(config['model']))}.</p>"
        + table(("witness", "figure", "bound", "dense", "verdict", "worst example"), rows)
        + _failure_table(certificate.get("failures", ()))
    )


def _failure_table(failures: Sequence[Mapping[str, Any]]) -> str:
    """The failure classes of a certificate before and after their fix; empty if there are none."""
    if not failures:
        return ""
    rows = [[row[name] for name in _FAILURE_COLUMNS] for row in failures]
    return table(list(_FAILURE_COLUMNS.values()), rows)
