# SPDX-License-Identifier: Apache-2.0
"""How sequences grow: prompts, appended states, and tails that become pages.

A contract decides state by state, so planning its pages means sorting states. A span holds
consecutive tokens that all heads store alike: its states lie page by page already, and many
sequences are encoded at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from sphkv.core.contract import WriteContract
from sphkv.core.devices import upload
from sphkv.store.config import StoreConfig
from sphkv.store.layout import PageLayout, blank_pages, put_dense
from sphkv.store.pages import (
    PageEncoder,
    are_finite,
    check_finite,
    check_magnitudes,
    check_shapes,
    extreme_elements,
    largest_elements,
)
from sphkv.store.paging import MAX_POSITION, PageRows, live_mask
from sphkv.store.pool import EncodedPages, LayerChange, PagePool, SealedPages
from sphkv.store.prompt import PromptPages, SeenLayers, plan_layers
from sphkv.store.sequence import OpenTail, SequenceState

# Pages that seal together: bounds the copy of their states.
_TOGETHER = 2048


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens that all heads store at one tier.

    Attributes:
        tier_id: A tier that stores something.
        start: First token, counted from the first one at hand.
        stop: One past the last token.
        is_protected: Whether no budget may take them.
    """

    tier_id: int
    start: int
    stop: int
    is_protected: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Pages of a span in one layer of some sequences.

    Attributes:
        rows: Sequence by sequence, head by head.
        head_ids: ``[rows]`` int64.
        blank: Pages without states, where they are dense.
        live: ``[rows, tokens]`` bool, on the device of ``blank``.
    """

    rows: PageRows
    head_ids: Tensor
    blank: Tensor | None = None
    live: Tensor | None = None


class SpanPages:
    """Pages of a span in one layer of one sequence; alike in all layers and sequences.

    Attributes:
        span: The tokens.
        layout: Layout of the pages.
        host_heads: ``[rows]`` int64 on the CPU, KV head of each page.
        host_counts: ``[rows]`` int64 on the CPU, live states of each page.
        per_head: ``[heads]`` int64, pages of each head.
    """

    def __init__(self, pool: PagePool, span: Span) -> None:
        """Cut a span into pages.

        Raises:
            ValueError: The span is empty.
        """
        if span.stop <= span.start:
            raise ValueError(f"a span must hold tokens, got {span}")
        self.span, self._device = span, pool.device
        self.layout = pool.layout((span.tier_id, pool.config.span_mode(span.tier_id)))
        heads, tokens = pool.config.geometry.num_kv_heads, self.layout.page_tokens
        self._num_pages = -(-(span.stop - span.start) // tokens)
        counts = torch.full((heads, self._num_pages), tokens)
        counts[:, -1] -= self._num_pages * tokens - (span.stop - span.start)
        self.host_counts = counts.flatten()
        self.host_heads = torch.arange(heads).repeat_interleave(self._num_pages)
        self.per_head = np.full(heads, self._num_pages)
        self._made: dict[tuple[int, ...], _Rows] = {}

    def rows_of(self, first_positions: tuple[int, ...]) -> _Rows:
        """Pages of sequences whose first token at hand has the given position; made once."""
        if first_positions not in self._made:
            self._made[first_positions] = self._make(first_positions)
        return self._made[first_positions]

    def _make(self, first_positions: tuple[int, ...]) -> _Rows:
        num, tokens = len(first_positions), self.layout.page_tokens
        # kernels encode codes; dense pages are few, and quicker to check on the host
        is_coded = self.layout.tier.is_coded
        device = self._device if is_coded else torch.device("cpu")
        counts = self.host_counts.repeat(num).to(device, non_blocking=True)
        heads = self.host_heads.repeat(num).to(device, non_blocking=True)
        first = torch.tensor(first_positions).to(device, non_blocking=True)
        base = torch.arange(self._num_pages * tokens, device=device) + self.span.start
        positions = base.view(1, 1, -1, tokens) + first.view(-1, 1, 1, 1)
        per_head = len(self.host_heads) // self._num_pages
        positions = positions.expand(-1, per_head, -1, -1).reshape(-1, tokens)
        live = live_mask(counts, tokens)
        rows = PageRows(positions, counts, live if self.span.is_protected else live & False)
        if is_coded:
            return _Rows(rows, heads)
        blank = blank_pages(self.layout, rows).to(self._device, non_blocking=True)
        return _Rows(rows, heads, blank, live.to(self._device, non_blocking=True))

    def cut(self, states: Tensor) -> Tensor:
        """States ``[sequences, heads, tokens, head_dim]`` of the span, page by page."""
        span, tokens = self.span, self.layout.page_tokens
        part = states[:, :, span.start : span.stop]
        slack = -part.shape[2] % tokens
        if slack:
            part = pad(part, (0, 0, 0, slack))
        return part.reshape(-1, tokens, part.shape[3])


def plan_spans(
    pool: PagePool,
    states: Sequence[SequenceState],
    layer: int,
    plans: Sequence[SpanPages],
    dense: tuple[Tensor, Tensor],
    first_positions: Sequence[int],
) -> list[LayerChange]:
    """Encode spans of one layer of several sequences.

    Args:
        pool: Owner of the layouts.
        states: Sequences of one codec.
        layer: The layer.
        plans: Pages of the spans.
        dense: Keys and values, ``[sequences, heads, tokens, head_dim]`` each.
        first_positions: Position of each sequence's first token at hand.

    Returns:
        The new pages of each sequence.
    """
    encoder = PageEncoder.of(pool, layer, states[0].codec)
    pending: list[list[EncodedPages]] = [[] for _ in states]
    for plan in plans:
        key = (plan.layout.tier_id, plan.layout.position_mode)
        encoded = _encode(encoder, plan, dense, first_positions)
        for mine, pages in zip(pending, encoded, strict=True):
            host = (plan.host_heads, plan.host_counts)
            mine.append(EncodedPages(key, *host, pages, plan.per_head))
    return [
        LayerChange(state.tables[layer], pending=mine)
        for state, mine in zip(states, pending, strict=True)
    ]


def _encode(
    encoder: PageEncoder,
    plan: SpanPages,
    dense: tuple[Tensor, Tensor],
    first_positions: Sequence[int],
) -> list[Tensor]:
    """Pages of each sequence; as many sequences at once as the encoder takes."""
    own, most = len(plan.host_heads), encoder.most_pages
    together = max(1, most // own)
    found: list[Tensor] = []
    for at in range(0, len(first_positions), together):
        keys, values = (plan.cut(part[at : at + together]) for part in dense)
        made = plan.rows_of(tuple(first_positions[at : at + together]))
        if made.blank is not None and made.live is not None:
            pages = made.blank.clone()
            put_dense(pages, plan.layout.key_offset, keys, made.live)
            put_dense(pages, plan.layout.value_offset, values, made.live)
            if encoder.order is not None:
                pages = encoder.order.to_slab(plan.layout, pages)
        else:
            pages = _encode_coded(encoder, plan.layout, (keys, values), made)
        found += pages.split(own)
    return found


def _encode_coded(
    encoder: PageEncoder, layout: PageLayout, states: tuple[Tensor, Tensor], made: _Rows
) -> Tensor:
    """Pages of states that lie page by page, as many at once as the encoder takes."""
    if len(made.head_ids) <= encoder.most_pages:
        return encoder.encode(layout, states, made.rows, made.head_ids)
    parts = []
    for begin in range(0, len(made.head_ids), encoder.most_pages):
        now = slice(begin, begin + encoder.most_pages)
        some = (states[0][now], states[1][now])
        parts.append(encoder.encode(layout, some, made.rows.select(now), made.head_ids[now]))
    return torch.cat(parts)


@dataclass(frozen=True, slots=True, eq=False)
class FullTails:
    """Tails of one layer that seal as many states, by the same codec and at the same tier.

    Attributes:
        states: Their sequences.
        layer: The layer.
        num_tokens: Oldest states that seal.
    """

    states: list[SequenceState]
    layer: int
    num_tokens: int

    @property
    def tails(self) -> list[OpenTail]:
        """The tails."""
        found = (state.tails[self.layer] for state in self.states)
        return [tail for tail in found if tail is not None]

    @property
    def tier_id(self) -> int:
        """Tier of the pages that they become."""
        return self.states[0].seal_tier_of(self.layer)


class SpanWriter:
    """Writes spans of tokens: prompts, and the oldest states of tails.

    The layers of one forward pass have their spans in common; what was planned for the first is
    kept until the last.
    """

    def __init__(self, pool: PagePool) -> None:
        """Write pages that a pool will own."""
        self._pool = pool
        self._plans: dict[Span, SpanPages] = {}

    def write_prompt(
        self,
        states: Sequence[SequenceState],
        layer: int,
        spans: Sequence[Span],
        dense: tuple[Tensor, Tensor],
        first_position: int,
    ) -> None:
        """See ``PageStore.write_prompt``."""
        keys, values = (part.to(self._pool.device) for part in dense)
        check_shapes(keys, values, self._pool.config.geometry)
        if keys.dim() != 4 or len(keys) != len(states):
            raise ValueError(f"{len(states)} sequences and keys of shape {tuple(keys.shape)}")
        num_tokens = keys.shape[2]
        end = _check_spans(spans, num_tokens)
        if num_tokens - end > self._pool.config.tail_capacity:
            raise ValueError(f"{num_tokens - end} tokens behind the spans do not fit a tail")
        if first_position < 0 or first_position + num_tokens > MAX_POSITION:
            raise ValueError(f"positions must be in 0..{MAX_POSITION}, first is {first_position}")
        if any(state.next_position[layer] or state.tails[layer] for state in states):
            raise ValueError(f"layer {layer} of a sequence has been written already")
        # asked for first and read last: the host plans while the device looks
        extremes = extreme_elements(keys, values)
        plans = [self._plan(span) for span in spans]
        first_positions = [first_position] * len(states)
        changes = plan_spans(self._pool, states, layer, plans, (keys, values), first_positions)
        tails: list[OpenTail] = []
        if num_tokens > end:
            for row_keys, row_values in zip(keys, values, strict=True):
                tail = OpenTail.blank(self._pool.config, first_position + end)
                tail.append(row_keys[:, end:], row_values[:, end:])
                tails.append(tail)
        check_finite(extremes)
        self._pool.commit(changes, sum(tail.nbytes for tail in tails))
        for state in states:
            state.next_position[layer] = first_position + num_tokens
        for state, tail in zip(states, tails, strict=False):
            state.tails[layer] = tail
        self._end_layer(layer)

    def write_layers(
        self,
        state: SequenceState,
        first_layer: int,
        contract: WriteContract,
        states: Sequence[tuple[Tensor, Tensor]],
        seen: SeenLayers | None,
    ) -> None:
        """See ``PageStore.write_layers``."""
        config, device = self._pool.config, self._pool.device
        dense = [(keys.to(device), values.to(device)) for keys, values in states]
        for at, (keys, values) in enumerate(dense):
            check_shapes(keys, values, config.geometry)
            contract.layer(at).check(config.tiers, config.geometry, contract.num_tokens)
        num_tokens, paged = dense[0][0].shape[1], contract.num_tokens
        if any(keys.shape[1] != num_tokens for keys, _ in dense) or num_tokens < paged:
            raise ValueError(f"layers must have as many states, and at least {paged}")
        if num_tokens - paged > config.tail_capacity:
            raise ValueError(f"{num_tokens - paged} tokens behind the contract do not fit a tail")
        front = [(keys[:, :paged], values[:, :paged]) for keys, values in dense]
        tails: list[OpenTail] = []
        if num_tokens > paged:
            rest = [(keys[:, paged:], values[:, paged:]) for keys, values in dense]
            tails = OpenTail.of_layers(config, paged, rest)
        tail_bytes = sum(tail.nbytes for tail in tails)
        if seen is None or not are_finite(seen.largest):
            # what no element is above may be too large where all of them are not
            seen = SeenLayers.of(self._pool, contract, largest_elements(dense))
            check_magnitudes(seen.largest)
        if seen.run_tiers is None:
            changes = plan_layers(self._pool, state, first_layer, contract, front)
            self._pool.commit(changes, tail_bytes)
        else:
            pages = PromptPages(self._pool, state.codec, first_layer, seen.run_tiers)
            tables = state.tables[first_layer : first_layer + len(dense)]
            self._pool.fill(tables, pages.encode(contract.protected, front), tail_bytes)
        for at in range(len(dense)):
            state.next_position[first_layer + at] = num_tokens
        for at, tail in enumerate(tails):
            state.tails[first_layer + at] = tail

    def append(self, state: SequenceState, layer: int, keys: Tensor, values: Tensor) -> None:
        """See ``PageStore.append``; states are bfloat16 and checked."""
        num_new, config = keys.shape[1], self._pool.config
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
            plans = [self._plan(Span(state.seal_tier_of(layer), 0, num_sealed))]
            first = [tail.first_position]
            changes = plan_spans(
                self._pool, [state], layer, plans, (keys[None], values[None]), first
            )
        if num_sealed or extra:
            self._pool.commit(changes, extra)
        if num_sealed:
            tail.restart(tail.first_position + num_sealed)
        tail.append(keys[:, num_sealed:], values[:, num_sealed:])
        state.tails[layer] = tail
        state.next_position[layer] += num_new
        self._end_layer(layer)

    def make_room(self, states: Sequence[SequenceState], num_new: int) -> bool:
        """See ``PageStore.make_room``."""
        layers = range(self._pool.config.geometry.num_layers)
        full = [
            FullTails(alike, layer, num_tokens)
            for layer in layers
            for alike, num_tokens in _full_tails(self._pool.config, states, layer, num_new)
        ]
        if not full:
            return False
        sealed = seal_together(self._pool, full)
        if sealed is not None:
            self._pool.append(sealed)
            _forget_oldest(self._pool, [tail for part in full for tail in part.tails])
        else:
            self._pool.commit([change for part in full for change in self._seal(part)])
            for part in full:
                for tail in part.tails:
                    tail.forget_oldest(part.num_tokens)
        self._plans.clear()
        return True

    def _seal(self, full: FullTails) -> list[LayerChange]:
        """Encode the oldest states of tails of one layer."""
        tails = full.tails
        oldest = torch.stack([tail.states[:, :, : full.num_tokens] for tail in tails], 1)
        first = [tail.first_position for tail in tails]
        plans = [self._plan(Span(full.tier_id, 0, full.num_tokens))]
        dense = (oldest[0], oldest[1])
        return plan_spans(self._pool, full.states, full.layer, plans, dense, first)

    def _plan(self, span: Span) -> SpanPages:
        """Pages of a span, made once for all layers."""
        if span not in self._plans:
            self._plans[span] = SpanPages(self._pool, span)
        return self._plans[span]

    def _end_layer(self, layer: int) -> None:
        """After the last layer of a pass, forget what its layers had in common."""
        if layer == self._pool.config.geometry.num_layers - 1:
            self._plans.clear()


def seal_together(pool: PagePool, full: Sequence[FullTails]) -> list[SealedPages] | None:
    """Encode a page of every head of tails of many layers, in a few launches.

    Args:
        pool: Owner of the layouts.
        full: The tails, layer by layer.

    Returns:
        The pages; None where kernels cannot, or tails differ in what they become.
    """
    kernels, config = pool.kernels, pool.config
    tier_id, codec = full[0].tier_id, full[0].states[0].codec
    layout = pool.layout((tier_id, config.span_mode(tier_id)))
    tokens = layout.page_tokens
    is_alike = all(
        part.tier_id == tier_id and part.states[0].codec is codec and part.num_tokens == tokens
        for part in full
    )
    if kernels is None or not pool.allocator.has_copier or not is_alike:
        return None
    if not kernels.joins_layers(layout, codec, pool.device):
        return None
    tails = [(part.layer, tail) for part in full for tail in part.tails]
    tables = [state.tables[part.layer] for part in full for state in part.states]
    heads, sealed = config.geometry.num_kv_heads, []
    most = max(1, _TOGETHER // heads)
    for at in range(0, len(tails), most):
        some = tails[at : at + most]
        dense = _collect(pool, [tail for _, tail in some], tokens)
        rows, head_ids = _rows_of(pool, some, tokens)
        pages = kernels.encode_layers(layout, codec, dense, rows, head_ids)
        own = tables[at : at + most]
        sealed.append(SealedPages((tier_id, layout.position_mode), own, pages, tokens))
    return sealed


def _forget_oldest(pool: PagePool, tails: Sequence[OpenTail]) -> None:
    """Give up a page of states of every tail, and move what is left to the front in one copy."""
    tokens = pool.config.seal_tokens
    by_rest: dict[int, list[OpenTail]] = {}
    for tail in tails:
        by_rest.setdefault(tail.num_tokens - tokens, []).append(tail)
    for rest, alike in by_rest.items():
        if rest > tokens:
            # a copy inside a buffer must not read what it has written
            for tail in alike:
                tail.forget_oldest(tokens)
            continue
        if rest:
            targets, width = _head_places(alike)
            pool.allocator.copy(targets + tokens * width, targets, rest * width)
        for tail in alike:
            tail.first_position += tokens
            tail.num_tokens = rest


def _head_places(tails: Sequence[OpenTail]) -> tuple[NDArray[np.int64], int]:
    """Where keys of all heads of tails begin, then their values, and bytes of a state."""
    _, heads, capacity, head_dim = tails[0].states.shape
    width = head_dim * tails[0].states.element_size()
    base = np.array([tail.states.data_ptr() for tail in tails])
    inside = np.arange(2 * heads).reshape(2, 1, heads) * (capacity * width)
    return (base[:, None] + inside).ravel(), width


def _collect(pool: PagePool, tails: Sequence[OpenTail], tokens: int) -> tuple[Tensor, Tensor]:
    """The oldest states of tails, ``[tails * heads, tokens, head_dim]`` keys and values."""
    _, heads, _, head_dim = tails[0].states.shape
    shape = (2, len(tails) * heads, tokens, head_dim)
    dense = torch.empty(shape, dtype=tails[0].states.dtype, device=pool.device)
    sources, width = _head_places(tails)
    targets = dense.data_ptr() + np.arange(len(sources)) * (tokens * width)
    pool.allocator.copy(sources, targets, tokens * width)
    return dense[0], dense[1]


def _rows_of(
    pool: PagePool, tails: Sequence[tuple[int, OpenTail]], tokens: int
) -> tuple[PageRows, Tensor]:
    """Positions of the pages of layers' tails, and their heads among those of all layers."""
    heads = pool.config.geometry.num_kv_heads
    first = np.array([tail.first_position for _, tail in tails])
    layers = np.array([layer for layer, _ in tails])
    every = upload(np.concatenate([first, layers * heads]), pool.device)
    first_position, first_head = every.view(2, -1, 1)
    positions = first_position + torch.arange(tokens, device=pool.device)
    positions = positions[:, None].expand(-1, heads, -1).reshape(-1, tokens)
    counts = positions.new_full((len(positions),), tokens)
    flags = torch.zeros(positions.shape, dtype=torch.bool, device=pool.device)
    head_ids = first_head + torch.arange(heads, device=pool.device)
    return PageRows(positions, counts, flags), head_ids.flatten()


def _check_spans(spans: Sequence[Span], num_tokens: int) -> int:
    """Raise unless spans follow one another from 0 on; where they end."""
    end = 0
    for span in spans:
        if span.start != end or not end < span.stop <= num_tokens:
            raise ValueError(f"{span} of {num_tokens} tokens does not begin at {end}")
        end = span.stop
    return end


def _full_tails(
    config: StoreConfig, states: Sequence[SequenceState], layer: int, num_new: int
) -> list[tuple[list[SequenceState], int]]:
    """Sequences whose tail must seal as many tokens, by the same codec and at the same tier."""
    found: dict[tuple[int, int, int], list[SequenceState]] = {}
    sealed: dict[int, int] = {}
    for state in states:
        tail = state.tails[layer]
        held = 0 if tail is None else tail.num_tokens
        # tails of a batch are often of one length
        if held not in sealed:
            whole = held - held % config.seal_tokens
            sealed[held] = min(config.sealed_tokens(held + num_new), whole)
        if num_tokens := sealed[held]:
            key = (id(state.codec), state.seal_tier_of(layer), num_tokens)
            found.setdefault(key, []).append(state)
    return [(alike, num_tokens) for (_, _, num_tokens), alike in found.items()]
