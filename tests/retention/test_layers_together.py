# SPDX-License-Identifier: Apache-2.0
"""Layers that are measured side by side come out as they do one by one."""

from dataclasses import fields, replace

import pytest
import torch

from sphkv.codec.states import SphericalCodec
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import ladder
from sphkv.retention.errors import sample_states
from sphkv.retention.measure import (
    LayerInput,
    MeasureConfig,
    layers_together,
    measure_layer,
    measure_layers,
)
from sphkv.retention.policy import BlockShape, ControlOptions, RetentionPolicy
from sphkv.retention.pricing import LayerPricer, PageCosts
from sphkv.retention.protection import ProtectionRule
from sphkv.testing.cases import random_calibration

HEADS, GROUP, DIM, TOKENS, LAYERS = 2, 2, 32, 415, 3
GEOMETRY = KVGeometry(LAYERS, HEADS, HEADS * GROUP, DIM)
ROPE = RopeSpec.from_config({"rope_theta": 10_000.0}, DIM)
TIERS = ladder(DIM, names=("k2v2", "k3v4"))
COSTS = PageCosts(
    TIERS,
    {
        shape: tuple(tier.page_tokens * 8 + 100 * at for at, tier in enumerate(TIERS))
        for shape in BlockShape
    },
)
FITTED = RetentionPolicy(
    window=12,
    window_stride=2,
    sensitivity=((1.0, 0.5, 2.0, 0.1), (0.2, 0.3, 0.4, 0.5), (3.0, 2.0, 1.0, 0.0)),
    surprise=((0.1, 0.0), (0.02, 0.3), (0.0, 0.5)),
    surprise_coded=0.5,
)


def make_config(policy, *, tokens=128):
    rule = ProtectionRule(sink_tokens=16, outlier_ratio=1.5, max_outliers=8)
    return MeasureConfig(
        GEOMETRY, (ROPE,) * LAYERS, TIERS, policy=policy, protection=rule, error_samples=tokens
    )


def make_states(layer):
    """Layers are unlike each other: their outputs differ in size, and so does what is protected."""
    generator = torch.Generator().manual_seed(layer)
    keys, values = (torch.randn(HEADS, TOKENS, DIM, generator=generator) for _ in range(2))
    query = torch.randn(HEADS * GROUP, 90, DIM, generator=generator) + 0.5
    keys[:, 100 : 104 + 2 * layer] *= 1.8
    return query, keys, 4.0**layer * values


def measured(policy):
    """All layers at once, and one by one."""
    config = make_config(policy)
    codec = SphericalCodec(random_calibration(GEOMETRY, ROPE))
    states = [make_states(layer) for layer in range(LAYERS)]
    query, keys, values = (torch.cat(parts) for parts in zip(*states, strict=True))
    alone = [measure_layer(config, codec, layer, states[layer]) for layer in range(LAYERS)]
    return measure_layers(config, codec, range(LAYERS), (query, keys, values)), alone


@pytest.mark.parametrize("policy", [RetentionPolicy(window=12, window_stride=2), FITTED])
def test_layers_side_by_side_are_those_one_by_one(policy):
    together, alone = measured(policy)
    assert together.num_layers == LAYERS
    assert torch.equal(together.protected, torch.cat([each.protected for each in alone]))
    assert len({int(each.protected.sum()) for each in alone}) > 1
    for part in ("features", "errors"):
        found = getattr(together, part)
        for field in fields(found):
            one = getattr(found, field.name)
            parts = [getattr(getattr(each, part), field.name) for each in alone]
            if one is None:
                assert parts == [None] * LAYERS
                continue
            torch.testing.assert_close(one, torch.cat(parts), rtol=1e-4, atol=1e-6)

    pricer = LayerPricer(COSTS, policy, ControlOptions(shapes=(BlockShape.WHOLE, BlockShape.RUNS)))
    for mine, other in zip(
        pricer.price(together).split(HEADS), map(pricer.price, alone), strict=True
    ):
        assert torch.equal(mine.protected, other.protected)
        for shape, blocks in mine.blocks.items():
            right = other.blocks[shape]
            assert torch.equal(blocks.states, right.states)
            assert torch.equal(blocks.cost, right.cost)
            # near ties may change places
            assert float((blocks.units != right.units).float().mean()) < 0.02
            largest = float(right.distortion.max())
            torch.testing.assert_close(
                blocks.distortion, right.distortion, rtol=1e-3, atol=1e-4 * largest
            )
    losses = pricer.run_losses(together)
    expected = torch.cat([pricer.run_losses(each) for each in alone])
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-6 * float(expected.max()))


def test_what_one_layer_is_relative_to_is_no_matter_of_another():
    """Without fitted weights each layer's losses are relative to its own outputs."""
    together, alone = measured(RetentionPolicy(window=12, window_stride=2))
    pricer = LayerPricer(COSTS, RetentionPolicy(), ControlOptions())
    wrong = pricer.run_losses(replace(together, num_layers=1))
    right = pricer.run_losses(together)
    assert float((wrong[:HEADS] / right[:HEADS].clamp(min=1e-30)).median()) < 0.1
    torch.testing.assert_close(right[-HEADS:], pricer.run_losses(alone[-1]), rtol=1e-4, atol=1e-9)


def test_layers_are_sampled_at_ranks_of_their_own():
    draw = torch.Generator().manual_seed(0)
    importance, free = torch.rand(4, 500, generator=draw), torch.ones(4, 500, dtype=torch.bool)
    free[2, :180] = False
    found = sample_states(importance, free, 128, least_free=300, num_layers=2)
    for layer in range(2):
        own = slice(2 * layer, 2 * layer + 2)
        alone = sample_states(importance[own], free[own], 128)
        assert torch.equal(found.index[own], alone.index)
        assert torch.equal(found.weight[own], alone.weight)
    assert not torch.equal(found.weight[0], found.weight[2])
    with pytest.raises(ValueError, match="2 layers, of which one has only 320 free"):
        sample_states(importance, free, 384, num_layers=2)


def test_how_many_layers_are_measured_together():
    config = make_config(RetentionPolicy())
    assert layers_together(config, 8192, 32) == 1
    on_gpu = replace(config, kernels=object())
    lengths = (128, 400, 32768, 131072, 524288, 1 << 20)
    counts = {tokens: layers_together(on_gpu, tokens, 32) for tokens in lengths}
    assert counts == {128: 1, 400: 8, 32768: 8, 131072: 4, 524288: 1, 1 << 20: 1}
    # as many states in all, however many heads have them, and not too many heads
    wide, wider = (
        replace(on_gpu, geometry=KVGeometry(LAYERS, heads, heads, DIM)) for heads in (16, 128)
    )
    assert layers_together(wide, 32768, 32) == layers_together(on_gpu, 262144, 32) == 2
    assert [layers_together(wide, tokens, 32) for tokens in (400, 8192, 16384)] == [4, 4, 4]
    assert layers_together(wider, 400, 32) == 1
    left, groups = 32, []
    while left:
        groups.append(layers_together(on_gpu, 8192, left))
        left -= groups[-1]
    assert groups == [8, 8, 8, 4, 2, 2]
    assert [layers_together(on_gpu, 8192, left) for left in (3, 1)] == [2, 1]


def test_a_layer_alone_is_one_of_one():
    together, alone = measured(FITTED)
    assert isinstance(together, LayerInput)
    assert {each.num_layers for each in alone} == {1}
