# SPDX-License-Identifier: Apache-2.0
"""Lists of coded pages of all layers, in tensors that keep their place while they grow."""

from __future__ import annotations

import torch
from torch import Tensor

from sphkv.attention.cuda.decode import PageLists


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

    def append(self, new: Tensor) -> None:
        """Add a page to every list.

        Args:
            new: ``[layers, heads, batch]`` int64, see ``list_entries``.
        """
        new = new.to(self._entries.device, non_blocking=True).reshape(*self._counts.shape, 1)
        self._entries.scatter_(2, self._counts[..., None], new)
        self._counts += 1
        self._flatten()

    def _flatten(self) -> None:
        """Put the lists of each layer one behind the other."""
        ends = self._counts.cumsum(1)
        place = torch.arange(self._entries.shape[2], device=ends.device)
        to = (ends - self._counts)[..., None] + place
        to = torch.where(place < self._counts[..., None], to, self._flat.shape[1] - 1)
        self._flat.scatter_(1, to.flatten(1), self._entries.flatten(1))
        self._starts[:, 1:] = ends
