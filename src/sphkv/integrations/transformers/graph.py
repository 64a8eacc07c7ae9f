# SPDX-License-Identifier: Apache-2.0
"""Decoding a whole model as one CUDA graph per token.

After the prompt, every step of a coded cache does the same work at the same addresses, so it is
captured once and replayed. The host only counts along; every ``page_tokens`` steps it seals a
page and rewrites the lists that the graph reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from sphkv.attention.request import StepGraph, UnsupportedBatchError
from sphkv.cache.engine import CacheEngine
from sphkv.integrations.transformers.attachment import AttentionCall, AttentionResult
from sphkv.integrations.transformers.cache import SphericalCache
from sphkv.integrations.transformers.forward import read_options
from sphkv.integrations.transformers.layer import LayerView

_WARM_UP_STEPS = 2


class _GraphCache(Cache):
    """The ``past_key_values`` of a captured forward pass, and its listener."""

    def __init__(self, engine: CacheEngine, batch: StepGraph) -> None:
        self._windows = engine.config.windows
        layers = range(len(self._windows))
        super().__init__(layers=[LayerView(self, layer) for layer in layers])
        self._engine = engine
        self._batch = batch

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hands new states through; the captured attention stores them."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots of the batch."""
        return self._engine.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys a mask must cover, and where they start."""
        return self._engine.length + query_length, 0

    @property
    def needs_mask(self) -> bool:
        """Codes are masked by position."""
        return False

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _GraphCache:
        """Listen to this pass."""
        return self

    def attend(self, call: AttentionCall) -> AttentionResult:
        """Attention of one layer."""
        options = read_options(call, self._windows[call.layer])
        sinks = call.options.get("s_aux")
        states = (call.query, call.key, call.value)
        output = self._batch.attend(call.layer, *states, options, sink_logits=sinks)
        return output.transpose(1, 2).to(call.query.dtype), None

    def finish(self, *, is_failed: bool) -> None:
        """Nothing to clean up."""


class GraphDecoder:
    """Decodes tokens of a batch with a coded ``SphericalCache``; the cache stays up to date.

    Attributes:
        tokens: ``[batch, 1]`` int64 the next step reads; the greedy choice after each step.
        logits: ``[batch, vocabulary]`` of the last step.
    """

    def __init__(
        self, model: PreTrainedModel, cache: SphericalCache, *, max_new_tokens: int
    ) -> None:
        """Prepare for steps.

        Args:
            model: The model the cache was made for.
            cache: Holds the prompt, coded, on a Hopper GPU.
            max_new_tokens: Most tokens that will be decoded.

        Raises:
            UnsupportedBatchError: The cache cannot be read by captured steps.
        """
        engine = cache.engine
        if engine.store is None:
            raise UnsupportedBatchError("the cache holds no prompt yet")
        self._model, self._engine = model, engine
        sequences, windows = [row.sequence for row in engine.rows], engine.config.windows
        max_tokens = max(engine.num_tokens) + max_new_tokens
        batch = engine.backend.capture(
            engine.store, sequences, max_tokens=max_tokens, windows=windows
        )
        if batch is None:
            reason = engine.backend.why_not(engine.store, sequences, windows=windows)
            raise UnsupportedBatchError(reason)
        self._batch = batch
        self._cache = _GraphCache(engine, batch)
        self._graph: torch.cuda.CUDAGraph | None = None
        self.tokens = torch.zeros(len(sequences), 1, dtype=torch.int64, device="cuda")
        self.logits = torch.empty(0)

    def step(self) -> Tensor:
        """Feed ``tokens``, which become the greedy choice; returns ``logits``.

        The work is queued; nothing waits for the GPU.
        """
        self._batch.prepare()
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        self._graph.replay()
        self._batch.commit()
        self._count_tokens()
        return self.logits

    def _count_tokens(self) -> None:
        engine = self._engine
        real = torch.ones(engine.batch_size, 1, dtype=torch.bool)
        engine.is_real = torch.cat([engine.is_real, real], 1)

    def _capture(self) -> None:
        """Record one step; the steps run to warm up leave no trace."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        tokens = self.tokens.clone()
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_STEPS):
                self._forward()
                self._restore(tokens)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.logits = self._forward()
        self._restore(tokens)

    def _restore(self, tokens: Tensor) -> None:
        self.tokens.copy_(tokens)
        self._batch.recount()

    @torch.no_grad()
    def _forward(self) -> Tensor:
        self._batch.advance()
        output = self._model(
            input_ids=self.tokens,
            past_key_values=self._cache,
            position_ids=self._batch.positions,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        self.tokens.copy_(logits.argmax(-1, keepdim=True))
        return logits
