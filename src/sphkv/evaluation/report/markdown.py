# SPDX-License-Identifier: Apache-2.0
"""Records as Markdown: the README's table and picture, and tables of every kind of record."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sphkv.evaluation.frontier import check_fair
from sphkv.evaluation.harness.decode import FOLLOWING_TOKENS
from sphkv.evaluation.metrics.divergence import KL_TOLERANCE, NLL_TOLERANCE
from sphkv.evaluation.metrics.statistics import MeanInterval, mean_interval, paired_interval
from sphkv.evaluation.report.sections import ablation_points, behaviour_rows, facet_means
from sphkv.evaluation.retention.study import STUDIES
from sphkv.evaluation.runner.methods import DENSE, JOINT, UNIFORM
from sphkv.evaluation.sweep.config import DENSE_BUDGET

_DECODING = "decoding"

_STYLES = {
    JOINT: ("Spherical KV, retention", "#d9622b", "o"),
    UNIFORM: ("Spherical KV, one tier", "#eb9a6f", "o"),
}
_COLOURS = ("#4475b5", "#3f8f7b", "#7a8594", "#77609c", "#b5a642", "#8fb8ad", "#a58bbd", "#6f97cb")
_MARKERS = "s^vD<PX*"
Record = Mapping[str, Any]
_VARIANT_COLUMNS = {
    "budget": "budget",
    "variant": "variant",
    "lm_interval": "KL",
    "lm_above": "above `joint`",
    "lm_worst": "worst token",
    "nll_delta": "NLL",
    "attend_ms": "attention, ms",
    "qa_interval": "KL of answers",
    "qa_above": "above `joint`",
    "qa_same": "same answers",
    "r_fail": "R_fail",
    "delta_t": "Delta T",
    "s_traj": "S_traj",
    "num_texts": "texts",
    "num_asked": "answers",
    "num_answered": "dense right",
    "note": "note",
}
_WITNESS_COLUMNS = {
    "name": "witness",
    "value": "figure",
    "bound": "bound",
    "dense": "dense",
    "is_held": "holds",
    "is_mute": "dense itself fails it",
}
_FAILURE_COLUMNS = {
    "failure": "failure",
    "budget": "budget",
    "num_prompts": "prompts",
    "num_shown": "dense has it",
    "is_triggered": "triggered",
    "is_recovered": "recovered",
    "drift_trigger": "KL",
    "drift_fix": "KL, fixed",
    "lost_trigger": "lost",
    "lost_fix": "lost, fixed",
    "delta_t_trigger": "Delta T",
    "delta_t_fix": "Delta T, fixed",
    "s_traj_trigger": "S_traj",
    "s_traj_fix": "S_traj, fixed",
    "cost_bytes_per_token": "bytes per token pinned",
}
_BESIDE_DENSE = ("lost of dense's", "found, dense did not", "same tokens as dense", "KL of answers")


@dataclass(frozen=True, slots=True)
class ComparedPoint:
    """A method at a budget, over the prompts of a panel.

    Attributes:
        method: Its name.
        budget: As it was asked for.
        peak: Highest resident bytes of any pass, as a share of dense; the worst prompt's.
        tables: Bytes of codebooks as a share of dense at that length.
        kl: Divergence in nats, mean over prompts.
        kl_without_worst: The same without the worst token of each prompt.
        nll_delta: Loss above dense's, in nats.
        same_top1: Share of tokens with dense's best token.
        worst: Divergence of the worst token of any prompt.
        by_case: Divergence of each prompt by its name.
        num_refused: Prompts at which the budget was too small for the method.
    """

    method: str
    budget: str
    peak: float
    tables: float
    kl: MeanInterval
    kl_without_worst: float
    nll_delta: MeanInterval
    same_top1: float
    worst: float
    by_case: Mapping[str, float]
    num_refused: int


def compared_points(records: Sequence[Mapping[str, Any]]) -> list[ComparedPoint]:
    """Means of every method and budget over texts; all of one model and length.

    Raises:
        UnfairComparisonError: The records were measured in different ways.
        ValueError: They are of several models, lengths or splits, or of none.
    """
    texts = [record for record in records if record["workload"] == "lm"]
    kinds = {(r["model"], r["split"], r["context"], r["num_following"]) for r in texts}
    if len(kinds) != 1:
        raise ValueError(f"one model, split and length is compared, the records have {len(kinds)}")
    check_fair(texts)
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for record in texts:
        groups[record["method"], record["budget"]].append(record)
    points = []
    for (method, budget), group in groups.items():
        done = [record for record in group if record["status"] == "measured"]
        if done:
            points.append(_point(method, budget, done, len(group) - len(done)))
    # methods as they come, each by rising bytes
    order = list(dict.fromkeys(point.method for point in points))
    return sorted(points, key=lambda point: (order.index(point.method), point.peak))


def _point(
    method: str, budget: str, done: Sequence[Mapping[str, Any]], num_refused: int
) -> ComparedPoint:
    def each(name: str) -> list[float]:
        return [float(record["quality"][name]) for record in done]

    dense = done[0]["setup"]["dense_bytes_per_token"]
    return ComparedPoint(
        method=method,
        budget=budget,
        peak=max(record["memory"]["dense_share"] for record in done),
        tables=max(record["memory"]["b_kv_tables"] for record in done) / dense,
        kl=mean_interval(each("kl")),
        kl_without_worst=sum(each("kl_without_worst")) / len(done),
        nll_delta=mean_interval(each("nll_delta")),
        same_top1=sum(each("same_top1")) / len(done),
        worst=max(each("kl_max")),
        by_case={record["case"]: record["quality"]["kl"] for record in done},
        num_refused=num_refused,
    )


def comparison_rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows for a table on a terminal."""
    return [
        {
            "method": point.method,
            "budget": point.budget,
            "peak": f"{100 * point.peak:.2f}%",
            "kl": str(point.kl),
            "nll_delta": str(point.nll_delta),
            "same_top1": point.same_top1,
            "prompts": point.kl.count,
            "by_kl": _passes(point.kl.mean, KL_TOLERANCE),
            "by_nll": _passes(point.nll_delta.mean, NLL_TOLERANCE),
        }
        for point in compared_points(records)
    ]


