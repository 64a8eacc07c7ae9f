# SPDX-License-Identifier: Apache-2.0
"""Prompts and full tails written for many sequences at once, against one at a time."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from sphkv.core.contract import LayerContract, WriteContract
from sphkv.errors import BudgetError
from sphkv.store.append import Span
from sphkv.store.store import PageStore
from sphkv.testing.cases import JoiningCodec

StoreMaker = Callable[..., PageStore]
Unchanged = Callable[[PageStore], AbstractContextManager[None]]
CODED, DENSE = 1, 3
NUM_TOKENS, SINKS = 150, 21
# a partly filled dense page, whole pages of 32 and a partly filled one, 5 tokens in the tail
SPANS = (Span(DENSE, 0, SINKS, True), Span(CODED, SINKS, NUM_TOKENS - 5))


def prompts(codec: Any, num_sequences: int) -> tuple[Tensor, Tensor]:
    """Keys and values ``[sequences, 2, NUM_TOKENS, head_dim]``."""
    pairs = [codec.numbered(NUM_TOKENS, 1000 * index) for index in range(num_sequences)]
    return torch.stack([keys for keys, _ in pairs]), torch.stack([values for _, values in pairs])


def write_one_by_one(store: PageStore, keys: Tensor, values: Tensor, first: int) -> None:
    tier_id = torch.full((2, NUM_TOKENS - 5), CODED, dtype=torch.uint8)
    tier_id[:, :SINKS] = DENSE
    contract = LayerContract(tier_id, tier_id == DENSE)
    positions = first + torch.arange(NUM_TOKENS - 5)
    for sequence, (row_keys, row_values) in enumerate(zip(keys, values, strict=True)):
        store.create(sequence)
        store.write(sequence, 0, contract, row_keys[:, :-5], row_values[:, :-5], positions)
        store.append(sequence, 0, row_keys[:, -5:], row_values[:, -5:])


def assert_equal_stores(one: PageStore, other: PageStore) -> None:
    assert one.sequences == other.sequences
    for sequence in one.sequences:
        assert one.num_tokens(sequence) == other.num_tokens(sequence)
        left, right = one.tail(sequence, 0), other.tail(sequence, 0)
        assert left.first_position == right.first_position
        assert torch.equal(left.keys, right.keys)
        assert torch.equal(left.values, right.values)
        for ours, theirs in zip(one.pages(sequence, 0), other.pages(sequence, 0), strict=True):
            assert ours.layout == theirs.layout
            assert torch.equal(one.view(ours).pages, other.view(theirs).pages)


@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("first", [0, 70])
def test_prompts_written_together_equal_single_ones(
    make_store: StoreMaker, codec: Any, num_sequences: int, first: int
) -> None:
    keys, values = prompts(codec, num_sequences)
    one, other = make_store(), make_store()
    write_one_by_one(one, keys, values, first)
    for sequence in range(num_sequences):
        other.create(sequence)
    other.write_prompt(range(num_sequences), 0, SPANS, keys, values, first_position=first)
    assert_equal_stores(one, other)
    assert other.live_bytes == sum(tensor.nbytes for tensor in other.live_tensors())


def test_many_pages_are_encoded_in_parts(
    make_store: StoreMaker, codec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, values = prompts(codec, 3)
    one, other = make_store(), make_store()
    write_one_by_one(one, keys, values, 0)
    monkeypatch.setattr("sphkv.store.pages._ENCODE_PAGES", 3)
    monkeypatch.setattr("sphkv.store.pool._JOINED_PAGES", 4)
    for sequence in range(3):
        other.create(sequence)
    other.write_prompt(range(3), 0, SPANS, keys, values)
    assert_equal_stores(one, other)


@pytest.mark.parametrize("recent", [0, 4])
@pytest.mark.parametrize("lengths", [(0, 32), (0, 5, 32), (3, 3, 35)])
def test_making_room_ahead_equals_appending(
    make_store: StoreMaker, codec: Any, recent: int, lengths: tuple[int, ...]
) -> None:
    """Sequences of several lengths and tiers, step by step, written by a kernel or appended."""
    one, other = make_store(recent_tokens=recent), make_store(recent_tokens=recent)
    keys, values = prompts(codec, len(lengths))
    capacity, rows = one.config.tail_capacity, range(len(lengths))
    for store in (one, other):
        for row, length in enumerate(lengths):
            store.create(row, seal_tier=("k2v2", "max")[row % 2])
            for layer in range(2):
                start = 32 + length
                store.append(row, layer, keys[row, :, :start], values[row, :, :start])
    for step in range(capacity + 1):
        full = [one.tail(row, 0).num_tokens == capacity for row in rows]
        assert other.make_room(rows) == any(full)
        assert not other.make_room(rows)
        for row, length in enumerate(lengths):
            at = 32 + length + step
            for layer in range(2):
                new = (keys[row, :, at : at + 1], values[row, :, at : at + 1])
                one.append(row, layer, *new)
                tail = other.open_tail(row, layer)
                assert tail is not None
                tail.keys[:, tail.num_tokens] = new[0][:, 0]
                tail.values[:, tail.num_tokens] = new[1][:, 0]
        other.absorb(rows)
        assert_equal_stores(one, other)
    assert any(one.pages(row, 0) for row in rows)
    assert one.live_bytes == other.live_bytes == sum(t.nbytes for t in other.live_tensors())


@pytest.mark.parametrize("recent", [0, 4, 40])
def test_tails_of_all_layers_seal_in_one_call(
    make_store: StoreMaker, codec: Any, recent: int
) -> None:
    """Rows of several lengths; what is left of a tail moves to its front."""
    kernels = JoiningCodec(2)
    one = make_store(recent_tokens=recent)
    other = make_store(kernels=kernels, recent_tokens=recent)
    lengths, capacity = (0, 2, 0), one.config.tail_capacity
    keys, values = prompts(codec, len(lengths))
    for store in (one, other):
        for row, length in enumerate(lengths):
            store.create(row)
            for layer in range(2):
                held = slice(0, capacity - length)
                store.append(row, layer, keys[row, :, held], values[row, :, held])
    assert one.make_room(range(3))
    assert other.make_room(range(3))
    assert kernels.joined == [8]
    assert one.make_room(range(3), 3) == other.make_room(range(3), 3)
    # without newest states that stay, the other tail holds no whole page yet
    assert kernels.joined == ([8, 4] if recent else [8])
    assert_equal_stores(one, other)
    for row in range(3):
        left, right = one.tail(row, 1), other.tail(row, 1)
        assert (left.first_position, left.num_tokens) == (right.first_position, right.num_tokens)
        assert torch.equal(left.keys, right.keys)
        assert torch.equal(left.values, right.values)
    assert one.live_bytes == other.live_bytes == sum(t.nbytes for t in other.live_tensors())


def test_making_room_seals_as_many_pages_as_tokens_need(make_store: StoreMaker, codec: Any) -> None:
    store = make_store(seal_tier="max", recent_tokens=40)
    store.create(0)
    store.append(0, 0, *codec.numbered(56))
    assert store.make_room([0], 20)
    assert store.tail(0, 0).num_tokens == 56 - 32
    # a tail of 24 states has one whole page of 16; the rest is sealed with what comes
    assert store.make_room([0], 100)
    assert store.tail(0, 0).num_tokens == 8
    assert not store.make_room([0], 100)
    store.append(0, 0, *codec.numbered(100, 500))
    assert store.tail(0, 0).num_tokens == 44
    with pytest.raises(ValueError, match="num_new must be positive, got 0"):
        store.make_room([0], 0)


def test_a_prompt_may_fill_the_tail(
    make_store: StoreMaker, codec: Any, unchanged: Unchanged
) -> None:
    store = make_store()
    keys, values = prompts(codec, 1)
    capacity = store.config.tail_capacity
    store.create(0)
    for layer in range(2):
        store.write_prompt([0], layer, [], keys[:, :, :capacity], values[:, :, :capacity])
    assert store.tail(0, 0).num_tokens == capacity
    assert store.pages(0, 0) == []
    with unchanged(store), pytest.raises(ValueError, match="no room"):
        store.absorb([0])


def test_sequences_of_different_codecs_make_room_together(
    make_store: StoreMaker, codec: Any
) -> None:
    store = make_store(recent_tokens=0)
    store.create(0)
    store.create(1, codec=type(codec)())
    for row in range(2):
        store.append(row, 0, *codec.numbered(32, 100 * row))
    assert store.make_room([0, 1])
    assert [group.num_pages.tolist() for row in range(2) for group in store.pages(row, 0)] == [
        [1, 1],
        [1, 1],
    ]


def test_no_room_for_pages_leaves_tails_full(
    make_store: StoreMaker, codec: Any, unchanged: Unchanged
) -> None:
    probe = make_store(recent_tokens=0)
    probe.create(0)
    probe.append(0, 0, *codec.numbered(32))
    store = make_store(recent_tokens=0, max_bytes=probe.live_bytes)
    store.create(0)
    store.append(0, 0, *codec.numbered(32))
    with unchanged(store), pytest.raises(BudgetError):
        store.make_room([0])


@pytest.mark.parametrize(
    ("spans", "first", "message"),
    [
        ([Span(CODED, 1, 33)], 0, "does not begin at 0"),
        ([Span(CODED, 0, 32), Span(CODED, 32, 32)], 0, "does not begin at 32"),
        ([Span(CODED, 0, 200)], 0, "of 150 tokens"),
        ([Span(CODED, 0, 32)], 0, "do not fit a tail"),
        ([Span(CODED, 0, 128)], -1, "first is -1"),
        ([Span(0, 0, 128)], 0, "'drop'"),
    ],
)
def test_prompts_that_do_not_fit_together_are_refused(
    make_store: StoreMaker,
    codec: Any,
    unchanged: Unchanged,
    spans: list[Span],
    first: int,
    message: str,
) -> None:
    store = make_store()
    store.create(0)
    with unchanged(store), pytest.raises(ValueError, match=message):
        store.write_prompt([0], 0, spans, *prompts(codec, 1), first_position=first)


def test_bad_prompts_change_nothing(
    make_store: StoreMaker, codec: Any, unchanged: Unchanged
) -> None:
    store = make_store(max_bytes=5000)
    for sequence in range(2):
        store.create(sequence)
    keys, values = prompts(codec, 2)
    spoilt = values.clone()
    spoilt[1, 1, -1, 3] = torch.nan
    with unchanged(store), pytest.raises(ValueError, match="values hold NaN"):
        store.write_prompt([0, 1], 0, SPANS, keys, spoilt)
    with unchanged(store), pytest.raises(ValueError, match="2 sequences and keys"):
        store.write_prompt([0, 1], 0, SPANS, keys[:1], values[:1])
    with unchanged(store), pytest.raises(BudgetError):
        store.write_prompt([0, 1], 0, SPANS, keys, values)
    store.append(0, 0, keys[0, :, :3], values[0, :, :3])
    with unchanged(store), pytest.raises(ValueError, match="written already"):
        store.write_prompt([0], 0, SPANS, keys[:1], values[:1])


def mixed_contract(num_layers: int, paged: int) -> WriteContract:
    """Runs of all tiers, dropped ones too; the first run is protected in every head."""
    generator = torch.Generator().manual_seed(5)
    runs = torch.randint(0, 4, (num_layers, 2, paged // 16), generator=generator)
    runs[:, :, 0] = DENSE
    # a head without pages of some tiers
    runs[-1, 1, 1:] = CODED
    tier_id = runs.to(torch.uint8).repeat_interleave(16, 2)
    protected = torch.zeros(tier_id.shape, dtype=torch.bool)
    protected[..., :16] = True
    return WriteContract(tier_id, protected, 16)


class ApartCodec(JoiningCodec):
    """Joins the layers of one tier; those of the others are encoded layer by layer."""

    def joins_layers(self, layout: Any, codec: Any, device: Any) -> bool:
        return bool(layout.tier_id == CODED)


@pytest.mark.parametrize("kernels", [None, JoiningCodec(2), ApartCodec(2)])
@pytest.mark.parametrize("rest", [0, 5])
def test_layers_written_together_equal_single_ones(
    make_store: StoreMaker, codec: Any, kernels: Any, rest: int
) -> None:
    one, other = make_store(), make_store(kernels=kernels)
    paged = 144
    contract = mixed_contract(2, paged)
    keys, values = (part[..., : paged + rest, :] for part in prompts(codec, 2))
    for store in (one, other):
        store.create(0)
    other.write_layers(0, 0, contract, list(zip(keys, values, strict=True)))
    for layer in range(2):
        own = (keys[layer], values[layer])
        front, back = (
            tuple(part[:, at] for part in own) for at in (slice(paged), slice(paged, None))
        )
        one.write(0, layer, contract.layer(layer), front[0], front[1], torch.arange(paged))
        one.append(0, layer, *back)
        assert one.num_tokens(0, layer) == other.num_tokens(0, layer) == paged + rest
        assert torch.equal(one.tail(0, layer).keys, other.tail(0, layer).keys)
        assert torch.equal(one.tail(0, layer).values, other.tail(0, layer).values)
        pairs = zip(one.pages(0, layer), other.pages(0, layer), strict=True)
        for ours, theirs in pairs:
            assert ours.layout == theirs.layout
            assert torch.equal(ours.num_pages, theirs.num_pages)
            assert torch.equal(one.view(ours).pages, other.view(theirs).pages)
    assert other.sequence_bytes(0) == one.sequence_bytes(0)
    assert other.live_bytes == sum(tensor.nbytes for tensor in other.live_tensors())


def by_token(states: torch.Tensor) -> torch.Tensor:
    """The same states ``[heads, tokens, head_dim]``, heads of a token side by side."""
    return states.transpose(0, 1).contiguous().transpose(0, 1)


def one_off(states: torch.Tensor) -> torch.Tensor:
    """The same states, beginning in the midst of a word."""
    room = torch.empty(states.numel() + 1, dtype=states.dtype)[1:]
    return room.view(states.shape).copy_(states)


@pytest.mark.parametrize(
    "lay",
    [
        [by_token, by_token],
        [by_token, torch.Tensor.contiguous],
        [one_off, one_off],
        [torch.Tensor.contiguous, torch.Tensor.float],
    ],
)
def test_it_makes_no_difference_how_the_states_of_a_prompt_lie(
    make_store: StoreMaker, codec: Any, lay: list[Any]
) -> None:
    contract = mixed_contract(2, 144)
    # all tokens are paged: what is cut off would have the rest copied
    keys, values = (part[..., :144, :].to(torch.bfloat16) for part in prompts(codec, 2))
    one, other = make_store(kernels=JoiningCodec(2)), make_store(kernels=JoiningCodec(2))
    for store in (one, other):
        store.create(0)
    one.write_layers(0, 0, contract, [*zip(keys, values, strict=True)])
    laid = [(move(own), move(mine)) for move, own, mine in zip(lay, keys, values, strict=True)]
    other.write_layers(0, 0, contract, laid)
    for layer in range(2):
        for ours, theirs in zip(one.pages(0, layer), other.pages(0, layer), strict=True):
            assert torch.equal(one.view(ours).pages, other.view(theirs).pages)


def test_layers_fill_the_same_pages_in_pieces(
    make_store: StoreMaker, codec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    contract = mixed_contract(2, 144)
    keys, values = (part[..., :150, :] for part in prompts(codec, 2))
    one, other = make_store(kernels=ApartCodec(2)), make_store(kernels=ApartCodec(2))
    one.create(0)
    one.write_layers(0, 0, contract, list(zip(keys, values, strict=True)))
    monkeypatch.setattr("sphkv.store.pages._KERNEL_PAGES", 3)
    other.create(0)
    other.write_layers(0, 0, contract, list(zip(keys, values, strict=True)))
    assert one.ledger() == other.ledger()
    for layer in range(2):
        ours, theirs = one.table(0, layer), other.table(0, layer)
        assert torch.equal(ours.page_ids, theirs.page_ids)
        assert torch.equal(ours.tags, theirs.tags)
        for pair in zip(one.pages(0, layer), other.pages(0, layer), strict=True):
            assert torch.equal(
                *(own.view(group).pages for own, group in zip((one, other), pair, strict=True))
            )


def test_a_contract_about_nothing_leaves_all_to_the_tails(
    make_store: StoreMaker, codec: Any
) -> None:
    store = make_store(kernels=JoiningCodec(2))
    contract = mixed_contract(2, 144)
    none = WriteContract(contract.tier_id[..., :0], contract.protected[..., :0], 16)
    keys, values = (part[..., :5, :] for part in prompts(codec, 2))
    store.create(0)
    store.write_layers(0, 0, none, list(zip(keys, values, strict=True)))
    for layer in range(2):
        assert torch.equal(store.tail(0, layer).keys, keys[layer].to(torch.bfloat16))
        assert not store.pages(0, layer)


def test_layers_that_do_not_fit_change_nothing(
    make_store: StoreMaker, codec: Any, unchanged: Unchanged
) -> None:
    contract = mixed_contract(2, 144)
    keys, values = prompts(codec, 2)
    states = list(zip(keys, values, strict=True))
    store = make_store(max_bytes=12_000, kernels=JoiningCodec(2))
    store.create(0)
    with unchanged(store), pytest.raises(BudgetError):
        store.write_layers(0, 0, contract, states)
    store = make_store(kernels=JoiningCodec(2))
    store.create(0)
    with unchanged(store):
        with pytest.raises(ValueError, match="as many states"):
            store.write_layers(0, 0, contract, [states[0], (keys[1, :, :-1], values[1, :, :-1])])
        short = WriteContract(contract.tier_id[..., :16], contract.protected[..., :16], 16)
        with pytest.raises(ValueError, match="do not fit a tail"):
            store.write_layers(0, 0, short, states)
        broken = keys[1].clone()
        broken[0, 3] = torch.nan
        with pytest.raises(ValueError, match="NaN"):
            store.write_layers(0, 0, contract, [states[0], (broken, values[1])])
        with pytest.raises(ValueError, match="layer"):
            store.write_layers(0, 1, contract, states)
        for some in (states[:1], []):
            with pytest.raises(ValueError, match=f"2 layers got states of {len(some)}"):
                store.write_layers(0, 0, contract, some)
    store.write_layers(0, 0, contract, states)
    with unchanged(store), pytest.raises(ValueError, match="hold states"):
        store.write_layers(0, 0, contract, states)
    # what a crop leaves is a tail without states
    store.crop(0, 0)
    with unchanged(store), pytest.raises(ValueError, match="hold states"):
        store.write_layers(0, 0, contract, states)
