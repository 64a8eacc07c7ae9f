# SPDX-License-Identifier: Apache-2.0
"""Fused encoding against the codec: the same bytes, but for ties that rounding decides."""

import functools
from dataclasses import fields

import numpy as np
import pytest
import torch

from sphkv.codec.states import SphericalCodec
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import TierSpec, TierTable, coded_tier
from sphkv.store.config import StoreConfig
from sphkv.store.layout import PageLayout, PageView, write_pages
from sphkv.store.order import CodecOnly
from sphkv.store.paging import PageRows, PositionMode
from sphkv.testing import cases
from sphkv.testing.cases import CacheCase, build_store, random_calibration, random_states

pytest.importorskip("triton", reason="Triton is not installed (the extra sphkv[gpu])")

from sphkv.attention.triton.encode import TritonCopier, TritonEncoder

# Codes that may differ by rounding: a distance or a ratio on an edge between two codes.
TIES = 2e-3
RUN_TIERS = TierTable(
    (
        TierSpec("drop", "drop", 0.0, 0, 0),
        coded_tier(1.0, 2, page_tokens=32),
        coded_tier(2.0, 4, page_tokens=32),
        TierSpec("max", "dense", 16.0, 16, 16),
    )
)


def pages_of(tier, head_dim, *, count, dtype=torch.float32):
    """The same two pages (one per head) from codec and kernel."""
    case = CacheCase(head_dim=head_dim, num_kv_heads=2, group_size=2)
    geometry = case.geometry()
    rope = RopeSpec.from_config({"rope_theta": 10_000.0}, head_dim)
    codec = SphericalCodec(random_calibration(geometry, rope))
    tokens = tier.page_tokens
    keys, values, _ = random_states(geometry, rope, tokens, first=77)
    positions = torch.arange(77, 77 + tokens).expand(2, -1).contiguous()
    counts = torch.tensor([tokens, count])
    rows = PageRows(positions, counts, torch.zeros(2, tokens, dtype=torch.bool))
    live = rows.live()[..., None]
    keys, values = (keys * live).to(dtype), (values * live).to(dtype)
    heads = torch.arange(2)
    layout = PageLayout(1, tier, head_dim, PositionMode.CONTIGUOUS)
    encoded = codec.encode(0, tier, keys, values, positions, head_ids=heads, counts=counts)
    got = TritonEncoder().encode(layout, 0, codec, (keys, values), rows, heads)
    return layout, write_pages(layout, encoded, rows), got


@pytest.mark.parametrize(
    ("tier", "head_dim", "dtype"),
    [
        (coded_tier(2.0, 4), 64, torch.bfloat16),
        (coded_tier(4.0, 3, page_tokens=64), 32, torch.float32),
        (coded_tier(1.0, 2, page_tokens=32), 128, torch.bfloat16),
        (coded_tier(1.5, 8, page_tokens=32), 80, torch.float32),
        (coded_tier(1.0, 16, page_tokens=32), 64, torch.bfloat16),
    ],
)
def test_writes_the_bytes_of_the_codec(tier, head_dim, dtype):
    layout, expected, got = pages_of(tier, head_dim, count=tier.page_tokens - 5, dtype=dtype)
    right, ours = PageView(layout, expected), PageView(layout, got)
    ours.check()
    assert torch.equal(right.counts(), ours.counts())
    assert torch.equal(right.positions(), ours.positions())
    for name in ("key_codes", "radius_code", "scale_code"):
        if name == "scale_code" and not tier.has_value_codes:
            continue
        one, other = getattr(right, name)(), getattr(ours, name)()
        # one tie is allowed whatever the number of codes
        assert int((one != other).sum()) <= max(1, TIES * one.numel()), name
    if tier.has_value_codes:
        assert float((right.value_codes() != ours.value_codes()).float().mean()) <= TIES
        torch.testing.assert_close(ours.value_scale(), right.value_scale(), rtol=1e-2, atol=1e-4)
    else:
        assert torch.equal(right.dense_values(), ours.dense_values())
    torch.testing.assert_close(ours.radius(), right.radius(), rtol=1e-2, atol=1e-4)


