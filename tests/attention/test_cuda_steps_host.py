# SPDX-License-Identifier: Apache-2.0
"""Steps that a graph can hold, their kernels run on the CPU, against the float64 oracle."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")

import sphkv.attention.cuda.steps as cuda_steps
from sphkv.attention.cuda.backend import CudaBackend
from sphkv.attention.cuda.geometry import KernelShape
from sphkv.attention.cuda.shares import head_blocks, launch_steps, longest_first, share_blocks
from sphkv.attention.request import AttentionOptions, DecodeRequest
from sphkv.codec.states import SphericalCodec
from sphkv.core.tiers import TierSpec, TierTable, coded_tier
from sphkv.errors import UnsupportedBatchError
from sphkv.store.config import StoreConfig
from sphkv.testing import cases
from sphkv.testing.attention_cases import FLOORS
from sphkv.testing.cases import (
    CacheCase,
    build_store,
    exact_attention,
    fill_layer,
    random_states,
    rope_of,
)

CPU = torch.device("cpu")
TIERS = TierTable(
    (
        TierSpec("drop", "drop", 0.0, 0, 0),
        coded_tier(2.0, 4),
        TierSpec("max", "dense", 16.0, 16, 16),
    )
)
# tails hold 160 tokens: the first is full after two steps and seals before the third
CASE = CacheCase(tiers=TIERS, mix="k2v4", num_tokens=260, tail_tokens=158, num_layers=2)
SHORT = CacheCase(tiers=TIERS, mix="k2v4", num_tokens=40, tail_tokens=7, num_layers=2, seed=1)
STEPS = 4
OPTIONS = AttentionOptions(scale=0.125)


def two_rows(order):
    """Sequences of unequal length."""
    store = build_store(CASE, order=order)
    store.create(1)
    for layer in range(CASE.num_layers):
        fill_layer(store, SHORT, layer, rope=rope_of(store), sequence=1)
    return store


def seal(store):
    """Seal full tails; nothing else changes."""
    store.make_room([0, 1], num_new=1)
    return True


def new_states(store, row, layer, position):
    """Key, value and query of one token, ``[heads, 1, head_dim]`` as a model in bfloat16 has."""
    parts = random_states(
        store.config.geometry, rope_of(store), 1, first=position, seed=20 + 2 * layer + row
    )
    return tuple(part.bfloat16().float() for part in parts)


def expected_step(store, row, layer, position):
    """Append to a plain store, and attend in float64."""
    keys, values, query = new_states(store, row, layer, position)
    store.append(row, layer, keys, values)
    request = DecodeRequest(store, row, layer, query, torch.tensor([position]), OPTIONS)
    return exact_attention(request).output


def test_captured_steps_of_unequal_rows_go_through_a_seal(on_the_host):
    on_the_host()
    backend = CudaBackend(CPU)
    plain, store = two_rows(None), two_rows(backend.page_order)
    assert backend.why_not(store, [0, 1]) == ""
    steps = backend.capture(store, [0, 1], max_tokens=CASE.num_tokens + 158 + STEPS)
    assert steps is not None
    pages = [store.table(row, 0).num_pages.tolist() for row in (0, 1)]
    lengths = []
    for _ in range(STEPS):
        at = [store.num_tokens(row) for row in (0, 1)]
        assert steps.prepare(lambda: seal(store))
        steps.advance()
        assert steps.positions.flatten().tolist() == at
        for layer in range(CASE.num_layers):
            states = [new_states(store, row, layer, at[row]) for row in (0, 1)]
            keys, values, query = (torch.stack(part) for part in zip(*states, strict=True))
            found = steps.attend(layer, query, keys, values, OPTIONS)
            for row in (0, 1):
                right = expected_step(plain, row, layer, at[row])
                error = (found[row].double() - right).norm() / right.norm()
                assert float(error) <= FLOORS["half"].rms, (at, layer, row)
        steps.commit()
        lengths.append(store.tail(0, 0).num_tokens)
    # the tail was full, and the page sealed ahead of the step that needed room
    assert lengths == [159, 160, 33, 34]
    assert store.table(0, 0).num_pages.tolist() == [count + 1 for count in pages[0]]
    assert store.table(1, 0).num_pages.tolist() == pages[1]
    assert backend.table_bytes(store.codec(0)) > 0
    with pytest.raises(UnsupportedBatchError, match="422 tokens, room is 422"):
        steps.prepare(lambda: seal(store))


LADDER = TierTable(
    (TIERS[0], coded_tier(1.0, 2), coded_tier(2.0, 2), coded_tier(2.0, 4), TIERS["max"])
)
MIXED = CacheCase(tiers=LADDER, mix="runs", num_tokens=896, tail_tokens=127, num_layers=2)


def assert_same_pages(store, plain):
    """What the kernel's order leaves in place is enough to list pages."""
    listed, same = store.page_list(0), plain.page_list(0)
    for name in ("layer_ids", "head_ids", "tier_ids", "counts", "runs", "is_protected"):
        assert torch.equal(getattr(listed, name), getattr(same, name)), name


