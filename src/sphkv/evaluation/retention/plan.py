# SPDX-License-Identifier: Apache-2.0
"""What a budget would keep of a prompt, without decoding a token."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sphkv.core.budget import ByteBudget
from sphkv.core.tiers import RUN_TOKENS
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.harness.states import read_prompt
from sphkv.evaluation.harness.subject import Decision, Subject
from sphkv.evaluation.retention.prompts import passage_segments
from sphkv.evaluation.runner.session import Session
from sphkv.retention.features import head_spread, segment_spread, state_bytes_of

_CALIBRATION_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """A prompt and a budget.

    Attributes:
        model: ``smollm2``, a local folder or a hub name.
        prompt_file: UTF-8 text.
        budget: Such as ``"10%"``.
        policy: Policy file; None takes equal weights.
        calibration: Calibration file; None calibrates on the prompt.
        max_tokens: Tokens of the prompt that are read at most; None reads all.
        page_tokens: States of a coded page.
    """

    model: str
    prompt_file: str
    budget: str
    policy: str | None = None
    calibration: str | None = None
    max_tokens: int | None = None
    page_tokens: int = 32

    def __post_init__(self) -> None:
        """Reject a prompt of no tokens."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens must be positive, got {self.max_tokens}")


def plan_retention(config: PlanConfig) -> tuple[dict[str, Any], Decision]:
    """Store a prompt under a budget and say what was kept.

    Returns:
        A record with ``bytes``, ``limit_bytes`` and counts by tier, segment and head, and the
        decision itself.

    Raises:
        BudgetError: What must stay dense does not fit; says how many bytes are missing.
    """
    ByteBudget.parse(config.budget)
    file = Path(config.prompt_file)
    if not file.is_file():
        raise FileNotFoundError(f"no prompt file at {file}")
    session = Session(
        config.model,
        calibration_file=None if config.calibration is None else Path(config.calibration),
        policy=None if config.policy is None else Path(config.policy),
    )
    text = file.read_text(encoding="utf-8")
    ids = session.tokenizer(text, return_tensors="pt").input_ids[:, : config.max_tokens]
    if config.calibration is None:
        session.calibrate_on(ids[:, :_CALIBRATION_TOKENS])
    subject = session.factory.controlled(
        config.budget,
        segments=passage_segments(session.tokenizer, ids[0].tolist()),
        page_tokens=config.page_tokens,
    )
    subject.store_prompt(read_prompt(session.model, ids))
    decision = subject.decision()
    assert decision is not None
    return describe_plan(subject, decision, config), decision


def describe_plan(subject: Subject, decision: Decision, config: PlanConfig) -> dict[str, Any]:
    """Bytes and counts of a stored prompt."""
    contract, tiers, geometry = decision.contract, decision.tiers, subject.geometry
    names = [tier.name for tier in tiers]
    each = state_bytes_of(contract.tier_id, tiers.state_bytes(geometry.head_dim))
    counts = contract.state_counts(len(tiers))
    spread = head_spread(each)
    labels = decision.segments.label(contract.num_tokens, recent_tokens=RUN_TOKENS)
    ledger = subject.ledger()
    bytes_by_tier = {
        name: int(counts[..., tier].sum()) * tiers[tier].state_bytes(geometry.head_dim)
        for tier, name in enumerate(names)
    }
    return {
        "bytes": subject.resident_bytes(),
        "limit_bytes": subject.limit_bytes(contract.num_tokens),
        "dense_bytes": geometry.dense_bytes_per_token * contract.num_tokens,
        "num_tokens": contract.num_tokens,
        "ledger": ledger.to_dict(),
        "tiers": {name: int(counts[..., tier].sum()) for tier, name in enumerate(names)},
        "bytes_by_tier": bytes_by_tier,
        "segments": segment_spread(each, labels),
        "heads": [
            {
                "layer": row // geometry.num_kv_heads,
                "head": row % geometry.num_kv_heads,
                "bytes_per_token": spread.bytes_per_token[row],
                **dict(zip(names, line, strict=True)),
            }
            for row, line in enumerate(counts.flatten(0, 1).tolist())
        ],
        "head_entropy": spread.entropy,
        "head_gini": spread.gini,
        "protected": int(contract.protected.sum()),
        "config": {
            **asdict(config),
            **{
                key: (path := getattr(config, key)) and Path(path).name
                for key in ("prompt_file", "policy", "calibration")
            },
        },
        "environment": describe_environment(),
    }
