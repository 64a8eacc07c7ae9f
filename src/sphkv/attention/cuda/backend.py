# SPDX-License-Identifier: Apache-2.0
"""Decode attention on Hopper GPUs: the fast kernel for coded pages, Triton for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sphkv.attention.cuda import block_shares, dense, merge
from sphkv.attention.cuda.build import prepare_behind, tier_builds
from sphkv.attention.cuda.compiler import ARCHITECTURES, architecture
from sphkv.attention.cuda.decode import MAX_WINDOW
from sphkv.attention.cuda.geometry import HEAD_DIMS, is_served
from sphkv.attention.cuda.kernel_cache import DecodeKernels, DecodeTables
from sphkv.attention.cuda.pages import FragmentCodec, FragmentOrder, ServedPages, place_pages
from sphkv.attention.cuda.steps import CapturedSteps, why_not_captured
from sphkv.attention.partial import PartialAttention
from sphkv.attention.plans import ListedPages, PlanCache, join_layouts, list_pages
from sphkv.attention.request import (
    AttentionOptions,
    BatchRequest,
    DecodeRequest,
    attend_by_codec,
    spherical_codec,
)
from sphkv.attention.triton.backend import PageList, TritonBackend
from sphkv.codec.states import SphericalCodec
from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import TierTable
from sphkv.errors import CudaUnavailableError
from sphkv.store.layout import PageLayout
from sphkv.store.order import PageCodec, PageOrder
from sphkv.store.paging import PositionMode
from sphkv.store.store import PageStore

# Queries of one sequence that a launch takes, each as a row of its own.
_MAX_QUERIES = 16


class CudaBackend:
    """The Hopper kernel over pages in fragment order, and Triton beside it.

    Attributes:
        name: ``"cuda"``.
        page_order: What a store must be given to keep its pages in fragment order.
        page_codec: Kernels that encode into that order.
    """

    name = "cuda"
    page_order: PageOrder | None
    page_codec: PageCodec | None

    def __init__(self, device: torch.device | None = None) -> None:
        """Kernels are loaded when they are first needed.

        Args:
            device: Where they run; the current GPU by default, which must be there.

        Raises:
            CudaUnavailableError: There is no GPU that the kernels are built for.
            ImportError: Triton is not installed.
        """
        self.page_order = self._order = FragmentOrder()
        self.page_codec = self._codec = FragmentCodec(self._order)
        self._device = device or _current_gpu()
        # captured steps have workspaces of their own, and look up the same
        self._tables = DecodeTables(self._device)
        self._kernels = DecodeKernels(self._device, self._tables)
        self._rest = TritonBackend()
        self._listed = PlanCache(_list_sequence)
        self._served = PlanCache(self._place_served)
        self._others = PlanCache(self._list_others)

    def prepare(self, tables: Sequence[TierTable], geometry: KVGeometry) -> None:
        """Compile what encodes these tiers in a thread of its own, while the prompt is read."""
        builds = [build for tiers in tables for build in tier_builds(tiers, geometry.head_dim)]
        if geometry.head_dim in HEAD_DIMS and geometry.group_size <= dense.MAX_GROUP:
            shape = dense.definitions(geometry.head_dim, geometry.group_size)
            builds.append((dense.ENTRY_POINT, shape))
            builds.append((merge.ENTRY_POINT, merge.definitions(geometry.head_dim)))
            builds.append((block_shares.ENTRY_POINT, ()))
        if self._device.type == "cuda":
            prepare_behind(builds, architecture(self._device))

    def _list(
        self, store: PageStore, sequences: tuple[int, ...], layer: int
    ) -> dict[PageLayout, list[ListedPages | None]]:
        return join_layouts([self._listed.get(store, (row,), layer) for row in sequences])

    def _place_served(
        self, store: PageStore, sequences: tuple[int, ...], layer: int
    ) -> list[ServedPages]:
        heads = store.config.geometry.num_kv_heads
        return [
            place_pages(store.allocator, layout, pages, heads, device=self._device)
            for layout, pages in self._list(store, sequences, layer).items()
            if is_served(layout)
        ]

    def _list_others(
        self, store: PageStore, sequences: tuple[int, ...], layer: int
    ) -> list[PageList]:
        return [
            self._rest.page_list(store, sequences[0], layer, layout, pages)
            for layout, pages in self._list(store, sequences, layer).items()
            if not is_served(layout)
        ]

    def attend(self, request: DecodeRequest) -> PartialAttention:
        """Attention over all pages and the tail; see ``DecodeBackend.attend``."""
        store, sequence, layer = request.store, request.sequence, request.layer
        if store.allocator.order is None:
            return self._rest.attend(request)
        options, positions = request.options, request.positions
        others = self._others.get(store, (sequence,), layer)
        states = (request.query[None], positions[None])
        merged = self._rest.attend_lists(store, (sequence,), layer, *states, options, others)
        if not len(positions) or not self._served.get(store, (sequence,), layer):
            return PartialAttention(merged.output[0], merged.lse[0])
        output = merged.output[0].transpose(0, 1).contiguous()
        lse = merged.lse[0].transpose(0, 1).contiguous()
        query = request.query.transpose(0, 1)
        for at in range(0, len(positions), _MAX_QUERIES):
            part = slice(at, at + _MAX_QUERIES)
            rows = (sequence,) * len(positions[part])
            rows_request = BatchRequest(store, rows, layer, query[part], positions[part], options)
            self._add_served(rows_request, PartialAttention(output[part], lse[part]))
        return PartialAttention(output.transpose(0, 1), lse.transpose(0, 1))

    def attend_rows(self, request: BatchRequest) -> PartialAttention:
        """One set of launches for all rows of a codec; see ``DecodeBackend.attend_rows``."""
        if request.store.allocator.order is None:
            return self._rest.attend_rows(request)
        return attend_by_codec(self._attend_codec, request)

    def _attend_codec(self, request: BatchRequest) -> PartialAttention:
        place = (request.store, request.sequences, request.layer)
        states = (request.query.unsqueeze(2), request.positions[:, None])
        others = self._others.get(*place)
        merged = self._rest.attend_lists(*place, *states, request.options, others)
        result = PartialAttention(merged.output[:, :, 0], merged.lse[:, :, 0])
        self._add_served(request, result)
        return result

    def _add_served(self, request: BatchRequest, result: PartialAttention) -> None:
        """Merge attention over the served pages into a result of the same rows, in place."""
        served = self._served.get(request.store, request.sequences, request.layer)
        if not served:
            return
        options, last_page = _hide_later_keys(request)
        self._kernels.reserve(last_page, len(request.sequences))
        codec = spherical_codec(request.store, request.sequences[0])
        query = request.query.contiguous()
        if query.dtype not in (torch.float32, torch.bfloat16):
            query = query.float()
        positions = request.positions.to(torch.int32).to(query.device, non_blocking=True)
        for pages in served:
            tier, mode = pages.layout.tier, pages.layout.position_mode
            self._kernels.get(codec, request.layer, tier, mode).attend(
                query,
                pages.pool,
                pages.lists,
                options,
                result=result,
                merge_with=result,
                query_positions=positions,
            )

    def capture(
        self,
        store: PageStore,
        sequences: Sequence[int],
        *,
        max_tokens: int,
        windows: Sequence[int | None] = (),
    ) -> CapturedSteps | None:
        """Decode steps that a CUDA graph can hold; see ``DecodeBackend.capture``."""
        if self.why_not(store, sequences, windows=windows):
            return None
        return CapturedSteps(store, sequences, max_tokens=max_tokens, tables=self._tables)

    def why_not(
        self, store: PageStore, sequences: Sequence[int], *, windows: Sequence[int | None] = ()
    ) -> str:
        """Why ``capture`` gives None; empty where it does not."""
        return why_not_captured(store, sequences, windows)

    def table_bytes(self, codec: SphericalCodec) -> int:
        """Bytes of the look-up tables of a codec: of decoding, encoding and captured steps."""
        encoding = self._order.table_bytes(codec) + self._codec.table_bytes(codec)
        return self._rest.table_bytes(codec) + encoding + self._tables.num_bytes(codec)


def _list_sequence(
    store: PageStore, sequences: tuple[int, ...], layer: int
) -> dict[PageLayout, ListedPages]:
    return list_pages(store, sequences[0], layer, has_positions=_tells_no_positions)


def _tells_no_positions(layout: PageLayout) -> bool:
    """Whether the kernel must be told where a page begins before the page arrives."""
    return is_served(layout) and layout.position_mode is not PositionMode.RUNS


def _hide_later_keys(request: BatchRequest) -> tuple[AttentionOptions, int]:
    """Options under which no query sees a page behind it, and where pages end at the latest.

    Without a window the kernel takes every key of a page for visible. That is right while all
    queries follow all pages, as they do when they ask for tokens of the tail.
    """
    tails = [request.store.open_tail(row, request.layer) for row in request.sequences]
    ends = [
        request.store.num_tokens(row, request.layer) if tail is None else tail.first_position
        for row, tail in zip(request.sequences, tails, strict=True)
    ]
    options = request.options
    if options.window is None and bool((request.positions < torch.tensor(ends)).any()):
        options = replace(options, window=MAX_WINDOW)
    return options, max(ends)


def _current_gpu() -> torch.device:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() not in ARCHITECTURES:
        raise CudaUnavailableError(
            "the CUDA kernels need an NVIDIA GPU of Hopper or Blackwell, compute capability "
            f"{sorted(ARCHITECTURES)}"
        )
    return torch.device("cuda", torch.cuda.current_device())
