# SPDX-License-Identifier: Apache-2.0
"""Dense states, or token-transposed pages, to pages in fragment order, each in one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sphkv.attention.cuda.compiler import architecture, load_cubin
from sphkv.attention.cuda.driver import Kernel
from sphkv.attention.cuda.geometry import PAGE_TOKENS, TILE_KEYS, is_served
from sphkv.attention.cuda.search_tables import (
    PLANE_WORDS,
    SLOT_WORDS,
    EncodeTables,
    build_encode_tables,
    clip_fragments,
)
from sphkv.attention.triton.search import SearchTables, build_search_table
from sphkv.codec.calibration import Calibration
from sphkv.codec.clipping import CLIP_RANGE, NUM_CELLS
from sphkv.codec.states import SphericalCodec
from sphkv.codec.values import COARSE_STEP, NUM_REFINEMENTS, READ_GAIN
from sphkv.store.layout import PageLayout, header_words
from sphkv.store.paging import PageRows

_WARPS = 8
_POINTERS = (
    *("keys", "values", "positions", "counts", "heads", "flags", "pages"),
    *("kinds", "planes", "slots", "places", "grid", "weights"),
)


# Caches with the same codebooks share tables: they are made once in a process.
_TABLES: WeakKeyDictionary[Calibration, dict[tuple[int, int, str], EncodeTables]]
_TABLES = WeakKeyDictionary()
# The same of all layers in one, which those of single layers are parts of.
_JOINED: WeakKeyDictionary[Calibration, dict[tuple[int, str], EncodeTables]]
_JOINED = WeakKeyDictionary()


class _EncodeParams(ctypes.Structure):
    """Mirror of ``EncodeParams`` in ``kernels/encode_layout.cuh``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("header", ctypes.c_uint32 * 12),
        ("most_joint", ctypes.c_int),
        ("read_gain", ctypes.c_float),
    )


class _ReorderParams(ctypes.Structure):
    """Mirror of ``ReorderParams`` in ``kernels/reorder.cu``."""

    _fields_ = (("source", ctypes.c_void_p), ("to", ctypes.c_void_p), ("page_bytes", ctypes.c_int))


def _launch(
    kernel: Kernel, blocks: int, params: ctypes.Structure, *, overlaps: bool = False
) -> None:
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    kernel.launch(blocks, arguments, overlaps=overlaps)


class CudaEncoder:
    """Encodes pages of bfloat16 states with coded values."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[str, ...], Kernel] = {}
        self._encode: dict[PageLayout, tuple[Kernel, Kernel]] = {}
        self._search = SearchTables()
        self._clips: dict[int, Tensor] = {}

    @staticmethod
    def takes(layout: PageLayout, states: Sequence[Tensor]) -> bool:
        """Whether the kernel encodes such states to such pages."""
        is_bfloat = all(part.is_cuda and part.dtype == torch.bfloat16 for part in states)
        return is_bfloat and is_served(layout) and layout.tier.has_value_codes

    def _kernel(
        self,
        name: str,
        defines: tuple[str, ...],
        shared_bytes: int,
        device: torch.device,
        *,
        warps: int = _WARPS,
    ) -> Kernel:
        # pages of one shape differ in size by how they store positions
        key = (name, str(shared_bytes), *defines)
        if key not in self._kernels:
            image = load_cubin(name, defines, architecture(device))
            self._kernels[key] = Kernel(image, name, shared_bytes=shared_bytes, threads=32 * warps)
        return self._kernels[key]

    def _encode_kernels(self, layout: PageLayout, device: torch.device) -> tuple[Kernel, Kernel]:
        """The kernel of the keys and that of the values, looked up once per layout."""
        if layout not in self._encode:
            sizes = _memories(layout)
            keys, values = (
                self._kernel(name, defines, sizes[name], device, warps=_warps(name, layout))
                for name, defines in encode_builds(layout)
            )
            self._encode[layout] = (keys, values)
        return self._encode[layout]

    def _table(
        self, codec: SphericalCodec, layer: int, layout: PageLayout, device: torch.device
    ) -> EncodeTables:
        held = _TABLES.setdefault(codec.calibration, {})
        key = (layer, layout.num_nibbles, str(device))
        if key not in held:
            held[key] = build_encode_tables(self._search.get(codec, layer, layout.tier, device))
        return held[key]

    def _joined_table(
        self, codec: SphericalCodec, layout: PageLayout, device: torch.device
    ) -> EncodeTables:
        """Tables of all layers, one behind the other; each is held once."""
        joined = _JOINED.setdefault(codec.calibration, {})
        key = (layout.num_nibbles, str(device))
        if key not in joined:
            layers, ropes = range(codec.calibration.geometry.num_layers), codec.calibration.ropes
            held = _TABLES.setdefault(codec.calibration, {})
            if len(set(ropes)) == 1 and (0, *key) not in held:
                book = codec.joined_codebook(layout.tier, device)
                joined[key] = build_encode_tables(build_search_table(book, ropes[0], device))
            else:
                parts = [self._table(codec, layer, layout, device) for layer in layers]
                joined[key] = EncodeTables.join(parts)
            for layer, part in enumerate(joined[key].split(len(layers))):
                held[layer, *key] = part
        return joined[key]

    def prepare_layout(
        self, codec: SphericalCodec, layer: int, layout: PageLayout, device: torch.device
    ) -> None:
        """With the last layer, make all that encoding pages of a layout needs.

        Tables of all layers are made at once.

        Args:
            codec: The codec that will be given to ``encode``; all of its layers are fitted then.
            layer: The layer; they come in order.
            layout: A layout that the kernels serve.
            device: The GPU.
        """
        if layer == codec.calibration.geometry.num_layers - 1:
            self._joined_table(codec, layout, device)
            self._encode_kernels(layout, device)
            self._clip_weights(layout.tier.value_bits, device)

    def table_bytes(self, codec: SphericalCodec) -> int:
        """Bytes of the tables made of a codec's calibration; all caches with it share them."""
        held = _TABLES.get(codec.calibration, {}).values()
        return self._search.table_bytes(codec) + sum(each.num_bytes for each in held)

    def _clip_weights(self, bits: int, device: torch.device) -> Tensor:
        if bits not in self._clips:
            self._clips[bits] = clip_fragments(bits).to(device)
        return self._clips[bits]

    def encode(
        self,
        layout: PageLayout,
        layer: int | None,
        codec: SphericalCodec,
        states: tuple[Tensor, Tensor],
        rows: PageRows,
        head_ids: Tensor,
    ) -> Tensor:
        """Pages in fragment order; see ``PageCodec.encode``.

        Without a layer, heads count through those of all layers; see ``PageCodec.encode_layers``.
        """
        keys, values = (part.contiguous() for part in states)
        device, bits = keys.device, layout.tier.value_bits
        key_kernel, value_kernel = self._encode_kernels(layout, device)
        if layer is None:
            tables = self._joined_table(codec, layout, device)
        else:
            tables = self._table(codec, layer, layout, device)
        positions, counts, flags = (
            part.to(device).contiguous() for part in (rows.positions, rows.counts, rows.flags)
        )
        heads = head_ids.to(device).contiguous()
        pages = torch.empty(len(heads), layout.page_bytes, dtype=torch.uint8, device=device)
        inputs = (keys, values, positions, counts, heads, flags, pages)
        held = (tables.kinds, tables.planes, tables.slots, tables.places, tables.grid)
        parts = (*inputs, *held, self._clip_weights(bits, device))
        params = _EncodeParams(*(part.data_ptr() for part in parts))
        params.header[:] = header_words(layout)
        params.most_joint = tables.grid.shape[1]
        params.read_gain = READ_GAIN[bits]
        _launch(key_kernel, len(heads), params)
        _launch(value_kernel, len(heads), params, overlaps=True)
        return pages

    def to_fragments(self, layout: PageLayout, pages: Tensor) -> Tensor | None:
        """Pages ``[rows, page_bytes]`` in fragment order; None if the kernel cannot do it."""
        if not pages.is_cuda or not is_served(layout) or not layout.tier.has_value_codes:
            return None
        pages = pages.contiguous()
        name, defines = reorder_build(layout)
        kernel = self._kernel(name, defines, layout.page_bytes, pages.device)
        out = torch.empty_like(pages)
        params = _ReorderParams(pages.data_ptr(), out.data_ptr(), layout.page_bytes)
        if len(pages):
            _launch(kernel, len(pages), params)
        return out


