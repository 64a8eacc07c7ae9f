# SPDX-License-Identifier: Apache-2.0
"""Iso-quality frontiers: from records of single prompts to operating points and what they show.

Points are compared only where their records may be (``check_fair``); a frontier is the Pareto
envelope of the points that keep the quality of dense.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sphkv.errors import UnfairComparisonError
from sphkv.evaluation.metrics.statistics import bootstrap_interval, paired_sign_flip
from sphkv.evaluation.runner.methods import DENSE, OUR_METHODS

LM_TOLERANCE = 0.05
POINTS_TOLERANCE = 0.8
_NATS = "lm"

QUALITY_FIELD = {"lm": "kl", "qa": "f1", "needle": "found", "tools": "success"}
"""What each workload is judged by; KL counts downwards from 0, the others are shares."""

AGREEMENT = "qa, agreement with dense"
"""Label of a panel of questions of which dense answers none."""

# Rounding of averages must not turn an equal score into a lost one.
_SLACK = 1e-9
_UNKNOWN = object()


@dataclass(frozen=True, slots=True)
class PanelKey:
    """Points of one panel differ in method and budget only.

    Attributes:
        model: Model name.
        workload: Workload name.
        context: Nominal context in tokens: the longest prompt of the panel.
    """

    model: str
    workload: str
    context: int


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """A method at a budget, with everything measured.

    Attributes:
        method: Method name.
        budget: As written in the sweep.
        budget_index: Place in the order of the sweep; the last tie-break.
        b_kv: Resident KV bytes per active token.
        b_hbm: Bytes moved per generated token.
        speed: Decode throughput, tokens per second.
        quality: Higher is better: minus the KL in nats, or a score in points of 100.
        realisation: ``kernel-realized`` or ``format-only``.
        num_cases: Prompts behind it.
        case_quality: Quality of each prompt by its name, for paired tests.
    """

    method: str
    budget: str
    budget_index: int
    b_kv: float
    b_hbm: float
    speed: float
    quality: float
    realisation: str = "kernel-realized"
    num_cases: int = 1
    case_quality: Mapping[str, float] = ()  # type: ignore[assignment]

    @property
    def is_dense(self) -> bool:
        """Whether it is the reference."""
        return self.method == DENSE


@dataclass(frozen=True, slots=True)
class Panel:
    """The points of one model, workload and context.

    Attributes:
        key: Which panel.
        points: In the order of the sweep.
        refused: Points that could not be made: method, budget, reason.
        tolerance: Quality that may be lost against dense.
        unit: Of quality and tolerance.
        left_out: Prompts that some point lacks, and that no point is therefore judged by.
    """

    key: PanelKey
    points: tuple[OperatingPoint, ...]
    refused: tuple[tuple[str, str, str], ...]
    tolerance: float
    unit: str
    left_out: tuple[str, ...] = ()


def quality_name(workload: str, field: str | None) -> str:
    """Field of ``quality`` that a workload is judged by; answers may be judged by another."""
    return field if field is not None and workload != _NATS else QUALITY_FIELD[workload]


def record_quality(record: Mapping[str, Any], *, field: str | None = None) -> float:
    """Higher is better: minus the KL, or points of 100."""
    name = quality_name(record["workload"], field)
    value = float(record["quality"][name])
    return -value if name == "kl" else 100.0 * value


def check_fair(records: Sequence[Mapping[str, Any]]) -> None:
    """Refuse records whose difference could be something else than the method.

    Raises:
        UnfairComparisonError: Substrate, window, seeds, decode settings, calibration, threads or
            device differ; the message names the field and the values.
    """
    if not records:
        raise ValueError("there are no records")
    for path in (
        *(("substrate", name) for name in _substrate_names(records)),
        ("window",),
        ("seed",),
        ("decode",),
        ("model_shape",),
        ("environment", "device"),
        ("environment", "num_threads"),
        ("environment", "versions", "torch"),
    ):
        values: list[Any] = []
        for record in records:
            value: Any = record["setup"]
            for name in path:
                value = value.get(name, _UNKNOWN) if isinstance(value, Mapping) else value
            if value is not _UNKNOWN and value not in values:
                values.append(value)
        if len(values) > 1:
            raise UnfairComparisonError(
                f"records differ in {'.'.join(path)}: {values[0]!r} and {values[1]!r}"
            )
    for record in records:
        if record["status"] == "measured" and not record["memory"].get("realisation"):
            raise UnfairComparisonError(
                f"record {record['id']} does not say how decode was realised"
            )


def _substrate_names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Fields of the substrate of any record; what an older record does not say is unknown."""
    return sorted({name for record in records for name in record["setup"]["substrate"]})


