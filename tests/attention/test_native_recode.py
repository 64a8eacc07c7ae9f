# SPDX-License-Identifier: Apache-2.0
"""Pages made in native code: those that the codec makes, apart from what rounding decides."""

import functools

import pytest
import torch

from sphkv.codec.states import SphericalCodec
from sphkv.core.contract import LayerContract
from sphkv.core.devices import require_kernels
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import RUN_TOKENS, ladder
from sphkv.store.config import StoreConfig
from sphkv.store.pages import PageEncoder
from sphkv.store.paging import PositionMode
from sphkv.store.pool import PagePool
from sphkv.store.store import PageStore
from sphkv.testing.cases import CacheCase, build_store, random_calibration, random_states

pytest.importorskip("sphkv._kernels", reason="the native kernels are not built")

from sphkv.attention.native.backend import CodebookCache, NativeBackend, NativePageCodec

VARIANTS = require_kernels().recoders()
# Codes that another order of float32 sums decides otherwise; 4e-5 of them at most were seen.
UNLIKE = 1e-3
# Radii and scales lie between the least and the largest of a page, which round too; 0.002 seen.
UNLIKE_SCALARS = 0.02
TIERS = ("k1v2", "k2v3", "k3v4", "k4v8", "k2v16")


class Encoding(NativePageCodec):
    """Counts the pages that it makes of dense states."""

    def __init__(self, **given):
        super().__init__(CodebookCache(), **given)
        self.num_pages = 0

    def encode(self, *given):
        pages = super().encode(*given)
        self.num_pages += 0 if pages is None else len(pages)
        return pages


class Counting(NativePageCodec):
    """Counts the pages that it makes of others; the codec encodes dense states."""

    def __init__(self, **given):
        super().__init__(CodebookCache(), **given)
        self.num_pages = 0

    def encode(self, *_):
        return None

    def recode(self, sources, layout, codec, batch):
        self.num_pages += batch.num_pages
        return super().recode(sources, layout, codec, batch)


def case_of(head_dim=64, mix="runs", **given):
    tiers = ladder(head_dim, names=TIERS, page_tokens=given.pop("page_tokens", 64))
    shape = {"num_layers": 2, "num_tokens": 505, "tail_tokens": 3, "tiers": tiers, **given}
    return CacheCase(head_dim=head_dim, mix=mix, **shape)


def rope_of(case):
    return RopeSpec.from_config({"rope_theta": 10_000.0}, case.head_dim)


def demote_all(store, tier_id):
    """Every page above a tier, of all layers at once."""
    found = [
        (layer, group.flat_ids())
        for layer in range(store.config.geometry.num_layers)
        for group in store.pages(0, layer)
        if group.layout.tier_id > tier_id
    ]
    layers = torch.cat([torch.full_like(ids, layer) for layer, ids in found])
    store.demote_listed(0, layers, torch.cat([ids for _, ids in found]), tier_id)


def paired_views(one, other):
    """Layer, heads and views of the same pages of two stores."""
    for layer in range(one.config.geometry.num_layers):
        for left, right in zip(one.pages(0, layer), other.pages(0, layer), strict=True):
            assert left.layout == right.layout
            assert torch.equal(left.head_ids(), right.head_ids())
            yield layer, left.head_ids(), one.view(left), other.view(right)


def share(unlike):
    return float(unlike.float().mean())


def assert_alike(one, other):
    assert one.state_counts(0) == other.state_counts(0)
    assert one.live_bytes == other.live_bytes
    for _, _, a, b in paired_views(one, other):
        b.check()
        for name in ("counts", "flags", "positions"):
            assert torch.equal(getattr(a, name)(), getattr(b, name)()), name
        if not a.layout.tier.is_coded:
            assert torch.equal(a.pages, b.pages)
            continue
        dead = ~b.live()
        assert share(a.key_codes() != b.key_codes()) <= UNLIKE
        assert not b.key_codes().transpose(1, 2)[dead].any()
        torch.testing.assert_close(a.radius_affine(), b.radius_affine(), rtol=1e-3, atol=1e-6)
        assert share(a.radius_code() != b.radius_code()) <= UNLIKE_SCALARS
        assert not b.radius_code()[dead].any()
        if a.layout.tier.has_value_codes:
            assert share(a.value_codes() != b.value_codes()) <= UNLIKE
            assert not b.value_codes()[dead].any()
            torch.testing.assert_close(a.scale_affine(), b.scale_affine(), rtol=1e-3, atol=1e-6)
            assert share(a.scale_code() != b.scale_code()) <= UNLIKE_SCALARS
            assert not b.scale_code()[dead].any()