def encode_builds(layout: PageLayout) -> list[tuple[str, tuple[str, ...]]]:
    """Entry point and definitions of what encodes such pages: keys, then values."""
    return [
        (
            name,
            (
                *_page_defines(layout),
                f"-DSPHKV_SHARED_BYTES={size}",
                f"-DSPHKV_WARPS={_warps(name, layout)}",
                f"-DSPHKV_POSITIONS={int(layout.position_mode)}",
                f"-DSPHKV_CELLS={NUM_CELLS}",
                f"-DSPHKV_REFINEMENTS={NUM_REFINEMENTS}",
                f"-DSPHKV_COARSE_STEP={COARSE_STEP[layout.tier.value_bits]}f",
            ),
        )
        for name, size in _memories(layout).items()
    ]


def reorder_build(layout: PageLayout) -> tuple[str, tuple[str, ...]]:
    """Entry point and definitions of the kernel that brings such pages into fragment order."""
    return "sphkv_reorder", _page_defines(layout)


def _page_defines(layout: PageLayout) -> tuple[str, ...]:
    return (
        f"-DSPHKV_HEAD_DIM={layout.head_dim}",
        f"-DSPHKV_SLOTS={layout.num_nibbles}",
        f"-DSPHKV_VALUE_BITS={layout.tier.value_bits}",
        f"-DSPHKV_PAGE_TOKENS={layout.page_tokens}",
    )


def _warps(name: str, layout: PageLayout) -> int:
    """Warps of a block: they share a page's planes, or its values tile by tile."""
    return _WARPS if name == "sphkv_encode_keys" else layout.page_tokens // TILE_KEYS


def _range_bytes(warps: int) -> int:
    return 2 * warps * 4


def _memories(layout: PageLayout) -> dict[str, int]:
    """Bytes of shared memory of the kernels that encode, keys first."""
    return {
        "sphkv_encode_keys": _key_memory(layout),
        "sphkv_encode_values": _value_memory(layout),
    }


def _key_memory(layout: PageLayout) -> int:
    """Size of ``KeyMemory``: slots or sums, planes, keys, places of codes, squares, ranges.

    It has room for the largest page, whatever the page's size.
    """
    slots, sums = 4 * SLOT_WORDS * layout.num_nibbles, 2 * 8 * 4 * PAGE_TOKENS
    planes, keys = 2 * PLANE_WORDS * layout.head_dim, 2 * layout.head_dim * PAGE_TOKENS
    places, squares = 2 * layout.num_nibbles, 4 * PAGE_TOKENS
    return max(slots, sums) + planes + keys + places + squares + _range_bytes(_WARPS) + 16


def _value_memory(layout: PageLayout) -> int:
    """Size of ``ValueMemory``: histograms of four states a word and cell, ranges."""
    is_clipped = layout.tier.value_bits in CLIP_RANGE
    warps = _warps("sphkv_encode_values", layout)
    return is_clipped * warps * 4 * 4 * (NUM_CELLS + 16) + _range_bytes(warps)