@pytest.mark.parametrize("is_listed_anew", [False, True])
def test_captured_steps_read_tiers_runs_and_dense_pages(on_the_host, is_listed_anew, monkeypatch):
    """One launch per tier and mode, merged when all are done; then pages go, and others move."""
    on_the_host(12)
    monkeypatch.setattr(cases, "StoreConfig", functools.partial(StoreConfig, max_slab_pages=2))
    backend = CudaBackend(CPU)
    plain, store = build_store(MIXED), build_store(MIXED, order=backend.page_order)
    for each in (plain, store):
        each.seal_at(0, "k2v4")
    assert backend.why_not(store, [0]) == ""
    steps = backend.capture(store, [0], max_tokens=1200)
    assert steps is not None

    def change():
        """Seal, then drop the first page of the lowest tier of every layer."""
        for each in (plain, store):
            each.make_room([0], num_new=1)
        if store.num_tokens(0) == 896 + 129:
            for each in (plain, store):
                for layer in range(MIXED.num_layers):
                    lowest = next(g for g in each.pages(0, layer) if g.layout.tier.name == "k1v2")
                    each.drop(0, layer, lowest.flat_ids()[:1])
            moves = store.compact()
            assert moves is not None
            assert len(moves.old_ids)
        return not is_listed_anew

    for _ in range(4):
        at = store.num_tokens(0)
        assert steps.prepare(change)
        steps.advance()
        for layer in range(MIXED.num_layers):
            keys, values, query = (part[None] for part in new_states(store, 0, layer, at))
            found = steps.attend(layer, query, keys, values, OPTIONS)
            right = expected_step(plain, 0, layer, at)
            error = (found[0].double() - right).norm() / right.norm()
            assert float(error) <= FLOORS["half"].rms, (at, layer)
        steps.commit()
    assert len(steps._launches[0]) > 2
    assert_same_pages(store, plain)

    def demote():
        """A run that was dense becomes a page of a kind that nobody listed."""
        dense = next(g for g in store.pages(0, 0) if g.layout.tier.name == "max")
        store.demote(0, 0, dense.flat_ids()[:1], "k1v2")
        return False

    assert not steps.prepare(demote)


def test_new_pages_have_multiprocessors_set_aside(on_the_host, monkeypatch):
    """A launch keeps its thread blocks while the tier that seals grows."""
    on_the_host(132)
    asked = []

    def noted(work, blocks, spare):
        asked.append([pages for _, pages in work])
        return share_blocks(work, blocks, spare)

    monkeypatch.setattr(cuda_steps, "share_blocks", noted)
    backend = CudaBackend(CPU)
    store = build_store(MIXED, order=backend.page_order)
    store.seal_at(0, "k2v4")
    tokens = store.num_tokens(0)
    for room in (1, 1024):
        assert backend.capture(store, [0], max_tokens=tokens + room) is not None
    layers = MIXED.num_layers
    for now, later in zip(asked[:layers], asked[layers:], strict=True):
        added = [more - pages for pages, more in zip(now, later, strict=True)]
        # half of the 1,024 tokens, in pages of 128, for the one tier that seals
        assert sorted(int(pages.max()) for pages in added)[:-1] == [0] * (len(added) - 1)
        assert (added[max(range(len(added)), key=lambda at: added[at].max())] == 4).all()


