# SPDX-License-Identifier: Apache-2.0
"""The paper's seven failure classes: a trigger, a witness, the controller's fix and its cost.

A trigger is the controller under a tight budget with its safeguards off; budgets are tried from the
loosest on until the failure shows. The fix switches on one local safeguard at the same budget, so
what it costs is the bytes it takes from other states. Where a failure is the loss of something,
only prompts count on which dense has it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sphkv.baselines.attention_scores import SharedAttention
from sphkv.errors import BudgetError
from sphkv.evaluation.harness.subject import Subject
from sphkv.evaluation.metrics.divergence import answer_divergence
from sphkv.evaluation.runner.decoding import (
    DecodedAnswer,
    decode_tokens,
    drawn,
    most_likely,
    stop_rule,
)
from sphkv.evaluation.runner.methods import SharedWork
from sphkv.evaluation.runner.session import ReadCase, Session
from sphkv.evaluation.schema import FailureRow
from sphkv.evaluation.witness.suite import WitnessPrompt
from sphkv.retention.gate import GateOptions
from sphkv.retention.protection import ProtectionRule

_BARE = ProtectionRule(outlier_ratio=None)
_SUFFIX_TOKENS = 64

TRIGGER_KL = 0.1
"""Nats per token of an answer from which a drift counts as a failure."""


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
        s_traj: Variance of the property over sampled answers.
    """

    drift: float
    is_lost: bool
    length_drift: int
    protected_bytes: float
    s_traj: float = 0.0


def diagnose(
    session: Session,
    prompts: Sequence[WitnessPrompt],
    budgets: Sequence[str],
    tell: Callable[[str], None],
    *,
    classes: Sequence[FailureClass] = FAILURE_CLASSES,
    seeds: Sequence[int] = (),
) -> list[FailureRow]:
    """One row per failure class: figures under the trigger and after the fix.

    Args:
        session: The model.
        prompts: A witness suite.
        budgets: Byte budgets, loosest first; a class is examined at the first that triggers it.
        tell: Takes lines of progress.
        classes: Failure classes to examine.
        seeds: Of sampled answers; none leaves ``S_traj`` at 0.

    Returns:
        No row of a class whose pinned states do not even fit the first budget.
    """
    rows = []
    for failure in classes:
        examined = [
            (prompt, session.reader.read(prompt.case))
            for prompt in prompts
            if prompt.kind == failure.kind
        ]
        shown = [pair for pair in examined if _can_fail(session, *pair)]
        row: FailureRow | None = None
        for budget in budgets:
            try:
                row = _diagnose_at(session, failure, shown or examined, budget, seeds)
            except BudgetError as error:
                tell(f"{failure.name} at {budget}: {error}")
                break
            if row["is_triggered"]:
                break
        if row is None:
            continue
        row["num_shown"] = len(shown)
        rows.append(row)
        tell(
            f"{failure.name} at {row['budget']}: drift {row['drift_trigger']:.3f} -> "
            f"{row['drift_fix']:.3f} nats, lost {row['lost_trigger']} -> {row['lost_fix']}"
        )
    return rows


def _can_fail(session: Session, prompt: WitnessPrompt, read: ReadCase) -> bool:
    """Whether dense has what may be lost; of a refusal both answers can flip."""
    said = str(session.tokenizer.decode(read.answer_ids, skip_special_tokens=True))
    return prompt.kind == "refusal" or prompt.judge(said)


def _diagnose_at(
    session: Session,
    failure: FailureClass,
    prompts: Sequence[tuple[WitnessPrompt, ReadCase]],
    budget: str,
    seeds: Sequence[int],
) -> FailureRow:
    before: list[FailureFigures] = []
    after: list[FailureFigures] = []
    gate = GateOptions() if failure.has_gate else None
    for prompt, read in prompts:
        before.append(_examine(session, prompt, read, _Setting(budget, _BARE), seeds))
        fixed = _Setting(budget, failure.fix(prompt), gate)
        after.append(_examine(session, prompt, read, fixed, seeds))
    return summarise(failure, before, after, budget=budget)


