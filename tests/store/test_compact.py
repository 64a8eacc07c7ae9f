# SPDX-License-Identifier: Apache-2.0
"""Moving pages together: contents, owners and bytes stay, slabs that are not needed go."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from sphkv.core.contract import LayerContract
from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import TierTable
from sphkv.store.config import StoreConfig
from sphkv.store.moves import PageMoves
from sphkv.store.order import PageOrder
from sphkv.store.store import PageStore

StoreMaker = Callable[..., PageStore]


def pages_of(store: PageStore) -> dict[tuple[int, int], list[tuple[int, list[int], bytes]]]:
    """Tier, owners and bytes of every page, by sequence and layer in the order of the tables."""
    found = {}
    for sequence in store.sequences:
        for layer in range(store.config.geometry.num_layers):
            found[sequence, layer] = [
                (
                    group.layout.tier_id,
                    store.allocator.refcounts(group.flat_ids()).tolist(),
                    store.view(group).pages.numpy().tobytes(),
                )
                for group in store.pages(sequence, layer)
            ]
    return found


def check_books(store: PageStore) -> None:
    live = sum(tensor.nbytes for tensor in store.live_tensors())
    assert store.ledger().total == store.live_bytes == live
    for slab in store.allocator.slabs():
        assert slab.num_free == int((slab.refcounts == 0).sum()) < slab.num_pages
        assert not slab.counts[slab.refcounts == 0].any()
    if len(store.sequences) == 1:
        (sequence,) = store.sequences
        assert store.sequence_bytes(sequence) + store.slack_bytes == live


def check_guarantee(store: PageStore) -> None:
    slabs = list(store.allocator.slabs())
    for key in {slab.key for slab in slabs}:
        mine = [slab for slab in slabs if slab.key == key]
        assert sum(slab.num_free for slab in mine) < min(slab.num_pages for slab in mine)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    dropped=st.lists(st.integers(0, 2**16), max_size=60),
    stride=st.integers(1, 8),
    has_order=st.booleans(),
    is_forked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_compacting_keeps_all_but_free_slabs(
    geometry: KVGeometry,
    tiers: TierTable,
    codec: Any,
    reversed_order: PageOrder,
    lengths: list[int],
    dropped: list[int],
    stride: int,
    has_order: bool,
    is_forked: bool,
    seed: int,
) -> None:
    config = StoreConfig(geometry, tiers, "k2v2", 4, max_slab_pages=stride)
    store = PageStore(config, codec, order=reversed_order if has_order else None)
    generator = torch.Generator().manual_seed(seed)
    for sequence, length in enumerate(lengths):
        store.create(sequence)
        for layer in range(2):
            tier_id = torch.randint(0, 4, (2, length), generator=generator, dtype=torch.uint8)
            contract = LayerContract(tier_id, tier_id > 9)
            keys, values = codec.numbered(length)
            store.write(sequence, layer, contract, keys, values, torch.arange(length))
    if is_forked:
        store.fork(0, 99)
    for choice in dropped:
        sequence, layer = choice % len(lengths), choice // 8 % 2
        ids = store.table(sequence, layer).all_ids()
        if len(ids):
            store.drop(sequence, layer, ids[choice // 16 % len(ids)][None])
    before, held = pages_of(store), store.live_bytes
    tables = {
        key: (store.table(*key).page_ids.clone(), store.table(*key).version) for key in before
    }
    slack, own = store.slack_bytes, [store.sequence_bytes(row) for row in store.sequences]
    moves = store.compact()
    assert pages_of(store) == before
    assert [store.sequence_bytes(row) for row in store.sequences] == own
    assert held - store.live_bytes == slack - store.slack_bytes
    check_books(store)
    check_guarantee(store)
    for key, (page_ids, version) in tables.items():
        table = store.table(*key)
        expected = page_ids if moves is None else moves.apply(page_ids)
        assert torch.equal(table.page_ids, expected)
        assert (table.version > version) == (not torch.equal(page_ids, expected))
    assert (moves is None) == (store.live_bytes == held)
    assert store.compact() is None


def test_pages_of_the_emptiest_slab_move_and_new_pages_still_fit(
    make_store: StoreMaker, codec: Any
) -> None:
    store = make_store(max_slab_pages=4)
    store.create(0)
    store.append(0, 0, *codec.numbered(36 + 5 * 32))
    assert [slab.num_pages for slab in store.allocator.slabs()] == [4, 4, 2]
    # three of four pages of the first slab, one of the second
    store.drop(0, 0, [0, 2, 3, 5])
    moves = store.compact()
    assert moves is not None
    assert (moves.old_ids.tolist(), moves.new_ids.tolist()) == ([1], [5])
    assert [slab.num_pages for slab in store.allocator.slabs()] == [4, 2]
    assert store.slack_bytes == 0
    store.append(0, 0, *codec.numbered(32))
    check_books(store)
    assert moves.apply(torch.tensor([[1, -1], [9, 5]])).tolist() == [[5, -1], [9, 5]]
    assert isinstance(moves, PageMoves)


@pytest.mark.parametrize("has_order", [False, True])
def test_bytes_of_a_sequence_and_slack_are_all_bytes(
    make_store: StoreMaker, codec: Any, reversed_order: PageOrder, has_order: bool
) -> None:
    store = make_store(order=reversed_order if has_order else None)
    store.create(0)
    assert store.sequence_bytes(0) == store.live_bytes
    store.append(0, 0, *codec.numbered(150))
    assert (store.slack_bytes > 0) == has_order
    check_books(store)
    store.drop(0, 0, store.table(0, 0).page_ids[:, 1])
    check_books(store)
    alone = store.sequence_bytes(0)
    store.fork(0, 1)
    assert store.sequence_bytes(0) == store.sequence_bytes(1) == alone
    assert store.live_bytes < 2 * alone
