# SPDX-License-Identifier: Apache-2.0
"""Rebalancing: old pages are demoted or dropped where that costs least, at once or beside steps."""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch
from torch import Tensor

from sphkv.cache.config import CacheConfig, ResidencyPlan
from sphkv.cache.notes import SequenceNotes
from sphkv.core.tiers import RUN_TOKENS
from sphkv.errors import BudgetError
from sphkv.retention.policy import BlockShape
from sphkv.retention.pricing import PageCosts
from sphkv.retention.solver import TierChoices, allocate_tiers
from sphkv.store.page_list import PageList
from sphkv.store.store import PageStore

_REBALANCE_ROUNDS = 12
# Beside one step so many pages are dropped, or those of a layer, and so many moved: a part has
# costs of its own, which many pages share.
_DROPS_AT_ONCE = 512
_MOVES_AT_ONCE = 2048


class Rebalancer:
    """Has the pages of one sequence meet a limit of bytes, by what its notes say they lose.

    ``meet`` does that at once. ``begin`` only takes it on, and every ``work`` does a bounded part.

    Attributes:
        seal_tier: Tier at which new states are sealed; pages below it were coded twice if they
            were demoted.
        num_rebalances: Times old pages were demoted or dropped.
        num_demotions: Times that pages of one more tier came so.
    """

    def __init__(
        self,
        config: CacheConfig,
        plan: ResidencyPlan,
        store: PageStore,
        sequence: int,
        *,
        notes: SequenceNotes,
        costs: PageCosts,
    ) -> None:
        """Nothing has to give way yet.

        Args:
            config: The cache; has a retention part.
            plan: Tiers and the seal tier.
            store: Pages and tails.
            sequence: Id in the store.
            notes: What is remembered of its runs.
            costs: Bytes of a page of every tier and shape.
        """
        assert config.retention is not None
        self._config = config
        self._retention = config.retention
        self._plan = plan
        self._store = store
        self._sequence = sequence
        self._notes = notes
        self._costs = costs
        self._tier_bytes = torch.tensor(
            costs.block_cost(plan.spec.page_tokens, BlockShape.RUNS), dtype=torch.int64
        )
        self.seal_tier = plan.tier
        self.num_rebalances = 0
        self.num_demotions = 0
        self._ahead: Generator[int, None, None] | None = None
        self._work_left = 0
        self._has_begun = False

    def used_bytes(self) -> int:
        """Bytes that count against the ceiling; a shared page counts for each that holds it.

        So does a free page; what all slabs lose to alignment is shared by the sequences.
        """
        store, others = self._store, len(self._store.sequences) - 1
        spare = store.allocator.alignment_bytes
        slack = store.slack_bytes - spare * others // (others + 1)
        return store.sequence_bytes(self._sequence) + slack + self._notes.num_bytes

    def meet(self, limit: int, before: int, reserve: Callable[[], int]) -> None:
        """Demote or drop pages where that costs least until the bytes in use meet a limit.

        Args:
            limit: Bytes that may be in use.
            before: Pages before this position may change.
            reserve: Bytes that will be needed besides, as things are.

        Raises:
            BudgetError: Nothing is left that may be dropped.
        """
        for _ in self._meet(limit, before, reserve, is_at_once=True):
            pass

    def begin(self, limit: int, before: int, reserve: Callable[[], int]) -> None:
        """Take on what ``meet`` would do, instead of what was begun before."""
        self._ahead = self._meet(limit, before, reserve, is_at_once=False)
        more = reserve()
        needed = self.used_bytes() + more - limit
        # to look is enough where there is room
        self._work_left = 1
        if needed > 0:
            self._work_left += self._steps_for(needed + self._spare(limit, more))
        self._has_begun = False

    def stop(self) -> None:
        """Leave what was begun as it is."""
        self._ahead = None

    @property
    def work_left(self) -> int:
        """Steps that what was begun should have.

        Parts that drop pages count twice: it may turn out that more must go.
        """
        return 0 if self._ahead is None else self._work_left

    def _spare(self, limit: int, reserve: int) -> int:
        """Bytes that are freed beyond need once pages must change, for the next ones to seal.

        Less than these take would lie idle: pages must change again then anyway.
        """
        spare = int(limit * self._plan.refresh_share)
        return spare if spare >= reserve else 0

    def _steps_for(self, num_bytes: int) -> int:
        """``work_left`` once pages are listed, of which so many bytes must go."""
        pages = num_bytes // int(self._tier_bytes[self._tier_bytes > 0].min())
        drops = min(len(self._config.full_layers), 1 + pages // _DROPS_AT_ONCE)
        return 1 + 2 * drops

    def work(self) -> bool:
        """Do a bounded part of what was begun; False if there was nothing to do."""
        if self._ahead is None:
            return False
        before = self.num_rebalances
        try:
            self._work_left = next(self._ahead)
            self._has_begun = True
            return True
        except StopIteration:
            # where there is room already, nothing was done
            self._has_begun |= self.num_rebalances > before
        except BudgetError:
            # nothing may go now; when the pages seal, more may
            pass
        self._ahead = None
        self._store.forget_page_list(self._sequence)
        return self._has_begun

    def _meet(
        self, limit: int, before: int, reserve: Callable[[], int], *, is_at_once: bool
    ) -> Generator[int, None, None]:
        """Parts of what ``meet`` does, whose arguments these are.

        Args:
            limit: Bytes that may be in use.
            before: Pages before this position may change.
            reserve: Bytes that will be needed besides, as things are.
            is_at_once: Drop and move all pages together, else a bounded number at a time.

        Yields:
            What ``work_left`` is then; the next part should wait for another step.

        Raises:
            BudgetError: Nothing is left that may be dropped.
        """
        more = reserve()
        if self.used_bytes() + more <= limit:
            return
        self.num_rebalances += 1
        # once pages must change, as many do as the next pages to seal will ask for
        target, spare = limit, self._spare(limit, more)
        for _ in range(_REBALANCE_ROUNDS):
            moved = self._store.allocator.num_moved
            pages = self._store.page_list(self._sequence)
            if not is_at_once:
                # a device lists pages while the host goes on; deciding waits for it
                yield self._steps_for(self.used_bytes() + reserve() - target + spare)
                if self._store.allocator.num_moved != moved:
                    # another sequence made room meanwhile
                    pages = self._store.page_list(self._sequence)
            pages = self._changeable(pages, before)
            if pages.num_pages == 0:
                break
            choices = self._choices(pages)
            held = choices.bytes_of(pages.tier_ids)
            needed = self.used_bytes() + reserve() - target
            # where little may change, room for later is not worth all of it
            needed += min(spare, max(0, held - needed) // 2)
            spare = 0
            tier_id = self._rechoose(choices, pages, max(0, held - needed))
            changed = (tier_id < pages.tier_ids).nonzero()[:, 0]
            yield from self._apply(pages.select(changed), tier_id[changed], limit, is_at_once)
            over = self.used_bytes() + reserve() - limit
            if over <= 0:
                break
            # tables and slabs take whole entries and pages: ask for that much more
            target -= over
        needed = self.used_bytes() + reserve()
        if needed > limit:
            raise BudgetError(needed, limit, limit, "what may not be dropped")

    def _changeable(self, pages: PageList, before: int) -> PageList:
        """Pages of full attention that begin before a position and hold nothing protected."""
        is_valid = (pages.first_runs * RUN_TOKENS < before) & ~pages.is_protected
        if len(self._config.full_layers) < self._config.geometry.num_layers:
            is_valid &= self._notes.places(pages) >= 0
        return pages.select(is_valid)

    def _choices(self, pages: PageList) -> TierChoices:
        """What each tier of each page would lose and cost.

        A page at the seal tier may go to any lower one where pages are demoted. A page below it
        was coded twice if it were demoted again, which gains next to nothing: it stays or goes. So
        does every page of a variant that knows one tier, and one that keeps everything drops none.
        """
        loss = self._notes.page_losses(pages)
        tier = torch.arange(loss.shape[1], device=loss.device)[None]
        own = pages.tier_ids[:, None]
        variant = self._retention.options.variant
        is_barred = (tier > 0) & (tier < own)
        if variant == "joint" and self._retention.demotes:
            is_barred &= own < self._plan.tiers.id_of(self.seal_tier)
        if variant != "quant":
            loss = torch.where(is_barred, torch.maximum(loss, loss[:, :1]), loss)
        floor = torch.ones_like(pages.tier_ids) if variant == "quant" else None
        return TierChoices(loss, self._page_bytes(pages), floor=floor, ceiling=pages.tier_ids)

    def _page_bytes(self, pages: PageList) -> Tensor:
        """Bytes of every tier, ``[tiers]``; ``[pages, tiers]`` if some pages are dense."""
        dense = self._plan.tiers.dense_id
        is_dense = pages.tier_ids == dense
        tier_bytes = self._tier_bytes.to(is_dense.device)
        if not bool(is_dense.any()):
            return tier_bytes
        # a dense page holds half the states of a coded one, but not half a page once it is coded
        cost = tier_bytes.repeat(pages.num_pages, 1)
        per_page = self._costs.page_bytes[BlockShape.RUNS][dense]
        cost[is_dense] = torch.cummax(cost[is_dense].clamp(max=per_page), 1).values
        return cost

    def _rechoose(self, choices: TierChoices, pages: PageList, budget: int) -> Tensor:
        """Tier of every page under a number of bytes.

        Where all heads are held to the same tiers, pages of equal rank in their heads, by tier and
        then by loss, are one unit.
        """
        if not self._retention.options.uniform_heads:
            return allocate_tiers(choices, budget).tier_id
        heads = pages.layer_ids * self._config.geometry.num_kv_heads + pages.head_ids
        order = choices.distortion[:, 0].argsort(descending=True, stable=True)
        for key in (-pages.tier_ids, heads):
            order = order[key[order].argsort(stable=True)]
        counts = heads.bincount()
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device=order.device) - first[heads[order]]
        shape = (int(rank.max()) + 1, choices.distortion.shape[1])
        loss = torch.zeros(shape, device=rank.device)
        loss.index_add_(0, rank, choices.distortion.float())
        cost = torch.zeros(shape, dtype=torch.int64, device=rank.device)
        cost.index_add_(0, rank, choices.cost.expand(pages.num_pages, -1))
        found = allocate_tiers(TierChoices(loss, cost), budget).tier_id[rank]
        return torch.minimum(found, pages.tier_ids)

    def _apply(
        self, pages: PageList, tier_id: Tensor, limit: int, is_at_once: bool
    ) -> Generator[int, None, None]:
        """Demote pages, or drop them, and give the places they leave back.

        A demoted page takes its new place before its old slab is empty and goes, so only so many
        are demoted at once as there is room for.

        Args:
            pages: Pages to change.
            tier_id: ``[pages]`` int64 tier of each, below its own.
            limit: Bytes that may be in use at any moment.
            is_at_once: Drop and move all pages together, else a bounded number at a time.

        Yields:
            See ``_meet``.
        """
        limit = max(limit, self.used_bytes())
        # one wait for a device; from here on the host knows what to do
        told = torch.stack([pages.layer_ids, pages.page_ids, tier_id.long()]).cpu()
        layer_ids, tier_id = told[0], told[2]
        held = self._store.hold(told[1])
        # drops first: what is demoted takes new places
        gone = (tier_id == self._plan.tiers.drop_id).nonzero()[:, 0]
        parts = [gone] if is_at_once else _split_layers(gone, layer_ids)
        moves = None if is_at_once else _MOVES_AT_ONCE
        # deciding is enough beside one step
        for left, part in zip(range(len(parts), 0, -1), parts, strict=True):
            yield left + len(parts)
            if len(part):
                self._store.drop_listed(self._sequence, layer_ids[part], held.page_ids[part])
                # places that stay free count for other sequences too
                self._store.compact(moves)
        spare = self._store.config.max_slab_pages - 1
        for tier in sorted(set(tier_id[tier_id > self._plan.tiers.drop_id].tolist())):
            self.num_demotions += 1
            left_ids = (tier_id == tier).nonzero()[:, 0]
            while len(left_ids):
                room = (limit - self.used_bytes()) // int(self._tier_bytes[tier]) - spare
                if room < len(left_ids):
                    self._store.compact()
                    room = (limit - self.used_bytes()) // int(self._tier_bytes[tier]) - spare
                now, left_ids = left_ids[: max(1, room)], left_ids[max(1, room) :]
                ids = held.page_ids[now]
                self._store.demote_listed(self._sequence, layer_ids[now], ids, tier)
            self._store.compact()


def _split_layers(index: Tensor, layer_ids: Tensor) -> list[Tensor]:
    """``index [pages]`` of pages listed layer by layer, cut where layers end and parts are full."""
    _, sizes = layer_ids[index].unique_consecutive(return_counts=True)
    parts = [0]
    for size in sizes.tolist():
        if parts[-1] >= _DROPS_AT_ONCE:
            parts.append(0)
        parts[-1] += size
    return list(index.split(parts))
