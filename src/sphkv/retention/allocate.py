# SPDX-License-Identifier: Apache-2.0
"""Keep/drop and tier of every unit under one byte budget: a multiple-choice knapsack.

A unit is whatever is decided as one: a state, a run of tokens, or a page of states. Its choices
are the tiers of a table, dearer ones to the right. Derivation: docs/math/retention.md, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sphkv.errors import BudgetError
from sphkv.retention.choices import CHUNK_UNITS, TierChoices
from sphkv.retention.repair import climb_hulls, fill_budget, solve_core

__all__ = ["SOLVERS", "Allocation", "Solver", "TierChoices", "allocate_tiers"]

Solver = Literal["lagrangian", "value-per-byte", "one-shot"]
SOLVERS: tuple[Solver, ...] = ("lagrangian", "value-per-byte", "one-shot")

_BISECTIONS = 60
# So many units foretell the price of all to about this factor.
_SAMPLE_UNITS = 1 << 15
# A price that leaves less than this part of the budget is near enough; the rest is filled.
_NEAR = 1e-4
_SAMPLE_MARGIN = 1.02
# Of more units than this, only those that change their tier between the price and this part of
# it compete for the last bytes.
_MANY_UNITS = 1 << 16
_CONTESTED = 0.98
# Few units leave a large last gap, so there the contested ones are decided exactly.
_CORE_PROBLEM_UNITS = 512


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """A decision and what it costs.

    Attributes:
        tier_id: ``[units]`` int64; uint8 if there are very many units.
        num_bytes: Bytes it needs, at most the budget.
        loss: Sum of distortions.
        price: Distortion a byte buys at the margin, the multiplier lambda.
    """

    tier_id: Tensor
    num_bytes: int
    loss: float
    price: float


def allocate_tiers(
    choices: TierChoices,
    budget: int,
    *,
    solver: Solver = "lagrangian",
    price: float | None = None,
) -> Allocation:
    """Choose a tier for every unit so that bytes stay in the budget and loss is least.

    Ties go to the cheaper tier, then to the unit that comes first: layer, head, token.

    Args:
        choices: Units and tiers.
        budget: Bytes for all of them.
        solver: ``"lagrangian"`` bisects the price of a byte, ``"value-per-byte"`` climbs every
            unit's lower hull in order of loss saved per byte, ``"one-shot"`` is Algorithm 1,
            step 4: one tier per unit at a given price, then the units in order of value per byte.
        price: Loss per byte for ``"one-shot"``; by default just below the price of the budget.

    Raises:
        BudgetError: The lowest allowed tiers do not fit.
        ValueError: There is no such solver.
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver must be one of {', '.join(SOLVERS)}, got {solver!r}")
    least = choices.bytes_of(choices.lowest())
    if least > budget:
        raise BudgetError(least, budget, budget, "what must be kept")
    found, low, high = _bisect_price(choices, budget)
    if solver == "one-shot":
        # just below the price of the budget units want more than it has: order decides
        price = low if price is None else price
        tier_id = _one_shot(choices, budget, price)
        return Allocation(tier_id, choices.bytes_of(tier_id), choices.loss_of(tier_id), price)
    price = high
    if solver == "value-per-byte":
        found = climb_hulls(choices, choices.lowest(), budget)
    tier_id = _fill(choices, found, budget, price)
    if choices.num_units <= _CORE_PROBLEM_UNITS:
        tier_id = min(tier_id, solve_core(choices, tier_id, budget, price), key=choices.loss_of)
    return Allocation(tier_id, choices.bytes_of(tier_id), choices.loss_of(tier_id), price)


def best_at_price(choices: TierChoices, price: float) -> Tensor:
    """``[units]`` int64 tier with the least loss plus price times bytes; ties to the cheaper.

    Only vertices of a unit's lower convex hull are ever chosen.
    """
    return _best_ids(choices, price).long()


