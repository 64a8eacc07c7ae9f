# SPDX-License-Identifier: Apache-2.0
"""Methods that drop and code at once, against examples small enough to work out by hand."""

import pytest
import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.baselines.composed import Composed, GroupRequest, KeepHighest
from sphkv.baselines.group_layer import GroupLayer, integer_class
from sphkv.baselines.mixed_widths import Brain16, DiffKV, LeastCost, RateDistortion, Thresholds
from sphkv.baselines.settings import MethodShape
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

ONE = KVGeometry(num_layers=1, num_kv_heads=1, num_query_heads=1, head_dim=64)
OPTIONS = AttentionOptions(scale=0.125)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def request(scores: Tensor, costs: list[int], budget: int, errors: list[float]) -> GroupRequest:
    return GroupRequest(scores, costs, errors, budget, 1)


def test_group_bytes_by_hand() -> None:
    """32 tokens of 64 channels at 4 bits."""
    kind = integer_class("int4", 4, 4, 64)
    keys = 64 * (16 + 4)  # a channel: 32 codes, a minimum and a spacing
    values = 32 * (32 + 4)
    # positions; attention and head; a quarter of a page's header and pointer
    assert kind.group_bytes(32) == keys + values + 32 * 4 + 4 + 2 + 72 // 4


def test_a_group_holds_integers_per_channel() -> None:
    """A ramp of four levels over the tokens of a group is exact at two bits."""
    kind = integer_class("int2", 2, 2, 4)
    ramp = torch.tensor([0.0, 1.0, 2.0, 3.0])
    keys, values = ramp[None, :, None].expand(1, 4, 4), ramp[None, None].expand(1, 4, 4)
    restored = kind.decode(kind.encode(keys, values), 4)
    assert torch.equal(restored[0], keys)
    assert torch.equal(restored[1], values)
    assert kind.distortion(keys, values, 4) == pytest.approx(0.0)


def test_keep_highest_by_hand() -> None:
    """Room for four: two each, or three and one by joint votes."""
    scores = torch.tensor([[9.0, 8.0, 7.0, 0.0], [1.0, 6.0, 0.0, 0.0]])
    wanted = request(scores, [10], 45, [0.1])
    assert KeepHighest().groups(wanted).tolist() == [[2], [2]]
    assert KeepHighest(0.0).groups(wanted).tolist() == [[3], [1]]


def test_rate_and_distortion_by_hand() -> None:
    """Weights 8, 4 and 1 of 13; dense costs 4 and is exact, coded costs 1 and leaves a tenth.

    Six bytes: the best is dense for the first token and coded for the others, with a loss of
    (4 + 1) / 130; coding all three would lose 13 / 130 and two dense tokens do not fit.
    """
    wanted = request(torch.tensor([[8.0, 4.0, 1.0]]), [4, 1], 6, [0.0, 0.1])
    assert LeastCost().groups(wanted).tolist() == [[1, 2]]
    # two bytes: the lightest token goes
    small = request(torch.tensor([[8.0, 4.0, 1.0]]), [4, 1], 2, [0.0, 0.1])
    assert LeastCost().groups(small).tolist() == [[0, 2]]


def test_thresholds_by_hand() -> None:
    """Significance 2.4, 1.2, 0.3 and 0.1 of an even share, a ratio of a quarter.

    Above t are those at high precision, above t / 4 those at low: with costs 2 and 1 and three
    bytes, t can fall to just above 1.2, where 2.4 is high and 1.2 is low; at 1.2 a byte is missing
    for the second and the third.
    """
    scores = torch.tensor([[2.4, 1.2, 0.3, 0.1]])
    assert Thresholds(0.25).groups(request(scores, [2, 1], 3, [0, 0])).tolist() == [[1, 1]]
    assert Thresholds(0.25).groups(request(scores, [2, 1], 8, [0, 0])).tolist() == [[4, 0]]


def test_classes_of_both_allocators() -> None:
    assert [kind.name for kind in RateDistortion().classes(ONE)] == ["bf16", "int8", "int4", "int2"]
    assert RateDistortion().classes(ONE)[RateDistortion().new_class()].name == "int4"
    assert [kind.name for kind in DiffKV().classes(ONE)] == ["k8v4", "k4v2"]
    assert Brain16().decode(Brain16().encode(torch.ones(1, 1, 2)), 1).tolist() == [[[1.0, 1.0]]]


