# SPDX-License-Identifier: Apache-2.0
"""Triton kernels against the float64 answer on identical codes; without a GPU, interpreted."""

import pytest
import torch

from sphkv.attention.api import decode_attention, get_backend
from sphkv.attention.reference import ReferenceBackend
from sphkv.attention.request import AttentionOptions, DecodeRequest
from sphkv.core.contract import LayerContract
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import TierSpec, TierTable, coded_tier
from sphkv.testing.cases import CacheCase, build_store, random_states, rope_of
from sphkv.testing.oracle import dense_oracle

pytest.importorskip("triton", reason="Triton is not installed (the extra sphkv[gpu])")

from sphkv.attention.cuda.batch import can_capture

from sphkv.attention.triton.backend import TritonBackend
from sphkv.attention.triton.dense import TailList, launch_dense
from sphkv.attention.triton.rows import PartSlots, QueryRows

DROP = TierSpec("drop", "drop", 0.0, 0, 0)
DENSE = TierSpec("max", "dense", 16.0, 16, 16)
ALL_VALUE_BITS = TierTable(
    (
        DROP,
        coded_tier(1.0, 2),
        coded_tier(1.5, 3),
        coded_tier(2.0, 4),
        coded_tier(3.0, 8),
        coded_tier(4.25, 16),
        DENSE,
    )
)
SHORT_PAGES = TierTable(
    (
        DROP,
        coded_tier(1.3125, 2, page_tokens=32),
        coded_tier(2.0625, 3, page_tokens=96),
        TierSpec("max", "dense", 16.0, 16, 48),
    )
)
CASES = {
    "mixed": CacheCase(num_tokens=200),
    "runs": CacheCase(mix="runs", num_tokens=250),
    "value-bits": CacheCase(tiers=ALL_VALUE_BITS, num_tokens=180, num_kv_heads=1),
    "short-pages": CacheCase(tiers=SHORT_PAGES, num_tokens=160),
    "one-token": CacheCase(num_tokens=1, tail_tokens=0),
    "tail-only": CacheCase(num_tokens=0, tail_tokens=5),
    "page-less-one": CacheCase(mix="k2v3", num_tokens=131, tail_tokens=0),
    "page-plus-one": CacheCase(mix="k2v3", num_tokens=133, tail_tokens=1),
    "group-16": CacheCase(mix="k2v3", group_size=16, num_kv_heads=1),
    "d80": CacheCase(mix="k2v3", head_dim=80, group_size=4, num_kv_heads=1),
    "d256": CacheCase(mix="k1v2", head_dim=256, group_size=2, num_kv_heads=1, num_tokens=140),
    "many-pages": CacheCase(mix="k1v2", num_tokens=900, num_kv_heads=1, seed=3),
}
OPTIONS = {
    "plain": AttentionOptions(scale=0.125),
    "window": AttentionOptions(scale=0.125, window=90),
    "softcap": AttentionOptions(scale=0.3, softcap=5.0),
}
# Twice the float32 reference's own error, plus the float32 noise of a different summation order.
FLOOR = 3e-6


def make_request(case, options, num_queries=1, rope=None):
    store = build_store(case, rope=rope)
    end = store.num_tokens(0)
    first = max(0, end - num_queries)
    _, _, query = random_states(case.geometry(), rope_of(store), end - first, first=first, seed=50)
    return DecodeRequest(store, 0, 0, query, torch.arange(first, end), options)


