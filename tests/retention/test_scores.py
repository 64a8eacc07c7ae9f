# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch

from sphkv.retention.errors import TierErrors
from sphkv.retention.features import expect_surprise, measure_features
from sphkv.retention.measure import LayerInput
from sphkv.retention.policy import ControlOptions, RetentionPolicy
from sphkv.retention.rows import AttentionRows, window_rows
from sphkv.retention.scores import (
    SCORES,
    AttentionScore,
    RecipeScore,
    VoteScore,
    make_score,
    state_distortion,
    tier_ratio,
)

HEADS, TOKENS, DIM = 2, 70, 8
POLICY = RetentionPolicy(alpha_theta=2.0, alpha_r=3.0, alpha_drop=1.5)


def make_layer() -> LayerInput:
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(HEADS, TOKENS, DIM, generator=generator) for _ in range(2))
    query = torch.randn(HEADS, 8, DIM, generator=generator)
    rows = window_rows(query, torch.arange(TOKENS - 8, TOKENS), keys, scale=0.7)
    fall = torch.tensor([0.0, 4e-2, 1e-2, 0.0]).expand(HEADS, -1)
    features = measure_features(rows, keys, values, sinks=4, recent=4)
    protected = torch.zeros(HEADS, TOKENS, dtype=torch.bool)
    return LayerInput(features, TierErrors(fall, 0.25 * fall, fall, fall), rows, values, protected)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("granularity", [1, 16])
