# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from sphkv.attention.api import decode_attention, decode_attention_batch, get_backend
from sphkv.attention.partial import PartialAttention, merge_partials
from sphkv.attention.request import AttentionOptions, DecodeRequest
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import TierSpec, TierTable, coded_tier
from sphkv.errors import BackendUnavailableError
from sphkv.testing.cases import CacheCase, build_store, random_states, rope_of
from sphkv.testing.oracle import dense_oracle

ALL_VALUE_BITS = TierTable(
    (
        TierSpec("drop", "drop", 0.0, 0, 0),
        coded_tier(1.0, 2),
        coded_tier(1.5, 3),
        coded_tier(2.0, 4),
        coded_tier(3.0, 8),
        coded_tier(4.25, 16),
        TierSpec("max", "dense", 16.0, 16, 16),
    )
)

CASES = {
    "odd-slots": CacheCase(
        tiers=TierTable(
            (
                TierSpec("drop", "drop", 0.0, 0, 0),
                coded_tier(1.3125, 2),
                coded_tier(2.0625, 3),
                TierSpec("max", "dense", 16.0, 16, 16),
            )
        )
    ),
    "mixed": CacheCase(),
    "runs": CacheCase(mix="runs", num_tokens=700),
    "value-bits": CacheCase(tiers=ALL_VALUE_BITS, num_tokens=500),
    "one-token": CacheCase(num_tokens=1, tail_tokens=0),
    "tail-only": CacheCase(num_tokens=0, tail_tokens=5),
    "page-less-one": CacheCase(mix="k2v3", num_tokens=131, tail_tokens=0),
    "page": CacheCase(mix="k2v3", num_tokens=132, tail_tokens=0),
    "page-plus-one": CacheCase(mix="k2v3", num_tokens=133, tail_tokens=1),
    "group-1": CacheCase(group_size=1),
    "group-16": CacheCase(group_size=16, num_kv_heads=1),
    "d80": CacheCase(head_dim=80, group_size=4),
    "d96": CacheCase(head_dim=96, group_size=2),
    "d128": CacheCase(head_dim=128, group_size=8, num_kv_heads=1),
    "d256": CacheCase(head_dim=256, group_size=2, num_kv_heads=1, num_tokens=200),
    "many-pages": CacheCase(mix="k1v2", num_tokens=1500, seed=3),
}

OPTIONS = {
    "plain": AttentionOptions(scale=0.125),
    "window": AttentionOptions(scale=0.125, window=90),
    "softcap": AttentionOptions(scale=0.3, softcap=5.0),
}


def make_request(case, options, num_queries=1):
    store = build_store(case)
    rope = rope_of(store)
    end = store.num_tokens(0)
    first = max(0, end - num_queries)
    _, _, query = random_states(
        case.geometry(), rope, end - first, first=first, seed=case.seed + 50
    )
    return DecodeRequest(store, 0, 0, query, torch.arange(first, end), options)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_answer_over_decoded_keys(name):
    request = make_request(CASES[name], OPTIONS["plain"])
    expected = dense_oracle(request)
    error = (decode_attention(request) - expected).abs().max()
    assert error <= 5e-6 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("options", ["window", "softcap"])
@pytest.mark.parametrize("num_queries", [1, 5])
def test_window_softcap_and_several_queries(options, num_queries):
    request = make_request(CASES["mixed"], OPTIONS[options], num_queries)
    expected = dense_oracle(request)
    torch.testing.assert_close(decode_attention(request).double(), expected, rtol=1e-5, atol=5e-6)


def test_learned_sinks_take_weight():
    request = make_request(CASES["mixed"], OPTIONS["plain"])
    sinks = torch.linspace(-3, 6, 6)
    expected = dense_oracle(request, sink_logits=sinks)
    got = decode_attention(request, sink_logits=sinks)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=5e-6)
    assert (got - decode_attention(request)).abs().max() > 1e-3


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        None,
    ],
)
def test_rotary_variants(config):
    rope = RopeSpec.unrotated(64) if config is None else RopeSpec.from_config(config, 64)
    case = CASES["mixed"]
    store = build_store(case, rope=rope)
    _, _, query = random_states(case.geometry(), rope, 1, first=306, seed=9)
    request = DecodeRequest(store, 0, 0, query, torch.tensor([306]), OPTIONS["plain"])
    torch.testing.assert_close(
        decode_attention(request).double(), dense_oracle(request), rtol=1e-5, atol=5e-6
    )


