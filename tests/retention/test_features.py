# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import ladder
from sphkv.retention.errors import TierErrors
from sphkv.retention.features import (
    expect_surprise,
    measure_features,
    pool_runs,
    weigh_tokens,
)
from sphkv.retention.policy import BlockShape, RetentionPolicy
from sphkv.retention.pricing import NO_TIER, LayerBlocks, PageCosts, rank_units
from sphkv.retention.rows import AttentionRows, expected_rows, mix_rows, window_rows
from sphkv.retention.scores import (
    _slope_steps,
    convex_steps,
    count_states,
    state_distortion,
    sum_blocks,
)

HEADS, TOKENS, DIM = 2, 96, 16


def make_layer(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2 * HEADS, TOKENS, DIM, generator=generator)
    keys = torch.randn(HEADS, TOKENS, DIM, generator=generator)
    values = torch.randn(HEADS, TOKENS, DIM, generator=generator)
    return query, keys, values


def make_rows(seed: int = 0) -> AttentionRows:
    query, keys, _ = make_layer(seed)
    window = torch.arange(TOKENS - 8, TOKENS)
    return window_rows(query[:, window], window, keys, scale=DIM**-0.5)


def test_window_rows_are_the_models_own_attention():
    query, keys, values = make_layer()
    rows = make_rows()
    exact = torch.nn.functional.scaled_dot_product_attention(
        query, keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0), is_causal=True
    )[:, -8:]
    assert torch.allclose((rows.weight @ values).reshape(exact.shape), exact, atol=1e-5)


def test_rows_next_to_a_token_do_not_speak_for_later_queries():
    rows = make_rows()
    # token 90 is 6 from the end: only queries 93 and later stand half as far
    assert rows.is_valid[:8, 90].tolist() == [False] * 5 + [True] * 3
    assert bool(rows.is_valid[:, 0].all())
    assert bool((rows.coverage() > 0).all())


def test_shift_is_the_move_of_the_output_without_the_state():
    _, keys, values = make_layer()
    rows = make_rows()
    found = measure_features(rows, keys, values, sinks=4, recent=8)
    token, head = 7, 1
    output = rows.weight[head] @ values[head]
    weight = rows.weight[head, :, token]
    moved = weight[:, None] * (values[head, token] - output)
    assert float(found.shift[head, token]) == pytest.approx(
        float(moved.square().sum(1).mean()), rel=1e-4
    )
    assert float(found.mass[head, token]) == pytest.approx(float(weight.mean()), rel=1e-4)


def test_dropping_is_measured_with_renormalised_weights():
    _, _, values = make_layer()
    rows = make_rows()
    rows = AttentionRows(rows.weight, rows.share, torch.ones_like(rows.is_valid))
    blocks = torch.arange(64).reshape(1, 8, 8).expand(HEADS, -1, -1)
    losses = rows.drop_losses(values, blocks)[0]
    assert float(losses[0]) == 0
    kept = torch.ones(TOKENS, dtype=torch.bool)
    kept[blocks[0, -3:].flatten()] = False
    left = rows.weight[0][:, kept]
    left = left / left.sum(1, keepdim=True)
    move = left @ values[0, kept] - rows.weight[0] @ values[0]
    assert float(losses[3]) == pytest.approx(float(move.square().sum(1).mean()), rel=1e-4)


def test_dropping_runs_is_dropping_their_tokens():
    _, _, values = make_layer()
    rows, values = make_rows(), values[:, :90]
    rows = AttentionRows(rows.weight[..., :90], rows.share, rows.is_valid[:, :90])
    # the last run has ten tokens, and a head without a last block drops nothing first
    runs = torch.tensor([[[0, 5], [3, -1], [1, 2]], [[4, 0], [2, -1], [-1, -1]]])
    every = runs[..., None] * 16 + torch.arange(16)
    tokens = torch.where((runs[..., None] >= 0) & (every < 90), every, -1).flatten(2)
    found = rows.drop_losses(values, runs, granularity=16)
    torch.testing.assert_close(found, rows.drop_losses(values, tokens))
    assert found[1, :2].tolist() == [0, 0]
    assert count_states(runs, 16, 90).tolist() == [[26, 16, 32], [32, 16, 0]]


