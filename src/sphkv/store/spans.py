# SPDX-License-Identifier: Apache-2.0
"""Pages of consecutive tokens that all heads store alike: prompts, and tails that are full.

A contract decides state by state, so planning its pages means sorting states. Spans need none of
that: their states lie page by page already, and many sequences are encoded at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sphkv.store.encoding import EncodedPages, PageEncoder
from sphkv.store.layout import PageLayout, blank_pages, put_dense
from sphkv.store.paging import PageRows, PositionMode, live_mask
from sphkv.store.pool import LayerChange, PagePool
from sphkv.store.sequence import SequenceState


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
        self.layout = pool.layout((span.tier_id, PositionMode.CONTIGUOUS))
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
    encoder = pool.encoder(layer, states[0].codec)
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
