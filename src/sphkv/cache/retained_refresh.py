# SPDX-License-Identifier: Apache-2.0
"""Keeping a growing sequence in its budget: new pages get tiers, old ones are demoted or dropped.

Nothing is ever written upward: a page's dense source is gone once it is coded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import torch
from torch import Tensor

from sphkv.cache.retained_config import RetainedConfig
from sphkv.cache.retained_measure import unrotated_planes
from sphkv.cache.retained_notes import EXPECTED_DISTANCE, squared_distance
from sphkv.cache.retained_pages import PageList, list_pages
from sphkv.cache.retained_probe import DriftSample, probe_tail
from sphkv.core.errors import BudgetExceeded
from sphkv.core.tiers import RUN_TOKENS
from sphkv.retention.allocate import TierChoices, allocate_tiers, best_at_price
from sphkv.retention.gate import StabilityGate, danger_score
from sphkv.retention.notes import LayerNotes, run_importance
from sphkv.store.store import PageStore

# Bytes freed beyond need, so that a sequence is not rebalanced at every page.
_SPARE_SHARE = 0.01
_REBALANCE_ROUNDS = 12
_MOST_SAMPLES = 256


class Refresher:
    """Tiers for appended states, and the budget at every step.

    Attributes:
        gate: The stability gate; None if it is switched off.
        price: Loss a byte was worth at the last decision.
        drift: Foretold deviation of the model's logits, from the loss of the decision.
        num_rebalances: Times old pages were demoted or dropped.
        drifts: Newest samples of the live probe.
    """

    def __init__(self, config: RetainedConfig, store: PageStore, sequence: int) -> None:
        self._config = config
        self._store = store
        self._sequence = sequence
        self._notes: list[LayerNotes] = []
        self._fresh_from = 0
        self.gate = StabilityGate(config.gate) if config.gate is not None else None
        self.price = 0.0
        self.drift = 0.0
        self.num_rebalances = 0
        self.drifts: deque[DriftSample] = deque(maxlen=_MOST_SAMPLES)
        self._num_steps = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the controller's own tensors."""
        return sum(notes.num_bytes for notes in self._notes)

    def usable(self, limit: int) -> int:
        """Bytes of a limit that may be spent now; the gate holds some back while it is off."""
        if self.gate is None or self.gate.is_on:
            return limit
        return limit - int(limit * self.gate.options.reserve_share)

    def learn(self, notes: LayerNotes) -> None:
        """Keep the notes of the next layer of the prompt; they will grow with the sequence."""
        self._notes.append(replace(notes))

    def begin(self, fresh_from: int, price: float, loss: float) -> None:
        """The prompt is stored; pages from ``fresh_from`` on are dense and not decided yet."""
        self._fresh_from = fresh_from
        self.price = price
        # KL is half the variance of a small change of the logits
        self.drift = (2 * loss) ** 0.5

    def observe_margin(self, margin: float) -> bool:
        """Tell the gate the gap of the two best tokens of a step; says whether it is on now.

        Args:
            margin: First minus second logit of the language-model head.
        """
        return self.gate is not None and self.gate.observe(danger_score(self.drift, margin))

    def settle(self) -> None:
        """Decide about full pages of new states, then meet the budget.

        Raises:
            BudgetExceeded: Nothing is left that may be dropped.
        """
        page = self._config.page_tokens
        tail = self._store.tail(self._sequence, 0).first_position
        while tail - self._fresh_from >= page:
            for layer in range(self._config.geometry.num_layers):
                self._code_fresh(layer, self._fresh_from, self._fresh_from + page)
            self._fresh_from += page
        limit = self._limit()
        if self._needed() > limit:
            self._rebalance(limit)
        self._probe()

    def _probe(self) -> None:
        """Every so many steps, note how far coding would move the logits of one layer's tail."""
        self._num_steps += 1
        every = 0 if self.gate is None else self.gate.options.probe_every
        if every == 0 or self._num_steps % every:
            return
        layer = self._num_steps // every % len(self._notes)
        place = (self._sequence, layer)
        sample = probe_tail(self._config, self._store, place, self._notes[layer], 1)
        if sample is not None:
            self.drifts.append(sample)

    def _limit(self) -> int:
        tokens = self._store.num_tokens(self._sequence)
        return self.usable(self._config.budget.resolve(self._config.geometry, tokens))

    def _needed(self) -> int:
        """Resident bytes once the next dense page of every head is sealed."""
        tail = self._store.tail(self._sequence, 0).first_position
        missing = self._config.page_tokens // RUN_TOKENS - 1
        missing -= (tail - self._fresh_from) // RUN_TOKENS
        return self._store.live_bytes + self.num_bytes + missing * self._config.dense_page_bytes()

    def _code_fresh(self, layer: int, first: int, stop: int) -> None:
        """Give one page of new states of every head a tier by the price of a byte."""
        config, notes = self._config, self._notes[layer]
        pages = list_pages(self._store, self._sequence, layer, tier_id=config.tiers.dense_id)
        pages = pages.select(pages.within(first, stop))
        keys, values = pages.dense_states(self._store)
        heads = config.geometry.num_kv_heads
        keys, values = (x.reshape(heads, stop - first, -1) for x in (keys, values))
        expected = notes.queries.log_weight(
            unrotated_planes(config, layer, keys, torch.arange(first, stop)),
            torch.full((stop - first,), EXPECTED_DISTANCE),
            config.ropes[layer].frequencies(),
            scale=config.geometry.head_dim**-0.5,
        )
        apart = squared_distance(values, notes.queries.output.float())
        importance = notes.gain[:, None] * expected.clamp(max=0).mul(2).exp() * apart
        runs = notes.log_importance.shape[1]
        noted = run_importance(importance)
        notes.extend(noted[:, max(0, runs - first // RUN_TOKENS) :])
        loss = importance.sum(1)[:, None] * notes.tier_ratio
        loss[:, config.tiers.dense_id] = 0
        cost = torch.tensor(config.page_tier_bytes(), dtype=torch.int64)
        chosen = best_at_price(TierChoices(loss, cost), self.price)
        if self.gate is not None and self.gate.is_on:
            # dense witnesses of a brittle stretch would outlast it; one tier up is enough
            chosen = (chosen + 1).clamp(max=config.tiers.dense_id - 1)
        chosen = chosen.clamp(max=config.tiers.dense_id - 1)
        self._apply(layer, pages, chosen[pages.head_ids])

    def _apply(self, layer: int, pages: PageList, tier_id: Tensor) -> None:
        for tier in tier_id.unique().tolist():
            ids = pages.page_ids[tier_id == tier]
            self._store.demote(self._sequence, layer, ids, tier)

    def _rebalance(self, limit: int) -> None:
        """Demote or drop pages where that costs least until the budget is met."""
        self.num_rebalances += 1
        target = limit - int(_SPARE_SHARE * limit)
        for _ in range(_REBALANCE_ROUNDS):
            listed = [self._candidates(layer) for layer in range(len(self._notes))]
            pages = PageList.join([pages for pages, _ in listed])
            if pages.num_pages == 0:
                break
            choices = self._choices(pages, torch.cat([loss for _, loss in listed]))
            held = choices.bytes_of(pages.tier_ids)
            room = max(0, held - (self._needed() - target))
            found = allocate_tiers(choices, room)
            self.price = max(self.price, found.price)
            for layer in range(len(self._notes)):
                changed = (pages.layer_ids == layer) & (found.tier_id < pages.tier_ids)
                self._apply(layer, pages.select(changed), found.tier_id[changed])
            over = self._needed() - limit
            if over <= 0:
                return
            # pages that went leave free places in their slabs; ask for that much more
            target -= over
        over = self._needed() - limit
        if over > 0:
            raise BudgetExceeded(over, 0, limit)

    def _candidates(self, layer: int) -> tuple[PageList, Tensor]:
        """Pages that may change, and what each tier would lose."""
        notes = self._notes[layer]
        pages = list_pages(self._store, self._sequence, layer)
        fresh = (pages.tier_ids == self._config.tiers.dense_id) & (
            pages.first_positions >= self._fresh_from
        )
        pages = pages.select(~pages.has_protected & ~fresh)
        importance = notes.importance(pages.head_ids, pages.positions, pages.live)
        loss = importance[:, None] * notes.tier_ratio[pages.head_ids]
        loss[:, self._config.tiers.dense_id] = 0
        # a unit's own tier is what it has lost already
        return pages, loss

    def _choices(self, pages: PageList, loss: Tensor) -> TierChoices:
        cost = torch.tensor(self._config.page_tier_bytes(), dtype=torch.int64)
        return TierChoices(loss, cost.expand(pages.num_pages, -1), ceiling=pages.tier_ids)

    def crop(self, num_tokens: int) -> None:
        """Forget what was noted about tokens from ``num_tokens`` on, once the store is cropped."""
        for notes in self._notes:
            notes.crop(num_tokens)
        # what was sealed so far may be cut anywhere; whole pages are sealed from here on
        self._fresh_from = self._store.tail(self._sequence, 0).first_position
