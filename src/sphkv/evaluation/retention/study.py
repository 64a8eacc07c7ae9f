# SPDX-License-Identifier: Apache-2.0
"""Joint control against its partial variants at equal bytes: KL and answer agreement.

Prompts are books, and questions whose evidence lies among many passages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sphkv.baselines.attention_scores import SharedAttention
from sphkv.codec.states import SphericalCodec
from sphkv.core.budget import ByteBudget
from sphkv.core.tiers import RUN_TOKENS
from sphkv.errors import BudgetError
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.harness.decode import FOLLOWING_TOKENS, follow_text
from sphkv.evaluation.harness.states import PromptStates
from sphkv.evaluation.harness.subject import Subject
from sphkv.evaluation.metrics.divergence import token_divergence
from sphkv.evaluation.runner.methods import SharedWork
from sphkv.evaluation.runner.session import Session
from sphkv.evaluation.workloads.long_text import lm_cases
from sphkv.evaluation.workloads.qa import DATASETS, choose_questions, qa_cases
from sphkv.retention.features import head_spread, segment_spread, state_bytes_of
from sphkv.retention.policy import BlockShape, ControlOptions
from sphkv.retention.protection import SegmentSpans, find_segments

BUDGETS = ("20%", "15%", "10%", "7%", "5%")

VARIANT_OPTIONS: dict[str, ControlOptions] = {
    "Joint": ControlOptions(),
    "KeepDrop": ControlOptions(variant="keepdrop", fixed_tier="max"),
    "KeepDrop-best": ControlOptions(variant="keepdrop"),
    "Quant": ControlOptions(variant="quant"),
    "Decoupled": ControlOptions(variant="decoupled"),
    "Joint-tokens": ControlOptions(shapes=tuple(BlockShape)),
    "Uniform-head": ControlOptions(shapes=(BlockShape.RUNS,), uniform_heads=True),
    "NoSeg": ControlOptions(use_segments=False),
    "One-shot": ControlOptions(solver="one-shot"),
}
DEFAULT_VARIANTS = ("Joint", "KeepDrop", "Quant", "Decoupled")

_ANSWER_TOKENS = 16
_CALIBRATION_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class StudyConfig:
    """What is compared, and on what.

    Attributes:
        model: ``smollm2``, a local folder or a hub name.
        data: Folder with ``pg19`` and ``longbench``.
        variants: Names of ``VARIANT_OPTIONS``.
        budgets: Shares of dense bytes, or other budgets.
        context: Tokens of a prompt.
        num_following: Tokens after a prompt on which the language model is compared.
        num_texts: Books.
        num_questions: Questions with their evidence in the middle.
        policy: Policy file; None takes equal weights.
        calibration: Calibration file; None calibrates on ``pg19/calibration``.
        page_tokens: States of a coded page.
    """

    model: str
    data: str
    variants: tuple[str, ...] = DEFAULT_VARIANTS
    budgets: tuple[str, ...] = BUDGETS
    context: int = 2048
    num_following: int = FOLLOWING_TOKENS
    num_texts: int = 3
    num_questions: int = 4
    policy: str | None = None
    calibration: str | None = None
    page_tokens: int = 32

    def __post_init__(self) -> None:
        """Reject unknown variants and budgets."""
        for name in self.variants:
            if name not in VARIANT_OPTIONS:
                known = ", ".join(VARIANT_OPTIONS)
                raise ValueError(f"variant must be one of {known}, got {name!r}")
        for budget in self.budgets:
            ByteBudget.parse(budget)
        for name in ("context", "num_following", "page_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("num_texts", "num_questions"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, eq=False)
class StudyPrompt:
    """A prompt with its dense states.

    Attributes:
        name: Label in records.
        workload: ``"lm"`` or ``"qa"``.
        states: What the dense model computed.
        following: ``[1, tokens]`` that are fed after it: of the book, or the dense model's answer.
        reference: ``[tokens, width]`` hidden states of the dense model after each of them.
        segments: Retrieved passages.
    """

    name: str
    workload: str
    states: PromptStates
    following: Tensor
    reference: Tensor
    segments: SegmentSpans


def lm_prompts(session: Session, config: StudyConfig) -> list[StudyPrompt]:
    """Stretches of books, followed by what the books say next."""
    cases = lm_cases(
        session.tokenizer,
        data=Path(config.data),
        context=config.context,
        num_following=config.num_following,
        num_prompts=config.num_texts,
    )
    prompts = []
    for case in cases:
        read = session.reader.read(case)
        following = read.states.following
        prompts.append(
            StudyPrompt(case.case_id, "lm", read.states, following, read.reference, SegmentSpans())
        )
    return prompts


def qa_prompts(session: Session, config: StudyConfig) -> list[StudyPrompt]:
    """Questions over passages, followed by the dense model's own greedy answer.

    A question to which the dense model says nothing is left out.
    """
    if config.num_questions == 0:
        return []
    cases = qa_cases(
        session.tokenizer,
        choose_questions(Path(config.data), DATASETS, config.num_questions, ()),
        context=config.context,
        max_new_tokens=_ANSWER_TOKENS,
    )
    prompts = []
    for case in cases:
        read = session.reader.read(case)
        if not read.answer_ids:
            continue
        following = read.states.input_ids.new_tensor([read.answer_ids])
        segments = passage_segments(session.tokenizer, list(case.prompt_ids))
        prompts.append(
            StudyPrompt(case.case_id, "qa", read.states, following, read.reference[1:], segments)
        )
    return prompts


def passage_segments(tokenizer: Any, ids: list[int]) -> SegmentSpans:
    """Where the passages of a prompt lie, found by its separators."""
    marks = [tokenizer(text, add_special_tokens=False).input_ids for text in _PASSAGE_MARKS]
    turns = [tokenizer(text, add_special_tokens=False).input_ids for text in _TURN_MARKS]
    return find_segments(ids, passage_marks=marks, turn_marks=turns)


_PASSAGE_MARKS = ("Passage ", "Document ", "<document>")
_TURN_MARKS = ("Question:", "Use only the passages", "<|im_start|>", "<|im_end|>")


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
