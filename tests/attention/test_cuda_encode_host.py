# SPDX-License-Identifier: Apache-2.0
"""The encode kernels' own source on the CPU: the codec's bytes, in fragment order."""

import pytest
import torch

from sphkv.attention.cuda.encode import CudaEncoder
from sphkv.attention.cuda.fragments import to_fragment_order
from sphkv.codec.rope import RopeSpec
from sphkv.codec.states import SphericalCodec
from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import coded_tier
from sphkv.store.layout import PageLayout, PageView, write_pages
from sphkv.store.paging import PageRows, PositionMode
from sphkv.testing.cases import random_calibration, random_states

# Rounding decides ties, as on the GPU (benchmarks/gpu_encode.py).
MOST_UNLIKE = 2e-3


@pytest.mark.parametrize(
    ("head_dim", "key_bits", "value_bits", "mode"),
    [
        (128, 2.0, 4, PositionMode.CONTIGUOUS),
        (64, 3.0, 3, PositionMode.RUNS),
        (64, 2.0, 2, PositionMode.TOKENS),
        (128, 1.0, 8, PositionMode.CONTIGUOUS),
    ],
)
def test_bytes_are_those_of_the_codec(on_the_host, head_dim, key_bits, value_bits, mode):
    on_the_host()
    rope = RopeSpec.from_config({"rope_theta": 500000.0}, head_dim)
    geometry = KVGeometry(1, 2, 4, head_dim)
    codec = SphericalCodec(random_calibration(geometry, rope))
    tier = coded_tier(key_bits, value_bits)
    layout = PageLayout(1, tier, head_dim, mode)
    keys, values = (
        part.view(2, 2, 128, head_dim).flatten(0, 1).bfloat16()
        for part in random_states(geometry, rope, 256)[:2]
    )
    counts = torch.tensor([128, 77, 128, 1])
    rows = PageRows(
        torch.arange(256).view(2, 128).repeat(2, 1),
        counts,
        torch.rand(4, 128) < 0.1,
    )
    heads = torch.tensor([0, 0, 1, 1])
    given = (layout, 0, codec, (keys, values), rows, heads)
    found = CudaEncoder().encode(*given)
    encoded = codec.encode(0, tier, keys, values, rows.positions, head_ids=heads, counts=counts)
    right = to_fragment_order(PageView(layout, write_pages(layout, encoded, rows)))
    assert float((found != right).float().mean()) < MOST_UNLIKE
