# SPDX-License-Identifier: Apache-2.0
"""Methods that drop tokens, against examples small enough to work out by hand."""

import math

import pytest
import torch
from torch import Tensor

from sphkv.attention.reference import ReferenceBackend
from sphkv.attention.request import AttentionOptions
from sphkv.baselines.attention_scores import (
    SharedAttention,
    SharedScores,
    received_attention,
    window_attention,
)
from sphkv.baselines.cake import MeanAndVariance, layer_preference, share_pages
from sphkv.baselines.duo_attention import HeadKinds
from sphkv.baselines.eviction import (
    EvictionCache,
    EvictionPolicy,
    LayerPrompt,
    PromptPolicy,
    highest,
)
from sphkv.baselines.held_states import HeldStates
from sphkv.baselines.keep_all import KeepAll
from sphkv.baselines.layer_pages import LayerPages
from sphkv.baselines.prompt_eviction import (
    AdaptiveVotes,
    ExpectedWeights,
    PyramidVotes,
    ReconstructionVotes,
    WindowVotes,
    adaptive_units,
    mean_rotation,
)
from sphkv.baselines.settings import MethodShape
from sphkv.baselines.step_eviction import HeavyHitters, LastQuery, SinksAndWindow
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

STILL = RopeSpec.unrotated(2)
TURNING = RopeSpec(2, 2, (1.0,))


def weighted(*first: float, second: tuple[float, ...] = ()) -> Tensor:
    """Keys that the query (sqrt 2, 0) weighs as ``first``, and (0, sqrt 2) as ``second``."""
    other = second or (1.0,) * len(first)
    return torch.tensor([[[math.log(a), math.log(b)] for a, b in zip(first, other, strict=True)]])


def looking(tokens: int) -> Tensor:
    """Queries (sqrt 2, 0), which make ``weighted`` keys weigh what they say."""
    return torch.tensor([math.sqrt(2), 0.0]).expand(1, tokens, 2)


def prompt(query: Tensor, keys: Tensor, values: Tensor | None = None) -> LayerPrompt:
    """A layer without rotations."""
    return LayerPrompt(0, query, keys, torch.ones_like(keys) if values is None else values, STILL)


def kept(policy: EvictionPolicy, query: Tensor, keys: Tensor, count: int) -> list[int]:
    scores = policy.prompt_scores(prompt(query, keys))
    return highest(scores, count)[0].nonzero()[:, 0].tolist()


def test_attention_received_by_hand() -> None:
    """Weights 1, 3, 4: the queries see (1), (1/4, 3/4) and (1/8, 3/8, 4/8)."""
    received = received_attention(looking(3), weighted(1, 3, 4))
    assert received[0].tolist() == pytest.approx([1.375, 1.125, 0.5], abs=1e-6)
    last = window_attention(looking(3), weighted(1, 3, 4), 2)
    assert last[0].flatten().tolist() == pytest.approx([0.25, 0.75, 0, 0.125, 0.375, 0.5])


def test_streaming_llm_by_hand() -> None:
    """Of six tokens, one sink and the last two stay."""
    policy = SinksAndWindow(num_sinks=1)
    assert kept(policy, looking(6), weighted(1, 9, 9, 9, 1, 1), 3) == [0, 4, 5]


def test_streaming_llm_moves_sinks_to_the_window() -> None:
    """Tokens 1 to 3 are gone, so the sink's key turns on by three radians."""
    policy = SinksAndWindow(num_sinks=1)
    keys = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]])
    held = HeldStates(keys, keys, torch.tensor([[0, 4, 5]]))
    placed = policy.place_keys(TURNING, held, keys[:, :1])
    assert placed[0, 0].tolist() == pytest.approx([math.cos(3), math.sin(3)])
    assert torch.equal(placed[0, 1:], keys[0, 1:])


def test_h2o_by_hand() -> None:
    """Of two tokens one is the newest; the other has received most: 1.375 of three, or 1.85."""
    for keys, expected in ((weighted(1, 3, 4), [0, 2]), (weighted(1, 19, 1), [1, 2])):
        carried = HeavyHitters().prompt_scores(prompt(looking(3), keys))
        scores = HeavyHitters().decode_scores(torch.arange(3)[None], carried, 2, 3)
        assert highest(scores, 2)[0].nonzero()[:, 0].tolist() == expected


