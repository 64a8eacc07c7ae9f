# SPDX-License-Identifier: Apache-2.0
"""The encode kernels' own source on the CPU: the codec's bytes, in fragment order."""

import pytest
import torch

from sphkv.attention.cuda.encode import CudaEncoder
from sphkv.attention.cuda.fragments import to_fragment_order
from sphkv.codec.states import SphericalCodec
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import coded_tier
from sphkv.store.layout import PageLayout, PageView, write_pages
from sphkv.store.paging import PageRows, PositionMode
from sphkv.testing.cases import random_calibration, random_states

# Rounding decides ties, as on the GPU (benchmarks/gpu_encode.py).
MOST_UNLIKE = 2e-3


@pytest.mark.parametrize(
    ("head_dim", "key_bits", "value_bits", "mode", "size"),
    [
        (128, 2.0, 4, PositionMode.CONTIGUOUS, 128),
        (64, 3.0, 3, PositionMode.RUNS, 128),
        (64, 2.0, 2, PositionMode.TOKENS, 128),
        (128, 1.0, 8, PositionMode.CONTIGUOUS, 128),
        (128, 2.0, 2, PositionMode.RUNS, 64),
        (64, 3.0, 4, PositionMode.CONTIGUOUS, 64),
    ],
)
def test_bytes_are_those_of_the_codec(on_the_host, head_dim, key_bits, value_bits, mode, size):
    on_the_host()
    rope = RopeSpec.from_config({"rope_theta": 500000.0}, head_dim)
    geometry = KVGeometry(1, 2, 4, head_dim)
    codec = SphericalCodec(random_calibration(geometry, rope))
    tier = coded_tier(key_bits, value_bits, page_tokens=size)
    layout = PageLayout(1, tier, head_dim, mode)
    keys, values = (
        part.view(2, 2, size, head_dim).flatten(0, 1).bfloat16()
        for part in random_states(geometry, rope, 2 * size)[:2]
    )
    values[2, 5] *= 100.0  # makes the scales of its page coarse
    counts = torch.tensor([size, size // 2 + 13, size, 1])
    rows = PageRows(
        torch.arange(2 * size).view(2, size).repeat(2, 1),
        counts,
        torch.rand(4, size) < 0.1,
    )
    heads = torch.tensor([0, 0, 1, 1])
    given = (layout, 0, codec, (keys, values), rows, heads)
    found = CudaEncoder().encode(*given)
    encoded = codec.encode(0, tier, keys, values, rows.positions, head_ids=heads, counts=counts)
    right = to_fragment_order(PageView(layout, write_pages(layout, encoded, rows)))
    assert float((found != right).float().mean()) < MOST_UNLIKE


def test_pages_of_several_layers_at_once_are_those_of_each(on_the_host):
    """Tables of all layers lie in one, and those of a layer are a part of it."""
    on_the_host()
    rope = RopeSpec.from_config({"rope_theta": 500000.0}, 64)
    geometry = KVGeometry(3, 2, 4, 64)
    codec = SphericalCodec(random_calibration(geometry, rope))
    layout = PageLayout(1, coded_tier(3.0, 4), 64, PositionMode.RUNS)
    keys, values = (part.bfloat16() for part in random_states(geometry, rope, 128)[:2])
    layers = (2, 0, 1)
    rows = PageRows(
        torch.arange(128).repeat(2, 1), torch.tensor([128, 32]), torch.zeros(2, 128).bool()
    )
    heads, alone = torch.arange(2), CudaEncoder()
    right = [
        alone.encode(layout, layer, codec, (keys, values), rows, heads).clone() for layer in layers
    ]
    size = alone.table_bytes(codec)
    encoder, every = (
        CudaEncoder(),
        PageRows(
            *(
                part.repeat(3, *[1] * (part.dim() - 1))
                for part in (rows.positions, rows.counts, rows.flags)
            )
        ),
    )
    for layer in range(3):
        encoder.prepare_layout(codec, layer, layout, torch.device("cpu"))
    at = (torch.tensor(layers)[:, None] * 2 + heads).flatten()
    states = (keys.repeat(3, 1, 1), values.repeat(3, 1, 1))
    found = encoder.encode(layout, None, codec, states, every, at)
    assert torch.equal(found, torch.cat(right))
    # of grids, a layer may have had fewer planes
    assert size <= encoder.table_bytes(codec) < 2 * size
    again = encoder.encode(layout, 1, codec, (keys, values), rows, heads)
    assert torch.equal(again, right[2])


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_value_that_is_no_number_counts_as_zero(on_the_host, wrong):
    """A kernel cannot raise; it must not write beside its page or spoil other states either."""
    on_the_host()
    rope = RopeSpec.from_config({"rope_theta": 500000.0}, 64)
    geometry = KVGeometry(1, 1, 4, 64)
    codec = SphericalCodec(random_calibration(geometry, rope))
    layout = PageLayout(1, coded_tier(2.0, 4), 64, PositionMode.CONTIGUOUS)
    keys, values = (part[:, :128].bfloat16() for part in random_states(geometry, rope, 128)[:2])
    rows = PageRows(
        torch.arange(128)[None], torch.tensor([128]), torch.zeros(1, 128, dtype=torch.bool)
    )
    pages = []
    for number in (0.0, wrong):
        broken = values.clone()
        broken[0, 9] = 0.0
        broken[0, 9, 3] = number
        given = (layout, 0, codec, (keys, broken), rows, torch.tensor([0]))
        pages.append(CudaEncoder().encode(*given))
    assert torch.equal(*pages)
