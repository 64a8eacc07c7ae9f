# SPDX-License-Identifier: Apache-2.0
"""Making room for pages that seal: in parts beside captured steps, in time, with one result."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cache.test_retention import (
    GEOMETRY,
    NoAttention,
    check_bytes,
    make_engine,
    make_states,
    residency_of,
    run,
)
from torch import Tensor

from sphkv.cache import prompt, rebalance
from sphkv.cache.engine import CacheEngine
from sphkv.cache.plan import retention_tiers
from sphkv.cache.retention import RetentionResidency
from sphkv.cache.rows import CodedRows
from sphkv.cache.step import StepTokens
from sphkv.store.order import CodecOnly
from sphkv.testing.cases import JoiningCodec, MemoryCopier


class HostGraph:
    """Stands for captured steps: the host writes what a kernel would."""

    max_tokens = 1 << 20

    def __init__(self, engine: CacheEngine) -> None:
        assert engine.store is not None
        self.engine, self.store = engine, engine.store
        self.sequences = [row.sequence for row in engine.rows]
        self.dropped: list[int] = []
        self.moved: list[int] = []
        self.journal = self.store.allocator.journal()

    def prepare(self, make_room: Callable[[], bool]) -> bool:
        is_only_grown = make_room()
        events, is_all = self.journal.take()
        assert is_only_grown
        assert is_all
        self.dropped.append(sum(len(event.old) for event in events if event.new is None))
        self.moved.append(sum(len(event.old) for event in events if event.new is not None))
        return True

    def commit(self) -> None:
        self.store.absorb(self.sequences)

    def step(self) -> None:
        rows, at = len(self.sequences), self.engine.length
        is_real = torch.ones(rows, 1, dtype=torch.bool)
        self.engine.begin(StepTokens(is_real, torch.full((rows, 1), at)))
        for layer in range(GEOMETRY.num_layers):
            _, keys, values = make_states(layer, 1, at)
            for row in self.sequences:
                tail = self.store.open_tail(row, layer)
                assert tail is not None
                tail.keys[:, tail.num_tokens], tail.values[:, tail.num_tokens] = (
                    keys[:, 0],
                    values[:, 0],
                )
        self.engine.finish()
        check_bytes(self.engine)
        assert self.engine.resident_bytes() <= (self.engine.limit_bytes() or 0)


def held_runs(engine: CacheEngine) -> list[set[tuple[int, ...]]]:
    """Layer, head, tier and runs of every page of each row."""
    found = []
    for row in engine.rows:
        assert engine.store is not None
        pages = engine.store.page_list(row.sequence)
        engine.store.forget_page_list(row.sequence)
        parts = (pages.layer_ids, pages.head_ids, pages.tier_ids)
        told = torch.cat([*(part[:, None] for part in parts), pages.runs.long()], 1)
        found.append({tuple(page) for page in told.tolist()})
    return found


def capture(engine: CacheEngine) -> HostGraph:
    assert engine._coded is not None
    engine._coded.graph = graph = HostGraph(engine)  # type: ignore[assignment]
    return graph


def captured(
    rows: int, budget: str = "22%", *, refresh_share: float = 1 / 32
) -> tuple[CacheEngine, HostGraph]:
    engine = make_engine(budget, refresh_share=refresh_share, demotes=False)
    run(engine, 1500, rows=rows)
    graph = capture(engine)
    for row in engine.rows:
        row.residency.plan_ahead()
    return engine, graph


def test_room_is_made_beside_the_steps_as_it_would_be_at_once(monkeypatch):
    """Parts of a refresh leave what one leaves that is done whole."""
    monkeypatch.setattr(rebalance, "_MOVES_AT_ONCE", 4)
    monkeypatch.setattr(rebalance, "_DROPS_AT_ONCE", 1)
    ahead, graph = captured(1)
    whole, other = captured(1)
    begun = 0
    for _ in range(200):
        graph.step()
        other.step()
        # both decide beside the same step
        if begun < (begun := residency_of(whole).num_rebalances):
            while whole.rows[0].residency.work_ahead():
                pass
    for each in (ahead, whole):
        while each.rows[0].residency.work_ahead():
            pass
    assert begun > 1
    assert held_runs(ahead) == held_runs(whole)
    assert ahead.resident_bytes() == whole.resident_bytes()
    assert sum(graph.dropped) == sum(other.dropped) > 10
    assert sum(count > 0 for count in graph.dropped) >= begun * GEOMETRY.num_layers
    # a slab more at most
    assert 0 < max(graph.moved) < 4 + 4


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [([3, 4, 5], [7, 5]), ([9, 1, 1], [9, 2]), ([6], [6]), ([2, 2, 2, 2], [6, 2]), ([], [0])],
)
def test_layers_that_drop_few_pages_do_so_together(monkeypatch, sizes, parts):
    monkeypatch.setattr(rebalance, "_DROPS_AT_ONCE", 6)
    layer_ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    # every second page stays
    layer_ids = layer_ids.repeat_interleave(2)
    index = torch.arange(0, len(layer_ids), 2)
    found = rebalance._split_layers(index, layer_ids)
    assert [len(part) for part in found] == parts
    assert torch.equal(torch.cat(found), index)


class CountedWork:
    """Parts of making room for a row, all alike."""

    num_changes = 0

    def __init__(self, parts: int) -> None:
        self.parts = parts

    @property
    def work_left(self) -> int:
        return 2 * self.parts

    def work_ahead(self) -> bool:
        has_some = self.parts > 0
        self.parts -= has_some
        return has_some


@pytest.mark.parametrize("rooms", [[128] * 8, [128, 112, 96, 80], [16, 128]])
def test_room_is_made_at_an_even_pace_and_in_time(rooms: list[int]) -> None:
    make_rows: Any = CodedRows
    coded, parts = make_rows(None, None, None, None), 34
    works, left = [CountedWork(parts) for _ in rooms], list(rooms)
    coded.rows = [
        SimpleNamespace(residency=work, room=functools.partial(left.__getitem__, at))
        for at, work in enumerate(works)
    ]
    most = max(-(-parts * (at + 1) // room) for at, room in enumerate(sorted(rooms)))
    for step in range(min(rooms) - 1):
        before = sum(work.parts for work in works)
        assert coded._work_ahead()
        assert before - sum(work.parts for work in works) <= most
        left[:] = [room - step - 1 for room in rooms]
    # what is due first is done, or is so beside the last step before it
    first = works[rooms.index(min(rooms))]
    assert first.parts <= most
    coded._work_ahead()
    assert first.parts == 0


@pytest.mark.parametrize(("rows", "most"), [(1, 2), (3, 8)])
def test_old_pages_stay_until_room_is_needed(rows: int, most: int) -> None:
    """What drops them is due beside the last step but one; that of a row before, earlier."""
    engine, graph = captured(rows)
    page = engine.rows[0].room()
    left: list[int] = []
    for _ in range(200):
        graph.step()
        page = max(page, engine.rows[0].room())
        if graph.dropped[-1]:
            left.append(min(row.room() for row in engine.rows))
    assert len(left) > rows
    assert max(left) <= most < page // 3
    for row in range(rows):
        assert residency_of(engine, row).num_rebalances > 0


def test_room_that_the_next_pages_do_not_find_is_not_made():
    """What is too little for them would lie idle."""
    engine, _ = captured(1)
    little_share = 0.5 * residency_of(engine)._seal_bytes() / (engine.limit_bytes() or 0)
    held = []
    for share in (0.0, little_share, 1 / 4):
        engine, graph = captured(1, refresh_share=share)
        for _ in range(200):
            graph.step()
        times = residency_of(engine).num_rebalances
        held.append((times, sum(graph.dropped), held_runs(engine)))
    none, little, much = held
    assert none == little
    assert none[0] > much[0] > 0
    assert none[1] < much[1]


def test_the_ceiling_of_a_batch_holds_at_every_captured_step():
    engine, graph = captured(3)
    for _ in range(200):
        graph.step()
    assert all(residency_of(engine, row).num_rebalances > 0 for row in range(3))
    assert sum(graph.dropped) > 20
    # some row more than once
    assert sum(count > 0 for count in graph.dropped) > 3


class CopyingCodec(CodecOnly):
    """Leaves encoding to the codec."""

    def copier(self, device: torch.device) -> MemoryCopier:
        return MemoryCopier()


def rounded_states(*args: Any) -> tuple[Tensor, ...]:
    """States of bfloat16, which joined layers are encoded from."""
    return tuple(part.bfloat16().float() for part in make_states(*args))


def test_tails_of_all_layers_seal_together_as_they_do_one_by_one(monkeypatch):
    monkeypatch.setattr("tests.cache.test_retention.make_states", rounded_states)
    usual, graph = captured(2)
    codec = JoiningCodec(GEOMETRY.num_kv_heads)
    monkeypatch.setattr(NoAttention, "page_codec", codec)
    together, other = captured(2)
    codec.joined.clear()
    for _ in range(150):
        graph.step()
        other.step()
        assert usual.resident_bytes() == together.resident_bytes()
    assert held_runs(usual) == held_runs(together)
    assert usual.store is not None
    assert together.store is not None
    pages = 2 * GEOMETRY.num_layers * GEOMETRY.num_kv_heads
    assert set(codec.joined) == {pages}
    for row in range(2):
        for layer in range(GEOMETRY.num_layers):
            groups = (store.pages(row, layer) for store in (usual.store, together.store))
            for left, right in zip(*groups, strict=True):
                a, b = usual.store.view(left).pages, together.store.view(right).pages
                assert torch.equal(a, b)
            table = together.store.table(row, layer)
            counted = table.tag_counts()
            table.touch()
            assert counted == table.tag_counts()


def test_pages_listed_and_copied_at_once_decide_alike(monkeypatch):
    """As a GPU does it: all pages are read anew."""
    usual, graph = captured(2)
    monkeypatch.setattr(NoAttention, "page_codec", CopyingCodec())
    copying, other = captured(2)
    assert copying.store is not None
    assert copying.store.allocator.has_copier
    assert [row.room() for row in (*usual.rows, *copying.rows)] == [4] * 4
    for _ in range(150):
        graph.step()
        other.step()
    assert held_runs(usual) == held_runs(copying)
    assert sum(other.dropped) == sum(graph.dropped) > 10


def test_many_rows_of_a_gpu_seal_beside_different_steps(monkeypatch):
    monkeypatch.setattr(NoAttention, "page_codec", CopyingCodec())
    monkeypatch.setattr(prompt, "_ROWS_AT_ONCE", 1)
    tiers = retention_tiers(GEOMETRY.head_dim, 64)
    engine = make_engine("40%", tiers=tiers, refresh_share=1 / 32, demotes=False)
    run(engine, 1500, rows=4)
    # 28 tokens are no whole runs, or the newest; every next row has a run more in its tail
    assert [row.room() for row in engine.rows] == [36, 20, 4, 36]
    graph = capture(engine)
    assert engine.store is not None
    sealed = []
    for _ in range(100):
        before = [engine.store.tail(row, 0).first_position for row in range(4)]
        graph.step()
        after = [engine.store.tail(row, 0).first_position for row in range(4)]
        sealed.append(sum(a > b for a, b in zip(after, before, strict=True)))
    assert [at for at, count in enumerate(sealed) if count] == [3, 19, 35, 67, 83, 99]
    assert max(sealed) == 2


@pytest.mark.parametrize("short", [40, 48, 56, 63, 64])
def test_a_short_row_beside_a_long_one(monkeypatch, short: int) -> None:
    monkeypatch.setattr(NoAttention, "page_codec", CopyingCodec())
    monkeypatch.setattr(prompt, "_ROWS_AT_ONCE", 1)
    engine = make_engine("60%", demotes=False)
    long = 1500
    is_real = torch.ones(2, long, dtype=torch.bool)
    is_real[1, : long - short] = False
    positions = (is_real.long().cumsum(1) - 1).clamp(min=0)
    engine.begin(StepTokens(is_real, positions))
    for layer in range(GEOMETRY.num_layers):
        query, keys, values = (part.expand(2, -1, -1, -1) for part in make_states(layer, long))
        engine.update(layer, keys, values)
        engine.end_layer(layer, query)
    engine.finish()
    assert engine.plan is not None
    assert engine.plan.is_retention
    assert engine.num_tokens == [long, short]


def test_pages_that_move_between_listing_and_deciding_are_listed_again(monkeypatch):
    engine, graph = captured(2, "22%")
    first, second = (row.residency for row in engine.rows)
    assert isinstance(first, RetentionResidency)
    assert isinstance(second, RetentionResidency)
    assert engine.store is not None
    for _ in range(140):
        ahead: Any = second._rebalancer._ahead
        frame = None if ahead is None else ahead.gi_frame
        is_listed = frame is not None and "pages" in frame.f_locals
        if is_listed and ahead is not None and ahead.gi_yieldfrom is None:
            break
        graph.step()
    else:
        pytest.fail("no row was ever between listing and deciding")
    before = engine.store.allocator.num_moved
    first._rebalancer.stop()
    limit = first._limit(engine.store.num_tokens(first._sequence)) - 40_000
    sealed = engine.store.tail(first._sequence, 0).first_position
    first._settle(limit, sealed, lambda: 0)
    assert engine.store.allocator.num_moved > before
    while second.work_ahead():
        pass
    assert second._rebalancer._ahead is None