def check(request, backend=None):
    expected = dense_oracle(request)
    size = expected.norm().clamp(min=1e-9)
    own = (ReferenceBackend().attend(request).output - expected).norm() / size
    got = (backend or TritonBackend()).attend(request)
    assert (got.output - expected).norm() / size <= 2 * own + FLOOR
    lse = ReferenceBackend().attend(request).lse
    torch.testing.assert_close(got.lse, lse, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_answer_over_decoded_keys(name):
    case = CASES[name]
    check(make_request(case, AttentionOptions(scale=case.head_dim**-0.5)))


@pytest.mark.parametrize("options", ["window", "softcap"])
@pytest.mark.parametrize("num_queries", [1, 7])
def test_window_softcap_and_several_queries(options, num_queries):
    check(make_request(CASES["mixed"], OPTIONS[options], num_queries))


def test_more_query_rows_than_one_program_takes():
    check(make_request(CASES["page-plus-one"], OPTIONS["plain"], num_queries=30))


@pytest.mark.parametrize("config", [{"rope_theta": 1e4, "partial_rotary_factor": 0.5}, None])
def test_rotary_variants(config):
    rope = RopeSpec.unrotated(64) if config is None else RopeSpec.from_config(config, 64)
    check(make_request(CASES["page-plus-one"], OPTIONS["plain"], rope=rope))


def test_far_positions_turn_exactly():
    """A phase in float32 would be off by hundredths of a radian here."""
    case = CacheCase(mix="k2v3", num_tokens=0, tail_tokens=0, num_kv_heads=1)
    store, first = build_store(case), 1_900_000_000
    rope = rope_of(store)
    keys, values, query = random_states(case.geometry(), rope, 200, first=first, seed=1)
    tiers = store.config.tiers
    contract = LayerContract(
        torch.full((1, 200), tiers.id_of("k2v3"), dtype=torch.uint8),
        torch.zeros(1, 200, dtype=torch.bool),
    )
    store.write(0, 0, contract, keys, values, torch.arange(first, first + 200))
    at = torch.tensor([first + 199])
    check(DecodeRequest(store, 0, 0, query[:, -1:], at, OPTIONS["plain"]))


def test_slack_bytes_do_not_matter():
    request = make_request(CacheCase(mix="k2v3", num_tokens=50, tail_tokens=0), OPTIONS["plain"])
    before = decode_attention(request, backend=TritonBackend())
    for slab in request.store.allocator.slabs():
        layout = slab.layout
        for page in slab.data:
            if layout.tier.is_coded:
                page[layout.radius_offset : layout.scale_offset][46:] = 0xFF
                page[layout.scale_offset : layout.value_offset][46:] = 0xFF
            else:
                page[layout.key_offset : layout.value_offset].view(torch.int16)[4 * 64 :] = 0x7FFF
                page[layout.value_offset :].view(torch.int16)[4 * 64 :] = 0x7FFF
    assert torch.equal(decode_attention(request, backend=TritonBackend()), before)


def test_pages_that_appear_later_are_seen():
    case = CacheCase(mix="k2v3", num_tokens=140, tail_tokens=1)
    request = make_request(case, OPTIONS["plain"])
    backend = TritonBackend()
    backend.attend(request)
    rope = rope_of(request.store)
    keys, values, query = random_states(case.geometry(), rope, 200, first=141, seed=8)
    request.store.append(0, 0, keys, values)
    later = DecodeRequest(request.store, 0, 0, query[:, -1:], torch.tensor([340]), request.options)
    check(later, backend)


def test_an_empty_sequence_gives_zero_and_no_queries_give_nothing():
    request = make_request(CASES["one-token"], OPTIONS["plain"])
    request.store.create(1)
    empty = DecodeRequest(request.store, 1, 0, request.query, request.positions, request.options)
    got = TritonBackend().attend(empty)
    assert torch.equal(got.output, torch.zeros_like(empty.query))
    assert bool(torch.isneginf(got.lse).all())
    none = request.query[:, :0]
    nothing = DecodeRequest(request.store, 0, 0, none, request.positions[:0], request.options)
    assert TritonBackend().attend(nothing).output.shape == (6, 0, 64)


def test_a_new_state_written_behind_the_tail_is_attended_to_with_dense_pages():
    """What a captured step does: append where the GPU counts, then pages and tail in one launch."""
    case = CacheCase(mix="max", num_tokens=40, tail_tokens=9)
    store = build_store(case)
    rope = rope_of(store)
    keys, values, query = random_states(case.geometry(), rope, 1, first=49, seed=6)
    tail = store.tail(0, 0)
    tails = TailList.of([tail], torch.device("cpu"))
    tails.extents[:, 0] += 1
    buffer = store._get(0).tails[0]
    assert buffer is not None
    buffer.keys[:, tail.num_tokens], buffer.values[:, tail.num_tokens] = keys[:, 0], values[:, 0]
    rows = QueryRows(query[None], torch.tensor([[49]]), 2, OPTIONS["plain"])
    parts = PartSlots.empty(rows, 1)
    group = store.pages(0, 0)[0]
    request = DecodeRequest(store, 0, 0, query, torch.tensor([49]), OPTIONS["plain"])
    pages = TritonBackend().page_list(request, group)
    launch_dense((pages.addresses, pages.starts), pages.layout, tails, rows, parts)
    assert store.make_room([0]) is False
    store.absorb([0])
    expected = ReferenceBackend().attend(request)
    torch.testing.assert_close(parts.output.reshape(6, 1, 64), expected.output)
    torch.testing.assert_close(parts.lse.reshape(6, 1), expected.lse)


def test_only_the_hopper_kernel_is_captured():
    assert not can_capture(TritonBackend(), coded_tier(2.0, 4), 64)
    assert not can_capture(ReferenceBackend(), DENSE, 64)


def test_it_has_a_name_and_refuses_other_precisions():
    assert get_backend("triton").name == "triton"
    with pytest.raises(ValueError, match="'bf16'"):
        TritonBackend(precision="bf16")
