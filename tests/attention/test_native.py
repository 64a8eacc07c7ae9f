# SPDX-License-Identifier: Apache-2.0
"""Native kernels against the float64 answer on identical codes."""

import pytest
import torch

from sphkv.attention.api import decode_attention
from sphkv.attention.request import AttentionOptions, DecodeRequest
from sphkv.core.tiers import TierSpec, TierTable, coded_tier
from sphkv.testing.cases import CacheCase, build_store, random_states, rope_of
from sphkv.testing.oracle import dense_oracle

pytest.importorskip("sphkv._kernels", reason="the native kernels are not built")

from sphkv.attention.native.backend import NativeBackend

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
ODD_SLOTS = TierTable((DROP, coded_tier(1.3125, 2), coded_tier(2.0625, 3), DENSE))

CASES = {
    "mixed": CacheCase(),
    "runs": CacheCase(mix="runs", num_tokens=700),
    "value-bits": CacheCase(tiers=ALL_VALUE_BITS, num_tokens=500),
    "odd-slots": CacheCase(tiers=ODD_SLOTS),
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
    "plain": AttentionOptions(scale=0.125),  # natural at head_dim 64
    "window": AttentionOptions(scale=0.125, window=90),
    "softcap": AttentionOptions(scale=0.3, softcap=5.0),
}
# Queries and softmax weights are rounded to eight bits in blocks with their own scale; tiers
# err by a tenth and more, so this stays far below what the code itself costs.
INT8_ERROR = 4e-3
FLOAT32_ERROR = 1e-5


def make_request(case, options, num_queries=1):
    store = build_store(case)
    rope = rope_of(store)
    end = store.num_tokens(0)
    first = max(0, end - num_queries)
    _, _, query = random_states(case.geometry(), rope, end - first, first=first, seed=50)
    return DecodeRequest(store, 0, 0, query, torch.arange(first, end), options)


def relative_error(got, expected):
    return float((got - expected).norm() / expected.norm().clamp(min=1e-9))


def backends():
    return (
        (NativeBackend(num_threads=2), INT8_ERROR),
        (NativeBackend(num_threads=1), INT8_ERROR),
        (NativeBackend(precision="float32"), FLOAT32_ERROR),
    )


@pytest.mark.parametrize("name", CASES)
def test_equals_the_answer_over_decoded_keys(name):
    case = CASES[name]
    # rounding errors grow with the logits, so each head dimension has the scale models give it
    request = make_request(case, AttentionOptions(scale=case.head_dim**-0.5))
    expected = dense_oracle(request)
    for backend, bound in backends():
        got = decode_attention(request, backend=backend)
        assert relative_error(got, expected) <= bound, backend.variant


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("num_queries", [1, 5, 40])
def test_window_softcap_and_several_queries(options, num_queries):
    request = make_request(CASES["mixed"], OPTIONS[options], num_queries)
    expected = dense_oracle(request)
    for backend, bound in backends():
        got = decode_attention(request, backend=backend)
        assert relative_error(got, expected) <= bound, backend.variant


def test_log_sum_exp_and_sinks():
    request = make_request(CASES["mixed"], OPTIONS["plain"])
    sinks = torch.linspace(-3, 6, 6)
    expected = dense_oracle(request, sink_logits=sinks)
    for backend, bound in backends():
        got = decode_attention(request, sink_logits=sinks, backend=backend)
        assert relative_error(got, expected) <= bound, backend.variant


def test_pages_that_appear_later_are_seen():
    """Addresses are cached by table version; appending until a page seals must refresh them."""
    case = CacheCase(mix="k2v3", num_tokens=140, tail_tokens=1)
    request = make_request(case, OPTIONS["plain"])
    backend = NativeBackend()
    backend.attend(request)
    rope = rope_of(request.store)
    keys, values, query = random_states(case.geometry(), rope, 200, first=141, seed=8)
    request.store.append(0, 0, keys, values)
    later = DecodeRequest(request.store, 0, 0, query[:, -1:], torch.tensor([340]), request.options)
    got = decode_attention(later, backend=backend)
    assert relative_error(got, dense_oracle(later)) <= INT8_ERROR


def test_slack_bytes_do_not_matter():
    request = make_request(CacheCase(mix="k2v3", num_tokens=50, tail_tokens=0), OPTIONS["plain"])
    backend = NativeBackend()
    before = decode_attention(request, backend=backend)
    for slab in request.store.allocator.slabs():
        layout = slab.layout
        if layout.tier.is_coded:
            for page in slab.data:
                page[layout.radius_offset : layout.scale_offset][46:] = 0xFF
                page[layout.scale_offset : layout.value_offset][46:] = 0xFF
    torch.testing.assert_close(decode_attention(request, backend=backend), before)


def test_eight_bit_arithmetic_costs_little_beside_the_code():
    """Mean squared error added by rounding is under 2% of the tier's own."""
    for tier in ("k1v2", "k2v3", "k3v4", "k4v4"):
        case = CacheCase(mix=tier, num_tokens=900, tail_tokens=0)
        request = make_request(case, OPTIONS["plain"])
        stored = dense_oracle(request)
        rope = rope_of(request.store)
        keys, values, _ = random_states(case.geometry(), rope, 900, seed=case.seed)
        logits = torch.einsum("hgd,htd->hgt", request.query.reshape(2, 3, 64), keys) * 0.125
        exact = (logits.softmax(-1) @ values).reshape(6, 1, 64)
        codec_error = (stored - exact).square().mean()
        got = decode_attention(request, backend=NativeBackend())
        assert (got - stored).square().mean() <= 0.02 * codec_error, tier


def test_bad_choices_are_named():
    with pytest.raises(ValueError, match="'int4'"):
        NativeBackend(precision="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'mmx'"):
        NativeBackend(variant="mmx")
    with pytest.raises(ValueError, match="0"):
        NativeBackend(num_threads=0)
