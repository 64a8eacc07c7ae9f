# SPDX-License-Identifier: Apache-2.0
"""The pages of a sequence as one list that a controller can choose from."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sphkv.store.sequence import pool_of_tag
from sphkv.store.store import PageStore


@dataclass(frozen=True, slots=True, eq=False)
class PageList:
    """Pages as the pointer tables know them; all tensors are on the CPU.

    Attributes:
        layer_ids: ``[pages]`` int64.
        head_ids: ``[pages]`` int64.
        page_ids: ``[pages]`` int64 ids in the store.
        tags: ``[pages]`` int16, see ``sphkv.store.sequence.page_tag``.
        tier_ids: ``[pages]`` int64.
    """

    layer_ids: Tensor
    head_ids: Tensor
    page_ids: Tensor
    tags: Tensor
    tier_ids: Tensor

    @property
    def num_pages(self) -> int:
        """Pages listed."""
        return self.page_ids.shape[0]

    def select(self, index: Tensor) -> PageList:
        """The pages that a mask or an index names."""
        return PageList(*(getattr(self, field.name)[index] for field in fields(self)))


def list_pages(store: PageStore, sequence: int) -> PageList:
    """Every page of every layer, layer by layer, then head by head; reads no page."""
    layers = range(store.config.geometry.num_layers)
    tables = [store.table(sequence, layer) for layer in layers]
    used = [table.used() for table in tables]
    tags = torch.cat([table.tags[at] for table, at in zip(tables, used, strict=True)])
    tier_ids = torch.empty(tags.shape, dtype=torch.int64)
    for tag in tags.unique().tolist():
        tier_ids[tags == tag] = pool_of_tag(tag)[0]
    counts = torch.stack([table.num_pages for table in tables])
    layer_ids, head_ids = torch.ones_like(counts).nonzero(as_tuple=True)
    owners = counts.flatten()
    return PageList(
        layer_ids.repeat_interleave(owners),
        head_ids.repeat_interleave(owners),
        torch.cat([table.page_ids[at] for table, at in zip(tables, used, strict=True)]),
        tags,
        tier_ids,
    )
