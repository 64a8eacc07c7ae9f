# SPDX-License-Identifier: Apache-2.0
"""Error models against what coding really does to a head's output."""

from functools import cache

import pytest
import torch
from torch import Tensor

from sphkv.codec.calibration import Calibrator
from sphkv.codec.states import SphericalCodec
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import CODED_PAGE_MULTIPLE, coded_tier, ladder
from sphkv.retention.errors import (
    common_error,
    key_bounds,
    measure_tier_errors,
    sample_states,
    weight_move,
)
from sphkv.retention.features import measure_features
from sphkv.retention.policy import RetentionPolicy
from sphkv.retention.rows import AttentionRows
from sphkv.retention.scores import state_distortion

TOKENS = 256
GEOMETRY = KVGeometry(num_layers=1, num_kv_heads=2, num_query_heads=4, head_dim=32)
ROPE = RopeSpec.from_config({"rope_theta": 10_000.0}, GEOMETRY.head_dim)
SCALE = GEOMETRY.head_dim**-0.5


def make_states() -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values; some tokens draw much more attention than others."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(TOKENS)
    heads = (GEOMETRY.num_query_heads, GEOMETRY.num_kv_heads, GEOMETRY.num_kv_heads)
    q, k, v = (torch.randn(n, TOKENS, GEOMETRY.head_dim, generator=generator) for n in heads)
    pull = (torch.rand(heads[1], TOKENS, 1, generator=generator) < 0.1).float()
    return ROPE.apply(q + 1.0, positions), ROPE.apply(k + 2.0 * pull, positions), v


@cache
def make_codec() -> SphericalCodec:
    calibrator = Calibrator(GEOMETRY, (ROPE,), model_id="random")
    query, keys, _ = make_states()
    calibrator.add_layer(0, keys, query, torch.arange(TOKENS))
    return SphericalCodec(calibrator.finish())


def test_a_sample_leaves_protected_states_out_and_counts_all_others():
    importance = torch.rand(2, 500, generator=torch.Generator().manual_seed(0))
    free = torch.ones(2, 500, dtype=torch.bool)
    free[:, :16] = False
    importance[:, :16] = 9.0
    sample = sample_states(importance, free, 128)
    assert sample.index.shape == (2, 128)
    assert int(sample.index.min()) >= 16
    assert sample.weight.sum(1).tolist() == pytest.approx([484.0, 484.0])
    best = importance[0].masked_fill(~free[0], 0).topk(64).indices
    assert set(best.tolist()) <= set(sample.index[0].tolist())


def test_a_sample_of_few_states_is_padded_to_pages():
    free = torch.zeros(1, 64, dtype=torch.bool)
    free[:, 10:50] = True
    sample = sample_states(torch.rand(1, 64), free, 128)
    assert sample.index.shape == (1, 64)
    assert float(sample.weight.sum()) == 40
    with pytest.raises(ValueError, match="100"):
        sample_states(torch.rand(1, 64), free, 100)


def test_a_weight_moves_as_softmax_says():
    logits = torch.tensor([1.0, 0.3, -0.5])
    weight = logits.softmax(0)
    wrong = (logits + torch.tensor([0.7, 0.0, 0.0])).softmax(0)
    change = (wrong[0] - weight[0]) / weight[0] / (1 - weight[0])
    assert float(weight_move(torch.tensor(0.7), weight[0]).sqrt()) == pytest.approx(float(change))
    assert float(weight_move(torch.tensor(5.0), torch.tensor(1.0))) < 1


def test_shared_errors_are_told_from_independent_ones():
    generator = torch.Generator().manual_seed(1)
    apart = torch.randn(1, 4096, 16, generator=generator)
    mass = torch.ones(1, 4096)
    assert float(common_error(apart, mass)) < 0.01
    assert float(common_error(apart + 0.5, mass)) == pytest.approx(16 * 0.25, rel=0.1)


def test_key_bounds_are_what_most_keys_keep():
    keys = torch.tensor([3.0, 0.0]).expand(1, 20, 2).clone()
    coded = keys.clone()
    # a right angle and twice the length; the worst of 20 is left out
    coded[0, 0] = torch.tensor([0.0, 3.0])
    coded[0, 1] = torch.tensor([-3.0, 0.0])
    coded[0, 2] = torch.tensor([6.0, 0.0])
    coded[0, 3] = torch.tensor([60.0, 0.0])
    direction, length = key_bounds(keys, coded)
    assert direction.tolist() == pytest.approx([2**0.5])
    assert length.tolist() == pytest.approx([3.0])


