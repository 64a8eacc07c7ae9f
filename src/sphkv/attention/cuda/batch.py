# SPDX-License-Identifier: Apache-2.0
"""Decode steps of a batch that a CUDA graph can hold.

Everything a step reads or counts lies in tensors that keep their place: lists of pages, lengths
of tails, positions. A step appends the new states to the tails, attends, and needs no word from
the host. Between steps the host counts along, and rewrites the lists when a page has sealed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sphkv.attention.cuda.backend import CudaBackend
from sphkv.attention.cuda.dense import DenseDecode, DenseStates
from sphkv.attention.cuda.geometry import is_served
from sphkv.attention.cuda.kernel_cache import DecodeKernels
from sphkv.attention.cuda.page_lists import LayerLists, PageLists, list_entries
from sphkv.attention.cuda.pages import HOPPER, page_base, page_numbers, place_pages
from sphkv.attention.partial import PartialAttention
from sphkv.attention.request import AttentionOptions
from sphkv.attention.triton.dense import TailList
from sphkv.codec.states import SphericalCodec
from sphkv.core.tiers import TierSpec
from sphkv.errors import UnsupportedBatchError
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PositionMode
from sphkv.store.sequence import PageGroup
from sphkv.store.store import PageStore


@dataclass(slots=True, eq=False)
class _Layer:
    """What one layer reads; GPU tensors keep their place.

    Attributes:
        lists: Coded pages.
        dense: Tails and dense pages.
        num_columns: Columns of the pointer tables in use.
    """

    lists: PageLists
    dense: DenseStates
    num_columns: int = 0


class BatchDecode:
    """Captured attention of several sequences of one store.

    Attributes:
        positions: ``[batch, 1]`` int64 position of each sequence's newest token.
        max_tokens: Tokens per sequence that lists and tables have room for.
    """

    def __init__(
        self, store: PageStore, sequences: Sequence[int], tier: TierSpec, *, max_tokens: int
    ) -> None:
        """Lay out the lists.

        Args:
            store: Pages in fragment order, on the GPU.
            sequences: One id per batch row; every layer must have an open tail.
            tier: Tier of the coded pages, served by the Hopper kernel.
            max_tokens: Tokens a sequence may reach.

        Raises:
            UnsupportedBatchError: Some pages are neither of this tier and contiguous nor dense,
                or sequences differ in length.
        """
        geometry = store.config.geometry
        self.max_tokens = max_tokens
        self._store, self._sequences, self._tier = store, list(sequences), tier
        self._device = torch.device(store.config.device)
        self._kernels = DecodeKernels(self._device, max_batch=len(sequences))
        self._kernels.reserve(max_tokens + tier.page_tokens)
        self._coded = PageLayout(
            store.config.tiers.id_of(tier.name), tier, geometry.head_dim, PositionMode.CONTIGUOUS
        )
        if not is_served(self._coded):
            raise UnsupportedBatchError(f"the decode kernel does not read tier {tier.name!r}")
        self.positions = torch.zeros(len(sequences), 1, dtype=torch.int64, device=self._device)
        self._positions32 = torch.zeros(len(sequences), dtype=torch.int32, device=self._device)
        self._extents = torch.zeros(len(sequences), 2, dtype=torch.int64, device=self._device)
        self._dense = DenseDecode(geometry.head_dim, geometry.group_size, self._device)
        shape = (len(sequences), geometry.num_kv_heads * geometry.group_size)
        # all layers use it in turn
        self._partial = PartialAttention(
            torch.empty(*shape, geometry.head_dim, device=self._device),
            torch.empty(shape, device=self._device),
        )
        self._base = page_base(store.allocator, self._coded)
        self._lists = LayerLists(
            geometry.num_layers,
            geometry.num_kv_heads,
            len(sequences),
            max_tokens // tier.page_tokens + 1,
            self._device,
        )
        self._layers = [self._lay_out(layer) for layer in range(geometry.num_layers)]
        self.recount()

    def _codec(self) -> SphericalCodec:
        codec = self._store.codec(self._sequences[0])
        if not isinstance(codec, SphericalCodec):
            raise UnsupportedBatchError("the sequences have no spherical codec")
        return codec

    def _lay_out(self, layer: int) -> _Layer:
        """What a layer holds now."""
        groups = [self._groups(sequence, layer) for sequence in self._sequences]
        coded = [group[self._coded] for group in groups if self._coded in group]
        if len(coded) < len(groups):
            raise UnsupportedBatchError(f"a sequence has no coded page in layer {layer} yet")
        placed = place_pages(self._store.allocator, coded, self._device, self._base)
        self._pool = placed.pool
        self._lists.replace(layer, placed.lists)
        tables = [self._store.table(sequence, layer) for sequence in self._sequences]
        columns = {count for table in tables for count in table.num_pages.tolist()}
        if len(columns) != 1:
            raise UnsupportedBatchError(f"heads of layer {layer} have {sorted(columns)} pages each")
        return _Layer(self._lists.layer(layer), self._dense_states(layer, groups), columns.pop())

    def _dense_states(
        self, layer: int, groups: Sequence[Mapping[PageLayout, PageGroup]]
    ) -> DenseStates:
        """Tails and dense pages, sequence by sequence, head by head."""
        geometry, tiers = self._store.config.geometry, self._store.config.tiers
        tails = [self._store.tail(sequence, layer) for sequence in self._sequences]
        if any(tail.num_tokens == 0 for tail in tails):
            raise UnsupportedBatchError(f"a sequence has no open tail in layer {layer}")
        layout = PageLayout(
            tiers.dense_id, tiers[tiers.dense_id], geometry.head_dim, PositionMode.CONTIGUOUS
        )
        counts = torch.zeros(len(groups), geometry.num_kv_heads, dtype=torch.int64)
        found = [torch.zeros(1, dtype=torch.int64)]  # a kernel wants an address, used or not
        for sequence, each in enumerate(groups):
            if layout in each:
                counts[sequence] = each[layout].num_pages
                found.append(self._store.allocator.addresses(each[layout].flat_ids()))
        starts = torch.ones(counts.numel() + 1, dtype=torch.int32)
        starts[1:] += counts.flatten().cumsum(0).to(torch.int32)
        return DenseStates(
            TailList.of(tails, self._device).addresses,
            self._extents,
            torch.cat(found).to(self._device),
            starts.to(self._device),
            layout,
        )

    def _groups(self, sequence: int, layer: int) -> dict[PageLayout, PageGroup]:
        """Pages of a sequence by layout, listed on the host."""
        groups = self._store.pages(sequence, layer, device="cpu")
        for group in groups:
            if group.layout.position_mode is not PositionMode.CONTIGUOUS or (
                group.layout.tier.is_coded and group.layout != self._coded
            ):
                raise UnsupportedBatchError(
                    f"layer {layer} has pages of tier {group.layout.tier.name!r} with "
                    f"{group.layout.position_mode.name.lower()} positions"
                )
        return {group.layout: group for group in groups}

    def recount(self) -> None:
        """Rewrite positions and tail lengths from the store, in place."""
        extents = []
        for sequence in self._sequences:
            tail = self._store.tail(sequence, 0)
            extents.append([tail.num_tokens, tail.first_position])
        if any(extent != extents[0] for extent in extents):
            raise UnsupportedBatchError(f"sequences differ in length: tails are {extents}")
        # the host need not wait: what it copies from is taken at once
        self._extents.copy_(torch.tensor(extents), non_blocking=True)
        self.positions.copy_(self._extents.sum(1, keepdim=True) - 1)
        self._positions32.copy_(self.positions[:, 0])

    def advance(self) -> None:
        """Count one more token of every sequence; the first thing a captured step does."""
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
        """Append the new states of a layer and attend; queued on the current stream.

        Args:
            layer: The layer.
            query: ``[batch, query_heads, 1, head_dim]`` after RoPE.
            keys: ``[batch, kv_heads, 1, head_dim]`` after RoPE.
            values: ``[batch, kv_heads, 1, head_dim]``.
            options: Scale, soft-cap and window.
            sink_logits: ``[query_heads]`` learned sink logits.

        Returns:
            ``[batch, query_heads, 1, head_dim]`` bfloat16 if the query is, else float32.
        """
        held, kernel = self._layers[layer], self._kernels.get(self._codec(), layer, self._tier)
        query = query[:, :, 0].contiguous()
        if query.dtype != torch.bfloat16:
            query = query.float()
        self._dense.attend(
            query,
            keys[:, :, 0].to(torch.bfloat16),
            values[:, :, 0].to(torch.bfloat16),
            held.dense,
            options,
            result=self._partial,
            spare_processors=kernel.spare_processors,
        )
        kernel.overlaps = True
        result = kernel.empty_result(len(query), query.dtype)
        kernel.attend(
            query,
            self._pool,
            held.lists,
            options,
            result=result,
            merge_with=self._partial,
            query_positions=self._positions32,
            sink_logits=None if sink_logits is None else sink_logits.float(),
        )
        return result.output[:, :, None]

    def prepare(self) -> None:
        """Make room for the next step: tails that it would fill become pages in the lists."""
        if self._store.make_room(self._sequences):
            self._list_newest()
            self.recount()

    def commit(self) -> None:
        """Tell the store about the step that was queued."""
        self._store.absorb(self._sequences)

    def _list_newest(self) -> None:
        """Add the last page of every head, sequence and layer to the lists."""
        newest = [
            self._store.table(sequence, layer).page_ids.numpy()[:, held.num_columns]
            for layer, held in enumerate(self._layers)
            for sequence in self._sequences
        ]
        ids = torch.from_numpy(np.stack(newest)).view(len(self._layers), len(self._sequences), -1)
        addresses = self._store.allocator.addresses(ids).transpose(1, 2)
        # all sequences are of one length: the newest pages end where the tails begin
        tail = self._store.tail(self._sequences[0], 0)
        numbers = page_numbers(addresses, self._base, self._coded)
        self._lists.append(list_entries(numbers, tail.first_position - self._tier.page_tokens))
        for held in self._layers:
            held.num_columns += 1


def can_capture(backend: object, tier: TierSpec, head_dim: int) -> bool:
    """Whether a backend and tier allow captured steps."""
    if not isinstance(backend, CudaBackend) or not tier.is_coded:
        return False
    # no self-test watches over the kernel of dense states: it serves where it was checked
    is_checked = torch.cuda.get_device_capability() == HOPPER
    return is_checked and is_served(PageLayout(1, tier, head_dim, PositionMode.CONTIGUOUS))
