# SPDX-License-Identifier: Apache-2.0
"""Routing a model's attention through the cache, and giving the model back as it was.

transformers looks attention functions up by a name in the model's config. Attaching registers
one function under the name ``sphkv``, sets that name, and puts two hooks on the decoder that
say which cache a forward pass uses. Without a cache the model's own function runs.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sphkv.errors import UnsupportedModelError
from sphkv.integrations.transformers.architecture import ModelLayout

ATTENTION_NAME = "sphkv"
AttentionResult = tuple[Tensor, Tensor | None]


class ForwardListener(Protocol):
    """What takes part in one forward pass of an attached model."""

    @property
    def needs_mask(self) -> bool:
        """Whether the model's own attention will run and read its mask."""
        ...

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Carry out the decoder's own ``forward``, or replay what it did before."""
        ...

    def attend(self, call: AttentionCall) -> AttentionResult:
        """Output ``[batch, tokens, heads, head_dim]`` of one layer, and weights or None."""
        ...

    def finish(self, *, is_failed: bool) -> None:
        """The pass ended, perhaps by an error."""
        ...


class EagerPass:
    """The part of a ``ForwardListener`` that is the same where every pass runs layer by layer."""

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Carry out the decoder's own ``forward``."""
        return forward(*args, **kwargs)


class AttentionCall:
    """One call of the attention function.

    Attributes:
        layer: Index of the layer.
        query: ``[batch, query_heads, tokens, head_dim]`` after RoPE.
        key: ``[batch, kv_heads, keys, head_dim]`` as the cache returned it.
        value: ``[batch, kv_heads, keys, head_dim]``.
        options: The model's other arguments, such as ``scaling`` or ``s_aux``.
        previous: Name of the attention implementation the model had before.
    """

    def __init__(
        self,
        attachment: Attachment,
        module: nn.Module,
        states: tuple[Tensor, Tensor, Tensor],
        mask: Any,
        options: dict[str, Any],
    ) -> None:
        self._attachment = attachment
        self._module = module
        self._mask = mask
        self.query, self.key, self.value = states
        self.options = options
        self.layer = attachment.layer_of(module)
        self.previous = attachment.previous

    def dense(self) -> AttentionResult:
        """Run the attention function the model had before."""
        function = self._attachment.previous_function(self._module)
        states = (self.query, self.key, self.value)
        result: AttentionResult = function(self._module, *states, self._mask, **self.options)
        return result


_ATTACHMENTS: WeakKeyDictionary[nn.Module, Attachment] = WeakKeyDictionary()
_OWNERS: WeakKeyDictionary[nn.Module, Attachment] = WeakKeyDictionary()
_RUNNING = threading.local()