def test_h2o_scores_add_up_while_decoding() -> None:
    """Queries of zero weigh all alike: row r gives 1 / (r + 1) to each token up to it."""
    geometry = KVGeometry(num_layers=1, num_kv_heads=1, num_query_heads=2, head_dim=64)
    method = HeavyHitters().build(MethodShape(geometry, [RopeSpec.unrotated(64)], 2.0))
    states = torch.ones(1, 33, 64)
    query = torch.zeros(2, 33, 64)
    method.prefill(0, states[:, :32], states[:, :32], query=query[:, :32])
    new = slice(32, 33)
    method.attend(0, query[:, new], states[:, new], states[:, new], AttentionOptions(scale=0.1))
    received = [2 * sum(1 / (row + 1) for row in range(token, 33)) for token in range(33)]
    assert method._scores[0][0].tolist() == pytest.approx(received, rel=1e-5)


def test_snapkv_by_hand() -> None:
    """The last query votes 1 6 1 1 2 1 1; pooling lets neighbours of the 6 win."""
    keys = weighted(1, 6, 1, 1, 2, 1, 1, 1)
    assert kept(WindowVotes(window=1, kernel=1), looking(8), keys, 3) == [1, 4, 7]
    assert kept(WindowVotes(window=1, kernel=3), looking(8), keys, 4) == [0, 1, 2, 7]


def test_pyramidkv_by_hand() -> None:
    """Of eleven pages, 168 tokens beside the window of 8: the last layer gets 8, the first 328."""
    policy = PyramidVotes()
    # 336, 176 and 16 tokens with the window; a layer has at least two pages
    assert [policy.layer_pages(layer, 3, 11, 1000) for layer in range(3)] == [20, 11, 2]
    # no layer can use more than the prompt: 200 tokens, so the last one gets 136
    assert [policy.layer_pages(layer, 3, 11, 208) for layer in range(3)] == [13, 11, 9]


@pytest.mark.parametrize("room", [1, 3, 7, 25])
def test_pyramidkv_stays_within_the_total(room: int) -> None:
    policy = PyramidVotes()
    assert sum(policy.layer_pages(layer, 5, room, 2000) for layer in range(5)) <= 5 * room


def test_cake_scores_by_hand() -> None:
    """Means are equal, so the tokens whose weight varies over the window stay."""
    keys = weighted(4, 2.5, 1, 1e-9, 1e-9, second=(1, 2.5, 4, 1e-9, 1e-9))
    query = torch.zeros(1, 5, 2)
    query[0, 3, 0] = query[0, 4, 1] = math.sqrt(2)
    policy = MeanAndVariance(window=2, kernel=1)
    scores = policy.prompt_scores(prompt(query, keys))
    # weights 4/7.5 and 1/7.5 have mean 1/3 and variance 0.08
    assert scores[0, :3].tolist() == pytest.approx([1 / 3 + 16, 1 / 3, 1 / 3 + 16], rel=1e-4)
    assert kept(policy, query, keys, 4) == [0, 2, 3, 4]
    # neighbours share a third each, with nothing beyond the ends
    smooth = MeanAndVariance(window=2, kernel=3).prompt_scores(prompt(query, keys))
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
    policy = ExpectedWeights(num_sinks=0)
    values = torch.tensor([[[4.0, 0.0], [0.0, 1.0], [1.0, 0.0]]])
    scores = policy.prompt_scores(prompt(looking(3), weighted(1, 3, 4), values))
    assert scores[0].tolist() == pytest.approx([0.5, 0.375, 0.5])


def test_expected_attention_uses_the_covariance() -> None:
    """Queries -2 and 2 have mean 0 and variance 4: a key of size k gets exp(4 k k / 4)."""
    policy = ExpectedWeights(num_sinks=0)
    query = torch.tensor([[[2.0, 0.0], [-2.0, 0.0]]])
    keys = torch.tensor([[[math.sqrt(math.log(3)), 0.0], [0.0, 5.0]]])
    values = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    scores = policy.prompt_scores(prompt(query, keys, values))
    assert scores[0].tolist() == pytest.approx([0.75, 0.25])


def test_mean_rotation_by_hand() -> None:
    """Half of no turn and half of a quarter turn."""
    quarter = RopeSpec(2, 2, (math.pi / 2,))
    expected = [[0.5, -0.5], [0.5, 0.5]]
    assert torch.allclose(mean_rotation(quarter, 0, 2), torch.tensor(expected), atol=1e-6)


def test_equal_scores_keep_the_later_token() -> None:
    assert highest(torch.tensor([[1.0, 1.0, 1.0]]), 2).tolist() == [[False, True, True]]


def test_expected_attention_leaves_sinks_out_of_the_softmax() -> None:
    """Weights 1, 3 and 4 of which the first is a sink: 3/7 and 4/7 are left."""
    scores = ExpectedWeights(num_sinks=1).prompt_scores(
        prompt(looking(3), weighted(1, 3, 4), torch.tensor([[[1.0, 0.0]] * 3]))
    )
    assert scores[0].tolist() == pytest.approx([math.inf, 3 / 7, 4 / 7])


