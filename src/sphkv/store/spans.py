# SPDX-License-Identifier: Apache-2.0
"""Pages of consecutive tokens that all heads store alike: prompts, and tails that are full.

A contract decides state by state, so planning its pages means sorting states. Spans need none of
that: their states lie page by page already, and many sequences are encoded at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sphkv.store.encoding import EncodedPages, PageEncoder
from sphkv.store.layout import PageLayout
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
class SpanPages:
    """Pages of a span in one layer of one sequence; alike in all layers and sequences.

    Attributes:
        span: The tokens.
        layout: Layout of the pages.
        rows: Pages head by head, as if the first token at hand had position 0.
        head_ids: ``[rows]`` int64, on the device of ``rows``.
        host_heads: The same on the CPU.
        host_counts: Counts of ``rows`` on the CPU.
    """

    span: Span
    layout: PageLayout
    rows: PageRows
    head_ids: Tensor
    host_heads: Tensor
    host_counts: Tensor

    @classmethod
    def plan(cls, pool: PagePool, span: Span) -> "SpanPages":
        """Cut a span into pages.

        Raises:
            ValueError: The span is empty.
        """
        if span.stop <= span.start:
            raise ValueError(f"a span must hold tokens, got {span}")
        layout = pool.layout((span.tier_id, PositionMode.CONTIGUOUS))
        heads, tokens = pool.config.geometry.num_kv_heads, layout.page_tokens
        num_pages = -(-(span.stop - span.start) // tokens)
        counts = torch.full((heads, num_pages), tokens)
        counts[:, -1] -= num_pages * tokens - (span.stop - span.start)
        counts = counts.flatten()
        host_heads = torch.arange(heads).repeat_interleave(num_pages)
        # kernels encode codes; dense pages are few, and quicker to check on the host
        device = pool.device if layout.tier.is_coded else torch.device("cpu")
        positions = span.start + torch.arange(num_pages * tokens, device=device)
        on_device = counts.to(device, non_blocking=True)
        live = live_mask(on_device, tokens)
        flags = live if span.is_protected else torch.zeros_like(live)
        rows = PageRows(positions.view(num_pages, tokens).repeat(heads, 1), on_device, flags)
        head_ids = host_heads.to(device, non_blocking=True)
        return cls(span, layout, rows, head_ids, host_heads, counts)

    def cut(self, states: Tensor) -> Tensor:
        """States ``[sequences, heads, tokens, head_dim]`` of the span, page by page."""
        span, tokens = self.span, self.layout.page_tokens
        part = states[:, :, span.start : span.stop]
        slack = -part.shape[2] % tokens
        if slack:
            part = pad(part, (0, 0, 0, slack))
        return part.reshape(-1, tokens, part.shape[3])

    def rows_of(self, first_positions: Sequence[int]) -> PageRows:
        """Rows of sequences whose first token at hand has the given position."""
        rows, num = self.rows, len(first_positions)
        first = torch.tensor(first_positions).to(rows.positions.device, non_blocking=True)
        return PageRows(
            (rows.positions + first[:, None, None]).flatten(0, 1),
            rows.counts.repeat(num),
            rows.flags.repeat(num, 1),
        )


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
    encoder = PageEncoder(layer, states[0].codec, pool.allocator.order)
    pending: list[list[EncodedPages]] = [[] for _ in states]
    for plan in plans:
        key = (plan.layout.tier_id, plan.layout.position_mode)
        encoded = _encode(encoder, plan, dense, first_positions)
        for mine, pages in zip(pending, encoded, strict=True):
            mine.append(EncodedPages(key, plan.host_heads, plan.host_counts, pages))
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
        some = slice(at, at + together)
        keys, values = (plan.cut(part[some]) for part in dense)
        rows, num = plan.rows_of(first_positions[some]), len(first_positions[some])
        heads, parts = plan.head_ids.repeat(num), []
        for begin in range(0, num * own, most):
            now = slice(begin, begin + most)
            states = (keys[now], values[now])
            parts.append(encoder.encode(plan.layout, states, rows.select(now), heads[now]))
        pages = parts[0] if len(parts) == 1 else torch.cat(parts)
        found += pages.split(own)
    return found
