# SPDX-License-Identifier: Apache-2.0
"""Pages of a store in fragment order: written so when they seal, read back for everything else.

The bytes of a page and its place in the ledger stay the same; only the order inside its streams
differs. So a cache on a Hopper GPU holds every page once, in the order its kernel reads.

The decode kernel reads pools of coded pages through lists, which may grow in place.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.attention.cuda.fragments import (
    to_fragment_order,
    unpack_gains,
    unpack_keys,
    unpack_values,
)
from sphkv.attention.cuda.geometry import PAGE_SIZES, is_served
from sphkv.attention.plans import ListedPages, count_pages, list_starts
from sphkv.codec.packing import pack_nibbles, pack_value_codes
from sphkv.codec.states import SphericalCodec
from sphkv.core.contract import StateCodec
from sphkv.core.devices import upload
from sphkv.store.allocator import PageAllocator
from sphkv.store.layout import PageLayout, PageView, first_positions
from sphkv.store.order import PageCopier, PageRuns
from sphkv.store.paging import PageRows, PositionMode

if TYPE_CHECKING:
    from sphkv.attention.cuda.encode import CudaEncoder
    from sphkv.attention.triton.encode import TritonEncoder
    from sphkv.attention.triton.recode import RunDecoder

_Integers = NDArray[np.int64]
_LOWER_HALF = (1 << 32) - 1
HOPPER = (9, 0)
# Page numbers have 32 bits; as many lie below the lowest slab as above it.
_NUMBERS_BELOW = 1 << 31
# Pages reordered at once: bounds the unpacked copies.
_CHUNK_PAGES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class PagePool:
    """Pages of one layout in fragment order.

    Attributes:
        pages: ``[pages, page_bytes]`` uint8, contiguous, 16-byte aligned.
        mode: How they store positions; a position per key makes keys about three times as dear.
        address: Where the page of number 0 lies or would lie; at the start of ``pages`` if None.
    """

    pages: Tensor
    mode: PositionMode
    address: int | None = None

    def __post_init__(self) -> None:
        """Reject what the kernel cannot read."""
        if self.pages.dtype != torch.uint8 or not self.pages.is_contiguous():
            raise ValueError("pages must be contiguous uint8")


def list_entries(numbers: Tensor, bases: Tensor | int) -> Tensor:
    """Page numbers and bases as the kernel reads them: int64, the number in the lower half."""
    return numbers.to(torch.int64) | (bases << 32)


@dataclass(frozen=True, slots=True, eq=False)
class PageLists:
    """Which pages every sequence reads, by KV head.

    Attributes:
        entries: ``[total]`` int64, head by head, sequence by sequence: the page's number and its
            base, which the kernel needs before the page arrives; see :func:`list_entries`.
        row_start: ``[kv_heads * batch + 1]`` int32 into ``entries``.
        batch: Sequences.
        blocks: Thread blocks that the heads share by their numbers of pages; None gives all of a
            GPU to them, as many to each.
        shares: ``[blocks, 12]`` int32, which pages every block has; see ``BlockShares``. If None,
            blocks find it.
    """

    entries: Tensor
    row_start: Tensor
    batch: int
    blocks: int | None = None
    shares: Tensor | None = None

    @property
    def page_ids(self) -> Tensor:
        """``[total]`` int64 page numbers."""
        return self.entries & _LOWER_HALF

    @classmethod
    def from_table(cls, block_table: Tensor, num_pages: Tensor, pages: Tensor) -> PageLists:
        """Lists from a padded block table.

        Args:
            block_table: ``[kv_heads, batch, most]`` integers; entries past the end are ignored.
            num_pages: ``[kv_heads, batch]`` integers.
            pages: ``[pages, page_bytes]`` uint8 that the table's numbers count.
        """
        heads, batch, most = block_table.shape
        live = torch.arange(most, device=block_table.device) < num_pages[..., None]
        row_start = torch.zeros(heads * batch + 1, dtype=torch.int32, device=block_table.device)
        row_start[1:] = num_pages.reshape(-1).cumsum(0)
        ids = block_table[live].to(torch.int64)
        return cls(list_entries(ids, first_positions(pages)[ids]), row_start, batch)


@dataclass(frozen=True, slots=True, eq=False)
class ListChange:
    """Pages that went from lists, or have other numbers now.

    Attributes:
        old: ``[pages]`` int64 numbers they had, rising, on the device of the lists.
        new: ``[pages]`` int64 numbers they have; None if they are gone.
    """

    old: Tensor
    new: Tensor | None

    @classmethod
    def of(cls, old: _Integers, new: _Integers | None, device: torch.device) -> ListChange:
        """A change that was told on the host, which does not wait for the device."""
        told = upload(old if new is None else np.concatenate([old, new]), device)
        return cls(told[: len(old)], None if new is None else told[len(old) :])

    def find(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Where each of ``numbers`` is among ``old``, and whether it is."""
        place = torch.searchsorted(self.old, numbers).clamp_(max=len(self.old) - 1)
        return place, self.old[place] == numbers


