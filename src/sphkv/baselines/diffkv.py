# SPDX-License-Identifier: Apache-2.0
"""DiffKV-style: tokens above one threshold at K8V4, above another at K4V2, the rest dropped.

Zhang et al., 2024, "DiffKV: Differentiated Memory Management for Large Language Models with
Parallel KV Compaction". Keys have more bits than values; a token's significance is the attention it
receives, compared with what an even share would be; thresholds on it sort tokens into high and
low precision and out, so that every head gets as much as it needs.

Deviations: significance is SnapKV's votes at the end of the prompt, where the paper goes on
revising it; both thresholds are multiplied by the one factor at which the budget is met, where the
paper calibrates them and lets memory float; integers per token over a whole head; groups of tokens
next to one another in rank. New tokens start in high precision, since the paper's recent window
does, and groups of them go as in ``sphkv.baselines.composed``. Format-only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.baselines.composed import Allocation, GroupRequest, GroupSettings
from sphkv.baselines.group_layer import GroupClass
from sphkv.baselines.integer_codes import TokenIntegers
from sphkv.core.geometry import KVGeometry

_STEPS = 60


@dataclass(frozen=True)
class Thresholds:
    """Two thresholds on significance.

    Attributes:
        ratio: The low threshold over the high one.
    """

    ratio: float = 0.1

    def groups(self, request: GroupRequest) -> Tensor:
        """Groups above each threshold, the thresholds as low as the budget allows."""
        tokens = request.scores.shape[1]
        # over an even share, head by head
        ranked = request.scores.sort(dim=1, descending=True).values.double()
        ranked = ranked / ranked.mean(1, keepdim=True).clamp(min=1e-300)
        costs = torch.tensor(request.costs)
        most = tokens // request.unit

        def counted(threshold: float) -> Tensor:
            above = torch.stack(
                [(ranked >= t).sum(1) // request.unit for t in (threshold, threshold * self.ratio)],
                1,
            ).clamp(max=most)
            above[:, 1] -= above[:, 0]
            return above.cpu()

        low, high = 0.0, float(ranked.max()) / self.ratio + 1.0
        for _ in range(_STEPS):
            middle = (low + high) / 2
            is_over = int((counted(middle) * costs).sum()) > request.budget
            low, high = (middle, high) if is_over else (low, middle)
        return counted(high)


@dataclass(frozen=True)
class DiffKV(GroupSettings):
    """K8V4, K4V2 or nothing.

    Attributes:
        group: Tokens of a group.
        ratio: The low threshold over the high one.
        is_new_high: Whether new tokens are coded in high precision.
    """

    group: int = 16
    ratio: float = 0.1
    is_new_high: bool = True

    @property
    def label(self) -> str:
        """Name of the method."""
        return "diffkv"

    def classes(self, geometry: KVGeometry) -> tuple[GroupClass, ...]:
        """High and low precision."""
        dim = geometry.head_dim
        return tuple(
            GroupClass(f"k{k}v{v}", TokenIntegers(k, dim), TokenIntegers(v, dim), dim)
            for k, v in ((8, 4), (4, 2))
        )

    def new_class(self) -> int:
        """High or low."""
        return int(not self.is_new_high)

    def allocation(self) -> Allocation:
        """By thresholds."""
        return Thresholds(self.ratio)

    def trials(self) -> tuple[DiffKV, ...]:
        """Three ratios; new tokens in high or low precision."""
        return tuple(
            DiffKV(ratio=ratio, is_new_high=is_high)
            for is_high in (True, False)
            for ratio in (0.1, 0.02, 0.5)
        )
