# SPDX-License-Identifier: Apache-2.0
"""A sequence under a byte budget: the controller decides, the store carries it out."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions, DecodeBackend
from sphkv.cache.retained_attention import attend_and_append
from sphkv.cache.retained_bytes import contract_bytes
from sphkv.cache.retained_config import RetainedConfig
from sphkv.cache.retained_errors import measure_tier_errors, sample_positions
from sphkv.cache.retained_refresh import Refresher
from sphkv.codec.states import SphericalCodec
from sphkv.core.contract import WriteContract
from sphkv.core.tiers import RUN_TOKENS
from sphkv.retention.controller import LayerInput, RetentionController
from sphkv.retention.features import (
    AttentionRows,
    TokenFeatures,
    expected_rows,
    measure_features,
    mix_rows,
    window_rows,
)
from sphkv.store.ledger import ByteLedger
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
        measured: dict[int, LayerInput] | None = None,
    ) -> None:
        """Start empty.

        Args:
            config: Budget, tiers and controller.
            codec: Encoder with the model's codebooks.
            backend: What runs decode attention.
            measured: Layers of the same prompt and policy that another sequence measured, by
                index; layers that are missing are measured and added. For comparing variants.
        """
        self.config = config
        self.contract: WriteContract | None = None
        self.features: list[TokenFeatures] = []
        self.is_frozen = False
        self._codec = codec
        self._measured = measured
        self._backend = backend
        self._store = PageStore(config.store_config(), codec)
        self._store.create(_SEQUENCE)
        self._controller: RetentionController | None = None
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
        if self._controller is None:
            self._controller = self._start(keys.shape[1])
        known = None if self._measured is None else self._measured.get(layer)
        found = known or self._measure(layer, keys, values, query)
        if self._measured is not None:
            self._measured[layer] = found
        self._learn(layer, found, keys, query)
        self._controller.add_layer(found)
        self._pending.append((keys, values))
        if layer == self.config.geometry.num_layers - 1:
            self._write(keys.shape[1])

    def _start(self, num_tokens: int) -> RetentionController:
        config = self.config
        segments = config.segments.label(num_tokens, recent_tokens=min(RUN_TOKENS, num_tokens))
        return RetentionController(
            config.page_costs(), policy=config.policy, options=config.options, segments=segments
        )

    def _measure(self, layer: int, keys: Tensor, values: Tensor, query: Tensor) -> LayerInput:
        """Features, error models and protection of a layer."""
        config, tokens = self.config, keys.shape[1]
        scale = config.geometry.head_dim**-0.5
        window = self._window(tokens)
        rows = self._foretell(layer, keys, query, scale)
        features = measure_features(
            rows, keys, values, sinks=config.protection.sink_tokens, recent=RUN_TOKENS
        )
        positions = sample_positions(0, tokens, config.error_samples)
        errors = measure_tier_errors(
            self._codec,
            layer,
            config.tiers,
            (query[:, window], keys[:, positions], values[:, positions]),
            positions,
            scale=scale,
        )
        protected = config.protection.state_mask(features.radius)
        # what is not paged is dense anyway, and nothing to decide about
        protected[:, paged_tokens(tokens) :] = True
        return LayerInput(features, errors, rows, values, protected)

    def _learn(self, layer: int, found: LayerInput, keys: Tensor, query: Tensor) -> None:
        """Note what decoding needs of a layer."""
        window = self._window(keys.shape[1])
        planes = self._planes(layer, query[:, window], window)
        self.features.append(found.features)
        self._refresher.learn(
            layer, found.features, found.errors, found.rows, (planes, keys, found.values)
        )

    def _window(self, tokens: int) -> Tensor:
        """Positions of the observation window."""
        policy = self.config.policy
        span = min(tokens, policy.window * policy.window_stride)
        return torch.arange(tokens - 1, tokens - 1 - span, -policy.window_stride).flip(0)

    def _foretell(self, layer: int, keys: Tensor, query: Tensor, scale: float) -> AttentionRows:
        """Foretold attention."""
        config, policy, tokens = self.config, self.config.policy, keys.shape[1]
        window = self._window(tokens)
        share = None
        if policy.sensitivity is not None:
            share = torch.tensor(policy.sensitivity[layer])
        votes = window_rows(query[:, window], window, keys, scale=scale, share=share)
        if policy.attention_mix == 0:
            return votes
        seen = torch.arange(max(0, tokens - 4 * policy.window), tokens, 2)
        expected = expected_rows(
            self._planes(layer, query[:, seen], seen),
            self._planes(layer, keys, torch.arange(tokens)),
            config.ropes[layer].frequencies(),
            scale=scale,
            horizon=config.horizon,
            share=share,
        )
        return mix_rows(votes, expected, policy.attention_mix)

    def _planes(self, layer: int, states: Tensor, positions: Tensor) -> Tensor:
        """States ``[heads, tokens, head_dim]`` in planes, before RoPE."""
        rope = self.config.ropes[layer]
        return rope.unrotate(rope.to_planes(states.float()), positions)

    def _write(self, tokens: int) -> None:
        """Decide about all layers and store them."""
        assert self._controller is not None
        paged = paged_tokens(tokens)
        store_config = self.config.store_config()
        notes = self._refresher.num_bytes
        contract = self._controller.decide(
            self._refresher.usable(self.config.budget.resolve(self.config.geometry, tokens)),
            lambda contract: notes + contract_bytes(store_config, contract, paged),
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
        self._controller = None

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


def paged_tokens(num_tokens: int) -> int:
    """Tokens of a prompt that are decided about: whole runs of 16 but the last.

    The last run is one dense page per head until newer tokens follow, the rest opens the tail.

    Raises:
        ValueError: The prompt is shorter than sinks, one run and the newest run.
    """
    whole = num_tokens // RUN_TOKENS * RUN_TOKENS
    if whole < 3 * RUN_TOKENS:
        raise ValueError(
            f"retention needs a prompt of at least {3 * RUN_TOKENS} tokens, got {num_tokens}"
        )
    return whole - RUN_TOKENS
