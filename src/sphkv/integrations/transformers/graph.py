# SPDX-License-Identifier: Apache-2.0
"""Decode steps of a whole model, each replayed as one CUDA graph.

After the prompt, every step of a coded cache does the same work at the same addresses, so it is
captured once and replayed. The host only counts along; when a page seals it rewrites the lists
that the graph reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from sphkv.attention.request import AttentionOptions
from sphkv.cache.engine import CacheEngine
from sphkv.cache.step import StepTokens

_WARM_UP_STEPS = 2
# Tokens that a captured step has room for beyond those it began with.
_ROOM_TOKENS = 4096
# Arguments of a decoder that a captured step can do without, or carries itself.
_CARRIED = frozenset(
    {
        *("input_ids", "position_ids", "attention_mask", "past_key_values", "use_cache"),
        *("cache_position", "inputs_embeds", "return_dict", "logits_to_keep"),
    }
)


class DecoderGraph:
    """Captures single-token passes of a cache's model, and replays them.

    A graph holds addresses of the cache's pages and lists, so it goes as soon as anything but such
    a step changes the cache; ``CacheEngine.end_graph`` says when.
    """

    def __init__(self, engine: CacheEngine) -> None:
        """Nothing is captured yet."""
        self._engine = engine
        self._graph: torch.cuda.CUDAGraph | None = None
        self._input_ids = torch.empty(0)
        self._hidden = torch.empty(0)
        self._num_single = 0
        self._is_capturing = False

    def expect(self, step: StepTokens, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the coming pass will be replayed; must be asked before ``engine.begin``.

        The second single step in a row is the first that is: one alone is not worth a capture.
        """
        engine = self._engine
        ids = kwargs.get("input_ids")
        is_plain = (
            engine.is_coded
            and not args
            and isinstance(ids, Tensor)
            and ids.is_cuda
            and step.is_real.shape[1] == 1
            and bool(step.is_real.all())
            and all(name in _CARRIED or not value for name, value in kwargs.items())
        )
        self._num_single = self._num_single + 1 if is_plain else 0
        if self._num_single < 2:
            engine.end_graph()
            return False
        longest = max(engine.num_tokens)
        if engine.graph is not None and (
            longest + 1 >= engine.graph.max_tokens or not engine.owns_store
        ):
            engine.end_graph()
        if engine.graph is None:
            self._graph = None
            return engine.begin_graph(max_tokens=longest + _ROOM_TOKENS)
        return True

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BaseModelOutputWithPast:
        """One pass of the decoder; nothing waits for the GPU."""
        ids, cache = kwargs["input_ids"], kwargs["past_key_values"]
        if self._graph is None:
            self._capture(forward, ids, cache)
        assert self._graph is not None
        self._input_ids.copy_(ids)
        self._graph.replay()
        hidden: Any = self._hidden
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache)

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        options: AttentionOptions,
        *,
        sink_logits: Tensor | None,
    ) -> Tensor:
        """Captured attention of one layer, which also stores the new states."""
        graph = self._engine.graph
        assert graph is not None
        return graph.attend(layer, query, keys, values, options, sink_logits=sink_logits)

    def _capture(self, forward: Callable[..., Any], ids: Tensor, cache: Any) -> None:
        """Record one step; the steps run to warm up leave no trace."""
        step = self._engine.graph
        assert step is not None
        self._input_ids = ids.clone()
        self._is_capturing = True
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP_STEPS):
                    self._forward(forward, cache)
                    step.recount()
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._hidden = self._forward(forward, cache)
            step.recount()
        finally:
            self._is_capturing = False

    @torch.no_grad()
    def _forward(self, forward: Callable[..., Any], cache: Any) -> Tensor:
        step = self._engine.graph
        assert step is not None
        step.advance()
        output = forward(
            input_ids=self._input_ids,
            past_key_values=cache,
            position_ids=step.positions,
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden
