# SPDX-License-Identifier: Apache-2.0
"""Methods that drop tokens, against examples small enough to work out by hand."""

import math

import pytest
import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.baselines.attention_scores import (
    SharedAttention,
    SharedScores,
    received_attention,
    window_attention,
)
from sphkv.baselines.cake import MeanAndVariance, layer_preference, share_pages
from sphkv.baselines.dense import DenseCache
from sphkv.baselines.eviction import EvictionCache, EvictionPolicy, highest
from sphkv.baselines.expected_attention import ExpectedWeights, mean_rotation
from sphkv.baselines.h2o import HeavyHitters, h2o
from sphkv.baselines.held_states import HeldStates
from sphkv.baselines.paged_states import PagedStates
from sphkv.baselines.pyramidkv import PyramidVotes
from sphkv.baselines.snapkv import WindowVotes
from sphkv.baselines.streaming_llm import SinksAndWindow, streaming_llm
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

STILL = RopeSpec.unrotated(2)
TURNING = RopeSpec(2, 2, (1.0,))
TINY = KVGeometry(num_layers=1, num_kv_heads=1, num_query_heads=1, head_dim=2)


def weighted(*first: float, second: tuple[float, ...] = ()) -> Tensor:
    """Keys that the query (sqrt 2, 0) weighs as ``first``, and (0, sqrt 2) as ``second``."""
    other = second or (1.0,) * len(first)
    return torch.tensor([[[math.log(a), math.log(b)] for a, b in zip(first, other, strict=True)]])


def looking(tokens: int) -> Tensor:
    """Queries (sqrt 2, 0), which make ``weighted`` keys weigh what they say."""
    return torch.tensor([math.sqrt(2), 0.0]).expand(1, tokens, 2)


def kept(policy: EvictionPolicy, query: Tensor, keys: Tensor, count: int) -> list[int]:
    scores = policy.prompt_scores(0, query, keys, torch.ones_like(keys))
    return highest(scores, count)[0].nonzero()[:, 0].tolist()


def test_attention_received_by_hand() -> None:
    """Weights 1, 3, 4: the queries see (1), (1/4, 3/4) and (1/8, 3/8, 4/8)."""
    received = received_attention(looking(3), weighted(1, 3, 4))
    assert received[0].tolist() == pytest.approx([1.375, 1.125, 0.5], abs=1e-6)
    last = window_attention(looking(3), weighted(1, 3, 4), 2)
    assert last[0].flatten().tolist() == pytest.approx([0.25, 0.75, 0, 0.125, 0.375, 0.5])


def test_streaming_llm_by_hand() -> None:
    """Of six tokens, one sink and the last two stay."""
    policy = SinksAndWindow([TURNING], num_sinks=1)
    assert kept(policy, looking(6), weighted(1, 9, 9, 9, 1, 1), 3) == [0, 4, 5]


def test_streaming_llm_moves_sinks_to_the_window() -> None:
    """Tokens 1 to 3 are gone, so the sink's key turns on by three radians."""
    policy = SinksAndWindow([TURNING], num_sinks=1)
    keys = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]])
    placed = policy.place_keys(0, HeldStates(keys, keys, torch.tensor([[0, 4, 5]])))
    assert placed[0, 0].tolist() == pytest.approx([math.cos(3), math.sin(3)])
    assert torch.equal(placed[0, 1:], keys[0, 1:])


def test_h2o_by_hand() -> None:
    """Of two tokens one is the newest; the other has received most: 1.375 of three, or 1.85."""
    for keys, expected in ((weighted(1, 3, 4), [0, 2]), (weighted(1, 19, 1), [1, 2])):
        carried = HeavyHitters().prompt_scores(0, looking(3), keys, keys)
        scores = HeavyHitters().decode_scores(torch.arange(3)[None], carried, 2)
        assert highest(scores, 2)[0].nonzero()[:, 0].tolist() == expected


def test_h2o_scores_add_up_while_decoding() -> None:
    """Queries of zero weigh all alike: row r gives 1 / (r + 1) to each token up to it."""
    geometry = KVGeometry(num_layers=1, num_kv_heads=1, num_query_heads=2, head_dim=64)
    method = h2o(geometry, 2.0)
    states = torch.ones(1, 33, 64)
    query = torch.zeros(2, 33, 64)
    method.prefill(0, states[:, :32], states[:, :32], query=query[:, :32])
    new = slice(32, 33)
    method.attend(0, query[:, new], states[:, new], states[:, new], AttentionOptions(scale=0.1))
    received = [2 * sum(1 / (row + 1) for row in range(token, 33)) for token in range(33)]
    assert method._pages(0).read_scores()[0, :33].tolist() == pytest.approx(received, rel=1e-5)


