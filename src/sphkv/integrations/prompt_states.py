# SPDX-License-Identifier: Apache-2.0
"""A prompt's states, read once, and a model that continues from any cache method.

Comparing many methods on one prompt needs the prompt's queries, keys and values only once: each
method stores them its own way, and the model then attends to that store for the tokens after.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sphkv.attention.request import AttentionOptions
from sphkv.cache.method import CacheMethod
from sphkv.integrations.teacher_forcing import (
    hidden_states,
    log_probabilities,
    routed_attention,
    transformed_states,
)

_NAME = "sphkv_cache_method"


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


def read_prompt(
    model: PreTrainedModel, input_ids: Tensor, *, num_following: int = 0
) -> PromptStates:
    """Run the dense model once over a prompt and what follows it.

    Args:
        model: A decoder whose attention goes through the attention interface.
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


def store_prompt(method: CacheMethod, states: PromptStates) -> None:
    """Give a method every layer of a prompt."""
    for layer, part in enumerate(states.layers):
        method.prefill(layer, part.keys, part.values, query=part.query)


@contextmanager
def attending(model: PreTrainedModel, method: CacheMethod) -> Iterator[None]:
    """Within the context every layer stores its tokens in ``method`` and attends to it."""

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if query.shape[0] != 1:
            raise ValueError(f"a cache method holds one sequence, the batch has {query.shape[0]}")
        scale = kwargs.get("scaling")
        options = AttentionOptions(
            scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
            window=kwargs.get("sliding_window"),
        )
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        sinks = kwargs.get("s_aux")
        output = method.attend(layer, query[0], key[0], value[0], options, sink_logits=sinks)
        return output.to(query.dtype).transpose(0, 1)[None].contiguous(), None

    with routed_attention(model, _NAME, attend):
        yield


@torch.no_grad()
def continue_prompt(model: PreTrainedModel, method: CacheMethod, input_ids: Tensor) -> Tensor:
    """Final hidden states ``[tokens, width]`` of tokens ``[1, tokens]`` after the stored ones."""
    begin = method.num_tokens()
    positions = torch.arange(begin, begin + input_ids.shape[1], device=input_ids.device)
    with attending(model, method):
        output = model.base_model(
            input_ids=input_ids, position_ids=positions[None], use_cache=False
        )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def generate_greedily(
    model: PreTrainedModel,
    method: CacheMethod,
    input_ids: Tensor,
    num_tokens: int,
    *,
    stop_ids: frozenset[int] = frozenset(),
) -> list[int]:
    """Greedy continuation after ``input_ids`` ``[1, tokens]``; the new tokens stay stored.

    Args:
        model: The model.
        method: Holds the context.
        input_ids: Tokens fed before the first new one; at least one.
        num_tokens: New tokens at most.
        stop_ids: Ids that end the text; they are not returned.
    """
    ids: list[int] = []
    feed = input_ids
    while len(ids) < num_tokens:
        last = continue_prompt(model, method, feed)[-1:]
        token = int(next(log_probabilities(model, last))[1].argmax())
        if token in stop_ids:
            break
        ids.append(token)
        feed = torch.tensor([[token]], device=input_ids.device)
    return ids