def build_panels(
    records: Sequence[Mapping[str, Any]],
    *,
    delta: float = POINTS_TOLERANCE,
    kl: float = LM_TOLERANCE,
    quality_field: str | None = None,
) -> list[Panel]:
    """Group records into panels and average over prompts.

    Every point of a panel is judged by the same prompts: one that a sweep has not finished for all
    points is left out for all. Questions of which dense answers none are judged by agreement with
    dense's answers instead, and the panel's label says so.

    Args:
        records: As ``load_records`` returns them.
        delta: Points of 100 that a score may lose against dense.
        kl: Nats per token of divergence that language modelling may have.
        quality_field: Judge answers by this field of ``quality`` instead of their own.

    Raises:
        UnfairComparisonError: As ``check_fair``, or no prompt was measured for every point.
    """
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        nominal = record["case"].split("-")[1]
        groups[record["model"], record["workload"], nominal].append(record)
    panels = []
    for (model, workload, _), members in groups.items():
        check_fair(members)
        left_out = unfinished_cases(members)
        kept = [record for record in members if record["case"] not in left_out]
        if not kept:
            raise UnfairComparisonError(
                f"no prompt of {model}, {workload} was measured with every method and budget"
            )
        field, label = quality_field, workload
        if quality_field is None and workload == "qa" and not _dense_scores(kept):
            # a small model answers nothing right, yet a cache must not change what it says
            field, label = "agreement_f1", AGREEMENT
        is_nats = quality_name(workload, field) == "kl"
        points, refused = _average(kept, field)
        panels.append(
            Panel(
                PanelKey(model, label, max(int(r["context"]) for r in members)),
                points,
                refused,
                kl if is_nats else delta,
                "nats" if is_nats else "points",
                left_out,
            )
        )
    return panels


def _dense_scores(members: Sequence[Mapping[str, Any]]) -> bool:
    """Whether dense gets anything right."""
    dense = [r for r in members if r["method"] == DENSE and r["status"] == "measured"]
    return any(record_quality(record) > 0.0 for record in dense)


