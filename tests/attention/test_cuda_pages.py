# SPDX-License-Identifier: Apache-2.0
"""Lists that grow in place, and page numbers on both sides of a base."""

import itertools

import numpy as np
import pytest
import torch

from sphkv.attention.cuda.pages import (
    FixedLists,
    LayerLists,
    ListChange,
    PageLists,
    list_entries,
    page_numbers,
)
from sphkv.core.tiers import coded_tier
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PositionMode

LAYOUT = PageLayout(1, coded_tier(2.0, 4), 128, PositionMode.CONTIGUOUS)


def rows(lists):
    """The pages of each list."""
    start = lists.row_start.tolist()
    return [lists.page_ids[a:b].tolist() for a, b in itertools.pairwise(start)]


def test_every_list_grows_where_it_lies():
    lists = LayerLists(2, 2, 2, 4, "cpu")
    counts = np.array([[[1, 1], [0, 1]], [[0, 1], [0, 0]]])
    lists.fill(torch.tensor([1, 2, 3, 7]), counts)
    held = [lists.layer(layer) for layer in range(2)]
    new = torch.arange(10, 18, dtype=torch.int64).view(2, 2, 2)
    everyone = torch.ones(2, dtype=torch.bool)
    lists.append(new.transpose(1, 2).contiguous().transpose(1, 2), everyone)
    assert rows(held[0]) == [[1, 10], [2, 11], [12], [3, 13]]
    assert rows(held[1]) == [[14], [7, 15], [16], [17]]
    lists.append(new + 10, torch.tensor([False, True]))
    assert rows(held[0]) == [[1, 10], [2, 11, 21], [12], [3, 13, 23]]
    assert rows(held[1]) == [[14], [7, 15, 25], [16], [17, 27]]
    assert held[0].batch == 2
    with pytest.raises(ValueError, match="5 pages"):
        lists.fill(torch.arange(5), np.array([[[5, 0], [0, 0]], [[0, 0], [0, 0]]]))
    lists.fill(torch.tensor([4, 5]), np.array([[[0, 0], [2, 0]], [[0, 0], [0, 0]]]))
    assert rows(held[0]) == [[], [], [4, 5], []]
    assert rows(held[1]) == [[], [], [], []]


def test_lists_are_written_anew_where_they_lie():
    counts = np.array([[[1, 2], [0, 1]], [[0, 1], [0, 0]]])
    lists = FixedLists.with_room(counts, more=1, device=torch.device("cpu"))
    held = [lists.layer(layer) for layer in range(2)]
    assert lists.replace(torch.arange(1, 6), counts)
    assert rows(held[0]) == [[1], [2, 3], [], [4]]
    assert rows(held[1]) == [[], [5], [], []]
    # row by row: (row 0: heads 0, 1), (row 1: heads 0, 1)
    assert lists.replace(torch.arange(1, 6), counts, by_row=True)
    assert rows(held[0]) == [[1], [], [2, 3], [4]]
    assert rows(held[1]) == [[], [], [5], []]
    # room for four pages, a fourth of them more, and one for each list
    full = np.array([[[9, 0], [0, 0]], [[0, 0], [0, 0]]])
    assert lists.replace(torch.arange(9), full)
    assert not lists.replace(torch.arange(10), full + np.array([[[1, 0], [0, 0]], [[0] * 2] * 2]))
    assert rows(held[0]) == [list(range(9)), [], [], []]


def change(old, new=None):
    return ListChange.of(np.array(old), None if new is None else np.array(new), torch.device("cpu"))


@pytest.mark.parametrize("kind", ["growing", "fixed"])
def test_lists_follow_pages_that_go_and_move(kind):
    counts = np.array([[[3, 2], [0, 1]], [[0, 1], [0, 2]]])
    growing = LayerLists(2, 2, 2, 4, "cpu")
    fixed = FixedLists.with_room(counts, more=0, device=torch.device("cpu"))
    entries = list_entries(torch.arange(10, 19), 16 * torch.arange(9))
    growing.fill(entries, counts)
    assert fixed.replace(entries, counts)
    lists = growing if kind == "growing" else fixed
    held = [lists.layer(layer) for layer in range(2)]
    lists.apply(change([5, 11, 13, 18, 40]))
    assert rows(held[0]) == [[10, 12], [14], [], [15]]
    assert rows(held[1]) == [[], [16], [], [17]]
    # a page takes the place of one that is gone; its base stays
    lists.apply(change([12, 17, 90], [13, 2, 91]))
    assert rows(held[0]) == [[10, 13], [14], [], [15]]
    assert rows(held[1]) == [[], [16], [], [2]]
    assert held[0].entries[1] >> 32 == 32
    lists.apply(change([2, 10, 13, 14, 15, 16]))
    assert rows(held[0]) == rows(held[1]) == [[], [], [], []]


def test_entries_hold_number_and_base():
    entries = list_entries(torch.tensor([0, 1, (1 << 32) - 1]), torch.tensor([0, 128, 1 << 20]))
    halves = entries.view(torch.int32).view(-1, 2)
    assert halves.tolist() == [[0, 0], [1, 128], [-1, 1 << 20]]
    assert PageLists(entries, torch.tensor([0, 3]), 1).page_ids.tolist() == [0, 1, (1 << 32) - 1]
    assert torch.equal(list_entries(torch.tensor([5]), 384), torch.tensor([5 + (384 << 32)]))


def test_numbers_fill_32_bits():
    base, size = 5 * LAYOUT.page_bytes, LAYOUT.page_bytes
    wanted = torch.tensor([0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1])
    got = page_numbers(base + size * wanted, base, LAYOUT)
    assert torch.equal(got, wanted)
    for number in (-1, 1 << 32):
        with pytest.raises(ValueError, match="too far"):
            page_numbers(torch.tensor([base + size * number]), base, LAYOUT)
