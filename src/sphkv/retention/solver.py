# SPDX-License-Identifier: Apache-2.0
"""Keep/drop and tier of every unit under one byte budget: a multiple-choice knapsack.

A unit is whatever is decided as one: a state, a run of tokens, or a page of states. Its choices
are the tiers of a table, dearer ones to the right. Derivation: docs/math/retention.md, section 4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sphkv.errors import BudgetError

Solver = Literal["lagrangian", "value-per-byte", "one-shot"]
SOLVERS: tuple[Solver, ...] = ("lagrangian", "value-per-byte", "one-shot")

_BISECTIONS = 60
# So many units predict the price of all to about this factor.
_SAMPLE_UNITS = 1 << 15
# A price that leaves less than this part of the budget is near enough; the rest is filled.
_NEAR = 1e-4
_SAMPLE_MARGIN = 1.02
# Of more units than this, only those that change their tier between the price and this part of
# it compete for the last bytes.
_MANY_UNITS = 1 << 16
# So many units have all steps of their lower hulls sorted once, which finds any budget's price.
_SORTED_UNITS = 1 << 21
# Prices nearer to each other than this part of them are not told apart.
_SAME_PRICE = 1e-6
_CONTESTED = 0.98
# Few units leave a large last gap, so there the contested ones are decided exactly.
_CORE_PROBLEM_UNITS = 512
# Upgrades looked at in one round, most valuable first.
_ROUND_STEPS = 1 << 16
_MAX_ROUNDS = 64
_CORE_UNITS = 48
_CORE_STEPS = 1 << 16
# Units examined at once: bounds the memory of a pass over tens of millions of them.
CHUNK_UNITS = 1 << 19
_LARGEST = torch.iinfo(torch.int64).max


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
        found = [(self.cost.diff(dim=-1) < 0).any()]
        found += [~torch.isfinite(part).all() for part in self.distortion.split(CHUNK_UNITS)]
        # asked for together: a device is waited for once
        is_falling, *is_not_finite = torch.stack(found).tolist()
        if is_falling:
            raise ValueError("cost must not fall from a tier to the next")
        if any(is_not_finite):
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

    def least_step(self) -> int:
        """Fewest bytes between two tiers of a unit, if any differ; else more than any budget."""
        return int(self._least_gap())

    def _least_gap(self) -> Tensor:
        gap = self.cost.diff(dim=-1)
        if not gap.numel():
            return self.cost.new_tensor(_LARGEST)
        return torch.where(gap > 0, gap, _LARGEST).amin()

    def least_bytes(self) -> tuple[int, int]:
        """Bytes of the lowest tiers, and ``least_step``; a device is waited for once."""
        both = torch.stack([self._sum_bytes(self.lowest()), self._least_gap()])
        lowest, step = both.tolist()
        return lowest, step

    def bytes_of(self, tier_id: Tensor) -> int:
        """Bytes of a decision ``[units]``."""
        return int(self._sum_bytes(tier_id))

    def _sum_bytes(self, tier_id: Tensor) -> Tensor:
        if self.cost.dim() == 1:
            counts = torch.bincount(tier_id, minlength=self.cost.shape[0])
            return (counts * self.cost).sum()
        return self.cost.gather(1, tier_id.long()[:, None]).sum()

    def loss_of(self, tier_id: Tensor) -> float:
        """Distortion of a decision ``[units]``."""
        return sum((float(part) for part in self.sum_losses(tier_id)), 0.0)

    def sum_losses(self, tier_id: Tensor) -> list[Tensor]:
        """``loss_of`` in parts, float64; waits for no device."""
        parts = zip(self.distortion.split(CHUNK_UNITS), tier_id.split(CHUNK_UNITS), strict=True)
        return [loss.gather(1, ids.long()[:, None]).double().sum() for loss, ids in parts]


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
        solver: ``"lagrangian"`` finds the price of a byte at which the budget is met,
            ``"value-per-byte"`` climbs every unit's lower hull in order of loss saved per byte,
            without steps that alone exceed the budget, ``"one-shot"`` is Algorithm 1, step 4: one
            tier per unit at a given price, then the units in order of value per byte.
        price: Loss per byte for ``"one-shot"``; by default just below the price of the budget.

    Raises:
        BudgetError: The lowest allowed tiers do not fit.
        ValueError: There is no such solver.
    """
    return BudgetSolver(choices).allocate(budget, solver=solver, price=price)