def unfinished_cases(members: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Prompts that lack a method or budget which another prompt of the panel has."""
    seen: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for record in members:
        seen[record["case"]].add((record["method"], record["budget"]))
    every = set().union(*seen.values())
    return tuple(case for case, points in seen.items() if points != every)


def _average(
    members: Sequence[Mapping[str, Any]], quality_field: str | None
) -> tuple[tuple[OperatingPoint, ...], tuple[tuple[str, str, str], ...]]:
    by_point: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for record in members:
        by_point[record["method"], record["budget"]].append(record)
    order: dict[str, int] = {}
    points, refused = [], []
    for (method, budget), group in by_point.items():
        index = order.setdefault(budget, len(order))
        bad = [record for record in group if record["status"] != "measured"]
        if bad:
            refused.append((method, budget, str(bad[0]["reason"])))
            continue
        points.append(_one_point(method, budget, index, group, quality_field))
    return tuple(points), tuple(refused)


def _one_point(
    method: str,
    budget: str,
    index: int,
    group: Sequence[Mapping[str, Any]],
    quality_field: str | None,
) -> OperatingPoint:
    quality = {record["case"]: record_quality(record, field=quality_field) for record in group}
    speeds = [record["times"]["tok_s"] for record in group if record["times"]["tok_s"]]
    return OperatingPoint(
        method=method,
        budget=budget,
        budget_index=index,
        b_kv=statistics.fmean(record["memory"]["b_kv"] for record in group),
        b_hbm=statistics.fmean(record["memory"]["b_hbm"] for record in group),
        # the median, because another process may slow a prompt down
        speed=statistics.median(speeds) if speeds else 0.0,
        quality=statistics.fmean(quality.values()),
        realisation=str(group[0]["memory"]["realisation"]),
        num_cases=len(group),
        case_quality=quality,
    )


@dataclass(frozen=True, slots=True)
class MethodFrontier:
    """What a method offers in a panel.

    Attributes:
        method: Its name.
        retained: Points within the quality tolerance, the iso-quality set.
        excluded: The others.
        envelope: Undominated retained points, by rising ``b_kv``.
        star: The representative point; None if nothing was retained.
        gamma_s: Largest retained speed over dense speed; None if nothing was retained.
        gamma_m: Least ``b_kv`` over dense among points at least as fast as dense, whatever their
            quality, as the paper writes it; None if there is none.
        gamma_m_iso: The same over retained points only.
        g_iso_q: Best retained speed over dense's best retained speed.
        r_iso_s: Dense ``b_kv`` over the least retained one at dense speed; None if there is none.
        least_b_kv: Least retained ``b_kv``; None if nothing was retained.
    """

    method: str
    retained: tuple[OperatingPoint, ...]
    excluded: tuple[OperatingPoint, ...]
    envelope: tuple[OperatingPoint, ...]
    star: OperatingPoint | None
    gamma_s: float | None
    gamma_m: float | None
    gamma_m_iso: float | None
    g_iso_q: float | None
    r_iso_s: float | None
    least_b_kv: float | None


@dataclass(frozen=True, slots=True)
class PanelFrontier:
    """A panel with the frontier of every method.

    Attributes:
        panel: The points.
        dense: The reference point.
        methods: One frontier per method, in the order of the sweep.
    """

    panel: Panel
    dense: OperatingPoint
    methods: tuple[MethodFrontier, ...]

    @property
    def is_informative(self) -> bool:
        """Whether dense scores anything that could be lost."""
        return self.panel.unit == "nats" or self.dense.quality > 0.0


def is_dominated(point: OperatingPoint, others: Sequence[OperatingPoint]) -> bool:
    """Whether another point is no larger and no slower, and better in one of the two."""
    return any(
        other.b_kv <= point.b_kv
        and other.speed >= point.speed
        and (other.b_kv < point.b_kv or other.speed > point.speed)
        for other in others
    )


def pareto_envelope(points: Sequence[OperatingPoint]) -> tuple[OperatingPoint, ...]:
    """Undominated points, by rising ``b_kv``."""
    kept = [point for point in points if not is_dominated(point, points)]
    return tuple(sorted(kept, key=lambda p: (p.b_kv, -p.speed, p.b_hbm, p.budget_index)))


def choose_star(envelope: Sequence[OperatingPoint]) -> OperatingPoint | None:
    """Most throughput per resident byte.

    Ties go to the larger speed, then the smaller ``b_kv``, then the smaller ``b_hbm``, then the
    earlier budget of the sweep.
    """
    if not envelope:
        return None
    return min(
        envelope,
        key=lambda p: (-p.speed / p.b_kv, -p.speed, p.b_kv, p.b_hbm, p.budget_index),
    )


def dense_reference(panel: Panel) -> OperatingPoint:
    """The dense point of best quality.

    Raises:
        ValueError: The panel has none.
    """
    dense = [point for point in panel.points if point.is_dense]
    if not dense:
        raise ValueError(f"panel {panel.key} has no dense point to compare with")
    return max(dense, key=lambda point: point.quality)


def build_frontier(panel: Panel) -> PanelFrontier:
    """Filter by quality and extract every method's envelope and summaries."""
    dense = dense_reference(panel)
    # KL is measured against the exact model, so the bound is absolute
    best = 0.0 if panel.unit == "nats" else dense.quality
    floor = best - panel.tolerance - _SLACK
    names = list(dict.fromkeys(point.method for point in panel.points))
    names += [m for m in dict.fromkeys(r[0] for r in panel.refused) if m not in names]
    methods = tuple(
        _method_frontier(
            name, [point for point in panel.points if point.method == name], dense, floor
        )
        for name in names
    )
    return PanelFrontier(panel, dense, methods)


def _method_frontier(
    name: str, points: Sequence[OperatingPoint], dense: OperatingPoint, floor: float
) -> MethodFrontier:
    retained = tuple(point for point in points if point.quality >= floor)
    fast = [point for point in points if point.speed >= dense.speed]
    fast_retained = [point for point in retained if point.speed >= dense.speed]
    envelope = pareto_envelope(retained)
    top = max((point.speed for point in retained), default=None)
    return MethodFrontier(
        method=name,
        retained=retained,
        excluded=tuple(point for point in points if point.quality < floor),
        envelope=envelope,
        star=choose_star(envelope),
        gamma_s=_ratio(top, dense.speed),
        gamma_m=_ratio(min((p.b_kv for p in fast), default=None), dense.b_kv),
        gamma_m_iso=_ratio(min((p.b_kv for p in fast_retained), default=None), dense.b_kv),
        g_iso_q=_ratio(top, dense.speed),
        r_iso_s=_ratio(dense.b_kv, min((p.b_kv for p in fast_retained), default=None)),
        least_b_kv=min((point.b_kv for point in retained), default=None),
    )


def _ratio(top: float | None, bottom: float | None) -> float | None:
    return None if top is None or not bottom else top / bottom


def winner(frontier: PanelFrontier) -> tuple[str, float | None] | None:
    """Method with the least retained ``b_kv`` and how far the next is behind it.

    Where one of ours is first, the next is the best that is not ours.

    Returns:
        Name and ratio of the next ``b_kv`` to the best; the ratio is None if no other method
        retained a point, and all is None if only dense did or dense itself scores nothing, for
        then equal quality says nothing.
    """
    if not frontier.is_informative:
        return None
    found = sorted(
        (method.least_b_kv, method.method)
        for method in frontier.methods
        if method.least_b_kv is not None and method.method != frontier.dense.method
    )
    if not found:
        return None
    least, best = found[0]
    others = [size for size, name in found[1:] if not {best, name} <= set(OUR_METHODS)]
    return best, others[0] / least if others else None


def psi(quality: float, speed: float, *, beta: float = 1.0) -> float:
    """The paper's summary of a point, ``q + beta log s``.

    Raises:
        ValueError: The speed is not positive.
    """
    if speed <= 0:
        raise ValueError(f"speed must be positive, got {speed}")
    return quality + beta * math.log(speed)


def synergy_gap(joint: float, parts: Sequence[float]) -> float:
    """How far the joint variant's Psi lies above the best of the others at one budget."""
    if not parts:
        raise ValueError("the synergy gap needs at least one other variant")
    return joint - max(parts)


def frontier_rows(frontier: PanelFrontier) -> list[dict[str, Any]]:
    """One row per method for tables: the star and the summaries."""
    rows = []
    for method in frontier.methods:
        star = method.star
        rows.append(
            {
                "method": method.method,
                "retained": f"{len(method.retained)}/{len(method.retained + method.excluded)}",
                "least_b_kv": method.least_b_kv,
                "share": _ratio(method.least_b_kv, frontier.dense.b_kv),
                "star_budget": star.budget if star else None,
                "star_b_kv": star.b_kv if star else None,
                "star_b_hbm": star.b_hbm if star else None,
                "star_tok_s": star.speed if star else None,
                "star_quality": star.quality if star else None,
                "star_interval": _interval(star),
                "gamma_s": method.gamma_s,
                "gamma_m": method.gamma_m,
                "gamma_m_iso": method.gamma_m_iso,
                "g_iso_q": method.g_iso_q,
                "r_iso_s": method.r_iso_s,
                "p_value": _paired_p(star, frontier.dense),
                "realisation": star.realisation if star else None,
            }
        )
    return rows


def _interval(star: OperatingPoint | None) -> str | None:
    """95% bootstrap interval of the star's quality over prompts; one prompt has none."""
    if star is None or len(star.case_quality) < 2:
        return None
    low, high = bootstrap_interval([*star.case_quality.values()])
    return f"{low:.4g} to {high:.4g}"


def _paired_p(star: OperatingPoint | None, dense: OperatingPoint) -> float | None:
    """Two-sided p of the star's quality against dense over the same prompts."""
    if star is None or star.is_dense or len(star.case_quality) < 2:
        return None
    cases = sorted(set(star.case_quality) & set(dense.case_quality))
    return paired_sign_flip([star.case_quality[c] - dense.case_quality[c] for c in cases])
