# SPDX-License-Identifier: Apache-2.0
"""How a device makes and keeps pages, where its kernels want it another way."""

from typing import Protocol

from torch import Tensor

from sphkv.core.contract import StateCodec
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PageRows


class PageOrder(Protocol):
    """How a device makes and keeps the bytes of its pages; their size stays the same.

    Pages in such slabs lie whole pages apart from one another, whatever slab they are in.
    """

    def encode(
        self,
        layout: PageLayout,
        layer: int,
        codec: StateCodec | None,
        states: tuple[Tensor, Tensor],
        rows: PageRows,
        head_ids: Tensor,
    ) -> Tensor | None:
        """Pages of keys and values ``[rows, tokens, head_dim]``, as ``to_slab`` orders them.

        None leaves it to the codec.
        """
        ...

    def to_slab(self, layout: PageLayout, pages: Tensor) -> Tensor:
        """Bytes to keep for pages ``[rows, page_bytes]``."""
        ...

    def from_slab(self, layout: PageLayout, pages: Tensor) -> Tensor:
        """Undo ``to_slab``."""
        ...
