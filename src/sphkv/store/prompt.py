# SPDX-License-Identifier: Apache-2.0
"""Several layers of a prompt at once, as a contract says.

On a GPU most of the time of a layer is the host's: planning pages, asking for slabs, a launch for
every small step. Layers that are planned and encoded together share all of that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.core.contract import StateCodec, WriteContract
from sphkv.core.devices import upload
from sphkv.core.tiers import RUN_TOKENS
from sphkv.store.layout import PageLayout
from sphkv.store.order import PageRecoder
from sphkv.store.pages import FlatStates, PageEncoder, plan_write
from sphkv.store.paging import PageRows, RunPages, place_runs, plan_runs
from sphkv.store.pool import JoinedPages, LayerChange, PagePool, layer_parts
from sphkv.store.sequence import SequenceState

# Dense states of layers that lie together, so many bytes.
_TOGETHER_BYTES = 1 << 30


def plan_layers(
    pool: PagePool,
    state: SequenceState,
    first_layer: int,
    contract: WriteContract,
    dense: Sequence[tuple[Tensor, Tensor]],
) -> list[LayerChange]:
    """Encode the first states of consecutive layers, from position 0 on, layer by layer.

    Args:
        pool: Owner of the layouts.
        state: Sequence to extend.
        first_layer: The first of the layers.
        contract: Tier of each head and token of these layers.
        dense: Keys and values of each, ``[heads, tokens, head_dim]``, as many as it decides about.

    Returns:
        The new pages of each layer.
    """
    positions = torch.arange(contract.num_tokens)
    return [
        plan_write(pool, state, first_layer + at, contract.layer(at), FlatStates(*own), positions)
        for at, own in enumerate(dense)
    ]


def joined_tiers(pool: PagePool, contract: WriteContract) -> NDArray[np.uint8] | None:
    """Tier ``[layers, heads, runs]`` of every run where ``PromptPages`` can encode all layers.

    Waits for the decision. None where states are decided one by one, or no kernels encode them.
    """
    tokens = contract.num_tokens
    is_in_runs = contract.granularity == RUN_TOKENS and tokens > 0 and tokens % RUN_TOKENS == 0
    if not is_in_runs or pool.kernels is None or isinstance(pool.kernels, PageRecoder):
        return None
    return contract.tier_id[..., ::RUN_TOKENS].cpu().numpy()


@dataclass(frozen=True, slots=True)
class _Segment:
    """Rows of a piece that share a layout, and a layer where kernels take no more.

    Attributes:
        plan: Number of their plan.
        rows: Where they are in the piece.
        layer: Their layer; None where it makes no difference.
    """

    plan: int
    rows: slice
    layer: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Pages of as many runs each, in any layouts, whose states are collected at once.

    Attributes:
        layers: Layers whose states lie together.
        words: See ``RunPages.words``; heads count through those of these layers.
        shape: Pages, and runs of each.
        is_full: Whether no page has an unused place.
        segments: Rows by layout.
    """

    layers: slice
    words: NDArray[np.int64]
    shape: tuple[int, ...]
    is_full: bool
    segments: list[_Segment]


