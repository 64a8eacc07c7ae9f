# SPDX-License-Identifier: Apache-2.0
"""Parts of the report made from other records: an ablation of the controller, a certificate."""

from __future__ import annotations

import html
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sphkv.evaluation.frontier.envelope import psi, synergy_gap
from sphkv.evaluation.report.sections import table

JOINT = "Joint"
SINGLE_LEVERS = ("KeepDrop", "Quant", "Decoupled")
BETA = 0.01
"""Nats of divergence that a factor e of throughput is worth in Psi."""


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


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def ablation_points(study: Mapping[str, Any], *, beta: float = BETA) -> list[dict[str, Any]]:
    """Variants at each budget: divergence and speed on texts, agreement on questions, Psi.

    A variant counts at a budget only if it could be made for every prompt that another had.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for record in study["records"]:
        groups[record["budget"], record["variant"]].append(record)
    num_following = study["config"]["num_following"]
    rows = []
    for (budget, variant), members in groups.items():
        done = [m for m in members if m.get("kl") is not None]
        texts = [m for m in done if m["workload"] == "lm"]
        kl = _mean([m["kl"] for m in texts])
        speed = _mean([num_following / m["decode_s"] for m in texts if m.get("decode_s")])
        answered = [m for m in done if m["workload"] != "lm"]
        rows.append(
            {
                "budget": budget,
                "variant": variant,
                "kl": kl,
                "same_top1": _mean([m["same_top1"] for m in texts]),
                "tok_s": speed,
                "same_answers": _mean([float(m["is_same_answer"]) for m in answered]),
                "psi": None if kl is None or not speed else psi(-kl, speed, beta=beta),
                "num_prompts": len(done),
            }
        )
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
        others = {name: found[name] for name in SINGLE_LEVERS if name in found}
        if not others:
            gaps.append((budget, None, "no single lever meets this budget"))
            continue
        best = max(others, key=lambda name: others[name])
        gaps.append((budget, synergy_gap(found[JOINT], list(others.values())), best))
    return gaps


def ablation_part(study: Mapping[str, Any], *, beta: float = BETA) -> str:
    """Tables of an ablation."""
    points = ablation_points(study, beta=beta)
    header = ("budget", "variant", "KL", "same top-1", "tok/s", "same answers", "Psi", "prompts")
    rows = [["-" if cell is None else cell for cell in point.values()] for point in points]
    gaps = [
        [budget, "-" if gap is None else gap, best] for budget, gap, best in synergy_gaps(points)
    ]
    return (
        f"<p class='soft'>Psi is minus the KL plus {beta:g} times the logarithm of the speed. The "
        "synergy gap is Psi of the joint variant minus the best of KeepDrop, Quant and Decoupled "
        "at the same budget.</p>"
        + table(header, rows)
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
    )
