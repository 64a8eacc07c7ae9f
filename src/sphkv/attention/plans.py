# SPDX-License-Identifier: Apache-2.0
"""What backends derive from pages and pointer tables, kept until one of them changes.

The host lists the pages of a layer for GPU kernels sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.store.layout import PageLayout
from sphkv.store.sequence import PointerTable
from sphkv.store.store import PageStore

_Integers = NDArray[np.int64]
Plan = TypeVar("Plan")


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


@dataclass(frozen=True, slots=True, eq=False)
class _Held(Generic[Plan]):
    """A plan, and the tables and versions it was made from."""

    tables: list[ReferenceType[PointerTable]]
    versions: list[int]
    plan: Plan

    def is_of(self, tables: Sequence[PointerTable]) -> bool:
        """Whether it was made from just these tables as they are now."""
        return len(tables) == len(self.tables) and all(
            held() is table and version == table.version
            for held, version, table in zip(self.tables, self.versions, tables, strict=True)
        )


class PlanCache(Generic[Plan]):
    """One plan for each layer of a sequence, and one for each layer of a batch.

    A plan goes with the pointer table of its first sequence, and is made anew when the version of
    any of its tables has risen.

    Args:
        build: Makes the plan of a store, its sequences and a layer.
    """

    def __init__(self, build: Callable[[PageStore, tuple[int, ...], int], Plan]) -> None:
        self._build = build
        self._of_one: WeakKeyDictionary[PointerTable, _Held[Plan]] = WeakKeyDictionary()
        self._of_many: WeakKeyDictionary[PointerTable, _Held[Plan]] = WeakKeyDictionary()

    def get(self, store: PageStore, sequences: tuple[int, ...], layer: int) -> Plan:
        """The plan of one sequence or of the rows of a batch, which may repeat a sequence."""
        tables = [store.table(sequence, layer) for sequence in sequences]
        shelf = self._of_one if len(tables) == 1 else self._of_many
        held = shelf.get(tables[0])
        if held is None or not held.is_of(tables):
            plan = self._build(store, sequences, layer)
            versions = [table.version for table in tables]
            held = shelf[tables[0]] = _Held([ref(table) for table in tables], versions, plan)
        return held.plan
