# SPDX-License-Identifier: Apache-2.0
"""What a store keeps for one sequence, and what it shows of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.core.contract import StateCodec
from sphkv.store.allocator import PoolKey
from sphkv.store.config import StoreConfig
from sphkv.store.layout import PageLayout
from sphkv.store.page_list import PageIndex
from sphkv.store.pointers import PointerTable, pool_of_tag
from sphkv.store.tail import OpenTail


@dataclass(frozen=True, slots=True, eq=False)
class PageGroup:
    """Pages of one layer that share a layout, ragged over heads.

    Attributes:
        layout: Tier and position mode of the pages.
        page_ids: ``[heads, most pages of a head]`` int64, padded with -1.
        num_pages: ``[heads]`` int64.
    """

    layout: PageLayout
    page_ids: Tensor
    num_pages: Tensor

    def flat_ids(self) -> Tensor:
        """``[pages]`` int64 ids, head by head."""
        return self.page_ids[self.page_ids >= 0]

    def head_ids(self) -> Tensor:
        """``[pages]`` int64 head of each of ``flat_ids``."""
        return (self.page_ids >= 0).nonzero()[:, 0]


def page_groups(
    table: PointerTable,
    layout_of: Callable[[PoolKey], PageLayout],
    device: torch.device | str = "cpu",
) -> list[PageGroup]:
    """Pages of a table, grouped by tier and position mode, lowest tier first."""
    groups = []
    for tag in table.present_tags():
        page_ids, num_pages = (part.to(device) for part in table.select(tag))
        groups.append(PageGroup(layout_of(pool_of_tag(tag)), page_ids, num_pages))
    return groups


@dataclass(slots=True, eq=False)
class SequenceState:
    """Tables, tails and next position of every layer of one sequence.

    Attributes:
        codec: Encoder of the sequence.
        tables: Pointer table of each layer.
        tails: Open tail of each layer, None until the first append.
        next_position: Position of each layer's next token.
        seal_tier_id: Tier of the pages that full tails become.
        index: What was read of its pages; None until they are listed.
    """

    codec: StateCodec | None
    tables: list[PointerTable]
    tails: list[OpenTail | None]
    next_position: list[int]
    seal_tier_id: int
    index: PageIndex | None = None

    @classmethod
    def blank(
        cls, config: StoreConfig, codec: StateCodec | None, seal_tier: str | None = None
    ) -> "SequenceState":
        """An empty sequence."""
        geometry = config.geometry
        layers = range(geometry.num_layers)
        return cls(
            codec,
            [PointerTable(geometry.num_kv_heads) for _ in layers],
            [None for _ in layers],
            [0 for _ in layers],
            config.seal_tier_id(seal_tier),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of tables and tails; pages excluded."""
        return sum(part.nbytes for part in self._parts())

    def live_tails(self) -> list[OpenTail]:
        """Tails that are allocated."""
        return [tail for tail in self.tails if tail is not None]

    def tensors(self) -> list[Tensor]:
        """Tensors of tables and tails."""
        return [tensor for part in self._parts() for tensor in part.tensors()]

    def _parts(self) -> list[PointerTable | OpenTail]:
        return [*self.tables, *self.live_tails()]

    def all_ids(self) -> Tensor:
        """``[pages]`` int64 ids of all layers, on the CPU."""
        return torch.cat([table.all_ids() for table in self.tables])

    def copy(self) -> "SequenceState":
        """Tables and tails of its own for the same pages."""
        return SequenceState(
            self.codec,
            [table.copy() for table in self.tables],
            [tail.copy() if tail is not None else None for tail in self.tails],
            list(self.next_position),
            self.seal_tier_id,
        )
