# SPDX-License-Identifier: Apache-2.0
"""Tables of what was decoded, ablations, answers and certificates in Markdown, from records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sphkv.evaluation.harness.decode import FOLLOWING_TOKENS
from sphkv.evaluation.metrics.statistics import MeanInterval, paired_interval
from sphkv.evaluation.report.readme import compared_points
from sphkv.evaluation.report.sections import ablation_points, behaviour_rows, facet_means
from sphkv.evaluation.retention.study import STUDIES
from sphkv.evaluation.runner.methods import DENSE, JOINT
from sphkv.evaluation.sweep.config import DENSE_BUDGET

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


def _signed(value: MeanInterval) -> str:
    """A difference with its interval, if it is one of several."""
    mean = f"{value.mean:+.4f}"
    return mean if value.count < 2 else f"{mean} [{value.low:+.4f}, {value.high:+.4f}]"


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


_BESIDE_DENSE = ("lost of dense's", "found, dense did not", "same tokens as dense", "KL of answers")


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
