# SPDX-License-Identifier: Apache-2.0
"""Slabs: sealed pages stay, ids point where they say, and no slab is bigger than needed."""

import pytest
import torch

from sphkv.core.tiers import TierTable
from sphkv.store.allocator import PageAllocator
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PositionMode


@pytest.fixture
def allocator(tiers: TierTable) -> PageAllocator:
    return PageAllocator(lambda key: PageLayout(key[0], tiers[key[0]], 8, key[1]), max_slab_pages=4)


def test_sealed_and_shared_pages_cannot_be_written(allocator: PageAllocator) -> None:
    key = (1, PositionMode.CONTIGUOUS)
    ids = allocator.allocate({key: 3})[key]
    data = torch.arange(3, dtype=torch.uint8)[:, None].expand(3, 256).contiguous()
    counts = torch.tensor([5, 6, 7])
    assert next(allocator.slabs()).layout.page_bytes == 256
    allocator.write(ids, data, counts)
    assert torch.equal(allocator.gather(ids.flip(0)), data.flip(0))
    assert allocator.counts(ids).tolist() == [5, 6, 7]
    with pytest.raises(ValueError, match="sealed"):
        allocator.write(ids[:1], data[:1], counts[:1])
    allocator.share(ids[:1])
    with pytest.raises(ValueError, match="shared"):
        allocator.truncate(ids[:1], data[:1], counts[:1])
    assert allocator.free(ids) == 0
    with pytest.raises(ValueError, match="not all owned"):
        allocator.gather(ids)
    assert allocator.free(ids[:1]) == 3 * (256 + 8)
    with pytest.raises(ValueError, match="stale"):
        allocator.gather(ids)


def test_slabs_are_no_bigger_than_asked_for_and_are_refilled(allocator: PageAllocator) -> None:
    low, high = (1, PositionMode.CONTIGUOUS), (2, PositionMode.TOKENS)
    planned = allocator.plan_bytes({low: 6, high: 1})
    taken = allocator.allocate({low: 6, high: 1})
    assert planned == sum(t.nbytes for slab in allocator.slabs() for t in slab.tensors())
    assert [slab.num_pages for slab in allocator.slabs()] == [4, 2, 1]
    assert allocator.plan_bytes({low: 2}, freed=taken[low][:2]) == 0
    assert allocator.plan_bytes({low: 3}, freed=taken[low][:2]) == 256 + 8
    assert allocator.plan_bytes({}, freed=taken[low][4:]) == -2 * (256 + 8)
    allocator.free(taken[low][:2])
    assert allocator.allocate({low: 2})[low].tolist() == taken[low][:2].tolist()


def test_addresses_point_at_pages(allocator: PageAllocator) -> None:
    key = (1, PositionMode.CONTIGUOUS)
    ids = allocator.allocate({key: 6})[key]
    padded = torch.cat([ids, torch.tensor([-1, -1])]).reshape(2, 4)
    addresses = allocator.addresses(padded)
    slabs = list(allocator.slabs())
    assert addresses[0, 1] == slabs[0].data.data_ptr() + 256
    assert addresses[1, 1] == slabs[1].data.data_ptr() + 256
    assert addresses[1, 2:].tolist() == [0, 0]
    assert allocator.address(int(ids[1])) == int(addresses[0, 1])
