# SPDX-License-Identifier: Apache-2.0
"""Exact attention over a prompt's own states: the reference that every method is compared with.

It keeps float32 states as the model computed them. It is no operating point: a dense cache that
pays for its pages is one of the methods.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sphkv.attention.request import AttentionOptions
from sphkv.integrations.prompt_states import LayerStates, PromptStates
from sphkv.store.ledger import ByteLedger


class DenseReference:
    """A ``CacheMethod`` that stores everything exactly and remembers the queries it saw.

    Attributes:
        name: Label in reports.
    """

    name = "reference"

    def __init__(self, states: PromptStates, *, capacity: int) -> None:
        """Hold a prompt's states and room for more tokens.

        Args:
            states: The prompt.
            capacity: Tokens that may come after it.
        """
        self._length = [states.num_tokens] * len(states.layers)
        self._queries: list[list[Tensor]] = [[] for _ in states.layers]
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        for part in states.layers:
            heads, tokens, dim = part.keys.shape
            for held, given in ((self._keys, part.keys), (self._values, part.values)):
                room = given.new_empty(heads, tokens + capacity, dim)
                room[:, :tokens] = given
                held.append(room)

    def num_tokens(self, layer: int = 0) -> int:
        """Tokens a layer has been given."""
        return self._length[layer]

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, *, query: Tensor | None = None
    ) -> None:
        """The prompt was given at the start."""
        raise ValueError(f"layer {layer} of the reference holds its prompt already")

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
        """Store new tokens and attend exactly; full attention only."""
        if sink_logits is not None or options.window is not None or options.softcap is not None:
            raise ValueError("the reference knows neither sinks, windows nor soft-caps")
        begin, new = self._length[layer], query.shape[1]
        end = begin + new
        self._keys[layer][:, begin:end] = keys
        self._values[layer][:, begin:end] = values
        self._queries[layer].append(query)
        self._length[layer] = end
        seen = torch.ones(new, end, dtype=torch.bool, device=query.device).tril(begin)
        return scaled_dot_product_attention(
            query[None].float(),
            self._keys[layer][None, :, :end].float(),
            self._values[layer][None, :, :end].float(),
            attn_mask=seen,
            scale=options.scale,
            enable_gqa=True,
        )[0]

    def crop(self, num_tokens: int) -> None:
        """Forget the tokens from ``num_tokens`` on, but not their queries."""
        self._length = [min(length, num_tokens) for length in self._length]

    def resident_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(part.nbytes for part in (*self._keys, *self._values))

    def ledger(self) -> ByteLedger:
        """The same bytes by kind."""
        kinds = dict.fromkeys(ByteLedger.__slots__, 0)
        kinds["codes"] = sum(part.nbytes for part in self._keys)
        kinds["values"] = sum(part.nbytes for part in self._values)
        return ByteLedger(**kinds)

    def extended(self, states: PromptStates, input_ids: Tensor, hidden: Tensor) -> PromptStates:
        """The prompt with the tokens attended since, as if read in one pass.

        Args:
            states: The prompt this was made from.
            input_ids: ``[1, tokens]`` the tokens since.
            hidden: ``[tokens, width]`` their final hidden states.
        """
        layers = [
            LayerStates(
                torch.cat([part.query, *self._queries[layer]], 1),
                self._keys[layer][:, : self._length[layer]],
                self._values[layer][:, : self._length[layer]],
            )
            for layer, part in enumerate(states.layers)
        ]
        ids = torch.cat([states.input_ids, input_ids], 1)
        return PromptStates(ids, ids[:, :0], layers, hidden[-1:])