def _renumber(entries: Tensor, change: ListChange, mask: int) -> None:
    """Give entries of pages that moved their new numbers, in place."""
    assert change.new is not None
    place, is_moved = change.find(entries & mask)
    entries.copy_(torch.where(is_moved, (entries & ~mask) | change.new[place], entries))


class LayerLists:
    """Pages of every layer, KV head and sequence, with room for more.

    Growing them is a few operations for all layers, none of which waits for the device.

    Args:
        layers: Layers.
        heads: KV heads.
        batch: Sequences.
        most: Pages a list can hold.
        device: Where the lists live.

    Attributes:
        most: Pages a list can hold.
    """

    def __init__(
        self, layers: int, heads: int, batch: int, most: int, device: torch.device | str
    ) -> None:
        lists = heads * batch
        self._batch, self.most = batch, most
        # one place more: lists that are full are written behind their end when others grow
        self._entries = torch.zeros(layers, lists, most + 1, dtype=torch.int64, device=device)
        self._counts = torch.zeros(layers, lists, dtype=torch.int64, device=device)
        # one place more, for entries that are not in use
        self._flat = torch.zeros(layers, lists * most + 1, dtype=torch.int64, device=device)
        self._starts = torch.zeros(layers, lists + 1, dtype=torch.int32, device=device)

    def layer(self, layer: int) -> PageLists:
        """The lists of a layer, as the kernel reads them."""
        return PageLists(self._flat[layer], self._starts[layer], self._batch)

    def fill(self, entries: Tensor, counts: _Integers) -> None:
        """Take over the lists of all layers; nothing waits for the device.

        Args:
            entries: ``[total]`` int64 on the CPU, layer by layer, head by head, row by row.
            counts: ``[layers, heads, sequences]`` pages.

        Raises:
            ValueError: A list has more pages than there is room for.
        """
        device = self._entries.device
        if counts.max() > self.most:
            raise ValueError(f"a list has {counts.max()} pages, room is {self.most}")
        flat = counts.reshape(-1)
        first = np.arange(flat.size) * (self.most + 1) - (flat.cumsum() - flat)
        at = torch.from_numpy(np.repeat(first, flat) + np.arange(flat.sum()))
        self._entries.view(-1).index_copy_(
            0, at.to(device, non_blocking=True), entries.to(device, non_blocking=True)
        )
        own = torch.from_numpy(counts.reshape(tuple(self._counts.shape)))
        self._counts.copy_(own, non_blocking=True)
        self._flatten()

    def append(self, new: Tensor, is_grown: Tensor) -> None:
        """Add a page to every list of some sequences.

        Args:
            new: ``[layers, heads, batch]`` int64 on the CPU, see ``list_entries``; of any value for
                others.
            is_grown: ``[batch]`` bool: the sequences that get one.
        """
        device = self._entries.device
        told = upload(new.contiguous().numpy().reshape(-1), device)
        # behind the end of lists that do not grow, where nobody looks
        self._entries.scatter_(2, self._counts[..., None], told.view(*self._counts.shape, 1))
        grown = is_grown.to(device, non_blocking=True).to(torch.int64)
        self._counts += grown.repeat(self._counts.shape[1] // self._batch)
        self._flatten()

    def apply(self, change: ListChange) -> None:
        """Follow pages that went or moved; lists keep their order, and nothing waits."""
        if change.new is not None:
            for entries in (self._entries, self._flat):
                _renumber(entries, change, _LOWER_HALF)
            return
        _, is_gone = change.find(self._entries & _LOWER_HALF)
        place = torch.arange(self._entries.shape[2], device=self._entries.device)
        is_kept = (place < self._counts[..., None]) & ~is_gone
        ends = is_kept.cumsum(2)
        fresh = torch.zeros_like(self._entries)
        # what is not kept goes behind the end of all lists
        fresh.scatter_(2, torch.where(is_kept, ends - 1, self.most), self._entries)
        self._entries.copy_(fresh)
        self._counts.copy_(ends[..., -1])
        self._flatten()

    def _flatten(self) -> None:
        """Put the lists of each layer one behind the other."""
        ends = self._counts.cumsum(1)
        place = torch.arange(self._entries.shape[2], device=ends.device)
        to = (ends - self._counts)[..., None] + place
        to = torch.where(place < self._counts[..., None], to, self._flat.shape[1] - 1)
        self._flat.scatter_(1, to.flatten(1), self._entries.flatten(1))
        self._starts[:, 1:] = ends


class FixedLists:
    """Lists of all layers that are written anew as a whole, in place.

    Attributes:
        shape: Layers, KV heads and sequences.
        mask: Bits of an entry that are the page's number; -1 for addresses.
    """

    def __init__(
        self, shape: tuple[int, int, int], room: int, device: torch.device, mask: int = _LOWER_HALF
    ) -> None:
        """Empty lists with room for so many pages of a layer."""
        self.shape, self.mask = shape, mask
        layers, heads, batch = shape
        # one place more, for entries that are not in use
        self._entries = torch.zeros(layers, room + 1, dtype=torch.int64, device=device)
        self._starts = torch.zeros(layers, heads * batch + 1, dtype=torch.int32, device=device)

    @classmethod
    def with_room(
        cls, counts: _Integers, *, more: int, device: torch.device, mask: int = _LOWER_HALF
    ) -> FixedLists:
        """Room for pages ``[layers, heads, sequences]`` and so many more in every layer."""
        layers, heads, batch = counts.shape
        most = int(counts.sum((1, 2)).max())
        return cls((layers, heads, batch), most + more + heads * batch, device, mask)

    def layer(self, layer: int) -> PageLists:
        """The lists of a layer, as the kernel reads them."""
        return PageLists(self._entries[layer], self._starts[layer], self.shape[2])

    def replace(self, entries: Tensor, counts: _Integers, *, by_row: bool = False) -> bool:
        """Take over lists; nothing waits for the device.

        Args:
            entries: ``[total]`` int64 on the CPU, layer by layer, head by head, row by row.
            counts: ``[layers, heads, sequences]`` pages.
            by_row: List sequence by sequence, then head by head.

        Returns:
            False if there is no room; then nothing has changed.
        """
        layers, room = self._entries.shape
        flat = counts.reshape(layers, -1)
        if int(flat.sum(1).max()) >= room:
            return False
        if by_row:
            # the places of each list before and after
            ends = flat.reshape(-1).cumsum()
            sizes = flat.reshape(-1)
            places = [np.arange(end - n, end) for end, n in zip(ends, sizes, strict=True)]
            order = np.arange(flat.size).reshape(counts.shape).transpose(0, 2, 1).reshape(-1)
            if entries.numel():
                entries = entries[torch.from_numpy(np.concatenate([places[k] for k in order]))]
            flat = counts.transpose(0, 2, 1).reshape(layers, -1)
        starts = np.zeros((layers, flat.shape[1] + 1), dtype=np.int32)
        starts[:, 1:] = flat.cumsum(1)
        padded = np.zeros((layers, room), dtype=np.int64)
        padded[np.arange(room) < flat.sum(1)[:, None]] = entries.numpy()
        self._entries.copy_(torch.from_numpy(padded), non_blocking=True)
        self._starts.copy_(torch.from_numpy(starts), non_blocking=True)
        return True

    def apply(self, change: ListChange) -> None:
        """Follow pages that went or moved; lists keep their order, and nothing waits."""
        if change.new is not None:
            _renumber(self._entries, change, self.mask)
            return
        _, is_gone = change.find(self._entries & self.mask)
        room = self._entries.shape[1] - 1
        place = torch.arange(room + 1, device=self._entries.device)
        is_kept = (place < self._starts[:, -1:]) & ~is_gone
        ends = is_kept.cumsum(1)
        fresh = torch.zeros_like(self._entries)
        fresh.scatter_(1, torch.where(is_kept, ends - 1, room), self._entries)
        self._entries.copy_(fresh)
        before = torch.nn.functional.pad(ends, (1, 0))
        self._starts.copy_(before.gather(1, self._starts.long()))


class FragmentOrder:
    """A ``PageOrder`` of the store: fragment order where the kernel serves a layout."""

    page_sizes: tuple[int, ...] = PAGE_SIZES

    def __init__(self) -> None:
        self._cuda: CudaEncoder | None = None

    def kernels(self) -> CudaEncoder:
        """Kernels that write fragment order on a Hopper GPU."""
        if self._cuda is None:
            # Triton, whose tables it shares, is needed on GPUs only
            from sphkv.attention.cuda.encode import CudaEncoder

            self._cuda = CudaEncoder()
        return self._cuda

    def table_bytes(self, codec: SphericalCodec) -> int:
        """Bytes of the tables that encode with a codec; all caches with it share them."""
        return 0 if self._cuda is None else self._cuda.table_bytes(codec)

    def takes(self, layout: PageLayout) -> bool:
        """Whether the kernel serves a layout."""
        return is_served(layout)

    def alignment(self, layout: PageLayout) -> int:
        """The size of a page, so that the kernel finds pages of all slabs by number."""
        return layout.page_bytes if is_served(layout) else 1

    def to_slab(self, layout: PageLayout, pages: Tensor) -> Tensor:
        """Bytes to keep for token-transposed pages ``[rows, page_bytes]``."""
        if not is_served(layout):
            return pages
        if pages.is_cuda and _is_hopper(pages.device):
            found = self.kernels().to_fragments(layout, pages)
            if found is not None:
                return found
        parts = [to_fragment_order(PageView(layout, part)) for part in pages.split(_CHUNK_PAGES)]
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def from_slab(self, layout: PageLayout, pages: Tensor) -> Tensor:
        """Undo ``to_slab``."""
        if not is_served(layout) or not len(pages):
            return pages
        return torch.cat([_from_fragment_order(layout, part) for part in pages.split(_CHUNK_PAGES)])


class FragmentCodec:
    """A ``PageCodec`` of the store: fused encoding of states on a GPU, in fragment order."""

    def __init__(self, order: FragmentOrder) -> None:
        """Encode pages as ``order`` keeps them."""
        self._order = order
        self._triton: TritonEncoder | None = None
        self._decoder: RunDecoder | None = None

    def copier(self, device: torch.device) -> PageCopier | None:
        """Copies pages on a GPU; see ``PageCodec.copier``."""
        if device.type != "cuda":
            return None
        # Triton is needed on GPUs only
        from sphkv.attention.triton.encode import TritonCopier

        return TritonCopier(device)

    def prepare(
        self, layout: PageLayout, layer: int, codec: StateCodec | None, device: torch.device
    ) -> None:
        """Make tables, and load kernels with the last layer's; see ``PageCodec.prepare``."""
        if device.type != "cuda" or not isinstance(codec, SphericalCodec):
            return
        if self.joins_layers(layout, codec, device):
            self._order.kernels().prepare_layout(codec, layer, layout, device)
        else:
            self._portable().prepare(layout, layer, codec, device)

    def encode(
        self,
        layout: PageLayout,
        layer: int,
        codec: StateCodec | None,
        states: tuple[Tensor, Tensor],
        rows: PageRows,
        head_ids: Tensor,
    ) -> Tensor | None:
        """Pages of states on a GPU; see ``PageCodec.encode``."""
        if not states[0].is_cuda:
            return None
        if is_served(layout):
            # pages that are demoted come as float32; next to codes of a few bits it is the same
            states = (states[0].to(torch.bfloat16), states[1].to(torch.bfloat16))
        if (
            _is_hopper(states[0].device)
            and isinstance(codec, SphericalCodec)
            and len(head_ids)
            and self._order.kernels().takes(layout, states)
        ):
            return self._order.kernels().encode(layout, layer, codec, states, rows, head_ids)
        pages = self._portable().encode(layout, layer, codec, states, rows, head_ids)
        return None if pages is None else self._order.to_slab(layout, pages)

    def _portable(self) -> TritonEncoder:
        """Kernels for pages that are kept token-transposed, and other GPUs."""
        if self._triton is None:
            # Triton is needed on GPUs only
            from sphkv.attention.triton.encode import TritonEncoder

            self._triton = TritonEncoder()
        return self._triton

    def joins_layers(
        self, layout: PageLayout, codec: StateCodec | None, device: torch.device
    ) -> bool:
        """On a Hopper GPU, if values are coded; see ``PageCodec.joins_layers``."""
        is_served_here = is_served(layout) and layout.tier.has_value_codes
        is_gpu = device.type == "cuda" and _is_hopper(device)
        return is_served_here and is_gpu and isinstance(codec, SphericalCodec)

    def encode_layers(
        self,
        layout: PageLayout,
        codec: StateCodec | None,
        states: tuple[Tensor, Tensor],
        rows: PageRows,
        heads: Tensor,
    ) -> Tensor:
        """Pages of several layers on a Hopper GPU; see ``PageCodec.encode_layers``."""
        assert isinstance(codec, SphericalCodec)
        return self._order.kernels().encode(layout, None, codec, states, rows, heads)

    def decodes(self, layout: PageLayout, codec: StateCodec | None) -> bool:
        """Whether runs of such pages are decoded; see ``PageCodec.decodes``."""
        if not is_served(layout):
            return self._portable().decodes(layout, codec)
        return isinstance(codec, SphericalCodec) and self._runs().takes(layout)

    def decode_runs(
        self,
        layout: PageLayout,
        codec: StateCodec | None,
        pages: PageRuns,
        states: tuple[Tensor, Tensor],
    ) -> None:
        """Decode runs of pages; see ``PageCodec.decode_runs``."""
        assert isinstance(codec, SphericalCodec)
        if is_served(layout):
            self._runs().decode(layout, codec, pages, states)
        else:
            self._portable().decode_runs(layout, codec, pages, states)

    def table_bytes(self, codec: SphericalCodec) -> int:
        """Bytes of the tables that decode runs with a codec."""
        made = (self._decoder, self._triton)
        return sum(0 if each is None else each.table_bytes(codec) for each in made)

    def _runs(self) -> RunDecoder:
        if self._decoder is None:
            # Triton is needed on GPUs only
            from sphkv.attention.triton.recode import RunDecoder

            self._decoder = RunDecoder(is_plain=False)
        return self._decoder


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    """Whether encoding kernels were checked on such a GPU: no self-test watches over them."""
    return torch.cuda.get_device_capability(device) == HOPPER


def _from_fragment_order(layout: PageLayout, pages: Tensor) -> Tensor:
    out, bits, tokens = pages.clone(), layout.tier.value_bits, layout.page_tokens
    codes = unpack_keys(pages[:, layout.key_offset : layout.radius_offset], tokens=tokens)
    out[:, layout.key_offset : layout.radius_offset] = pack_nibbles(codes).flatten(1)
    gains = unpack_gains(pages[:, layout.radius_offset : layout.value_offset], tokens=tokens)
    out[:, layout.radius_offset : layout.value_offset] = gains.flatten(1)
    stream = pages[:, layout.value_offset : layout.position_offset]
    values = unpack_values(stream, bits=bits, head_dim=layout.head_dim, tokens=tokens)
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
        pool: A slab of the layout, and where page numbers count from.
        lists: Pages of each (KV head, sequence).
    """

    layout: PageLayout
    pool: PagePool
    lists: PageLists


def page_base(allocator: PageAllocator, layout: PageLayout) -> int:
    """An address far below all slabs of a layout, so that later ones are not below it either."""
    slabs, size = list(allocator.slabs()), layout.page_bytes
    mine = [slab.data.data_ptr() for slab in slabs if slab.layout == layout]
    if not mine:
        # slabs to come lie whole pages from address zero
        mine = [slabs[0].data.data_ptr() // size * size]
    return max(min(mine) % size, min(mine) - _NUMBERS_BELOW * size)


def page_numbers(addresses: Tensor, base: int, layout: PageLayout) -> Tensor:
    """Numbers of pages, below 2**32, as int64.

    Args:
        addresses: Int64 addresses of any shape; slabs lie whole pages apart.
        base: Where the page of number 0 would lie.
        layout: Their layout.

    Raises:
        ValueError: A page lies too far from the base.
    """
    number = torch.div(addresses - base, layout.page_bytes, rounding_mode="floor")
    if number.numel() and not 0 <= int(number.min()) <= int(number.max()) < 1 << 32:
        raise ValueError(f"pages at {addresses.tolist()} are too far from {base}")
    return number


def place_pages(
    allocator: PageAllocator,
    layout: PageLayout,
    pages: Sequence[ListedPages | None],
    num_heads: int,
    *,
    device: torch.device,
    base: int | None = None,
) -> ServedPages:
    """Lists of pages of several rows; nothing waits for the device.

    Args:
        allocator: Owner of the pages.
        layout: Their layout.
        pages: The pages of each row with their first positions; None for none.
        num_heads: KV heads.
        device: Where lists go.
        base: Where page numbers count from; ``page_base`` by default.
    """
    if base is None:
        base = page_base(allocator, layout)
    parts = [(row, row.of_head(head)) for head in range(num_heads) for row in pages if row]
    none = np.zeros(0, dtype=np.int64)
    addresses = np.concatenate([none, *(row.addresses[at] for row, at in parts)])
    positions = np.concatenate([none, *(row.first_positions[at] for row, at in parts)])
    numbers = page_numbers(torch.from_numpy(addresses), base, layout)
    entries = list_entries(numbers, torch.from_numpy(positions))
    starts = list_starts(count_pages(pages, num_heads).T)
    lists = PageLists(
        entries.to(device, non_blocking=True), starts.to(device, non_blocking=True), len(pages)
    )
    slab = next(slab.data for slab in allocator.slabs() if slab.layout == layout)
    return ServedPages(layout, PagePool(slab, layout.position_mode, base), lists)
