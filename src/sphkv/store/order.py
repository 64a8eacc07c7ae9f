# SPDX-License-Identifier: Apache-2.0
"""How a device keeps the bytes of a page, and how its kernels make them."""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.core.contract import StateCodec
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PageRows


class PageOrder(Protocol):
    """A permutation of the bytes of a page, for a kernel that wants them in another order.

    Attributes:
        page_tokens: States of the coded pages that the kernel reads.
    """

    page_tokens: int

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


class PageCodec(Protocol):
    """Kernels that turn dense states into whole pages."""

    def copier(self, device: torch.device) -> PageCopier | None:
        """What copies pages on a device; None leaves it to torch, slab by slab."""
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
