# SPDX-License-Identifier: Apache-2.0
"""The part that all methods which code states share.

Codes and metadata are real tensors, packed to the bits that are claimed, and the ledger counts
them. Coded tokens sit in pages of 128 with the header and pointer that a page of the page store
has; no slack of a last page is charged, a favour to these methods. A decode step rebuilds the
whole layer in float32 and attends to that, so these methods are format-only: their bytes are
real, their speed is that of reconstruction, and ``peak_bytes`` has the rebuilt layer in it.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.baselines.coded_layer import CodedLayer, StateBlock, StateCodec
from sphkv.baselines.held_states import (
    HeldStates,
    Tagged,
    attend_held,
    check_budget,
    check_query,
    check_states,
    ledger_of,
)
from sphkv.core.geometry import KVGeometry
from sphkv.store.ledger import ByteLedger

_PROBE_SEED = 0


class QuantisedCache:
    """A ``CacheMethod`` that codes every token but a few.

    Attributes:
        name: Label in reports.
        realisation: How decoding is carried out.
        budget: Share of dense bytes, everything charged, that the prompt may take.
        codec: The setting in use; None until the length of the prompt is known.
        keeps_rebuilt: Whether every layer stays rebuilt between steps. It makes long runs of
            many steps cheap to evaluate and changes no output; ``peak_bytes`` then has all
            layers in it, and step times are not those of the method.
    """

    realisation = "format-only"

    def __init__(
        self, name: str, geometry: KVGeometry, codecs: Sequence[StateCodec], budget: float
    ) -> None:
        """Start empty.

        Args:
            name: Label in reports.
            geometry: Sizes of the model.
            codecs: The settings of the method, the best first.
            budget: Share of dense bytes.
        """
        if not codecs:
            raise ValueError(f"{name} has no setting for {geometry}")
        self.name = name
        self.geometry = geometry
        self.budget = check_budget(budget)
        self.codec: StateCodec | None = None
        self.keeps_rebuilt = False
        self._codecs = tuple(codecs)
        self._layers: list[CodedLayer | None] = [None] * geometry.num_layers

    @property
    def setting(self) -> str:
        """Label of the setting in use; empty until there is one."""
        return "" if self.codec is None else self.codec.label

    def num_tokens(self, layer: int = 0) -> int:
        """Tokens a layer has been given."""
        held = self._layers[layer]
        return 0 if held is None else held.num_tokens

    def plan(self, num_tokens: int) -> StateCodec:
        """Take the best setting that fits the budget at so many tokens.

        Raises:
            ValueError: None fits; the message says which share would do.
        """
        dense = self.geometry.dense_bytes_per_token * num_tokens
        least = self.coded_bytes(self._codecs[-1], num_tokens)
        if least > self.budget * dense:
            raise ValueError(
                f"{self.name} needs at least {least / dense:.4f} of the dense bytes of "
                f"{num_tokens} tokens, the budget is {self.budget:g}"
            )

        def fits(codec: StateCodec) -> bool:
            return self.coded_bytes(codec, num_tokens) <= self.budget * dense

        # the settings shrink, so those that fit are the last ones
        first = bisect.bisect_left(self._codecs[:-1], True, key=fits)
        self.codec = self._codecs[first]
        return self.codec

    def coded_bytes(self, codec: StateCodec, num_tokens: int) -> int:
        """Bytes of a prompt of so many tokens, found by coding one layer of noise."""
        one_layer = dataclasses.replace(self.geometry, num_layers=1)
        probe = QuantisedCache(self.name, one_layer, [codec], self.budget)
        probe.codec = codec
        shape = (self.geometry.num_kv_heads, num_tokens, self.geometry.head_dim)
        generator = torch.Generator().manual_seed(_PROBE_SEED)
        keys, values = torch.randn(2, *shape, generator=generator).unbind(0)
        query = keys.repeat_interleave(self.geometry.group_size, 0)
        probe.prefill(0, keys, values, query=query)
        tables = sum(tensor.nbytes for _, tensor in codec.tables())
        return (probe.resident_bytes() - tables) * self.geometry.num_layers + tables

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, *, query: Tensor | None = None
    ) -> None:
        """Code a prompt but for the tokens that the method keeps dense."""
        if self._layers[layer] is not None:
            raise ValueError(f"layer {layer} holds {self.num_tokens(layer)} tokens already")
        check_states(self.geometry, keys, values)
        if query is not None:
            check_query(self.geometry, query, keys.shape[1])
        codec = self.codec or self.plan(keys.shape[1])
        held = CodedLayer(codec, layer, keys, values)
        held.keeps_rebuilt = self.keeps_rebuilt
        held.store_prompt(StateBlock(keys, values, 0, query))
        self._layers[layer] = held

    def read(self, layer: int) -> HeldStates:
        """What queries of a layer see, rebuilt from the codes."""
        return self._layer(layer).read()

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
        """Store the next tokens and attend; full blocks are coded afterwards."""
        check_states(self.geometry, keys, values)
        check_query(self.geometry, query, keys.shape[1])
        held = self._layer(layer)
        outputs = []
        at = 0
        while at < keys.shape[1]:
            part = slice(at, min(keys.shape[1], at + held.room()))
            begin = held.num_tokens
            held.append(keys[:, part], values[:, part])
            positions = torch.arange(begin, held.num_tokens, device=keys.device)
            outputs.append(
                attend_held(
                    query[:, part], held.read(), positions, options, sink_logits=sink_logits
                )
            )
            held.seal()
            at = part.stop
        return torch.cat(outputs, 1) if outputs else query.float()

    def crop(self, num_tokens: int) -> None:
        """Forget the tokens from ``num_tokens`` on.

        Raises:
            ValueError: The cut goes through a coded block that cannot be divided.
        """
        layers = [held for held in self._layers if held is not None]
        for held in layers:
            held.check_crop(num_tokens)
        for held in layers:
            held.crop(num_tokens)

    def keep_rebuilt(self) -> None:
        """From now on, keep every layer rebuilt between steps."""
        self.keeps_rebuilt = True
        for held in self._layers:
            if held is not None:
                held.keeps_rebuilt = True

    def _layer(self, layer: int) -> CodedLayer:
        held = self._layers[layer]
        if held is None:
            raise ValueError(f"layer {layer} has no prompt yet")
        return held

    def tensors(self) -> list[Tagged]:
        """Every live tensor with its ledger kind."""
        tagged = [pair for held in self._layers if held is not None for pair in held.tensors()]
        return tagged + (self.codec.tables() if self.codec is not None else [])

    def resident_bytes(self) -> int:
        """Bytes of every live tensor."""
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def peak_bytes(self) -> int:
        """Resident bytes and the layer, or layers, rebuilt in float32."""
        counts = [held.num_tokens for held in self._layers if held is not None]
        tokens = sum(counts) if self.keeps_rebuilt else max(counts, default=0)
        state = 2 * torch.float32.itemsize * self.geometry.head_dim
        return self.resident_bytes() + tokens * state * self.geometry.num_kv_heads

    def ledger(self) -> ByteLedger:
        """The same bytes by kind: scales, norms and outliers of keys count as radii."""
        return ledger_of(self.tensors())
