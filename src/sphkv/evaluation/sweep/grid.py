# SPDX-License-Identifier: Apache-2.0
"""Run a grid of methods and budgets over prompts; every finished point is kept.

Prompts are the outer loop, because reading one costs more than measuring a point on it.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from sphkv.core.configs import config_to_dict
from sphkv.errors import BudgetError
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.frontier import QUALITY_FIELD
from sphkv.evaluation.harness.subject import Subject
from sphkv.evaluation.records import content_id, write_text
from sphkv.evaluation.runner.continuation import measure_case, sampled_quality
from sphkv.evaluation.runner.methods import JOINT
from sphkv.evaluation.runner.session import Placement, ReadCase, Session
from sphkv.evaluation.schema import Identity, Setup
from sphkv.evaluation.splits import check_calibration
from sphkv.evaluation.sweep.config import QAWorkload, SweepConfig
from sphkv.evaluation.workloads.case import Case, token_hash
from sphkv.retention.protection import SegmentSpans

Tell = Callable[[str], None]


class PointSink(Protocol):
    """Where points go."""

    def has(self, identity: Mapping[str, Any]) -> bool:
        """Whether a point is there."""
        ...

    def begin_run(self, setup: Mapping[str, Any]) -> str:
        """Say what the next points are measured with."""
        ...

    def append(self, record: Mapping[str, Any]) -> None:
        """Keep a point."""
        ...


class PointList:
    """Keeps points in memory.

    Attributes:
        records: The points, each with its setup.
    """

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self._setup: Mapping[str, Any] = {}

    def has(self, identity: Mapping[str, Any]) -> bool:
        """Whether a point is there."""
        return any(record["id"] == content_id(identity) for record in self.records)

    def begin_run(self, setup: Mapping[str, Any]) -> str:
        """Remember the setup."""
        self._setup = setup
        return content_id(setup)

    def append(self, record: Mapping[str, Any]) -> None:
        """Keep a point."""
        self.records.append({**record, "setup": self._setup})


@dataclass(frozen=True, slots=True)
class SweepSummary:
    """What a run did.

    Attributes:
        num_measured: Points measured now.
        num_refused: Of these, refused because the budget is too small for the method.
        num_known: Points that were there already.
        seconds: How long it took.
    """

    num_measured: int
    num_refused: int
    num_known: int
    seconds: float


class SweepRunner:
    """Holds the model and measures points until none is left."""

    def __init__(self, config: SweepConfig, *, keep: Path | None, tell: Tell) -> None:
        """Load the model and its calibration.

        Args:
            config: The grid.
            keep: Folder for the calibration, so that a resumed sweep need not fit it again; None
                keeps none.
            tell: Takes lines of progress.
        """
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self._config = config
        self._tell = tell
        self._session = Session(
            config.model,
            calibration_text=None if config.calibration_text is None else _find_text(config),
            calibration_tokens=config.calibration_tokens,
            keep=keep,
            backend=config.backend,
            policy=config.policy,
            place=Placement(config.device, config.dtype, config.prefill_device),
        )
        config = replace(config, qa=tuple(self._chosen(part, keep) for part in config.qa))
        self._cases = config.cases(self._session.tokenizer, self._session.shape.max_tokens)

    def _chosen(self, part: QAWorkload, keep: Path | None) -> QAWorkload:
        """Questions that dense can answer, found once and kept beside the records."""
        if part.answerable_f1 <= 0.0 or part.question_ids:
            return part
        config, session = self._config, self._session
        name = content_id([config.model, config_to_dict(part), str(config.data)])
        file = None if keep is None else keep / f"questions-{name}.json"
        if file is not None and file.is_file():
            known = json.loads(file.read_text(encoding="utf-8"))
            return replace(part, question_ids=tuple(known))
        self._tell("looking for questions that the dense model can answer")
        found = part.chosen(session.tokenizer, config.data, session.answer)
        if file is not None:
            write_text(file, json.dumps(found.question_ids) + "\n")
        return found

    def _setup(self) -> Setup:
        """The hardware and runtime table and the replication checklist of every record."""
        config, geometry = self._config, self._session.shape.geometry
        factory = self._session.factory
        tiers, controlled = factory.tiers(), factory.controller_tiers()
        return {
            "model": config.model,
            "model_shape": config_to_dict(geometry),
            "dense_bytes_per_token": geometry.dense_bytes_per_token,
            "seed": config.seed,
            "window": config_to_dict(config.window),
            "decode": {"rule": "greedy", "temperature": 0.0, "top_p": 1.0, "batch": 1},
            "substrate": {
                "pages": "paged, ragged, one sequence",
                "page_tokens": {tier.name: tier.page_tokens for tier in tiers},
                "controller_page_tokens": {tier.name: tier.page_tokens for tier in controlled},
                "device": config.device,
                "prefill_device": config.read_device,
                "dtype": f"{config.dtype} compute, bfloat16 dense pages",
                "backend": factory.backend_name,
            },
            "tiers": [config_to_dict(tier) for tier in tiers],
            "controller_tiers": [config_to_dict(tier) for tier in controlled],
            "calibration": {
                "id": self._session.calibration_id,
                "text": config.calibration_text,
                "tokens": config.calibration_tokens,
            },
            "timing": {"clock": "perf_counter", "prefill": "one dense pass shared by all methods"},
            "environment": describe_environment(),
        }

    def run(self, sink: PointSink) -> SweepSummary:
        """Measure every point the sink does not have."""
        began = time.perf_counter()
        sink.begin_run(self._setup())
        todo = [
            (
                case,
                [p for p in self._config.grid() if not sink.has(self._identity(case, *p))],
            )
            for case in self._cases
        ]
        progress = _Progress(sum(c.context * len(p) for c, p in todo), self._tell)
        num_all = len(self._cases) * len(self._config.grid())
        measured = refused = 0
        for case, points in todo:
            if not points:
                continue
            read = self._session.reader.read(case)
            self._tell(f"read {case.case_id}: {case.context} tokens in {read.prefill_s:.1f} s")
            for method, budget in points:
                record = self._measure(read, method, budget)
                sink.append(record)
                measured += 1
                refused += record["status"] == "refused"
                progress.step(case.context, record)
                if self._config.device != "cpu":
                    # a cache and what measures it hold each other, and a GPU's memory with them
                    gc.collect()
        return SweepSummary(measured, refused, num_all - measured, time.perf_counter() - began)

    def _identity(self, case: Case, method: str, budget: str) -> Identity:
        """What makes a point this point and no other."""
        config, factory = self._config, self._session.factory
        return {
            "model": config.model,
            "workload": case.workload,
            "case": case.case_id,
            "split": case.split,
            "prompt": token_hash(case.prompt_ids),
            "following": token_hash(case.following_ids) if case.following_ids else "",
            "context": case.context,
            "num_following": len(case.following_ids),
            "max_new_tokens": case.max_new_tokens,
            "window": config_to_dict(config.window),
            "seed": config.seed,
            "calibration": self._session.calibration_id,
            "method": method,
            "budget": budget,
            # another policy makes another point, of the controller only
            "policy": self._session.policy_id if method.startswith(JOINT) else "",
            "num_seeds": config.num_seeds,
            "device": config.device,
            "dtype": config.dtype,
            "backend": factory.backend_name,
            "page_tokens": factory.page_tokens(method),
        }

    def _measure(self, read: ReadCase, method: str, budget: str) -> dict[str, Any]:
        case = read.case
        identity = self._identity(case, method, budget)
        record: dict[str, Any] = {
            "id": content_id(identity),
            **identity,
            "facets": dict(case.facets),
            "status": "measured",
            "reason": "",
            "quality": None,
            "memory": None,
            "times": None,
        }
        num_new = max(len(case.following_ids), case.max_new_tokens)
        session, config = self._session, self._config

        def make() -> Subject:
            return session.factory.make(
                method,
                budget,
                context=case.context,
                num_new=num_new,
                segments=SegmentSpans(case.retrieved),
                work=read.work,
            )

        try:
            cache = make()
        except ValueError as error:
            return {**record, "status": "refused", "reason": str(error)}
        try:
            result: Any = measure_case(session.model, session.tokenizer, read, cache, config.window)
            if config.num_seeds and case.max_new_tokens and case.task is None:
                seeds = range(config.seed, config.seed + config.num_seeds)
                drawn = sampled_quality(session.model, session.tokenizer, read, make, seeds)
                quality: Any = {**result["quality"], **drawn}
                result["quality"] = quality
        except BudgetError as error:
            return {**record, "status": "refused", "reason": str(error)}
        return {**record, **result}


def _find_text(config: SweepConfig) -> Path:
    """The calibration text: inside the data folder, or a path of its own."""
    assert config.calibration_text is not None
    places = [Path(config.calibration_text)]
    if config.data is not None:
        places.insert(0, config.data / config.calibration_text)
    for place in places:
        if place.is_file():
            return check_calibration(place)
    raise FileNotFoundError(f"no calibration text at {' or '.join(str(p) for p in places)}")


class _Progress:
    """Says how far a sweep is, judging by tokens stored."""

    def __init__(self, total: int, tell: Tell) -> None:
        self._total, self._tell = total, tell
        self._done = 0
        self._began = time.perf_counter()

    def step(self, weight: int, record: Mapping[str, Any]) -> None:
        """A point was measured."""
        self._done += weight
        passed = time.perf_counter() - self._began
        left = passed * (self._total - self._done) / self._done
        quality = record["quality"]
        said = record["reason"][:60]
        if quality is not None:
            name = QUALITY_FIELD[record["workload"]]
            said = f"{name} {quality[name]:.4f}, {record['memory']['b_kv']:.0f} B/token"
        self._tell(
            f"{100 * self._done / self._total:5.1f}%  {left / 60:5.1f} min left  "
            f"{record['case']} {record['method']} {record['budget']}: {said}"
        )
