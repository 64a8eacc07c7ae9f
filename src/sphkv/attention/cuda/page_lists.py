# SPDX-License-Identifier: Apache-2.0
"""Which coded pages the decode kernel reads: pools, lists, and lists that grow in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.store.layout import first_positions
from sphkv.store.paging import PositionMode

_LOWER_HALF = (1 << 32) - 1


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
    """

    entries: Tensor
    row_start: Tensor
    batch: int

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


class LayerLists:
    """Pages of every layer, KV head and sequence, with room for more.

    Growing them is a few operations for all layers, none of which waits for the device.

    Args:
        layers: Layers.
        heads: KV heads.
        batch: Sequences.
        most: Pages a list can hold.
        device: Where the lists live.
    """

    def __init__(
        self, layers: int, heads: int, batch: int, most: int, device: torch.device | str
    ) -> None:
        lists = heads * batch
        self._batch = batch
        self._entries = torch.zeros(layers, lists, most, dtype=torch.int64, device=device)
        self._counts = torch.zeros(layers, lists, dtype=torch.int64, device=device)
        # one place more, for entries that are not in use
        self._flat = torch.zeros(layers, lists * most + 1, dtype=torch.int64, device=device)
        self._starts = torch.zeros(layers, lists + 1, dtype=torch.int32, device=device)

    def layer(self, layer: int) -> PageLists:
        """The lists of a layer, as the kernel reads them."""
        return PageLists(self._flat[layer], self._starts[layer], self._batch)

    def replace(self, layer: int, lists: PageLists) -> None:
        """Take over the lists of a layer."""
        counts = lists.row_start.diff().to(self._counts.device, torch.int64)
        if int(counts.max()) > self._entries.shape[2]:
            raise ValueError(
                f"a list has {int(counts.max())} pages, room is {self._entries.shape[2]}"
            )
        self._counts[layer] = counts
        is_used = torch.arange(self._entries.shape[2], device=counts.device) < counts[:, None]
        self._entries[layer][is_used] = lists.entries.to(counts.device)
        self._flatten()

    def append(self, new: Tensor, is_grown: Tensor) -> None:
        """Add a page to every list of some sequences.

        Args:
            new: ``[layers, heads, batch]`` int64, see ``list_entries``; of any value for others.
            is_grown: ``[batch]`` bool: the sequences that get one.
        """
        device = self._entries.device
        new = new.to(device, non_blocking=True).reshape(*self._counts.shape, 1)
        # behind the end of lists that do not grow, where nobody looks
        self._entries.scatter_(2, self._counts[..., None], new)
        grown = is_grown.to(device, non_blocking=True).to(torch.int64)
        self._counts += grown.repeat(self._counts.shape[1] // self._batch)
        self._flatten()

    def _flatten(self) -> None:
        """Put the lists of each layer one behind the other."""
        ends = self._counts.cumsum(1)
        place = torch.arange(self._entries.shape[2], device=ends.device)
        to = (ends - self._counts)[..., None] + place
        to = torch.where(place < self._counts[..., None], to, self._flat.shape[1] - 1)
        self._flat.scatter_(1, to.flatten(1), self._entries.flatten(1))
        self._starts[:, 1:] = ends
