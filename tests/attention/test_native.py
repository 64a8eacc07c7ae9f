# SPDX-License-Identifier: Apache-2.0
"""What only the native kernels promise; ``test_backends.py`` has what all do."""

import pytest
import torch

from sphkv.attention.api import decode_attention
from sphkv.attention.cuda.pages import FragmentOrder
from sphkv.attention.reference import ReferenceBackend
from sphkv.store.layout import HEADER_BYTES, PAGE_VERSION
from sphkv.store.order import PageOrder
from sphkv.testing.attention_cases import CASES, AttentionCase, assert_attention, make_request
from sphkv.testing.cases import CacheCase, dense_oracle, random_states, rope_of

kernels = pytest.importorskip("sphkv._kernels", reason="the native kernels are not built")

from sphkv.attention.native.backend import NativeBackend  # noqa: E402


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_share_the_work(num_threads):
    for name in ("mixed tiers", "chunk, window"):
        backend = NativeBackend(num_threads=num_threads)
        assert_attention(make_request(CASES[name]), backend, precision="int8")


def test_eight_bit_arithmetic_costs_little_beside_the_code():
    """Mean squared error added by rounding is under 2% of the tier's own."""
    for tier in ("k1v2", "k2v3", "k3v4", "k4v4"):
        case = CacheCase(mix=tier, num_tokens=900, tail_tokens=0)
        request = make_request(AttentionCase(case))
        stored = dense_oracle(request)
        rope = rope_of(request.store)
        keys, values, _ = random_states(case.geometry(), rope, 900, seed=case.seed)
        logits = torch.einsum("hgd,htd->hgt", request.query.reshape(2, 3, 64), keys) * 0.125
        exact = (logits.softmax(-1) @ values).reshape(6, 1, 64)
        codec_error = (stored - exact).square().mean()
        got = decode_attention(request, backend=NativeBackend())
        assert (got - stored).square().mean() <= 0.02 * codec_error, tier


@pytest.mark.parametrize("name", list(CASES))
def test_rebuilding_a_page_gives_the_same(name):
    """The rival that multiplies rebuilt states reads the same codes."""
    assert_attention(make_request(CASES[name]), NativeBackend(variant="rebuild"), precision="int8")


def test_the_extension_knows_the_header():
    assert (kernels.HEADER_BYTES, kernels.PAGE_VERSION) == (HEADER_BYTES, PAGE_VERSION)


def test_codebooks_are_counted_by_codec():
    backend = NativeBackend()
    one, other = make_request(CASES["mixed tiers"]), make_request(CASES["d128"])
    assert backend.table_bytes(one.codec()) == 0
    backend.attend(one)
    held = backend.table_bytes(one.codec())
    points = sum(
        one.codec().codebook(0, group.layout.tier).points.nbytes
        for group in one.store.pages(0, 0)
        if group.layout.tier.is_coded
    )
    assert held > points > 0
    backend.attend(other)
    assert backend.table_bytes(one.codec()) == held
    assert backend.table_bytes(other.codec()) > 0


def test_bad_choices_are_named():
    with pytest.raises(ValueError, match="'int4'"):
        NativeBackend(precision="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'mmx'"):
        NativeBackend(variant="mmx")
    with pytest.raises(ValueError, match="0"):
        NativeBackend(num_threads=0)


def test_pages_in_another_order_are_refused():
    class Ordered(ReferenceBackend):
        page_order: PageOrder | None = FragmentOrder()

    with pytest.raises(ValueError, match="own order"):
        NativeBackend().attend(make_request(CASES["page"], Ordered()))
