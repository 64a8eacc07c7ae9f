# SPDX-License-Identifier: Apache-2.0
"""One forward pass of a model that uses a cache, and decode steps replayed as CUDA graphs.

After the prompt, every step of a coded cache does the same work at the same addresses, so it is
captured once and replayed. The host only counts along; when a page seals it rewrites the lists
that the graph reads.

Between two steps whoever generates chooses the token, and calls the model again, while a GPU would
idle. So once guesses of the token have proved right, the next step is launched as soon as the
logits are queued that it follows from. If other tokens come, the device's counters go back, and the
right step writes over what the wrong one wrote: a slot of the tail that the host has not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from sphkv.attention.request import AttentionOptions, StepGraph
from sphkv.cache.ahead import AHEAD_LOCK, ahead_stream
from sphkv.cache.engine import CacheEngine
from sphkv.cache.step import StepTokens
from sphkv.integrations.transformers.attachment import AttentionCall, AttentionResult
from sphkv.integrations.transformers.guesses import DeviceBool, GuessHistory, most_likely

_WARM_UP_STEPS = 2
# Tokens that a captured step has room for beyond those it began with.
_ROOM_TOKENS = 2048
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

    A pass goes through ``ask`` and ``tell``, which compare its tokens with the guess, ``expect``,
    ``run``, and, once there are logits, ``guess``, which may launch the next one.

    Attributes:
        guesses: What was guessed and launched so far.
    """

    def __init__(self, engine: CacheEngine) -> None:
        """Nothing is captured yet."""
        self._engine = engine
        self.guesses = GuessHistory()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps: StepGraph | None = None
        self._input_ids = torch.empty(0)
        self._hidden = torch.empty(0)
        self._num_single = 0
        self._is_capturing = False
        # the pass that ran last was replayed, and nobody has seen its logits yet
        self._has_replayed = False
        # the graph's own ids are those guessed for the coming pass
        self._has_guess = False
        # the device counts a step that was launched and that the store does not know of
        self._is_counted_ahead = False
        # and it is surely queued: an interrupt may come between the two
        self._is_queued = False
        self._is_hit = False

    def ask(self, kwargs: dict[str, Any]) -> DeviceBool | None:
        """Whether the tokens of the coming pass are those that were guessed, still to be read."""
        ids = kwargs.get("input_ids")
        # of another text nothing was guessed
        if not self._has_guess or not self._is_ready_ahead or not isinstance(ids, Tensor):
            return None
        guessed = self._input_ids
        if ids.shape != guessed.shape or ids.device != guessed.device:
            return None
        return DeviceBool((ids == guessed).all())

    def tell(self, asked: DeviceBool | None) -> None:
        """The answer to ``ask``: what was launched counts if everything is as it was then."""
        is_right = None if asked is None else asked.told
        self.guesses.tell(is_right=is_right)
        self._is_hit = is_right is True and self._is_queued
        self._has_guess = self._has_replayed = False

    @property
    def _is_ready_ahead(self) -> bool:
        """Whether the graph may be replayed as it is once the present pass is over."""
        engine = self._engine
        return (
            self._graph is not None
            and engine.graph is not None
            and engine.graph is self._steps
            and engine.has_room_ahead
            and engine.owns_store
            and max(engine.num_tokens) + 1 < engine.graph.max_tokens
        )

    @torch.no_grad()
    def guess(self, logits: Tensor) -> None:
        """Guess what follows the pass that was replayed, and begin with it if guesses are right.

        Whoever generates goes on meanwhile: the current stream does not wait for the step, which
        begins when all is done that this stream was given so far.

        Args:
            logits: ``[rows, tokens, vocabulary]`` after that pass.
        """
        has_replayed, self._has_replayed = self._has_replayed, False
        ids = self._input_ids
        if not has_replayed or logits.shape[0] != len(ids) or logits.device != ids.device:
            return
        if not self.guesses.is_due():
            return
        ids.copy_(most_likely(logits[:, -1]))
        self._has_guess = True
        # Beside a step that began early the host might not get done with what pages need, and the
        # one behind it would come late: such a step begins when it is asked for.
        if not self.guesses.is_trusted or self._engine.has_work_next:
            return
        if self._is_ready_ahead:
            assert self._graph is not None
            self.guesses.launch()
            self._is_counted_ahead = True
            self._engine.ahead.launch(self._graph.replay, ids.device)
            self._is_queued = True

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
            and self._can_capture(ids)
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
            self.forget()
            return engine.begin_graph(max_tokens=longest + _ROOM_TOKENS)
        return True

    def _can_capture(self, ids: Tensor) -> bool:
        return ids.is_cuda

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One pass of the decoder; nothing waits for the GPU."""
        if self._engine.graph is None:
            # what was to be replayed cannot be captured any more
            self._num_single = 0
            return forward(*args, **kwargs)
        ids, cache = kwargs["input_ids"], kwargs["past_key_values"]
        if self._graph is None or self._steps is not self._engine.graph:
            self._capture(forward, ids, cache)
        if not self._is_hit:
            self._replay(ids)
        self._is_hit = self._is_counted_ahead = self._is_queued = False
        self._has_replayed = True
        hidden: Any = self._hidden
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache)

    def _replay(self, ids: Tensor) -> None:
        """Queue a step for these tokens."""
        assert self._graph is not None
        assert self._steps is not None
        if self._is_counted_ahead:
            # what was launched for other tokens is over by then, and its state is written over
            self._steps.recount()
        self._input_ids.copy_(ids)
        self._graph.replay()

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

    def forget(self) -> None:
        """Let a graph go once it has run: its memory is no longer in the order of the stream."""
        self._engine.ahead.join()
        self._has_guess = self._has_replayed = False
        if self._graph is not None:
            torch.cuda.current_stream().synchronize()
            self._graph = None

    def _capture(self, forward: Callable[..., Any], ids: Tensor, cache: Any) -> None:
        """Record one step; the steps run to warm up leave no trace."""
        step = self._engine.graph
        assert step is not None
        self.forget()
        self._steps = step
        self._input_ids = ids.clone()
        self._is_hit = self._is_counted_ahead = self._is_queued = False
        self._is_capturing = True
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UP_STEPS):
                    self._forward(forward, cache)
                    step.recount()
            torch.cuda.current_stream().wait_stream(side)
            self._record(forward, cache, ids.device)
            step.recount()
        finally:
            self._is_capturing = False

    def _record(self, forward: Callable[..., Any], cache: Any, device: torch.device) -> None:
        graph = torch.cuda.CUDAGraph()
        with AHEAD_LOCK, torch.cuda.graph(graph, stream=ahead_stream(device)):
            self._hidden = self._forward(forward, cache)
        self._graph = graph

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
            # A device is given the model's work first, lest it wait for it; but with the last layer
            # a prompt is decided about, and what follows runs while the host plans pages.
            is_last = call.layer == engine.config.geometry.num_layers - 1
            if is_last:
                engine.end_layer(call.layer, call.query)
            result = call.dense()
            if not is_last:
                engine.end_layer(call.layer, call.query)
            return result
        options = read_options(call, engine.window(call.layer))
        sinks = call.options.get("s_aux")
        if self._captured is not None and engine.graph is not None:
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


def read_step(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    held: HeldSlots,
    *,
    also: DeviceBool | None = None,
) -> StepTokens:
    """Which tokens a forward pass brings, from the decoder's arguments.

    Args:
        args: The decoder's arguments by position.
        kwargs: Those by name.
        held: What the cache holds.
        also: Told if something is read from its device anyway, in the same copy.

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
    if num_new == 1 and (step := _read_single(kwargs, batch, held, also)) is not None:
        return step
    return StepTokens(
        is_real=_read_mask(kwargs.get("attention_mask"), batch, num_new, held),
        positions=_read_positions(kwargs.get("position_ids"), batch, num_new, held, also),
    )


