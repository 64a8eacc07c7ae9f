# SPDX-License-Identifier: Apache-2.0
"""Several layers of a prompt at once, as a contract says.

On a GPU most of the time of a layer is the host's: planning pages, asking for slabs, a launch for
every small step. Layers that are planned and encoded together share all of that.
"""

from __future__ import annotations

import functools
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
from sphkv.store.order import WORD_BYTES, PageRecoder
from sphkv.store.pages import FlatStates, PageEncoder, plan_write
from sphkv.store.paging import PageRows, RunPages, place_runs, plan_runs
from sphkv.store.pool import JoinedPages, LayerChange, PagePool, layer_parts
from sphkv.store.sequence import SequenceState


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


@dataclass(frozen=True, slots=True, eq=False)
class SeenLayers:
    """What the host must know of a contract and of states before it can plan.

    Who looks while a device has little else to do spares a later write the wait.

    Attributes:
        run_tiers: ``[layers, heads, runs]`` tier of every run where ``PromptPages`` can encode all
            layers; None where states are decided one by one, or no kernels encode them.
        largest: ``[layers, 2]`` magnitudes on the CPU that no element of keys and values is above;
            NaN if there is one.
    """

    run_tiers: NDArray[np.uint8] | None
    largest: Tensor

    @classmethod
    def of(cls, pool: PagePool, contract: WriteContract, largest: Tensor) -> SeenLayers:
        """Wait for the tiers of a contract, and for ``largest``."""
        tokens, run_tiers = contract.num_tokens, None
        is_in_runs = contract.granularity == RUN_TOKENS and tokens > 0 and tokens % RUN_TOKENS == 0
        # states are gathered by address
        has_kernels = pool.kernels is not None and pool.allocator.has_copier
        if is_in_runs and has_kernels and not isinstance(pool.kernels, PageRecoder):
            run_tiers = contract.tier_id[..., ::RUN_TOKENS].cpu().numpy()
        return cls(run_tiers, largest.cpu())


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
        words: See ``RunPages.words``; heads count through those of all layers.
        shape: Pages, and runs of each.
        is_full: Whether no page has an unused place.
        segments: Rows by layout.
    """

    words: NDArray[np.int64]
    shape: tuple[int, int]
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
    ) -> None:
        """Plan the pages; waits for nothing.

        Args:
            pool: Owner of the layouts.
            codec: Encoder of the sequence.
            first_layer: The first of the layers.
            run_tiers: ``[layers, heads, runs]`` tier of every run; see ``SeenLayers``.
        """
        self._pool, self._codec, self._first_layer = pool, codec, first_layer
        self._encoder = PageEncoder.of(pool, first_layer, codec)
        self._num_heads = run_tiers.shape[1]
        self._plans = self._plan(run_tiers.reshape(-1, run_tiers.shape[2]))
        self._pieces = [*self._cut()]

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

    def _cut(self) -> Iterator[_Piece]:
        """Pages of one size side by side, and no more than kernels take."""
        most = self._encoder.most_pages
        for size in sorted({plan.runs.shape[1] for plan in self._plans}):
            numbers = [at for at, plan in enumerate(self._plans) if plan.runs.shape[1] == size]
            heads, runs, counts = (
                np.concatenate([getattr(self._plans[at], name) for at in numbers])
                for name in ("head_ids", "runs", "counts")
            )
            sizes = [len(self._plans[at].head_ids) for at in numbers]
            begins = np.cumsum([0, *sizes]).tolist()
            for first in range(0, len(heads), most):
                at = slice(first, min(first + most, len(heads)))
                segments = [
                    segment
                    for number, (begin, end) in zip(numbers, pairwise(begins), strict=True)
                    for segment in self._segments(number, heads, at, begin, end)
                ]
                words = np.concatenate([heads[at], counts[at], runs[at].ravel()])
                is_full = bool((counts[at] == size).all())
                yield _Piece(words, (at.stop - first, size), is_full, segments)

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
        device = self._pool.device
        states = [_HeadStates.of([own[part] for own in dense]) for part in (0, 1)]
        words = [*(piece.words for piece in self._pieces), *(part.addresses for part in states)]
        *every, keys_at, values_at = upload(np.concatenate(words), device).split([*map(len, words)])
        protected = protected.to(device).flatten(0, 1).contiguous()
        for piece, own in zip(self._pieces, every, strict=True):
            heads, _, rows = place_runs(own, piece.shape, protected, is_full=piece.is_full)
            keys = self._collect(piece, own, states[0], keys_at)
            values = self._collect(piece, own, states[1], values_at)
            for segment in piece.segments:
                at = segment.rows
                pages = self._pages(segment, (keys[at], values[at]), rows.select(at), heads[at])
                found[segment.plan].append(pages)
        return [
            JoinedPages(
                (plan.tier_id, plan.position_mode), plan.head_ids, plan.counts * RUN_TOKENS, parts
            )
            for plan, parts in zip(self._plans, found, strict=True)
        ]

    def _collect(
        self, piece: _Piece, words: Tensor, states: _HeadStates, addresses: Tensor
    ) -> Tensor:
        """``[pages, tokens, head_dim]`` states of a piece, zero where a page has none.

        Args:
            piece: The pages.
            words: ``piece.words`` on the device.
            states: Where those of all heads are.
            addresses: ``states.addresses`` on the device.
        """
        pages, size = piece.shape
        heads, counts, runs = words.split([pages, pages, pages * size])
        sources = addresses[heads][:, None] + runs.view(pages, size) * (RUN_TOKENS * states.stride)
        if not piece.is_full:
            place = torch.arange(size, device=words.device)
            sources = torch.where(place < counts[:, None], sources, 0)
        shape = (pages, size * RUN_TOKENS, states.parts[0].shape[2])
        found = torch.empty(shape, dtype=states.parts[0].dtype, device=words.device)
        self._pool.allocator.collect(
            sources.view(-1), found, piece=found[0, 0].nbytes, stride=states.stride
        )
        return found

    def _pages(
        self, segment: _Segment, states: tuple[Tensor, Tensor], rows: PageRows, heads: Tensor
    ) -> Tensor:
        """Pages of a segment; heads count through those of all layers here."""
        layout, encoder = self._layout(segment.plan), self._encoder
        if not layout.tier.is_coded:
            return encoder.encode(layout, states, rows, heads, is_checked=True)
        if segment.layer is not None:
            encoder = PageEncoder.of(self._pool, self._first_layer + segment.layer, self._codec)
            return encoder.encode(layout, states, rows, heads - segment.layer * self._num_heads)
        assert encoder.kernels is not None
        half = (states[0].to(torch.bfloat16), states[1].to(torch.bfloat16))
        if first_head := self._first_layer * self._num_heads:
            heads = heads + first_head
        return encoder.kernels.encode_layers(layout, self._codec, half, rows, heads)


@dataclass(frozen=True, slots=True, eq=False)
class _HeadStates:
    """Keys or values of some layers, found by address: they are never put side by side.

    Attributes:
        parts: ``[heads, tokens, head_dim]`` of each layer, all of one type, a state in one piece.
        stride: Bytes from a state to the next one of its head.
        addresses: ``[layers * heads]`` int64 of each head's first state.
    """

    parts: list[Tensor]
    stride: int
    addresses: NDArray[np.int64]

    @classmethod
    def of(cls, layers: Sequence[Tensor]) -> _HeadStates:
        """States ``[heads, tokens, head_dim]`` of each layer, which are left where they are.

        They are copied where layers differ or states are no whole words, which models do not do.
        """
        kind = functools.reduce(torch.promote_types, (part.dtype for part in layers))
        parts = [part.to(kind) for part in layers]
        if len({part.stride()[1:] for part in parts}) > 1 or not all(map(_has_words, parts)):
            # a copy begins at a word, which what is contiguous already need not do
            parts = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        size = parts[0].element_size()
        addresses = [
            part.data_ptr() + part.stride(0) * size * np.arange(len(part)) for part in parts
        ]
        return cls(parts, parts[0].stride(1) * size, np.concatenate(addresses))


def _has_words(states: Tensor) -> bool:
    """Whether each state ``[heads, tokens, head_dim]`` is in one piece and begins at a word."""
    size = states.element_size()
    steps = (states.data_ptr(), *(step * size for step in states.stride()[:2]))
    return states.stride(2) == 1 and all(step % WORD_BYTES == 0 for step in steps)
