# SPDX-License-Identifier: Apache-2.0
"""Decode attention in Triton: one launch per kind of page, one for the tails, one to merge."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sphkv.attention.partial import PartialAttention
from sphkv.attention.plans import (
    ListedPages,
    PlanCache,
    count_pages,
    join_layouts,
    list_pages,
    list_starts,
    upload,
)
from sphkv.attention.request import (
    AttentionOptions,
    BatchRequest,
    DecodeRequest,
    EagerBackend,
    attend_by_codec,
    spherical_codec,
)
from sphkv.attention.triton.coded import launch_coded
from sphkv.attention.triton.dense import TailList, launch_dense
from sphkv.attention.triton.encode import TritonEncoder
from sphkv.attention.triton.rows import PartSlots, QueryRows, combine_parts
from sphkv.attention.triton.tables import EntryTable, EntryTables
from sphkv.codec.states import SphericalCodec
from sphkv.store.layout import PageLayout
from sphkv.store.order import PageCodec, PageOrder
from sphkv.store.store import PageStore

PRECISIONS = ("tf32", "tf32x3", "ieee")

# Programs per multiprocessor that a launch aims at.
_WAVES = 4


def is_interpreted() -> bool:
    """Whether Triton runs its kernels in the interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@dataclass(frozen=True, slots=True, eq=False)
class PageList:
    """Pages of one layout on the device; a list is one (sequence, KV head).

    Attributes:
        layout: Their layout.
        addresses: ``[pages]`` int64, list by list.
        starts: ``[lists + 1]`` int32 into ``addresses``.
        most_pages: Pages of the longest list.
        table: Entries of a coded tier; None for dense pages.
    """

    layout: PageLayout
    addresses: Tensor
    starts: Tensor
    most_pages: int
    table: EntryTable | None


