# SPDX-License-Identifier: Apache-2.0
"""Demotion with kernels: the states that the codec decodes, in the pages that the host plans."""

import functools

import pytest
import torch

from sphkv.codec.states import SphericalCodec
from sphkv.core.contract import LayerContract
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import RUN_TOKENS, TierSpec, TierTable, coded_tier
from sphkv.store.config import StoreConfig
from sphkv.store.layout import PageLayout, PageView, write_pages
from sphkv.store.order import PageRuns
from sphkv.store.paging import PageRows, PositionMode
from sphkv.store.store import PageStore
from sphkv.testing.cases import random_calibration, random_states

pytest.importorskip("triton", reason="Triton is not installed (the extra sphkv[gpu])")

from sphkv.attention.cuda.pages import FragmentCodec, FragmentOrder
from sphkv.attention.triton.encode import TritonCopier, TritonEncoder
from sphkv.attention.triton.recode import RunDecoder

# Decoded states are rounded to bfloat16 before they are coded again.
UNLIKE = 0.03
CALIBRATION = functools.cache(random_calibration)


def rope_of(head_dim, theta=10_000.0):
    return RopeSpec.from_config({"rope_theta": theta}, head_dim)


@pytest.mark.parametrize(
    ("tier", "head_dim", "is_plain", "mode"),
    [
        (coded_tier(2.0, 2), 64, False, PositionMode.RUNS),
        (coded_tier(3.0, 4), 128, False, PositionMode.CONTIGUOUS),
        (coded_tier(1.5, 3), 128, False, PositionMode.RUNS),
        (coded_tier(4.0, 8), 64, False, PositionMode.RUNS),
        (coded_tier(4.0, 16), 64, False, PositionMode.CONTIGUOUS),
        (coded_tier(2.0, 3, page_tokens=32), 64, True, PositionMode.RUNS),
        (coded_tier(3.0, 4, page_tokens=64), 32, True, PositionMode.CONTIGUOUS),
        (coded_tier(1.0, 16, page_tokens=32), 64, True, PositionMode.RUNS),
    ],
)
def test_decodes_the_states_of_the_codec(tier, head_dim, is_plain, mode):
    """Pages of several layers and heads, runs out of order, one page that is not full."""
    geometry, rope = KVGeometry(3, 2, 2, head_dim), rope_of(head_dim)
    codec = SphericalCodec(CALIBRATION(geometry, rope))
    tokens, runs = tier.page_tokens, tier.page_tokens // RUN_TOKENS
    layout = PageLayout(1, tier, head_dim, mode)
    layers, heads = torch.tensor([2, 0, 2, 1]), torch.tensor([1, 0, 1, 1])
    starts = 70_000 + RUN_TOKENS * torch.arange(4 * runs).view(4, runs) * (1 + int(mode))
    positions = (starts[..., None] + torch.arange(RUN_TOKENS)).flatten(1)
    counts = torch.tensor([tokens, tokens - RUN_TOKENS, tokens, RUN_TOKENS])
    rows = PageRows(positions, counts, torch.zeros(4, tokens, dtype=torch.bool))
    pages, expected = [], []
    for row, layer in enumerate(layers.tolist()):
        keys, values, _ = random_states(geometry, rope, tokens, first=int(starts[row, 0]))
        at = slice(row, row + 1)
        states = (keys[heads[at]], values[heads[at]], positions[at])
        encoded = codec.encode(layer, tier, *states, head_ids=heads[at], counts=counts[at])
        pages.append(write_pages(layout, encoded, rows.select(at)))
        view = PageView(layout, pages[-1])
        told = codec.decode(layer, tier, view.encoded(), positions[at], head_ids=heads[at])
        expected.append(torch.stack(told)[:, 0])
    data = torch.cat(pages)
    if not is_plain:
        data = FragmentOrder().to_slab(layout, data)
    # runs go to places in reverse, with one place left free
    live = torch.arange(runs) < (counts // RUN_TOKENS)[:, None]
    places = torch.full((4, runs), -1)
    places[live] = torch.arange(int(live.sum()), 0, -1)
    addresses = data.data_ptr() + layout.page_bytes * torch.arange(4)
    out = torch.zeros(2, (int(live.sum()) + 1) * RUN_TOKENS, head_dim, dtype=torch.bfloat16)
    decoder = RunDecoder(is_plain=is_plain)
    assert decoder.takes(layout)
    found = PageRuns(addresses, layers * 2 + heads, starts, places)
    decoder.decode(layout, codec, found, (out[0], out[1]))
    assert decoder.table_bytes(codec) > 0
    assert not out[:, :RUN_TOKENS].any()
    by_run = out.float().view(2, -1, RUN_TOKENS, head_dim)
    for row, right in enumerate(expected):
        own = by_run[:, places[row][live[row]]]
        right = right.view(2, runs, RUN_TOKENS, head_dim)[:, live[row]]
        torch.testing.assert_close(own, right, rtol=2**-7, atol=2e-3)


def test_layouts_that_it_does_not_decode():
    tier = coded_tier(2.0, 4)
    assert not RunDecoder.takes(PageLayout(1, tier, 128, PositionMode.TOKENS))
    assert not RunDecoder.takes(PageLayout(1, tier, 80, PositionMode.RUNS))
    assert not RunDecoder.takes(PageLayout(1, tier, 256, PositionMode.RUNS))


class HostFragments(FragmentCodec):
    """The codec of a Hopper GPU with pages on the CPU: copies and decodes, encodes nothing."""

    def copier(self, device):
        return TritonCopier(device)


class HostEncoder(TritonEncoder):
    """Leaves encoding to the codec, which is quicker here, and counts what is decoded."""

    num_decoded = 0

    def encode(self, *_):
        return None

    def decode_runs(self, *given):
        self.num_decoded += 1
        super().decode_runs(*given)


def tier_table(page_tokens):
    return TierTable(
        (
            TierSpec("drop", "drop", 0.0, 0, 0),
            coded_tier(1.0, 2, page_tokens=page_tokens),
            coded_tier(2.0, 3, page_tokens=page_tokens),
            coded_tier(3.0, 4, page_tokens=page_tokens),
            TierSpec("max", "dense", 16.0, 16, 16),
        )
    )


def mixed_store(page_tokens, *, num_tokens=640, **given):
    """Runs of three tiers, a fifth dropped, and dense ones of which the first is protected."""
    geometry, rope = KVGeometry(2, 2, 2, 64), rope_of(64)
    codec = SphericalCodec(CALIBRATION(geometry, rope))
    few = given.pop("has_few_kinds", False)
    config = StoreConfig(
        geometry, tier_table(page_tokens), seal_tier="k3v4", has_few_kinds=few, max_slab_pages=5
    )
    store = PageStore(config, codec, **given)
    store.create(0)
    for layer in range(2):
        keys, values, _ = random_states(geometry, rope, num_tokens, seed=layer)
        draw = torch.Generator().manual_seed(3 + layer)
        runs = torch.randint(0, 5, (2, num_tokens // RUN_TOKENS), generator=draw)
        runs[:, 0] = 4
        tier_ids = runs.repeat_interleave(RUN_TOKENS, 1).to(torch.uint8)
        protected = torch.zeros(2, num_tokens, dtype=torch.bool)
        protected[:, :4] = True
        contract = LayerContract(tier_ids, protected, RUN_TOKENS)
        store.write(0, layer, contract, keys, values, torch.arange(num_tokens))
    return store


def demote_all(store, tier_id):
    """Every page above a tier that is not protected."""
    pages = store.page_list(0)
    chosen = (pages.tier_ids > tier_id) & ~pages.is_protected
    store.demote_listed(0, pages.layer_ids[chosen].cpu(), pages.page_ids[chosen].cpu(), tier_id)
    store.forget_page_list(0)


def assert_alike(one, other, *, unlike=UNLIKE):
    """The same pages, but for codes that rounding decides."""
    assert one.state_counts(0) == other.state_counts(0)
    for layer in range(2):
        for left, right in zip(one.pages(0, layer), other.pages(0, layer), strict=True):
            assert left.layout == right.layout
            a, b = one.view(left), other.view(right)
            assert torch.equal(left.head_ids(), right.head_ids())
            order = [
                (heads << 32 | view.positions()[:, 0]).argsort()
                for view, heads in ((a, left.head_ids()), (b, right.head_ids()))
            ]
            a, b = a.select(order[0]), b.select(order[1])
            b.check()
            assert torch.equal(a.positions() * a.live(), b.positions() * b.live())
            assert torch.equal(a.counts(), b.counts())
            assert torch.equal(a.flags(), b.flags())
            if a.layout.tier.is_coded:
                live = a.live()[:, None]
                differs = (a.key_codes() != b.key_codes()) & live
                assert float(differs.float().mean()) <= unlike
                # another code has another radius
                is_far = (a.radius() - b.radius()).abs() > 0.02 * a.radius()
                assert float(is_far.float().mean()) <= unlike


@pytest.mark.parametrize("tier_id", [1, 2])
def test_pages_of_mixed_tiers_become_the_same_pages_by_kernels(tier_id):
    plain, kernels = mixed_store(32), HostEncoder()
    fused = mixed_store(32, kernels=kernels)
    before = fused.live_bytes
    for store in (plain, fused):
        demote_all(store, tier_id)
    # both position modes of every tier above
    assert kernels.num_decoded == 2 * (3 - tier_id)
    assert fused.live_bytes < before
    assert fused.ledger().total == sum(tensor.nbytes for tensor in fused.live_tensors())
    assert_alike(plain, fused)


def test_pages_in_fragment_order_become_the_same_pages_by_kernels():
    order = FragmentOrder()
    given = {"order": order, "has_few_kinds": True, "num_tokens": 1280}
    plain, fused = (
        mixed_store(128, **given),
        mixed_store(128, kernels=HostFragments(order), **given),
    )
    for store in (plain, fused):
        demote_all(store, 2)
        demote_all(store, 1)
    assert_alike(plain, fused, unlike=2 * UNLIKE)


def test_parts_of_runs_are_left_to_the_codec():
    plain, kernels = mixed_store(32), HostEncoder()
    fused = mixed_store(32, kernels=kernels)
    for store in (plain, fused):
        store.crop(0, 633)
        demote_all(store, 1)
    assert kernels.num_decoded == 0
    assert_alike(plain, fused)


def test_refuses_what_the_codec_refuses():
    store = mixed_store(32, kernels=HostEncoder())
    pages = store.page_list(0)
    own = pages.layer_ids == 0
    guarded = pages.page_ids[own & pages.is_protected]
    with pytest.raises(ValueError, match="hold protected states"):
        store.demote(0, 0, guarded, "k1v2")
    low = pages.page_ids[own & (pages.tier_ids == 1)]
    with pytest.raises(ValueError, match="is not above"):
        store.demote(0, 0, low, "k1v2")
    other = pages.page_ids[(pages.layer_ids == 1) & (pages.tier_ids == 3)]
    with pytest.raises(ValueError, match="not all of this layer"):
        store.demote(0, 0, other, "k1v2")
    fine = pages.page_ids[own & (pages.tier_ids == 3)]
    store.demote(0, 0, fine, "k1v2")
    assert store.table(0, 0).tag_counts() != store.table(0, 1).tag_counts()