def test_snapkv_by_hand() -> None:
    """The last query votes 1 6 1 1 2 1 1; pooling lets neighbours of the 6 win."""
    keys = weighted(1, 6, 1, 1, 2, 1, 1, 1)
    assert kept(WindowVotes(window=1, kernel=1), looking(8), keys, 3) == [1, 4, 7]
    assert kept(WindowVotes(window=1, kernel=3), looking(8), keys, 4) == [0, 1, 2, 7]


def test_pyramidkv_by_hand() -> None:
    """160 tokens beside the window of 8: the last layer gets 8, the first 312, in whole pages."""
    policy = PyramidVotes()
    rooms = [policy.layer_tokens(layer, 3, 168, 1000) for layer in range(3)]
    assert rooms == [320, 160, 16]
    # no layer can use more than the prompt
    assert [policy.layer_tokens(layer, 3, 168, 208) for layer in range(3)] == [208, 160, 128]


@pytest.mark.parametrize("room", [16, 48, 112, 400])
def test_pyramidkv_stays_within_the_total(room: int) -> None:
    policy = PyramidVotes()
    assert sum(policy.layer_tokens(layer, 5, room, 2000) for layer in range(5)) <= 5 * room


def test_cake_scores_by_hand() -> None:
    """Means are equal, so the tokens whose weight varies over the window stay."""
    keys = weighted(4, 2.5, 1, 1e-9, 1e-9, second=(1, 2.5, 4, 1e-9, 1e-9))
    query = torch.zeros(1, 5, 2)
    query[0, 3, 0] = query[0, 4, 1] = math.sqrt(2)
    policy = MeanAndVariance(window=2, kernel=1)
    scores = policy.prompt_scores(0, query, keys, keys)
    # weights 4/7.5 and 1/7.5 have mean 1/3 and variance 0.08
    assert scores[0, :3].tolist() == pytest.approx([1 / 3 + 16, 1 / 3, 1 / 3 + 16], rel=1e-4)
    assert kept(policy, query, keys, 4) == [0, 2, 3, 4]
    # neighbours share a third each, with nothing beyond the ends
    smooth = MeanAndVariance(window=2, kernel=3).prompt_scores(0, query, keys, keys)
    assert smooth[0, :3].tolist() == pytest.approx([50 / 9, 11, 50 / 9], rel=1e-4)


def test_cake_layers_by_hand() -> None:
    """One query on both tokens, one on the first: entropies ln 2 and 0, variances 1/8 and 1/8."""
    weights = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
    assert layer_preference(weights) == pytest.approx(0.25 * math.log(2))
    # one page each first; of the six left 4.5 and 1.5, rounded down
    assert share_pages([3.0, 1.0], total=8, least=1, most=100) == [5, 2]
    assert share_pages([3.0, 1.0], total=8, least=1, most=4) == [4, 4]


def test_expected_attention_by_hand() -> None:
    """Constant queries have no covariance: weights 1/8, 3/8, 4/8 times value norms."""
    policy = ExpectedWeights([STILL], num_sinks=0)
    values = torch.tensor([[[4.0, 0.0], [0.0, 1.0], [1.0, 0.0]]])
    scores = policy.prompt_scores(0, looking(3), weighted(1, 3, 4), values)
    assert scores[0].tolist() == pytest.approx([0.5, 0.375, 0.5])


def test_expected_attention_uses_the_covariance() -> None:
    """Queries -2 and 2 have mean 0 and variance 4: a key of size k gets exp(4 k k / 4)."""
    policy = ExpectedWeights([STILL], num_sinks=0)
    query = torch.tensor([[[2.0, 0.0], [-2.0, 0.0]]])
    keys = torch.tensor([[[math.sqrt(math.log(3)), 0.0], [0.0, 5.0]]])
    values = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    scores = policy.prompt_scores(0, query, keys, values)
    assert scores[0].tolist() == pytest.approx([0.75, 0.25])


def test_mean_rotation_by_hand() -> None:
    """Half of no turn and half of a quarter turn."""
    quarter = RopeSpec(2, 2, (math.pi / 2,))
    expected = [[0.5, -0.5], [0.5, 0.5]]
    assert torch.allclose(mean_rotation(quarter, 0, 2), torch.tensor(expected), atol=1e-6)


