# SPDX-License-Identifier: Apache-2.0
"""How sequences grow: prompts, appended states, and tails that become pages."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sphkv.store.config import StoreConfig
from sphkv.store.encoding import check_finite, check_shapes, extreme_elements
from sphkv.store.paging import MAX_POSITION
from sphkv.store.pool import LayerChange, PagePool
from sphkv.store.sequence import SequenceState
from sphkv.store.spans import Span, SpanPages, plan_spans
from sphkv.store.tail import OpenTail


def write_prompt(
    pool: PagePool,
    states: Sequence[SequenceState],
    layer: int,
    spans: Sequence[Span],
    dense: tuple[Tensor, Tensor],
    first_position: int,
) -> None:
    """See ``PageStore.write_prompt``."""
    keys, values = (part.to(pool.device) for part in dense)
    check_shapes(keys, values, pool.config.geometry)
    if keys.dim() != 4 or len(keys) != len(states):
        raise ValueError(f"{len(states)} sequences and keys of shape {tuple(keys.shape)}")
    num_tokens = keys.shape[2]
    end = _check_spans(spans, num_tokens)
    if num_tokens - end > pool.config.tail_capacity:
        raise ValueError(f"{num_tokens - end} tokens behind the spans do not fit a tail")
    if first_position < 0 or first_position + num_tokens > MAX_POSITION:
        raise ValueError(f"positions must be in 0..{MAX_POSITION}, first is {first_position}")
    if any(state.next_position[layer] or state.tails[layer] for state in states):
        raise ValueError(f"layer {layer} of a sequence has been written already")
    # asked for first and read last: the host plans while the device looks
    extremes = extreme_elements(keys, values)
    plans = [_plan(pool, span) for span in spans]
    first_positions = [first_position] * len(states)
    changes = plan_spans(pool, states, layer, plans, (keys, values), first_positions)
    tails: list[OpenTail] = []
    if num_tokens > end:
        for row_keys, row_values in zip(keys, values, strict=True):
            tail = OpenTail.blank(pool.config, first_position + end)
            tail.append(row_keys[:, end:], row_values[:, end:])
            tails.append(tail)
    check_finite(extremes)
    pool.commit(changes, sum(tail.nbytes for tail in tails))
    for state in states:
        state.next_position[layer] = first_position + num_tokens
    for state, tail in zip(states, tails, strict=False):
        state.tails[layer] = tail
    _end_layer(pool, layer)


def _check_spans(spans: Sequence[Span], num_tokens: int) -> int:
    """Raise unless spans follow one another from 0 on; where they end."""
    end = 0
    for span in spans:
        if span.start != end or not end < span.stop <= num_tokens:
            raise ValueError(f"{span} of {num_tokens} tokens does not begin at {end}")
        end = span.stop
    return end


def append_states(
    pool: PagePool, state: SequenceState, layer: int, keys: Tensor, values: Tensor
) -> None:
    """See ``PageStore.append``; states are bfloat16 and checked."""
    num_new, config = keys.shape[1], pool.config
    if state.next_position[layer] + num_new > MAX_POSITION:
        raise ValueError(f"{num_new} tokens pass the last position {MAX_POSITION}")
    if num_new == 0:
        return
    tail, extra = state.tails[layer], 0
    if tail is None:
        tail = OpenTail.blank(config, state.next_position[layer])
        extra = tail.nbytes
    changes = [LayerChange(state.tables[layer])]
    num_sealed = config.sealed_tokens(tail.num_tokens + num_new)
    if num_sealed:
        live = tail.view()
        keys = torch.cat([live.keys, keys], dim=1)
        values = torch.cat([live.values, values], dim=1)
        plans = [_plan(pool, Span(state.seal_tier_id, 0, num_sealed))]
        first = [tail.first_position]
        changes = plan_spans(pool, [state], layer, plans, (keys[None], values[None]), first)
    if num_sealed or extra:
        pool.commit(changes, extra)
    if num_sealed:
        tail.restart(tail.first_position + num_sealed)
    tail.append(keys[:, num_sealed:], values[:, num_sealed:])
    state.tails[layer] = tail
    state.next_position[layer] += num_new
    _end_layer(pool, layer)


def _plan(pool: PagePool, span: Span) -> SpanPages:
    """Pages of a span, made once for all layers."""
    if span not in pool.span_pages:
        pool.span_pages[span] = SpanPages(pool, span)
    return pool.span_pages[span]


def _end_layer(pool: PagePool, layer: int) -> None:
    """After the last layer of a pass, forget what its layers had in common."""
    if layer == pool.config.geometry.num_layers - 1:
        pool.span_pages.clear()


def make_room(pool: PagePool, states: Sequence[SequenceState], num_new: int) -> bool:
    """See ``PageStore.make_room``."""
    changes: list[LayerChange] = []
    sealed: list[tuple[OpenTail, int]] = []
    for layer in range(pool.config.geometry.num_layers):
        for alike, num_tokens in _full_tails(pool.config, states, layer, num_new):
            tails = [tail for state in alike if (tail := state.tails[layer]) is not None]
            oldest = torch.stack([tail.states[:, :, :num_tokens] for tail in tails], 1)
            first = [tail.first_position for tail in tails]
            plans = [_plan(pool, Span(alike[0].seal_tier_id, 0, num_tokens))]
            changes += plan_spans(pool, alike, layer, plans, (oldest[0], oldest[1]), first)
            sealed += [(tail, num_tokens) for tail in tails]
    pool.span_pages.clear()
    if not changes:
        return False
    pool.commit(changes)
    for tail, num_tokens in sealed:
        tail.forget_oldest(num_tokens)
    return True


def _full_tails(
    config: StoreConfig, states: Sequence[SequenceState], layer: int, num_new: int
) -> list[tuple[list[SequenceState], int]]:
    """Sequences whose tail must seal as many tokens, by the same codec and at the same tier."""
    found: dict[tuple[int, int, int], list[SequenceState]] = {}
    for state in states:
        tail = state.tails[layer]
        held = 0 if tail is None else tail.num_tokens
        whole = held - held % config.seal_tokens
        num_tokens = min(config.sealed_tokens(held + num_new), whole)
        if num_tokens:
            key = (id(state.codec), state.seal_tier_id, num_tokens)
            found.setdefault(key, []).append(state)
    return [(alike, num_tokens) for (_, _, num_tokens), alike in found.items()]
