# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend over real stores, its kernels run on the CPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from sphkv.attention.cuda.backend import CudaBackend
from sphkv.attention.request import AttentionOptions, DecodeRequest
from sphkv.core.tiers import TierSpec, TierTable, coded_tier
from sphkv.testing.cases import CacheCase, build_store, random_states, rope_of
from sphkv.testing.oracle import dense_oracle

CPU = torch.device("cpu")
# Half-precision products and weights, as on the GPU (benchmarks/gpu_check.py).
BOUND = 5e-3
TIERS = TierTable(
    (
        TierSpec("drop", "drop", 0.0, 0, 0),
        coded_tier(1.0, 2),
        coded_tier(2.0, 3),
        coded_tier(3.0, 4),
        TierSpec("max", "dense", 16.0, 16, 16),
    )
)


@pytest.mark.parametrize(
    ("mix", "options", "num_queries"),
    [
        ("runs", AttentionOptions(scale=0.1), 1),
        ("k2v3", AttentionOptions(scale=0.1, window=300), 3),
        ("k3v4", AttentionOptions(scale=0.3, softcap=5.0), 1),
    ],
)
def test_stores_are_read_right(on_the_host, mix, options, num_queries):
    on_the_host()
    case = CacheCase(tiers=TIERS, mix=mix, num_tokens=700)
    backend = CudaBackend(CPU)
    store = build_store(case, order=backend.page_order)
    end = store.num_tokens(0)
    first = end - num_queries
    _, _, query = random_states(case.geometry(), rope_of(store), num_queries, first=first, seed=50)
    request = DecodeRequest(store, 0, 0, query, torch.arange(first, end), options)
    expected = dense_oracle(request)
    error = (backend.attend(request).output - expected).norm() / expected.norm()
    assert float(error) < BOUND