class BudgetSolver:
    """Chooses among the same tiers of the same units for one budget after the other.

    Attributes:
        choices: Units and tiers.
    """

    def __init__(self, choices: TierChoices, hulls: HullSteps | None = None) -> None:
        """Nothing is known yet but the steps of the units, if they were found before."""
        self.choices = choices
        self._lowest = choices.lowest()
        self._least, self._least_step = choices.least_bytes()
        self._hulls = hulls
        self._steps: _SortedSteps | None = None

    def allocate(
        self, budget: int, *, solver: Solver = "lagrangian", price: float | None = None
    ) -> Allocation:
        """Choose a tier for every unit; see ``allocate_tiers``."""
        if solver not in SOLVERS:
            raise ValueError(f"solver must be one of {', '.join(SOLVERS)}, got {solver!r}")
        choices = self.choices
        if self._least > budget:
            raise BudgetError(self._least, budget, budget, "what must be kept")
        found, used, low, high, loss = self._at_budget(budget)
        if solver == "one-shot":
            # just below the price of the budget units want more than it has: order decides
            price = low if price is None else price
            tier_id = _one_shot(choices, budget, price)
            return Allocation(tier_id, choices.bytes_of(tier_id), choices.loss_of(tier_id), price)
        if solver == "value-per-byte":
            found, loss = climb_hulls(choices, choices.lowest(), budget), None
            used = choices.bytes_of(found)
        tier_id = found
        if budget - used >= self._least_step:
            tier_id, used = _fill(choices, found, budget - used, used, high, self._least_step)
            loss = None
        if choices.num_units <= _CORE_PROBLEM_UNITS:
            exact = solve_core(choices, tier_id, budget, high)
            tier_id, loss = min(tier_id, exact, key=choices.loss_of), None
            used = choices.bytes_of(tier_id)
        return Allocation(tier_id, used, choices.loss_of(tier_id) if loss is None else loss, high)

    def _at_budget(self, budget: int) -> tuple[Tensor, int, float, float, float | None]:
        """The decision at the lowest price whose bytes fit, its bytes, prices on both sides, loss.

        The loss is told where that costs nothing.
        """
        if not 0 < self.choices.num_units <= _SORTED_UNITS:
            found, low, high = _bisect_price(self.choices, budget)
            return found, self.choices.bytes_of(found), low, high, None
        if self._steps is None:
            hulls = self._hulls or HullSteps.of_choices(self.choices)
            self._steps, self._hulls = _SortedSteps.of(hulls), None
        found, ends = self._steps.within(budget - self._least, self._lowest)
        told = torch.cat([ends, torch.stack(self.choices.sum_losses(found))])
        spent, price, *losses = told.tolist()
        used = self._least + int(spent)
        return found, used, (1 - _SAME_PRICE) * price, price, sum(losses, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class HullSteps:
    """Steps of units up their lower hulls; every unit has as many, those past its hull save 0.

    Attributes:
        slope: ``[units, steps]`` float64 loss saved per byte, falling.
        extra: ``[units, steps]`` int64 bytes.
        tier: ``[units, steps]`` int64 tier that a step leads to.
    """

    slope: Tensor
    extra: Tensor
    tier: Tensor

    @classmethod
    def of(cls, distortion: Tensor, cost: Tensor) -> HullSteps | None:
        """Steps from the lowest tier on; None if there are too many units.

        Args:
            distortion: ``[units, tiers]``.
            cost: ``[units, tiers]`` int64.
        """
        if len(distortion) > _SORTED_UNITS:
            return None
        lowest = torch.zeros(len(distortion), dtype=torch.int64, device=distortion.device)
        return cls._climb(distortion, cost, lowest, None)

    @classmethod
    def of_choices(cls, choices: TierChoices) -> HullSteps:
        """Steps from the lowest allowed tiers on."""
        cost = choices.cost.expand(choices.distortion.shape)
        return cls._climb(choices.distortion, cost, choices.lowest(), choices.allowed())

    @classmethod
    def _climb(
        cls, distortion: Tensor, cost: Tensor, lowest: Tensor, allowed: Tensor | None
    ) -> HullSteps:
        loss, at = distortion.double(), lowest[:, None]
        slope = torch.full_like(loss[:, :1], torch.inf)
        slopes, extras, tiers = [], [], []
        for _ in range(loss.shape[1] - 1):
            extra, saved = cost - cost.gather(1, at), loss.gather(1, at) - loss
            possible = (extra > 0) & (saved > 0)
            if allowed is not None:
                possible &= allowed
            value = torch.where(possible, saved / extra.clamp(min=1), 0.0)
            best, tier = value.max(dim=1, keepdim=True)
            # rounding must not let a step come before the one it stands on
            slope = torch.minimum(slope, best)
            tier = torch.where(best > 0, tier, at)
            slopes.append(slope)
            extras.append(extra.gather(1, tier))
            tiers.append(tier)
            at = tier
        return cls(*(torch.cat(parts, 1) for parts in (slopes, extras, tiers)))

    def select(self, index: Tensor) -> HullSteps:
        """Steps of the units that an index names."""
        return HullSteps(self.slope[index], self.extra[index], self.tier[index])


@dataclass(frozen=True, slots=True, eq=False)
class _SortedSteps:
    """All steps of all units up their lower hulls, most loss saved per byte first.

    Attributes:
        slope: ``[steps + 1]`` float64 loss saved per byte, falling; 0 behind the last step.
        spent: ``[steps + 1]`` int64 bytes of the first 0, 1, ... steps.
        unit: ``[steps]`` int64.
        tier: ``[steps]`` int64 tier that a step leads to.
    """

    slope: Tensor
    spent: Tensor
    unit: Tensor
    tier: Tensor

    @classmethod
    def of(cls, hulls: HullSteps) -> _SortedSteps:
        """Steps of some units, one at least."""
        slope, extra, tier = (part.T.flatten() for part in (hulls.slope, hulls.extra, hulls.tier))
        # a stable order keeps each unit's steps in sequence
        slope, order = slope.sort(descending=True, stable=True)
        spent = torch.nn.functional.pad(extra[order].cumsum(0), (1, 0))
        slope = torch.nn.functional.pad(slope, (0, 1))
        return cls(slope, spent, order % len(hulls.slope), tier[order])

    def within(self, room: int, lowest: Tensor) -> tuple[Tensor, Tensor]:
        """The decision ``[units]`` int64 after all steps that fit; their bytes and the next slope.

        Args:
            room: Bytes to spend, not negative.
            lowest: ``[units]`` int64 tiers to begin from.
        """
        is_taken = self.spent[1:] <= room
        num_taken = is_taken.sum()
        ends = torch.stack([self.spent[num_taken].double(), self.slope[num_taken]])
        tier = torch.where(is_taken, self.tier, 0)
        return lowest.scatter_reduce(0, self.unit, tier, "amax"), ends


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


def _fill(
    choices: TierChoices, found: Tensor, left: int, used: int, price: float, least: int
) -> tuple[Tensor, int]:
    """Spend what the price left over; of very many units only on those near the price.

    Args:
        choices: Units and tiers.
        found: ``[units]`` decision.
        left: Bytes to spend.
        used: Bytes of the decision.
        price: Loss per byte at which the budget is met.
        least: ``choices.least_step()``.

    Returns:
        The decision and its bytes.
    """
    if choices.num_units <= _MANY_UNITS:
        return _upgrade(choices, found.long(), left, used, least)
    near = (_best_ids(choices, _CONTESTED * price) != found).nonzero()[:, 0]
    contested, chosen = choices.select(near), found[near].long()
    better, used = _upgrade(contested, chosen, left, used, contested.least_step())
    found[near] = better.to(found.dtype)
    return found, used


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


def climb_hulls(choices: TierChoices, tier_id: Tensor, budget: int) -> Tensor:
    """Upgrade along lower hulls, steepest step of all units first, until one is too big.

    Args:
        choices: Units and tiers.
        tier_id: ``[units]`` int64 decision within the budget.
        budget: Bytes for all units.
    """
    at, steps = tier_id, []
    slope = torch.full(tier_id.shape, torch.inf, device=tier_id.device)
    while True:
        unit, tier, extra, value = _next_steps(choices, at, budget)
        if unit.numel() == 0:
            break
        # slopes of a hull fall; where the budget hides a part of it they may not, and a step must
        # not come before the one it stands on
        slope[unit] = torch.minimum(slope[unit], value.to(slope.dtype))
        steps.append((unit, tier, extra, slope[unit]))
        at = at.index_put((unit,), tier)
    if not steps:
        return tier_id
    unit, tier, extra, value = (torch.cat(column) for column in zip(*steps, strict=True))
    # a stable order keeps each unit's steps in sequence
    order = value.argsort(descending=True, stable=True)
    left = budget - choices.bytes_of(tier_id)
    order = order[extra[order].cumsum(0) <= left]
    return tier_id.scatter_reduce(0, unit[order], tier[order], "amax")


def fill_budget(choices: TierChoices, tier_id: Tensor, budget: int) -> Tensor:
    """Upgrade units along their lower hulls, most loss saved per byte first, while bytes last.

    Args:
        choices: Units and tiers.
        tier_id: ``[units]`` int64 decision within the budget.
        budget: Bytes for all units.

    Returns:
        A decision with no more loss, within the budget, that no single upgrade improves.
    """
    used = choices.bytes_of(tier_id)
    return _upgrade(choices, tier_id, budget - used, used, choices.least_step())[0]


def _upgrade(
    choices: TierChoices, tier_id: Tensor, left: int, used: int, least: int
) -> tuple[Tensor, int]:
    """``fill_budget`` of a decision of ``used`` bytes with ``left`` to spend; also its bytes."""
    tier_id = tier_id.clone()
    for _ in range(_MAX_ROUNDS):
        if left < least:
            break
        tier, extra, value = _best_steps(choices, tier_id, left)
        order = value.argsort(descending=True, stable=True)[:_ROUND_STEPS]
        # units without a step come last and spend nothing
        is_step = value[order] > -torch.inf
        tier, extra = tier[order], torch.where(is_step, extra[order], 0)
        is_taken = (extra.cumsum(0) <= left) & is_step
        # a round moves each unit at most once, so its later steps are seen in the next round
        tier_id[order] = torch.where(is_taken, tier, tier_id[order])
        spent = int(torch.where(is_taken, extra, 0).sum())
        # the first step fits by itself
        if not spent:
            break
        left, used = left - spent, used + spent
    return tier_id, used


def _next_steps(
    choices: TierChoices, tier_id: Tensor, left: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best affordable upgrade of each unit: unit, tier, bytes and loss saved per byte."""
    tier, extra, value = _best_steps(choices, tier_id, left)
    unit = (value > -torch.inf).nonzero()[:, 0]
    return unit, tier[unit], extra[unit], value[unit]


def _best_steps(choices: TierChoices, tier_id: Tensor, left: int) -> tuple[Tensor, Tensor, Tensor]:
    """``_next_steps`` of all units, of minus infinity for those that have none."""
    loss, cost = choices.distortion, choices.cost.expand_as(choices.distortion)
    now = tier_id[:, None]
    extra = cost - cost.gather(1, now)
    saved = loss.gather(1, now) - loss
    possible = (extra > 0) & (extra <= left) & (saved > 0)
    allowed = choices.allowed()
    if allowed is not None:
        possible &= allowed
    value = torch.where(possible, saved / extra.clamp(min=1), -torch.inf)
    best, tier = value.max(dim=1)
    return tier, extra.gather(1, tier[:, None])[:, 0], best


def solve_core(choices: TierChoices, tier_id: Tensor, budget: int, price: float) -> Tensor:
    """Decide the most contested units exactly, by dynamic programming over bytes.

    A unit is contested if its best two tiers are nearly as good at the price of the budget;
    the others stay as they are.

    Args:
        choices: Units and tiers.
        tier_id: ``[units]`` int64 decision within the budget.
        budget: Bytes for all units.
        price: Loss per byte at which the budget is met.
    """
    loss, cost = choices.distortion.double(), choices.cost.expand_as(choices.distortion)
    allowed = choices.allowed()
    if allowed is not None:
        loss = loss.masked_fill(~allowed, torch.inf)
    total = loss + price * cost
    present = total.gather(1, tier_id[:, None])
    rivals = total.scatter(1, tier_id[:, None], torch.inf).amin(1, keepdim=True)
    gap = (rivals - present)[:, 0]
    core = gap.argsort(stable=True)[:_CORE_UNITS]
    left = budget - choices.bytes_of(tier_id)
    room = left + int(cost.gather(1, tier_id[:, None])[core].sum())
    step = _greatest_step(cost[core])
    if room // step > _CORE_STEPS:
        return tier_id
    decided = tier_id.clone()
    decided[core] = _knapsack(loss[core], cost[core] // step, room // step)
    return decided


def _greatest_step(cost: Tensor) -> int:
    return math.gcd(*cost.unique().tolist()) or 1


def _knapsack(loss: Tensor, size: Tensor, room: int) -> Tensor:
    """Exact choice of one tier per unit with sizes at most ``room`` in all."""
    least = torch.zeros(room + 1, dtype=torch.float64)
    picks = []
    for losses, sizes in zip(loss.cpu(), size.tolist(), strict=True):
        rows = torch.full((len(sizes), room + 1), torch.inf, dtype=torch.float64)
        for tier, needed in enumerate(sizes):
            if needed <= room:
                rows[tier, needed:] = least[: room + 1 - needed] + losses[tier]
        least, pick = rows.min(dim=0)
        picks.append(pick)
    decided, at = [], room
    for pick, sizes in zip(reversed(picks), reversed(size.tolist()), strict=True):
        tier = int(pick[at])
        decided.append(tier)
        at -= sizes[tier]
    return torch.tensor(decided[::-1], device=loss.device)
