# SPDX-License-Identifier: Apache-2.0
"""Joint control against its partial variants at equal bytes: KL and answer agreement."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sphkv.attention.api import get_backend
from sphkv.cache.retained import RetainedSequence
from sphkv.cache.retained_config import RetainedConfig, retention_tiers
from sphkv.codec.calibration import Calibration
from sphkv.codec.calibration_file import load_calibration
from sphkv.codec.states import SphericalCodec
from sphkv.core.budget import ByteBudget
from sphkv.errors import BudgetError
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.retention.config import VARIANT_OPTIONS, StudyConfig
from sphkv.evaluation.retention.prompts import StudyPrompt, lm_prompts, qa_prompts
from sphkv.integrations.models import load_model
from sphkv.integrations.prompt_states import continue_prompt, store_prompt
from sphkv.integrations.teacher_forcing import log_probabilities
from sphkv.integrations.transformers.architecture import model_geometry, model_ropes
from sphkv.integrations.transformers.calibrate import calibrate_model
from sphkv.retention.features import head_spread, segment_spread, state_bytes_of
from sphkv.retention.measure import PromptWork
from sphkv.retention.policy import RetentionPolicy, load_policy


def calibration_books(data: str) -> list[Path]:
    """Books for calibration in a data folder; raises if there is none."""
    books = sorted((Path(data) / "pg19" / "calibration").glob("*.txt"))
    if not books:
        raise FileNotFoundError(f"no books in {data}/pg19/calibration")
    return books


class StudyRunner:
    """A model, its codebooks and prompts read once, and any number of settings on them."""

    def __init__(self, config: StudyConfig, report: Callable[[str], None] = lambda _: None) -> None:
        self.config = config
        self._report = report
        self._backend = get_backend("auto")
        self._measured: dict[str, PromptWork] = {}
        self.model, self.tokenizer = load_model(config.model, torch.float32)
        self.geometry = model_geometry(self.model)
        self.ropes = model_ropes(self.model)
        self.policy = RetentionPolicy() if config.policy is None else load_policy(config.policy)
        self.codec = SphericalCodec(self._calibration())

    def _calibration(self) -> Calibration:
        config = self.config
        if config.calibration is not None:
            return load_calibration(config.calibration, geometry=self.geometry, ropes=self.ropes)
        book = calibration_books(config.data)[0]
        ids = self.tokenizer(book.read_text(encoding="utf-8")[5000:45000], return_tensors="pt")
        self._report("calibrating")
        return calibrate_model(self.model, ids.input_ids[:, :4096], model_id=config.model)

    def prompts(self) -> list[StudyPrompt]:
        """Language-model prompts, then questions."""
        config = self.config
        found = lm_prompts(self.model, self.tokenizer, Path(config.data), config)
        self._report(f"{len(found)} texts read")
        found += qa_prompts(self.model, self.tokenizer, Path(config.data), config)
        self._report(f"{len(found)} prompts read")
        return found

    def sequence(self, prompt: StudyPrompt, variant: str, budget: str) -> RetainedSequence:
        """An empty sequence of a variant."""
        config = RetainedConfig(
            self.geometry,
            self.ropes,
            ByteBudget.parse(budget),
            tiers=retention_tiers(self.config.page_tokens),
            policy=self.policy,
            options=VARIANT_OPTIONS[variant],
            segments=prompt.segments,
        )
        measured = self._measured.setdefault(prompt.name, PromptWork())
        return RetainedSequence(config, self.codec, self._backend, measured=measured)

    def measure(self, prompt: StudyPrompt, variant: str, budget: str) -> dict[str, Any]:
        """One prompt at one setting; ``kl`` is None where the variant cannot meet the budget."""
        began = time.perf_counter()
        sequence = self.sequence(prompt, variant, budget)
        record: dict[str, Any] = {
            "variant": variant,
            "budget": budget,
            "prompt": prompt.name,
            "workload": prompt.workload,
            "kl": None,
        }
        try:
            store_prompt(sequence, prompt.states)
        except BudgetError as error:
            return {**record, "missing_bytes": error.missing}
        stored = time.perf_counter()
        record["limit_bytes"] = sequence.limit_bytes()
        record["bytes"] = sequence.resident_bytes()
        record |= self._spread(sequence, prompt)
        # one chunk follows; what would happen to its own states afterwards is not compared
        sequence.is_frozen = True
        hidden = continue_prompt(self.model, sequence, prompt.states.following)
        record |= compare(self.model, prompt.states.hidden[1:], hidden)
        record["store_s"] = stored - began
        record["decode_s"] = time.perf_counter() - stored
        return record

    def _spread(self, sequence: RetainedSequence, prompt: StudyPrompt) -> dict[str, Any]:
        assert sequence.contract is not None
        tiers = sequence.config.tiers
        each = state_bytes_of(sequence.contract.tier_id, tiers.state_bytes(self.geometry.head_dim))
        counts = torch.bincount(
            sequence.contract.tier_id.flatten().long(), minlength=len(tiers)
        ).tolist()
        spread = head_spread(each)
        segments = prompt.segments.label(each.shape[1], recent_tokens=16)
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
            self._measured.clear()
        return {
            "config": recorded_config(self.config),
            "policy": asdict(replace(self.policy, sensitivity=None, surprise=None)),
            "is_fitted": self.policy.sensitivity is not None,
            "backend": self._backend.name,
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


def compare(model: Any, dense: Tensor, ours: Tensor) -> dict[str, Any]:
    """KL to the dense model, equal first choices, and whether all are equal."""
    kl = same = 0.0
    pairs = zip(log_probabilities(model, dense), log_probabilities(model, ours), strict=True)
    for (_, p), (_, q) in pairs:
        kl += float((p.exp() * (p - q)).sum(-1).double().sum())
        same += float((p.argmax(-1) == q.argmax(-1)).sum())
    count = dense.shape[0]
    return {"kl": kl / count, "same_top1": same / count, "is_same_answer": same == count}


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
        row["used"] = (
            sum(record["bytes"] / record["limit_bytes"] for record in done) / len(done)
            if done
            else None
        )
        rows.append(row)
    return rows


def _mean(records: Sequence[dict[str, Any]], key: str) -> float:
    return sum(float(record[key]) for record in records) / len(records)
