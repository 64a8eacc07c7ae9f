# SPDX-License-Identifier: Apache-2.0
"""From records of single prompts to operating points, and which of them may be compared."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sphkv.errors import UnfairComparisonError
from sphkv.evaluation.runner.methods import DENSE

LM_TOLERANCE = 0.05
POINTS_TOLERANCE = 0.8
_NATS = "lm"

QUALITY_FIELD = {"lm": "kl", "qa": "f1", "needle": "found", "tools": "success"}
"""What each workload is judged by; KL counts downwards from 0, the others are shares."""


AGREEMENT = "qa, agreement with dense"
"""Label of a panel of questions of which dense answers none."""


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
        ("substrate",),
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
                value = value[name]
            if value not in values:
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
