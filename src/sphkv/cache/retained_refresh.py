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
from sphkv.cache.retained_index import PageIndex
from sphkv.cache.retained_notes import EXPECTED_DISTANCE
from sphkv.cache.retained_pages import PageList
from sphkv.cache.retained_probe import DriftSample, probe_tail
from sphkv.core.tiers import RUN_TOKENS
from sphkv.errors import BudgetError
from sphkv.retention.allocate import TierChoices, allocate_tiers, best_at_price
from sphkv.retention.features import squared_distance
from sphkv.retention.gate import StabilityGate, danger_score
from sphkv.retention.notes import LayerNotes, QueryStatistics, run_importance
from sphkv.store.store import PageStore

# Bytes freed beyond need, so that a sequence is not rebalanced at every page.
_SPARE_SHARE = 0.01
_REBALANCE_ROUNDS = 12
_MOST_SAMPLES = 256


class Refresher:
    """Tiers for appended states, and the budget at every step.

    Attributes:
        notes: What is remembered of each layer.
        index: Importance of every page.
        fresh_from: Position from which dense pages have no tier yet.
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
        self.notes: list[LayerNotes] = []
        self._note_bytes = 0
        self.index = PageIndex(store, sequence)
        self._dense_page_bytes = config.dense_page_bytes()
        self._dense_id = config.tiers.dense_id
        self._tier_bytes = torch.tensor(config.page_tier_bytes(), dtype=torch.int64)
        self.fresh_from = 0
        self.gate = StabilityGate(config.gate) if config.gate is not None else None
        self.price = 0.0
        self.drift = 0.0
        self.num_rebalances = 0
        self.drifts: deque[DriftSample] = deque(maxlen=_MOST_SAMPLES)
        self._num_steps = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the controller's own tensors."""
        return self._note_bytes + self.index.num_bytes

    def usable(self, limit: int) -> int:
        """Bytes of a limit that may be spent now; the gate holds some back while it is off."""
        if self.gate is None or self.gate.is_on:
            return limit
        return limit - int(limit * self.gate.options.reserve_share)

    def learn(self, notes: LayerNotes) -> None:
        """Keep the notes of the next layer of the prompt; they will grow with the sequence."""
        self.notes.append(replace(notes))
        self._count_notes()

    def _count_notes(self) -> None:
        self._note_bytes = sum(notes.num_bytes for notes in self.notes)

    def begin(self, fresh_from: int, price: float, loss: float) -> None:
        """The prompt is stored; pages from ``fresh_from`` on are dense and not decided yet."""
        self.fresh_from = fresh_from
        self.price = price
        # KL is half the variance of a small change of the logits
        self.drift = (2 * loss) ** 0.5

    def observe_margin(self, margin: float) -> bool:
        """Tell the gate the gap of the two best tokens of a step; says whether it is on now.

        Args:
            margin: First minus second logit of the language-model head.
        """
        return self.gate is not None and self.gate.observe(danger_score(self.drift, margin))

    def observe_logits(self, row: Tensor) -> bool:
        """Tell the gate how close a decision is.

        Args:
            row: ``[vocabulary]`` logits or log-probabilities of the step.
        """
        if self.gate is None:
            return False
        first, second = row.float().topk(2).values.tolist()
        return self.observe_margin(first - second)

    def settle(self) -> None:
        """Decide about full pages of new states, then meet the budget.

        Raises:
            BudgetError: Nothing is left that may be dropped.
        """
        page = self._config.page_tokens
        tail = self._store.tail(self._sequence, 0).first_position
        while tail - self.fresh_from >= page:
            self._code_fresh(self.fresh_from, self.fresh_from + page)
            self.fresh_from += page
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
        layer = self._num_steps // every % len(self.notes)
        place = (self._sequence, layer)
        sample = probe_tail(self._config, self._store, place, self.notes[layer], 1)
        if sample is not None:
            self.drifts.append(sample)

    def _limit(self) -> int:
        tokens = self._store.num_tokens(self._sequence)
        return self.usable(self._config.budget.resolve(self._config.geometry, tokens))

    def _needed(self) -> int:
        """Resident bytes once the next dense page of every head is sealed."""
        tail = self._store.tail(self._sequence, 0).first_position
        missing = self._config.page_tokens // RUN_TOKENS - 1
        missing -= (tail - self.fresh_from) // RUN_TOKENS
        return self._store.live_bytes + self.num_bytes + missing * self._dense_page_bytes

    def _code_fresh(self, first: int, stop: int) -> None:
        """Give one page of new states of every head a tier by the price of a byte."""
        pages, keys, values = self.index.fresh(first, stop)
        importance = self._foretell(keys, values, first)
        noted = run_importance(importance.flatten(0, 1)).unflatten(0, importance.shape[:2])
        noted = noted[..., max(0, self.notes[0].num_runs - first // RUN_TOKENS) :]
        for notes, runs in zip(self.notes, noted, strict=True):
            notes.extend(runs)
        self._count_notes()
        ratio = torch.stack([notes.tier_ratio for notes in self.notes])
        loss = (importance.sum(2)[..., None] * ratio).flatten(0, 1)
        loss[:, self._dense_id] = 0
        chosen = best_at_price(TierChoices(loss, self._tier_bytes), self.price)
        if self.gate is not None and self.gate.is_on:
            # dense witnesses of a brittle stretch would outlast it; one tier up is enough
            chosen = chosen + 1
        chosen = chosen.clamp(max=self._dense_id - 1).view(importance.shape[:2])
        self._apply(pages, chosen[pages.layer_ids, pages.head_ids])

    def _foretell(self, keys: Tensor, values: Tensor, first: int) -> Tensor:
        """Importance ``[layers, heads, tokens]`` of new states, from the heads' mean queries."""
        config, tokens = self._config, keys.shape[2]
        found = torch.empty(keys.shape[:3])
        positions = torch.arange(first, first + tokens)
        for rope in dict.fromkeys(config.ropes):
            alike = [layer for layer, other in enumerate(config.ropes) if other == rope]
            queries = QueryStatistics.join([self.notes[layer].queries for layer in alike])
            planes = rope.unrotate(rope.to_planes(keys[alike].flatten(0, 1).float()), positions)
            expected = queries.log_weight(
                planes,
                torch.full((tokens,), EXPECTED_DISTANCE),
                rope.frequencies(),
                scale=config.geometry.head_dim**-0.5,
            )
            apart = squared_distance(values[alike].flatten(0, 1), queries.output.float())
            gain = torch.cat([self.notes[layer].gain for layer in alike])
            weight = expected.clamp(max=0).mul(2).exp()
            found[alike] = (gain[:, None] * weight * apart).view(len(alike), -1, tokens)
        return found

    def _apply(self, pages: PageList, tier_id: Tensor) -> None:
        """Demote pages, or drop them."""
        self.index.forget(pages.page_ids)
        # pages are listed layer by layer
        counts = pages.layer_ids.bincount(minlength=len(self.notes)).tolist()
        parts = zip(pages.page_ids.split(counts), tier_id.split(counts), strict=True)
        for layer, (page_ids, tiers) in enumerate(parts):
            for tier in sorted(set(tiers.tolist())):
                self._store.demote(self._sequence, layer, page_ids[tiers == tier], tier)

    def _rebalance(self, limit: int) -> None:
        """Demote or drop pages where that costs least until the budget is met."""
        self.num_rebalances += 1
        target = limit - int(_SPARE_SHARE * limit)
        for _ in range(_REBALANCE_ROUNDS):
            pages, importance = self.index.decided(self.notes, self.fresh_from)
            if pages.num_pages == 0:
                break
            choices = self._choices(pages, importance)
            held = choices.bytes_of(pages.tier_ids)
            room = max(0, held - (self._needed() - target))
            found = allocate_tiers(choices, room)
            self.price = max(self.price, found.price)
            changed = (found.tier_id < pages.tier_ids).nonzero()[:, 0]
            self._apply(pages.select(changed), found.tier_id[changed])
            over = self._needed() - limit
            if over <= 0:
                return
            # pages that went leave free places in their slabs; ask for that much more
            target -= over
        over = self._needed() - limit
        if over > 0:
            raise BudgetError(over, 0, limit, "what must be kept")

    def _choices(self, pages: PageList, importance: Tensor) -> TierChoices:
        """What each tier would lose and cost; a page's own tier is what it has lost already."""
        ratio = torch.stack([notes.tier_ratio for notes in self.notes])
        loss = importance[:, None] * ratio[pages.layer_ids, pages.head_ids]
        loss[:, self._dense_id] = 0
        return TierChoices(loss, self._tier_bytes, ceiling=pages.tier_ids)

    def crop(self, num_tokens: int) -> None:
        """Forget what was noted about tokens from ``num_tokens`` on, once the store is cropped."""
        for notes in self.notes:
            notes.crop(num_tokens)
        self._count_notes()
        self.index.clear()
        # what was sealed so far may be cut anywhere; whole pages are sealed from here on
        self.fresh_from = self._store.tail(self._sequence, 0).first_position
