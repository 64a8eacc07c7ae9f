# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch

from sphkv.core.contract import WriteContract
from sphkv.core.tiers import TierSpec, TierTable, coded_tier
from sphkv.errors import BudgetError
from sphkv.retention.controller import RetentionController
from sphkv.retention.errors import TierErrors
from sphkv.retention.features import expect_surprise, measure_features
from sphkv.retention.measure import LayerInput
from sphkv.retention.policy import VARIANTS, BlockShape, ControlOptions, RetentionPolicy
from sphkv.retention.pricing import LayerPricer, PageCosts
from sphkv.retention.protection import Segment
from sphkv.retention.rows import AttentionRows, window_rows
from sphkv.retention.scores import SCORES, state_distortion
from sphkv.retention.solver import SOLVERS

HEADS, TOKENS, DIM, LAYERS = 2, 400, 16, 2
TIERS = TierTable(
    (
        TierSpec("drop", "drop", 0.0, 0, 0),
        coded_tier(1, 2, page_tokens=32),
        coded_tier(2, 2, page_tokens=32),
        coded_tier(3, 4, page_tokens=32),
        TierSpec("max", "dense", 16.0, 16, 16),
    )
)
SIZES = (0, 300, 400, 600, 1100)
COSTS = PageCosts(
    TIERS,
    {
        BlockShape.WHOLE: SIZES,
        BlockShape.RUNS: tuple(size and size + 8 for size in SIZES),
        BlockShape.TOKENS: tuple(size and size + 128 for size in SIZES),
    },
)
BOTH = (BlockShape.WHOLE, BlockShape.RUNS)


def make_layer(seed: int) -> LayerInput:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(HEADS, TOKENS, DIM, generator=generator)
    # a few tokens draw most of the attention of the first head
    keys[0, 100:120] += 2
    values = torch.randn(HEADS, TOKENS, DIM, generator=generator)
    window = torch.arange(TOKENS - 32, TOKENS)
    query = torch.randn(HEADS, 32, DIM, generator=generator) + 1
    rows = window_rows(query, window, keys, scale=0.5)
    falls = torch.tensor([0.0, 2e-3, 6e-4, 1e-4, 0.0]).expand(HEADS, -1)
    errors = TierErrors(falls, 0.1 * falls, 50 * falls, torch.zeros_like(falls))
    protected = torch.zeros(HEADS, TOKENS, dtype=torch.bool)
    protected[:, :16] = protected[:, -16:] = True
    features = measure_features(rows, keys, values, sinks=16, recent=16)
    return LayerInput(features, errors, rows, values, protected)


def test_no_block_is_free_to_drop_in_a_head_that_surprises():
    layer = make_layer(0)
    pricer = LayerPricer(COSTS, RetentionPolicy(), ControlOptions())
    plain = pricer.price(layer)
    chance = torch.tensor([0.0, 0.5])
    features = expect_surprise(layer.features, layer.rows, layer.values, chance)
    found = pricer.price(replace(layer, features=features))
    scale = 1 / float(features.output_energy.sum())
    assert features.surprise is not None
    for shape in BOTH:
        blocks = found.blocks[shape]
        assert torch.equal(blocks.distortion[0], plain.blocks[shape].distortion[0])
        of_run = features.surprise[1].view(-1, 16).sum(1)
        for runs, loss in zip(blocks.units[1], blocks.distortion[1, :, 0], strict=True):
            least = scale * of_run[runs[runs >= 0]].sum()
            assert float(loss) >= float(least) * (1 - 1e-5)
        assert bool((blocks.distortion[1, :, 0] > 0).equal(blocks.states[1] > 0))


