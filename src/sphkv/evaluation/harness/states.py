# SPDX-License-Identifier: Apache-2.0
"""A prompt's states, read once by the dense model, and exact attention over them.

Comparing many methods on one prompt needs the prompt's queries, keys and values only once: each
method stores them its own way, and the model then attends to that store for the tokens after.
``DenseReference`` keeps float32 states as the model computed them: every method is compared with
it. It is no operating point: a dense cache that pays for its pages is one of the methods.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sphkv.attention.request import AttentionOptions
from sphkv.cache.method import CacheMethodBase
from sphkv.core.geometry import KVGeometry
from sphkv.integrations.transformers.listening import layer_progress, transformed_states
from sphkv.store.ledger import ByteLedger

_LOGIT_ROWS = 512


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """What one layer computed for the tokens of a prompt, after RoPE.

    Attributes:
        query: ``[query_heads, tokens, head_dim]``.
        keys: ``[kv_heads, tokens, head_dim]``.
        values: ``[kv_heads, tokens, head_dim]``.
    """

    query: Tensor
    keys: Tensor
    values: Tensor

    def head(self, num_tokens: int) -> LayerStates:
        """The first tokens."""
        return LayerStates(
            self.query[:, :num_tokens], self.keys[:, :num_tokens], self.values[:, :num_tokens]
        )

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values on a device; those of a long prompt may wait on another."""
        return self.query.to(device), self.keys.to(device), self.values.to(device)


@dataclass(frozen=True, slots=True, eq=False)
class PromptStates:
    """A prompt with its states, and what the dense model says after it.

    Attributes:
        input_ids: ``[1, tokens]`` of the prompt.
        following: ``[1, tokens]`` that came after the prompt in the text; may be empty.
        layers: States of the prompt in every layer.
        hidden: ``[1 + following, width]`` final hidden states of the dense model, from the last
            token of the prompt on.
    """

    input_ids: Tensor
    following: Tensor
    layers: list[LayerStates]
    hidden: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.input_ids.shape[1]

    @property
    def geometry(self) -> KVGeometry:
        """Shape of the cache that the states fill."""
        first = self.layers[0]
        return KVGeometry(
            num_layers=len(self.layers),
            num_kv_heads=first.keys.shape[0],
            num_query_heads=first.query.shape[0],
            head_dim=first.keys.shape[2],
        )


def read_prompt(model: Any, input_ids: Tensor, *, num_following: int = 0) -> PromptStates:
    """Run the dense model once over a prompt and what follows it.

    Args:
        model: A model the cache can serve.
        input_ids: ``[1, tokens]``, prompt and following tokens.
        num_following: How many of the tokens are not prompt.

    Raises:
        ValueError: No token is left for the prompt, or the model is too short for them.
    """
    total = input_ids.shape[1]
    prompt = total - num_following
    if num_following < 0 or prompt < 1:
        raise ValueError(f"{num_following} of {total} tokens follow: no prompt is left")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and total > limit:
        raise ValueError(f"{total} tokens are more than the model's {limit}")
    layers: dict[int, LayerStates] = {}

    def keep(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        states = LayerStates(query, keys, values).head(prompt)
        layers[layer] = LayerStates(
            states.query.clone(), states.keys.clone(), states.values.clone()
        )
        return keys, values

    with transformed_states(model, keep):
        hidden = hidden_states(model, input_ids)
    return PromptStates(
        input_ids[:, :prompt],
        input_ids[:, prompt:],
        [layers[index] for index in range(len(layers))],
        hidden[prompt - 1 :].clone(),
    )


@torch.no_grad()
def hidden_states(model: Any, input_ids: Tensor) -> Tensor:
    """Final hidden states ``[tokens, width]`` of one sequence ``[1, tokens]``, no cache."""
    with layer_progress(model, "forward", input_ids.shape[1]):
        output = model.base_model(input_ids=input_ids, use_cache=False)
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


@torch.no_grad()
def log_probabilities(model: Any, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Next-token log-probabilities ``[rows, vocabulary]`` a few rows at a time."""
    head = model.get_output_embeddings()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    for at in range(0, hidden.shape[0], _LOGIT_ROWS):
        rows = slice(at, min(at + _LOGIT_ROWS, hidden.shape[0]))
        logits = head(hidden[rows]).float()
        if cap:
            logits = cap * torch.tanh(logits / cap)
        yield rows, torch.log_softmax(logits, -1)


class DenseReference(CacheMethodBase):
    """A ``CacheMethod`` that stores everything exactly and remembers the queries it saw.

    Single layers can be changed, to see what a change alone does to the model.

    Attributes:
        name: Label in reports.
    """

    name = "reference"

    def __init__(
        self, states: PromptStates, *, capacity: int, queries_on: torch.device | None = None
    ) -> None:
        """Hold a prompt's states and room for more tokens.

        Args:
            states: The prompt.
            capacity: Tokens that may come after it.
            queries_on: Where the queries of these are kept, three quarters of all bytes or more;
                where they came from if None.
        """
        self._queries_on = queries_on
        self._length = [states.num_tokens] * len(states.layers)
        self._queries: list[list[Tensor]] = [[] for _ in states.layers]
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._gone: dict[int, Tensor] = {}
        for part in states.layers:
            heads, tokens, dim = part.keys.shape
            for held, given in ((self._keys, part.keys), (self._values, part.values)):
                # layers may wait elsewhere until a method stores them
                room = given.new_empty(heads, tokens + capacity, dim, device=states.hidden.device)
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
        self._queries[layer].append(query.to(self._queries_on or query.device))
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
                torch.cat(
                    [part.query.to(self._queries_on or part.query.device), *self._queries[layer]], 1
                ),
                self._keys[layer][:, : self._length[layer]],
                self._values[layer][:, : self._length[layer]],
            )
            for layer, part in enumerate(states.layers)
        ]
        ids = torch.cat([states.input_ids, input_ids], 1)
        return PromptStates(ids, ids[:, :0], layers, hidden[-1:])
