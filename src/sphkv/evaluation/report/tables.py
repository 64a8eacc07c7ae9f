# SPDX-License-Identifier: Apache-2.0
"""Tables of ablations, answered workloads and certificates in Markdown, rebuilt from records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sphkv.evaluation.report.sections import ablation_points, behaviour_rows
from sphkv.evaluation.retention.study import STUDIES
from sphkv.evaluation.runner.methods import DENSE

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
    "is_triggered": "triggered",
    "is_recovered": "recovered",
    "drift_trigger": "KL",
    "drift_fix": "KL, fixed",
    "lost_trigger": "lost",
    "lost_fix": "lost, fixed",
    "cost_bytes_per_token": "bytes per token pinned",
}


def record_table(name: str, records: Sequence[Record]) -> str:
    """Variants of an ablation if the name is one's (``a1`` to ``a5``), else behaviour by budget.

    Raises:
        ValueError: The records are of neither.
    """
    if name in STUDIES:
        ours = [record for record in records if record["method"] != DENSE]
        budgets = list(dict.fromkeys(record["budget"] for record in ours))
        rows = sorted(ablation_points(ours), key=lambda row: budgets.index(row["budget"]))
        table = _markdown(_VARIANT_COLUMNS, rows)
    else:
        rows = behaviour_rows(records)
        table = _markdown({key: key for key in rows[0]}, rows) if rows else ""
    if not rows:
        raise ValueError(f"the {len(records)} records of {name} hold nothing to compare")
    return table


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