def test_layer_drops_the_group_that_got_least() -> None:
    """Three groups of two tokens; attention 0.5, 0.1 and 0.4 after one step without memory."""
    keys = noise(1, 8, 4)
    layer = GroupLayer([integer_class("int4", 4, 4, 4)], 1, keys, keys)
    layer.store_dense(keys, keys, 1, 7)
    for at in (1, 3, 5):
        part = slice(at, at + 2)
        layer.add(0, [0], keys[:, part], keys[:, part], torch.arange(8)[None, part], torch.ones(1))
    held = layer.read()
    assert held.positions[0].tolist() == [1, 2, 3, 4, 5, 6, 0, 7]
    assert torch.allclose(held.keys[0, :6], keys[0, 1:7], atol=0.2)
    received = torch.tensor([[0.25, 0.25, 0.05, 0.05, 0.2, 0.2, 0.0, 0.0]])
    layer.note(received, 0.0)
    assert layer.drop_least()
    assert layer.read().positions[0].tolist() == [1, 2, 5, 6, 0, 7]
    assert layer.state_counts() == {"max": 2, "int4": 4}
    assert layer.drop_least()
    assert layer.drop_least()
    assert not layer.drop_least()


def test_composed_keeps_what_is_voted_for() -> None:
    """The last queries look along one channel, in which tokens 100 to 131 are large."""
    keys, values = noise(1, 300, 64) * 0.1, noise(1, 300, 64)
    keys[0, 100:132, 0] = 5.0
    query = torch.zeros(1, 300, 64)
    query[..., 0] = 20.0
    shape = MethodShape(ONE, [RopeSpec.unrotated(64)], 0.5, num_new=40)
    method = Composed(group=32).build(shape)
    method.prefill(0, keys, values, query=query)
    held = set(method.read(0).positions[0].tolist())
    assert {0, 1, 2, 3, *range(100, 132), *range(268, 300)} <= held
    assert len(held) < 300
    assert method.resident_bytes() <= 0.5 * 300 * 256
    for step in range(100):
        new = noise(1, 1, 64, seed=step)
        method.attend(0, new, new, new, OPTIONS)
        assert method.resident_bytes() <= 0.5 * (301 + step) * 256
    shares = method.describe().tiers
    assert sum(shares.values()) == pytest.approx(1.0)
    # after 100 tokens, at least 32 and at most 64 of them are dense beside the four sinks
    dense = shares["max"] * 400 - 4
    assert 32 <= round(dense) <= 64


@pytest.mark.parametrize("settings", [Composed(recent=8, new_group=16, group=16), DiffKV()])
def test_tokens_together_are_as_if_one_by_one(settings: Composed | DiffKV) -> None:
    """Outputs, what groups remember, what was dropped and every byte."""
    shape = KVGeometry(num_layers=1, num_kv_heads=2, num_query_heads=4, head_dim=64)
    query, keys, values = (noise(heads, 400, 64, seed=seed) for seed, heads in enumerate((4, 2, 2)))
    found = []
    for is_single in (True, False):
        plan = MethodShape(shape, [RopeSpec.unrotated(64)], 0.5, num_new=150)
        cache = settings.build(plan)
        cache.prefill(0, keys[:, :250], values[:, :250], query=query[:, :250])
        outputs, at = [], 250
        while at < 400:
            count = 1 if is_single else min(400 - at, cache.tokens_until_change())
            part = slice(at, at + count)
            outputs.append(cache.attend(0, query[:, part], keys[:, part], values[:, part], OPTIONS))
            at += count
        groups = [group for held in cache._held() for group in held._groups.values()]
        mass = torch.cat([group.mass for group in groups])
        places = torch.cat([group.positions.flatten() for group in groups])
        found.append((torch.cat(outputs, 1), mass, places, cache.resident_bytes()))
    single, together = found
    torch.testing.assert_close(together[0], single[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(together[1], single[1], rtol=0, atol=1e-5)
    assert torch.equal(together[2], single[2])
    assert together[3] == single[3]


def test_unknown_parts_are_named() -> None:
    with pytest.raises(ValueError, match="'int5'"):
        Composed(code="int5")
    with pytest.raises(ValueError, match="'nobody'"):
        Composed(votes="nobody")