def test_slack_is_zero_and_layouts_it_cannot_take_are_left_to_the_codec():
    layout, expected, got = pages_of(coded_tier(1.0, 4, page_tokens=32), 64, count=3)
    at = slice(layout.key_offset, layout.scale_offset)
    assert torch.equal(expected[1, at] == 0, got[1, at] == 0)
    assert pages_of(coded_tier(1.0, 4, page_tokens=96), 64, count=50)[2] is None


def test_a_store_encodes_with_the_kernels_when_it_is_told_to():
    case = CacheCase(mix="k1v2", num_tokens=140, num_kv_heads=1)
    plain, fused = build_store(case), build_store(case, kernels=TritonEncoder())
    for one, other in zip(plain.pages(0, 0), fused.pages(0, 0), strict=True):
        left, right = plain.view(one).pages, fused.view(other).pages
        assert left.shape == right.shape
        assert float((left != right).float().mean()) <= TIES
    assert plain.live_bytes == fused.live_bytes
    assert fused.ledger().total == sum(tensor.nbytes for tensor in fused.live_tensors())


class OnlyCopies(CodecOnly):
    """Leaves encoding to the codec and copies pages with the kernel."""

    def copier(self, device):
        return TritonCopier(device)


def test_pages_are_copied_listed_and_moved_by_address(monkeypatch):
    """One launch for all slabs does what torch does slab by slab."""
    monkeypatch.setattr(cases, "StoreConfig", functools.partial(StoreConfig, max_slab_pages=3))
    case = CacheCase(tiers=RUN_TIERS, mix="runs", num_tokens=320, tail_tokens=7, num_layers=2)
    plain, copied = build_store(case), build_store(case, kernels=OnlyCopies())
    for store in (plain, copied):
        listed = store.page_list(0)
        coded = (listed.tier_ids == 1).nonzero()[:, 0][::2]
        store.drop_listed(0, listed.layer_ids[coded], listed.page_ids[coded])
        assert store.compact() is not None
        store.forget_page_list(0)
    ours, right = copied.page_list(0), plain.page_list(0)
    for field in fields(ours):
        assert torch.equal(getattr(ours, field.name), getattr(right, field.name)), field.name
    for layer in range(2):
        for a, b in zip(plain.pages(0, layer), copied.pages(0, layer), strict=True):
            assert torch.equal(plain.view(a).pages, copied.view(b).pages)
    with pytest.raises(ValueError, match="multiple of 4"):
        TritonCopier(torch.device("cpu")).copy(np.zeros(1, int), np.zeros(1, int), 6)


@pytest.mark.parametrize("is_by_token", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_runs_are_gathered_from_where_they_are_and_none_is_zeros(dtype, is_by_token):
    layers = [torch.randn(2, 80, 48).to(dtype) for _ in range(3)]
    if is_by_token:
        # heads side by side, as a model's projection leaves them
        layers = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in layers]
    wanted = [(0, 1, 2), (2, 0, 4), None, (1, 1, 0), (1, 0, 3)]
    sources, right = [], []
    for each in wanted:
        if each is None:
            sources.append(0)
            right.append(torch.zeros(16, 48, dtype=dtype))
            continue
        layer, head, run = each
        part = layers[layer][head, 16 * run : 16 * run + 16]
        sources.append(part.data_ptr())
        right.append(part)
    found = torch.full((5, 16, 48), torch.nan, dtype=dtype)
    copier = TritonCopier(torch.device("cpu"))
    size = found.element_size()
    sizes = {"piece": 48 * size, "stride": layers[0].stride(1) * size}
    copier.gather(torch.tensor(sources), found, **sizes)
    assert torch.equal(found, torch.stack(right))
    copier.gather(torch.tensor(sources[:0]), found[:0], **sizes)
    with pytest.raises(ValueError, match="4 copies of pieces of"):
        copier.gather(torch.tensor(sources[:4]), found.view(-1)[:98], **sizes)
    with pytest.raises(ValueError, match="stride must be a multiple of 4, got 98"):
        copier.gather(torch.tensor(sources), found, piece=48 * size, stride=98)
