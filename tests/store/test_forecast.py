# SPDX-License-Identifier: Apache-2.0
"""Bytes predicted against bytes written, in stores that are empty, used, aligned or not."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from sphkv.core.contract import WriteContract
from sphkv.core.tiers import TierTable
from sphkv.store.allocator import PageAllocator
from sphkv.store.append import Span
from sphkv.store.forecast import contract_bytes, span_bytes
from sphkv.store.layout import PageLayout
from sphkv.store.order import PageOrder
from sphkv.store.paging import (
    PageRows,
    PositionMode,
    count_run_pages,
    plan_pages,
    plan_runs,
    select_states,
)
from sphkv.store.slabs import PoolKey
from sphkv.store.store import PageStore

StoreMaker = Callable[..., PageStore]
HEADS, LAYERS = 2, 2
LOW, HIGH = (1, PositionMode.CONTIGUOUS), (2, PositionMode.TOKENS)


def used(store: PageStore, codec: Any) -> PageStore:
    """The store with a sequence that left free pages behind."""
    store.create(9)
    store.append(9, 0, *codec.numbered(200))
    (group,) = store.pages(9, 0)
    store.drop(9, 0, group.page_ids[:, :2].flatten())
    return store


@pytest.fixture(params=["empty", "used"])
def fill(request: pytest.FixtureRequest, codec: Any) -> Callable[[PageStore], PageStore]:
    return (lambda store: used(store, codec)) if request.param == "used" else lambda store: store


@pytest.mark.parametrize("is_aligned", [False, True])
@pytest.mark.parametrize("slab_pages", [4, 64])
@pytest.mark.parametrize(("num_tokens", "granularity"), [(0, 1), (75, 1), (160, 16), (170, 16)])
def test_a_contract_takes_what_was_forecast(
    make_store: StoreMaker,
    codec: Any,
    fill: Callable[[PageStore], PageStore],
    reversed_order: PageOrder,
    is_aligned: bool,
    slab_pages: int,
    num_tokens: int,
    granularity: int,
) -> None:
    store = fill(
        make_store(max_slab_pages=slab_pages, order=reversed_order if is_aligned else None)
    )
    runs = torch.randint(0, 4, (LAYERS, HEADS, -(-200 // granularity)), dtype=torch.uint8)
    tier_id = runs.repeat_interleave(granularity, 2)[..., :num_tokens]
    contract = WriteContract(tier_id, tier_id == 3, granularity)
    store.create(0)
    before = store.live_bytes
    expected = contract_bytes(store, contract, num_tokens)
    states = [codec.numbered(num_tokens + 1, 100) for _ in range(LAYERS)]
    store.write_layers(0, 0, contract, states)
    assert store.live_bytes - before == expected


@settings(max_examples=60, deadline=None)
@given(
    runs=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=3),
    repeats=st.integers(1, 9),
    first=st.integers(0, 40),
    is_in_runs=st.booleans(),
)
def test_runs_are_planned_and_counted_as_their_states_are(
    runs: list[list[int]], repeats: int, first: int, is_in_runs: bool
) -> None:
    shortest = min(map(len, runs))
    tier_id = torch.tensor([each[:shortest] for each in runs], dtype=torch.uint8)
    tier_id = tier_id.repeat_interleave(repeats, 1)
    states = tier_id.repeat_interleave(16, 1)
    protected, positions = states == 3, torch.arange(states.shape[1]) + first
    pages = {1: 128, 2: 32, 3: 16}
    counts = count_run_pages(tier_id, (1, 8, 2, 1))
    for tier, size in pages.items():
        as_runs = is_in_runs and tier < 3
        chosen = select_states(states, protected, positions, tier)
        right = plan_pages(chosen, tier_id=tier, page_tokens=size, as_runs=as_runs)
        planned = plan_runs(tier_id.numpy(), tier_id=tier, page_tokens=size, as_runs=as_runs)
        found = [each.batch(torch.from_numpy(each.words()), protected, first) for each in planned]
        assert len(found) == len(right)
        for one, other in zip(found, right, strict=True):
            assert one.position_mode is other.position_mode
            pairs = [(one.head_ids, other.head_ids), (one.source, other.source)]
            pairs += [(getattr(one.rows, x), getattr(other.rows, x)) for x in PageRows.__slots__]
            assert one.on_cpu is not None
            pairs += zip(one.on_cpu, (other.head_ids, other.rows.counts), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)
        per_head = torch.zeros(2, len(runs), dtype=torch.int64)
        for batch in right:
            per_head[int(batch.position_mode)] += batch.head_ids.bincount(minlength=len(runs))
        own = counts[:, tier].T
        assert torch.equal(own.sum(0) if as_runs else own, per_head.sum(0) if as_runs else per_head)


@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("is_aligned", [False, True])
@pytest.mark.parametrize("num_tokens", [100, 120, 136])
def test_a_prompt_takes_what_was_forecast(
    make_store: StoreMaker,
    codec: Any,
    fill: Callable[[PageStore], PageStore],
    reversed_order: PageOrder,
    num_sequences: int,
    is_aligned: bool,
    num_tokens: int,
) -> None:
    store = fill(make_store(max_slab_pages=8, order=reversed_order if is_aligned else None))
    rows = range(num_sequences)
    for row in rows:
        store.create(row)
    spans = [[Span(3, 0, 20), Span(1, 20, 100)], [Span(1, 0, min(120, num_tokens))]]
    before = store.live_bytes
    expected = span_bytes(store, spans, num_tokens, num_sequences=num_sequences)
    keys, values = (part.expand(num_sequences, -1, -1, -1) for part in codec.numbered(num_tokens))
    for layer in range(LAYERS):
        store.write_prompt(rows, layer, spans[layer], keys, values)
    assert store.live_bytes - before == expected


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.dictionaries(st.sampled_from([LOW, HIGH]), st.integers(0, 40)), max_size=8
    ),
    held=st.integers(0, 30),
    stride=st.integers(1, 9),
    is_aligned=st.booleans(),
)
def test_forecast_equals_allocating_one_after_another(
    tiers: TierTable,
    requests: list[dict[PoolKey, int]],
    held: int,
    stride: int,
    is_aligned: bool,
    reversed_order: PageOrder,
) -> None:
    def layout_of(key: PoolKey) -> PageLayout:
        return PageLayout(key[0], tiers[key[0]], 8, key[1])

    allocator = PageAllocator(
        layout_of, max_slab_pages=stride, order=reversed_order if is_aligned else None
    )
    taken = allocator.allocate({LOW: held})[LOW]
    allocator.free(taken[::2])
    before = sum(t.nbytes for slab in allocator.slabs() for t in slab.tensors())
    expected = allocator.forecast(requests)
    for request in requests:
        allocator.allocate(request)
    after = sum(t.nbytes for slab in allocator.slabs() for t in slab.tensors())
    assert after - before == expected
