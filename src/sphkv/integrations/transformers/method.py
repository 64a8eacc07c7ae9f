# SPDX-License-Identifier: Apache-2.0
"""Any way of keeping a cache as the ``past_key_values`` of a model, one sequence at a time.

Other methods run through the same attachment as ours, so that a comparison compares caches alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sphkv.cache.method import CacheMethod, MethodRecord
from sphkv.cache.step import StepTokens
from sphkv.integrations.transformers.architecture import describe_model
from sphkv.integrations.transformers.attached import AttachedCache
from sphkv.integrations.transformers.attachment import AttentionCall, AttentionResult, EagerPass
from sphkv.integrations.transformers.forward import read_options, read_step
from sphkv.store.ledger import ByteLedger


class MethodCache(AttachedCache):
    """Runs a ``CacheMethod`` inside a model: the first pass is its prompt, the others extend it.

    Attributes:
        method: What keeps the states.
    """

    def __init__(self, model: PreTrainedModel, method: CacheMethod) -> None:
        """Attach a method to a model; it may hold a prompt already."""
        super().__init__(model, describe_model(model))
        self.method = method
        self._num_tokens = method.num_tokens()

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return self._num_tokens

    @property
    def has_padding(self) -> bool:
        """One sequence has none."""
        return False

    @property
    def is_real(self) -> Tensor:
        """``[1, length]`` bool: there is no padding."""
        return torch.ones(1, self._num_tokens, dtype=torch.bool)

    def ledger(self) -> ByteLedger:
        """Resident bytes by kind."""
        return self.method.ledger()

    def describe(self) -> MethodRecord:
        """What is in use, for a record."""
        return self.method.describe()

    def _crop_to(self, length: int) -> None:
        self.method.crop(length)
        self._num_tokens = length

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MethodPass:
        """Called by the hook on the decoder before each forward pass that uses this cache."""
        self._check_inference()
        step = read_step(args, kwargs, self)
        if step.is_real.shape[0] != 1 or not bool(step.is_real.all()):
            raise ValueError(
                f"a cache method holds one sequence without padding, got a batch of "
                f"{step.is_real.shape[0]}"
            )
        step.check_continues([self._num_tokens])
        return MethodPass(self, step)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hands new states through; the method stores them when it attends."""
        self._check_attached()
        return key_states, value_states

    def extend(self, num_tokens: int) -> None:
        """A pass brought so many tokens."""
        self._num_tokens += num_tokens


class MethodPass(EagerPass):
    """One forward pass over a ``MethodCache``."""

    def __init__(self, cache: MethodCache, step: StepTokens) -> None:
        self._cache = cache
        self._is_prompt = cache.length == 0
        self._num_new = step.is_real.shape[1]

    @property
    def needs_mask(self) -> bool:
        """Only the prompt runs through the model's own attention."""
        return self._is_prompt

    def attend(self, call: AttentionCall) -> AttentionResult:
        """Attention of one layer."""
        method = self._cache.method
        query, keys, values = (part[0].detach() for part in (call.query, call.key, call.value))
        if self._is_prompt:
            result = call.dense()
            method.prefill(call.layer, keys, values, query=query)
            return result
        options = read_options(call, self._cache.window(call.layer))
        sinks = call.options.get("s_aux")
        output = method.attend(call.layer, query, keys, values, options, sink_logits=sinks)
        return output.to(call.query.dtype).transpose(0, 1)[None].contiguous(), None

    def finish(self, *, is_failed: bool) -> None:
        """The pass ended."""
        if not is_failed:
            self._cache.extend(self._num_new)