def _best_ids(choices: TierChoices, price: float) -> Tensor:
    """``best_at_price`` as uint8: several such decisions exist at once."""
    best = torch.empty(choices.num_units, dtype=torch.uint8, device=choices.distortion.device)
    allowed = choices.allowed()
    for at in range(0, choices.num_units, CHUNK_UNITS):
        part = slice(at, at + CHUNK_UNITS)
        cost = choices.cost if choices.cost.dim() == 1 else choices.cost[part]
        total = torch.add(choices.distortion[part].float(), cost.float(), alpha=price)
        if allowed is not None:
            total.masked_fill_(~allowed[part], torch.inf)
        best[part] = total.argmin(dim=1)
    return best


def _bisect_price(choices: TierChoices, budget: int) -> tuple[Tensor, float, float]:
    """The decision at the lowest price whose bytes fit, and the prices next to that point."""
    best = _best_ids(choices, 0.0)
    if choices.num_units == 0 or choices.bytes_of(best) <= budget:
        return best, 0.0, 0.0
    most = max(float(choices.distortion.max()), torch.finfo(torch.float32).tiny)
    low, high = _bracket(choices, budget, most)
    best = choices.lowest().to(torch.uint8)
    price, tested = high, {True: False, False: False}
    for _ in range(_BISECTIONS):
        found = _best_ids(choices, price)
        used = choices.bytes_of(found)
        tested[used <= budget] = True
        if used <= budget:
            high, best = price, found
        else:
            low = price
        is_near = choices.num_units > _MANY_UNITS and 0 <= budget - used < _NEAR * budget
        if used == budget or is_near or high / low < 1 + 1e-6:
            break
        # a bracket from a sample may miss the price: go on until both its ends were tried
        if not tested[True]:
            high = min(most, _SAMPLE_MARGIN**4 * max(low, high))
        if not tested[False]:
            low = max(most * 1e-18, min(low, high / _SAMPLE_MARGIN**4))
        price = (low * high) ** 0.5
    return best, low, high


def _bracket(choices: TierChoices, budget: int, most: float) -> tuple[float, float]:
    """Prices between which that of the budget lies: all, or near that of evenly spaced units."""
    stride = choices.num_units // _SAMPLE_UNITS
    if stride < 2:
        return most * 1e-18, most
    sample = choices.select(slice(None, None, stride))
    room = budget * sample.num_units // choices.num_units
    if sample.bytes_of(sample.lowest()) > room:
        return most * 1e-18, most
    _, low, high = _bisect_price(sample, room)
    return max(low, most * 1e-18) / _SAMPLE_MARGIN**8, high * _SAMPLE_MARGIN


def _fill(choices: TierChoices, found: Tensor, budget: int, price: float) -> Tensor:
    """Spend what the price left over; of very many units only on those near the price."""
    if choices.num_units <= _MANY_UNITS:
        return fill_budget(choices, found.long(), budget)
    near = (_best_ids(choices, _CONTESTED * price) != found).nonzero()[:, 0]
    contested, chosen = choices.select(near), found[near].long()
    room = budget - choices.bytes_of(found) + contested.bytes_of(chosen)
    found[near] = fill_budget(contested, chosen, room).to(found.dtype)
    return found


def _one_shot(choices: TierChoices, budget: int, price: float) -> Tensor:
    """Algorithm 1, step 4: the preferred tier of each unit, taken in order of value per byte."""
    wanted = best_at_price(choices, price)
    lowest = choices.lowest()
    cost = choices.cost.expand(choices.num_units, -1)
    extra = (cost.gather(1, wanted[:, None]) - cost.gather(1, lowest[:, None]))[:, 0]
    loss = choices.distortion
    gain = (loss.gather(1, lowest[:, None]) - loss.gather(1, wanted[:, None]))[:, 0]
    value = torch.where(extra > 0, gain / extra.clamp(min=1), torch.inf)
    order = value.argsort(descending=True, stable=True)
    tier_id = lowest.clone()
    left = budget - choices.bytes_of(lowest)
    while order.numel():
        # a unit that does not fit is passed over, and so is every dearer one after it
        order = order[extra[order] <= left]
        total = extra[order].cumsum(0)
        taken = order[total <= left]
        tier_id[taken] = wanted[taken]
        left -= int(extra[taken].sum())
        order = order[taken.numel() :]
    return tier_id