def used_bytes(contract: WriteContract) -> int:
    """Pages of the shape that runs need; the store's own count is tested elsewhere."""
    counts = contract.state_counts(len(TIERS))
    sizes = torch.tensor(COSTS.page_bytes[BlockShape.RUNS])
    pages = torch.tensor([1, 32, 32, 32, 16])
    return int((-(-counts // pages) * sizes).sum())


def make_controller(
    options: ControlOptions | None = None,
    policy: RetentionPolicy | None = None,
    segments: torch.Tensor | None = None,
) -> RetentionController:
    options = options or ControlOptions()
    controller = RetentionController(COSTS, options)
    pricer = LayerPricer(COSTS, policy or RetentionPolicy(), options, segments)
    for layer in range(LAYERS):
        controller.add_layer(pricer.price(make_layer(layer)))
    return controller


def decide(budget: int, options: ControlOptions):
    controller = make_controller(options)
    return controller, controller.decide(budget, used_bytes)


def predicted_loss(contract: WriteContract) -> float:
    """Loss of coded states by the model, and of drops by what is really gone."""
    total = 0.0
    for layer in range(LAYERS):
        part = make_layer(layer)
        assert isinstance(part.rows, AttentionRows)
        for head in range(HEADS):
            each = state_distortion(part.features, part.errors, RetentionPolicy())[head]
            tier = contract.tier_id[layer, head].long()
            coded = each.gather(1, tier[:, None])[:, 0]
            scale = 1 / float(part.features.output_energy.sum())
            total += scale * float(coded[tier > 0].sum())
            weight = part.rows.weight[head] * (tier > 0)
            left = weight / weight.sum(1, keepdim=True)
            move = (left - part.rows.weight[head]) @ part.values[head]
            total += scale * float(move.square().sum(1).mean())
    return total


@pytest.mark.parametrize("budget", [26_000, 34_000, 50_000])
def test_joint_control_loses_least(budget):
    losses = {}
    for variant in VARIANTS:
        try:
            _, contract = decide(budget, ControlOptions(variant=variant, shapes=BOTH))
        except BudgetError:
            assert variant == "quant"
            continue
        assert used_bytes(contract) <= budget
        losses[variant] = predicted_loss(contract)
    assert losses["joint"] <= 1.02 * min(losses.values())
    assert losses["joint"] < 0.9 * losses["decoupled"]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("shapes", [BOTH, (BlockShape.RUNS,), (BlockShape.TOKENS,)])
def test_contract_fits_and_protects(solver, shapes):
    options = ControlOptions(solver=solver, shapes=shapes)
    _, contract = decide(30_000, options)
    contract.layer(0)
    assert used_bytes(contract) <= 30_000
    assert bool((contract.tier_id[contract.protected] == TIERS.dense_id).all())
    assert contract.granularity == (1 if BlockShape.TOKENS in shapes else 16)


def test_quant_drops_nothing_and_keepdrop_has_one_tier():
    _, quant = decide(40_000, ControlOptions(variant="quant", shapes=BOTH))
    assert int(quant.tier_id.min()) > 0
    options = ControlOptions(variant="keepdrop", shapes=BOTH, fixed_tier="k2v2")
    _, keep = decide(24_000, options)
    free = keep.tier_id[~keep.protected]
    assert set(free.tolist()) == {0, 2}
    _, half = decide(30_000, ControlOptions(variant="decoupled", shapes=BOTH))
    kept = (half.tier_id[~half.protected] > 0).float().mean()
    assert 0.4 < float(kept) < 0.6


def test_uniform_heads_get_the_same_counts():
    options = ControlOptions(shapes=(BlockShape.RUNS,), uniform_heads=True)
    _, contract = decide(34_000, options)
    counts = contract.state_counts(len(TIERS)).flatten(0, 1)
    assert bool((counts == counts[0]).all())
    _, adaptive = decide(34_000, replace(options, uniform_heads=False))
    assert predicted_loss(adaptive) <= predicted_loss(contract)


def test_heavier_segments_keep_more():
    segments = torch.full((TOKENS,), Segment.PREFIX, dtype=torch.uint8)
    segments[200:300] = Segment.RETRIEVED
    kept = []
    for weight in (1.0, 30.0):
        policy = RetentionPolicy(segment_weights=(1.0, weight, 1.0))
        controller = make_controller(policy=policy, segments=segments)
        contract = controller.decide(18_000, used_bytes)
        kept.append(float((contract.tier_id[..., 208:288] > 0).float().mean()))
    assert kept[1] > kept[0]


def test_missing_bytes_of_protection_are_named():
    with pytest.raises(BudgetError) as error:
        decide(1000, ControlOptions(shapes=BOTH))
    # two dense pages in each of two layers of two heads, 1108 bytes each
    assert error.value.missing == 8 * 1108 - 1000


def test_price_falls_as_the_budget_grows():
    prices = [decide(budget, ControlOptions(shapes=BOTH))[0].price for budget in (24_000, 44_000)]
    assert prices[0] > prices[1] > 0


@pytest.mark.parametrize("score", SCORES)
def test_every_score_yields_a_contract_within_the_budget(score):
    _, contract = decide(30_000, ControlOptions(score=score))
    assert 0.9 * 30_000 < used_bytes(contract) <= 30_000
    assert bool((contract.tier_id[contract.protected] == TIERS.dense_id).all())


@pytest.mark.parametrize("variant", ["joint", "keepdrop"])
@pytest.mark.parametrize("waste", [0, 3_000, 9_000])
def test_a_budget_is_filled_however_wrong_the_estimate(variant, waste):
    """Slabs and tables that the solver does not see take bytes in jumps."""

    def with_slabs(contract: WriteContract) -> int:
        used = used_bytes(contract)
        return int(used + used // 10_000 * waste // 4)

    budget = 60_000
    controller = make_controller(ControlOptions(variant=variant, shapes=BOTH))
    contract = controller.decide(budget, with_slabs)
    assert with_slabs(contract) <= budget
    # a jump and one head's blocks are left at most
    assert with_slabs(contract) > budget - waste // 4 - 0.06 * budget


def test_unknown_variant_is_refused():
    with pytest.raises(ValueError, match="'half'"):
        ControlOptions(variant="half")  # type: ignore[arg-type]