def test_errors_predict_the_move_of_the_output():
    query, keys, values = make_states()
    tiers, heads = ladder(64), GEOMETRY.num_kv_heads
    grouped = query.reshape(heads, -1, GEOMETRY.head_dim)
    weight = (SCALE * grouped @ keys.transpose(1, 2)).softmax(-1)
    count = weight.shape[1]
    rows = AttentionRows(
        weight, torch.full((heads, count), 1 / count), torch.ones(count, TOKENS, dtype=torch.bool)
    )
    features = measure_features(rows, keys, values, sinks=0, recent=0)
    sample = sample_states(features.shift, torch.ones(heads, TOKENS, dtype=torch.bool), 128)
    errors = measure_tier_errors(
        make_codec(), (0,), tiers, (query, keys, values), rows, sample, scale=SCALE
    )
    at = torch.arange(TOKENS).expand(heads, -1)
    # the lowest tiers move weights by more than the first order tells
    for tier_id in (3, 5):
        encoded = make_codec().encode(0, tiers[tier_id], keys, values, at)
        coded_keys, coded_values = make_codec().decode(0, tiers[tier_id], encoded, at)
        coded = (SCALE * grouped @ coded_keys.transpose(1, 2)).softmax(-1)
        moved = (coded @ coded_values - weight @ values).square().sum(-1).mean(1)
        for head in range(heads):
            loss = state_distortion(features, errors, RetentionPolicy())[head]
            assert float(loss[:, tier_id].sum()) == pytest.approx(float(moved[head]), rel=0.4)


def test_all_tiers_at_once_are_those_one_by_one():
    _, keys, values = make_states()
    tiers = [tier for tier in ladder(64) if tier.is_coded]
    tiers.append(coded_tier(2, 16))
    draw = torch.Generator().manual_seed(5)
    index = torch.stack([torch.randperm(TOKENS, generator=draw)[:64] for _ in range(len(keys))])
    keys, values = (
        part.gather(1, index[..., None].expand(-1, -1, part.shape[2])) for part in (keys, values)
    )
    codec = make_codec()
    coded_keys, coded_values, step = codec.recode((0,), tiers, keys, values, index)
    pages = index.view(-1, CODED_PAGE_MULTIPLE)
    head_ids = torch.arange(len(index)).repeat_interleave(len(pages) // len(index))
    paged_keys, paged_values = (part.reshape(*pages.shape, -1) for part in (keys, values))
    for at, tier in enumerate(tiers):
        encoded = codec.encode(0, tier, paged_keys, paged_values, pages, head_ids=head_ids)
        decoded = codec.decode(0, tier, encoded, pages, head_ids=head_ids)
        right = encoded.radius_step[:, None].expand_as(pages)
        wanted = (*(part.view_as(keys) for part in decoded), right.reshape(len(index), -1))
        for one, many in zip(wanted, (coded_keys[at], coded_values[at], step[at]), strict=True):
            # a code between two others may go either way
            assert float(((one - many).abs() > 1e-4).float().mean()) < 2e-3


@pytest.mark.parametrize(
    ("part", "bad", "words"),
    [
        (0, torch.nan, "keys must be finite, got nan"),
        (1, torch.inf, "values must be finite, got inf"),
        (1, 3e38, "rotated values exceed float32"),
    ],
)
def test_states_that_cannot_be_coded_are_refused(part, bad, words):
    states = [each[:, :64].clone() for each in make_states()[1:]]
    states[part][0, 5] = bad
    tiers = [tier for tier in ladder(64) if tier.is_coded]
    index = torch.arange(64).expand(len(states[0]), -1)
    with pytest.raises(ValueError, match=words):
        make_codec().recode((0,), tiers, states[0], states[1], index)


def test_a_sample_needs_no_count_where_enough_is_free():
    importance = torch.rand(2, 500, generator=torch.Generator().manual_seed(0))
    free = torch.ones(2, 500, dtype=torch.bool)
    free[:, 100:107] = False
    counted, known = (sample_states(importance, free, 128, least_free=n) for n in (0, 400))
    assert torch.equal(counted.index, known.index)
    assert torch.equal(counted.weight, known.weight)
