# SPDX-License-Identifier: Apache-2.0
"""What only the CUDA backend promises, its kernels run on the CPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from sphkv.attention.cuda.backend import CudaBackend
from sphkv.attention.cuda.kernel_cache import DecodeKernels
from sphkv.attention.request import DecodeRequest
from sphkv.testing.attention_cases import CASES, AttentionCase, assert_attention, make_request
from sphkv.testing.cases import CacheCase

CPU = torch.device("cpu")


def test_a_store_in_token_order_is_left_to_triton(on_the_host, monkeypatch):
    on_the_host()
    monkeypatch.setattr(DecodeKernels, "get", lambda *_: pytest.fail("not the Hopper kernel's"))
    assert_attention(make_request(CASES["page"]), CudaBackend(CPU), precision="float32")


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_queries_inside_pages_see_only_what_precedes_them(on_the_host, softcap):
    """A query of every page, the first of all included: nobody else is asked to answer."""
    on_the_host()
    backend = CudaBackend(CPU)
    case = AttentionCase(CacheCase(mix="k2v3", num_tokens=400), softcap=softcap, num_queries=407)
    every = make_request(case, order=backend.page_order)
    chosen = torch.arange(0, 407, 29)
    request = DecodeRequest(every.store, 0, 0, every.query[:, chosen], chosen, every.options)
    assert_attention(request, backend, precision="half")


def test_more_queries_and_rows_than_a_kernel_was_made_for(on_the_host):
    """Room for a larger batch, and for later positions, is made when it is asked for."""
    on_the_host()
    backend = CudaBackend(CPU)
    case = AttentionCase(CacheCase(mix="k2v3", num_tokens=133), num_queries=20)
    request = make_request(case, order=backend.page_order)
    one = DecodeRequest(
        request.store, 0, 0, request.query[:, -1:], request.positions[-1:], request.options
    )
    assert_attention(one, backend, precision="half")
    before = backend.table_bytes(request.codec())
    assert_attention(request, backend, precision="half")
    # a larger batch needs a larger workspace, not more tables
    assert backend.table_bytes(request.codec()) == before > 0