def test_losses_fall_with_the_tier_and_follow_the_token_weight(name, granularity):
    layer = make_layer()
    found = make_score(name, POLICY).losses(layer, granularity=granularity)
    assert found.loss.shape == (HEADS, -(-TOKENS // granularity), 4)
    assert bool((found.loss[..., 1:].diff(dim=2) <= 0).all())
    assert bool((found.loss[..., -1] == 0).all())
    weight = torch.ones(TOKENS)
    weight[:16] = 5
    heavy = make_score(name, POLICY).losses(
        replace(layer, token_weight=weight), granularity=granularity
    )
    first = 16 // granularity
    if name == "votes":
        # a tier's ratio is an average over states, whose weights have changed
        heavy_loss, loss = heavy.loss[..., :1], found.loss[..., :1]
    else:
        heavy_loss, loss = heavy.loss, found.loss
    torch.testing.assert_close(heavy_loss[:, :first], 5 * loss[:, :first])
    torch.testing.assert_close(heavy_loss[:, first:], loss[:, first:])


def test_attention_blocks_add_coding_errors_and_nest_drops():
    layer = make_layer()
    found = AttentionScore(POLICY).losses(layer, granularity=1)
    scale = 1 / float(layer.features.output_energy.sum())
    each = scale * state_distortion(layer.features, layer.errors, POLICY)[1]
    torch.testing.assert_close(found.loss[1], each)
    blocks = torch.tensor([[3, 9, 11], [20, 40, -1]]).expand(HEADS, -1, -1)
    loss, together = (part[1] for part in found.of_blocks(blocks))
    torch.testing.assert_close(loss[0, 1:], each[[3, 9, 11], 1:].sum(0))
    torch.testing.assert_close(loss[1, 1:], each[[20, 40], 1:].sum(0))
    # the second block goes first; what the first one adds to it is its own loss
    drops = layer.rows.drop_losses(layer.values, blocks)[1] * POLICY.alpha_drop * scale
    assert float(drops[2] - drops[1]) > float(drops[1])
    weight = 1 / layer.rows.coverage()[1]
    assert float(loss[1, 0]) == pytest.approx(float(drops[1] * weight[[20, 40]].mean()))
    assert float(loss[0, 0]) == pytest.approx(
        float((drops[2] - drops[1]) * weight[[3, 9, 11]].mean())
    )
    whole = found.of_blocks(torch.tensor([[[3, 9, 11, 20, 40]]]).expand(HEADS, -1, -1)).each[1, 0]
    torch.testing.assert_close(together, whole)


def test_surprise_adds_to_the_drop_of_a_block():
    layer = make_layer()
    features = expect_surprise(layer.features, layer.rows, layer.values, torch.tensor([0.0, 0.4]))
    surprised = replace(layer, features=features)
    blocks = torch.tensor([[3, 9], [20, 40]])
    every = blocks.expand(HEADS, -1, -1)
    before, after = (
        AttentionScore(POLICY).losses(each, granularity=1).of_blocks(every).each[1, :, 0]
        for each in (layer, surprised)
    )
    scale = POLICY.alpha_drop / float(features.output_energy.sum())
    assert features.surprise is not None
    torch.testing.assert_close(after - before, scale * features.surprise[1][blocks].sum(1))


def test_recipe_is_algorithm_one_step_three():
    layer = make_layer()
    features = replace(
        layer.features, reuse=torch.tensor([0.5, 0.25]), stability=torch.tensor([0.2, 0.6])
    )
    weight = torch.ones(TOKENS)
    weight[5] = 4
    layer = replace(layer, features=features, token_weight=weight)
    loss = RecipeScore(POLICY).losses(layer, granularity=1).loss
    # alpha_theta u eps_theta + alpha_r (1 - s) eps_r, a dropped state having an angle error of 1
    head = [2 * 0.5, 2 * 0.5 * 0.2 + 3 * 0.8 * 0.1, 2 * 0.5 * 0.1 + 3 * 0.8 * 0.05, 0.0]
    assert loss[0, 0].tolist() == pytest.approx(head)
    assert loss[0, 5].tolist() == pytest.approx([4 * each for each in head])
    runs = RecipeScore(POLICY).losses(layer, granularity=16).loss
    # 15 tokens of weight one and one of four; the last run has six tokens
    assert float(runs[1, 0, 0]) == pytest.approx(19 * 2 * 0.25)
    assert float(runs[1, -1, 0]) == pytest.approx(6 * 2 * 0.25)


def test_votes_are_the_attention_and_add_up():
    layer = make_layer()
    found = VoteScore(POLICY).losses(layer, granularity=1)
    torch.testing.assert_close(found.loss[..., 0], layer.features.mass)
    each = state_distortion(layer.features, layer.errors, POLICY)[0]
    ratio = each.sum(0) / each[:, 0].sum()
    torch.testing.assert_close(found.loss[0], layer.features.mass[0, :, None] * ratio)
    blocks = torch.tensor([[3, 9], [20, -1]]).expand(HEADS, -1, -1)
    expected = torch.stack([found.loss[0, [3, 9]].sum(0), found.loss[0, 20]])
    torch.testing.assert_close(found.of_blocks(blocks).each[0], expected)
    # a policy's weights of heads are none of the votes' business
    assert isinstance(layer.rows, AttentionRows)
    rows = replace(layer.rows, share=3 * layer.rows.share)
    features = replace(layer.features, mass=3 * layer.features.mass)
    again = VoteScore(POLICY).losses(replace(layer, rows=rows, features=features), granularity=1)
    torch.testing.assert_close(again.loss[..., 0], found.loss[..., 0])


def test_tier_ratio_is_relative_to_dropping():
    loss = torch.tensor([[[4.0, 1.0, 0.0], [2.0, 2.0, 0.0]], [[0.0, 0.0, 0.0]] * 2])
    assert tier_ratio(loss).tolist() == [[1.0, 0.5, 0.0], [0.0, 0.0, 0.0]]


def test_unknown_scores_are_refused_with_the_nearest_name():
    known = ", ".join(SCORES)
    with pytest.raises(ValueError, match=f"{known}, got 'atention'; did you mean 'attention'"):
        ControlOptions(score="atention")
    with pytest.raises(ValueError, match=r"got 'xyz'$"):
        make_score("xyz", POLICY)