def test_warm_up_steps_leave_no_trace(on_the_host):
    on_the_host()
    backend = CudaBackend(CPU)
    store = two_rows(backend.page_order)
    steps = backend.capture(store, [0, 1], max_tokens=600)
    assert steps is not None
    before = steps.positions.tolist()
    steps.advance()
    assert steps.positions.tolist() != before
    steps.recount()
    assert steps.positions.tolist() == before == [[417], [46]]
    new = torch.zeros(2, 2, 1, 64)
    with pytest.raises(UnsupportedBatchError, match="window of 100"):
        steps.attend(0, new, new, new, AttentionOptions(0.125, window=100))
    store.crop(1, 30)
    with pytest.raises(UnsupportedBatchError, match="changed"):
        steps.prepare(lambda: seal(store))


def test_reasons_are_named(on_the_host, monkeypatch):
    on_the_host()
    backend = CudaBackend(CPU)
    store = two_rows(backend.page_order)
    assert "window" in backend.why_not(store, [0, 1], windows=(None, 512))
    assert backend.capture(store, [0, 1], max_tokens=600, windows=(None, 512)) is None
    assert "no sequence" in backend.why_not(store, [])
    assert "order" in backend.why_not(build_store(CASE), [0])
    own = SphericalCodec(store.codec(0).calibration)
    store.create(2, codec=own)
    assert "codecs of their own" in backend.why_not(store, [0, 2])
    store.create(3)
    assert "no open tail" in backend.why_not(store, [0, 3])
    store.create(4, seal_tier="max")
    assert "['k2v4', 'max']" in backend.why_not(store, [0, 4])
    assert "tier 'max'" in backend.why_not(store, [4])
    empty = CacheCase(tiers=TIERS, num_tokens=0, tail_tokens=3)
    assert "sealed yet" in backend.why_not(build_store(empty, order=backend.page_order), [0])
    odd = TierTable((TIERS[0], coded_tier(2.0, 4), coded_tier(2.5, 8), TIERS["max"]))
    mixed = build_store(
        CacheCase(tiers=odd, mix="k2.5v8", num_tokens=300), order=backend.page_order
    )
    mixed.seal_at(0, "k2v4")
    assert "tier 'k2.5v8' with contiguous positions" in backend.why_not(mixed, [0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    assert "(9, 0)" in backend.why_not(store, [0, 1])


def test_more_kinds_of_pages_than_can_be_merged_are_not_captured(on_the_host, monkeypatch):
    on_the_host()
    backend = CudaBackend(CPU)
    store = build_store(MIXED, order=backend.page_order)
    assert backend.why_not(store, [0]) == ""
    monkeypatch.setattr(cuda_steps, "MOST_PARTS", 3)
    assert "reads 2 kinds of coded pages, there are " in backend.why_not(store, [0])
    assert backend.capture(store, [0], max_tokens=2048) is None


def shape_of(teams):
    return KernelShape(128, 32, 0, 1, 4, columns=4, teams=teams)


# of heads of 128 elements, as fitted codebooks come to
SHAPES = {
    "k2v2": KernelShape(128, 64, 1, 1, 2, columns=4, teams=4),
    "k3v4": KernelShape(128, 96, 1, 1, 4, columns=4, teams=3),
    "k4v8": KernelShape(128, 128, 0, 1, 8, columns=4, teams=1),
    "k2v4": KernelShape(128, 64, 1, 1, 4, columns=4, teams=4),
}


@pytest.mark.parametrize("seed", range(5))
def test_launches_side_by_side_fit_the_multiprocessors_and_end_together(seed):
    torch.manual_seed(seed)
    work = [
        (shape_of(teams), (torch.rand(8, 3) * size + 1).long().numpy())
        for size, teams in ((1600, 4), (300, 3), (140, 1))
    ]
    shares = share_blocks(work, 128)
    assert sum(shares) == 128
    ends = [launch_steps(*own, blocks) for own, blocks in zip(work, shares, strict=True)]
    last = max(range(3), key=lambda at: ends[at])
    # what the others have, the last cannot have: they would end later than it does
    for at in {0, 1, 2} - {last}:
        assert launch_steps(*work[at], max(8, shares[at] // 2)) > ends[last] or shares[at] == 8


@pytest.mark.parametrize("pages", [[5, 0, 0, 900], [1, 1, 1, 1], [0, 0, 0, 0], [70, 65, 3, 64]])
def test_no_block_has_more_pages_than_it_must(pages):
    pages = np.array(pages)
    own = head_blocks(pages, 9)
    assert own.sum() <= 9
    assert (own[pages > 0] > 0).all()
    most = (pages / own.clip(1)).max()
    for head in pages.nonzero()[0]:
        rest = np.delete(pages, head)
        fewest = sum(-(-int(count) // max(1, int(np.ceil(most)) - 1)) for count in rest)
        assert most <= 1 or fewest + -(-int(pages[head]) // max(1, int(np.ceil(most)) - 1)) > 9


def test_launches_without_pages_take_no_multiprocessor_from_others():
    idle, busy = np.zeros((8, 2), int), np.full((8, 2), 900)
    work = [(shape_of(4), pages) for pages in (idle, busy, idle)]
    assert share_blocks(work, 128) == [8, 128, 8]


def test_a_launch_of_few_pages_has_few_blocks():
    work = [(shape_of(4), np.full((8, 2), count)) for count in (1, 900)]
    shares = share_blocks(work, 128)
    assert shares[0] == 8
    assert shares[1] == 120


@pytest.mark.parametrize(
    ("heads", "tiers", "rows", "counts"),
    [
        (64, ("k2v2", "k4v8"), 8, (1, 1)),
        (32, ("k2v2", "k3v4", "k4v8", "k2v4"), 8, (20, 7, 13, 20)),
        (40, ("k2v2", "k3v4", "k4v8"), 2, (13, 3, 13)),
    ],
)
def test_every_head_has_a_block_where_there_are_just_enough(heads, tiers, rows, counts):
    work = [
        (SHAPES[tier], np.full((heads, rows), count))
        for tier, count in zip(tiers, counts, strict=True)
    ]
    shares = share_blocks(work, 128, 4)
    assert min(shares) >= heads
    assert sum(shares) == 128
    assert sorted(longest_first(work, shares)) == list(range(len(work)))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_shares_are_whole_whatever_pages_there_are(data):
    heads = data.draw(st.sampled_from([1, 2, 8, 30, 32, 40, 64]))
    blocks = data.draw(st.sampled_from([64, 100, 128]))
    work = []
    for shape in list(SHAPES.values())[: data.draw(st.integers(1, 4))]:
        rows = data.draw(st.sampled_from([1, 2, 8]))
        most = data.draw(st.sampled_from([1, 7, 40, 900]))
        held = st.lists(st.integers(0, most), min_size=heads * rows, max_size=heads * rows)
        work.append((shape, np.array(data.draw(held)).reshape(heads, rows)))
    shares = share_blocks(work, blocks)
    busy = [own for own, (_, pages) in zip(shares, work, strict=True) if pages.any()]
    assert all(own >= heads for own in shares)
    if len(busy) * heads <= blocks:
        assert sum(busy) == (blocks if busy else 0)
    else:
        assert shares == [max(blocks, heads)] * len(shares)
    longest_first(work, shares)


@pytest.mark.parametrize(("rows", "count", "is_kept_apart"), [(1, 900, True), (8, 80, False)])
def test_a_short_launch_takes_turns_on_what_is_spare(rows, count, is_kept_apart):
    """Its eight blocks run four at a time, if they are done twice before the others are once."""
    work = [(shape_of(4), np.full((8, rows), each)) for each in (count, 2)]
    assert (share_blocks(work, 128, 4) == [128, 8]) is is_kept_apart
    assert sum(share_blocks(work, 128)) == 128


def test_the_longest_launch_comes_first():
    work = [(shape_of(4), np.full((8, 1), count)) for count in (0, 40, 900)]
    assert longest_first(work, [1, 8, 120]) == [2, 1, 0]
    assert longest_first(work, [1, 8, 2000]) == [1, 2, 0]


def test_many_heads_run_launch_by_launch():
    work = [(shape_of(4), np.full((60, 1), 900))] * 3
    assert share_blocks(work, 128) == [128] * 3