def squared_errors(case, one, other):
    """Squared error of keys and values of two stores against the states that were written."""
    rope, total = rope_of(case), torch.zeros(2, 2)
    for layer, heads, *views in paired_views(one, other):
        states = random_states(case.geometry(), rope, case.num_tokens, seed=case.seed + layer)
        for index, view in enumerate(views):
            if not view.layout.tier.is_coded:
                continue
            at, live = view.positions() * view.live(), view.live()
            told = one.codec(0).decode(layer, view.layout.tier, view.encoded(), at, head_ids=heads)
            for part in range(2):
                right = states[part][heads[:, None], at]
                total[index, part] += (told[part] - right)[live].square().sum()
    return total


@functools.cache
def plain_store(case, tier_id):
    store = build_store(case)
    demote_all(store, tier_id)
    return store


# per-token tiers need TOKENS pages, 505 tokens a last page that is part of a run
@pytest.mark.parametrize(
    ("head_dim", "mix", "tier"),
    [
        (64, "runs", "k1v2"),
        (64, "all", "k2v3"),
        (80, "runs", "k2v3"),
        (80, "all", "k1v2"),
        (128, "runs", "k3v4"),
        (128, "all", "k1v2"),
        (64, "k4v8", "k3v4"),
        (64, "max", "k4v8"),
    ],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_pages_of_mixed_tiers_become_the_pages_of_the_codec(head_dim, mix, tier, variant):
    case = case_of(head_dim, mix)
    tier_id, recoder = case.tiers.id_of(tier), Counting(variant=variant)
    plain, native = plain_store(case, tier_id), build_store(case, kernels=recoder)
    demote_all(native, tier_id)
    assert recoder.num_pages > 0
    assert_alike(plain, native)
    expected, found = squared_errors(case, plain, native)
    assert bool((found <= 1.001 * expected).all())
    assert bool((expected > 0).all())


def test_all_position_modes_come_and_go():
    modes = set()
    for mix in ("runs", "all", "k4v8"):
        case, recoder = case_of(mix=mix), Counting()
        store = build_store(case, kernels=recoder)
        before = {group.layout.position_mode for group in store.pages(0, 0)}
        demote_all(store, 1)
        assert recoder.num_pages > 0
        after = {group.layout.position_mode for group in store.pages(0, 0)}
        modes |= {("from", mode) for mode in before} | {("to", mode) for mode in after}
    assert modes == {(way, mode) for way in ("from", "to") for mode in PositionMode}


def test_pages_go_down_tier_by_tier():
    case = case_of(num_tokens=1000, page_tokens=128)
    plain, native = build_store(case), build_store(case, kernels=Counting())
    for tier in ("k3v4", "k2v3", "k1v2"):
        for store in (plain, native):
            demote_all(store, case.tiers.id_of(tier))
        assert_alike(plain, native)


@pytest.mark.parametrize("variant", VARIANTS)
def test_threads_change_no_byte(variant):
    stores = [
        build_store(case_of(), kernels=Counting(num_threads=n, variant=variant)) for n in (1, 3)
    ]
    for store in stores:
        demote_all(store, 1)
    for _, _, a, b in paired_views(*stores):
        assert torch.equal(a.pages, b.pages)


def test_some_pages_of_some_layers():
    """Layers and heads without a page that moves keep theirs."""
    case, recoder = case_of(num_layers=3, num_kv_heads=3), Counting()
    plain, native = build_store(case), build_store(case, kernels=recoder)
    for store in (plain, native):
        pages = store.page_list(0)
        above = (pages.tier_ids > 2) & (pages.layer_ids != 1)
        chosen = above.nonzero()[::3, 0]
        store.demote_listed(0, pages.layer_ids[chosen], pages.page_ids[chosen], 2)
    assert recoder.num_pages > 0
    assert_alike(plain, native)


def test_zero_states_stay_zero():
    case = case_of(num_tokens=0, tail_tokens=0, num_layers=1)
    stores = build_store(case), build_store(case, kernels=Counting())
    zeros = torch.zeros(case.num_kv_heads, 40, case.head_dim)
    tier_ids = torch.full((case.num_kv_heads, 40), case.tiers.id_of("k4v8"), dtype=torch.uint8)
    contract = LayerContract(tier_ids, torch.zeros_like(tier_ids, dtype=torch.bool))
    for store in stores:
        store.write(0, 0, contract, zeros, zeros, torch.arange(40))
        demote_all(store, 1)
    assert_alike(*stores)
    (group,) = stores[1].pages(0, 0)
    view = stores[1].view(group)
    assert not view.radius().any()
    assert not view.value_scale().any()


def test_refuses_what_the_codec_refuses():
    case = case_of()
    store = build_store(case, kernels=Counting())
    keys, values, _ = random_states(case.geometry(), rope_of(case), RUN_TOKENS)
    store.create(1)
    tier_ids = torch.full((case.num_kv_heads, RUN_TOKENS), case.tiers.dense_id, dtype=torch.uint8)
    contract = LayerContract(tier_ids, torch.ones_like(tier_ids, dtype=torch.bool))
    store.write(1, 0, contract, keys, values, torch.arange(RUN_TOKENS))
    with pytest.raises(ValueError, match="hold protected states"):
        store.demote(1, 0, store.page_list(1).page_ids, "k1v2")
    pages = store.page_list(0)
    own = pages.layer_ids == 0
    with pytest.raises(ValueError, match="is not above"):
        store.demote(0, 0, pages.page_ids[own & (pages.tier_ids == 1)], "k1v2")
    with pytest.raises(ValueError, match="not all of this layer"):
        store.demote(0, 0, pages.page_ids[~own & (pages.tier_ids == 3)], "k1v2")


def test_values_without_codes_are_left_to_the_codec():
    case, recoder = case_of(mix="max"), Counting()
    plain, native = build_store(case), build_store(case, kernels=recoder)
    for store in (plain, native):
        demote_all(store, case.tiers.id_of("k2v16"))
    assert recoder.num_pages == 0
    for _, _, a, b in paired_views(plain, native):
        assert torch.equal(a.pages, b.pages)


@pytest.mark.parametrize(
    ("head_dim", "mix", "page_tokens"),
    [
        (64, "runs", 64),
        (64, "all", 32),
        (80, "all", 64),
        (128, "runs", 128),
        (128, "k2v3", 32),
        (64, "k4v8", 128),
    ],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_states_become_the_pages_of_the_codec(head_dim, mix, page_tokens, variant):
    case, encoder = case_of(head_dim, mix, page_tokens=page_tokens), Encoding(variant=variant)
    plain, native = build_store(case), build_store(case, kernels=encoder)
    assert encoder.num_pages > 0
    assert_alike(plain, native)
    expected, found = squared_errors(case, plain, native)
    assert bool((found <= 1.001 * expected).all())
    assert bool((expected > 0).all())


@pytest.mark.parametrize("variant", VARIANTS)
def test_threads_change_no_byte_of_dense_states(variant):
    stores = [
        build_store(case_of(), kernels=Encoding(num_threads=n, variant=variant)) for n in (1, 3)
    ]
    for _, _, a, b in paired_views(*stores):
        assert torch.equal(a.pages, b.pages)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_states_of_half_precision_are_read_as_they_are(head_dim):
    case = case_of(head_dim, num_tokens=0, tail_tokens=0, num_layers=1)
    keys, values, _ = random_states(case.geometry(), rope_of(case), 70)
    keys[1, 40:] = 0.0
    tier_ids = torch.full((case.num_kv_heads, 70), case.tiers.id_of("k2v3"), dtype=torch.uint8)
    contract = LayerContract(tier_ids, torch.zeros_like(tier_ids, dtype=torch.bool))
    stores = build_store(case), *(build_store(case, kernels=Encoding()) for _ in range(2))
    half = keys.bfloat16(), values.bfloat16()
    whole = half[0].float(), half[1].float()
    for store, states in zip(stores, (half, half, whole), strict=True):
        store.write(0, 0, contract, *states, torch.arange(70))
    assert_alike(*stores[:2])
    for _, _, a, b in paired_views(*stores[1:]):
        assert torch.equal(a.pages, b.pages)


def test_dense_states_whose_values_have_no_codes_are_left_to_the_codec():
    case, encoder = case_of(mix="k2v16"), Encoding()
    plain, native = build_store(case), build_store(case, kernels=encoder)
    assert encoder.num_pages == 0
    for _, _, a, b in paired_views(plain, native):
        assert torch.equal(a.pages, b.pages)


def states_of(case, tier):
    """A layer's states, and a contract that puts all of them at a tier."""
    keys, values, _ = random_states(case.geometry(), rope_of(case), 64)
    tier_ids = torch.full((case.num_kv_heads, 64), case.tiers.id_of(tier), dtype=torch.uint8)
    return LayerContract(tier_ids, torch.zeros_like(tier_ids, dtype=torch.bool)), keys, values


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("part", "size"), [(0, 1e20), (1, 3e38)])
def test_states_beyond_float32_are_refused(variant, part, size):
    """Their elements are finite, their norms are not; the codec refuses them too."""
    case = case_of(num_tokens=0, tail_tokens=0, num_layers=1)
    contract, keys, values = states_of(case, "k2v3")
    (keys, values)[part][1, 5] = size
    for kernels in (None, Encoding(variant=variant)):
        store = build_store(case, kernels=kernels)
        before = store.live_bytes
        with pytest.raises(ValueError, match=r"float32|finite"):
            store.write(0, 0, contract, keys, values, torch.arange(64))
        assert store.live_bytes == before


@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_pages_beyond_float32_are_refused_when_they_are_demoted(variant):
    case = case_of(num_tokens=0, tail_tokens=0, num_layers=1)
    contract, keys, values = states_of(case, "max")
    keys[1, 5] = 1e20
    store = build_store(case, kernels=Counting(variant=variant))
    store.write(0, 0, contract, keys, values, torch.arange(64))
    with pytest.raises(ValueError, match="float32"):
        demote_all(store, 1)


@pytest.mark.parametrize(
    ("theirs", "what"),
    [({"num_layers": 1}, "layer 1"), ({"num_kv_heads": 1}, "below 1"), ({"head_dim": 128}, "keys")],
)
def test_a_codec_of_another_model_is_refused(theirs, what):
    case = case_of(num_layers=2)
    given = {"head_dim": case.head_dim, "num_layers": 2, "num_kv_heads": 2, **theirs}
    other = case_of(**given)
    codec = SphericalCodec(random_calibration(other.geometry(), rope_of(other)))
    store = PageStore(StoreConfig(case.geometry(), case.tiers), codec, kernels=Encoding())
    store.create(0)
    contract, keys, values = states_of(case, "k2v3")
    with pytest.raises(ValueError, match=what):
        store.write(0, 1, contract, keys, values, torch.arange(64))


def test_prompts_are_encoded_in_parts_as_without_it():
    case = case_of()
    codec = SphericalCodec(random_calibration(case.geometry(), rope_of(case)))
    config = StoreConfig(case.geometry(), case.tiers, seal_tier="k3v4")
    pools = PagePool(config), PagePool(config, kernels=NativeBackend().page_codec)
    parts = {PageEncoder.of(pool, 0, codec).most_pages for pool in pools}
    assert len(parts) == 1


def test_an_unknown_variant_is_named():
    store = build_store(case_of(), kernels=Counting(variant="mmx"))
    with pytest.raises(ValueError, match="mmx"):
        demote_all(store, 1)
    with pytest.raises(ValueError, match="mmx"):
        build_store(case_of(), kernels=Encoding(variant="mmx"))
