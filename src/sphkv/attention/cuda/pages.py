# SPDX-License-Identifier: Apache-2.0
"""Pages of a store in fragment order: written so when they seal, read back for everything else.

The bytes of a page and its place in the ledger stay the same; only the order inside its streams
differs. So a cache on a Hopper GPU holds every page once, in the order its kernel reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sphkv.attention.cuda.decode import PageLists, PagePool
from sphkv.attention.cuda.fragments import (
    to_fragment_order,
    unpack_gains,
    unpack_keys,
    unpack_values,
)
from sphkv.attention.cuda.geometry import HEAD_DIMS, PAGE_TOKENS
from sphkv.codec.packing import pack_nibbles, pack_value_codes
from sphkv.codec.states import SphericalCodec
from sphkv.core.contract import StateCodec
from sphkv.store.allocator import PageAllocator
from sphkv.store.layout import PageLayout, PageView
from sphkv.store.paging import PageRows
from sphkv.store.sequence import PageGroup

if TYPE_CHECKING:
    from sphkv.attention.cuda.encode import CudaEncoder
    from sphkv.attention.triton.encode import PageEncoder

HOPPER = (9, 0)
_SLOT_MULTIPLE = 16
_MAX_SLOTS = 128
# Pages reordered at once: bounds the unpacked copies.
_CHUNK_PAGES = 4096


def is_served(layout: PageLayout) -> bool:
    """Whether the kernel reads pages of this layout, so that they are kept in fragment order."""
    return (
        layout.tier.is_coded
        and layout.page_tokens == PAGE_TOKENS
        and layout.head_dim in HEAD_DIMS
        and layout.num_nibbles % _SLOT_MULTIPLE == 0
        and layout.num_nibbles <= _MAX_SLOTS
    )


class FragmentOrder:
    """A ``PageOrder`` of the store: fragment order where the kernel serves a layout."""

    def __init__(self) -> None:
        self._encoder: PageEncoder | None = None
        self._cuda: CudaEncoder | None = None

    def _kernels(self) -> CudaEncoder:
        if self._cuda is None:
            # Triton, whose tables it shares, is needed on GPUs only
            from sphkv.attention.cuda.encode import CudaEncoder

            self._cuda = CudaEncoder()
        return self._cuda

    def encode(
        self,
        layout: PageLayout,
        layer: int,
        codec: StateCodec | None,
        states: tuple[Tensor, Tensor],
        rows: PageRows,
        head_ids: Tensor,
    ) -> Tensor | None:
        """Fused encoding of states on a GPU; the codec encodes others."""
        if not states[0].is_cuda:
            return None
        is_hopper = torch.cuda.get_device_capability(states[0].device) == HOPPER
        if (
            is_hopper
            and isinstance(codec, SphericalCodec)
            and len(head_ids)
            and self._kernels().takes(layout, states)
        ):
            return self._kernels().encode(layout, layer, codec, states, rows, head_ids)
        if self._encoder is None:
            # Triton is needed on GPUs only
            from sphkv.attention.triton.encode import PageEncoder

            self._encoder = PageEncoder()
        return self._encoder.encode(layout, layer, codec, states, rows, head_ids)

    def to_slab(self, layout: PageLayout, pages: Tensor) -> Tensor:
        """Bytes to keep for token-transposed pages ``[rows, page_bytes]``."""
        if not is_served(layout):
            return pages
        if pages.is_cuda:
            found = self._kernels().to_fragments(layout, pages)
            if found is not None:
                return found
        parts = [to_fragment_order(PageView(layout, part)) for part in pages.split(_CHUNK_PAGES)]
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def from_slab(self, layout: PageLayout, pages: Tensor) -> Tensor:
        """Undo ``to_slab``."""
        if not is_served(layout) or not len(pages):
            return pages
        return torch.cat([_from_fragment_order(layout, part) for part in pages.split(_CHUNK_PAGES)])


def _from_fragment_order(layout: PageLayout, pages: Tensor) -> Tensor:
    out, bits = pages.clone(), layout.tier.value_bits
    codes = unpack_keys(pages[:, layout.key_offset : layout.radius_offset])
    out[:, layout.key_offset : layout.radius_offset] = pack_nibbles(codes).flatten(1)
    gains = unpack_gains(pages[:, layout.radius_offset : layout.value_offset])
    out[:, layout.radius_offset : layout.value_offset] = gains.flatten(1)
    stream = pages[:, layout.value_offset : layout.position_offset]
    values = unpack_values(stream, bits=bits, head_dim=layout.head_dim)
    if bits == 16:
        packed = values.contiguous().view(torch.uint8).flatten(1)
    else:
        packed = pack_value_codes(values, bits=bits)
    out[:, layout.value_offset : layout.position_offset] = packed
    return out


@dataclass(frozen=True, slots=True, eq=False)
class ServedPages:
    """Pages of one layout as the kernel finds them.

    Attributes:
        layout: Their layout.
        pool: The lowest slab of the layout; ids count whole pages from its start.
        lists: Pages of each (KV head, sequence).
    """

    layout: PageLayout
    pool: PagePool
    lists: PageLists


def lowest_slab(allocator: PageAllocator, layout: PageLayout) -> Tensor:
    """Pages of the slab with the lowest address; those of all others are whole pages behind."""
    slabs = [slab.data for slab in allocator.slabs() if slab.layout == layout]
    return min(slabs, key=lambda data: data.data_ptr())


def place_pages(
    allocator: PageAllocator, groups: list[PageGroup], device: torch.device
) -> ServedPages:
    """Lists of pages of several sequences.

    Args:
        allocator: Owner of the pages.
        groups: The group of each sequence, all of one layout.
        device: Where lists go.
    """
    layout = groups[0].layout
    slab = lowest_slab(allocator, layout)
    heads = groups[0].num_pages.shape[0]
    ids, counts = [], torch.zeros(heads, len(groups), dtype=torch.int64)
    for sequence, group in enumerate(groups):
        distance = allocator.addresses(group.page_ids.cpu()) - slab.data_ptr()
        ids.append(torch.div(distance, layout.page_bytes, rounding_mode="floor"))
        counts[:, sequence] = group.num_pages.cpu()
    rows = [
        ids[sequence][head, : counts[head, sequence]]
        for head in range(heads)
        for sequence in range(len(groups))
    ]
    starts = torch.zeros(heads * len(groups) + 1, dtype=torch.int32)
    starts[1:] = counts.flatten().cumsum(0)
    lists = PageLists(torch.cat(rows).to(torch.int32).to(device), starts.to(device), len(groups))
    return ServedPages(layout, PagePool(slab, layout.position_mode), lists)