class Attachment:
    """One model whose attention is routed through this package.

    Holders count: the model is restored when the last one lets go.
    """

    def __init__(self, model: PreTrainedModel, layout: ModelLayout) -> None:
        self.layout = layout
        self._config: Any = model.config
        self._layers = {id(module): layer for layer, module in enumerate(layout.attentions)}
        self._holders = 0
        self._handles: list[Any] = []
        self._forward: Callable[..., Any] | None = None
        self.previous: str = self._config._attn_implementation
        self.listen: Callable[[tuple[Any, ...], dict[str, Any]], ForwardListener | None] | None
        self.listen = None
        for module in layout.attentions:
            self.previous_function(module)
        if self.previous not in (known := list(ALL_MASK_ATTENTION_FUNCTIONS.valid_keys())):
            raise UnsupportedModelError(
                f"attention implementation {self.previous!r} is not supported; known: {known}"
            )

    def layer_of(self, module: nn.Module) -> int:
        """Layer of an attention module."""
        return self._layers[id(module)]

    def previous_function(self, module: nn.Module) -> Callable[..., Any]:
        """The attention function ``module`` used before."""
        home = sys.modules[type(module).__module__]
        eager: Any = getattr(home, "eager_attention_forward", None)
        registry: Any = getattr(home, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
        function: Callable[..., Any] | None = registry.get_interface(self.previous, eager)
        if function is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} has no attention function for {self.previous!r}"
            )
        return function

    def hold(self, model: PreTrainedModel) -> None:
        """Add a holder; the first one switches the model over."""
        self._holders += 1
        if self._holders > 1:
            return
        _register()
        for module in self.layout.attentions:
            _OWNERS[module] = self
        decoder = self.layout.decoder
        self._handles = [
            decoder.register_forward_pre_hook(self._before, with_kwargs=True),
            decoder.register_forward_hook(self._after, always_call=True),
        ]
        # an attribute of the module itself stands before its class's method
        self._forward = decoder.forward
        decoder.forward = self._run
        model.set_attn_implementation(ATTENTION_NAME)

    def release(self, model: PreTrainedModel) -> None:
        """Drop a holder; the last one gives the model back as it was."""
        self._holders -= 1
        if self._holders:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._forward = None
        vars(self.layout.decoder).pop("forward", None)
        model.set_attn_implementation(self.previous)
        for module in self.layout.attentions:
            _OWNERS.pop(module, None)
        _ATTACHMENTS.pop(model, None)

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        passes = _passes()
        passes.append((self, None))
        cache = kwargs.get("past_key_values")
        begin = getattr(cache, "begin_forward", None)
        listener = begin(args, kwargs) if begin is not None else None
        if listener is None and self.listen is not None:
            listener = self.listen(args, kwargs)
        passes[-1] = (self, listener)

    def _after(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        listener = _passes().pop()[1]
        if listener is not None:
            listener.finish(is_failed=output is None)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """What the decoder runs while it is attached: its own forward, as the listener says."""
        assert self._forward is not None
        listener = self.listener()
        if listener is None:
            return self._forward(*args, **kwargs)
        return listener.run(self._forward, args, kwargs)

    def listener(self) -> ForwardListener | None:
        """Who listens to the pass of this model that is running in this thread."""
        for attachment, listener in reversed(_passes()):
            if attachment is self:
                return listener
        return None


def attach(model: PreTrainedModel, layout: ModelLayout) -> Attachment:
    """Route a model's attention through this package; ``Attachment.release`` undoes it."""
    attachment = _ATTACHMENTS.get(model)
    if attachment is None:
        attachment = Attachment(model, layout)
        _ATTACHMENTS[model] = attachment
    attachment.hold(model)
    return attachment


def hold_for(
    cache: Any, model: PreTrainedModel, layout: ModelLayout
) -> weakref.finalize[[Attachment, PreTrainedModel], Any]:
    """Attach a model for as long as ``cache`` lives, or until the result is called."""
    attachment = attach(model, layout)
    release = weakref.finalize(cache, Attachment.release, attachment, model)
    release.atexit = False
    return release


def _passes() -> list[tuple[Attachment, ForwardListener | None]]:
    if not hasattr(_RUNNING, "passes"):
        _RUNNING.passes = []
    passes: list[tuple[Attachment, ForwardListener | None]] = _RUNNING.passes
    return passes


def _register() -> None:
    """Make the name known to transformers, the first time a model is attached."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _mask)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,  # wrappers of attention functions hand it on by position
    **options: Any,
) -> AttentionResult:
    options["dropout"] = dropout
    attachment = _OWNERS.get(module)
    if attachment is None:
        raise RuntimeError(
            f"attention implementation {ATTENTION_NAME!r} is set on a model that is not attached; "
            "use SphericalCache.for_model, or set another implementation"
        )
    call = AttentionCall(attachment, module, (query, key, value), attention_mask, options)
    listener = attachment.listener()
    return call.dense() if listener is None else listener.attend(call)


def _mask(*args: Any, **kwargs: Any) -> Any:
    """The mask of the previous implementation, or none where the cache masks by position."""
    passes = _passes()
    previous = "sdpa"
    if passes:
        attachment, listener = passes[-1]
        previous = attachment.previous
        if listener is not None and not listener.needs_mask:
            return None
    return ALL_MASK_ATTENTION_FUNCTIONS[previous](*args, **kwargs)
