# SPDX-License-Identifier: Apache-2.0
"""Decode attention in Triton: one launch per kind of page, one for the tail, one to merge."""

from __future__ import annotations

import os
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sphkv.attention.partial import PartialAttention
from sphkv.attention.request import DecodeRequest
from sphkv.attention.triton.coded import launch_coded
from sphkv.attention.triton.combine import combine_parts
from sphkv.attention.triton.dense import TailList, launch_dense
from sphkv.attention.triton.encode import TritonEncoder
from sphkv.attention.triton.rows import PartSlots, QueryRows
from sphkv.attention.triton.tables import EntryTable, EntryTables
from sphkv.store.layout import PageLayout
from sphkv.store.sequence import PageGroup, PointerTable

PRECISIONS = ("tf32", "tf32x3", "ieee")

# Programs per multiprocessor that a launch aims at.
_WAVES = 4


def is_interpreted() -> bool:
    """Whether Triton runs its kernels in the interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@dataclass(frozen=True, slots=True, eq=False)
class PageList:
    """Pages of one layout, head by head.

    Attributes:
        layout: Their layout.
        addresses: ``[pages]`` int64.
        starts: ``[heads + 1]`` int32 into ``addresses``.
        most_pages: Pages of the longest head.
        table: Entries of a coded tier; None for dense pages.
    """

    layout: PageLayout
    addresses: Tensor
    starts: Tensor
    most_pages: int
    table: EntryTable | None


class TritonBackend:
    """Kernels in Triton over pages as the store writes them.

    Attributes:
        name: ``"triton"``.
        order: What a store must be given to encode with fused kernels.
    """

    name = "triton"

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
        self.order = None
        self.page_codec = TritonEncoder()
        self._tables = EntryTables()
        self._lists: WeakKeyDictionary[PointerTable, tuple[int, list[PageList]]]
        self._lists = WeakKeyDictionary()

    def attend(self, request: DecodeRequest) -> PartialAttention:
        """Attention over all pages and the tail; see ``DecodeBackend.attend``."""
        return self.attend_groups(request, None)

    def attend_groups(
        self, request: DecodeRequest, groups: list[PageGroup] | None
    ) -> PartialAttention:
        """Attention over some groups of pages, all if None, and the tail.

        Groups given here must be all those of the table that this backend reads.
        """
        device = request.query.device
        if device.type != "cuda" and not is_interpreted():
            raise ValueError(f"Triton kernels read GPU tensors, got {device}")
        heads, queries, head_dim = request.query.shape
        if queries == 0:
            return PartialAttention(
                torch.empty(heads, 0, head_dim, device=device),
                torch.empty(heads, 0, device=device),
            )
        rows = QueryRows(
            request.query[None].contiguous(),
            request.positions[None].to(device).contiguous(),
            request.store.config.geometry.num_kv_heads,
            request.options,
            self._precision,
        )
        merged = self._attend_rows(request, rows, self._page_lists(request, groups))
        return PartialAttention(merged.output[0], merged.lse[0])

    def _attend_rows(
        self, request: DecodeRequest, rows: QueryRows, lists: list[PageList]
    ) -> PartialAttention:
        coded = [pages for pages in lists if pages.layout.tier.has_value_codes]
        plain = [pages for pages in lists if not pages.layout.tier.has_value_codes]
        # slots of rotated values first, as combine_parts wants them
        splits = [num_splits(rows, pages.most_pages) for pages in (*coded, *plain)]
        parts = PartSlots.empty(rows, sum(splits) + 1)
        first = 0
        for pages, num in zip((*coded, *plain), splits, strict=True):
            launch_pages(pages, rows, parts.part(first, num))
            first += num
        tail = request.store.tail(request.sequence, request.layer)
        tails = TailList.of([tail], rows.query.device)
        launch_dense(None, None, tails, rows, parts.part(first, 1))
        return combine_parts(parts, rows, sum(splits[: len(coded)]))

    def _page_lists(self, request: DecodeRequest, groups: list[PageGroup] | None) -> list[PageList]:
        pointers = request.store.table(request.sequence, request.layer)
        held = self._lists.get(pointers)
        if held is not None and held[0] == pointers.version:
            return held[1]
        if groups is None:
            groups = request.store.pages(request.sequence, request.layer)
        lists = [self.page_list(request, group) for group in groups]
        self._lists[pointers] = (pointers.version, lists)
        return lists

    def page_list(self, request: DecodeRequest, group: PageGroup) -> PageList:
        """Addresses of a group's pages, and the entries of its tier."""
        device, layout = request.query.device, group.layout
        addresses = request.store.allocator.addresses(group.flat_ids())
        num_pages = group.num_pages.cpu()
        starts = torch.zeros(len(num_pages) + 1, dtype=torch.int32)
        starts[1:] = num_pages.cumsum(0)
        table = None
        if layout.tier.is_coded:
            table = self._tables.get(request.codec(), request.layer, layout.tier, device)
        most = int(num_pages.max())
        return PageList(layout, addresses.to(device), starts.to(device), most, table)


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
