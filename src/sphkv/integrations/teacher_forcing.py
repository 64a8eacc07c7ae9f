# SPDX-License-Identifier: Apache-2.0
"""Run a transformers model with its keys and values replaced, for measurements.

A codec's loss is measured by decoding what it stored and letting the model attend to that, all
positions at once. Serving never does this; it reads codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sphkv.integrations.progress import layer_progress

StateTransform = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""``(layer, query, keys, values) -> (keys, values)``, each ``[heads, tokens, head_dim]``."""

_NAME = "sphkv_teacher_forcing"
_LOGIT_ROWS = 512


@contextmanager
def routed_attention(
    model: PreTrainedModel, name: str, attend: Callable[..., tuple[Tensor, Tensor | None]]
) -> Iterator[None]:
    """Within the context every layer calls ``attend``, registered under ``name``."""
    previous = model.config._attn_implementation
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


@contextmanager
def transformed_states(model: PreTrainedModel, transform: StateTransform) -> Iterator[None]:
    """Within the context, every layer attends to what ``transform`` returns.

    Args:
        model: A decoder whose attention goes through the attention interface.
        transform: Called once per layer and forward pass; batch size 1 only.
    """

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if query.shape[0] != 1:
            raise ValueError(f"teacher forcing needs batch size 1, got {query.shape[0]}")
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        new_key, new_value = transform(layer, query[0], key[0], value[0])
        result: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, new_key[None].to(query.dtype), new_value[None].to(query.dtype),
            *args, **kwargs,
        )  # fmt: skip
        return result

    with routed_attention(model, _NAME, attend):
        yield


@torch.no_grad()
def hidden_states(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Final hidden states ``[tokens, width]`` of one sequence ``[1, tokens]``, no cache."""
    with layer_progress(model, "forward", input_ids.shape[1]):
        output = model.base_model(input_ids=input_ids, use_cache=False)
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Next-token log-probabilities ``[rows, vocabulary]`` a few rows at a time."""
    head = model.get_output_embeddings()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    for at in range(0, hidden.shape[0], _LOGIT_ROWS):
        rows = slice(at, min(at + _LOGIT_ROWS, hidden.shape[0]))
        logits = head(hidden[rows]).float()
        if cap:
            logits = cap * torch.tanh(logits / cap)
        yield rows, torch.log_softmax(logits, -1)
