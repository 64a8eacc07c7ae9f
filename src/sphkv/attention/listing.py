# SPDX-License-Identifier: Apache-2.0
"""Pages of one layer as the host lists them for GPU kernels, sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.store.layout import PageLayout
from sphkv.store.store import PageStore

_Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ListedPages:
    """Pages of one layout of one sequence, head by head.

    Attributes:
        num_pages: ``[heads]`` int64.
        addresses: ``[pages]`` int64.
        first_positions: ``[pages]`` int64 position of each page's first state; zero where nobody
            asked for it.
    """

    num_pages: _Integers
    addresses: _Integers
    first_positions: _Integers

    def of_head(self, head: int) -> slice:
        """Where the pages of a head are listed."""
        end = int(self.num_pages[: head + 1].sum())
        return slice(end - int(self.num_pages[head]), end)


def list_pages(
    store: PageStore,
    sequence: int,
    layer: int,
    *,
    has_positions: Callable[[PageLayout], bool] = lambda _: False,
) -> dict[PageLayout, ListedPages]:
    """Pages of a layer by layout, lowest tier first.

    Args:
        store: Their owner.
        sequence: Sequence to list.
        layer: Layer to list.
        has_positions: For which layouts first positions are read, which waits for a GPU.
    """
    found = {}
    for group in store.pages(sequence, layer, device="cpu"):
        ids = group.flat_ids()
        addresses = store.allocator.addresses(ids)
        positions = torch.zeros_like(ids)
        if has_positions(group.layout):
            positions = store.allocator.first_positions(ids).cpu()
        found[group.layout] = ListedPages(
            group.num_pages.numpy(), addresses.numpy(), positions.numpy()
        )
    return found


def join_layouts(
    listed: Sequence[dict[PageLayout, ListedPages]],
) -> dict[PageLayout, list[ListedPages | None]]:
    """Every layout that occurs, with the pages of each sequence; None where it has none."""
    layouts = dict.fromkeys(layout for pages in listed for layout in pages)
    return {layout: [pages.get(layout) for pages in listed] for layout in layouts}


def count_pages(pages: Sequence[ListedPages | None], num_heads: int) -> _Integers:
    """``[sequences, heads]`` int64 pages of one layout."""
    none = np.zeros(num_heads, dtype=np.int64)
    return np.stack([none if each is None else each.num_pages for each in pages])


def list_starts(counts: _Integers) -> Tensor:
    """``[lists + 1]`` int32: where lists of these lengths begin that follow one another."""
    starts = torch.zeros(counts.size + 1, dtype=torch.int32)
    starts[1:] = torch.from_numpy(counts.reshape(-1).cumsum())
    return starts


def upload(device: torch.device, *parts: Tensor) -> list[Tensor]:
    """Copies of int64 host tensors on a device, in one transfer that the host does not wait for.

    Args:
        device: Where they go.
        parts: Of any shapes.
    """
    flat = torch.cat([part.reshape(-1) for part in parts]).to(device, non_blocking=True)
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
