# SPDX-License-Identifier: Apache-2.0
"""Joint control against its partial variants at equal bytes: KL and answer agreement."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from sphkv.baselines.attention_scores import SharedAttention
from sphkv.codec.states import SphericalCodec
from sphkv.core.tiers import RUN_TOKENS
from sphkv.errors import BudgetError
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.harness.decode import follow_text
from sphkv.evaluation.harness.subject import Subject
from sphkv.evaluation.metrics.divergence import token_divergence
from sphkv.evaluation.retention.config import VARIANT_OPTIONS, StudyConfig
from sphkv.evaluation.retention.prompts import StudyPrompt, lm_prompts, qa_prompts
from sphkv.evaluation.runner.session import Session
from sphkv.evaluation.runner.shared_work import SharedWork
from sphkv.retention.features import head_spread, segment_spread, state_bytes_of

_CALIBRATION_TOKENS = 4096


def calibration_books(data: str) -> list[Path]:
    """Books for calibration in a data folder; raises if there is none."""
    books = sorted((Path(data) / "pg19" / "calibration").glob("*.txt"))
    if not books:
        raise FileNotFoundError(f"no books in {data}/pg19/calibration")
    return books


class StudyRunner:
    """Any number of settings of the controller on prompts that are read once.

    Attributes:
        config: What is compared.
        session: The model.
        codec: Its codebooks.
    """

    def __init__(self, config: StudyConfig, report: Callable[[str], None] = lambda _: None) -> None:
        self.config = config
        self._report = report
        self._work: dict[str, SharedWork] = {}
        given = None if config.calibration is None else Path(config.calibration)
        self.session = Session(
            config.model,
            calibration_text=calibration_books(config.data)[0] if given is None else None,
            calibration_tokens=_CALIBRATION_TOKENS,
            calibration_file=given,
            policy=None if config.policy is None else Path(config.policy),
        )
        self.codec = SphericalCodec(self.session.calibration)

    def prompts(self) -> list[StudyPrompt]:
        """Language-model prompts, then questions."""
        found = lm_prompts(self.session, self.config)
        self._report(f"{len(found)} texts read")
        found += qa_prompts(self.session, self.config)
        self._report(f"{len(found)} prompts read")
        return found

    def _make(self, prompt: StudyPrompt, variant: str, budget: str) -> Subject:
        work = self._work.setdefault(prompt.name, SharedWork(SharedAttention(0)))
        return self.session.factory.controlled(
            budget,
            options=VARIANT_OPTIONS[variant],
            segments=prompt.segments,
            page_tokens=self.config.page_tokens,
            work=work,
        )

    def measure(self, prompt: StudyPrompt, variant: str, budget: str) -> dict[str, Any]:
        """One prompt at one setting; ``kl`` is None where the variant cannot meet the budget."""
        began = time.perf_counter()
        subject = self._make(prompt, variant, budget)
        record: dict[str, Any] = {
            "variant": variant,
            "budget": budget,
            "prompt": prompt.name,
            "workload": prompt.workload,
            "kl": None,
        }
        try:
            subject.store_prompt(prompt.states)
            stored = time.perf_counter()
            record["stored_bytes"] = subject.resident_bytes()
            record |= self._spread(subject)
            run = follow_text(subject, prompt.following)
        except BudgetError as error:
            return {**record, "missing_bytes": error.missing, "reason": str(error)}
        found = token_divergence(self.session.model, prompt.reference, run.hidden)
        return {
            **record,
            "kl": float(found.kl.mean()),
            "same_top1": float(found.is_same.double().mean()),
            "is_same_answer": bool(found.is_same.all()),
            "peak_share": run.trace.highest(lambda step: step.peak / step.limit, 0.0),
            "num_tokens": len(found.kl),
            "store_s": stored - began,
            "decode_s": time.perf_counter() - stored,
        }

    def _spread(self, subject: Subject) -> dict[str, Any]:
        decision = subject.decision()
        assert decision is not None
        contract, tiers = decision.contract, decision.tiers
        each = state_bytes_of(contract.tier_id, tiers.state_bytes(subject.geometry.head_dim))
        counts = torch.bincount(contract.tier_id.flatten().long(), minlength=len(tiers)).tolist()
        spread = head_spread(each)
        segments = decision.segments.label(each.shape[1], recent_tokens=RUN_TOKENS)
        return {
            "tiers": dict(zip((tier.name for tier in tiers), counts, strict=True)),
            "head_entropy": spread.entropy,
            "head_gini": spread.gini,
            "segments": segment_spread(each, segments),
        }

    def run(self) -> dict[str, Any]:
        """Every variant at every budget on every prompt."""
        prompts = self.prompts()
        records = []
        for prompt in prompts:
            for budget in self.config.budgets:
                for variant in self.config.variants:
                    records.append(self.measure(prompt, variant, budget))
                self._report(f"{prompt.name} {budget} done")
            self._work.clear()
        return {
            "config": recorded_config(self.config),
            "policy": asdict(replace(self.session.policy, sensitivity=None, surprise=None)),
            "is_fitted": self.session.policy.sensitivity is not None,
            "backend": self.session.factory.backend_name,
            "environment": describe_environment(),
            "records": records,
            "table": summarise(records),
        }


def recorded_config(config: StudyConfig) -> dict[str, Any]:
    """The config for a record; of files only their names, which mean something elsewhere."""
    record = asdict(config)
    for key in ("data", "policy", "calibration"):
        record[key] = record[key] and Path(record[key]).name
    return record


def summarise(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over prompts, one row per budget and variant."""
    rows = []
    for key in dict.fromkeys((record["budget"], record["variant"]) for record in records):
        group = [record for record in records if (record["budget"], record["variant"]) == key]
        row: dict[str, Any] = {"budget": key[0], "variant": key[1]}
        for workload in ("lm", "qa"):
            part = [record for record in group if record["workload"] == workload]
            done = [record for record in part if record["kl"] is not None]
            is_whole = bool(part) and len(done) == len(part)
            row[f"{workload}_kl"] = _mean(done, "kl") if is_whole else None
            row[f"{workload}_same"] = _mean(done, "same_top1") if is_whole else None
            if workload == "qa":
                row["answers"] = _mean(done, "is_same_answer") if is_whole else None
        done = [record for record in group if record["kl"] is not None]
        row["note"] = "" if len(done) == len(group) else "does not fit"
        row["used"] = max(record["peak_share"] for record in done) if done else None
        rows.append(row)
    return rows


def _mean(records: Sequence[dict[str, Any]], key: str) -> float:
    return sum(float(record[key]) for record in records) / len(records)