def test_snapkv_kernel_reaches_a_fifth_digit() -> None:
    """Seven neighbours reach three tokens from a vote, seventeen reach eight."""
    keys = weighted(*[1.0] * 10, 9.0, *[1.0] * 13)
    near = kept(WindowVotes(window=1, kernel=7), looking(24), keys, 8)
    far = kept(WindowVotes(window=1, kernel=17), looking(24), keys, 18)
    assert near == [7, 8, 9, 10, 11, 12, 13, 23]
    assert far == [*range(2, 19), 23]


def test_adakv_by_hand() -> None:
    """The four highest of both heads are three of the first and one of the second."""
    scores = torch.tensor([[9.0, 8.0, 7.0, 0.0], [1.0, 6.0, 0.0, 0.0]])
    assert adaptive_units(scores, 4, unit=1, safeguard=0.0) == [3, 1]
    # half of four is shared equally: 1 + 1.5 and 1 + 0.5, and the first remainder is larger
    assert adaptive_units(scores, 4, unit=1, safeguard=0.5) == [3, 1]
    assert adaptive_units(scores, 4, unit=1, safeguard=1.0) == [2, 2]
    # a head keeps one unit whatever the votes
    assert adaptive_units(torch.tensor([[5.0, 5.0], [0.0, 0.0]]), 2, unit=1, safeguard=0.0) == [
        1,
        1,
    ]
    assert AdaptiveVotes().head_pages(torch.ones(2, 64), 8) == [4, 4]


def test_kvzip_by_hand() -> None:
    """Queries after the prompt see all keys: the largest of 1/8, 3/8, 4/8 and of 2/4, 1/4, 1/4."""
    keys = weighted(1, 3, 4, second=(2, 1, 1))
    query = looking(3).clone()
    query[0, 1] = torch.tensor([0.0, math.sqrt(2)])
    scores = ReconstructionVotes(stride=1, recent=1).prompt_scores(prompt(query, keys))
    assert scores[0].tolist() == pytest.approx([0.5, 0.375, math.inf])
    # asked every second time, the query in the middle says nothing
    scores = ReconstructionVotes(stride=2, recent=1).prompt_scores(prompt(query, keys))
    assert scores[0].tolist() == pytest.approx([0.125, 0.375, math.inf])


def test_kvzip_turns_queries_behind_the_prompt() -> None:
    """Two tokens, half a turn each: behind the prompt a query has turned a whole one more."""
    half = RopeSpec(2, 2, (math.pi,))
    keys, query = weighted(1, 3), looking(2)
    turned = LayerPrompt(0, query, keys, keys, half)
    scores = ReconstructionVotes(stride=1, recent=0).prompt_scores(turned)
    assert scores[0].tolist() == pytest.approx([0.25, 0.75], abs=1e-5)


def test_tova_by_hand() -> None:
    """The last query weighs 5, 1, 3 and 1 itself: the second goes first."""
    policy = LastQuery(recent=1)
    assert kept(policy, looking(4), weighted(5, 1, 3, 1), 3) == [0, 2, 3]
    scores = policy.decode_scores(torch.tensor([[0, 2, 3]]), torch.tensor([[0.1, 0.3, 0.6]]), 2, 4)
    assert scores[0].tolist() == pytest.approx([0.1, 0.3, math.inf])


def test_duo_attention_reuse_by_hand() -> None:
    """Outside one sink and the last query lie 3 of 8 parts of its weight, and 2 of 8."""
    policy = HeadKinds(num_sinks=1, window=1)
    keys = torch.cat([weighted(1, 3, 4), weighted(1, 2, 5)])
    query = looking(3).expand(2, 3, 2)
    assert policy.reuse(query, keys).tolist() == pytest.approx([0.375, 0.25])


def test_duo_attention_keeps_the_head_that_reuses_most() -> None:
    """Two layers of one head; the second looks back, so the first gives up its middle."""
    geometry = KVGeometry(num_layers=2, num_kv_heads=1, num_query_heads=1, head_dim=64)
    shape = MethodShape(geometry, [RopeSpec.unrotated(64)] * 2, 0.75, num_new=16)
    method = HeadKinds(full_share=0.9).build(shape)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 400, 64, generator=generator)
    local, wide = torch.zeros(1, 400, 64), torch.zeros(1, 400, 64)
    keys = states.clone()
    keys[0, -64:, 0], local[..., 0] = 50.0, 50.0
    method.prefill(0, keys, states, query=local)
    assert len(held_positions(method)) == 400
    method.prefill(1, states, states, query=wide)
    first, second = method.read(0).positions[0], method.read(1).positions[0]
    assert len(second) == 400
    assert first.tolist() == [0, 1, 2, 3, *range(404 - len(first), 400)]


