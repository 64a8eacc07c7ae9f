# SPDX-License-Identifier: Apache-2.0
"""Decode attention on Hopper GPUs: the fast kernel for coded pages, Triton for everything dense."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sphkv.attention.cuda.compiler import ARCHITECTURES
from sphkv.attention.cuda.driver import CudaUnavailableError
from sphkv.attention.cuda.geometry import is_served
from sphkv.attention.cuda.kernel_cache import DecodeKernels
from sphkv.attention.cuda.page_lists import PageLists
from sphkv.attention.cuda.pages import (
    FragmentCodec,
    FragmentOrder,
    ServedPages,
    place_pages,
)
from sphkv.attention.partial import PartialAttention
from sphkv.attention.reference import ReferenceBackend
from sphkv.attention.request import DecodeRequest
from sphkv.attention.triton.backend import TritonBackend
from sphkv.store.sequence import PageGroup, PointerTable

# Queries of a sequence that one launch takes, each as a sequence of its own.
_MAX_QUERIES = 16


class CudaBackend:
    """The Hopper kernel over pages in fragment order, and Triton beside it.

    Attributes:
        name: ``"cuda"``.
        order: What a store must be given to keep its pages in fragment order.
    """

    name = "cuda"

    def __init__(self, device: torch.device | None = None) -> None:
        """Kernels are loaded when they are first needed.

        Args:
            device: Where they run; the current GPU by default, which must be there.

        Raises:
            CudaUnavailableError: There is no GPU that the kernels are built for.
            ImportError: Triton is not installed.
        """
        self.order = FragmentOrder()
        self.page_codec = FragmentCodec(self.order)
        self.kernels = DecodeKernels(device or _current_gpu(), max_batch=_MAX_QUERIES)
        self._rest = TritonBackend()
        self._reference = ReferenceBackend()
        self._served: WeakKeyDictionary[
            PointerTable, tuple[int, list[ServedPages], list[PageGroup]]
        ] = WeakKeyDictionary()

    def attend(self, request: DecodeRequest) -> PartialAttention:
        """Attention over all pages and the tail; see ``DecodeBackend.attend``."""
        store = request.store
        if store.allocator.order is None:
            return self._rest.attend(request)
        tail = store.tail(request.sequence, request.layer)
        # the kernel has no causal mask: every page must lie before every query
        if request.query.shape[1] and int(request.positions.min()) < tail.first_position:
            return self._reference.attend(request)
        served, others = self._groups(request)
        merged = self._rest.attend_groups(request, others)
        if not served or not request.query.shape[1]:
            return merged
        self.kernels.reserve(tail.first_position)
        blocks = zip(
            request.query.transpose(0, 1).contiguous().split(_MAX_QUERIES),
            merged.output.transpose(0, 1).contiguous().split(_MAX_QUERIES),
            merged.lse.transpose(0, 1).contiguous().split(_MAX_QUERIES),
            request.positions.to(torch.int32).split(_MAX_QUERIES),
            strict=True,
        )
        parts = [
            self._attend_served(request, served, query, PartialAttention(output, lse), positions)
            for query, output, lse, positions in blocks
        ]
        return PartialAttention(
            torch.cat([part.output for part in parts]).transpose(0, 1),
            torch.cat([part.lse for part in parts]).transpose(0, 1),
        )

    def _attend_served(
        self,
        request: DecodeRequest,
        served: list[ServedPages],
        query: Tensor,
        merged: PartialAttention,
        positions: Tensor,
    ) -> PartialAttention:
        """Merge the served pages into ``merged``, queries ``[queries, heads, head_dim]``."""
        if query.dtype not in (torch.float32, torch.bfloat16):
            query = query.float()
        for pages in served:
            kernel = self.kernels.get(request.codec(), request.layer, pages.layout.tier)
            kernel.attend(
                query,
                pages.pool,
                _repeat(pages, len(query)).lists,
                request.options,
                result=merged,
                merge_with=merged,
                query_positions=positions,
            )
        return merged

    def _groups(self, request: DecodeRequest) -> tuple[list[ServedPages], list[PageGroup]]:
        table = request.store.table(request.sequence, request.layer)
        held = self._served.get(table)
        if held is not None and held[0] == table.version:
            return held[1], held[2]
        groups = request.store.pages(request.sequence, request.layer)
        device, allocator = request.query.device, request.store.allocator
        served = [
            place_pages(allocator, [group], device) for group in groups if is_served(group.layout)
        ]
        others = [group for group in groups if not is_served(group.layout)]
        self._served[table] = (table.version, served, others)
        return served, others


def _current_gpu() -> torch.device:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() not in ARCHITECTURES:
        raise CudaUnavailableError(
            "the CUDA kernels need an NVIDIA GPU of Hopper or Blackwell, compute capability "
            f"{sorted(ARCHITECTURES)}"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _repeat(pages: ServedPages, times: int) -> ServedPages:
    """The same pages for several queries of one sequence."""
    if times == 1:
        return pages
    lists = pages.lists
    starts = lists.row_start.to(torch.int64)
    heads = [
        lists.entries[begin:end].repeat(times)
        for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ]
    counts = starts.diff().repeat_interleave(times)
    row_start = torch.zeros(len(counts) + 1, dtype=torch.int32, device=starts.device)
    row_start[1:] = counts.cumsum(0)
    repeated = PageLists(torch.cat(heads), row_start, times)
    return replace(pages, lists=repeated)
