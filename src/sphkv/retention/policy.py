# SPDX-License-Identifier: Apache-2.0
"""What a controller decides and how, and the weights it decides by."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from sphkv.core.configs import freeze_sequences
from sphkv.core.tiers import RUN_TOKENS
from sphkv.retention.scores import check_score
from sphkv.retention.solver import Solver

Variant = Literal["joint", "keepdrop", "quant", "decoupled"]
VARIANTS: tuple[Variant, ...] = ("joint", "keepdrop", "quant", "decoupled")


class BlockShape(StrEnum):
    """How the states of a block lie in the prompt, which decides what positions cost.

    ``WHOLE`` is all of a head at one tier, in order; ``RUNS`` are aligned runs of 16 tokens;
    ``TOKENS`` are single tokens.
    """

    WHOLE = "whole"
    RUNS = "runs"
    TOKENS = "tokens"

    @property
    def granularity(self) -> int:
        """Tokens per decision."""
        return 1 if self is BlockShape.TOKENS else RUN_TOKENS


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """How states are decided about, and which parts of the controller are switched off.

    Attributes:
        variant: ``"joint"`` decides keep/drop and tier together; ``"keepdrop"``, ``"quant"`` and
            ``"decoupled"`` are the paper's ablations A2.
        shapes: Block shapes a head may use, the best one being chosen for it. Single tokens
            lose less on short texts under small budgets, but more on long ones, and needles
            (docs/math/retention.md).
        solver: See ``allocate_tiers``.
        uniform_heads: Give every head the same tiers (A3, Uniform-head).
        use_segments: Weigh tokens by their segment; off is NoSeg (A4).
        fixed_tier: Tier of what KeepDrop keeps; None takes the one with the least predicted loss.
        keep_share: States that Decoupled keeps.
        score: What values states: ``"attention"``, the expected move of a head's output;
            ``"recipe"``, the paper's fixed recipe; ``"votes"``, attention votes alone.
        may_be_dense: Whether states may stay dense that nothing protects. Where the kernel of dense
            states is the slowest of a layer they take the finest coded tier instead.
    """

    variant: Variant = "joint"
    shapes: tuple[BlockShape, ...] = (BlockShape.WHOLE, BlockShape.RUNS)
    solver: Solver = "lagrangian"
    uniform_heads: bool = False
    use_segments: bool = True
    fixed_tier: str | None = None
    keep_share: float = 0.5
    score: str = "attention"
    may_be_dense: bool = True

    def __post_init__(self) -> None:
        """Reject unknown variants and scores, and an empty choice of shapes."""
        freeze_sequences(self, "shapes")
        if self.variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {self.variant!r}")
        if not self.shapes:
            raise ValueError("shapes must not be empty")
        if not 0 < self.keep_share <= 1:
            raise ValueError(f"keep_share must be in (0, 1], got {self.keep_share!r}")
        check_score(self.score)

    @property
    def granularity(self) -> int:
        """Tokens per decision of the contract."""
        return min(shape.granularity for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Weights of the distortion of a state.

    Attributes:
        alpha_theta: Weight of the angle error of a key.
        alpha_r: Weight of its radius error.
        alpha_value: Weight of the error of a value.
        alpha_drop: Weight of the loss of a state.
        segment_weights: Weight of prefix, retrieved and recent tokens.
        attention_mix: Part of the attention estimate that is expected in closed form; the rest
            are votes of the observation window.
        window: Queries of the observation window.
        window_stride: Every how manyth of the newest queries belongs to it.
        sensitivity: Loss per squared move of a head's output, ``[layers][query heads]``; None
            takes every layer's outputs relative to their own energy.
        surprise: Part of later queries that turn to a token which the prompt's queries did not
            ask for, per factor e of its age, ``[layers][KV heads]``; None expects none.
        surprise_even: Part of that chance which is the same for tokens of every age.
        surprise_coded: How much errors of coded states count to such queries: 0 if it is enough
            that the token is there.
        drift_scale: Move of the margin between the two best tokens per unit of the predicted
            drift of what is coded and gone; by it a stability gate compares drift and margin.
        model_id: Model the weights were fitted on; empty if they are not fitted.
    """

    alpha_theta: float = 1.0
    alpha_r: float = 1.0
    alpha_value: float = 1.0
    alpha_drop: float = 1.0
    segment_weights: tuple[float, float, float] = (1.0, 1.0, 1.0)
    attention_mix: float = 0.3
    window: int = 64
    window_stride: int = 4
    sensitivity: tuple[tuple[float, ...], ...] | None = None
    surprise: tuple[tuple[float, ...], ...] | None = None
    surprise_even: float = 0.0
    surprise_coded: float = 1.0
    drift_scale: float = 1.0
    model_id: str = ""

    def __post_init__(self) -> None:
        """Reject weights that are negative or not finite."""
        freeze_sequences(self, "segment_weights", "sensitivity", "surprise")
        weights = {
            name: getattr(self, name)
            for name in ("alpha_theta", "alpha_r", "alpha_value", "alpha_drop", "drift_scale")
        }
        for at, value in enumerate(self.segment_weights):
            weights[f"segment_weights[{at}]"] = value
        for name in ("sensitivity", "surprise"):
            for layer, row in enumerate(getattr(self, name) or ()):
                weights |= {f"{name}[{layer}][{head}]": value for head, value in enumerate(row)}
        for name, value in weights.items():
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name} must be finite and not negative, got {value!r}")
        for name in ("attention_mix", "surprise_even", "surprise_coded"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in 0..1, got {getattr(self, name)!r}")
        for name in ("window", "window_stride"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{name} must be a positive integer, got {count!r}")

    @property
    def watched_tokens(self) -> int:
        """Newest tokens of a prompt whose queries tell what will be asked for."""
        return self.window * max(self.window_stride, 4)

    def check_shape(self, num_layers: int, num_query_heads: int, num_kv_heads: int) -> None:
        """Raise if the sensitivities or surprises belong to another model."""
        for name, heads, kind in (
            ("sensitivity", num_query_heads, "query"),
            ("surprise", num_kv_heads, "KV"),
        ):
            rows = getattr(self, name)
            if rows is None:
                continue
            if len(rows) != num_layers or any(len(row) != heads for row in rows):
                raise ValueError(
                    f"policy of {self.model_id!r} has a {name} of {len(rows)} layers, "
                    f"the model has {num_layers} of {heads} {kind} heads"
                )


def save_policy(policy: RetentionPolicy, path: Path | str) -> None:
    """Write a policy as JSON."""
    text = json.dumps(asdict(policy), indent=1, sort_keys=True)
    Path(path).write_text(text + "\n", encoding="utf-8")


def load_policy(path: Path | str) -> RetentionPolicy:
    """Read a policy that ``save_policy`` wrote.

    Raises:
        ValueError: The file is no policy.
    """
    try:
        data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no policy file: {error}") from error
    known = {field.name for field in fields(RetentionPolicy)}
    if not isinstance(data, dict) or set(data) - known:
        raise ValueError(f"{path} is no policy file: unknown keys {sorted(set(data) - known)}")
    for name in ("sensitivity", "surprise"):
        if data.get(name) is not None:
            data[name] = tuple(tuple(map(float, row)) for row in data[name])
    if "segment_weights" in data:
        data["segment_weights"] = tuple(map(float, data["segment_weights"]))
    try:
        return RetentionPolicy(**data)
    except TypeError as error:
        raise ValueError(f"{path} is no policy file: {error}") from error