def test_new_tokens_leave_before_the_prompt_or_by_votes() -> None:
    """Positions 0 and 2 are of a prompt of three; of 4, 5 and 6 the last came last."""
    positions = torch.tensor([[0, 2, 4, 5, 6]])
    window = PromptPolicy(decode="window").decode_scores(positions, None, 3, 3)
    assert highest(window, 3)[0].tolist() == [True, True, False, False, True]
    weights = torch.tensor([[0.1, 0.5, 0.2, 0.1, 0.1]])
    positions = torch.tensor([[0, 2, 14, 15, 30]])
    votes = PromptPolicy(decode="votes").decode_scores(positions, weights, 3, 3)
    # the last sixteen, here 15 and 30, are protected
    assert highest(votes, 3)[0].tolist() == [False, True, False, True, True]


def test_pages_free_what_is_dropped() -> None:
    """Heads may keep different numbers; pages hold 16."""
    geometry = KVGeometry(num_layers=1, num_kv_heads=2, num_query_heads=2, head_dim=64)
    pages = LayerPages(geometry, ReferenceBackend(), torch.device("cpu"))
    states = torch.arange(2 * 20 * 64.0).view(2, 20, 64) % 256
    keep = torch.ones(2, 20, dtype=torch.bool)
    pages.write(keep, states, states, torch.arange(20))
    held = pages.read()
    assert held.positions.shape == (2, 20)
    keep[0, 17:] = False
    keep[1, :19] = False
    pages.keep(held, keep)
    held = pages.read()
    assert pages.pages_per_head() == [2, 1]
    assert pages.num_states == 18
    assert held.positions[1].tolist() == [19] + [-1] * 16
    assert torch.equal(held.keys[1, 0], states[1, 19])
    # three pages of consecutive states with two counts, and tables of two rows of four entries
    by_hand = 3 * (16 * 256 + 64 + 8) + 2 * (4 * 10 + 8)
    assert pages.nbytes == pages.ledger().total == by_hand
    # the bound charges positions, a tail, and a table that has grown
    tail = 2 * 16 * 256
    assert pages.bytes_for([2, 1]) == by_hand + 3 * 64 + tail


def test_dense_ledger_by_hand() -> None:
    """17 tokens of 64 channels take two pages and, so far, no tail."""
    geometry = KVGeometry(num_layers=1, num_kv_heads=1, num_query_heads=1, head_dim=64)
    method = KeepAll().build(MethodShape(geometry, [RopeSpec.unrotated(64)], 1.0))
    states = torch.ones(1, 17, 64)
    method.prefill(0, states, states)
    ledger = method.ledger()
    assert (ledger.codes, ledger.values) == (17 * 128, 17 * 128)
    assert ledger.frag == 15 * 256
    assert ledger.headers + ledger.prot == 2 * 64
    # a count, four entries of the table, and two counts of each page
    assert ledger.ptr + ledger.tags == 8 + 4 * 10 + 2 * 8
    assert ledger.positions == 0


def test_decode_eviction_keeps_the_size() -> None:
    """With room for two pages beside the tail, the window moves when the tail is full."""
    geometry = KVGeometry(num_layers=1, num_kv_heads=1, num_query_heads=1, head_dim=64)
    rope = RopeSpec.unrotated(64)
    method = SinksAndWindow().build(MethodShape(geometry, [rope], 0.54))
    states = torch.randn(1, 100, 64, generator=torch.Generator().manual_seed(0))
    method.prefill(0, states, states, query=states)
    assert held_positions(method) == [0, 1, 2, 3, *range(72, 100)]
    limit = 0.54 * 256
    for step in range(40):
        new = states[:, :1]
        method.attend(0, new, new, new, AttentionOptions(scale=0.1))
        assert method.resident_bytes() <= limit * (101 + step)
    assert held_positions(method)[:4] == [0, 1, 2, 3]
    window = held_positions(method)[4:]
    assert window == list(range(window[0], 140))
    with pytest.raises(ValueError, match="cannot crop to 114"):
        method.crop(114)
    method.crop(139)
    assert held_positions(method)[4:] == window[:-1]


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
    for budget in (0.6, 0.8):
        shape = MethodShape(geometry, [RopeSpec.unrotated(8)] * 2, budget, num_new=8)
        alone, sharing = HeavyHitters().build(shape), HeavyHitters().build(shape)
        sharing.shared = shared
        for layer in range(2):
            alone.prefill(layer, keys, values, query=query)
            sharing.prefill(layer, keys, values, query=query)
            ours, theirs = sharing.read(layer), alone.read(layer)
            assert torch.equal(ours.positions, theirs.positions)
            assert torch.equal(ours.keys, theirs.keys)
        assert (shared.reused_s > 0) == (budget == 0.8)
