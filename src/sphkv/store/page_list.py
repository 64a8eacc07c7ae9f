# SPDX-License-Identifier: Apache-2.0
"""The pages of a sequence as one list that a policy can choose from.

On the host no page is read twice. On a GPU all are read anew, in a few launches, and the list stays
there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from sphkv.core.devices import upload
from sphkv.core.tiers import RUN_TOKENS
from sphkv.store.layout import PageFrames, PageLayout, PageView
from sphkv.store.moves import PageMoves
from sphkv.store.paging import PositionMode, live_mask
from sphkv.store.pool import PagePool
from sphkv.store.sequence import PointerTable, pool_of_tag, tier_ids_of

# Pages copied at once while they are read: bounds what a first look at a long prompt takes.
_READ_PAGES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class PageList:
    """Pages with what a policy must know of them; all tensors are on one device.

    Attributes:
        layer_ids: ``[pages]`` int64.
        head_ids: ``[pages]`` int64.
        page_ids: ``[pages]`` int64 ids in the store.
        tags: ``[pages]`` int64, see ``sphkv.store.sequence.page_tag``.
        tier_ids: ``[pages]`` int64.
        counts: ``[pages]`` int64 live states.
        runs: ``[pages, most]`` int32 numbers of the runs of 16 positions that a page holds, in
            its order, -1 past the last one; ``most`` is that of the largest page of all tiers. A
            run that a crop left out of step counts as the one it begins in.
        is_protected: ``[pages]`` bool, true if a page holds a protected state.
    """

    layer_ids: Tensor
    head_ids: Tensor
    page_ids: Tensor
    tags: Tensor
    tier_ids: Tensor
    counts: Tensor
    runs: Tensor
    is_protected: Tensor

    @property
    def num_pages(self) -> int:
        """Pages listed."""
        return self.page_ids.shape[0]

    @property
    def first_runs(self) -> Tensor:
        """``[pages]`` int32 number of the first run of each page."""
        return self.runs[:, 0]

    def select(self, index: Tensor) -> "PageList":
        """The pages that a mask or an index names."""
        if index.dtype == torch.bool:
            # asked once, where a device must be waited for
            index = index.nonzero()[:, 0]
        return PageList(*(getattr(self, field.name)[index] for field in fields(self)))


def list_on_device(pool: PagePool, tables: Sequence[PointerTable]) -> PageList:
    """Every page of every layer, as ``PageIndex.look`` has them, read and listed where pages are.

    Args:
        pool: Its allocator copies pages of many slabs at once.
        tables: Pointer table of each layer.

    Raises:
        ValueError: A page holds single states instead of runs of 16.
    """
    entries = [table.entries() for table in tables]
    page_ids, tags = (np.concatenate(part) for part in zip(*entries, strict=True))
    per_head = torch.stack([table.num_pages for table in tables])
    kinds = sorted({tag for table in tables for tag in table.present_tags()})
    places = [np.flatnonzero(tags == tag) for tag in kinds]
    every = np.concatenate([page_ids, tags, per_head.numpy().ravel(), *places])
    told = upload(every, pool.device)
    sizes = [len(page_ids), len(tags), per_head.numel(), *map(len, places)]
    ids, all_tags, counts_of, *rows = told.split(sizes)
    most = max(tier.page_tokens for tier in pool.config.tiers) // RUN_TOKENS
    runs = torch.full((len(page_ids), most), -1, dtype=torch.int32, device=pool.device)
    counts, is_protected = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for tag, place, row in zip(kinds, places, rows, strict=True):
        layout = pool.layout(pool_of_tag(tag))
        if layout.position_mode is PositionMode.TOKENS:
            raise ValueError(f"pages of tier {layout.tier.name!r} hold states that are no runs")
        of_tag = torch.from_numpy(page_ids[place])
        frames = PageFrames(layout, pool.allocator.gather_frames(of_tag))
        own, starts = frames.counts(), frames.run_starts()
        is_used = live_mask(-(-own // RUN_TOKENS), starts.shape[1])
        own_runs = torch.where(is_used, starts // RUN_TOKENS, -1).to(torch.int32)
        runs[:, : starts.shape[1]].index_copy_(0, row, own_runs)
        counts.index_copy_(0, row, own)
        is_protected.index_copy_(0, row, frames.is_protected())
    heads = torch.arange(per_head.numel(), device=pool.device)
    head_ids = heads.repeat_interleave(counts_of, output_size=len(page_ids))
    num_heads = per_head.shape[1]
    return PageList(
        head_ids // num_heads,
        head_ids % num_heads,
        ids,
        all_tags,
        tier_ids_of(all_tags),
        counts,
        runs,
        is_protected,
    )


class PageIndex:
    """What is known of the pages of one sequence, by page id.

    Heads and tags stand in the pointer tables, which also know what they gained since the last
    look. Counts, runs and protection are read from such new pages and kept here.
    """

    def __init__(self, pool: PagePool, tables: Sequence[PointerTable]) -> None:
        """Nothing was read yet."""
        self._pool = pool
        self._tables = tables
        self._most = max(tier.page_tokens for tier in pool.config.tiers) // RUN_TOKENS
        # count, protection, then runs of each page
        self._known = torch.empty((0, 2 + self._most), dtype=torch.int32)
        for table in tables:
            table.forget_marks()

    @property
    def num_bytes(self) -> int:
        """Bytes of the index, and of the marks it leaves in the tables."""
        return self._known.nbytes + sum(table.mark_bytes for table in self._tables)

    def look(self) -> PageList:
        """Every page of every layer, layer by layer, then head by head.

        Raises:
            ValueError: A new page holds single states instead of runs of 16.
        """
        found = [table.listed() for table in self._tables]
        page_ids, tags, is_new = (torch.cat(part) for part in zip(*found, strict=True))
        self._reserve(page_ids)
        self._read(page_ids[is_new], tags[is_new])
        for table in self._tables:
            table.mark()
        counts = torch.stack([table.num_pages for table in self._tables])
        layer_ids, head_ids = torch.ones_like(counts).nonzero(as_tuple=True)
        known = self._known[page_ids]
        return PageList(
            layer_ids.repeat_interleave(counts.flatten()),
            head_ids.repeat_interleave(counts.flatten()),
            page_ids,
            tags,
            tier_ids_of(tags),
            known[:, 0].to(torch.int64),
            known[:, 2:],
            known[:, 1].to(torch.bool),
        )

    def remap(self, moves: PageMoves) -> None:
        """Follow pages that changed their ids."""
        mine = moves.old_ids < len(self._known)
        self._reserve(moves.new_ids)
        self._known[moves.new_ids[mine]] = self._known[moves.old_ids[mine]]

    def _reserve(self, page_ids: Tensor) -> None:
        missing = int(page_ids.max()) + 1 - len(self._known) if len(page_ids) else 0
        if missing > 0:
            fresh = self._known.new_zeros((missing, self._known.shape[1]))
            self._known = torch.cat([self._known, fresh])

    def _read(self, page_ids: Tensor, tags: Tensor) -> None:
        """Note what new pages hold."""
        for tag in tags.unique().tolist():
            layout = self._pool.layout(pool_of_tag(tag))
            for ids in page_ids[tags == tag].split(_READ_PAGES):
                if layout.position_mode is PositionMode.TOKENS:
                    counts, starts, is_protected = self._read_tokens(layout, ids)
                else:
                    frames = PageFrames(layout, self._pool.allocator.gather_frames(ids).cpu())
                    counts, starts = frames.counts(), frames.run_starts()
                    is_protected = frames.is_protected()
                is_used = live_mask(-(-counts // RUN_TOKENS), starts.shape[1])
                runs = self._known.new_full((len(ids), self._most), -1)
                runs[:, : starts.shape[1]] = torch.where(is_used, starts // RUN_TOKENS, -1)
                parts = (counts[:, None], is_protected[:, None], runs)
                self._known[ids] = torch.cat([part.to(torch.int32) for part in parts], 1)

    def _read_tokens(self, layout: PageLayout, page_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Counts, first positions of runs and protection of pages with a position per state."""
        rows = PageView(layout, self._pool.allocator.gather(page_ids)).rows().to("cpu")
        starts = rows.positions[:, ::RUN_TOKENS]
        inside = torch.arange(layout.page_tokens) % RUN_TOKENS
        follows = rows.positions == starts.repeat_interleave(RUN_TOKENS, 1) + inside
        if not bool((follows | ~rows.live()).all()):
            raise ValueError(f"pages {page_ids.tolist()} hold states that are no runs of 16")
        return rows.counts, starts, rows.flags.any(1)
