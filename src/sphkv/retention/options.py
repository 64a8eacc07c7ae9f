# SPDX-License-Identifier: Apache-2.0
"""What a controller decides, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sphkv.retention.allocate import Solver
from sphkv.retention.blocks import BlockShape

Variant = Literal["joint", "keepdrop", "quant", "decoupled"]
VARIANTS: tuple[Variant, ...] = ("joint", "keepdrop", "quant", "decoupled")


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
    """

    variant: Variant = "joint"
    shapes: tuple[BlockShape, ...] = (BlockShape.WHOLE, BlockShape.RUNS)
    solver: Solver = "lagrangian"
    uniform_heads: bool = False
    use_segments: bool = True
    fixed_tier: str | None = None
    keep_share: float = 0.5

    def __post_init__(self) -> None:
        """Reject unknown variants and an empty choice of shapes."""
        if self.variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {self.variant!r}")
        if not self.shapes:
            raise ValueError("shapes must not be empty")
        if not 0 < self.keep_share <= 1:
            raise ValueError(f"keep_share must be in (0, 1], got {self.keep_share!r}")

    @property
    def granularity(self) -> int:
        """Tokens per decision of the contract."""
        return min(shape.granularity for shape in self.shapes)
