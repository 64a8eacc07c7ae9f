# SPDX-License-Identifier: Apache-2.0
"""Decode steps of a batch that a CUDA graph can hold.

Everything a step reads or counts lies in tensors that keep their place: lists of pages, lengths
of tails, positions. A step appends the new states to the tails, attends, and needs no word from
the host. Between steps the host counts along, and lengthens the lists of rows that sealed a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sphkv.attention.cuda.dense import MAX_GROUP, DenseDecode, DenseStates
from sphkv.attention.cuda.geometry import is_served
from sphkv.attention.cuda.kernel_cache import DecodeKernels
from sphkv.attention.cuda.pages import (
    HOPPER,
    LayerLists,
    list_entries,
    page_base,
    page_numbers,
    place_pages,
)
from sphkv.attention.partial import PartialAttention
from sphkv.attention.plans import ListedPages, count_pages, list_pages, list_starts
from sphkv.attention.request import AttentionOptions, spherical_codec
from sphkv.attention.triton.dense import TailList
from sphkv.codec.states import SphericalCodec
from sphkv.errors import UnsupportedBatchError
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PositionMode
from sphkv.store.sequence import OpenTail, pool_of_tag
from sphkv.store.store import PageStore


def _sealed_layout(store: PageStore, sequence: int) -> PageLayout:
    """Layout of the pages that full tails of a sequence become."""
    tiers, head_dim = store.config.tiers, store.config.geometry.head_dim
    tier = tiers[store.seal_tier(sequence)]
    return PageLayout(tiers.id_of(tier.name), tier, head_dim, PositionMode.CONTIGUOUS)


def _dense_layout(store: PageStore) -> PageLayout:
    tiers, head_dim = store.config.tiers, store.config.geometry.head_dim
    return PageLayout(tiers.dense_id, tiers[tiers.dense_id], head_dim, PositionMode.CONTIGUOUS)


def why_not_captured(
    store: PageStore, sequences: Sequence[int], windows: Sequence[int | None]
) -> str:
    """Why decode steps of these sequences cannot be captured; empty where they can.

    Args:
        store: Their pages and tails.
        sequences: One per row.
        windows: Sliding window of each layer, None for full attention.
    """
    if not sequences:
        return "there is no sequence"
    if any(window is not None for window in windows):
        return "captured steps do not drop pages behind sliding windows"
    reasons = (_why_not_kernels(store, sequences[0]), _why_not_batch(store, sequences))
    rows = (_why_not_sequence(store, row) for row in sequences)
    return next(filter(None, (*reasons, *rows)), "")


def _why_not_kernels(store: PageStore, sequence: int) -> str:
    """Why kernels cannot do it, by shapes and device."""
    sealed, group = _sealed_layout(store, sequence), store.config.geometry.group_size
    if not is_served(sealed):
        return f"the decode kernel does not read tier {sealed.tier.name!r} of sealed pages"
    if sealed.page_tokens != store.config.seal_tokens:
        return f"{store.config.seal_tokens} tokens are sealed at once, in several pages"
    if store.allocator.order is None:
        return "the store keeps its pages in an order that the decode kernel does not read"
    if not any(slab.layout == sealed for slab in store.allocator.slabs()):
        return f"no page of tier {sealed.tier.name!r} is sealed yet"
    if group > MAX_GROUP:
        return f"{group} query heads share a KV head, the dense kernel takes {MAX_GROUP}"
    # no self-test watches over the kernel of dense states: it serves where it was checked
    if torch.cuda.get_device_capability() != HOPPER:
        return f"captured steps need compute capability {HOPPER}"
    return ""


def _why_not_batch(store: PageStore, sequences: Sequence[int]) -> str:
    """Why sequences cannot share a step, by codecs and tiers."""
    if not all(isinstance(store.codec(row), SphericalCodec) for row in sequences):
        return "a sequence has no spherical codec"
    if len({id(store.codec(row)) for row in sequences}) > 1:
        return "the sequences have codecs of their own"
    tiers = sorted({*map(store.seal_tier, sequences)})
    return f"the sequences seal at tiers {tiers}" if len(tiers) > 1 else ""


def _why_not_sequence(store: PageStore, sequence: int) -> str:
    """Why steps of one sequence cannot be captured, by its pages and tails."""
    tiers = store.config.tiers
    readable = {tiers.id_of(store.seal_tier(sequence)), tiers.dense_id}
    extents = set()
    for layer in range(store.config.geometry.num_layers):
        for tag in store.table(sequence, layer).present_tags():
            tier_id, mode = pool_of_tag(tag)
            if tier_id not in readable or mode is not PositionMode.CONTIGUOUS:
                return (
                    f"layer {layer} of sequence {sequence} has pages of tier "
                    f"{tiers[tier_id].name!r} with {mode.name.lower()} positions"
                )
        tail = store.open_tail(sequence, layer)
        if tail is None:
            return f"layer {layer} of sequence {sequence} has no open tail"
        extents.add((tail.num_tokens, tail.first_position))
    if len(extents) > 1:
        return f"layers of sequence {sequence} differ in length: tails are {sorted(extents)}"
    return ""


class CapturedSteps:
    """Captured attention of several sequences of one store, each of its own length.

    Attributes:
        positions: ``[rows, 1]`` int64 position of each row's newest token.
        max_tokens: Tokens per sequence that lists and tables have room for.
        kernels: Decode kernels of all layers.
    """

    def __init__(self, store: PageStore, sequences: Sequence[int], *, max_tokens: int) -> None:
        """Lay out the lists.

        Args:
            store: Pages in fragment order, on the GPU.
            sequences: One id per row, for which ``why_not_captured`` finds no reason.
            max_tokens: Tokens a sequence may reach.
        """
        geometry, self._device = store.config.geometry, torch.device(store.config.device)
        self._store, self._sequences = store, list(sequences)
        self._sealed = _sealed_layout(store, sequences[0])
        self._codec = spherical_codec(store, sequences[0])
        layers, num_rows = range(geometry.num_layers), len(sequences)
        page = self._sealed.page_tokens
        self.max_tokens = max_tokens
        self.kernels = DecodeKernels(self._device)
        self.kernels.reserve(max_tokens + page, num_rows)
        self.positions = torch.zeros(num_rows, 1, dtype=torch.int64, device=self._device)
        self._positions32 = torch.zeros(num_rows, dtype=torch.int32, device=self._device)
        self._extents = torch.zeros(num_rows, 2, dtype=torch.int64, device=self._device)
        self._dense = DenseDecode(geometry.head_dim, geometry.group_size, self._device)
        shape = (num_rows, geometry.num_query_heads)
        # all layers use it in turn
        self._partial = PartialAttention(
            torch.empty(*shape, geometry.head_dim, device=self._device),
            torch.empty(shape, device=self._device),
        )
        self._base = page_base(store.allocator, self._sealed)
        heads, most = geometry.num_kv_heads, max_tokens // page + 1
        self._lists = LayerLists(len(layers), heads, num_rows, most, self._device)
        self._dense_states = [self._lay_out(layer) for layer in layers]
        self._tables = [[store.table(row, layer) for row in sequences] for layer in layers]
        self._version = self._table_version()
        self.recount()

    def _table_version(self) -> int:
        """Rises with every change of a pointer table."""
        return sum(table.version for tables in self._tables for table in tables)

    def _lay_out(self, layer: int) -> DenseStates:
        """List the coded pages of a layer; its tails and dense pages."""
        store, heads = self._store, self._store.config.geometry.num_kv_heads
        listed = [list_pages(store, row, layer, has_positions=is_served) for row in self._sequences]
        coded = [pages.get(self._sealed) for pages in listed]
        placed = place_pages(
            store.allocator, self._sealed, coded, heads, device=self._device, base=self._base
        )
        self._pool = placed.pool
        self._lists.replace(layer, placed.lists)
        layout = _dense_layout(store)
        dense: list[ListedPages | None] = [pages.get(layout) for pages in listed]
        # a kernel wants an address, used or not
        found = [np.zeros(1, dtype=np.int64), *(pages.addresses for pages in dense if pages)]
        return DenseStates(
            TailList.of(store, self._sequences, layer).addresses.to(self._device),
            self._extents,
            torch.from_numpy(np.concatenate(found)).to(self._device),
            (1 + list_starts(count_pages(dense, heads))).to(self._device),
            layout,
        )

    def _tails(self) -> list[OpenTail]:
        """The tail of each row; all its layers are of one length."""
        tails = [self._store.open_tail(row, 0) for row in self._sequences]
        return [tail for tail in tails if tail is not None]

    def recount(self) -> None:
        """Rewrite positions and tail lengths from the store, in place."""
        extents = [[tail.num_tokens, tail.first_position] for tail in self._tails()]
        # the host need not wait: what it copies from is taken at once
        self._extents.copy_(torch.tensor(extents), non_blocking=True)
        self.positions.copy_(self._extents.sum(1, keepdim=True) - 1)
        self._positions32.copy_(self.positions[:, 0])

    def advance(self) -> None:
        """Count one more token of every row; the first thing a captured step does."""
        self.positions.add_(1)
        self._positions32.add_(1)
        self._extents[:, 0].add_(1)

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        options: AttentionOptions,
        *,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Append the new states of a layer and attend; see ``StepGraph.attend``."""
        if options.window is not None and options.window < self.max_tokens:
            raise UnsupportedBatchError(
                f"captured steps do not drop pages behind a window of {options.window} tokens"
            )
        kernel = self.kernels.get(self._codec, layer, self._sealed.tier)
        query = query[:, :, 0].contiguous()
        if query.dtype != torch.bfloat16:
            query = query.float()
        self._dense.attend(
            query,
            keys[:, :, 0].to(torch.bfloat16),
            values[:, :, 0].to(torch.bfloat16),
            self._dense_states[layer],
            options,
            result=self._partial,
            spare_processors=kernel.spare_processors,
        )
        kernel.overlaps = True
        result = kernel.empty_result(len(query), query.dtype)
        kernel.attend(
            query,
            self._pool,
            self._lists.layer(layer),
            options,
            result=result,
            merge_with=self._partial,
            query_positions=self._positions32,
            sink_logits=None if sink_logits is None else sink_logits.float(),
        )
        return result.output[:, :, None]

    def prepare(self) -> None:
        """Make room for the next step: full tails become pages in the lists.

        Raises:
            UnsupportedBatchError: A sequence is as long as it may get, or its pages changed.
        """
        if self._table_version() != self._version:
            raise UnsupportedBatchError("pages were changed since the steps were captured")
        before = [tail.first_position for tail in self._tails()]
        longest = max(map(self._store.num_tokens, self._sequences))
        if longest >= self.max_tokens:
            raise UnsupportedBatchError(
                f"a sequence has {longest} tokens, room is {self.max_tokens}"
            )
        if self._store.make_room(self._sequences, num_new=1):
            self._list_newest(np.array(before))
            self._version = self._table_version()
            self.recount()

    def commit(self) -> None:
        """Tell the store about the step that was queued."""
        self._store.absorb(self._sequences)

    def _list_newest(self, bases: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Lengthen the lists of rows whose tails began at ``bases [rows]`` and have sealed."""
        ends = np.array([tail.first_position for tail in self._tails()])
        is_grown = ends > bases
        heads = self._store.config.geometry.num_kv_heads
        ids = np.full((len(self._tables), len(ends), heads), -1)
        for layer, tables in enumerate(self._tables):
            for row in np.flatnonzero(is_grown):
                pages, counts = tables[row].page_ids.numpy(), tables[row].num_pages.numpy()
                ids[layer, row] = pages[np.arange(len(counts)), counts - 1]
        addresses = self._store.allocator.addresses(torch.from_numpy(ids)).transpose(1, 2)
        grown = torch.from_numpy(is_grown)
        # unused entries of other rows count from the base as well
        addresses = torch.where(grown, addresses, self._base)
        numbers = page_numbers(addresses, self._base, self._sealed)
        self._lists.append(list_entries(numbers, torch.from_numpy(bases)), grown)
