# SPDX-License-Identifier: Apache-2.0
"""A sequence under a byte budget: the controller decides, the store carries it out."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions, DecodeBackend
from sphkv.cache.retained_attention import attend_and_append
from sphkv.cache.retained_bytes import contract_bytes
from sphkv.cache.retained_config import RetainedConfig
from sphkv.cache.retained_measure import measure_layer, paged_tokens
from sphkv.cache.retained_notes import take_notes
from sphkv.cache.retained_refresh import Refresher
from sphkv.cache.retained_work import Found, PromptWork
from sphkv.codec.states import SphericalCodec
from sphkv.core.contract import WriteContract
from sphkv.core.tiers import RUN_TOKENS
from sphkv.retention.controller import RetentionController
from sphkv.retention.features import TokenFeatures
from sphkv.retention.pricing import LayerPricer
from sphkv.store.ledger import ByteLedger
from sphkv.store.order import PageCodec, PageOrder
from sphkv.store.store import PageStore

_SEQUENCE = 0


class RetainedSequence:
    """Keeps each state at the tier its budget affords, or not at all; a ``CacheMethod``.

    The prompt's layers are collected and decided about together when the last one arrives. Newer
    tokens are dense in the tail and in sealed pages until a coded page of them is full.

    Attributes:
        name: Label in reports.
        config: What the sequence was built from.
        contract: The decision about the prompt; None before it.
        features: What every layer of the prompt told, in order.
        is_frozen: Whether new tokens stay dense and the budget is not met again; for
            measurements of the decision about the prompt alone.
    """

    name = "retained"

    def __init__(
        self,
        config: RetainedConfig,
        codec: SphericalCodec,
        backend: DecodeBackend,
        *,
        measured: PromptWork | None = None,
    ) -> None:
        """Start empty.

        Args:
            config: Budget, tiers and controller.
            codec: Encoder with the model's codebooks.
            backend: What runs decode attention.
            measured: What sequences of the same prompt share whose configs differ only in budget,
                gate and options; None shares nothing. For comparing them.
        """
        order: PageOrder | None = getattr(backend, "order", None)
        config = replace(config, is_aligned=order is not None)
        self.config = config
        self.contract: WriteContract | None = None
        self.features: list[TokenFeatures] = []
        self.is_frozen = False
        self._codec = codec
        self._measured = measured
        self._backend = backend
        kernels: PageCodec | None = getattr(backend, "page_codec", None)
        self._store = PageStore(config.store_config(), codec, order=order, kernels=kernels)
        self._store.create(_SEQUENCE)
        self._controller = RetentionController(config.page_costs(), config.options)
        self._pricer: LayerPricer | None = None
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._refresher = Refresher(config, self._store, _SEQUENCE)

    @property
    def store(self) -> PageStore:
        """The pages, to be read only."""
        return self._store

    @property
    def refresher(self) -> Refresher:
        """What keeps the sequence in its budget while it grows; has the gate."""
        return self._refresher

    def num_tokens(self, layer: int = 0) -> int:
        """Tokens a layer has been given."""
        if self._pending:
            return self._pending[layer][0].shape[1] if layer < len(self._pending) else 0
        return self._store.num_tokens(_SEQUENCE, layer)

    def limit_bytes(self) -> int:
        """Bytes the budget allows at the present length."""
        return self.config.budget.resolve(self.config.geometry, self.num_tokens())

    def resident_bytes(self) -> int:
        """Bytes of every tensor the sequence keeps alive, the controller's own included."""
        return self._store.live_bytes + self._refresher.num_bytes

    def ledger(self) -> ByteLedger:
        """The same bytes by kind; the controller's notes are tags."""
        ledger = self._store.ledger()
        return replace(ledger, tags=ledger.tags + self._refresher.num_bytes)

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, *, query: Tensor | None = None
    ) -> None:
        """Take a layer of the prompt; the last one triggers the decision about all.

        Raises:
            InfeasibleBudget: The parts that must stay dense do not fit the budget.
            ValueError: A layer comes out of order or without its queries.
        """
        if query is None:
            raise ValueError("retention chooses by attention: prefill needs the layer's queries")
        if layer != len(self._pending) or self.contract is not None:
            raise ValueError(f"layer {layer} is out of order: {len(self._pending)} came before")
        found = self._once(
            ("measured", layer),
            lambda: measure_layer(self.config, self._codec, layer, (query, keys, values)),
        )
        pricer = self._pricer = self._pricer or self._start(keys.shape[1])
        priced = self._once(("priced", pricer.key, layer), lambda: pricer.price(found))
        notes = self._once(
            ("notes", layer), lambda: take_notes(self.config, layer, found, query, keys)
        )
        # measured where the states are, decided on the CPU
        self.features.append(found.features.to("cpu"))
        self._refresher.learn(notes.to("cpu"))
        self._controller.add_layer(priced.to("cpu"))
        self._pending.append((keys, values))
        if layer == self.config.geometry.num_layers - 1:
            self._write(keys.shape[1])

    def _once(self, key: Hashable, find: Callable[[], Found]) -> Found:
        return find() if self._measured is None else self._measured.once(key, find)

    def _start(self, num_tokens: int) -> LayerPricer:
        config = self.config
        segments = config.segments.label(num_tokens, recent_tokens=min(RUN_TOKENS, num_tokens))
        return LayerPricer(config.page_costs(), config.policy, config.options, segments)

    def _write(self, tokens: int) -> None:
        """Decide about all layers and store them."""
        paged = paged_tokens(tokens)
        store_config = self.config.store_config()
        notes = self._refresher.num_bytes
        contract = self._controller.decide(
            self._refresher.usable(self.config.budget.resolve(self.config.geometry, tokens)),
            lambda contract: (
                notes
                + contract_bytes(store_config, contract, paged, is_aligned=self.config.is_aligned)
            ),
        )
        self.contract = contract
        for layer, (keys, values) in enumerate(self._pending):
            decision = contract.layer(layer)
            decision = replace(
                decision,
                tier_id=decision.tier_id[:, :paged],
                protected=decision.protected[:, :paged],
            )
            self._store.write(
                _SEQUENCE, layer, decision, keys[:, :paged], values[:, :paged], torch.arange(paged)
            )
            self._store.append(_SEQUENCE, layer, keys[:, paged:], values[:, paged:])
        self._pending = []
        self._refresher.begin(paged, self._controller.price, self._controller.loss)
        # what was priced is not needed any more
        self._controller = RetentionController(self.config.page_costs(), self.config.options)

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        options: AttentionOptions,
        *,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Attend with new tokens, dense among themselves; after the last layer meet the budget."""
        output = attend_and_append(
            self._store,
            self._backend,
            (_SEQUENCE, layer),
            (query, keys, values),
            options,
            sink_logits=sink_logits,
        )
        if layer == self.config.geometry.num_layers - 1 and not self.is_frozen:
            self._refresher.settle()
        return output

    def crop(self, num_tokens: int) -> None:
        """Forget the tokens from ``num_tokens`` on."""
        self._store.crop(_SEQUENCE, num_tokens)
        self._refresher.crop(num_tokens)
