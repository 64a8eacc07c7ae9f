# SPDX-License-Identifier: Apache-2.0
"""Residency under a controller: a contract about the prompt, then the ceiling at every step.

New states are dense in the tail, then coded at the seal tier, and from then on priced like all
others by the loss that made the prompt's decision. Nothing is ever written upward: a page's dense
source is gone once it is coded. So what a stability gate can do is to spare the newest pages, to
spend what it held back instead of demoting, and to seal what is still dense at a finer tier.

Room is made when pages must seal and there is none, or ahead of that: ``plan_ahead`` begins once
pages have sealed, and ``work_ahead`` does a bounded part of it beside a step, as late as will do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sphkv.cache.config import CacheConfig, ResidencyPlan
from sphkv.cache.notes import SequenceNotes
from sphkv.cache.plan import Ceiling
from sphkv.cache.prompt import PromptDecision, short_contract
from sphkv.cache.rebalance import Rebalancer
from sphkv.core.contract import WriteContract
from sphkv.core.tiers import RUN_TOKENS
from sphkv.retention.gate import StabilityGate, danger_score
from sphkv.retention.measure import PromptWork
from sphkv.retention.notes import RunNotes
from sphkv.retention.policy import BlockShape
from sphkv.retention.pricing import PageCosts
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PositionMode
from sphkv.store.sequence import PointerTable
from sphkv.store.slabs import slab_bytes
from sphkv.store.store import PageStore

_MODE_OF_SHAPE = {
    BlockShape.WHOLE: PositionMode.CONTIGUOUS,
    BlockShape.RUNS: PositionMode.RUNS,
    BlockShape.TOKENS: PositionMode.TOKENS,
}


class RetentionResidency:
    """Keeps each state of a sequence at the tier its budget affords, or not at all.

    Attributes:
        gate: The stability gate; None if it is switched off.
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
        self._on_contract = on_contract
        gate = config.retention.gate
        self.gate = StabilityGate(gate) if gate is not None else None
        self.num_escalated = 0
        self._num_restarts = 0
        costs = page_costs(config, plan, store)
        self._notes = SequenceNotes(config, store, sequence)
        self._rebalancer = Rebalancer(config, plan, store, sequence, notes=self._notes, costs=costs)
        # until it is decided about
        self._prompt: PromptDecision | None = PromptDecision(
            config, plan, store, sequence, notes=self._notes, costs=costs, work=work
        )
        self._contract: WriteContract | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the controller's own tensors, with all runs noted."""
        return self._notes.num_bytes

    @property
    def notes(self) -> list[RunNotes]:
        """What is remembered of each layer with full attention."""
        return self._notes.layers()

    @property
    def drift(self) -> float:
        """Predicted move of the model's logits by what is coded and gone.

        It follows the pages only where there is a gate; see ``predict_drift``.
        """
        return self._notes.drift

    def predict_drift(self) -> float:
        """How far what is coded and gone may move the model's logits, by the pages as they are."""
        return self._notes.predict_drift()

    @property
    def num_rebalances(self) -> int:
        """Times old pages were demoted or dropped."""
        return self._rebalancer.num_rebalances

    def take_prompt(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Take a layer of the prompt.

        Raises:
            ValueError: A layer comes out of order.
        """
        prompt = self._prompt
        if prompt is None:
            raise ValueError(f"layer {layer} is out of order: the prompt was decided about")
        prompt.take(layer, query, keys, values)

    def decide_prompt(self) -> None:
        """Decide about all layers of the prompt, once they are there.

        A device does so before what it is given next: it would otherwise wait for the host
        with nothing to do, now it computes while the host plans pages.

        Raises:
            BudgetError: The parts that must stay dense do not fit the budget.
        """
        prompt = self._prompt
        if prompt is None or not prompt.is_complete or self._contract is not None:
            return
        # with room left for the first pages to seal
        self._contract = prompt.decide(self._limit(prompt.num_tokens) - self._seal_bytes())

    def end_prompt(self) -> None:
        """Write all layers of the prompt as decided; see ``decide_prompt``."""
        self.decide_prompt()
        prompt, contract = self._prompt, self._contract
        if prompt is None or contract is None:
            return
        self._prompt = self._contract = None
        self._rebalancer.seal_tier = self._tier_of_new(contract)
        if self._on_contract is not None:
            self._on_contract(contract)
        prompt.write(contract)

    def _tier_of_new(self, contract: WriteContract) -> str:
        """Tier at which new states are sealed.

        A variant that is held to one tier is held to it while decoding too: the lowest that the
        prompt's decision took.
        """
        if self._retention.options.variant == "joint":
            return self._plan.tier
        coded = contract.tier_id[(contract.tier_id > 0) & ~contract.protected]
        return self._plan.tiers[int(coded.min())].name if coded.numel() else self._plan.tier

    def _limit(self, num_tokens: int) -> int:
        """Bytes that may be spent at a length; the gate holds some back while it is off."""
        limit = self._ceiling.bytes_at(num_tokens)
        assert limit is not None
        if self.gate is None or self.gate.is_on:
            return limit
        return limit - int(limit * self.gate.options.reserve_share)

    def _seal_bytes(self, finer: Sequence[int] = ()) -> int:
        """Most bytes that sealing the tail of every head adds, with a slab to spare for demotion.

        A demoted page takes its new place before its slab is empty and goes: the spare one keeps
        that moment under the ceiling too. A page that is dropped takes no place.

        Args:
            finer: Layers that seal at ``_finer_tier``.
        """
        geometry, tiers = self._config.geometry, self._plan.tiers
        seal = self._store.seal_tier(self._sequence)
        config = self._store.config
        mode = config.span_mode(tiers.id_of(seal))
        spare = config.max_slab_pages if self._retention.demotes else 0
        request = {(tiers.id_of(seal), mode): spare}
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
    def _seal_tier(self) -> str:
        """Tier at which new states are sealed, once the prompt is decided about."""
        return self._rebalancer.seal_tier

    @property
    def _finer_tier(self) -> str:
        """Next tier above that of new states."""
        tiers = self._plan.tiers
        return tiers[min(tiers.id_of(self._seal_tier) + 1, tiers.dense_id)].name

    @property
    def num_changes(self) -> int:
        """Times that pages came otherwise than by sealing at one tier; see ``Residency``."""
        return self._rebalancer.num_demotions + self.num_escalated + self._num_restarts

    def settle(self, num_new: int, *, is_ahead: bool = False) -> bool:
        """Meet the ceiling of new tokens; see ``Residency.settle``."""
        tail = self._store.open_tail(self._sequence, 0)
        page = self._plan.spec.page_tokens
        if tail is None or tail.num_tokens + num_new <= page or tail.num_tokens < page:
            return False
        while self.work_ahead():
            pass
        sealed = tail.first_position
        self._notes.note_until(sealed)
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
        drift = self._notes.new_drifts(seal)
        order = sorted(range(len(drift)), key=lambda index: -drift[index])
        layers = [self._config.full_layers[index] for index in order]
        low, high = 0, len(layers)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._rebalancer.used_bytes() + self._seal_bytes(layers[:middle]) <= limit
            low, high = (middle, high) if fits else (low, middle - 1)
        self._store.seal_at(self._sequence, self._finer_tier, layers=layers[:low])
        self.num_escalated += low

    def plan_ahead(self) -> None:
        """Begin to make room for the next pages to seal if they have none; see ``Residency``."""
        tail = self._store.open_tail(self._sequence, 0)
        # what a gate holds back it may spend at any step
        if tail is None or self.gate is not None or self._prompt is not None:
            return
        page = self._plan.spec.page_tokens
        before = tail.first_position - self._retention.young_pages * page
        self._notes.note_until(before)
        limit = self._limit(tail.first_position + page)
        notes = -(-page // RUN_TOKENS) * self._notes.run_bytes
        self._rebalancer.begin(limit, before, lambda: notes + self._seal_bytes())

    @property
    def work_left(self) -> int:
        """Steps that making room should have; see ``Residency``."""
        return self._rebalancer.work_left

    def work_ahead(self) -> bool:
        """Do a bounded part of what ``plan_ahead`` began; see ``Residency``."""
        return self._rebalancer.work()

    def _seal_first(self) -> None:
        """Seal a tail that begins with the sequence itself: its sinks stay dense."""
        tokens = self._store.num_tokens(self._sequence)
        layers = range(self._config.geometry.num_layers)
        tails = [self._store.tail(self._sequence, layer) for layer in layers]
        states = [(tail.keys.clone(), tail.values.clone()) for tail in tails]
        self._store.crop(self._sequence, 0)
        contract = short_contract(self._config, self._plan, tokens)
        for layer, (keys, values) in enumerate(states):
            positions = torch.arange(tokens)
            self._store.write(self._sequence, layer, contract.layer(layer), keys, values, positions)

    def _settle(self, limit: int, sealed: int, reserve: Callable[[], int]) -> None:
        """Have pages meet a limit, see ``Rebalancer.meet``, and predict the drift of what is left.

        Args:
            limit: Bytes that may be in use.
            sealed: Position up to which states are in pages; the youngest of these are spared.
            reserve: Bytes that will be needed besides, as things are.
        """
        young = self._retention.young_pages + int(self.gate is not None and self.gate.is_on)
        before = sealed - (young - 1) * self._plan.spec.page_tokens
        try:
            self._rebalancer.meet(limit, before, reserve)
            if self.gate is not None:
                self.predict_drift()
        finally:
            # keeping what was read of the pages costs the budget more than reading them again
            self._store.forget_page_list(self._sequence)

    def observe_logits(self, row: Tensor) -> None:
        """Tell the gate how close a decision is, from logits ``[vocabulary]``."""
        if self.gate is None:
            return
        first, second = row.float().topk(2).values.tolist()
        self.gate.observe(danger_score(self.drift, first - second))

    def crop(self, num_tokens: int) -> None:
        """Forget what was noted about tokens from ``num_tokens`` on."""
        self._rebalancer.stop()
        self._notes.crop(num_tokens)
        # a share of fewer tokens allows fewer bytes
        sealed = self._store.tail(self._sequence, 0).first_position
        self._notes.note_until(sealed)
        self._settle(self._limit(num_tokens), sealed, lambda: 0)

    def fork(self, store: PageStore, sequence: int) -> RetentionResidency:
        """The same for a copy of the sequence."""
        other = RetentionResidency(self._config, self._plan, store, sequence, self._ceiling)
        if self._prompt is None:
            other._prompt = None
        other._notes.copy_from(self._notes)
        other._rebalancer.seal_tier = self._seal_tier
        other._rebalancer.num_rebalances = self.num_rebalances
        other.num_escalated = self.num_escalated
        other.gate = copy.deepcopy(self.gate)
        return other

    def state(self) -> dict[str, Tensor]:
        """Notes of every layer, the seal tier, the predicted drift and the gate, by name."""
        seal = self._plan.tiers.id_of(self._seal_tier)
        state = {"seal_tier": torch.tensor([seal]), **self._notes.state()}
        if self.gate is not None:
            state["gate"] = self.gate.state()
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what ``state`` gave."""
        self._prompt = None
        self._rebalancer.seal_tier = self._plan.tiers[int(state["seal_tier"])].name
        if self.gate is not None:
            self.gate.load_state(state["gate"].cpu())
        self._notes.load_state(state)

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
