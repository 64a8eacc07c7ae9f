# SPDX-License-Identifier: Apache-2.0
"""Lists that grow in place, and page numbers on both sides of a base."""

import itertools

import pytest
import torch

from sphkv.attention.cuda.pages import LayerLists, PageLists, list_entries, page_numbers
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
    lists.replace(0, PageLists(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2, 2, 3]), 2))
    lists.replace(1, PageLists(torch.tensor([7]), torch.tensor([0, 0, 1, 1, 1]), 2))
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
        lists.replace(0, PageLists(torch.arange(5), torch.tensor([0, 5, 5, 5, 5]), 2))


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
