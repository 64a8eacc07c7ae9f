# SPDX-License-Identifier: Apache-2.0
"""A prompt's states, read once by the dense model.

Comparing many methods on one prompt needs the prompt's queries, keys and values only once: each
method stores them its own way, and the model then attends to that store for the tokens after.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sphkv.core.geometry import KVGeometry
from sphkv.integrations.progress import layer_progress
from sphkv.integrations.transformers.listening import transformed_states

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
