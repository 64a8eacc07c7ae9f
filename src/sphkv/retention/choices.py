# SPDX-License-Identifier: Apache-2.0
"""Units a budget is shared out to, and what every tier would cost and lose for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Units examined at once: bounds the memory of a pass over tens of millions of them.
CHUNK_UNITS = 1 << 19


@dataclass(frozen=True, slots=True, eq=False)
class TierChoices:
    """Units, and what every tier would cost and lose for each.

    Attributes:
        distortion: ``[units, tiers]`` float32, or float16 to halve the memory; not negative.
            Tier 0 drops the unit.
        cost: ``[tiers]`` or ``[units, tiers]`` int64 bytes, rising with the tier.
        floor: ``[units]`` int64 lowest tier allowed; None allows dropping every unit.
        ceiling: ``[units]`` int64 highest tier allowed; None allows the last.
    """

    distortion: Tensor
    cost: Tensor
    floor: Tensor | None = None
    ceiling: Tensor | None = None

    def __post_init__(self) -> None:
        """Reject shapes that do not fit and distortions that are not finite."""
        if self.distortion.dim() != 2:
            raise ValueError(
                f"distortion must be [units, tiers], got {tuple(self.distortion.shape)}"
            )
        units, tiers = self.distortion.shape
        if tuple(self.cost.shape) not in ((tiers,), (units, tiers)):
            raise ValueError(
                f"cost must be [{tiers}] or [{units}, {tiers}], got {tuple(self.cost.shape)}"
            )
        if bool((self.cost.diff(dim=-1) < 0).any()):
            raise ValueError("cost must not fall from a tier to the next")
        for part in self.distortion.split(CHUNK_UNITS):
            if not bool(torch.isfinite(part).all()):
                raise ValueError("distortion holds values that are not finite")
        for name in ("floor", "ceiling"):
            bound = getattr(self, name)
            if bound is not None and tuple(bound.shape) != (units,):
                raise ValueError(f"{name} must be [{units}], got {tuple(bound.shape)}")

    @property
    def num_units(self) -> int:
        """Units to decide about."""
        return self.distortion.shape[0]

    def select(self, index: Tensor | slice) -> TierChoices:
        """The units that an index or a slice names."""
        return TierChoices(
            self.distortion[index],
            self.cost if self.cost.dim() == 1 else self.cost[index],
            None if self.floor is None else self.floor[index],
            None if self.ceiling is None else self.ceiling[index],
        )

    def lowest(self) -> Tensor:
        """``[units]`` int64 cheapest tier of each unit."""
        if self.floor is not None:
            return self.floor
        return torch.zeros(self.num_units, dtype=torch.int64, device=self.distortion.device)

    def allowed(self) -> Tensor | None:
        """``[units, tiers]`` bool, or None if everything is."""
        tier = torch.arange(self.distortion.shape[1], device=self.distortion.device)
        mask = None
        if self.floor is not None:
            mask = tier >= self.floor[:, None]
        if self.ceiling is not None:
            below = tier <= self.ceiling[:, None]
            mask = below if mask is None else mask & below
        return mask

    def bytes_of(self, tier_id: Tensor) -> int:
        """Bytes of a decision ``[units]``."""
        if self.cost.dim() == 1:
            counts = torch.bincount(tier_id, minlength=self.cost.shape[0])
            return int((counts * self.cost).sum())
        return int(self.cost.gather(1, tier_id.long()[:, None]).sum())

    def loss_of(self, tier_id: Tensor) -> float:
        """Distortion of a decision ``[units]``."""
        total = 0.0
        for loss, ids in zip(
            self.distortion.split(CHUNK_UNITS), tier_id.split(CHUNK_UNITS), strict=True
        ):
            total += float(loss.gather(1, ids.long()[:, None]).double().sum())
        return total
