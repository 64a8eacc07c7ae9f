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
from sphkv.cache.method import CacheMethodBase
from sphkv.evaluation.harness.states import LayerStates, PromptStates
from sphkv.store.ledger import ByteLedger


class DenseReference(CacheMethodBase):
    """A ``CacheMethod`` that stores everything exactly and remembers the queries it saw.

    Single layers can be changed, to see what a change alone does to the model.

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
        self._gone: dict[int, Tensor] = {}
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

    def change(
        self, layer: int, keys: Tensor, values: Tensor, *, kept: Tensor | None = None
    ) -> None:
        """Put other states in the place of a layer's prompt.

        Args:
            layer: The layer.
            keys: ``[kv_heads, tokens, head_dim]`` of the whole prompt.
            values: ``[kv_heads, tokens, head_dim]``.
            kept: ``[kv_heads, tokens]`` bool; other states are not seen. None keeps all.
        """
        tokens = keys.shape[1]
        self._keys[layer][:, :tokens] = keys
        self._values[layer][:, :tokens] = values
        if kept is not None:
            self._gone[layer] = ~kept

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
        return scaled_dot_product_attention(
            query[None].float(),
            self._keys[layer][None, :, :end].float(),
            self._values[layer][None, :, :end].float(),
            attn_mask=self._seen(layer, query, begin),
            scale=options.scale,
            enable_gqa=True,
        )[0]

    def _seen(self, layer: int, query: Tensor, begin: int) -> Tensor:
        """What the queries may see: ``[tokens, states]``, or by query head if states are gone."""
        heads, new = query.shape[:2]
        seen = torch.ones(new, begin + new, dtype=torch.bool, device=query.device).tril(begin)
        gone = self._gone.get(layer)
        if gone is None:
            return seen
        seen = seen.expand(heads, -1, -1).clone()
        hidden = gone.repeat_interleave(heads // gone.shape[0], 0)  # [query_heads, prompt]
        seen[:, :, : gone.shape[1]] &= ~hidden[:, None]
        return seen

    def tokens_until_change(self) -> int:
        """Nothing stored ever changes, so all that is left may come at once."""
        return max(1, self._keys[0].shape[1] - self._length[0])

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
