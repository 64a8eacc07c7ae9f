# SPDX-License-Identifier: Apache-2.0
"""What the store asks of a GPU: pages encoded without codes in memory, and bytes copied at once.

See ``PageCodec`` and ``PageCopier`` in ``store/order.py``.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from sphkv.attention.triton.encode_keys import encode_keys_into
from sphkv.attention.triton.encode_values import encode_values_into
from sphkv.attention.triton.recode import RunDecoder
from sphkv.attention.triton.search import SearchTables
from sphkv.codec.states import SphericalCodec
from sphkv.core.contract import StateCodec
from sphkv.core.devices import upload
from sphkv.store.layout import PageLayout, blank_pages
from sphkv.store.order import WORD_BYTES, PageRuns
from sphkv.store.paging import PageRows

# The rotation of wider heads does not fit beside a tile of values.
_MAX_HEAD_DIM = 128
_BLOCK_WORDS = 1024


# one build for all sizes: what differs is as fast
@triton.jit(
    do_not_specialize=["words"], do_not_specialize_on_alignment=["source_ptr", "target_ptr"]
)
def _copy_kernel(source_ptr, target_ptr, words, BLOCK: tl.constexpr):
    """One program per copy and block: addresses ``[copies]`` i64 of rows of ``words`` words."""
    row = tl.program_id(0)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(source_ptr + row).to(tl.pointer_type(tl.int32))
    target = tl.load(target_ptr + row).to(tl.pointer_type(tl.int32))
    tl.store(target + word, tl.load(source + word, mask=word < words), mask=word < words)


@triton.jit(
    do_not_specialize=["words", "stride"],
    do_not_specialize_on_alignment=["source_ptr", "target_ptr"],
)
def _gather_kernel(source_ptr, target_ptr, words, stride, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """As ``_copy_kernel``, into rows that follow each other; address 0 stands for zeros.

    A row's words lie in pieces of ``PIECE``, ``stride`` words apart.
    """
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    address = tl.load(source_ptr + row)
    source = address.to(tl.pointer_type(tl.int32))
    place = (word // PIECE).to(tl.int64) * stride + word % PIECE
    found = tl.load(source + place, mask=word < tl.where(address == 0, 0, words), other=0)
    tl.store(target_ptr + row * words + word, found, mask=word < words)


class TritonCopier:
    """A ``PageCopier`` of the store.

    Args:
        device: Where the bytes are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, sources: NDArray[np.int64], targets: NDArray[np.int64], num_bytes: int) -> None:
        """Queue copies on the current stream; see ``PageCopier.copy``."""
        if num_bytes % WORD_BYTES:
            raise ValueError(f"num_bytes must be a multiple of {WORD_BYTES}, got {num_bytes}")
        if not len(sources) or not num_bytes:
            return
        places = upload(np.concatenate([sources, targets]), self._device).view(2, -1)
        words = num_bytes // WORD_BYTES
        block = min(_BLOCK_WORDS, triton.next_power_of_2(words))
        grid = (len(sources), triton.cdiv(words, block))
        _copy_kernel[grid](places[0], places[1], words, BLOCK=block, num_warps=4)

    def gather(self, sources: Tensor, target: Tensor, *, piece: int, stride: int) -> None:
        """Queue copies on the current stream; see ``PageCopier.gather``."""
        if not len(sources) or not target.numel():
            return
        for name, size in (("piece", piece), ("stride", stride)):
            if size % WORD_BYTES:
                raise ValueError(f"{name} must be a multiple of {WORD_BYTES}, got {size}")
        if target.nbytes % (piece * len(sources)):
            raise ValueError(
                f"{len(sources)} copies of pieces of {piece} bytes do not make up {target.nbytes}"
            )
        words = target.nbytes // len(sources) // WORD_BYTES
        block = min(_BLOCK_WORDS, triton.next_power_of_2(words))
        grid = (len(sources), triton.cdiv(words, block))
        into = target.view(-1).view(torch.int32)
        _gather_kernel[grid](
            sources,
            into,
            words,
            stride // WORD_BYTES,
            PIECE=piece // WORD_BYTES,
            BLOCK=block,
            num_warps=4,
        )


class TritonEncoder:
    """Encodes pages with fused kernels where they apply."""

    def __init__(self) -> None:
        self._tables = SearchTables()
        self._decoder = RunDecoder(is_plain=True)

    def copier(self, device: torch.device) -> TritonCopier:
        """Copies pages; see ``PageCodec.copier``."""
        return TritonCopier(device)

    def prepare(
        self, layout: PageLayout, layer: int, codec: StateCodec | None, device: torch.device
    ) -> None:
        """Make the search table of a layer; see ``PageCodec.prepare``."""
        if isinstance(codec, SphericalCodec) and layout.tier.is_coded:
            self._tables.get(codec, layer, layout.tier, device)

    def encode(
        self,
        layout: PageLayout,
        layer: int,
        codec: StateCodec | None,
        states: tuple[Tensor, Tensor],
        rows: PageRows,
        head_ids: Tensor,
    ) -> Tensor | None:
        """Pages as ``write_pages`` orders them; see ``PageCodec.encode``."""
        tokens = layout.page_tokens
        if not isinstance(codec, SphericalCodec) or not layout.tier.is_coded:
            return None
        if tokens & (tokens - 1) or layout.head_dim > _MAX_HEAD_DIM or not len(head_ids):
            return None
        pages = blank_pages(layout, rows)
        keys, values = states
        table = self._tables.get(codec, layer, layout.tier, pages.device)
        encode_keys_into(pages, layout, keys, rows.positions, rows.counts, head_ids, table)
        if layout.tier.has_value_codes:
            encode_values_into(pages, layout, values, rows.counts)
        else:
            dense = values.to(torch.bfloat16).contiguous().view(torch.uint8).flatten(1)
            pages[:, layout.value_offset : layout.position_offset] = dense
        return pages

    def joins_layers(
        self, layout: PageLayout, codec: StateCodec | None, device: torch.device
    ) -> bool:
        """Never: a call encodes a layer; see ``PageCodec.joins_layers``."""
        return False

    def encode_layers(
        self,
        layout: PageLayout,
        codec: StateCodec | None,
        states: tuple[Tensor, Tensor],
        rows: PageRows,
        heads: Tensor,
    ) -> Tensor:
        """Nobody may ask; see ``PageCodec.encode_layers``."""
        raise ValueError(f"pages of {layout.tier.name!r} are encoded layer by layer")

    def decodes(self, layout: PageLayout, codec: StateCodec | None) -> bool:
        """Whether runs of such pages are decoded; see ``PageCodec.decodes``."""
        return isinstance(codec, SphericalCodec) and self._decoder.takes(layout)

    def decode_runs(
        self,
        layout: PageLayout,
        codec: StateCodec | None,
        pages: PageRuns,
        states: tuple[Tensor, Tensor],
    ) -> None:
        """Decode runs of token-transposed pages; see ``PageCodec.decode_runs``."""
        assert isinstance(codec, SphericalCodec)
        self._decoder.decode(layout, codec, pages, states)

    def table_bytes(self, codec: SphericalCodec) -> int:
        """Bytes of the tables that decode runs with a codec."""
        return self._decoder.table_bytes(codec)
