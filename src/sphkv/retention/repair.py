# SPDX-License-Identifier: Apache-2.0
"""Spending a budget by value: climbing lower hulls, single upgrades, contested units exactly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sphkv.retention.choices import TierChoices

# Upgrades looked at in one round, most valuable first.
_ROUND_STEPS = 1 << 16
_MAX_ROUNDS = 64
_CORE_UNITS = 48
_CORE_STEPS = 1 << 16


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
    tier_id = tier_id.clone()
    left = budget - choices.bytes_of(tier_id)
    for _ in range(_MAX_ROUNDS):
        unit, tier, extra, value = _next_steps(choices, tier_id, left)
        if unit.numel() == 0:
            break
        order = value.argsort(descending=True, stable=True)[:_ROUND_STEPS]
        unit, tier, extra = unit[order], tier[order], extra[order]
        total = extra.cumsum(0)
        taken = total <= left
        # a round moves each unit at most once, so its later steps are seen in the next round
        tier_id[unit[taken]] = tier[taken]
        left -= int(extra[taken].sum())
    return tier_id


def _next_steps(
    choices: TierChoices, tier_id: Tensor, left: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The best affordable upgrade of each unit: unit, tier, bytes and loss saved per byte."""
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
    unit = (best > -torch.inf).nonzero()[:, 0]
    tier = tier[unit]
    return unit, tier, extra[unit, tier], best[unit]


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
