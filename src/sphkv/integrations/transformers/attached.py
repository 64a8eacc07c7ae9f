# SPDX-License-Identifier: Apache-2.0
"""Caches attached to a model: what they have in common, and any ``CacheMethod`` as one of them.

Other methods run through the same attachment as ours, so that a comparison compares caches alone.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from sphkv.cache.method import CacheMethod, MethodRecord
from sphkv.cache.step import StepTokens
from sphkv.integrations.transformers.architecture import ModelLayout, describe_model
from sphkv.integrations.transformers.attachment import (
    AttentionCall,
    AttentionResult,
    EagerPass,
    hold_for,
)
from sphkv.integrations.transformers.forward import read_options, read_step
from sphkv.store.ledger import ByteLedger


class LayerView(CacheLayerMixin):
    """A view of one layer; the cache holds the states of all of them together."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: Cache, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # a strong one would keep a cache that nobody uses attached to its model
        self._cache = weakref.proxy(cache)
        self._layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new states; see the cache's own ``update``."""
        keys, values = self._cache.update(key_states, value_states, self._layer)
        return keys, values

    def get_seq_length(self) -> int:
        """Slots of the padded batch."""
        return int(self._cache.get_seq_length())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys a mask must cover, and where they start."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def reset(self) -> None:
        """One layer alone cannot be changed."""
        raise RuntimeError("reset the cache, not one of its layers")

    def reorder_cache(self, beam_idx: Any) -> None:
        """One layer alone cannot be changed."""
        raise RuntimeError("reorder the cache, not one of its layers")

    def offload(self) -> None:
        """Offloading is not supported."""
        raise RuntimeError("this cache cannot be offloaded")


class AttachedCache(Cache):
    """A ``past_key_values`` through which a model's attention runs until ``detach``."""

    def __init__(self, model: PreTrainedModel, layout: ModelLayout) -> None:
        """Attach to a model."""
        layers = range(layout.geometry.num_layers)
        super().__init__(layers=[LayerView(self, layer) for layer in layers])
        self._model = weakref.ref(model)
        self._layout = layout
        self._release = hold_for(self, model, layout)

    @property
    @abstractmethod
    def length(self) -> int:
        """Places of the padded batch, as mask and positions count them."""

    @abstractmethod
    def _crop_to(self, length: int) -> None:
        """Forget places from ``length`` on."""

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer."""
        return self._layout.windows[layer]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Places of the padded batch, as mask and positions count them."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys a mask must cover, and where they start."""
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens.

        Args:
            tokens_to_remove: Minus the number of tokens; 0 does nothing.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, got {tokens_to_remove}"
            )
        self._crop_to(max(0, self.length + tokens_to_remove))

    def detach(self) -> None:
        """Let go of the model; the last cache to do so gives it back as it was."""
        self._release()

    def __enter__(self) -> Self:
        """Detach at the end of a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Detach."""
        self.detach()

    def _check_inference(self) -> None:
        model = self._model()
        if model is not None and model.training:
            raise ValueError(
                f"{type(self).__name__} serves inference only: call model.eval() first"
            )

    def _check_attached(self) -> None:
        if not self._release.alive:
            raise RuntimeError("the cache is detached from its model: make one with for_model()")


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
