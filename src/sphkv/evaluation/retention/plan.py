# SPDX-License-Identifier: Apache-2.0
"""What a budget would keep of a prompt, without decoding a token."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sphkv.attention.reference import ReferenceBackend
from sphkv.cache.retained import RetainedSequence
from sphkv.cache.retained_config import RetainedConfig, retention_tiers
from sphkv.codec.calibration import CalibrationOptions, Calibrator
from sphkv.codec.calibration_file import load_calibration
from sphkv.codec.states import SphericalCodec
from sphkv.core.budget import ByteBudget
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.harness.states import PromptStates, read_prompt
from sphkv.evaluation.retention.prompts import passage_segments
from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.architecture import model_geometry, model_ropes
from sphkv.retention.features import head_spread, segment_spread, state_bytes_of
from sphkv.retention.policy import ControlOptions, RetentionPolicy, load_policy

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


def plan_retention(config: PlanConfig) -> tuple[dict[str, Any], RetainedSequence]:
    """Store a prompt under a budget and say what was kept.

    Returns:
        A record with ``bytes``, ``limit_bytes`` and counts by tier, segment and head, and the
        sequence itself.

    Raises:
        BudgetError: What must stay dense does not fit; says how many bytes are missing.
    """
    budget = ByteBudget.parse(config.budget)
    file = Path(config.prompt_file)
    if not file.is_file():
        raise FileNotFoundError(f"no prompt file at {file}")
    model, tokenizer = load_model(config.model, torch.float32)
    loaded: Any = tokenizer
    ids = loaded(file.read_text(encoding="utf-8"), return_tensors="pt").input_ids
    ids = ids[:, : config.max_tokens]
    states = read_prompt(model, ids)
    retained = RetainedConfig(
        model_geometry(model),
        model_ropes(model),
        budget,
        tiers=retention_tiers(config.page_tokens),
        policy=RetentionPolicy() if config.policy is None else load_policy(config.policy),
        options=ControlOptions(),
        segments=passage_segments(tokenizer, ids[0].tolist()),
    )
    codec = _codec(config, retained, states)
    sequence = RetainedSequence(retained, codec, ReferenceBackend())
    for layer, part in enumerate(states.layers):
        sequence.prefill(layer, part.keys, part.values, query=part.query)
    return describe_plan(sequence, config), sequence


def _codec(config: PlanConfig, retained: RetainedConfig, states: PromptStates) -> SphericalCodec:
    if config.calibration is not None:
        return SphericalCodec(
            load_calibration(config.calibration, geometry=retained.geometry, ropes=retained.ropes)
        )
    calibrator = Calibrator(
        retained.geometry,
        retained.ropes,
        model_id=config.model,
        source="prompt",
        options=CalibrationOptions(max_tokens=_CALIBRATION_TOKENS),
    )
    for layer, part in enumerate(states.layers):
        calibrator.add_layer(layer, part.keys, part.query, torch.arange(states.num_tokens))
    return SphericalCodec(calibrator.finish())


def describe_plan(sequence: RetainedSequence, config: PlanConfig) -> dict[str, Any]:
    """Bytes and counts of a stored prompt."""
    contract, tiers = sequence.contract, sequence.config.tiers
    assert contract is not None
    geometry = sequence.config.geometry
    names = [tier.name for tier in tiers]
    each = state_bytes_of(contract.tier_id, tiers.state_bytes(geometry.head_dim))
    counts = contract.state_counts(len(tiers))
    spread = head_spread(each)
    labels = sequence.config.segments.label(contract.num_tokens, recent_tokens=16)
    ledger = sequence.ledger()
    bytes_by_tier = {
        name: int(counts[..., tier].sum()) * tiers[tier].state_bytes(geometry.head_dim)
        for tier, name in enumerate(names)
    }
    return {
        "bytes": sequence.resident_bytes(),
        "limit_bytes": sequence.limit_bytes(),
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
