# SPDX-License-Identifier: Apache-2.0
"""One layer of a method that drops states: a page store with the tiers drop and dense.

Kept states are bfloat16 in pages of 16, every KV head with as many as it keeps; new states wait
in the store's tail of 16. A layer is packed anew by freeing its sequence and writing the states
that stay as a new one, so no page is left half empty but the last of a head, and all bytes are
those of the store's ledger.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from sphkv.attention.api import decode_attention
from sphkv.attention.partial import PartialAttention
from sphkv.attention.request import AttentionOptions, DecodeBackend, DecodeRequest
from sphkv.baselines.held_states import UNUSED, HeldStates
from sphkv.core.contract import LayerContract
from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import DENSE_BITS, RUN_TOKENS, TierSpec, TierTable
from sphkv.store.config import StoreConfig
from sphkv.store.layout import PageLayout
from sphkv.store.ledger import ByteLedger
from sphkv.store.order import PageOrder
from sphkv.store.paging import PositionMode
from sphkv.store.sequence import PointerTable
from sphkv.store.slabs import slab_bytes
from sphkv.store.store import PageStore

PAGE_TOKENS = RUN_TOKENS
"""States of a page, and of the tail."""

DROP_OR_DENSE = TierTable(
    (
        TierSpec("drop", "drop", 0.0, 0, 0),
        TierSpec("max", "dense", float(DENSE_BITS), DENSE_BITS, PAGE_TOKENS),
    )
)

_DENSE_ID = 1
# a table that grows by single pages has up to half as many entries again
_TABLE_GROWTH = 1.5
_LEAST_ENTRIES = 4
_ENTRY_BYTES = torch.int64.itemsize + torch.int16.itemsize
_ALIGNED_SLAB_PAGES = 64


class LayerPages:
    """Dense states of one layer, some of them dropped.

    Attributes:
        store: The pages; layer 0 of ``sequence`` is the layer.
        sequence: Sequence in use.
    """

    def __init__(self, geometry: KVGeometry, backend: DecodeBackend, device: torch.device) -> None:
        """Start empty.

        Args:
            geometry: Sizes of the model.
            backend: Runs decode attention.
            device: Where the states live.
        """
        self._backend = backend
        order: PageOrder | None = getattr(backend, "order", None)
        one_layer = dataclasses.replace(geometry, num_layers=1)
        # slabs of one page, so that none is allocated ahead of its need and each that is given
        # up gives its bytes back; where slabs are aligned that would double their bytes
        slab_pages = 1 if order is None else _ALIGNED_SLAB_PAGES
        config = StoreConfig(
            one_layer,
            DROP_OR_DENSE,
            seal_tier="max",
            recent_tokens=0,
            max_slab_pages=slab_pages,
            device=str(device),
        )
        self.store = PageStore(config, order=order)
        self.sequence = 0
        self.store.create(0)

    def fork(self) -> LayerPages:
        """A layer with the same states in the same store; pages are shared."""
        other = copy.copy(self)
        other.sequence = max(self.store.sequences) + 1
        self.store.fork(self.sequence, other.sequence)
        return other

    @property
    def num_tokens(self) -> int:
        """Tokens the layer has been given."""
        return self.store.num_tokens(self.sequence)

    @property
    def num_open(self) -> int:
        """States of each head that wait in the tail."""
        return self.store.tail(self.sequence, 0).num_tokens

    @property
    def num_states(self) -> int:
        """States held, over all heads."""
        heads = self.store.config.geometry.num_kv_heads
        ids = self.store.table(self.sequence, 0).all_ids()
        return int(self.store.allocator.counts(ids).sum()) + heads * self.num_open

    def pages_per_head(self) -> list[int]:
        """Sealed pages of each head."""
        counts: list[int] = self.store.table(self.sequence, 0).num_pages.tolist()
        return counts

    def write(self, is_kept: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Replace everything by the states marked in ``[kv_heads, tokens]``.

        Args:
            is_kept: Marks of the states to keep; the last token must be kept by some head.
            keys: ``[kv_heads, tokens, head_dim]``.
            values: ``[kv_heads, tokens, head_dim]``.
            positions: ``[tokens]`` int64, rising.
        """
        self.store.free(self.sequence)
        self.sequence = max(self.store.sequences, default=self.sequence) + 1
        self.store.create(self.sequence)
        contract = LayerContract(
            is_kept.to(torch.uint8) * _DENSE_ID, torch.zeros_like(is_kept, dtype=torch.bool)
        )
        self.store.write(self.sequence, 0, contract, keys, values, positions)

    def keep(self, held: HeldStates, is_kept: Tensor) -> None:
        """Replace everything by what is marked among held states ``[kv_heads, most]``."""
        is_kept = is_kept & (held.positions >= 0)
        heads, most, dim = held.keys.shape
        positions = held.positions[is_kept].unique()
        place = torch.searchsorted(positions, held.positions.clamp(min=0)).clamp(
            max=max(0, len(positions) - 1)
        )
        rows = torch.arange(heads, device=place.device)[:, None].expand(heads, most)
        where = (rows[is_kept], place[is_kept])
        marks = torch.zeros(heads, len(positions), dtype=torch.bool, device=place.device)
        keys = torch.zeros(heads, len(positions), dim, device=place.device)
        values = torch.zeros_like(keys)
        marks[where] = True
        keys[where], values[where] = held.keys[is_kept], held.values[is_kept]
        self.write(marks, keys, values, positions)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add the next states to every head."""
        self.store.append(self.sequence, 0, keys, values)

    def attend(
        self,
        query: Tensor,
        positions: Tensor,
        options: AttentionOptions,
        *,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Attention of queries ``[query_heads, tokens, head_dim]`` by the backend's kernel."""
        # a request plans on the CPU, wherever the pages lie
        request = DecodeRequest(self.store, self.sequence, 0, query, positions.cpu(), options)
        return decode_attention(request, sink_logits=sink_logits, backend=self._backend)

    def attend_partly(
        self, query: Tensor, positions: Tensor, options: AttentionOptions
    ) -> PartialAttention:
        """The same, to be merged with attention over other states."""
        # a request plans on the CPU, wherever the pages lie
        request = DecodeRequest(self.store, self.sequence, 0, query, positions.cpu(), options)
        return self._backend.attend(request)

    def read(self) -> HeldStates:
        """What every head holds, by position; a copy, which no decode step makes."""
        geometry = self.store.config.geometry
        tail = self.store.tail(self.sequence, 0)
        device = tail.keys.device
        heads = torch.arange(geometry.num_kv_heads, device=device)[:, None]
        newest = torch.arange(tail.num_tokens, device=device) + tail.first_position
        owners = [heads.expand(-1, tail.num_tokens).flatten()]
        positions = [newest.expand(geometry.num_kv_heads, -1).flatten()]
        keys, values = [tail.keys.flatten(0, 1).float()], [tail.values.flatten(0, 1).float()]
        for group in self.store.pages(self.sequence, 0):
            view = self.store.view(group)
            live = view.live()
            owners.append(group.head_ids()[:, None].expand_as(live)[live])
            positions.append(view.positions()[live])
            keys.append(view.dense_keys()[live].float())
            values.append(view.dense_values()[live].float())
        flat = (torch.cat(owners), torch.cat(positions), torch.cat(keys), torch.cat(values))
        return _by_head(*flat, geometry.num_kv_heads)

    def crop(self, num_tokens: int) -> None:
        """Forget the tokens from ``num_tokens`` on."""
        self.store.crop(self.sequence, num_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of every live tensor."""
        return self.store.live_bytes

    def ledger(self) -> ByteLedger:
        """The same bytes by kind."""
        return self.store.ledger()

    def live_tensors(self) -> list[Tensor]:
        """Every live tensor."""
        return self.store.live_tensors()

    def bytes_for(self, pages: Sequence[int]) -> int:
        """Most bytes a layer takes when its heads have so many pages, and a tail.

        Every page is charged for a position per state; a head may have come to its pages one by
        one, which leaves unused entries in the pointer table.
        """
        config = self.store.config
        heads, dim = config.geometry.num_kv_heads, config.geometry.head_dim
        layout = PageLayout(_DENSE_ID, DROP_OR_DENSE[_DENSE_ID], dim, PositionMode.TOKENS)
        is_aligned = self.store.allocator.order is not None
        total, stride = sum(pages), config.max_slab_pages
        size = slab_bytes(layout, total)
        if is_aligned:
            size += -(-total // stride) * layout.page_bytes
        entries = max(_LEAST_ENTRIES, int(_TABLE_GROWTH * max(pages, default=0)) + 1)
        size += PointerTable.bytes_for(heads, 0) + heads * entries * _ENTRY_BYTES
        return size + heads * PAGE_TOKENS * config.geometry.dense_state_bytes


def _by_head(
    owners: Tensor, positions: Tensor, keys: Tensor, values: Tensor, num_heads: int
) -> HeldStates:
    """States in one list, each with its head, as rows of heads in order of position."""
    order = torch.argsort(owners * (int(positions.max()) + 1 if len(positions) else 1) + positions)
    owners, positions = owners[order], positions[order]
    counts = owners.bincount(minlength=num_heads)
    most = int(counts.max())
    rank = torch.arange(len(owners), device=owners.device) - (counts.cumsum(0) - counts)[owners]
    where = (owners, rank)
    held_keys = keys.new_zeros(num_heads, most, keys.shape[-1])
    held_values = torch.zeros_like(held_keys)
    held_positions = positions.new_full((num_heads, most), UNUSED)
    held_keys[where], held_values[where] = keys[order], values[order]
    held_positions[where] = positions
    return HeldStates(held_keys, held_values, held_positions)
