# SPDX-License-Identifier: Apache-2.0
"""A prompt under a controller: its layers as they come, then one contract about all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from sphkv.attention.api import row_kernels
from sphkv.cache.config import CacheConfig, ResidencyPlan
from sphkv.cache.notes import SequenceNotes
from sphkv.cache.residency import window_start
from sphkv.codec.states import SphericalCodec
from sphkv.core.contract import WriteContract
from sphkv.core.devices import ReadyTensors, behind_beside, join_beside
from sphkv.core.prompt_rows import RowShape
from sphkv.core.tiers import RUN_TOKENS
from sphkv.retention.controller import RetentionController
from sphkv.retention.gate import tier_bounds
from sphkv.retention.measure import (
    MeasureConfig,
    PromptWork,
    layers_together,
    measure_layers,
    paged_tokens,
)
from sphkv.retention.notes import RunNotes
from sphkv.retention.pricing import LayerPricer, PageCosts
from sphkv.store.forecast import contract_bytes
from sphkv.store.prompt import SeenLayers
from sphkv.store.store import PageStore

Found = TypeVar("Found")
States = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values of a layer."""

# So many rows seal beside one step at least: most of the host's work is the same for one or more.
_ROWS_AT_ONCE = 8
# Runs a prompt needs so that there is one to decide about between sinks and the newest.
_LEAST_RUNS = 3


