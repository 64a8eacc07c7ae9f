# SPDX-License-Identifier: Apache-2.0
"""The list of pages against the pages themselves, whatever happened between two looks."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from sphkv.core.contract import LayerContract
from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import TierTable
from sphkv.store.config import StoreConfig
from sphkv.store.page_list import PageList
from sphkv.store.sequence import page_tag
from sphkv.store.store import PageStore

StoreMaker = Callable[..., PageStore]
MOST_RUNS = 4


def expected_rows(store: PageStore, sequence: int) -> list[tuple[Any, ...]]:
    """What the pages say, sorted by id."""
    rows = []
    for layer in range(store.config.geometry.num_layers):
        for group in store.pages(sequence, layer):
            view = store.view(group)
            tag = page_tag((group.layout.tier_id, group.layout.position_mode))
            pages = zip(group.flat_ids().tolist(), group.head_ids().tolist(), strict=True)
            for row, (page_id, head) in enumerate(pages):
                positions = view.positions()[row][view.live()[row]]
                runs = list(dict.fromkeys((positions // 16).tolist()))
                runs += [-1] * (MOST_RUNS - len(runs))
                is_protected = bool(view.flags()[row].any())
                place = (page_id, layer, head, tag, group.layout.tier_id)
                rows.append((*place, len(positions), is_protected, runs))
    return sorted(rows)


def listed_rows(pages: PageList) -> list[tuple[Any, ...]]:
    columns = (pages.page_ids, pages.layer_ids, pages.head_ids, pages.tags, pages.tier_ids)
    rest = (pages.counts, pages.is_protected, pages.runs)
    return sorted(zip(*(column.tolist() for column in (*columns, *rest)), strict=True))


def write_runs(store: PageStore, codec: Any, sequence: int, seed: int, num_runs: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for layer in range(2):
        runs = torch.randint(0, 4, (2, num_runs), generator=generator, dtype=torch.uint8)
        tier_id = runs.repeat_interleave(16, 1)
        protected = (tier_id == 3) & (torch.arange(tier_id.shape[1]) < 40)
        contract = LayerContract(tier_id, protected, 16)
        keys, values = codec.numbered(tier_id.shape[1])
        store.write(sequence, layer, contract, keys, values, torch.arange(tier_id.shape[1]))


def change_page(store: PageStore, choice: int) -> None:
    """Demote or drop a page."""
    layer = choice % 2
    pages = store.page_list(0)
    free = pages.select(~pages.is_protected & (pages.layer_ids == layer))
    if free.num_pages:
        row = choice % free.num_pages
        tier = choice // 7 % int(free.tier_ids[row])
        store.demote(0, layer, free.page_ids[row : row + 1], tier)


def fork_or_free(store: PageStore) -> None:
    if 1 in store.sequences:
        store.free(1)
    else:
        store.fork(0, 1)


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["change", "append", "compact", "crop", "fork"]), st.integers(0, 2**16)
        ),
        max_size=25,
    ),
    seed=st.integers(0, 99),
)
def test_the_list_says_what_pages_hold(
    geometry: KVGeometry,
    tiers: TierTable,
    codec: Any,
    steps: list[tuple[str, int]],
    seed: int,
) -> None:
    store = PageStore(StoreConfig(geometry, tiers, "max", 0, max_slab_pages=3), codec)
    store.create(0)
    write_runs(store, codec, 0, seed, 9)
    for kind, choice in steps:
        if kind == "change":
            change_page(store, choice)
        elif kind == "append":
            for layer in range(2):
                store.append(0, layer, *codec.numbered(16))
        elif kind == "compact":
            store.compact()
        elif kind == "crop":
            store.crop(0, max(0, store.num_tokens(0) - choice % 3 * 16))
        else:
            fork_or_free(store)
        # some steps pass unseen
        for sequence in store.sequences if choice % 3 else ():
            assert listed_rows(store.page_list(sequence)) == expected_rows(store, sequence)
    assert listed_rows(store.page_list(0)) == expected_rows(store, 0)


def test_pages_are_read_once(
    make_store: StoreMaker, codec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(seal_tier="max", recent_tokens=0, max_slab_pages=4)
    store.create(0)
    write_runs(store, codec, 0, 3, 12)
    gather, read = store.allocator.gather_frames, Counter[int]()

    def count(page_ids: Tensor) -> Tensor:
        read.update(page_ids.tolist())
        return gather(page_ids)

    monkeypatch.setattr(store.allocator, "gather_frames", count)
    assert store.page_list_bytes(0) == 0
    pages = store.page_list(0)
    assert store.page_list_bytes(0) > 0
    assert read == Counter(pages.page_ids.tolist())
    read.clear()
    store.compact()
    assert store.page_list(0).num_pages == pages.num_pages
    assert not read
    # ids of dropped pages come again with other states, and only those pages are read
    dropped = pages.select((pages.tier_ids == 3) & ~pages.is_protected & (pages.layer_ids == 0))
    page_ids = store.page_list(0).page_ids[torch.isin(pages.page_ids, dropped.page_ids)]
    store.drop(0, 0, page_ids)
    store.append(0, 0, *codec.numbered(17, 700))
    read.clear()
    found = store.page_list(0)
    fresh = found.select(found.first_runs == 12)
    assert (fresh.layer_ids.tolist(), fresh.head_ids.tolist()) == ([0, 0], [0, 1])
    assert read == Counter(fresh.page_ids.tolist())
    assert set(fresh.page_ids.tolist()) & set(page_ids.tolist())


def test_states_that_are_no_runs_are_refused(make_store: StoreMaker, codec: Any) -> None:
    store = make_store()
    store.create(0)
    store.append(0, 0, *codec.numbered(40))
    assert store.page_list(0).runs.tolist() == [[0, 1, -1, -1]] * 2
    store.create(1)
    tier_id = torch.ones((2, 20), dtype=torch.uint8)
    contract = LayerContract(tier_id, tier_id > 9)
    keys, values = codec.numbered(20)
    store.write(1, 0, contract, keys, values, 3 * torch.arange(20))
    with pytest.raises(ValueError, match="no runs of 16"):
        store.page_list(1)


def test_pages_of_a_tag_are_read_in_the_order_asked_for(make_store: StoreMaker, codec: Any) -> None:
    store = make_store()
    store.create(0)
    store.append(0, 0, *codec.numbered(100))
    pages = store.page_list(0)
    view = store.read(pages.page_ids.flip(0), int(pages.tags[0]))
    assert (view.positions()[:, 0] // 16).tolist() == pages.first_runs.flip(0).tolist()
