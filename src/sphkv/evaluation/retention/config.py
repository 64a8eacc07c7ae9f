# SPDX-License-Identifier: Apache-2.0
"""What a study of the controller compares, and on what."""

from __future__ import annotations

from dataclasses import dataclass

from sphkv.core.budget import ByteBudget
from sphkv.evaluation.harness.decode import FOLLOWING_TOKENS
from sphkv.retention.policy import BlockShape, ControlOptions

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
