# SPDX-License-Identifier: Apache-2.0
"""Five thousand random steps against a plain model of what the store must hold."""

import copy
import ctypes
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sphkv.core.contract import LayerContract
from sphkv.errors import BudgetError
from sphkv.store.config import StoreConfig
from sphkv.store.layout import PageView
from sphkv.store.paging import PositionMode
from sphkv.store.store import PageStore

MAX_BYTES = 24_000
MAX_SEQUENCES = 3
NUM_EXAMPLES, NUM_STEPS, MIN_STEPS = 55, 120, 5000
SEAL_TIERS, SEAL_TOKENS, RECENT_TOKENS = ("k2v2", "max"), 32, 5

pick = st.integers(0, 2**16)


class LayerModel:
    """What one layer must hold: sealed states by head and position, and the tail."""

    def __init__(self, num_heads: int, seal_tier_id: int) -> None:
        self.seal_tier_id = seal_tier_id
        # position -> (tier id, number, is protected)
        self.sealed: list[dict[int, tuple[int, int, bool]]] = [{} for _ in range(num_heads)]
        # numbers of each head
        self.tail: list[list[int]] = [[] for _ in range(num_heads)]
        self.next_position = 0

    def seal(self, num_new: int) -> None:
        """Move the oldest states of a tail to pages until ``num_new`` more fit."""
        first = self.next_position - len(self.tail[0])
        for head, tail in enumerate(self.tail):
            start = first
            while len(tail) + num_new > SEAL_TOKENS + RECENT_TOKENS:
                for number in tail[:SEAL_TOKENS]:
                    self.sealed[head][start] = (self.seal_tier_id, number, False)
                    start += 1
                del tail[:SEAL_TOKENS]

    def has_no_tail(self) -> bool:
        return not self.tail[0]


