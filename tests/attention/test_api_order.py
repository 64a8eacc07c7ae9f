# SPDX-License-Identifier: Apache-2.0
"""A store that keeps pages in a kernel's order shows the same pages and counts the same bytes."""

import pytest
import torch

from sphkv.attention.api import decode_attention, get_backend
from sphkv.attention.cuda.geometry import is_served
from sphkv.attention.cuda.pages import FragmentOrder, place_pages
from sphkv.attention.plans import list_pages
from sphkv.attention.request import AttentionOptions, DecodeRequest
from sphkv.core.tiers import TierSpec, TierTable, coded_tier
from sphkv.errors import BackendUnavailableError
from sphkv.store.layout import PageView, write_pages
from sphkv.store.order import CodecOnly
from sphkv.testing.cases import CacheCase, build_store, random_states, rope_of

TIERS = TierTable(
    (
        TierSpec("drop", "drop", 0.0, 0, 0),
        coded_tier(1.0, 2),
        coded_tier(2.0, 3),
        coded_tier(3.0, 4),
        coded_tier(4.0, 16),
        TierSpec("max", "dense", 16.0, 16, 16),
    )
)
CASE = CacheCase(tiers=TIERS, num_tokens=700, mix="runs")


def states_of(store):
    return {
        (group.layout.tier.name, group.layout.position_mode): store.view(group).pages
        for group in store.pages(0, 0)
    }


def test_pages_read_back_as_they_were_written():
    plain, ordered = build_store(CASE), build_store(CASE, order=FragmentOrder())
    before, after = states_of(plain), states_of(ordered)
    assert before.keys() == after.keys()
    for key, pages in before.items():
        assert torch.equal(pages, after[key]), key
    kept = [slab for slab in ordered.allocator.slabs() if is_served(slab.layout)]
    assert kept
    different = sum(not torch.equal(a.data[0], b.data[0]) for a, b in _same_slabs(plain, ordered))
    assert different == len(kept)


class OrderedCodec(CodecOnly):
    """Encodes as kernels do: its pages are ordered already."""

    num_encoded = 0

    def encode(self, layout, layer, codec, states, rows, head_ids):
        keys, values = states
        encoded = codec.encode(
            layer, layout.tier, keys, values, rows.positions, head_ids=head_ids, counts=rows.counts
        )
        self.num_encoded += len(head_ids)
        return FragmentOrder().to_slab(layout, write_pages(layout, encoded, rows))


def test_pages_that_were_encoded_in_order_are_not_ordered_again():
    kernels = OrderedCodec()
    ordered = build_store(CASE, order=FragmentOrder(), kernels=kernels)
    before, after = states_of(build_store(CASE)), states_of(ordered)
    assert kernels.num_encoded > 0
    for key, pages in before.items():
        assert torch.equal(pages, after[key]), key


def _same_slabs(one, other):
    return zip(one.allocator.slabs(), other.allocator.slabs(), strict=True)


def test_every_byte_is_counted():
    store = build_store(CASE, order=FragmentOrder())
    resident = sum(tensor.nbytes for tensor in store.live_tensors())
    assert store.ledger().total == resident == store.live_bytes
    store.free(0)
    assert store.live_bytes == 0 == sum(tensor.nbytes for tensor in store.live_tensors())


def test_crop_demote_and_attention_see_through_the_order():
    stores = [build_store(CASE), build_store(CASE, order=FragmentOrder())]
    rope = rope_of(stores[0])
    _, _, query = random_states(CASE.geometry(), rope, 1, first=600, seed=9)
    outputs = []
    for store in stores:
        group = next(g for g in store.pages(0, 0) if g.layout.tier.name == "k3v4")
        store.demote(0, 0, group.flat_ids(), "k2v3")
        store.crop(0, 601)
        request = DecodeRequest(
            store, 0, 0, query, torch.tensor([600]), AttentionOptions(scale=0.125)
        )
        outputs.append(decode_attention(request))
    assert torch.equal(*outputs)


def test_page_numbers_find_every_page():
    store = build_store(CASE, order=FragmentOrder())
    group = next(g for g in store.pages(0, 0) if is_served(g.layout))
    listed = list_pages(store, 0, 0, has_positions=is_served)[group.layout]
    served = place_pages(
        store.allocator, group.layout, [listed], CASE.num_kv_heads, device=torch.device("cpu")
    )
    size, base = group.layout.page_bytes, served.pool.address
    assert base is not None
    found = base + served.lists.page_ids * size
    assert torch.equal(found, store.allocator.addresses(group.flat_ids()))
    starts = PageView(group.layout, store.allocator.gather(group.flat_ids())).positions()[:, 0]
    assert torch.equal(served.lists.entries >> 32, starts)
    assert len(starts.unique()) > 1
    assert served.lists.row_start.tolist() == [0, *group.num_pages.cumsum(0).tolist()]


def test_gpu_backends_are_named_and_refused_where_they_cannot_run():
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(BackendUnavailableError, match="Hopper"):
        get_backend("cuda")
    assert get_backend("auto", "cpu").name in ("native", "reference")


def test_states_that_a_kernel_wrote_are_absorbed_and_sealed():
    """Writing behind the tail by hand and absorbing equals appending, page seals included."""
    case = CacheCase(tiers=TIERS, mix="k3v4", num_tokens=150, tail_tokens=7)
    one, other = build_store(case), build_store(case)
    rope, steps = rope_of(one), one.config.tail_capacity
    keys, values, _ = random_states(case.geometry(), rope, steps, first=157, seed=3)
    sealed, lengths = 0, set()
    for step in range(steps):
        new = slice(step, step + 1)
        one.append(0, 0, keys[:, new], values[:, new])
        sealed += other.make_room([0], num_new=1)
        tail = other.open_tail(0, 0)
        assert tail is not None
        tail.keys[:, tail.num_tokens] = keys[:, step]
        tail.values[:, tail.num_tokens] = values[:, step]
        other.absorb([0])
        lengths.add(tail.num_tokens)
        # the page seals ahead of the very same step
        assert one.tail(0, 0).first_position == other.tail(0, 0).first_position
    assert sealed == 1
    assert max(lengths) == one.config.tail_capacity
    assert one.num_tokens(0) == other.num_tokens(0) == 157 + steps
    assert torch.equal(one.tail(0, 0).keys, other.tail(0, 0).keys)
    for left, right in zip(one.pages(0, 0), other.pages(0, 0), strict=True):
        assert torch.equal(one.view(left).pages, other.view(right).pages)
    other.create(1)
    with pytest.raises(ValueError, match="no room"):
        other.absorb([1])
