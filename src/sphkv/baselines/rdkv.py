# SPDX-License-Identifier: Apache-2.0
"""RDKV-style: rate and distortion decide at once what is dropped and at which width the rest is.

After RDKV ("rate-distortion KV", 2026): once after the prompt, tokens weighted by their votes get
the width out of 16, 8, 4, 2 and 0 bits that minimises weighted distortion plus a price per byte;
the price is the one at which the budget is met (reverse water-filling over a discrete set).

Deviations: the votes are SnapKV's; distortion of a width is measured on the layer's own states,
keys and values together, instead of taken from a model; widths are per group of tokens that are
next to one another in rank, per head; each layer meets an equal share of the budget. New tokens
take 4 bits and are treated as in ``sphkv.baselines.composed``. Format-only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.baselines.composed import Allocation, GroupRequest, GroupSettings
from sphkv.baselines.group_layer import GroupClass, integer_class
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
            return (weight.cpu()[..., None] * error + price * costs).argmin(-1)

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
    """Widths by rate and distortion.

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
