# SPDX-License-Identifier: Apache-2.0
"""Forward passes without a cache whose attention calls something else, for measurements.

A pass that takes long draws a bar over its layers, for people at a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from sphkv.integrations.transformers.architecture import describe_model
from sphkv.integrations.transformers.attachment import (
    AttentionCall,
    AttentionResult,
    EagerPass,
    attach,
)

_LONG_TOKENS = 512
Attend = Callable[[AttentionCall], AttentionResult]
StateTransform = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""``(layer, query, keys, values) -> (keys, values)``, each ``[heads, tokens, head_dim]``."""


@contextmanager
def layer_progress(model: PreTrainedModel, label: str, num_tokens: int) -> Iterator[None]:
    """Within the context the decoder layers move a bar on stderr.

    Nothing is drawn where stderr is no terminal, or for a pass so short that it would flicker.

    Args:
        model: The model whose passes are watched.
        label: What the pass is for.
        num_tokens: Tokens of the pass.
    """
    layers = getattr(model.base_model, "layers", None)
    if layers is None or num_tokens < _LONG_TOKENS or not sys.stderr.isatty():
        yield
        return
    with tqdm(total=len(layers), desc=f"{label}, {num_tokens} tokens", unit="layer") as bar:

        def advance(*_: object) -> None:
            bar.update()

        handles = [layer.register_forward_hook(advance) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Listener(EagerPass):
    """Hands every layer of a pass to a function."""

    def __init__(self, attend: Attend, *, needs_mask: bool) -> None:
        self.attend = attend
        self.needs_mask = needs_mask

    def finish(self, *, is_failed: bool) -> None:
        pass


@contextmanager
def listening(model: PreTrainedModel, attend: Attend, *, needs_mask: bool = True) -> Iterator[None]:
    """Within the context every layer of a pass without a cache calls ``attend``.

    Args:
        model: A model the cache can serve; it is given back as it was.
        attend: Returns what the layer's attention function would.
        needs_mask: Whether ``attend`` runs the model's own attention, which reads its mask.

    Raises:
        UnsupportedModelError: The model cannot be attached.
    """
    attachment = attach(model, describe_model(model))
    listener = _Listener(attend, needs_mask=needs_mask)

    def listen(_: tuple[Any, ...], __: dict[str, Any]) -> _Listener:
        return listener

    before, attachment.listen = attachment.listen, listen
    try:
        yield
    finally:
        attachment.listen = before
        attachment.release(model)


@contextmanager
def transformed_states(model: PreTrainedModel, transform: StateTransform) -> Iterator[None]:
    """Within the context every layer attends to what ``transform`` returns.

    Args:
        model: A model the cache can serve.
        transform: Called once per layer and forward pass; batch size 1 only.
    """

    def attend(call: AttentionCall) -> AttentionResult:
        if call.query.shape[0] != 1:
            raise ValueError(f"states are transformed one by one, the batch has {len(call.query)}")
        keys, values = transform(call.layer, call.query[0], call.key[0], call.value[0])
        call.key, call.value = (part[None].to(call.query.dtype) for part in (keys, values))
        return call.dense()

    with listening(model, attend):
        yield
