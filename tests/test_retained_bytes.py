# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from sphkv.cache.retained_bytes import contract_bytes
from sphkv.cache.retained_config import retention_tiers
from sphkv.cache.retained_pages import list_pages

from sphkv.attention.cuda.pages import FragmentOrder
from sphkv.cache import retained_bytes
from sphkv.codec.calibration import default_calibration
from sphkv.codec.states import SphericalCodec
from sphkv.core.contract import WriteContract
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.store.config import StoreConfig
from sphkv.store.store import PageStore

GEOMETRY = KVGeometry(num_layers=3, num_kv_heads=2, num_query_heads=2, head_dim=16)


@pytest.mark.parametrize("slab_pages", [1, 4, 64])
@pytest.mark.parametrize("granularity", [1, 16])
@pytest.mark.parametrize("order", [None, FragmentOrder()])
def test_prediction_equals_the_live_tensors(slab_pages, granularity, order, monkeypatch):
    # two layers, then the third
    monkeypatch.setattr(retained_bytes, "_PLANNED_UNITS", 4 * 400 // granularity)
    tiers = retention_tiers()
    config = StoreConfig(
        GEOMETRY, tiers, seal_tier="max", recent_tokens=0, max_slab_pages=slab_pages
    )
    tokens = 400
    generator = torch.Generator().manual_seed(slab_pages + granularity)
    drawn = torch.randint(
        0, len(tiers), (3, 2, tokens // granularity), generator=generator, dtype=torch.uint8
    )
    tier_id = drawn.repeat_interleave(granularity, 2)
    contract = WriteContract(tier_id, torch.zeros_like(tier_id, dtype=torch.bool), granularity)
    ropes = (RopeSpec.unrotated(16),) * 3
    store = PageStore(config, SphericalCodec(default_calibration(GEOMETRY, ropes)), order=order)
    store.create(0)
    for layer in range(3):
        keys, values = torch.randn(2, 2, tokens + 20, 16, generator=generator)
        store.write(
            0,
            layer,
            contract.layer(layer),
            keys[:, :tokens],
            values[:, :tokens],
            torch.arange(tokens),
        )
        store.append(0, layer, keys[:, tokens:], values[:, tokens:])
    is_aligned = order is not None
    assert contract_bytes(config, contract, tokens, is_aligned=is_aligned) == store.live_bytes


def test_pages_of_all_layers_are_listed_without_reading_them():
    tiers = retention_tiers()
    config = StoreConfig(GEOMETRY, tiers, seal_tier="max", recent_tokens=0)
    ropes = (RopeSpec.unrotated(16),) * 3
    store = PageStore(config, SphericalCodec(default_calibration(GEOMETRY, ropes)))
    store.create(0)
    generator = torch.Generator().manual_seed(0)
    for layer, tier in enumerate((tiers.dense_id, 1, 0)):
        keys, values = torch.randn(2, 2, 64, 16, generator=generator)
        contract = WriteContract.uniform(GEOMETRY, 64, tier_id=tier).layer(layer)
        store.write(0, layer, contract, keys, values, torch.arange(64))
    pages = list_pages(store, 0)
    assert pages.layer_ids.tolist() == [0] * 8 + [1] * 4
    assert pages.head_ids.tolist() == [0] * 4 + [1] * 4 + [0] * 2 + [1] * 2
    assert pages.tier_ids.tolist() == [tiers.dense_id] * 8 + [1] * 4
    listed = pages.select(pages.layer_ids == 1).page_ids
    assert listed.tolist() == store.table(0, 1).all_ids().tolist()
