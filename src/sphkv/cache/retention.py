# SPDX-License-Identifier: Apache-2.0
"""Residency under a controller: a contract about the prompt, then the ceiling at every step.

New states are dense in the tail, then coded at the seal tier, and from then on priced like all
others by the loss that made the prompt's decision. Nothing is ever written upward: a page's dense
source is gone once it is coded. So what a stability gate can do is to spare the newest pages, to
spend what it held back instead of demoting, and to seal what is still dense at a finer tier.

Room is made when pages must seal and there is none, or ahead of that: ``plan_ahead`` begins once
pages have sealed, and ``work_ahead`` does a bounded part of it beside every step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from sphkv.cache.config import CacheConfig, ResidencyPlan
from sphkv.cache.plan import Ceiling
from sphkv.cache.residency import window_start
from sphkv.codec.states import SphericalCodec
from sphkv.core.contract import WriteContract
from sphkv.core.tiers import RUN_TOKENS
from sphkv.errors import BudgetError
from sphkv.retention.controller import RetentionController
from sphkv.retention.gate import StabilityGate, danger_score, tier_bounds
from sphkv.retention.measure import MeasureConfig, PromptWork, measure_layer, paged_tokens
from sphkv.retention.notes import RunNotes
from sphkv.retention.policy import BlockShape
from sphkv.retention.pricing import LayerPricer, PageCosts
from sphkv.retention.solver import TierChoices, allocate_tiers
from sphkv.store.allocator import slab_bytes
from sphkv.store.forecast import contract_bytes
from sphkv.store.layout import PageLayout
from sphkv.store.page_list import PageList
from sphkv.store.paging import PositionMode
from sphkv.store.sequence import PointerTable
from sphkv.store.store import PageStore

Found = TypeVar("Found")

_REBALANCE_ROUNDS = 12
# Beside one step, pages of so many layers are dropped, and so many pages moved.
_LAYERS_AT_ONCE = 1
_MOVES_AT_ONCE = 2048
# So many rows seal beside one step at least: most of the host's work is the same for one or more.
_ROWS_AT_ONCE = 8
# Runs a prompt needs so that there is one to decide about between sinks and the newest.
_LEAST_RUNS = 3
_MODE_OF_SHAPE = {
    BlockShape.WHOLE: PositionMode.CONTIGUOUS,
    BlockShape.RUNS: PositionMode.RUNS,
    BlockShape.TOKENS: PositionMode.TOKENS,
}


class RetentionResidency:
    """Keeps each state of a sequence at the tier its budget affords, or not at all.

    Attributes:
        gate: The stability gate; None if it is switched off.
        drift: Predicted move of the model's logits by what is coded and gone; follows the pages
            only where there is a gate.
        num_rebalances: Times old pages were demoted or dropped.
        num_escalated: Tails of layers that the gate had sealed at a finer tier.
    """

    kind = "retention"
    waits_for_pass = True

    def __init__(
        self,
        config: CacheConfig,
        plan: ResidencyPlan,
        store: PageStore,
        sequence: int,
        ceiling: Ceiling,
        *,
        work: PromptWork | None = None,
        on_contract: Callable[[WriteContract], None] | None = None,
    ) -> None:
        """Take over an empty sequence of a store.

        Args:
            config: The cache; has a retention part.
            plan: Tiers and the seal tier.
            store: Pages and tails.
            sequence: Id in the store.
            ceiling: Bytes the sequence may keep resident.
            work: What sequences of the same prompt share whose configs differ only in budget,
                gate and options; None shares nothing. For comparing them.
            on_contract: Told the decision about the prompt, which is not kept: it would take more
                bytes than a tight budget has.
        """
        assert config.retention is not None
        self._config = config
        self._retention = config.retention
        self._plan = plan
        self._store = store
        self._sequence = sequence
        self._ceiling = ceiling
        self._work = work
        self._costs = page_costs(config, plan, store)
        self._tier_bytes = torch.tensor(
            self._costs.block_cost(plan.spec.page_tokens, BlockShape.RUNS), dtype=torch.int64
        )
        gate = config.retention.gate
        self.gate = StabilityGate(gate) if gate is not None else None
        self._on_contract = on_contract
        self._is_decided = False
        self._seal_tier = plan.tier
        # of the layers of a prompt as they come, then of all of them in one
        self._layer_notes: list[RunNotes] = []
        self._notes: RunNotes | None = None
        # ages of runs that follow, to be noted when somebody asks for notes
        self._unnoted: list[int] = []
        self._ahead: Generator[int, None, None] | None = None
        self._work_left = 0
        self.drift = 0.0
        self.num_rebalances = 0
        self.num_escalated = 0
        self._num_restarts = self._num_demotions = 0
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._controller = RetentionController(self._costs, self._retention.options)
        self._pricer: LayerPricer | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the controller's own tensors, with all runs noted."""
        held = self._layer_notes if self._notes is None else [self._notes]
        missing = len(self._unnoted) * self._run_note_bytes()
        return sum(notes.num_bytes for notes in held) + missing

    @property
    def notes(self) -> list[RunNotes]:
        """What is remembered of each layer with full attention."""
        notes = self._all_notes()
        if notes is None:
            return self._layer_notes
        return notes.split(self._config.geometry.num_kv_heads)

    def _all_notes(self) -> RunNotes | None:
        """Notes of all layers, joined, once those are written down that were put off."""
        if self._notes is not None and self._unnoted:
            ages, self._unnoted = torch.tensor(self._unnoted), []
            self._notes.extend_at(ages, scale=self._retention.new_run_scale)
        return self._notes

    def _keep_notes(self, notes: RunNotes | None) -> None:
        """Remember notes of all layers, joined, where pages are listed."""
        device = self._store.config.device if self._store.allocator.has_copier else "cpu"
        self._notes = None if notes is None else notes.to(device)
        self._layer_notes, self._unnoted = [], []

    def take_prompt(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Take a layer of the prompt; the last one triggers the decision about all.

        Raises:
            BudgetError: The parts that must stay dense do not fit the budget.
            ValueError: A layer comes out of order.
        """
        if layer != len(self._pending) or self._is_decided:
            raise ValueError(f"layer {layer} is out of order: {len(self._pending)} came before")
        tokens = keys.shape[1]
        self._pending.append((keys, values))
        if self._config.windows[layer] is None and tokens >= _LEAST_RUNS * RUN_TOKENS:
            self._price(layer, query, keys, values)
        if layer == self._config.geometry.num_layers - 1:
            self._write(tokens)

    def _price(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Measure, price and note a layer where its states are, without waiting for them."""
        codec, config = self._codec(), self._measure_config()
        found = self._once(
            ("measured", layer), lambda: measure_layer(config, codec, layer, (query, keys, values))
        )
        pricer = self._pricer = self._pricer or self._start(keys.shape[1])
        priced = self._once(("priced", pricer.key, layer), lambda: pricer.price(found))

        def note() -> RunNotes:
            features = found.features
            bound = tier_bounds(
                query,
                features.radius,
                features.mass,
                found.errors,
                scale=self._config.geometry.head_dim**-0.5,
            )
            losses = pricer.run_losses(found) if priced.run_loss is None else priced.run_loss
            paged = paged_tokens(keys.shape[1])
            return RunNotes.of_prompt(losses, priced, bound, num_tokens=paged)

        self._layer_notes.append(self._once(("notes", pricer.key, layer), note))
        self._controller.add_layer(replace(priced, run_loss=None))

    def _once(self, key: Hashable, find: Callable[[], Found]) -> Found:
        return find() if self._work is None else self._work.once(key, find)

    def _codec(self) -> SphericalCodec:
        codec = self._store.codec(self._sequence)
        assert isinstance(codec, SphericalCodec)
        return codec

    def _measure_config(self) -> MeasureConfig:
        retention = self._retention
        return MeasureConfig(
            self._config.geometry,
            self._config.ropes,
            self._plan.tiers,
            policy=retention.policy,
            protection=retention.protection,
            horizon=retention.horizon,
            error_samples=retention.error_samples,
        )

    def _start(self, num_tokens: int) -> LayerPricer:
        retention = self._retention
        segments = retention.segments.label(num_tokens, recent_tokens=min(RUN_TOKENS, num_tokens))
        return LayerPricer(self._costs, retention.policy, retention.options, segments)

    def _write(self, tokens: int) -> None:
        """Decide about all layers and store them; the newest run opens the tail."""
        paged = self._paged_tokens(tokens)
        is_measured = bool(self._layer_notes)
        contract = self._decide(tokens, paged) if is_measured else self._keep_short(tokens)
        self._is_decided = True
        self._seal_tier = self._tier_of_new(contract)
        if self._on_contract is not None:
            self._on_contract(contract)
        for layer, (keys, values) in enumerate(self._pending):
            decision = contract.layer(layer)
            at = slice(0, paged)
            decision = replace(
                decision, tier_id=decision.tier_id[:, at], protected=decision.protected[:, at]
            )
            positions = torch.arange(paged)
            self._store.write(
                self._sequence, layer, decision, keys[:, at], values[:, at], positions
            )
            self._store.append(self._sequence, layer, keys[:, paged:], values[:, paged:])
        self._pending = []
        # what was priced is not needed any more
        self._controller = RetentionController(self._costs, self._retention.options)
        self._pricer = None
        if not is_measured and self._config.full_layers:
            heads = self._config.geometry.num_kv_heads * len(self._config.full_layers)
            self._keep_notes(RunNotes.unmeasured(heads, self._plan.tiers))
        self._store.compact()

    def _paged_tokens(self, tokens: int) -> int:
        """Tokens of a prompt that are stored in pages; the others open the tail.

        Many rows of a GPU begin with tails of different lengths, so that not all seal beside one
        step: a tail takes the same bytes whatever is in it.
        """
        runs = max(0, tokens // RUN_TOKENS - 1)
        if self._store.allocator.has_copier and self._layer_notes:
            most = self._plan.spec.page_tokens // RUN_TOKENS - 1
            spread = min(most, -(-len(self._store.sequences) // _ROWS_AT_ONCE))
            runs = max(min(runs, _LEAST_RUNS), runs - self._sequence % max(1, spread))
        return runs * RUN_TOKENS

    def _decide(self, tokens: int, paged: int) -> WriteContract:
        """The contract of a measured prompt, with room left for the first pages to seal."""
        limit = self._limit(tokens) - self._seal_bytes()
        notes = self.num_bytes

        def exact_bytes(contract: WriteContract) -> int:
            return notes + contract_bytes(self._store, self._with_windows(contract), paged)

        contract = self._controller.decide(limit, exact_bytes)
        runs = contract.tier_id[..., :paged].unflatten(-1, (-1, RUN_TOKENS))
        joined = RunNotes.join(self._layer_notes)
        joined.crop(paged)
        self.drift = self._drift_of(joined, runs.amin(-1), tokens)
        self._keep_notes(joined)
        return self._with_windows(contract)

    def _drift_of(self, notes: RunNotes, tier_id: Tensor, num_tokens: int) -> float:
        """Predicted move of the model's logits.

        Args:
            notes: Those of all layers, joined.
            tier_id: ``[layers with full attention, heads, runs]``.
            num_tokens: Length of the sequence.
        """
        squares = notes.squared_drift(tier_id.flatten(0, 1), num_tokens).double().sum()
        return self._retention.policy.drift_scale * math.sqrt(2 * float(squares))

    def predict_drift(self) -> float:
        """How far what is coded and gone may move the model's logits, by the pages as they are."""
        notes = self._all_notes()
        if self._is_decided and notes is not None and notes.num_runs:
            pages = self._store.page_list(self._sequence)
            tokens = self._store.num_tokens(self._sequence)
            self.drift = self._drift_of(notes, self._run_tiers(pages, notes.num_runs), tokens)
            self._store.forget_page_list(self._sequence)
        return self.drift

    def _run_tiers(self, pages: PageList, runs: int) -> Tensor:
        """``[layers with full attention, heads, runs]`` uint8 tier of every run that was noted."""
        full, heads = self._config.full_layers, self._config.geometry.num_kv_heads
        place = self._note_places(pages)[:, None]
        is_noted = (pages.runs >= 0) & (pages.runs < runs) & (place >= 0)
        at = place * runs + pages.runs
        tier_id = torch.zeros(len(full) * heads * runs, dtype=torch.uint8, device=at.device)
        own = pages.tier_ids[:, None].expand_as(at)
        tier_id[at[is_noted]] = own[is_noted].to(torch.uint8)
        return tier_id.view(len(full), heads, runs)

    def _note_places(self, pages: PageList) -> Tensor:
        """``[pages]`` int64: each page's head among those of the joined notes, below 0 if none."""
        full, heads = self._config.full_layers, self._config.geometry.num_kv_heads
        first = torch.full((self._config.geometry.num_layers,), -heads)
        first[list(full)] = heads * torch.arange(len(full))
        return first.to(pages.layer_ids.device)[pages.layer_ids] + pages.head_ids

    def _tier_of_new(self, contract: WriteContract) -> str:
        """Tier at which new states are sealed.

        A variant that is held to one tier is held to it while decoding too: the lowest that the
        prompt's decision took.
        """
        if self._retention.options.variant == "joint":
            return self._plan.tier
        coded = contract.tier_id[(contract.tier_id > 0) & ~contract.protected]
        return self._plan.tiers[int(coded.min())].name if coded.numel() else self._plan.tier

    def _keep_short(self, tokens: int) -> WriteContract:
        """A prompt of which nothing can be decided: its sinks stay dense, the rest is coded.

        A window leaves its first tokens behind, so only full attention protects them.
        """
        config, tiers = self._config, self._plan.tiers
        contract = WriteContract.uniform(
            config.geometry, tokens, tier_id=tiers.id_of(self._plan.tier), granularity=RUN_TOKENS
        )
        full = list(config.full_layers)
        sinks = slice(0, min(self._retention.protection.sink_tokens, tokens))
        contract.tier_id[full, :, sinks] = tiers.dense_id
        contract.protected[full, :, sinks] = True
        for layer in range(config.geometry.num_layers):
            start = window_start(config, self._plan, layer, tokens) // RUN_TOKENS * RUN_TOKENS
            contract.tier_id[layer, :, :start] = tiers.drop_id
        return contract

    def _with_windows(self, contract: WriteContract) -> WriteContract:
        """A contract of the layers with full attention, with those behind windows beside them.

        A window forgets by itself: what it can still see is coded, the rest is dropped.
        """
        config, tiers = self._config, self._plan.tiers
        if len(config.full_layers) == config.geometry.num_layers:
            return contract
        tokens = contract.num_tokens
        whole = WriteContract.uniform(
            config.geometry,
            tokens,
            tier_id=tiers.id_of(self._plan.tier),
            granularity=contract.granularity,
            device=contract.tier_id.device,
        )
        for layer in range(config.geometry.num_layers):
            start = window_start(config, self._plan, layer, tokens) // RUN_TOKENS * RUN_TOKENS
            whole.tier_id[layer, :, :start] = tiers.drop_id
        full = list(config.full_layers)
        whole.tier_id[full], whole.protected[full] = contract.tier_id, contract.protected
        return whole

    def _limit(self, num_tokens: int) -> int:
        """Bytes that may be spent at a length; the gate holds some back while it is off."""
        limit = self._ceiling.bytes_at(num_tokens)
        assert limit is not None
        if self.gate is None or self.gate.is_on:
            return limit
        return limit - int(limit * self.gate.options.reserve_share)

    def _seal_bytes(self, finer: Sequence[int] = ()) -> int:
        """Most bytes that sealing the tail of every head adds, with a slab to spare.

        A demoted page takes its new place before its slab is empty and goes: the spare one keeps
        that moment under the ceiling too.

        Args:
            finer: Layers that seal at ``_finer_tier``.
        """
        geometry, tiers = self._config.geometry, self._plan.tiers
        seal = self._store.seal_tier(self._sequence)
        config = self._store.config
        mode = config.span_mode(tiers.id_of(seal))
        request = {(tiers.id_of(seal), mode): config.max_slab_pages}
        tables = 0
        layers = range(geometry.num_layers)
        rest = [layer for layer in layers if layer not in finer] if finer else layers
        for tier, own in ((seal, rest), (self._finer_tier, finer)):
            if not own:
                continue
            per_head = config.seal_tokens // tiers[tier].page_tokens
            key = (tiers.id_of(tier), config.span_mode(tiers.id_of(tier)))
            request[key] = request.get(key, 0) + len(own) * geometry.num_kv_heads * per_head
            for layer in own:
                tables += self._store.table(self._sequence, layer).growth_alike(per_head)
        return self._store.allocator.forecast([request]) + tables

    @property
    def _finer_tier(self) -> str:
        """Next tier above that of new states."""
        tiers = self._plan.tiers
        return tiers[min(tiers.id_of(self._seal_tier) + 1, tiers.dense_id)].name

    def _used(self) -> int:
        """Bytes that count against the ceiling; a shared page counts for each that holds it.

        So does a free page; what all slabs lose to alignment is shared by the sequences.
        """
        store, others = self._store, len(self._store.sequences) - 1
        spare = store.allocator.alignment_bytes
        slack = store.slack_bytes - spare * others // (others + 1)
        return store.sequence_bytes(self._sequence) + slack + self.num_bytes

    @property
    def num_changes(self) -> int:
        """Times that pages came otherwise than by sealing at one tier; see ``Residency``."""
        return self._num_demotions + self.num_escalated + self._num_restarts

    def settle(self, num_new: int, *, is_ahead: bool = False) -> bool:
        """Meet the ceiling of new tokens; see ``Residency.settle``."""
        tail = self._store.open_tail(self._sequence, 0)
        page = self._plan.spec.page_tokens
        if tail is None or tail.num_tokens + num_new <= page or tail.num_tokens < page:
            return False
        while self.work_ahead():
            pass
        sealed = tail.first_position
        self._note_until(sealed)
        limit = self._limit(self._store.num_tokens(self._sequence) + num_new * (not is_ahead))
        self._store.seal_at(self._sequence, self._seal_tier)
        self._settle(limit, sealed, self._seal_bytes)
        if sealed == 0:
            self._num_restarts += 1
            self._seal_first()
            return False
        if self.gate is not None and self.gate.is_on:
            self._escalate(limit)
        return True

    def _escalate(self, limit: int) -> None:
        """Seal what is still dense at the next finer tier, if no older page has to go for it.

        Layers whose new states would drift most come first, as many as the bytes allow.
        """
        seal = self._plan.tiers.id_of(self._seal_tier)
        notes = self._all_notes()
        assert notes is not None
        every = notes.to("cpu").split(self._config.geometry.num_kv_heads)
        drift = [notes.new_drift(seal) for notes in every]
        order = sorted(range(len(drift)), key=lambda index: -drift[index])
        layers = [self._config.full_layers[index] for index in order]
        low, high = 0, len(layers)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._used() + self._seal_bytes(layers[:middle]) <= limit
            low, high = (middle, high) if fits else (low, middle - 1)
        self._store.seal_at(self._sequence, self._finer_tier, layers=layers[:low])
        self.num_escalated += low

    def _note_until(self, position: int) -> None:
        """Note runs that are sealed and not young any more, as runs of their age usually are.

        On a device that is put off until notes are read, because pages seal beside a step there.
        """
        tokens = self._store.num_tokens(self._sequence)
        if self._notes is not None:
            noted = self._notes.num_runs + len(self._unnoted)
            runs = range(noted, position // RUN_TOKENS)
            self._unnoted += [tokens - run * RUN_TOKENS - RUN_TOKENS // 2 for run in runs]
            if not self._store.allocator.has_copier:
                self._all_notes()

    def plan_ahead(self) -> None:
        """Begin to make room for the next pages to seal if they have none; see ``Residency``."""
        tail = self._store.open_tail(self._sequence, 0)
        # what a gate holds back it may spend at any step
        if tail is None or self.gate is not None or not self._is_decided:
            return
        page = self._plan.spec.page_tokens
        before = tail.first_position - self._retention.young_pages * page
        self._note_until(before)
        limit = self._limit(tail.first_position + page)
        notes = -(-page // RUN_TOKENS) * self._run_note_bytes()
        self._ahead = self._meet(
            limit, before, lambda: notes + self._seal_bytes(), is_at_once=False
        )
        self._work_left = self._usual_parts

    def _run_note_bytes(self) -> int:
        """Bytes that notes grow by with a run."""
        return 0 if self._notes is None else self._notes.born.itemsize + 4 * len(self._notes.bound)

    @property
    def _usual_parts(self) -> int:
        """Parts of making room: to list pages, to decide, and to drop those of every layer."""
        return 2 + -(-len(self._config.full_layers) // _LAYERS_AT_ONCE)

    @property
    def work_left(self) -> int:
        """About how many parts are left of what ``plan_ahead`` began; see ``Residency``."""
        return 0 if self._ahead is None else self._work_left

    def work_ahead(self) -> bool:
        """Do a bounded part of what ``plan_ahead`` began; see ``Residency``."""
        if self._ahead is None:
            return False
        before = self.num_rebalances
        has_begun = self._work_left != self._usual_parts
        try:
            self._work_left = next(self._ahead)
            return True
        except StopIteration:
            # where there is room already, nothing was done
            has_begun |= self.num_rebalances > before
        except BudgetError:
            # nothing may go now; when the pages seal, more may
            pass
        self._ahead = None
        self._store.forget_page_list(self._sequence)
        return has_begun

    def _seal_first(self) -> None:
        """Seal a tail that begins with the sequence itself: its sinks stay dense."""
        tokens = self._store.num_tokens(self._sequence)
        layers = range(self._config.geometry.num_layers)
        tails = [self._store.tail(self._sequence, layer) for layer in layers]
        states = [(tail.keys.clone(), tail.values.clone()) for tail in tails]
        self._store.crop(self._sequence, 0)
        contract = self._keep_short(tokens)
        for layer, (keys, values) in enumerate(states):
            positions = torch.arange(tokens)
            self._store.write(self._sequence, layer, contract.layer(layer), keys, values, positions)

    def _settle(self, limit: int, sealed: int, reserve: Callable[[], int]) -> None:
        """Meet a limit, see ``_meet``, and predict the drift of what is left."""
        young = self._retention.young_pages + int(self.gate is not None and self.gate.is_on)
        before = sealed - (young - 1) * self._plan.spec.page_tokens
        try:
            for _ in self._meet(limit, before, reserve):
                pass
            if self.gate is not None:
                self.predict_drift()
        finally:
            # keeping what was read of the pages costs the budget more than reading them again
            self._store.forget_page_list(self._sequence)

    def _meet(
        self, limit: int, before: int, reserve: Callable[[], int], *, is_at_once: bool = True
    ) -> Generator[int, None, None]:
        """Demote or drop pages where that costs least until the bytes in use meet a limit.

        Args:
            limit: Bytes that may be in use.
            before: Pages before this position may change.
            reserve: Bytes that will be needed besides, as things are.
            is_at_once: Drop and move all pages together, else a bounded number at a time.

        Yields:
            About how many such times are left; the next should wait for another step.

        Raises:
            BudgetError: Nothing is left that may be dropped.
        """
        if self._used() + reserve() <= limit:
            return
        self.num_rebalances += 1
        # once pages must change, as many do as the next pages to seal will ask for
        target, spare = limit, int(limit * self._retention.refresh_share)
        for _ in range(_REBALANCE_ROUNDS):
            moved = self._store.allocator.num_moved
            pages = self._store.page_list(self._sequence)
            if not is_at_once:
                # a device lists pages while the host goes on; deciding waits for it
                yield self._usual_parts - 1
                if self._store.allocator.num_moved != moved:
                    # another sequence made room meanwhile
                    pages = self._store.page_list(self._sequence)
            pages = self._changeable(pages, before)
            if pages.num_pages == 0:
                break
            choices = self._choices(pages)
            held = choices.bytes_of(pages.tier_ids)
            needed = self._used() + reserve() - target
            # where little may change, room for later is not worth all of it
            needed += min(spare, max(0, held - needed) // 2)
            spare = 0
            tier_id = self._rechoose(choices, pages, max(0, held - needed))
            changed = (tier_id < pages.tier_ids).nonzero()[:, 0]
            yield from self._apply(pages.select(changed), tier_id[changed], limit, is_at_once)
            over = self._used() + reserve() - limit
            if over <= 0:
                break
            # tables and slabs take whole entries and pages: ask for that much more
            target -= over
        needed = self._used() + reserve()
        if needed > limit:
            raise BudgetError(needed, limit, limit, "what may not be dropped")

    def _changeable(self, pages: PageList, before: int) -> PageList:
        """Pages of full attention that begin before a position and hold nothing protected."""
        is_valid = (pages.first_runs * RUN_TOKENS < before) & ~pages.is_protected
        if len(self._config.full_layers) < self._config.geometry.num_layers:
            is_valid &= self._note_places(pages) >= 0
        return pages.select(is_valid)

    def _choices(self, pages: PageList) -> TierChoices:
        """What each tier of each page would lose and cost.

        A page at the seal tier may go to any lower one where pages are demoted. A page below it
        was coded twice if it were demoted again, which gains next to nothing: it stays or goes. So
        does every page of a variant that knows one tier, and one that keeps everything drops none.
        """
        tokens = self._store.num_tokens(self._sequence)
        notes = self._all_notes()
        assert notes is not None
        losses = notes.losses(tokens)
        at = self._note_places(pages)[:, None]
        runs = pages.runs.long()
        each = losses[at, runs.clamp(0, losses.shape[1] - 1)]
        # runs past a page's last one point to the first run, whose loss may be infinite
        loss = torch.where((runs >= 0)[..., None], each, 0.0).sum(1)
        tier = torch.arange(loss.shape[1], device=loss.device)[None]
        own = pages.tier_ids[:, None]
        variant = self._retention.options.variant
        is_barred = (tier > 0) & (tier < own)
        if variant == "joint" and self._retention.demotes:
            is_barred &= own < self._plan.tiers.id_of(self._seal_tier)
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
        limit = max(limit, self._used())
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
            yield left
            if len(part):
                self._store.drop_listed(self._sequence, layer_ids[part], held.page_ids[part])
                # places that stay free count for other sequences too
                self._store.compact(moves)
        spare = self._store.config.max_slab_pages - 1
        for tier in sorted(set(tier_id[tier_id > self._plan.tiers.drop_id].tolist())):
            self._num_demotions += 1
            left_ids = (tier_id == tier).nonzero()[:, 0]
            while len(left_ids):
                room = (limit - self._used()) // int(self._tier_bytes[tier]) - spare
                if room < len(left_ids):
                    self._store.compact()
                    room = (limit - self._used()) // int(self._tier_bytes[tier]) - spare
                now, left_ids = left_ids[: max(1, room)], left_ids[max(1, room) :]
                ids = held.page_ids[now]
                self._store.demote_listed(self._sequence, layer_ids[now], ids, tier)
            self._store.compact()

    def observe_logits(self, row: Tensor) -> None:
        """Tell the gate how close a decision is, from logits ``[vocabulary]``."""
        if self.gate is None:
            return
        first, second = row.float().topk(2).values.tolist()
        self.gate.observe(danger_score(self.drift, first - second))

    def crop(self, num_tokens: int) -> None:
        """Forget what was noted about tokens from ``num_tokens`` on."""
        self._ahead = None
        notes = self._all_notes()
        if notes is not None:
            notes.crop(num_tokens)
        # a share of fewer tokens allows fewer bytes
        sealed = self._store.tail(self._sequence, 0).first_position
        self._note_until(sealed)
        self._settle(self._limit(num_tokens), sealed, lambda: 0)

    def fork(self, store: PageStore, sequence: int) -> RetentionResidency:
        """The same for a copy of the sequence."""
        other = RetentionResidency(self._config, self._plan, store, sequence, self._ceiling)
        other._is_decided, other._seal_tier = self._is_decided, self._seal_tier
        notes = self._all_notes()
        other._notes = None if notes is None else notes.copy()
        other.drift, other.num_rebalances = self.drift, self.num_rebalances
        other.num_escalated = self.num_escalated
        other.gate = copy.deepcopy(self.gate)
        return other

    def state(self) -> dict[str, Tensor]:
        """Notes of every layer, the seal tier, the predicted drift and the gate, by name."""
        seal = self._plan.tiers.id_of(self._seal_tier)
        state = {
            "drift": torch.tensor([self.drift], dtype=torch.float64),
            "seal_tier": torch.tensor([seal]),
        }
        if self.gate is not None:
            state["gate"] = self.gate.state()
        for index, notes in enumerate(self.notes):
            for name, tensor in notes.state().items():
                state[f"notes.{index}.{name}"] = tensor
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what ``state`` gave."""
        self._is_decided = True
        self.drift = float(state["drift"])
        self._seal_tier = self._plan.tiers[int(state["seal_tier"])].name
        if self.gate is not None:
            self.gate.load_state(state["gate"].cpu())
        layers = []
        for index in range(len(self._config.full_layers)):
            lead = f"notes.{index}."
            own = {
                name.removeprefix(lead): tensor.cpu()
                for name, tensor in state.items()
                if name.startswith(lead)
            }
            layers.append(RunNotes.from_state(own))
        self._keep_notes(RunNotes.join(layers) if layers else None)

    def describe(self) -> str:
        """The seal tier, what the controller is restricted to, and what its gate did."""
        told = f"{self._retention.options.variant}, seals at {self._seal_tier}"
        if self.gate is None:
            return told
        gate = self.gate
        return (
            f"{told}; gate on in {gate.num_on_steps} of {gate.num_steps} steps, "
            f"{gate.num_switches} switches, {self.num_escalated} tails sealed finer"
        )


def _split_layers(index: Tensor, layer_ids: Tensor) -> list[Tensor]:
    """``index [pages]`` of pages listed layer by layer, cut where so many layers are full."""
    layers, sizes = layer_ids[index].unique_consecutive(return_counts=True)
    per_layer = index.split(sizes.tolist())
    return [
        torch.cat(per_layer[at : at + _LAYERS_AT_ONCE])
        for at in range(0, len(layers), _LAYERS_AT_ONCE)
    ]


def page_costs(config: CacheConfig, plan: ResidencyPlan, store: PageStore) -> PageCosts:
    """Bytes of one page of every tier and shape, counters and table entry included."""
    costs = {}
    order = store.allocator.order
    for shape, mode in _MODE_OF_SHAPE.items():
        sizes = [0]
        for tier_id in range(1, len(plan.tiers)):
            page_mode = mode
            # a dense page is one run of 16 tokens, which is contiguous
            if tier_id == plan.tiers.dense_id and shape is BlockShape.RUNS:
                page_mode = PositionMode.CONTIGUOUS
            layout = PageLayout(tier_id, plan.tiers[tier_id], config.geometry.head_dim, page_mode)
            alignment = 1 if order is None else order.alignment(layout)
            pages = store.config.max_slab_pages if alignment > 1 else 1
            held = -(-slab_bytes(layout, pages, alignment=alignment) // pages)
            sizes.append(held + PointerTable.entry_bytes)
        costs[shape] = tuple(sizes)
    return PageCosts(plan.tiers, costs)
