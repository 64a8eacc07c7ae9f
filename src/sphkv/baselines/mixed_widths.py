# SPDX-License-Identifier: Apache-2.0
"""Methods that drop some tokens and code the rest at several widths: RDKV's and DiffKV's rules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.baselines.composed import Allocation, GroupRequest, GroupSettings
from sphkv.baselines.group_layer import GroupClass, integer_class
from sphkv.baselines.integer_codes import TokenIntegers
from sphkv.core.geometry import KVGeometry

_STEPS = 60
_DROPPED = 1.0


@dataclass(frozen=True)
class Brain16:
    """States as they are, in bfloat16."""

    label = "16"

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """``[heads, tokens, head_dim]`` bfloat16."""
        return {"codes": x.bfloat16()}

    def decode(self, tensors: dict[str, Tensor], num_tokens: int) -> Tensor:
        """``[heads, tokens, head_dim]`` float32."""
        return tensors["codes"].float()

    def tables(self) -> list[Tensor]:
        """None."""
        return []


@dataclass(frozen=True)
class LeastCost:
    """Each group of tokens in the class of least weighted distortion plus price.

    Attributes:
        power: Votes are raised to it before they weigh distortion.
    """

    power: float = 1.0

    def groups(self, request: GroupRequest) -> Tensor:
        """The classes at the lowest price that meets the budget."""
        heads, tokens = request.scores.shape
        whole = tokens // request.unit * request.unit
        ranked = request.scores.sort(dim=1, descending=True).values[:, :whole]
        weight = ranked.double().clamp(min=0) ** self.power
        weight = (weight / weight.sum().clamp(min=1e-300)).unflatten(1, (-1, request.unit)).sum(2)
        costs = torch.tensor([*request.costs, 0], dtype=torch.float64)
        error = torch.tensor([*request.distortion, _DROPPED], dtype=torch.float64)

        def chosen(price: float) -> Tensor:
            total: Tensor = weight.cpu()[..., None] * error + price * costs
            return total.argmin(-1)

        low, high = 0.0, 1.0
        for _ in range(_STEPS):
            price = (low + high) / 2
            is_over = float(costs[chosen(price)].sum()) > request.budget
            low, high = (price, high) if is_over else (low, price)
        counts = torch.zeros(heads, len(costs), dtype=torch.int64)
        picked = chosen(high)
        counts.scatter_add_(1, picked, torch.ones_like(picked))
        return counts[:, :-1]


@dataclass(frozen=True)
class RateDistortion(GroupSettings):
    """RDKV-style: rate and distortion decide what is dropped and at which width the rest is.

    After RDKV ("rate-distortion KV", 2026): once after the prompt, tokens weighted by their votes
    get the width out of 16, 8, 4, 2 and 0 bits that minimises weighted distortion plus a price per
    byte; the price is the one at which the budget is met (reverse water-filling over a discrete
    set).

    Deviations: the votes are SnapKV's; distortion of a width is measured on the layer's own states,
    keys and values together, instead of taken from a model; widths are per group of tokens that are
    next to one another in rank, per head; each layer meets an equal share of the budget. New tokens
    take 4 bits and are treated as in ``sphkv.baselines.composed``. Format-only.

    Attributes:
        group: Tokens of a group.
        power: Votes are raised to it before they weigh distortion.
    """

    group: int = 32
    power: float = 1.0

    @property
    def label(self) -> str:
        """Name of the method."""
        return "rdkv"

    def classes(self, geometry: KVGeometry) -> tuple[GroupClass, ...]:
        """16, 8, 4 and 2 bits."""
        dim = geometry.head_dim
        integers = [integer_class(f"int{bits}", bits, bits, dim) for bits in (8, 4, 2)]
        return (GroupClass("bf16", Brain16(), Brain16(), dim), *integers)

    def new_class(self) -> int:
        """4 bits."""
        return 2

    def allocation(self) -> Allocation:
        """By price."""
        return LeastCost(self.power)

    def trials(self) -> tuple[RateDistortion, ...]:
        """Two kernels, three powers."""
        return tuple(
            RateDistortion(kernel=kernel, power=power)
            for kernel in (7, 17)
            for power in (1.0, 0.5, 2.0)
        )


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
    """DiffKV-style: tokens above one threshold at K8V4, above another at K4V2, the rest dropped.

    Zhang et al., 2024, "DiffKV: Differentiated Memory Management for Large Language Models with
    Parallel KV Compaction". Keys have more bits than values; a token's significance is the
    attention it receives, compared with what an even share would be; thresholds on it sort tokens
    into high and low precision and out, so that every head gets as much as it needs.

    Deviations: significance is SnapKV's votes at the end of the prompt, where the paper goes on
    revising it; both thresholds are multiplied by the one factor at which the budget is met, where
    the paper calibrates them and lets memory float; integers per token over a whole head; groups of
    tokens next to one another in rank. New tokens start in high precision, since the paper's recent
    window does, and groups of them go as in ``sphkv.baselines.composed``. Format-only.

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
