# SPDX-License-Identifier: Apache-2.0
"""Store behaviour one case at a time: sealing, contracts, limits, sharing, bad input."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sphkv.core.contract import LayerContract, WriteContract
from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import TierTable, coded_tier, ladder
from sphkv.errors import BudgetError
from sphkv.store.config import StoreConfig
from sphkv.store.paging import PositionMode
from sphkv.store.store import PageStore

StoreMaker = Callable[..., PageStore]
Unchanged = Callable[[PageStore], AbstractContextManager[None]]


def numbered(codec: Any, num_tokens: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values of two heads."""
    keys, values = codec.numbered(num_tokens, first)
    return keys, values


def uniform(num_tokens: int, tier_id: int) -> LayerContract:
    tiers = torch.full((2, num_tokens), tier_id, dtype=torch.uint8)
    return LayerContract(tiers, torch.zeros((2, num_tokens), dtype=torch.bool))


@pytest.mark.parametrize("num_tokens", [0, 1, 35, 36, 37, 67, 68, 200])
def test_tail_seals_its_oldest_page_at_capacity(
    make_store: StoreMaker, codec: Any, num_tokens: int
) -> None:
    store = make_store()
    store.create(0)
    store.append(0, 1, *numbered(codec, num_tokens))
    sealed = 32 * max(0, -(-(num_tokens - 36) // 32))
    tail = store.tail(0, 1)
    assert (tail.num_tokens, tail.first_position) == (num_tokens - sealed, sealed)
    pages = store.pages(0, 1)
    assert [group.num_pages.tolist() for group in pages] == [[sealed // 32] * 2] * bool(sealed)
    assert all(g.layout.position_mode is PositionMode.CONTIGUOUS for g in pages)
    assert store.num_tokens(0, 1) == num_tokens
    assert store.num_tokens(0, 0) == 0
    assert store.pages(0, 0) == []


@pytest.mark.parametrize("chunk", [1, 7, 32, 33, 100])
def test_chunks_of_appends_do_not_matter(make_store: StoreMaker, codec: Any, chunk: int) -> None:
    keys, values = numbered(codec, 150)
    stores = [make_store(), make_store()]
    for store, step in zip(stores, (150, chunk), strict=True):
        store.create(0)
        for start in range(0, 150, step):
            store.append(0, 0, keys[:, start : start + step], values[:, start : start + step])
    whole, parts = stores
    assert torch.equal(whole.tail(0, 0).keys, parts.tail(0, 0).keys)
    for left, right in zip(whole.pages(0, 0), parts.pages(0, 0), strict=True):
        assert torch.equal(whole.view(left).pages, parts.view(right).pages)


def test_contract_decides_tier_mode_and_drops(
    make_store: StoreMaker, codec: Any, geometry: KVGeometry, tiers: TierTable
) -> None:
    store = make_store()
    store.create(0)
    tier_id = torch.zeros((2, 96), dtype=torch.uint8)
    tier_id[0, :40] = 1
    tier_id[0, 48:96:2] = 2
    tier_id[1, :16], tier_id[1, 32:48] = 1, 1
    tier_id[:, 47] = tiers.dense_id
    protected = tier_id == tiers.dense_id
    keys, values = numbered(codec, 96)
    store.write(0, 0, LayerContract(tier_id, protected), keys, values, torch.arange(96))
    found = {
        (g.layout.tier.name, g.layout.position_mode.name): g.num_pages.tolist()
        for g in store.pages(0, 0)
    }
    assert found == {
        # Head 0 fills one page and begins another; head 1 keeps two runs of 16, one cut by 47.
        ("k2v2", "CONTIGUOUS"): [2, 0],
        ("k2v2", "RUNS"): [0, 1],
        ("k3v3", "TOKENS"): [1, 0],
        ("max", "CONTIGUOUS"): [1, 1],
    }
    assert store.num_tokens(0, 0) == 96
    # Tokens that follow continue at the next position although the last ones were dropped.
    store.append(0, 0, *numbered(codec, 1))
    assert store.tail(0, 0).first_position == 96


def test_all_dropped_and_empty_writes_store_nothing(make_store: StoreMaker, codec: Any) -> None:
    store = make_store()
    store.create(0)
    empty = store.live_bytes
    store.write(0, 0, uniform(0, 1), *numbered(codec, 0), torch.arange(0))
    assert store.num_tokens(0, 0) == 0
    store.write(0, 0, uniform(20, 0), *numbered(codec, 20), torch.arange(20))
    assert store.num_tokens(0, 0) == 20
    assert store.pages(0, 0) == []
    assert store.live_bytes == empty
    assert store.tail(0, 0).num_tokens == 0


def test_whole_contract_layer_by_layer(
    make_store: StoreMaker, codec: Any, geometry: KVGeometry, tiers: TierTable
) -> None:
    contract = WriteContract.uniform(geometry, 50, tier_id=2, granularity=16)
    contract.check(tiers, geometry)
    store = make_store()
    store.create(3)
    for layer in range(geometry.num_layers):
        states = numbered(codec, 50)
        store.write(3, layer, contract.layer(layer), *states, torch.arange(50))
    assert [g.num_pages.tolist() for g in store.pages(3, 1)] == [[1, 1]]


def test_bigger_models_work_with_the_whole_ladder(codec: Any) -> None:
    geometry = KVGeometry(num_layers=1, num_kv_heads=2, num_query_heads=2, head_dim=64)
    store = PageStore(StoreConfig(geometry, ladder(64)), type(codec)(head_dim=64))
    store.create(0)
    keys, values = type(codec)(head_dim=64).dense(torch.arange(600).reshape(2, 300))
    store.append(0, 0, keys, values)
    (group,) = store.pages(0, 0)
    assert group.layout.tier == coded_tier(3.0, 4)
    assert group.num_pages.tolist() == [2, 2]
    ledger = store.ledger()
    assert ledger.codes == 2 * (256 * 24 + 44 * 128)
    assert ledger.radii == 2 * 256
    assert ledger.values == 2 * (256 * 33 + 44 * 128)
    assert ledger.positions == 0
    assert (ledger.headers, ledger.prot) == (4 * 48, 4 * 16)
    assert ledger.total == sum(tensor.nbytes for tensor in store.live_tensors())
    assert ledger.b_kv(300) == ledger.total / 300
    assert ledger.eta_meta == 1 - ledger.payload / ledger.total


def test_tables_beside_the_store_are_told_apart(make_store: StoreMaker, codec: Any) -> None:
    store = make_store()
    store.create(0)
    store.append(0, 0, *numbered(codec, 40))
    plain = store.ledger()
    both = replace(plain, tables=1000)
    assert both.total == plain.total == plain.total_with_tables
    assert both.total_with_tables == plain.total + 1000
    assert both.eta_meta == plain.eta_meta
    record = both.to_dict()
    assert (record["total"], record["tables"]) == (plain.total, 1000)
    assert record["total_with_tables"] == plain.total + 1000


def test_ledger_of_nothing(make_store: StoreMaker) -> None:
    ledger = make_store().ledger()
    assert ledger.total == ledger.payload == 0
    assert ledger.eta_meta == 0.0
    with pytest.raises(ValueError, match="active_tokens"):
        ledger.b_kv(0)


def test_limit_holds_to_the_byte(make_store: StoreMaker, codec: Any, unchanged: Unchanged) -> None:
    free_store = make_store()
    free_store.create(0)
    free_store.append(0, 0, *numbered(codec, 40))
    needed = free_store.live_bytes
    exact = make_store(max_bytes=needed)
    exact.create(0)
    exact.append(0, 0, *numbered(codec, 40))
    short = make_store(max_bytes=needed - 1)
    short.create(0)
    held = short.live_bytes
    with unchanged(short), pytest.raises(BudgetError) as caught:
        short.append(0, 0, *numbered(codec, 40))
    assert caught.value.needed == needed - held
    assert caught.value.free == needed - held - 1
    assert short.num_tokens(0, 0) == 0
    short.append(0, 0, *numbered(codec, 1))


def test_refused_calls_change_nothing(
    make_store: StoreMaker, codec: Any, tiers: TierTable, unchanged: Unchanged
) -> None:
    store = make_store(max_bytes=9_000)
    store.create(0)
    keys, values = numbered(codec, 64)
    store.write(0, 0, uniform(64, tiers.dense_id), keys, values, torch.arange(64))
    calls: list[Callable[[], None]] = [
        lambda: store.append(0, 1, *numbered(codec, 300)),
        lambda: store.write(
            0, 1, uniform(200, tiers.dense_id), *numbered(codec, 200), torch.arange(200)
        ),
    ]
    for call in calls:
        with unchanged(store), pytest.raises(BudgetError):
            call()
        assert store.num_tokens(0, 1) == 0
    tiny = make_store(max_bytes=10)
    with pytest.raises(BudgetError):
        tiny.create(0)
    assert tiny.sequences == ()


def test_fork_needs_room_for_its_own_tail(
    make_store: StoreMaker, codec: Any, unchanged: Unchanged
) -> None:
    probe = make_store()
    probe.create(0)
    probe.append(0, 0, *numbered(codec, 10))
    store = make_store(max_bytes=2 * probe.live_bytes - 1)
    store.create(0)
    store.append(0, 0, *numbered(codec, 10))
    with unchanged(store), pytest.raises(BudgetError):
        store.fork(0, 1)


def test_demotion_needs_no_room_for_old_and_new_together(
    make_store: StoreMaker, codec: Any, tiers: TierTable
) -> None:
    def filled(**changes: Any) -> PageStore:
        store = make_store(**changes)
        store.create(0)
        contract = uniform(128, tiers.dense_id)
        store.write(0, 0, contract, *numbered(codec, 128), torch.arange(128))
        return store

    store = filled(max_bytes=filled().live_bytes)
    (group,) = store.pages(0, 0)
    full = store.live_bytes
    store.demote(0, 0, group.flat_ids(), "k2v2")
    (group,) = store.pages(0, 0)
    # Eight dense pages of 16 became four pages of 32 for each head.
    assert group.layout.tier.name == "k2v2"
    assert group.num_pages.tolist() == [4, 4]
    assert store.view(group).counts().tolist() == [32] * 8
    assert store.live_bytes < full


def test_shared_pages_cost_once_and_outlive_their_first_owner(
    make_store: StoreMaker, codec: Any
) -> None:
    store = make_store()
    store.create(0)
    store.append(0, 0, *numbered(codec, 70))
    before = store.ledger()
    store.fork(0, 1)
    shared = store.ledger()
    assert shared.headers == before.headers
    assert shared.codes == before.codes + store.tail(0, 0).keys.nbytes
    content = store.view(store.pages(0, 0)[0]).pages
    ids = store.table(0, 0).all_ids()
    assert store.allocator.refcounts(ids).tolist() == [2, 2, 2, 2]
    # One page of two owners: a cut makes a copy, the other owner sees no change.
    store.crop(1, 40)
    assert torch.equal(store.view(store.pages(0, 0)[0]).pages, content)
    assert store.view(store.pages(1, 0)[0]).counts().tolist() == [32, 8, 32, 8]
    store.append(1, 0, *numbered(codec, 40, first=500))
    assert store.tail(0, 0).num_tokens == 6
    store.free(0)
    assert store.view(store.pages(1, 0)[0]).counts()[0] == 32
    store.free(1)
    assert store.live_tensors() == []
    assert store.live_bytes == 0


def test_crop_of_a_single_owner_needs_no_room(make_store: StoreMaker, codec: Any) -> None:
    store = make_store()
    store.create(0)
    store.append(0, 0, *numbered(codec, 70))
    held = store.live_bytes
    store.crop(0, 40)
    assert store.live_bytes == held
    assert store.num_tokens(0, 0) == 40
    store.crop(0, 99)
    assert store.num_tokens(0, 0) == 40
    store.crop(0, 0)
    assert store.pages(0, 0) == []
    assert store.tail(0, 0).first_position == 0


def test_protected_states_stay(
    make_store: StoreMaker, codec: Any, tiers: TierTable, unchanged: Unchanged
) -> None:
    store = make_store()
    store.create(0)
    contract = uniform(32, tiers.dense_id)
    contract.protected[1, 20] = True
    store.write(0, 0, contract, *numbered(codec, 32), torch.arange(32))
    (group,) = store.pages(0, 0)
    guarded = int(group.page_ids[1, 1])
    for call in (
        lambda: store.drop(0, 0, [guarded]),
        lambda: store.demote(0, 0, group.flat_ids(), "k2v2"),
        lambda: store.demote(0, 0, [guarded], "drop"),
    ):
        with unchanged(store), pytest.raises(ValueError, match=f"{guarded}.*protected"):
            call()
    store.demote(0, 0, group.page_ids[:, 0], "drop")
    assert store.pages(0, 0)[0].num_pages.tolist() == [1, 1]


def test_sealing_at_the_dense_tier(make_store: StoreMaker, codec: Any) -> None:
    store = make_store(seal_tier="max")
    store.create(0)
    keys, values = numbered(codec, 40)
    store.append(0, 0, keys, values)
    (group,) = store.pages(0, 0)
    assert group.num_pages.tolist() == [2, 2]
    assert torch.equal(store.view(group).dense_keys()[:2].flatten(0, 1).float(), keys[0, :32])