def _read(numbers: Tensor, also: DeviceBool | None) -> Tensor:
    """Integers ``[count]`` on the CPU, and in the same copy what else is to be told."""
    if also is None or also.told is not None or also.value.device != numbers.device:
        return numbers.cpu().to(torch.int64)
    told = torch.cat([also.value[None].to(torch.int64), numbers.to(torch.int64)]).cpu()
    also.told = bool(told[0])
    return told[1:]


def _read_single(
    kwargs: dict[str, Any], batch: int, held: HeldSlots, also: DeviceBool | None
) -> StepTokens | None:
    """A step of one token for every row, where nothing is padded; None if it may be another.

    Mask and positions are read together: a GPU is waited for once.
    """
    mask, given = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if not isinstance(mask, Tensor) or not isinstance(given, Tensor) or held.has_padding:
        return None
    if tuple(mask.shape) != (batch, held.length + 1):
        return None
    if tuple(given.shape) not in ((1, 1), (batch, 1)):
        return None
    told = _read(torch.cat([mask.all()[None].to(torch.int64), given.flatten()]), also)
    if not bool(told[0]):
        return None
    is_real = torch.ones(batch, 1, dtype=torch.bool)
    return StepTokens(is_real=is_real, positions=told[1:, None].expand(batch, -1))


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


def _read_positions(
    given: Any, batch: int, num_new: int, held: HeldSlots, also: DeviceBool | None
) -> Tensor:
    if given is None:
        # what decoders do without position_ids: count every slot
        given = torch.arange(held.length, held.length + num_new)[None]
    if not isinstance(given, Tensor) or given.dim() != 2:
        raise ValueError(f"position_ids must be [batch, tokens], got {given!r}")
    return _read(given.flatten(), also).view(given.shape).expand(batch, -1)
