# SPDX-License-Identifier: Apache-2.0
"""One forward pass of a model that uses a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.cache.engine import CacheEngine
from sphkv.cache.step import StepTokens
from sphkv.integrations.transformers.attachment import AttentionCall, AttentionResult
from sphkv.integrations.transformers.graph import DecoderGraph


class HeldSlots(Protocol):
    """What a cache holds of a batch."""

    @property
    def length(self) -> int:
        """Places of the padded batch."""
        ...

    @property
    def has_padding(self) -> bool:
        """Whether some place holds no token."""
        ...

    @property
    def is_real(self) -> Tensor:
        """``[batch, length]`` bool: which of them are tokens."""
        ...


class CachePass:
    """Hands the attention of every layer to the cache."""

    def __init__(
        self,
        engine: CacheEngine,
        *,
        captured: DecoderGraph | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        """Serve one pass.

        Args:
            engine: The cache.
            captured: What replays the pass as one CUDA graph; None runs it layer by layer.
            on_end: Called after the pass, unless it failed.
        """
        self._engine = engine
        self._captured = captured
        self._on_end = on_end

    @property
    def needs_mask(self) -> bool:
        """Only the model's own attention reads a mask; the cache masks by position."""
        return self._engine.is_dense_step

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The decoder's forward pass, replayed where it was captured."""
        if self._captured is None:
            return forward(*args, **kwargs)
        return self._captured.run(forward, args, kwargs)

    def attend(self, call: AttentionCall) -> AttentionResult:
        """Attention of one layer."""
        engine = self._engine
        if engine.is_dense_step:
            result = call.dense()
            engine.end_layer(call.layer, call.query)
            return result
        options = read_options(call, engine.window(call.layer))
        sinks = call.options.get("s_aux")
        if self._captured is not None:
            states = (call.query, call.key, call.value)
            output = self._captured.attend(call.layer, *states, options, sink_logits=sinks)
            return output.transpose(1, 2).to(call.query.dtype), None
        output = engine.attend(call.layer, call.query, options, sink_logits=sinks)
        return output.transpose(1, 2).contiguous(), None

    def finish(self, *, is_failed: bool) -> None:
        """The pass ended."""
        self._engine.finish(is_failed=is_failed)
        if not is_failed and self._on_end is not None:
            self._on_end()


def read_options(call: AttentionCall, window: int | None) -> AttentionOptions:
    """Scale, soft-cap and window of a layer's attention; raises on what codes cannot carry."""
    given = call.options.get("sliding_window", window)
    if given != window:
        raise RuntimeError(
            f"layer {call.layer} attends with a window of {given}, its config says {window}"
        )
    if call.options.get("position_bias") is not None:
        raise RuntimeError(f"layer {call.layer} adds a position bias, which codes cannot carry")
    scale = call.options.get("scaling")
    if scale is None:
        scale = call.query.shape[-1] ** -0.5
    # transformers' sdpa ignores the soft-cap; decoding must match what the model does
    softcap = None if call.previous == "sdpa" else call.options.get("softcap")
    return AttentionOptions(scale=float(scale), softcap=softcap, window=window)


def read_step(args: tuple[Any, ...], kwargs: dict[str, Any], held: HeldSlots) -> StepTokens:
    """Which tokens a forward pass brings, from the decoder's arguments.

    Raises:
        ValueError: The masks or positions are of a kind the cache cannot follow.
    """
    tokens = kwargs.get("input_ids")
    if tokens is None:
        tokens = kwargs.get("inputs_embeds")
    if tokens is None and args:
        tokens = args[0]
    if not isinstance(tokens, Tensor):
        raise ValueError("the decoder got neither input_ids nor inputs_embeds")
    batch, num_new = tokens.shape[:2]
    return StepTokens(
        is_real=_read_mask(kwargs.get("attention_mask"), batch, num_new, held),
        positions=_read_positions(kwargs.get("position_ids"), batch, num_new, held),
    )


def _read_mask(mask: Any, batch: int, num_new: int, held: HeldSlots) -> Tensor:
    if mask is None:
        if held.has_padding:
            raise ValueError(
                "the cache holds padded rows and this step has no attention_mask: pass the mask "
                f"of all {held.length + num_new} places"
            )
        return torch.ones(batch, num_new, dtype=torch.bool)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        kind = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask must be [batch, tokens] with 0 for padding, got {kind}: masks that "
            "hide some tokens from some others cannot be followed from codes"
        )
    if tuple(mask.shape) != (batch, held.length + num_new):
        raise ValueError(
            f"attention_mask must be {(batch, held.length + num_new)}: {held.length} cached "
            f"places and {num_new} new ones; got {tuple(mask.shape)}"
        )
    if held.length and not held.has_padding and bool(mask.all()):
        return torch.ones(batch, num_new, dtype=torch.bool)
    real = mask.bool().cpu()
    if held.length and not torch.equal(real[:, : held.length], held.is_real):
        raise ValueError("attention_mask changes what was padding when the tokens were cached")
    return real[:, held.length :]


def _read_positions(given: Any, batch: int, num_new: int, held: HeldSlots) -> Tensor:
    if given is None:
        # what decoders do without position_ids: count every slot
        given = torch.arange(held.length, held.length + num_new)[None]
    if not isinstance(given, Tensor) or given.dim() != 2:
        raise ValueError(f"position_ids must be [batch, tokens], got {given!r}")
    return given.cpu().to(torch.int64).expand(batch, -1)
