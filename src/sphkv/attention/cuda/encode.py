# SPDX-License-Identifier: Apache-2.0
"""Dense states to page bytes, and pages to fragment order, each in one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sphkv.attention.cuda.compiler import architecture, load_cubin
from sphkv.attention.cuda.driver import Kernel
from sphkv.attention.cuda.geometry import HEAD_DIMS, PAGE_TOKENS
from sphkv.attention.cuda.search_grid import SearchGrid, build_search_grid
from sphkv.attention.triton.search import SearchTable, SearchTables
from sphkv.codec.states import SphericalCodec
from sphkv.codec.values import CLIP_GRID, NUM_REFINEMENTS, READ_GAIN
from sphkv.store.layout import PAGE_VERSION, PageLayout
from sphkv.store.paging import PageRows

_THREADS = 256
_POINTERS = (
    *("keys", "values", "positions", "counts", "heads", "flags", "pages"),
    *("kinds", "planes", "roots", "seen", "points", "constants", "turns", "grid", "boxes"),
)


class _EncodeParams(ctypes.Structure):
    """Mirror of ``EncodeParams`` in ``kernels/encode.cu``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("header", ctypes.c_uint32 * 16),
        ("most_joint", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("first_ratio", "last_ratio", "read_gain")),
    )


class _ReorderParams(ctypes.Structure):
    """Mirror of ``ReorderParams`` in ``kernels/reorder.cu``."""

    _fields_ = (("source", ctypes.c_void_p), ("to", ctypes.c_void_p), ("page_bytes", ctypes.c_int))


def _launch(kernel: Kernel, blocks: int, params: ctypes.Structure) -> None:
    kernel.launch(blocks, (ctypes.c_void_p * 1)(ctypes.addressof(params)))


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    search: SearchTable
    grid: SearchGrid


class CudaEncoder:
    """Encodes pages of 128 bfloat16 states with coded values."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[str, ...], Kernel] = {}
        self._search = SearchTables()
        self._tables: WeakKeyDictionary[SphericalCodec, dict[tuple[int, int], _Tables]]
        self._tables = WeakKeyDictionary()

    @staticmethod
    def takes(layout: PageLayout, states: Sequence[Tensor]) -> bool:
        """Whether the kernel encodes such states to such pages."""
        is_bfloat = all(part.is_cuda and part.dtype == torch.bfloat16 for part in states)
        return is_bfloat and _is_plain(layout)

    def _kernel(
        self, name: str, layout: PageLayout, shared_bytes: int, *more: str, device: torch.device
    ) -> Kernel:
        defines = (
            f"-DSPHKV_HEAD_DIM={layout.head_dim}",
            f"-DSPHKV_SLOTS={layout.num_nibbles}",
            f"-DSPHKV_VALUE_BITS={layout.tier.value_bits}",
            *more,
        )
        # pages of one shape differ in size by how they store positions
        key = (name, str(shared_bytes), *defines)
        if key not in self._kernels:
            image = load_cubin(name, defines, architecture(device))
            self._kernels[key] = Kernel(image, name, shared_bytes=shared_bytes, threads=_THREADS)
        return self._kernels[key]

    def _table(self, codec: SphericalCodec, layer: int, layout: PageLayout) -> _Tables:
        held = self._tables.setdefault(codec, {})
        key = (layer, layout.num_nibbles)
        if key not in held:
            device = torch.device("cuda", torch.cuda.current_device())
            search = self._search.get(codec, layer, layout.tier, device)
            held[key] = _Tables(search, build_search_grid(search))
        return held[key]

    def encode(
        self,
        layout: PageLayout,
        layer: int,
        codec: SphericalCodec,
        states: tuple[Tensor, Tensor],
        rows: PageRows,
        head_ids: Tensor,
    ) -> Tensor:
        """Pages as ``write_pages`` orders them; see ``PageOrder.encode``."""
        keys, values = (part.contiguous() for part in states)
        device, bits = keys.device, layout.tier.value_bits
        first, last, ratios = CLIP_GRID[bits]
        # transposed keys, points, codes, partial sums and extremes: ``Memory`` of the kernel
        shared = 256 * layout.head_dim + 384 * layout.num_nibbles + 3072 + 512 + 32
        kernel = self._kernel(
            "sphkv_encode",
            layout,
            shared,
            f"-DSPHKV_POSITIONS={int(layout.position_mode)}",
            f"-DSPHKV_RATIOS={ratios}",
            f"-DSPHKV_REFINEMENTS={NUM_REFINEMENTS}",
            device=device,
        )
        tables = self._table(codec, layer, layout)
        positions, counts, flags = (
            part.to(device).contiguous() for part in (rows.positions, rows.counts, rows.flags)
        )
        heads = head_ids.to(device).contiguous()
        pages = torch.empty(len(heads), layout.page_bytes, dtype=torch.uint8, device=device)
        search, grid = tables.search, tables.grid
        inputs = (keys, values, positions, counts, heads, flags, pages)
        held = (search.counts, search.planes, search.roots, search.seen, search.points)
        more = (search.constants, search.turns, grid.candidates, grid.boxes)
        params = _EncodeParams(*(part.data_ptr() for part in (*inputs, *held, *more)))
        params.header[0] = PAGE_VERSION | layout.tier_id << 8 | int(layout.position_mode) << 16
        params.header[1] = layout.page_tokens << 16
        params.header[7:12] = layout.offsets()
        params.most_joint = grid.boxes.shape[1]
        params.first_ratio, params.last_ratio, params.read_gain = first, last, READ_GAIN[bits]
        _launch(kernel, len(heads), params)
        return pages

    def to_fragments(self, layout: PageLayout, pages: Tensor) -> Tensor | None:
        """Pages ``[rows, page_bytes]`` in fragment order; None if the kernel cannot do it."""
        if not pages.is_cuda or not _is_plain(layout) or layout.num_nibbles % 16:
            return None
        pages = pages.contiguous()
        kernel = self._kernel("sphkv_reorder", layout, layout.page_bytes, device=pages.device)
        out = torch.empty_like(pages)
        params = _ReorderParams(pages.data_ptr(), out.data_ptr(), layout.page_bytes)
        if len(pages):
            _launch(kernel, len(pages), params)
        return out


def _is_plain(layout: PageLayout) -> bool:
    return (
        layout.tier.has_value_codes
        and layout.page_tokens == PAGE_TOKENS
        and layout.head_dim in HEAD_DIMS
    )