def test_equal_scores_keep_the_later_token() -> None:
    assert highest(torch.tensor([[1.0, 1.0, 1.0]]), 2).tolist() == [[False, True, True]]


def test_pages_free_what_is_dropped() -> None:
    """Heads may keep different numbers; pages hold 16."""
    pages = PagedStates(2, 4)
    states = torch.arange(2 * 20 * 4.0).view(2, 20, 4)
    positions = torch.arange(20).expand(2, 20)
    pages.append(states, states, positions)
    assert pages.read().positions.shape == (2, 32)
    keep = torch.zeros(2, 32, dtype=torch.bool)
    keep[0, :17] = True
    keep[1, 5] = True
    pages.keep(keep)
    held = pages.read()
    assert pages.counts.tolist() == [17, 1]
    assert held.positions[1].tolist() == [5] + [-1] * 31
    assert torch.equal(held.keys[1, 0], states[1, 5])
    # three pages of 16 keys, values and positions, a header and the two-by-two table, two counts
    by_hand = 3 * (16 * (4 * 2 * 2 + 4) + 64) + 2 * 2 * 8 + 2 * 8
    assert sum(tensor.nbytes for _, tensor in pages.tensors()) == by_hand
    assert pages.slack_bytes == (48 - 18) * 16


def test_dense_ledger_by_hand() -> None:
    """17 tokens of two channels take two pages."""
    method = DenseCache(TINY)
    states = torch.ones(1, 17, 2)
    method.prefill(0, states, states)
    assert method.ledger().to_dict() == {
        "codes": 68, "radii": 0, "values": 68, "positions": 128, "headers": 128, "ptr": 24,
        "tags": 0, "prot": 0, "frag": 120, "payload": 264, "total": 536,
    }  # fmt: skip


def test_decode_eviction_keeps_the_size() -> None:
    """With room for 16 tokens and a page to wait in, 32 is the most ever held."""
    geometry = KVGeometry(num_layers=1, num_kv_heads=1, num_query_heads=1, head_dim=64)
    rope = RopeSpec.unrotated(64)
    method = streaming_llm(geometry, [rope], 0.42)
    states = torch.randn(1, 100, 64, generator=torch.Generator().manual_seed(0))
    method.prefill(0, states, states, query=states)
    assert held_positions(method) == [0, 1, 2, 3, *range(88, 100)]
    for _ in range(3):
        method.attend(0, states[:, :7], states[:, :7], states[:, :7], AttentionOptions(scale=0.1))
    # 16 fitted beside the first 16, the next five came after the window had moved to token 116
    assert held_positions(method) == [0, 1, 2, 3, *range(104, 121)]
    with pytest.raises(ValueError, match="cannot crop to 115"):
        method.crop(115)
    method.crop(118)
    assert held_positions(method) == [0, 1, 2, 3, *range(104, 118)]


def held_positions(method: EvictionCache) -> list[int]:
    positions = method.read(0).positions[0]
    return positions[positions >= 0].tolist()


def test_shared_attention_counts_every_query_once() -> None:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(4, 700, 8, generator=generator)
    keys = torch.randn(2, 700, 8, generator=generator)
    whole = received_attention(query, keys)
    shared = SharedAttention(600)
    for tokens in (700, 650):
        part = received_attention(query[:, :tokens], keys[:, :tokens])
        assert torch.allclose(shared.received(0, query[:, :tokens], keys[:, :tokens]), part)
    assert torch.allclose(shared.received(0, query, keys), whole)
    assert shared.reused_s > 0


def test_shared_scores_are_found_once_and_charged_every_time() -> None:
    """The second cache of a prompt reuses all scores, at another budget too, and keeps the same."""
    generator = torch.Generator().manual_seed(4)
    geometry = KVGeometry(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=8)
    query = torch.randn(4, 300, 8, generator=generator)
    keys, values = torch.randn(2, 2, 300, 8, generator=generator)
    shared = SharedScores(SharedAttention(200))
    for budget in (0.4, 0.6):
        alone, sharing = h2o(geometry, budget), h2o(geometry, budget)
        sharing.shared = shared
        for layer in range(2):
            alone.prefill(layer, keys, values, query=query)
            sharing.prefill(layer, keys, values, query=query)
            ours, theirs = sharing.read(layer), alone.read(layer)
            assert torch.equal(ours.positions, theirs.positions)
            assert torch.equal(ours.keys, theirs.keys)
        assert (shared.reused_s > 0) == (budget == 0.6)