class StoreMachine(RuleBasedStateMachine):
    fixtures: ClassVar[dict[str, Any]] = {}
    steps: ClassVar[Counter[str]] = Counter()

    @initialize()
    def begin(self) -> None:
        self.codec = self.fixtures["codec"]
        self.tiers = self.fixtures["tiers"]
        self.geometry = self.fixtures["geometry"]
        config = StoreConfig(
            self.geometry, self.tiers, SEAL_TIERS[0], RECENT_TOKENS, MAX_BYTES, max_slab_pages=8
        )
        self.store = PageStore(config, self.codec)
        self.model: dict[int, list[LayerModel]] = {}
        self.seen: dict[tuple[int, int, int], dict[int, bytes]] = {}
        self.next_number = 0
        self.next_sequence = 0
        self.folder = tempfile.TemporaryDirectory()
        self.ledger = self.store.ledger()
        # With a sequence from the start, some rule applies whichever rules a run leaves out.
        self.create()

    def teardown(self) -> None:
        for sequence in list(self.model):
            self.store.free(sequence)
        assert self.store.live_bytes == 0
        assert self.store.live_tensors() == []
        self.folder.cleanup()

    def _attempt(self, name: str, call: Any, *args: Any) -> bool:
        """Call the store; on a full store, check that nothing moved."""
        before = self.store.ledger()
        try:
            call(*args)
        except BudgetError as refusal:
            error = refusal
        else:
            self.steps[name] += 1
            return True
        assert error.limit == MAX_BYTES
        assert error.needed > error.free == MAX_BYTES - self.store.live_bytes
        assert self.store.ledger() == before
        self.steps[f"{name} refused"] += 1
        return False

    def _sequence(self, choice: int) -> int:
        return sorted(self.model)[choice % len(self.model)]

    def _layer(self, choice: int) -> int:
        return choice % int(self.geometry.num_layers)

    def _numbers(self, num_tokens: int) -> torch.Tensor:
        heads = self.geometry.num_kv_heads
        first, self.next_number = self.next_number, self.next_number + heads * num_tokens
        return (first + torch.arange(heads * num_tokens)).reshape(heads, num_tokens) % 60_000

    @precondition(lambda self: len(self.model) < MAX_SEQUENCES)
    @rule()
    def create(self) -> None:
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        seal_tier = SEAL_TIERS[sequence % 2]
        if self._attempt("create", partial(self.store.create, sequence, seal_tier=seal_tier)):
            self.model[sequence] = [
                LayerModel(self.geometry.num_kv_heads, self.tiers.id_of(seal_tier))
                for _ in range(self.geometry.num_layers)
            ]

    @precondition(lambda self: self.model)
    @rule(choice=pick, layer=pick, num_tokens=st.sampled_from([0, 1, 3, 16, 40, 75]))
    def append(self, choice: int, layer: int, num_tokens: int) -> None:
        sequence, layer = self._sequence(choice), self._layer(layer)
        numbers = self._numbers(num_tokens)
        if not self._attempt(
            "append", self.store.append, sequence, layer, *self.codec.dense(numbers)
        ):
            return
        model = self.model[sequence][layer]
        model.next_position += num_tokens
        for head, tail in enumerate(model.tail):
            tail += numbers[head].tolist()
        model.seal(0)

    @precondition(lambda self: self.model)
    @rule(choice=pick, layer=pick, num_new=st.integers(1, RECENT_TOKENS + 1))
    def make_room(self, choice: int, layer: int, num_new: int) -> None:
        """Fill a tail; then seal it, and others that are as good as full."""
        model = self.model[self._sequence(choice)][self._layer(layer)]
        self.append(choice, layer, SEAL_TOKENS + RECENT_TOKENS - len(model.tail[0]))
        models = [model for layers in self.model.values() for model in layers]
        room = SEAL_TOKENS + RECENT_TOKENS - num_new
        if not any(len(model.tail[0]) > room for model in models):
            assert not self.store.make_room(list(self.model), num_new)
        elif self._attempt("make room", self.store.make_room, list(self.model), num_new):
            for model in models:
                model.seal(num_new)

    def _places(self, fits: Callable[[LayerModel], bool]) -> list[tuple[int, int]]:
        """Sequences and layers whose model fits."""
        return [
            (sequence, layer)
            for sequence, layers in sorted(self.model.items())
            for layer, model in enumerate(layers)
            if fits(model)
        ]

    @precondition(lambda self: self._places(LayerModel.has_no_tail))
    @rule(choice=pick, num_tokens=st.integers(0, 90), gap=st.booleans(), run=st.booleans())
    def write(self, choice: int, num_tokens: int, gap: bool, run: bool) -> None:
        places = self._places(LayerModel.has_no_tail)
        sequence, layer = places[choice % len(places)]
        model = self.model[sequence][layer]
        numbers = self._numbers(num_tokens)
        heads, dense_id = self.geometry.num_kv_heads, self.tiers.dense_id
        generator = torch.Generator().manual_seed(choice)
        tier_id = torch.randint(0, dense_id + 1, (heads, num_tokens), generator=generator)
        if run:
            index = torch.arange(num_tokens)
            tier_id = tier_id[:, index - index % 16]
        protected = torch.rand((heads, num_tokens), generator=generator) < 0.3
        protected &= tier_id == dense_id
        positions = model.next_position + torch.arange(num_tokens)
        if gap:
            positions += torch.randint(0, 2, (num_tokens,), generator=generator).cumsum(0)
        contract = LayerContract(tier_id.to(torch.uint8), protected, 16 if run else 1)
        dense = self.codec.dense(numbers)
        if not self._attempt(
            "write", self.store.write, sequence, layer, contract, *dense, positions
        ):
            return
        for head in range(heads):
            for token, position in enumerate(positions.tolist()):
                tier = int(tier_id[head, token])
                if tier != self.tiers.drop_id:
                    state = (tier, int(numbers[head, token]), bool(protected[head, token]))
                    model.sealed[head][position] = state
        if num_tokens:
            model.next_position = int(positions[-1]) + 1

    def _pages(self, choice: int) -> tuple[int, int, list[int], int]:
        """Some pages of one layer that share a tier, and that tier."""
        places = self._places(lambda model: any(model.sealed))
        if not places:
            return 0, 0, [], 0
        sequence, layer = places[choice % len(places)]
        groups = self.store.pages(sequence, layer)
        group = groups[choice % len(groups)]
        ids = group.flat_ids().tolist()
        return sequence, layer, ids[choice % len(ids) :][:3], group.layout.tier_id

    @precondition(lambda self: self.model)
    @rule(choice=pick, tier=pick)
    def demote(self, choice: int, tier: int) -> None:
        sequence, layer, page_ids, tier_now = self._pages(choice)
        if not page_ids:
            return
        tier %= tier_now
        call = partial(self.store.demote, sequence, layer, page_ids, tier)
        self._rewrite("demote", call, page_ids, tier, sequence, layer)

    @precondition(lambda self: self.model)
    @rule(choice=pick)
    def drop(self, choice: int) -> None:
        sequence, layer, page_ids, _ = self._pages(choice)
        if page_ids:
            call = partial(self.store.drop, sequence, layer, page_ids)
            self._rewrite("drop", call, page_ids, self.tiers.drop_id, sequence, layer)

    def _rewrite(self, name: str, call: Any, page_ids: list[int], tier: int, *place: Any) -> None:
        """Drop or demote pages of a (sequence, layer), here and in the model."""
        states = self._states_of(place[0], place[1], page_ids)
        sealed = self.model[place[0]][place[1]].sealed
        if any(sealed[head][position][2] for head, position in states):
            with pytest.raises(ValueError, match="protected"):
                call()
            self.steps[f"{name} protected"] += 1
            return
        if not self._attempt(name, call):
            return
        for head, position in states:
            if tier == self.tiers.drop_id:
                del sealed[head][position]
            else:
                sealed[head][position] = (tier, sealed[head][position][1], False)

    def _states_of(self, sequence: int, layer: int, page_ids: list[int]) -> list[tuple[int, int]]:
        """Head and position of every state of some pages."""
        states = []
        for group in self.store.pages(sequence, layer):
            view = self.store.view(group)
            wanted = torch.isin(group.flat_ids(), torch.tensor(page_ids))
            live = view.live() & wanted[:, None]
            heads = group.head_ids()[:, None].expand_as(live)[live]
            states += list(zip(heads.tolist(), view.positions()[live].tolist(), strict=True))
        return states

    @precondition(lambda self: 0 < len(self.model) < MAX_SEQUENCES)
    @rule(choice=pick)
    def fork(self, choice: int) -> None:
        sequence = self._sequence(choice)
        new, self.next_sequence = self.next_sequence, self.next_sequence + 1
        if self._attempt("fork", self.store.fork, sequence, new):
            self.model[new] = copy.deepcopy(self.model[sequence])

    @precondition(lambda self: len(self.model) == MAX_SEQUENCES)
    @rule(choice=pick)
    def free(self, choice: int) -> None:
        sequence = self._sequence(choice)
        assert self._attempt("free", self.store.free, sequence)
        del self.model[sequence]

    @precondition(lambda self: self.model)
    @rule(choice=pick, length=pick)
    def crop(self, choice: int, length: int) -> None:
        sequence = self._sequence(choice)
        longest = max(model.next_position for model in self.model[sequence])
        length = longest + 1 - length % (longest // 2 + 2)
        if not self._attempt("crop", self.store.crop, sequence, length):
            return
        for model in self.model[sequence]:
            first = model.next_position - len(model.tail[0])
            model.next_position = min(model.next_position, length)
            for head, sealed in enumerate(model.sealed):
                for position in [position for position in sealed if position >= length]:
                    del sealed[position]
                del model.tail[head][max(0, length - first) :]

    @precondition(lambda self: self.model)
    @rule()
    def compact(self) -> None:
        held = self.store.live_bytes
        if self.store.compact() is not None:
            assert self.store.live_bytes < held
            self.steps["compact"] += 1

    @precondition(lambda self: self.model)
    @rule(choice=pick)
    def save_and_load(self, choice: int) -> None:
        sequence = self._sequence(choice)
        path = Path(self.folder.name) / "cache.safetensors"
        self.store.save(sequence, path, codec_hash="fake")
        new, self.next_sequence = self.next_sequence, self.next_sequence + 1
        if self._attempt("load", lambda: self.store.load(new, path, codec_hash="fake")):
            self.model[new] = copy.deepcopy(self.model[sequence])
            self.store.free(sequence)
            del self.model[sequence]

    @invariant()
    def ledger_is_bytes_of_live_tensors(self) -> None:
        ledger = self.store.ledger()
        assert ledger.total == sum(tensor.nbytes for tensor in self.store.live_tensors())
        assert ledger.total == self.store.live_bytes <= MAX_BYTES
        assert min(ledger.to_dict().values()) >= 0
        self.ledger = ledger

    @invariant()
    def pages_have_the_owners_they_count(self) -> None:
        owners: Counter[int] = Counter()
        for sequence in self.model:
            for layer in range(self.geometry.num_layers):
                ids = self.store.table(sequence, layer).all_ids().tolist()
                assert len(set(ids)) == len(ids)
                owners.update(ids)
        refcounts = self.store.allocator.refcounts(torch.tensor(sorted(owners), dtype=torch.int64))
        assert refcounts.tolist() == [owners[page] for page in sorted(owners)]
        used = 0
        for slab in self.store.allocator.slabs():
            free = slab.refcounts.tolist().count(0)
            assert slab.num_free == free < slab.num_pages
            used += slab.num_pages - free
        assert used == len(owners)

    @invariant()
    def every_state_reads_back(self) -> None:
        """Parse the pages of layers that changed; all others must be the same byte by byte."""
        assert sorted(self.store.sequences) == sorted(self.model)
        seen, self.seen = self.seen, {}
        for sequence, layers in self.model.items():
            for layer, model in enumerate(layers):
                key = (sequence, layer, self.store.table(sequence, layer).version)
                if key in seen:
                    self.seen[key] = seen[key]
                else:
                    self.seen[key] = self._check_pages(sequence, layer, model)
                self._check_tail(sequence, layer, model)
        pages = {page: data for found in self.seen.values() for page, data in found.items()}
        addresses = self.store.allocator.addresses(torch.tensor(list(pages), dtype=torch.int64))
        for address, data in zip(addresses.tolist(), pages.values(), strict=True):
            assert ctypes.string_at(address, len(data)) == data
        self.steps["any"] += 1

    def _check_tail(self, sequence: int, layer: int, model: LayerModel) -> None:
        assert self.store.num_tokens(sequence, layer) == model.next_position
        tail = self.store.tail(sequence, layer)
        assert tail.first_position == model.next_position - tail.num_tokens
        if not model.tail[0]:
            assert tail.num_tokens == 0
            return
        keys, values = self.codec.dense(torch.tensor(model.tail))
        assert torch.equal(tail.keys.float(), keys)
        assert torch.equal(tail.values.float(), values)

    def _check_pages(self, sequence: int, layer: int, model: LayerModel) -> dict[int, bytes]:
        """Compare every page of a layer with the model; return its bytes."""
        num_states = 0
        pages: dict[int, bytes] = {}
        for group in self.store.pages(sequence, layer):
            view = self.store.view(group)
            num_states += self._check_group(layer, model, group, view)
            pages |= dict(
                zip(group.flat_ids().tolist(), map(bytes, view.pages.numpy()), strict=True)
            )
        assert num_states == sum(len(sealed) for sealed in model.sealed)
        return pages

    def _check_group(self, layer: int, model: LayerModel, group: Any, view: PageView) -> int:
        tier = group.layout.tier
        live = view.live()
        heads = group.head_ids()[:, None].expand_as(live)[live]
        positions = view.positions()[live]
        expected = [
            model.sealed[head][position]
            for head, position in zip(heads.tolist(), positions.tolist(), strict=True)
        ]
        assert {tier_id for tier_id, _, _ in expected} == {group.layout.tier_id}
        assert view.flags()[live].tolist() == [flag for _, _, flag in expected]
        number = torch.tensor([number for _, number, _ in expected])
        if tier.is_coded:
            keys = view.key_codes().transpose(1, 2)[live]
            assert torch.equal(keys, self.codec.key_codes(layer, tier, number))
            radius = heads.float() + 0.25 + 2.0 * self.codec.radius_code(layer, number).float()
            assert torch.equal(view.radius()[live], radius)
        else:
            assert torch.equal(view.dense_keys()[live].float(), self.codec.dense(number)[0])
        if tier.has_value_codes:
            values = view.value_codes()[live]
            assert torch.equal(values, self.codec.value_codes(tier, number))
            scale = -heads.float() + 0.5 * self.codec.scale_code(number).float()
            assert torch.equal(view.value_scale()[live], scale)
        else:
            assert torch.equal(view.dense_values()[live].float(), self.codec.dense(number)[1])
        self.steps[f"read {PositionMode(group.layout.position_mode).name}"] += 1
        return len(expected)


def test_store_follows_the_model_for_5000_steps(codec, geometry, tiers) -> None:
    StoreMachine.fixtures = {"codec": codec, "geometry": geometry, "tiers": tiers}
    StoreMachine.steps = Counter()
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=NUM_STEPS,
            derandomize=True,
            deadline=None,
        ),
    )
    steps = StoreMachine.steps
    assert steps["any"] >= MIN_STEPS, steps
    names = (
        "create",
        "append",
        "make room",
        "write",
        "demote",
        "drop",
        "fork",
        "free",
        "crop",
        "load",
    )
    refused = ("append refused", "write refused", "demote protected", "drop protected")
    for name in (*names, *refused, "read CONTIGUOUS", "read RUNS", "read TOKENS"):
        assert steps[name] > 0, f"no step of kind {name!r} in {steps}"
