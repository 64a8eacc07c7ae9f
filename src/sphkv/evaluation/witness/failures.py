# SPDX-License-Identifier: Apache-2.0
"""The paper's seven failure classes: a trigger, a witness, the controller's fix and its cost.

A trigger is the controller under a tight budget with its safeguards off. The fix switches on one
local safeguard at the same budget, so what it costs is the bytes it takes from other states.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sphkv.evaluation.metrics.divergence import answer_divergence
from sphkv.evaluation.runner.decoding import decode_tokens, stop_rule
from sphkv.evaluation.runner.session import ReadCase, Session
from sphkv.evaluation.witness.suite import WitnessPrompt
from sphkv.retention.gate import GateOptions
from sphkv.retention.protection import ProtectionRule

_BARE = ProtectionRule(outlier_ratio=None)
_SUFFIX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class FailureClass:
    """One way in which compression fails.

    Attributes:
        name: The paper's name.
        kind: Witness prompts that show it.
        mechanism: What goes wrong, in a few words.
        protects_evidence: Whether the fix pins what the answer rests on.
        suffix_tokens: Newest prompt tokens that the fix pins.
        outlier_ratio: The fix pins keys so many times longer than their head's median.
        has_gate: Whether the fix switches the stability gate on.
    """

    name: str
    kind: str
    mechanism: str
    protects_evidence: bool = False
    suffix_tokens: int = 0
    outlier_ratio: float | None = None
    has_gate: bool = False

    def fix(self, prompt: WitnessPrompt) -> ProtectionRule:
        """What is protected once the fix is on."""
        spans = prompt.evidence if self.protects_evidence else ()
        return replace(
            _BARE,
            spans=spans,
            suffix_tokens=self.suffix_tokens,
            outlier_ratio=self.outlier_ratio,
        )


FAILURE_CLASSES = (
    FailureClass(
        "retrieval distractor confusion", "retrieval",
        "evidence in the middle loses its bytes to later text", protects_evidence=True,
    ),
    FailureClass(
        "small-margin step flip", "retrieval",
        "drift exceeds the margin of a near-tied step", has_gate=True,
    ),
    FailureClass(
        "outlier amplification", "retrieval",
        "a long key multiplies the error of its direction", outlier_ratio=3.0,
    ),
    FailureClass(
        "termination drift", "termination",
        "states that decide when to stop lose support", suffix_tokens=_SUFFIX_TOKENS,
    ),
    FailureClass(
        "refusal flip", "refusal",
        "the instruction's states decide, and are compressed", suffix_tokens=_SUFFIX_TOKENS,
    ),
    FailureClass(
        "tool corruption", "tool",
        "names and syntax that a call needs are blurred",
        protects_evidence=True, suffix_tokens=_SUFFIX_TOKENS,
    ),
    FailureClass(
        "structured-output corruption", "json",
        "delimiters and fields rest on few states",
        protects_evidence=True, suffix_tokens=_SUFFIX_TOKENS,
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FailureFigures:
    """What was seen on one prompt.

    Attributes:
        drift: KL to the exact model over the common beginning of the answers, in nats.
        is_lost: Whether a property that dense has was lost.
        length_drift: Tokens longer or shorter than dense.
        protected_bytes: Bytes per token of states that are pinned dense.
    """

    drift: float
    is_lost: bool
    length_drift: int
    protected_bytes: float


def diagnose(
    session: Session,
    prompts: Sequence[WitnessPrompt],
    budget: str,
    tell: Callable[[str], None],
    *,
    classes: Sequence[FailureClass] = FAILURE_CLASSES,
) -> list[dict[str, Any]]:
    """One row per failure class: figures under the trigger and after the fix.

    Args:
        session: The model.
        prompts: A witness suite.
        budget: A tight byte budget.
        tell: Takes lines of progress.
        classes: Failure classes to examine.

    Raises:
        BudgetError: What must stay dense does not fit the budget.
    """
    rows = []
    for failure in classes:
        before: list[FailureFigures] = []
        after: list[FailureFigures] = []
        for prompt in prompts:
            if prompt.kind != failure.kind:
                continue
            read = session.reader.read(prompt.case)
            before.append(_examine(session, prompt, read, budget, _BARE, None))
            gate = GateOptions() if failure.has_gate else None
            after.append(_examine(session, prompt, read, budget, failure.fix(prompt), gate))
        row = summarise(failure, before, after)
        rows.append(row)
        tell(f"{failure.name}: drift {row['drift_trigger']:.3f} -> {row['drift_fix']:.3f} nats")
    return rows


def summarise(
    failure: FailureClass, before: Sequence[FailureFigures], after: Sequence[FailureFigures]
) -> dict[str, Any]:
    """The recovery profile of a failure class."""
    if not before or len(before) != len(after):
        raise ValueError(f"{failure.name}: {len(before)} triggers for {len(after)} fixes")

    def mean(figures: Sequence[FailureFigures], name: str) -> float:
        return statistics.fmean(abs(float(getattr(one, name))) for one in figures)

    return {
        "failure": failure.name,
        "mechanism": failure.mechanism,
        "num_prompts": len(before),
        "drift_trigger": mean(before, "drift"),
        "drift_fix": mean(after, "drift"),
        "lost_trigger": sum(one.is_lost for one in before),
        "lost_fix": sum(one.is_lost for one in after),
        "delta_t_trigger": mean(before, "length_drift"),
        "delta_t_fix": mean(after, "length_drift"),
        "cost_bytes_per_token": mean(after, "protected_bytes") - mean(before, "protected_bytes"),
    }


def _examine(
    session: Session,
    prompt: WitnessPrompt,
    read: ReadCase,
    budget: str,
    protection: ProtectionRule,
    gate: GateOptions | None,
) -> FailureFigures:
    cache = session.factory.controlled(budget, protection=protection, gate=gate)
    cache.store_prompt(read.states)
    case, tokenizer = prompt.case, session.tokenizer
    geometry = session.shape.geometry
    decision = cache.decision()
    assert decision is not None
    held = int(decision.contract.protected.sum())
    got = decode_tokens(
        session.model,
        cache,
        read.states.hidden[-1:],
        case.max_new_tokens,
        stop_rule(tokenizer, at_line_end=case.stops_at_newline),
    )
    dense, ours_text = (
        str(tokenizer.decode(ids, skip_special_tokens=True))
        for ids in (read.answer_ids, got.token_ids)
    )
    return FailureFigures(
        drift=answer_divergence(
            session.model, got.hidden, got.token_ids, read.reference, read.answer_ids
        ),
        is_lost=prompt.judge(dense) != prompt.judge(ours_text)
        if prompt.kind == "refusal"
        else prompt.judge(dense) and not prompt.judge(ours_text),
        length_drift=len(got.token_ids) - len(read.answer_ids),
        protected_bytes=held * geometry.dense_state_bytes / case.context,
    )