def test_expected_attention_is_exact_for_queries_without_spread():
    generator = torch.Generator().manual_seed(2)
    planes = DIM // 2
    rope = RopeSpec.from_config({"rope_theta": 3.0**planes}, DIM)
    frequencies = rope.frequencies().float()
    one = torch.randn(2 * HEADS, 1, planes, 2, generator=generator)
    keys = torch.randn(HEADS, TOKENS, planes, 2, generator=generator)
    cached = rope.from_planes(rope.rotate(keys, torch.arange(TOKENS)))
    rows = expected_rows(one.expand(-1, 5, -1, -1), cached, rope, scale=0.3, horizon=(10,))

    def turned(z: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        phase = torch.polar(torch.ones(()), position[:, None] * frequencies)
        return torch.view_as_complex(z.contiguous()) * phase

    query = turned(one[3:4, 0], torch.tensor([TOKENS - 1 + 10]))  # last head of group 1
    logits = 0.3 * (turned(keys[1], torch.arange(TOKENS)) * query.conj()).real.sum(-1)
    assert torch.allclose(rows.weight[1, 1], logits.softmax(0), atol=1e-5)


def test_spread_of_queries_favours_long_keys():
    generator = torch.Generator().manual_seed(3)
    planes = DIM // 2
    keys = torch.randn(1, TOKENS, planes, 2, generator=generator)
    keys[0, 5] *= 3
    query = torch.randn(1, 4000, planes, 2, generator=generator)
    rope = RopeSpec.unrotated(DIM)
    rows = expected_rows(query, rope.from_planes(keys), rope, scale=0.5, horizon=(1,))
    exact = (0.5 * query[0].flatten(1) @ keys[0].flatten(1).T).exp().mean(0)
    assert int(rows.weight[0, 0].argmax()) == int(exact.argmax()) == 5


def test_mixed_rows_keep_the_total_importance():
    rows = make_rows()
    mixed = mix_rows(rows, rows, 0.25)
    assert torch.allclose(mixed.share.sum(1), torch.ones(HEADS))
    assert mix_rows(rows, None, 0.25) is rows


def test_blocks_hold_like_states_and_every_free_one_once():
    score = torch.rand(2, 96, generator=torch.Generator().manual_seed(0))
    free = torch.ones(2, 96, dtype=torch.bool)
    free[0, :16] = free[1, 30:] = False
    blocks = rank_units(score, free, block_units=32)
    assert blocks.shape == (2, 3, 32)
    assert sorted(blocks[0][blocks[0] >= 0].tolist()) == list(range(16, 96))
    assert sorted(blocks[1, 0, :30].tolist()) == list(range(30))
    assert bool((blocks[1].flatten()[30:] == -1).all())
    assert float(score[0, blocks[0, 0]].min()) >= float(score[0, blocks[0, 1]].max())


def test_blocks_of_runs_name_their_tokens():
    units, none = torch.tensor([[[2, 0], [1, -1]]]), torch.zeros(1, 2, 1)
    blocks = LayerBlocks(BlockShape.RUNS, units, count_states(units, 16, 40), none, none.long())
    tiers = blocks.spread(torch.tensor([[3, NO_TIER]], dtype=torch.uint8), 40)
    assert tiers[0].tolist() == [3] * 16 + [NO_TIER] * 16 + [3] * 8
    assert blocks.states.tolist() == [[24, 16]]


@pytest.mark.parametrize(("even", "coded"), [(0.0, 1.0), (0.5, 0.0), (1.0, 0.25)])
def test_a_surprise_asks_for_every_age_and_for_every_token(even: float, coded: float) -> None:
    _, keys, values = make_layer()
    rows = make_rows()
    plain = measure_features(rows, keys, values, sinks=4, recent=8)
    chance = torch.tensor([0.0, 0.2])
    found = expect_surprise(plain, rows, values, chance, even=even, coded=coded)
    assert found.surprise is not None
    assert torch.equal(plain.drop_shift, plain.shift)
    assert torch.equal(found.drop_shift[0], plain.shift[0])
    output = (rows.weight @ values).mean(1)
    apart = (values[1] - output[1]).square().sum(-1)
    age = 1 / torch.arange(TOKENS, 0, -1)
    each = 0.2 * ((1 - even) * age + even * age.sum() / TOKENS)
    assert torch.allclose(found.surprise[1], each * apart, rtol=1e-4)
    # dropping loses all of it, codes the part that is asked for
    assert torch.allclose(found.drop_shift - plain.shift, found.surprise, atol=1e-6)
    assert torch.allclose(found.shift - plain.shift, coded * found.surprise, atol=1e-6)
    assert torch.allclose((found.mass - plain.mass)[1], coded * each, atol=1e-6)
    assert torch.allclose((found.energy - plain.energy)[1], coded * each, atol=1e-6)
    pooled = pool_runs(weigh_tokens(found, torch.full((TOKENS,), 2.0)), 16)
    assert pooled.surprise is not None
    assert torch.allclose(pooled.surprise.sum(1), 2 * found.surprise.sum(1))
    assert torch.allclose(pooled.drop_shift.sum(1), 2 * found.drop_shift.sum(1))


def test_pooled_runs_lose_what_their_tokens_lose():
    _, keys, values = make_layer()
    features = measure_features(make_rows(), keys, values, sinks=4, recent=8)
    errors = TierErrors(*(torch.full((HEADS, 3), 1e-4) for _ in range(4)))
    policy = RetentionPolicy()
    each = state_distortion(features, errors, policy)
    runs = state_distortion(pool_runs(features, 16), errors, policy)
    assert torch.allclose(runs, each.reshape(HEADS, -1, 16, 3).sum(2), rtol=1e-3)
    heavier = weigh_tokens(features, torch.full((TOKENS,), 3.0))
    assert torch.allclose(state_distortion(heavier, errors, policy), 3 * each)


def test_sums_leave_padding_out():
    blocks = torch.tensor([[[0, 2], [1, -1]]])
    assert sum_blocks(torch.tensor([[[1.0], [2.0], [4.0]]]), blocks).tolist() == [[[5.0], [2.0]]]


def test_convex_steps_rise_and_keep_the_total():
    losses = torch.tensor([0.0, 1.0, 1.5, 1.6, 5.0, 6.0])
    steps = convex_steps(losses[None])[0]
    assert bool((steps.diff() >= -1e-6).all())
    assert float(steps.sum()) == pytest.approx(6.0)
    assert float(steps[0]) == pytest.approx(1.6 / 3)


@pytest.mark.parametrize("points", [1, 2, 3, 40])
def test_steps_found_at_once_are_those_found_one_by_one(points):
    curves = torch.rand(5, points, generator=torch.Generator().manual_seed(points)).cumsum(1) ** 1.5
    curves[:, 0] = curves[0, :3] = 0
    torch.testing.assert_close(_slope_steps(curves.double()), convex_steps(curves))


def test_costs_round_up_to_pages():
    tiers = ladder(64)
    sizes = tuple(100 * tier for tier in range(len(tiers)))
    costs = PageCosts(tiers, dict.fromkeys(BlockShape, sizes))
    assert costs.block_tokens == 128
    assert costs.block_cost(129, BlockShape.RUNS)[:2] == [0, 200]
    assert costs.block_cost(129, BlockShape.RUNS)[-1] == math.ceil(129 / 16) * sizes[-1]
    with pytest.raises(ValueError, match="'tokens'"):
        PageCosts(tiers, {BlockShape.WHOLE: sizes, BlockShape.RUNS: sizes})
