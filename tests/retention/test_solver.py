# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sphkv.errors import BudgetError
from sphkv.retention.solver import (
    SOLVERS,
    TierChoices,
    allocate_tiers,
    best_at_price,
)

COST = torch.tensor([0, 26, 30, 42, 58, 256])


def random_choices(seed: int, units: int, *, protect: bool = False) -> TierChoices:
    """Units whose loss falls with the tier, by factors that differ between units."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.exp(2 * torch.randn(units, 1, generator=generator))
    falls = 0.1 + 0.7 * torch.rand(units, COST.numel() - 1, generator=generator)
    shape = torch.cat([torch.ones(units, 1), falls.cumprod(1)], 1)
    shape[:, -1] = 0
    floor = None
    if protect:
        chosen = torch.rand(units, generator=generator) < 0.1
        floor = torch.where(chosen, COST.numel() - 1, 0)
    return TierChoices(weight * shape, COST, floor)


def optimum(choices: TierChoices, budget: int) -> float:
    """Least loss by dynamic programming over bytes."""
    best = torch.zeros(budget + 1, dtype=torch.float64)
    lowest = choices.lowest()
    for unit in range(choices.num_units):
        nxt = torch.full_like(best, torch.inf)
        for tier in range(int(lowest[unit]), COST.numel()):
            size = int(COST[tier])
            if size <= budget:
                moved = best[: budget + 1 - size] + float(choices.distortion[unit, tier])
                nxt[size:] = torch.minimum(nxt[size:], moved)
        best = nxt
    return float(best.min())


@pytest.mark.parametrize("solver", ["lagrangian", "value-per-byte"])
@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
def test_loss_is_within_one_percent_of_the_optimum(solver, share):
    # 30 units are decided exactly; of 120 only the most contested are
    for seed, units in ((seed, units) for seed in range(8) for units in (30, 120)):
        choices = random_choices(seed, units)
        budget = int(share * 256 * units)
        found = allocate_tiers(choices, budget, solver=solver)
        assert found.num_bytes <= budget
        assert found.loss <= 1.01 * optimum(choices, budget)


@pytest.mark.parametrize("solver", SOLVERS)
@given(seed=st.integers(0, 10_000), units=st.integers(1, 400), share=st.floats(0.0, 1.2))
@example(seed=0, units=1, share=0.109375)  # the steepest step does not fit, the next is steeper
@settings(max_examples=40, deadline=None)
def test_budget_and_protection_hold(solver, seed, units, share):
    choices = random_choices(seed, units, protect=True)
    budget = int(share * 256 * units)
    needed = choices.bytes_of(choices.lowest())
    if needed > budget:
        with pytest.raises(BudgetError, match=f"by {needed - budget} bytes") as error:
            allocate_tiers(choices, budget, solver=solver)
        assert error.value.missing == needed - budget
        return
    found = allocate_tiers(choices, budget, solver=solver)
    assert found.num_bytes == choices.bytes_of(found.tier_id) <= budget
    assert bool((found.tier_id >= choices.lowest()).all())


def test_more_bytes_never_lose():
    choices = random_choices(3, 500)
    losses = [
        allocate_tiers(choices, int(share * 256 * 500)).loss
        for share in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == 0.0


def test_ties_go_to_the_cheaper_tier_and_the_first_unit():
    distortion = torch.tensor([[1.0, 0.5, 0.5]]).repeat(4, 1)
    choices = TierChoices(distortion, torch.tensor([0, 10, 20]))
    assert best_at_price(choices, 0.0).tolist() == [1, 1, 1, 1]
    for solver in SOLVERS:
        assert allocate_tiers(choices, 25, solver=solver).tier_id.tolist() == [1, 1, 0, 0]


def test_one_shot_skips_what_does_not_fit():
    # unit 1 is worth most per byte but too big for what unit 0 leaves; unit 2 still fits
    distortion = torch.tensor([[9.0, 0.0], [8.0, 0.0], [1.0, 0.0]])
    cost = torch.tensor([[0, 6], [0, 7], [0, 4]])
    found = allocate_tiers(TierChoices(distortion, cost), 10, solver="one-shot", price=1e-6)
    assert found.tier_id.tolist() == [1, 0, 1]
    assert found.num_bytes == 10


def test_never_rises_above_a_ceiling():
    choices = random_choices(0, 50)
    ceiling = torch.full((50,), 2)
    capped = TierChoices(choices.distortion, COST, ceiling=ceiling)
    found = allocate_tiers(capped, 256 * 50)
    assert int(found.tier_id.max()) == 2


def test_same_input_same_answer():
    choices = random_choices(5, 3000, protect=True)
    first, second = (allocate_tiers(choices, 100_000) for _ in range(2))
    assert torch.equal(first.tier_id, second.tier_id)


@pytest.mark.parametrize(
    ("distortion", "cost", "words"),
    [
        (torch.zeros(3), COST, "units, tiers"),
        (torch.zeros(3, 2), COST, "cost must be"),
        (torch.zeros(3, 2), torch.tensor([5, 1]), "must not fall"),
        (torch.full((1, 2), torch.nan), torch.tensor([0, 1]), "not finite"),
    ],
)
def test_bad_choices_are_refused(distortion: Tensor, cost: Tensor, words: str):
    with pytest.raises(ValueError, match=words):
        TierChoices(distortion, cost)


def test_unknown_solver_is_refused():
    with pytest.raises(ValueError, match="'magic'"):
        allocate_tiers(random_choices(0, 3), 100, solver="magic")  # type: ignore[arg-type]


def test_very_many_units_are_decided_like_few():
    """A sample predicts the price, and only contested units compete for the last bytes."""
    generator = torch.Generator().manual_seed(5)
    pull = torch.exp(2 * torch.randn(200_000, 1, generator=generator))
    loss = (pull * torch.tensor([1.0, 0.3, 0.08, 0.0])).half()
    cost = torch.tensor([0, 20, 45, 130])
    choices = TierChoices(loss, cost)
    budget = 5_000_000
    found = allocate_tiers(choices, budget)
    assert budget - 20 <= found.num_bytes <= budget
    # no price does better: the bound of the Lagrangian at the price that was found
    price = found.price
    bound = float((loss.double() + price * cost).amin(1).sum()) - price * budget
    assert (1 - 1e-6) * bound <= found.loss <= 1.0005 * bound
