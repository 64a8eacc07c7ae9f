# SPDX-License-Identifier: Apache-2.0
"""How a device keeps the bytes of a page, and how its kernels make them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.core.contract import StateCodec
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PageBatch, PageRows

WORD_BYTES = 4
"""What a ``PageCopier`` copies: addresses and sizes are multiples of it."""


class PageOrder(Protocol):
    """A permutation of the bytes of a page, for a kernel that wants them in another order.

    Attributes:
        page_sizes: States of the coded pages that the kernel reads, the smallest first.
    """

    page_sizes: tuple[int, ...]

    def takes(self, layout: PageLayout) -> bool:
        """Whether the kernel reads pages of a layout; others are kept as they are."""
        ...

    def alignment(self, layout: PageLayout) -> int:
        """Bytes that pages of a layout begin at multiples of; 1 if they may lie anywhere."""
        ...

    def to_slab(self, layout: PageLayout, pages: Tensor) -> Tensor:
        """Bytes to keep for pages ``[rows, page_bytes]`` that ``store/layout.py`` wrote."""
        ...

    def from_slab(self, layout: PageLayout, pages: Tensor) -> Tensor:
        """Undo ``to_slab``."""
        ...


class PageCopier(Protocol):
    """Copies bytes between places of a device's memory, many at once."""

    def copy(self, sources: NDArray[np.int64], targets: NDArray[np.int64], num_bytes: int) -> None:
        """Queue copies of ``num_bytes`` each, a multiple of 4.

        Args:
            sources: ``[copies]`` addresses, multiples of 4.
            targets: ``[copies]`` addresses, multiples of 4; no copy reads what another writes.
            num_bytes: Bytes of each.
        """
        ...

    def gather(self, sources: Tensor, target: Tensor, *, piece: int, stride: int) -> None:
        """Queue copies from places that the device has found, one behind the other.

        Args:
            sources: ``[copies]`` int64 addresses on the device, multiples of 4; 0 gives zeros.
            target: Contiguous, of any shape; each copy fills as much of it.
            piece: Bytes that lie together where they come from, a multiple of 4.
            stride: Bytes from one piece of a copy to its next, a multiple of 4.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PageRuns:
    """Where runs of 16 states of some pages are, and where they go; all on the pages' device.

    Attributes:
        addresses: ``[pages]`` int64.
        heads: ``[pages]`` int64 head of each page among those of all layers, layer by layer.
        starts: ``[pages, runs]`` int64 position of each run's first state.
        places: ``[pages, runs]`` int64 run of the states that a run becomes, below 0 for none.
    """

    addresses: Tensor
    heads: Tensor
    starts: Tensor
    places: Tensor


class PageCodec(Protocol):
    """Kernels that turn dense states into whole pages, and coded runs into dense states."""

    def copier(self, device: torch.device) -> PageCopier | None:
        """What copies pages on a device; None leaves it to torch, slab by slab."""
        ...

    def prepare(
        self, layout: PageLayout, layer: int, codec: StateCodec | None, device: torch.device
    ) -> None:
        """Make what encoding pages of a layer needs before the first of them comes.

        Args:
            layout: Their layout.
            layer: The layer, whose codebooks are there.
            codec: Encoder of the sequences.
            device: Where pages live.
        """
        ...

    def encode(
        self,
        layout: PageLayout,
        layer: int,
        codec: StateCodec | None,
        states: tuple[Tensor, Tensor],
        rows: PageRows,
        head_ids: Tensor,
    ) -> Tensor | None:
        """Pages of a coded layout.

        Args:
            layout: Their layout.
            layer: Layer of the states.
            codec: Encoder of the sequence, whose codebooks are used.
            states: Keys and values ``[rows, tokens, head_dim]``, zero past the counts.
            rows: Positions, counts and flags.
            head_ids: ``[rows]`` int64 KV head of each page.

        Returns:
            ``[rows, page_bytes]`` uint8 as slabs keep them; None leaves it to the codec.
        """
        ...

    def joins_layers(
        self, layout: PageLayout, codec: StateCodec | None, device: torch.device
    ) -> bool:
        """Whether ``encode_layers`` makes such pages on a device."""
        ...

    def encode_layers(
        self,
        layout: PageLayout,
        codec: StateCodec | None,
        states: tuple[Tensor, Tensor],
        rows: PageRows,
        heads: Tensor,
    ) -> Tensor:
        """Pages of several layers at once.

        Args:
            layout: Their layout, which ``joins_layers`` takes.
            codec: Encoder of the sequences.
            states: Keys and values ``[rows, tokens, head_dim]`` bfloat16, zero past the counts.
            rows: Positions, counts and flags.
            heads: ``[rows]`` int64 head of each page among those of all layers, layer by layer.

        Returns:
            ``[rows, page_bytes]`` uint8 as slabs keep them.
        """
        ...

    def decodes(self, layout: PageLayout, codec: StateCodec | None) -> bool:
        """Whether ``decode_runs`` takes such pages, as slabs keep them."""
        ...

    def decode_runs(
        self,
        layout: PageLayout,
        codec: StateCodec | None,
        pages: PageRuns,
        states: tuple[Tensor, Tensor],
    ) -> None:
        """Decode runs of pages that lie in slabs; for pages that are coded again, nothing else.

        Args:
            layout: Layout of the pages, which ``decodes`` takes.
            codec: Their encoder.
            pages: The runs.
            states: Keys and values ``[states, head_dim]`` bfloat16 that are written.
        """
        ...


@runtime_checkable
class PageRecoder(Protocol):
    """Kernels of the host that code states of pages again, at a lower tier, where they lie."""

    def recodes(self, layout: PageLayout, codec: StateCodec | None) -> bool:
        """Whether ``recode`` makes pages of a coded layout, of pages of any layouts."""
        ...

    def recode(
        self,
        sources: Sequence[tuple[PageLayout, Tensor]],
        layout: PageLayout,
        codec: StateCodec | None,
        batch: PageBatch,
    ) -> Tensor:
        """Pages of several layers out of states of others.

        Args:
            sources: Layouts, and ``[pages]`` int64 addresses of their pages.
            layout: Layout of the new pages, which ``recodes`` takes.
            codec: Encoder of all of them.
            batch: The new pages: ``head_ids`` counts through the heads of all layers, layer by
                layer; ``source`` is a page, counted through ``sources``, times
                ``MAX_PAGE_TOKENS``, plus the state's place in that page.

        Returns:
            ``[rows, page_bytes]`` uint8.
        """
        ...


class CodecOnly:
    """A ``PageCodec`` that leaves everything to the codec of a sequence."""

    def copier(self, device: torch.device) -> PageCopier | None:
        """Nothing is copied."""
        return None

    def prepare(
        self, layout: PageLayout, layer: int, codec: StateCodec | None, device: torch.device
    ) -> None:
        """Nothing is needed."""

    def encode(
        self,
        layout: PageLayout,
        layer: int,
        codec: StateCodec | None,
        states: tuple[Tensor, Tensor],
        rows: PageRows,
        head_ids: Tensor,
    ) -> Tensor | None:
        """Left to the codec."""
        return None

    def joins_layers(
        self, layout: PageLayout, codec: StateCodec | None, device: torch.device
    ) -> bool:
        """Left to the codec."""
        return False

    def encode_layers(
        self,
        layout: PageLayout,
        codec: StateCodec | None,
        states: tuple[Tensor, Tensor],
        rows: PageRows,
        heads: Tensor,
    ) -> Tensor:
        """Nobody may ask."""
        raise AssertionError(f"pages of {layout} are encoded layer by layer")

    def decodes(self, layout: PageLayout, codec: StateCodec | None) -> bool:
        """Left to the codec."""
        return False

    def decode_runs(
        self,
        layout: PageLayout,
        codec: StateCodec | None,
        pages: PageRuns,
        states: tuple[Tensor, Tensor],
    ) -> None:
        """Nobody may ask."""
        raise AssertionError(f"pages of {layout} are not decoded")
