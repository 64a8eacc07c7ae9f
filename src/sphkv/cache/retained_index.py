# SPDX-License-Identifier: Apache-2.0
"""What a controller must know of pages, so that it reads no page twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sphkv.cache.retained_pages import PageList, list_pages
from sphkv.core.tiers import RUN_TOKENS
from sphkv.retention.notes import LEAST_IMPORTANCE, LayerNotes
from sphkv.store.layout import PageLayout, PageView
from sphkv.store.paging import PositionMode
from sphkv.store.sequence import page_tag, pool_of_tag
from sphkv.store.store import PageStore


class PageIndex:
    """Importance of every page of a sequence.

    Heads and tiers stand in the pointer tables. Importance stands here by page id: its logarithm
    in half precision, infinite for a page with protected states, NaN for one that was not read yet
    or has no tier yet. Whoever gives up a page says so first, because its id will come again. All
    of it is on the CPU, wherever the pages are.
    """

    def __init__(self, store: PageStore, sequence: int) -> None:
        """Nothing was read yet."""
        self._store = store
        self._sequence = sequence
        self._dense_id = store.config.tiers.dense_id
        self._log = torch.empty(0, dtype=torch.float16)

    @property
    def num_bytes(self) -> int:
        """Bytes of the index."""
        return self._log.nbytes

    def forget(self, page_ids: Tensor) -> None:
        """Pages that go, or whose states change."""
        self._log[page_ids[page_ids < self._log.numel()]] = torch.nan

    def clear(self) -> None:
        """Forget all pages."""
        self._log = self._log[:0].clone()

    def decided(self, notes: Sequence[LayerNotes], fresh_from: int) -> tuple[PageList, Tensor]:
        """Pages that may be demoted or dropped, and the importance ``[pages]`` of each.

        Args:
            notes: Importance of the runs of every layer.
            fresh_from: Dense pages from this position on have no tier yet.
        """
        pages, log = self._look_up()
        unread = log.isnan().nonzero()[:, 0]
        runs = torch.stack([each.log_importance for each in notes])
        for index, view in self._read(pages, unread):
            rows = view.rows().to("cpu")
            where = (pages.layer_ids[index, None], pages.head_ids[index, None])
            run = (rows.positions // RUN_TOKENS).clamp(max=runs.shape[2] - 1)
            each = runs[(*where, run)].float().exp() * rows.live()
            found = each.sum(1).clamp(min=LEAST_IMPORTANCE).log().half()
            found[rows.flags.any(1)] = torch.inf
            if view.layout.tier_id == self._dense_id:
                found[rows.positions[:, 0] >= fresh_from] = torch.nan
            log[index] = found
        self._log[pages.page_ids] = log
        may_change = log.isfinite()
        return pages.select(may_change), log[may_change].float().exp()

    def fresh(self, first: int, stop: int) -> tuple[PageList, Tensor, Tensor]:
        """Dense pages of positions ``first..stop - 1``, by layer, head and position.

        Returns:
            The pages, and their keys and values ``[layers, heads, stop - first, head_dim]`` on the
            CPU.
        """
        pages, log = self._look_up()
        # a full tail is sealed in one piece
        sealed = page_tag((self._dense_id, PositionMode.CONTIGUOUS))
        unread = (log.isnan() & (pages.tags == sealed)).nonzero()[:, 0]
        ((index, view),) = self._read(pages, unread)
        at = view.positions()[:, 0].cpu()
        inside = ((at >= first) & (at < stop)).nonzero()[:, 0]
        owner = pages.layer_ids * self._store.config.geometry.num_kv_heads + pages.head_ids
        order = inside[(owner[index[inside]] * (1 << 32) + at[inside]).argsort()]
        geometry, chosen = self._store.config.geometry, view.select(order)
        shape = (geometry.num_layers, geometry.num_kv_heads, stop - first, geometry.head_dim)
        keys, values = (
            x.reshape(shape).cpu() for x in (chosen.dense_keys(), chosen.dense_values())
        )
        return pages.select(index[order]), keys, values

    def _look_up(self) -> tuple[PageList, Tensor]:
        """All pages, and the logarithm of each one's importance."""
        pages = list_pages(self._store, self._sequence)
        missing = int(pages.page_ids.max()) + 1 - self._log.numel() if pages.num_pages else 0
        if missing > 0:
            self._log = torch.cat([self._log, self._log.new_full((missing,), torch.nan)])
        return pages, self._log[pages.page_ids]

    def _read(self, pages: PageList, index: Tensor) -> Iterator[tuple[Tensor, PageView]]:
        """Some of the pages, those of a layout at a time."""
        config, tags = self._store.config, pages.tags[index]
        for tag in tags.unique().tolist():
            chosen = index[tags == tag]
            tier_id, mode = pool_of_tag(tag)
            layout = PageLayout(tier_id, config.tiers[tier_id], config.geometry.head_dim, mode)
            yield chosen, PageView(layout, self._store.allocator.gather(pages.page_ids[chosen]))