class TritonBackend(EagerBackend):
    """Kernels in Triton over pages as the store writes them.

    Attributes:
        name: ``"triton"``.
        page_order: None: pages as ``store/layout.py`` has them.
        page_codec: Fused kernels that encode pages.
    """

    name = "triton"
    page_order: PageOrder | None
    page_codec: PageCodec | None

    def __init__(self, *, precision: str = "tf32x3") -> None:
        """Choose the arithmetic.

        Args:
            precision: How products multiply float32 numbers: ``"tf32"`` is fastest and good to
                three digits, ``"tf32x3"`` almost float32, ``"ieee"`` float32.

        Raises:
            ImportError: Triton is not installed.
            ValueError: No such precision.
        """
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
        self._precision = precision
        self.page_order = None
        self.page_codec = self._codec = TritonEncoder()
        self._tables = EntryTables()
        self._listed = PlanCache(_list_sequence)
        self._plans = PlanCache(self._build_plan)

    def plan(self, store: PageStore, sequences: tuple[int, ...], layer: int) -> list[PageList]:
        """Lists of all pages of a layer of sequences of one codec; kept until one of them changes.

        Args:
            store: Pages in token order.
            sequences: One per row.
            layer: The layer.
        """
        return self._plans.get(store, sequences, layer)

    def _build_plan(
        self, store: PageStore, sequences: tuple[int, ...], layer: int
    ) -> list[PageList]:
        listed = [self._listed.get(store, (sequence,), layer) for sequence in sequences]
        return [
            self.page_list(store, sequences[0], layer, layout, pages)
            for layout, pages in join_layouts(listed).items()
        ]

    def page_list(
        self,
        store: PageStore,
        sequence: int,
        layer: int,
        layout: PageLayout,
        pages: Sequence[ListedPages | None],
    ) -> PageList:
        """Pages of one layout on the store's device, and the entries of its tier.

        Args:
            store: Owner of the pages.
            sequence: One whose codec wrote them.
            layer: Their layer.
            layout: Their layout.
            pages: Those of each row; None for none.
        """
        device = torch.device(store.config.device)
        counts = count_pages(pages, store.config.geometry.num_kv_heads)
        addresses = np.concatenate([each.addresses for each in pages if each is not None])
        table = None
        if layout.tier.is_coded:
            codec = spherical_codec(store, sequence)
            table = self._tables.get(codec, layer, layout.tier, device)
        return PageList(
            layout,
            torch.from_numpy(addresses).to(device, non_blocking=True),
            list_starts(counts).to(device, non_blocking=True),
            int(counts.max()),
            table,
        )

    def attend(self, request: DecodeRequest) -> PartialAttention:
        """Attention over all pages and the tail; see ``DecodeBackend.attend``."""
        sequences = (request.sequence,)
        lists = self.plan(request.store, sequences, request.layer)
        place = (request.store, sequences, request.layer)
        states = (request.query[None], request.positions[None])
        merged = self.attend_lists(*place, *states, request.options, lists)
        return PartialAttention(merged.output[0], merged.lse[0])

    def attend_rows(self, request: BatchRequest) -> PartialAttention:
        """One set of launches for all rows of a codec; see ``DecodeBackend.attend_rows``."""
        return attend_by_codec(self._attend_codec, request)

    def _attend_codec(self, request: BatchRequest) -> PartialAttention:
        place = (request.store, request.sequences, request.layer)
        states = (request.query.unsqueeze(2), request.positions[:, None])
        merged = self.attend_lists(*place, *states, request.options, self.plan(*place))
        return PartialAttention(merged.output[:, :, 0], merged.lse[:, :, 0])

    def attend_lists(
        self,
        store: PageStore,
        sequences: tuple[int, ...],
        layer: int,
        query: Tensor,
        positions: Tensor,
        options: AttentionOptions,
        lists: list[PageList],
    ) -> PartialAttention:
        """Attention over listed pages and the tails; nothing waits for the device.

        Args:
            store: Owner of pages and tails.
            sequences: One per row.
            layer: Layer of the tails.
            query: ``[rows, query_heads, queries, head_dim]`` after RoPE.
            positions: ``[rows, queries]`` int64 on the CPU.
            options: Scale, soft-cap and window.
            lists: Pages of all rows.

        Returns:
            Output ``[rows, query_heads, queries, head_dim]`` and its log-sum-exp.
        """
        device = query.device
        if device.type != "cuda" and not is_interpreted():
            raise ValueError(f"Triton kernels read GPU tensors, got {device}")
        if positions.numel() == 0:
            nothing = torch.zeros(query.shape, device=device)
            return PartialAttention(nothing, nothing[..., 0])
        tails = TailList.of(store, sequences, layer)
        addresses, extents, positions = upload(device, tails.addresses, tails.extents, positions)
        heads = store.config.geometry.num_kv_heads
        rows = QueryRows(query.contiguous(), positions, heads, options, self._precision)
        # slots of rotated values first, as combine_parts wants them
        lists = sorted(lists, key=lambda pages: not pages.layout.tier.has_value_codes)
        splits = [num_splits(rows, pages.most_pages) for pages in lists]
        parts = PartSlots.empty(rows, sum(splits) + 1)
        first = num_rotated = 0
        for pages, num in zip(lists, splits, strict=True):
            launch_pages(pages, rows, parts.part(first, num))
            first += num
            num_rotated += num * pages.layout.tier.has_value_codes
        launch_dense(None, None, TailList(addresses, extents), rows, parts.part(first, 1))
        return combine_parts(parts, rows, num_rotated)

    def table_bytes(self, codec: SphericalCodec) -> int:
        """Bytes of the tables of a codec, of attention and of demotion."""
        return self._tables.nbytes(codec) + self._codec.table_bytes(codec)


def _list_sequence(
    store: PageStore, sequences: tuple[int, ...], layer: int
) -> dict[PageLayout, ListedPages]:
    return list_pages(store, sequences[0], layer)


def launch_pages(pages: PageList, rows: QueryRows, parts: PartSlots) -> None:
    """Attend to one list of pages with the kernel of its kind."""
    lists = (pages.addresses, pages.starts)
    if pages.table is None:
        launch_dense(lists, pages.layout, None, rows, parts)
    else:
        launch_coded(lists, pages.table, pages.layout, rows, parts)


def num_splits(rows: QueryRows, most_pages: int) -> int:
    """Programs among which the pages of a head are split."""
    processors = 1
    if rows.query.is_cuda:
        processors = torch.cuda.get_device_properties(rows.query.device).multi_processor_count
    wanted = -(-_WAVES * processors // (rows.num_lists * rows.num_blocks))
    return max(1, min(wanted, most_pages))