def test_a_wrong_key_changes_the_answer():
    request = make_request(CASES["mixed"], OPTIONS["plain"])
    before = decode_attention(request)
    group = next(g for g in request.store.pages(0, 0) if g.layout.tier.is_coded)
    slab = next(s for s in request.store.allocator.slabs() if s.layout == group.layout)
    page = slab.data[0]
    page[group.layout.key_offset : group.layout.radius_offset] ^= 0x55
    assert (decode_attention(request) - before).abs().max() > 1e-4


def test_slack_bytes_do_not_matter():
    case = CacheCase(mix="k2v3", num_tokens=50, tail_tokens=0)
    request = make_request(case, OPTIONS["plain"])
    before = decode_attention(request)
    for slab in request.store.allocator.slabs():
        layout = slab.layout
        if not layout.tier.is_coded:
            continue
        for page in slab.data:
            radii = page[layout.radius_offset : layout.scale_offset]
            radii[46:] = 0xFF
            scales = page[layout.scale_offset : layout.value_offset]
            scales[46:] = 0xFF
    assert torch.equal(decode_attention(request), before)


def test_empty_sequence_gives_zero():
    request = make_request(CacheCase(num_tokens=4, tail_tokens=0), OPTIONS["plain"])
    request.store.create(1)
    empty = DecodeRequest(request.store, 1, 0, request.query, request.positions, request.options)
    assert torch.equal(decode_attention(empty), torch.zeros_like(empty.query))


def test_ragged_batch_equals_single_sequences():
    case = CASES["mixed"]
    store = build_store(case)
    store.fork(0, 1)
    rope = rope_of(store)
    keys, values, query = random_states(case.geometry(), rope, 3, first=307, seed=4)
    store.append(1, 0, keys, values)
    batch = torch.stack([query[:, :1], query[:, 2:]])
    got = decode_attention_batch(store, [0, 1], 0, batch, OPTIONS["plain"])
    for row, position in ((0, 306), (1, 309)):
        request = DecodeRequest(
            store, row, 0, batch[row], torch.tensor([position]), OPTIONS["plain"]
        )
        torch.testing.assert_close(got[row].double(), dense_oracle(request), rtol=1e-5, atol=5e-6)


def test_merging_ignores_order_and_empty_parts():
    torch.manual_seed(0)
    parts = [PartialAttention(torch.randn(2, 3, 4), torch.randn(2, 3)) for _ in range(4)]
    parts.append(PartialAttention(torch.zeros(2, 3, 4), torch.full((2, 3), -torch.inf)))
    one = merge_partials(parts)
    other = merge_partials(parts[::-1])
    torch.testing.assert_close(one.output, other.output)
    torch.testing.assert_close(one.lse, other.lse)
    torch.testing.assert_close(merge_partials(parts[:4]).output, one.output)
    with pytest.raises(ValueError, match="at least one"):
        merge_partials([])


def test_bad_requests_are_named():
    request = make_request(CASES["one-token"], OPTIONS["plain"])
    with pytest.raises(ValueError, match=r"\[6, queries, 64\]"):
        DecodeRequest(
            request.store, 0, 0, torch.zeros(4, 1, 64), request.positions, request.options
        )
    with pytest.raises(ValueError, match="not finite"):
        DecodeRequest(
            request.store, 0, 0, request.query * torch.nan, request.positions, request.options
        )
    with pytest.raises(ValueError, match="scale"):
        AttentionOptions(scale=0.0)
    with pytest.raises(ValueError, match="'warp'"):
        get_backend("warp")
    with pytest.raises(ValueError, match="sink_logits"):
        decode_attention(request, sink_logits=torch.zeros(2))


def test_a_missing_backend_raises_and_auto_says_so(monkeypatch, caplog):
    import sphkv.attention.api as api

    def missing():
        raise ImportError("extension was not built")

    monkeypatch.setattr(api, "_native", missing)
    monkeypatch.setitem(api.BACKENDS, "native", missing)
    with pytest.raises(BackendUnavailableError, match="not built"):
        get_backend("native")
    assert get_backend("auto").name == "reference"
    assert "not built" in caplog.text