def _passes(value: float, most: float) -> str:
    return "yes" if value <= most else "no"


def readme_table(records: Sequence[Mapping[str, Any]]) -> str:
    """The table in Markdown, with a line that says what was measured."""
    points = compared_points(records)
    joint = {point.budget: point for point in points if point.method == JOINT}
    lines = [
        "| method | budget | peak bytes | KL | without worst token | KL above `joint` | "
        "NLL above dense | same top-1 | KL <= 0.05 | NLL <= +0.01 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for point in points:
        if point.method == DENSE:
            continue
        ours = joint.get(point.budget)
        above = "-"
        if ours is not None and ours is not point:
            above = str(paired_interval(point.by_case, ours.by_case))
        lines.append(
            f"| `{point.method}` | {point.budget} | {_bytes(point)} | {point.kl} | "
            f"{point.kl_without_worst:.3g} | {above} | {_signed(point.nll_delta, digits=3)} | "
            f"{100 * point.same_top1:.1f}% | {_passes(point.kl.mean, KL_TOLERANCE)} | "
            f"{_passes(point.nll_delta.mean, NLL_TOLERANCE)} |"
        )
    return "\n".join([_caption(records, points), "", *lines, "", *_needed_lines(points)])


def _needed_lines(points: Sequence[ComparedPoint]) -> list[str]:
    """How many bytes every method needs to pass, and how many times ours that is."""
    methods = [m for m in dict.fromkeys(point.method for point in points) if m != DENSE]
    rows = {}
    for method in methods:
        own = [point for point in points if point.method == method]
        rows[method] = (
            bytes_needed([(p.peak, p.kl.mean) for p in own], KL_TOLERANCE),
            bytes_needed([(p.peak, p.nll_delta.mean) for p in own], NLL_TOLERANCE),
        )
    lines = [
        f"Bytes at the peak with which a method has a KL of {KL_TOLERANCE} and a loss of "
        f"+{NLL_TOLERANCE}, between two budgets interpolated, and times those of `{JOINT}`:",
        "",
        f"| method | KL {KL_TOLERANCE} | NLL +{NLL_TOLERANCE} |",
        "| --- | --- | --- |",
    ]
    ours = rows.get(JOINT, ("", ""))
    for method, needed in rows.items():
        cells = " | ".join(_needed(*pair) for pair in zip(needed, ours, strict=True))
        lines.append(f"| `{method}` | {cells} |")
    return lines


def bytes_needed(curve: Sequence[tuple[float, float]], bound: float) -> float | str:
    """Share of dense bytes from which a loss stays within a bound.

    Args:
        curve: Share of dense bytes and loss of every budget.
        bound: Most loss; positive.

    Returns:
        The share, between two budgets linear in the logarithms (in the loss itself where it is not
        positive); a text with the sign where all budgets lie on one side.
    """
    rising = sorted(curve)
    if rising[-1][1] > bound:
        return f"> {100 * rising[-1][0]:.3g}%"
    above = [at for at, (_, loss) in enumerate(rising) if loss > bound]
    if not above:
        return f"< {100 * rising[0][0]:.3g}%"
    (less, worse), (more, better) = rising[above[-1]], rising[above[-1] + 1]
    part = (worse - bound) / (worse - better)
    if better > 0:
        part = math.log(worse / bound) / math.log(worse / better)
    return less * math.exp(part * math.log(more / less))


def _needed(value: float | str, ours: float | str) -> str:
    if isinstance(value, str):
        return value
    times = "" if isinstance(ours, str) or value == ours else f", {value / ours:.2g} times"
    return f"{100 * value:.3g}%{times}"


def _bytes(point: ComparedPoint) -> str:
    tables = f" + {100 * point.tables:.2f}%" if point.tables else ""
    return f"{100 * point.peak:.2f}%{tables}"


def _caption(records: Sequence[Mapping[str, Any]], points: Sequence[ComparedPoint]) -> str:
    first = next(record for record in records if record["workload"] == "lm")
    prompts = max(point.kl.count for point in points)
    return (
        f"{first['model']}, {prompts} prompts of {first['context']:,} tokens of the "
        f"{first['split'] or 'made-up'} split, {first['num_following']} tokens after each, every "
        "one decoded under the budget. Peak bytes are the most that were resident inside any "
        "pass, as a share of a dense bfloat16 cache, the worst prompt's; codebooks, which all "
        "sequences share, stand behind the plus sign. Brackets are 95% bootstrap intervals over "
        "prompts; differences are paired."
    )


def markers(name: str) -> tuple[str, str]:
    """Comments of a Markdown file between which a table of that name stands."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def write_readme(path: Path, table: str, *, name: str = _DECODING) -> None:
    """Put a table between its markers in a Markdown file.

    Raises:
        ValueError: The file lacks a marker.
    """
    text = path.read_text(encoding="utf-8")
    begin, end = markers(name)
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{path} must hold {begin!r} and {end!r} once each")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    path.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")


def draw_decoding(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Loss against peak bytes, with intervals; the same bytes from the same records.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    points = [point for point in compared_points(records) if point.method != DENSE]
    mpl.rcParams["svg.hashsalt"] = "sphkv"
    figure = Figure(figsize=(7.6, 4.4), layout="constrained", facecolor="white")
    axes = figure.subplots()
    others = [m for m in dict.fromkeys(p.method for p in points) if m not in _STYLES]
    styles = {
        **_STYLES,
        **{
            name: (name, _COLOURS[at % len(_COLOURS)], _MARKERS[at % len(_MARKERS)])
            for at, name in enumerate(others)
        },
    }
    for method, (label, colour, marker) in styles.items():
        own = sorted((p for p in points if p.method == method), key=lambda point: point.peak)
        if not own:
            continue
        means = [point.kl.mean for point in own]
        spread = [[p.kl.mean - p.kl.low for p in own], [p.kl.high - p.kl.mean for p in own]]
        axes.errorbar(
            [100 * point.peak for point in own], means, yerr=spread, label=label, color=colour,
            marker=marker, lw=2.4 if method in _STYLES else 1.2, ms=5, elinewidth=0.8, capsize=2,
        )  # fmt: skip
    axes.axhline(KL_TOLERANCE, color="#555555", lw=1, ls=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [tick for tick in (2, 3, 5, 7, 10, 15, 20, 30, 50) if _is_near(tick, points)]
    axes.set_xticks(ticks, [f"{tick}%" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("peak resident bytes while decoding, of a dense bfloat16 cache")
    axes.set_ylabel("KL to the dense model, nats per token")
    first = next(record for record in records if record["workload"] == "lm")
    axes.set_title(
        f"{first['model']}, {first['context']:,} + {first['num_following']} tokens", fontsize=11
    )
    axes.grid(visible=True, alpha=0.25)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    figure.savefig(path, metadata={"Date": None})


def _is_near(tick: int, points: Sequence[ComparedPoint]) -> bool:
    shares = [100 * point.peak for point in points]
    return min(shares) / 1.3 <= tick <= max(shares) * 1.3


def record_table(name: str, records: Sequence[Record]) -> str:
    """Variants of an ablation if the name is one's (``a1`` to ``a5``), else by what was measured.

    Texts give divergence by budget, or by distance where many tokens follow; needles what was
    found; other answers their behaviour by budget.

    Raises:
        ValueError: The records hold nothing to compare.
    """
    workloads = {record["workload"] for record in records}
    if name in STUDIES:
        ours = [record for record in records if record["method"] != DENSE]
        budgets = list(dict.fromkeys(record["budget"] for record in ours))
        rows = sorted(ablation_points(ours), key=lambda row: budgets.index(row["budget"]))
        table = _markdown(_VARIANT_COLUMNS, rows)
    elif workloads == {"lm"}:
        is_long = any(record["num_following"] > FOLLOWING_TOKENS for record in records)
        rows = distance_rows(records) if is_long else text_rows(records)
        table = _markdown({key: key for key in rows[0]}, rows) if rows else ""
    else:
        rows = needle_rows(records) if workloads == {"needle"} else answer_rows(records)
        table = _markdown({key: key for key in rows[0]}, rows) if rows else ""
    if not rows:
        raise ValueError(f"the {len(records)} records of {name} hold nothing to compare")
    return table


def answer_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Behaviour by budget, of questions also by place of the evidence and number of distractors."""
    rows = behaviour_rows(records)
    for facet in ("position", "num_distractors"):
        found = facet_means(records, "qa", facet)
        names = dict.fromkeys(name for means in found.values() for name in means)
        for row in rows:
            means = found.get((row["method"], row["budget"]), {}) if row["workload"] == "qa" else {}
            row.update({name: means.get(name) for name in names})
    return rows


def text_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Divergence, loss and worst token of every method and budget, dense pages included."""
    points = compared_points(records)
    joint = {point.budget: point for point in points if point.method == JOINT}
    rows = []
    for point in points:
        ours = joint.get(point.budget)
        is_other = ours is not None and ours is not point
        above = str(paired_interval(point.by_case, ours.by_case)) if ours and is_other else None
        loss = point.nll_delta
        rows.append(
            {
                "method": f"`{point.method}`",
                "budget": point.budget,
                "peak": f"{100 * point.peak:.2f}%",
                "KL": str(point.kl),
                "above `joint`": above,
                "worst token": point.worst,
                "NLL above dense": _signed(loss),
                "same top-1": f"{100 * point.same_top1:.1f}%",
                "prompts": point.kl.count,
            }
        )
    return rows


def _signed(value: MeanInterval, *, digits: int = 4) -> str:
    """A difference with its interval, if it is one of several."""
    mean, low, high = (f"{figure:+.{digits}f}" for figure in (value.mean, value.low, value.high))
    return mean if value.count < 2 else f"{mean} [{low}, {high}]"


def distance_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Divergence of every prompt by distance from it, and how much it grew."""
    rows = []
    for record in records:
        if record["status"] != "measured":
            continue
        bins = record["quality"]["kl_by_distance"]
        starts = (1, *(edge + 1 for edge in bins["edges"]))
        parts = list(zip(bins["edges"], bins["tokens"], bins["kl"], strict=True))
        near = [(count, kl) for edge, count, kl in parts if edge <= FOLLOWING_TOKENS and count]
        far = [(count, kl) for edge, count, kl in parts if edge > FOLLOWING_TOKENS and count]
        rows.append(
            {
                "prompt": record["case"],
                "method": f"`{record['method']}`",
                "budget": record["budget"],
                **{
                    f"{start} to {edge}": kl
                    for start, (edge, _, kl) in zip(starts, parts, strict=False)
                },
                "up to 512": _weighted(near),
                "behind": _weighted(far),
                "ratio": _weighted(far) / _weighted(near),
                "worst token": record["quality"]["kl_max"],
                "peak": f"{100 * record['memory']['dense_share']:.2f}%",
            }
        )
    return rows


def _weighted(parts: Sequence[tuple[int, float]]) -> float:
    return sum(count * kl for count, kl in parts) / max(1, sum(count for count, _ in parts))


def needle_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Needles found by every method and budget, by length of the text.

    Where no dense cache was measured, the exact model's own answers stand in its place.
    """
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record["status"] == "measured":
            groups[record["method"], record["budget"]].append(record)
    contexts = sorted({record["context"] for record in records})
    length = {record["case"]: record["context"] for record in records}
    dense = {
        record["case"]: record["quality"].get("found_reference", 0.0)
        for group in groups.values()
        for record in group
    }

    def by_length(found: Mapping[str, float]) -> dict[str, str]:
        return {
            f"{context:,} tokens": _share(
                [score for case, score in found.items() if length[case] == context]
            )
            for context in contexts
        }

    rows: list[dict[str, Any]] = []
    if (DENSE, DENSE_BUDGET) in groups:
        dense |= {r["case"]: r["quality"]["found"] for r in groups[DENSE, DENSE_BUDGET]}
    else:
        found = _share(list(dense.values()))
        answers = dict.fromkeys(_BESIDE_DENSE)
        first = {"method": "exact model", "budget": DENSE_BUDGET, "peak": None}
        rows.append({**first, **by_length(dense), "found": found, **answers})
    for (method, budget), group in groups.items():
        own = {record["case"]: record["quality"]["found"] for record in group}
        lost = sum(1 for case, was in dense.items() if was > own.get(case, was))
        gained = sum(1 for case, was in dense.items() if was < own.get(case, was))
        same = _share([record["quality"]["is_same"] for record in group])
        kl = sum(record["quality"]["kl"] for record in group) / len(group)
        peak = max(record["memory"]["dense_share"] for record in group)
        first = {"method": f"`{method}`", "budget": budget, "peak": f"{100 * peak:.2f}%"}
        answers = dict(zip(_BESIDE_DENSE, (lost, gained, same, kl), strict=True))
        rows.append({**first, **by_length(own), "found": _share(list(own.values())), **answers})
    return rows


def _share(hits: Sequence[float]) -> str:
    return f"{sum(map(int, hits))} of {len(hits)}" if hits else "-"


def certificate_tables(certificate: Record) -> str:
    """Witnesses of a certificate, and its failure classes where they were triggered."""
    parts = [_markdown(_WITNESS_COLUMNS, certificate["witnesses"])]
    if certificate.get("failures"):
        parts.append(_markdown(_FAILURE_COLUMNS, certificate["failures"]))
    return "\n\n".join(parts)


def _markdown(columns: Mapping[str, str], rows: Sequence[Record]) -> str:
    """A table of the columns that some row fills."""
    used = [name for name in columns if any(row[name] not in (None, "") for row in rows)]
    lines = [
        "| " + " | ".join(columns[name] for name in used) + " |",
        "|" + " --- |" * len(used),
    ]
    lines += ["| " + " | ".join(_cell(row[name]) for name in used) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