class PromptPages:
    """Pages of the first states of some layers, planned as if all their heads were those of one."""

    def __init__(
        self,
        pool: PagePool,
        codec: StateCodec | None,
        first_layer: int,
        run_tiers: NDArray[np.uint8],
        states: tuple[Tensor, Tensor],
    ) -> None:
        """Plan the pages; waits for nothing.

        Args:
            pool: Owner of the layouts.
            codec: Encoder of the sequence.
            first_layer: The first of the layers.
            run_tiers: ``[layers, heads, runs]`` tier of every run; see ``joined_tiers``.
            states: Keys and values of a layer, which say how many bytes each has.
        """
        self._pool, self._codec, self._first_layer = pool, codec, first_layer
        self._encoder = PageEncoder.of(pool, first_layer, codec)
        num_layers, self._num_heads, num_runs = run_tiers.shape
        self._plans = self._plan(run_tiers.reshape(-1, num_runs))
        step = max(1, _TOGETHER_BYTES // sum(part.nbytes for part in states))
        self._pieces = [
            piece
            for first in range(0, num_layers, step)
            for piece in self._cut(slice(first, min(first + step, num_layers)))
        ]

    def _plan(self, run_tiers: NDArray[np.uint8]) -> list[RunPages]:
        """Pages of every tier; heads count through those of all layers here."""
        config, plans = self._pool.config, list[RunPages]()
        for tier_id, tier in enumerate(config.tiers):
            if tier.kind != "drop":
                plans += plan_runs(
                    run_tiers,
                    tier_id=tier_id,
                    page_tokens=tier.page_tokens,
                    as_runs=config.is_in_runs(tier_id),
                )
        return plans

    def _cut(self, group: slice) -> Iterator[_Piece]:
        """Pages of some layers, those of one size side by side, and no more than kernels take."""
        ends = [layer * self._num_heads for layer in (group.start, group.stop)]
        most = self._encoder.most_pages
        for size in sorted({plan.runs.shape[1] for plan in self._plans}):
            numbers = [at for at, plan in enumerate(self._plans) if plan.runs.shape[1] == size]
            own = [slice(*self._plans[at].head_ids.searchsorted(ends).tolist()) for at in numbers]
            heads, runs, counts = (
                np.concatenate(
                    [
                        getattr(self._plans[at], name)[part]
                        for at, part in zip(numbers, own, strict=True)
                    ]
                )
                for name in ("head_ids", "runs", "counts")
            )
            begins = np.cumsum([0, *(part.stop - part.start for part in own)]).tolist()
            for first in range(0, len(heads), most):
                at = slice(first, min(first + most, len(heads)))
                segments = [
                    segment
                    for number, (begin, end) in zip(numbers, pairwise(begins), strict=True)
                    for segment in self._segments(number, heads, at, begin, end)
                ]
                words = np.concatenate([heads[at] - ends[0], counts[at], runs[at].ravel()])
                is_full = bool((counts[at] == size).all())
                yield _Piece(group, words, runs[at].shape, is_full, segments)

    def _segments(
        self, number: int, heads: NDArray[np.int64], piece: slice, begin: int, end: int
    ) -> Iterator[_Segment]:
        """Rows ``begin`` to ``end`` of a plan that are in a piece of so many heads."""
        begin, end = max(begin, piece.start), min(end, piece.stop)
        if begin >= end:
            return
        own, kernels = heads[begin:end], self._encoder.kernels
        assert kernels is not None
        layout, at = self._layout(number), begin - piece.start
        if not layout.tier.is_coded or kernels.joins_layers(layout, self._codec, self._pool.device):
            yield _Segment(number, slice(at, at + end - begin))
            return
        for layer, part in layer_parts(own, self._num_heads):
            yield _Segment(number, slice(at + part.start, at + part.stop), layer)

    def _layout(self, number: int) -> PageLayout:
        """Layout of the pages of a plan."""
        plan = self._plans[number]
        return self._pool.layout((plan.tier_id, plan.position_mode))

    def encode(
        self, protected: Tensor, dense: Sequence[tuple[Tensor, Tensor]]
    ) -> list[JoinedPages]:
        """The pages, tier by tier; waits for no kernel.

        Args:
            protected: ``[layers, heads, tokens]`` bool, of the contract.
            dense: Keys and values of each layer, ``[heads, tokens, head_dim]``, as many as the
                contract decides about.
        """
        found: list[list[Tensor]] = [[] for _ in self._plans]
        if not self._pieces:
            return []
        words = [piece.words for piece in self._pieces]
        every = upload(np.concatenate(words), self._pool.device)
        protected = protected.to(self._pool.device).contiguous()
        group, states = slice(0, 0), None
        for piece, own in zip(self._pieces, every.split([*map(len, words)]), strict=True):
            if piece.layers != group:
                # one group's copy of the states must not outlast the next one's making
                states = None
                group = piece.layers
                keys, values = zip(*dense[group], strict=True)
                states = FlatStates(torch.cat(keys).flatten(0, 1), torch.cat(values).flatten(0, 1))
                del keys, values
            assert states is not None
            of_group = protected[group].flatten(0, 1)
            for number, pages in self._encode(piece, own, states, of_group):
                found[number].append(pages)
        return [
            JoinedPages(
                (plan.tier_id, plan.position_mode), plan.head_ids, plan.counts * RUN_TOKENS, parts
            )
            for plan, parts in zip(self._plans, found, strict=True)
        ]

    def _encode(
        self, piece: _Piece, words: Tensor, states: FlatStates, protected: Tensor
    ) -> Iterator[tuple[int, Tensor]]:
        """Pages of a piece, and the number of their plan."""
        heads, source, rows = place_runs(words, piece.shape, protected, is_full=piece.is_full)
        keys, values = (
            part.index_select(0, source.view(-1)).view(*source.shape, -1)
            for part in (states.keys, states.values)
        )
        if not piece.is_full:
            live = rows.live()[:, :, None]
            keys, values = keys.mul_(live), values.mul_(live)
        for segment in piece.segments:
            at = segment.rows
            own = (keys[at], values[at])
            yield segment.plan, self._pages(piece, segment, own, rows.select(at), heads[at])

    def _pages(
        self,
        piece: _Piece,
        segment: _Segment,
        states: tuple[Tensor, Tensor],
        rows: PageRows,
        heads: Tensor,
    ) -> Tensor:
        """Pages of a segment; heads count through those of the layers of its piece."""
        layout, encoder, first = self._layout(segment.plan), self._encoder, piece.layers.start
        if not layout.tier.is_coded:
            return encoder.encode(layout, states, rows, heads, is_checked=True)
        if segment.layer is not None:
            encoder = PageEncoder.of(self._pool, self._first_layer + segment.layer, self._codec)
            local = heads - (segment.layer - first) * self._num_heads
            return encoder.encode(layout, states, rows, local)
        assert encoder.kernels is not None
        half = (states[0].to(torch.bfloat16), states[1].to(torch.bfloat16))
        if first_head := (self._first_layer + first) * self._num_heads:
            heads = heads + first_head
        return encoder.kernels.encode_layers(layout, self._codec, half, rows, heads)