class PromptDecision:
    """Measures, prices and notes the layers of one prompt, and decides about them together.

    For every layer ``take``. Once all are there ``decide``, then ``write``; after that
    it is of no more use.
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
        work: PromptWork | None = None,
    ) -> None:
        """Wait for the first layer.

        Args:
            config: The cache; has a retention part.
            plan: Tiers and the seal tier.
            store: Where the prompt is stored, in an empty sequence.
            sequence: Id in the store.
            notes: Where to note what was measured.
            costs: Bytes of a page of every tier and shape.
            work: What sequences of the same prompt share; None shares nothing.
        """
        assert config.retention is not None
        self._config = config
        self._retention = config.retention
        self._plan = plan
        self._store = store
        self._sequence = sequence
        self._notes = notes
        self._costs = costs
        self._work = work
        self._layers: list[tuple[Tensor, Tensor]] = []
        # layers that others are measured with, and those that are to be measured next
        self._waiting: list[tuple[int, States]] = []
        self._ready: deque[tuple[tuple[int, ...], ReadyTensors]] = deque()
        self._num_paged = 0
        # largest norms of keys and values of what was measured, and what the host knows of all
        self._largest: dict[tuple[int, ...], Tensor] = {}
        self._seen: SeenLayers | None = None
        # tiers that were decided on, run by run
        self._runs: Tensor | None = None
        self._controller = RetentionController(costs, config.retention.options)
        self._pricer: LayerPricer | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt; 0 before its first layer."""
        return self._layers[0][0].shape[1] if self._layers else 0

    @property
    def is_complete(self) -> bool:
        """Whether all layers came."""
        return len(self._layers) == self._config.geometry.num_layers

    def take(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Take the next layer; see ``Residency.take_prompt``.

        Raises:
            ValueError: It comes out of order.
        """
        if layer != len(self._layers):
            raise ValueError(f"layer {layer} is out of order: {len(self._layers)} came before")
        self._layers.append((keys, values))
        if self._config.windows[layer] is None and keys.shape[1] >= _LEAST_RUNS * RUN_TOKENS:
            self._wait(layer, query, keys, values)
        if self.is_complete:
            self._make_ready()
        # A GPU takes so many launches ahead and no more: were layers measured at once, these
        # launches would keep those of the next layer back.
        self._price_ready(layer - 1 if keys.is_cuda else layer)

    def _wait(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Have a layer measured with others, once as many are there as shall be."""
        ropes = self._config.ropes
        if self._waiting and ropes[self._waiting[0][0]] != ropes[layer]:
            self._make_ready()
        # a copy: the few that are watched would keep those of all tokens alive
        own = query.clone() if query.is_cuda else query
        self._waiting.append((layer, (own, keys, values)))
        left = sum(each >= self._waiting[0][0] for each in self._config.full_layers)
        if len(self._waiting) >= layers_together(self._measure_config(), keys.shape[1], left):
            self._make_ready()

    def _make_ready(self) -> None:
        """The layers that wait are complete, and may be measured from here on."""
        if not self._waiting:
            return
        layers, states = zip(*self._waiting, strict=True)
        self._waiting = []
        tensors = ReadyTensors(*chain.from_iterable(zip(*states, strict=True)))
        self._ready.append((layers, tensors))

    def _price_ready(self, last: int) -> None:
        """Measure layers up to a last one, beside what the model does next."""
        while self._ready and self._ready[0][0][-1] <= last:
            layers, states = self._ready.popleft()
            with states.beside() as tensors:
                num = len(layers)
                query, keys, values = (
                    tensors[at] if num == 1 else torch.cat(tensors[at : at + num])
                    for at in range(0, 3 * num, num)
                )
                self._price(layers, query, keys, values)

    def _price(self, layers: tuple[int, ...], query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Measure, price and note layers where their states are, without waiting for them."""
        codec, config = self._codec(), self._measure_config()
        found = self._once(
            ("measured", layers),
            lambda: measure_layers(config, codec, layers, (query, keys, values)),
        )
        norms = torch.stack([found.features.radius, found.features.value_norm])
        self._largest[layers] = norms.view(2, len(layers), -1).amax(2).T
        pricer = self._pricer = self._pricer or self._start(keys.shape[1])
        priced = self._once(("priced", pricer.key, layers), lambda: pricer.price(found))

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

        self._notes.add_layers(self._once(("notes", pricer.key, layers), note))
        for each in priced.split(self._config.geometry.num_kv_heads):
            self._controller.add_layer(each)

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
            kernels=row_kernels(self._store.config.device),
        )

    def _start(self, num_tokens: int) -> LayerPricer:
        retention = self._retention
        segments = retention.segments.label(num_tokens, recent_tokens=min(RUN_TOKENS, num_tokens))
        return LayerPricer(self._costs, retention.policy, retention.options, segments)

    def decide(self, limit: int) -> WriteContract:
        """The contract about all layers; what remains of the prompt is noted.

        Args:
            limit: Bytes that pages, tables, tails and notes may take.

        Raises:
            BudgetError: The parts that must stay dense do not fit.
        """
        self._price_ready(len(self._layers))
        self._num_paged = self._paged_tokens()
        device = self._layers[0][0].device
        if not self._notes.is_measured:
            self._notes.keep_unmeasured(self._plan.tiers)
            join_beside(device)  # codebooks may have been fitted there
            return short_contract(self._config, self._plan, self.num_tokens)
        # a single prompt's last layer has yet to attend: nothing here waits for the model
        with behind_beside(device):
            contract = self._decide_measured(limit)
            self._seen = self._look(contract)
        join_beside(device)
        for each in (contract.tier_id, contract.protected):
            if each.is_cuda:
                # made beside and read here, where its memory must not be used again too early
                each.record_stream(torch.cuda.current_stream(device))
        return contract

    def _paged_tokens(self) -> int:
        """Tokens of the prompt that are stored in pages; the others open the tail.

        Many rows of a GPU begin with tails of different lengths, so that not all seal beside one
        step: a tail takes the same bytes whatever is in it.
        """
        runs = max(0, self.num_tokens // RUN_TOKENS - 1)
        if self._store.allocator.has_copier and self._notes.is_measured:
            most = self._plan.spec.page_tokens // RUN_TOKENS - 1
            spread = min(most, -(-len(self._store.sequences) // _ROWS_AT_ONCE))
            runs = max(min(runs, _LEAST_RUNS), runs - self._sequence % max(1, spread))
        return runs * RUN_TOKENS

    def _decide_measured(self, limit: int) -> WriteContract:
        paged, notes = self._num_paged, self._notes.num_bytes

        def exact_bytes(contract: WriteContract) -> int:
            return notes + contract_bytes(self._store, self._with_windows(contract), paged)

        contract = self._controller.decide(limit, exact_bytes)
        self._runs = contract.tier_id[..., :paged].unflatten(-1, (-1, RUN_TOKENS))
        return self._with_windows(contract)

    def _with_windows(self, contract: WriteContract) -> WriteContract:
        """A contract of the layers with full attention, with those behind windows beside them.

        A window forgets by itself: what it can still see is coded, the rest is dropped.
        """
        config, tiers = self._config, self._plan.tiers
        if len(config.full_layers) == config.geometry.num_layers:
            return contract
        whole = WriteContract.uniform(
            config.geometry,
            contract.num_tokens,
            tier_id=tiers.id_of(self._plan.tier),
            granularity=contract.granularity,
            device=contract.tier_id.device,
        )
        _drop_before_windows(whole, config, self._plan)
        full = list(config.full_layers)
        whole.tier_id[full], whole.protected[full] = contract.tier_id, contract.protected
        return whole

    def _look(self, contract: WriteContract) -> SeenLayers | None:
        """What writing needs to know on the host; None where layers were not looked at."""
        if sum(map(len, self._largest)) < len(self._layers):
            return None
        largest = torch.cat([self._largest[layers] for layers in sorted(self._largest)])
        return self._store.see_layers(self._front(contract), largest)

    def _front(self, contract: WriteContract) -> WriteContract:
        """The part of a contract that is about pages."""
        paged = slice(0, self._num_paged)
        tier_id, protected = contract.tier_id[..., paged], contract.protected[..., paged]
        return WriteContract(tier_id, protected, contract.granularity)

    def write(self, contract: WriteContract) -> None:
        """Store all layers as decided, and forget them; the newest run opens the tail."""
        device, front = self._layers[0][0].device, self._front(contract)
        self._store.write_layers(self._sequence, 0, front, self._layers, seen=self._seen)
        if self._runs is not None:
            # waits for the drift: what the device needs first is queued
            with behind_beside(device):
                self._notes.keep_prompt(self._runs.amin(-1), self.num_tokens)
        join_beside(device)
        self._layers = []
        self._store.compact()


def prepare_prompts(config: CacheConfig) -> None:
    """Have what reads prompts on a GPU compiled behind what the caller does next."""
    retention, kernels = config.retention, row_kernels(config.device)
    if kernels is None:
        return
    device = torch.device(config.device)
    if retention is None:
        kernels.prepare(None, device)
        return
    policy, group = retention.policy, config.geometry.group_size
    has_expected = policy.attention_mix > 0
    shape = RowShape(
        head_dim=config.geometry.head_dim,
        votes=group * policy.window,
        expected=group * len(retention.horizon) if has_expected else 0,
        groups=group if has_expected else 0,
    )
    kernels.prepare(shape, device)


def settle_prompts(config: CacheConfig) -> None:
    """Wait for what ``prepare_prompts`` has begun."""
    if (kernels := row_kernels(config.device)) is not None:
        kernels.settle()


def short_contract(config: CacheConfig, plan: ResidencyPlan, num_tokens: int) -> WriteContract:
    """A prompt of which nothing can be decided: its sinks stay dense, the rest is coded.

    A window leaves its first tokens behind, so only full attention protects them.

    Args:
        config: The cache; has a retention part.
        plan: Tiers and the seal tier.
        num_tokens: Tokens of the prompt.
    """
    assert config.retention is not None
    contract = WriteContract.uniform(
        config.geometry,
        num_tokens,
        tier_id=plan.tiers.id_of(plan.tier),
        granularity=RUN_TOKENS,
    )
    full = list(config.full_layers)
    sinks = slice(0, min(config.retention.protection.sink_tokens, num_tokens))
    contract.tier_id[full, :, sinks] = plan.tiers.dense_id
    contract.protected[full, :, sinks] = True
    _drop_before_windows(contract, config, plan)
    return contract


def _drop_before_windows(contract: WriteContract, config: CacheConfig, plan: ResidencyPlan) -> None:
    """Drop what no window of a layer can see any more from a contract of all layers."""
    for layer in range(config.geometry.num_layers):
        start = window_start(config, plan, layer, contract.num_tokens) // RUN_TOKENS * RUN_TOKENS
        contract.tier_id[layer, :, :start] = plan.tiers.drop_id
