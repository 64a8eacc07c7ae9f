# SPDX-License-Identifier: Apache-2.0
"""Slabs by slot: slots are given out again, counts outlive growth, stale ids are named."""

import numpy as np
import pytest
import torch

from sphkv.core.tiers import TierTable
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PositionMode
from sphkv.store.slabs import PoolKey, Slab, SlabTable, slab_bytes

LOW, HIGH = (1, PositionMode.CONTIGUOUS), (2, PositionMode.RUNS)


def make_slab(tiers: TierTable, key: PoolKey, num_pages: int) -> Slab:
    layout = PageLayout(key[0], tiers[key[0]], 8, key[1])
    data = torch.zeros(num_pages, layout.page_bytes, dtype=torch.uint8)
    return Slab(key, layout, data, num_pages, data)


def test_the_lowest_slot_is_given_out_again(tiers: TierTable) -> None:
    table = SlabTable(4)
    for key, pages in ((LOW, 4), (HIGH, 2), (LOW, 3)):
        table.place(make_slab(tiers, key, pages))
    assert table.slots(LOW).tolist() == [0, 2]
    assert (table.total(LOW), table.total(HIGH)) == ((7, 7), (2, 2))
    table.remove(2)
    table.remove(0)
    assert table.total(LOW) == (0, 0)
    table.place(make_slab(tiers, HIGH, 1))
    assert table.slots(HIGH).tolist() == [1, 0]
    assert [slab.num_pages for slab in table] == [1, 2]
    with pytest.raises(ValueError, match="no slab 2"):
        table[2]


def test_counts_are_the_same_in_slab_and_table_however_many_come(tiers: TierTable) -> None:
    table = SlabTable(4)
    table.place(first := make_slab(tiers, LOW, 3))
    first.refcounts[1], first.counts[1] = 2, 7
    for _ in range(200):
        table.place(make_slab(tiers, HIGH, 2))
    assert (table.refcounts[1], table.counts[1]) == (2, 7)
    table.refcounts[2] = 1
    assert first.refcounts.tolist() == [0, 2, 1]
    ids = torch.tensor([2, 1])
    assert table.owned(ids).tolist() == [2, 1]
    size = first.layout.page_bytes
    assert (table.addresses(ids.numpy()) - first.data.data_ptr()).tolist() == [2 * size, size]


@pytest.mark.parametrize(
    ("page_id", "words"),
    [(-1, "no slab -1"), (0, "not all owned"), (3, "not all owned"), (4, "no slab 1")],
)
def test_ids_that_nobody_owns_are_refused(tiers: TierTable, page_id: int, words: str) -> None:
    table = SlabTable(4)
    table.place(make_slab(tiers, LOW, 3))
    with pytest.raises(ValueError, match=words):
        table.owned(torch.tensor([page_id]))
    with pytest.raises(ValueError, match=words):
        table.by_slab(torch.tensor([page_id]))


def test_free_pages_are_counted_by_slab_and_by_pool(tiers: TierTable) -> None:
    table = SlabTable(4)
    for pages in (4, 2):
        table.place(make_slab(tiers, LOW, pages))
    table.add_free(np.array([0, 1]), np.array([-3, -1]))
    slots = table.slots(LOW)
    assert (table.num_free(slots).tolist(), table.num_pages(slots).tolist()) == ([1, 1], [4, 2])
    assert table.total(LOW) == (2, 6)
    table.place(make_slab(tiers, HIGH, 1))
    at = torch.tensor([2, 0, 1, 2]).numpy()
    found = {key: values.tolist() for key, values in table.by_pool(at, 10 * at)}
    assert found == {LOW: [0, 10], HIGH: [20, 20]}


def test_an_aligned_slab_costs_its_alignment(tiers: TierTable) -> None:
    layout = PageLayout(1, tiers[1], 8, PositionMode.CONTIGUOUS)
    plain = slab_bytes(layout, 3)
    assert plain == 3 * (layout.page_bytes + 8)
    assert slab_bytes(layout, 3, alignment=1) == plain
    assert slab_bytes(layout, 3, alignment=128) == plain + 128