def summarise(
    failure: FailureClass,
    before: Sequence[FailureFigures],
    after: Sequence[FailureFigures],
    *,
    budget: str,
) -> FailureRow:
    """The recovery profile of a failure class.

    It is triggered if something was lost, an answer changed its length or the drift passed
    ``TRIGGER_KL``; recovered if nothing of that got worse and something got better.
    """
    if not before or len(before) != len(after):
        raise ValueError(f"{failure.name}: {len(before)} triggers for {len(after)} fixes")

    def mean(figures: Sequence[FailureFigures], name: str) -> float:
        return statistics.fmean(abs(float(getattr(one, name))) for one in figures)

    drift = (mean(before, "drift"), mean(after, "drift"))
    lost = (sum(one.is_lost for one in before), sum(one.is_lost for one in after))
    delta_t = (mean(before, "length_drift"), mean(after, "length_drift"))
    pairs = (drift, lost, delta_t)
    return {
        "failure": failure.name,
        "mechanism": failure.mechanism,
        "budget": budget,
        "num_prompts": len(before),
        "num_shown": len(before),
        "is_triggered": lost[0] > 0 or delta_t[0] > 0 or drift[0] > TRIGGER_KL,
        "is_recovered": all(b <= a for a, b in pairs) and any(b < a for a, b in pairs),
        "drift_trigger": drift[0],
        "drift_fix": drift[1],
        "lost_trigger": lost[0],
        "lost_fix": lost[1],
        "delta_t_trigger": delta_t[0],
        "delta_t_fix": delta_t[1],
        "s_traj_trigger": mean(before, "s_traj"),
        "s_traj_fix": mean(after, "s_traj"),
        "cost_bytes_per_token": mean(after, "protected_bytes") - mean(before, "protected_bytes"),
    }


@dataclass(frozen=True, slots=True)
class _Setting:
    """The controller under a trigger or after a fix."""

    budget: str
    protection: ProtectionRule
    gate: GateOptions | None = None


def _examine(
    session: Session,
    prompt: WitnessPrompt,
    read: ReadCase,
    setting: _Setting,
    seeds: Sequence[int],
) -> FailureFigures:
    case, tokenizer = prompt.case, session.tokenizer
    # answers over seeds store the same prompt under the same protection again
    work = SharedWork(SharedAttention(0))
    stops = stop_rule(tokenizer, at_line_end=case.stops_at_newline)

    def answer(choose: Callable[[Tensor], Tensor]) -> tuple[Subject, DecodedAnswer]:
        cache = session.factory.controlled(
            setting.budget, protection=setting.protection, gate=setting.gate, work=work
        )
        cache.store_prompt(read.states)
        last = read.states.hidden[-1:]
        limit = case.max_new_tokens
        return cache, decode_tokens(session.model, cache, last, limit, stops, choose=choose)

    def text_of(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    cache, got = answer(most_likely)
    decision = cache.decision()
    assert decision is not None
    held = int(decision.contract.protected.sum())
    had, has = prompt.judge(text_of(read.answer_ids)), prompt.judge(text_of(got.token_ids))
    drawn_scores = [
        float(prompt.judge(text_of(answer(drawn(seed))[1].token_ids))) for seed in seeds
    ]
    return FailureFigures(
        drift=answer_divergence(
            session.model, got.hidden, got.token_ids, read.reference, read.answer_ids
        ),
        is_lost=had != has if prompt.kind == "refusal" else had and not has,
        length_drift=len(got.token_ids) - len(read.answer_ids),
        protected_bytes=held * session.shape.geometry.dense_state_bytes / case.context,
        s_traj=statistics.pvariance(drawn_scores) if drawn_scores else 0.0,
    )
