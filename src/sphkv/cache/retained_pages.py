# SPDX-License-Identifier: Apache-2.0
"""The pages of a layer as one list that a controller can choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sphkv.store.layout import PageLayout, PageView
from sphkv.store.paging import PositionMode
from sphkv.store.sequence import PageGroup
from sphkv.store.store import PageStore


@dataclass(frozen=True, slots=True, eq=False)
class PageList:
    """Pages with what a decision about them needs; all tensors are on the CPU.

    Attributes:
        layer_ids: ``[pages]`` int64.
        page_ids: ``[pages]`` int64 ids in the store.
        head_ids: ``[pages]`` int64.
        tier_ids: ``[pages]`` int64.
        positions: ``[pages, states]`` int64; those of slack mean nothing.
        live: ``[pages, states]`` bool.
        has_protected: ``[pages]`` bool.
    """

    layer_ids: Tensor
    page_ids: Tensor
    head_ids: Tensor
    tier_ids: Tensor
    positions: Tensor
    live: Tensor
    has_protected: Tensor

    @property
    def num_pages(self) -> int:
        """Pages listed."""
        return self.page_ids.shape[0]

    @property
    def first_positions(self) -> Tensor:
        """``[pages]`` int64 position of each page's first state."""
        return self.positions[:, 0]

    def within(self, first: int, stop: int) -> Tensor:
        """``[pages]`` bool: pages whose states all lie in ``first..stop - 1``."""
        inside = (self.positions >= first) & (self.positions < stop)
        return (inside | ~self.live).all(1)

    def select(self, index: Tensor) -> PageList:
        """The pages that a mask or an index names."""
        return PageList(*(getattr(self, field.name)[index] for field in fields(self)))

    @classmethod
    def join(cls, parts: Sequence[PageList]) -> PageList:
        """Several lists in one."""
        return cls(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    def dense_states(self, store: PageStore) -> tuple[Tensor, Tensor]:
        """Keys and values ``[states, head_dim]`` of sealed dense pages, by head, then position."""
        order = (self.head_ids * (1 << 40) + self.first_positions).argsort()
        layout = PageLayout(
            store.config.tiers.dense_id,
            store.config.tiers[store.config.tiers.dense_id],
            store.config.geometry.head_dim,
            PositionMode.CONTIGUOUS,
        )
        view = PageView(layout, store.allocator.gather(self.page_ids[order]))
        return view.dense_keys().flatten(0, 1), view.dense_values().flatten(0, 1)


def list_pages(
    store: PageStore, sequence: int, layer: int, *, tier_id: int | None = None
) -> PageList:
    """Every page of a layer, or those of one tier."""
    groups = [
        group
        for group in store.pages(sequence, layer)
        if tier_id is None or group.layout.tier_id == tier_id
    ]
    # one width for all layers, so that their lists can be joined
    width = max(tier.page_tokens for tier in store.config.tiers)
    listed = [_list_group(store, group, layer, width) for group in groups]
    return PageList.join([_no_pages(width), *listed])


def _no_pages(width: int) -> PageList:
    ids = torch.empty(0, dtype=torch.int64)
    table = torch.empty((0, width), dtype=torch.int64)
    flags = torch.empty(0, dtype=torch.bool)
    return PageList(ids, ids, ids, ids, table, table.to(torch.bool), flags)


def _list_group(store: PageStore, group: PageGroup, layer: int, width: int) -> PageList:
    view = store.view(group)
    rows = view.rows()
    padding = (0, width - group.layout.page_tokens)
    pages = rows.counts.shape[0]
    return PageList(
        torch.full((pages,), layer),
        group.flat_ids().cpu(),
        group.head_ids().cpu(),
        torch.full((pages,), group.layout.tier_id),
        torch.nn.functional.pad(rows.positions, padding).cpu(),
        torch.nn.functional.pad(rows.live(), padding).cpu(),
        rows.flags.any(1).cpu(),
    )
