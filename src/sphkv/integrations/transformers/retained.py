# SPDX-License-Identifier: Apache-2.0
"""``RetainedCache``: a ``past_key_values`` that keeps, demotes or drops under a byte budget."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sphkv.attention.api import get_backend
from sphkv.attention.request import DecodeBackend
from sphkv.cache.plan import CacheConfig
from sphkv.cache.prompt import PromptCalibrator
from sphkv.cache.retained import RetainedSequence
from sphkv.cache.retained_config import RetainedConfig
from sphkv.codec.calibration import Calibration
from sphkv.codec.calibration_file import load_calibration
from sphkv.codec.states import SphericalCodec
from sphkv.core.budget import ByteBudget
from sphkv.integrations.transformers.architecture import (
    ModelLayout,
    UnsupportedModelError,
    describe_model,
)
from sphkv.integrations.transformers.attached import AttachedCache
from sphkv.integrations.transformers.attachment import (
    AttentionCall,
    AttentionResult,
)
from sphkv.integrations.transformers.forward import read_options, read_step
from sphkv.retention.gate import GateOptions
from sphkv.retention.policy import RetentionPolicy, load_policy
from sphkv.retention.protection import ProtectionRule
from sphkv.retention.segments import SegmentSpans
from sphkv.store.ledger import ByteLedger

DEFAULT_BUDGET = "10%"
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RetentionOptions:
    """Settings of a retained cache.

    Attributes:
        protect: Token ranges ``(start, stop)`` of the prompt that stay bfloat16: instructions,
            tool schemas, evidence.
        retrieved: Token ranges of retrieved passages, which the policy weighs by themselves.
        policy: Weights, or a file that ``sphkv fit-policy`` wrote; the fixed recipe if None.
        gate: Stability gate, told the margin of the two best tokens of every pass; off if None.
        backend: What runs decode attention, see ``sphkv.attention.api``.
    """

    protect: Sequence[Span] = ()
    retrieved: Sequence[Span] = ()
    policy: RetentionPolicy | Path | str | None = None
    gate: GateOptions | None = None
    backend: str = "auto"


class RetainedCache(AttachedCache):
    """One sequence under a byte budget that holds after every step.

    The first pass is the prompt: the model's own attention runs, and when its last layer is done
    the controller decides for every token of every head at which tier it stays, if at all. Later
    passes read what is kept; new tokens are decided about as their pages fill.

    Attributes:
        sequence: The cache itself, free of transformers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: ModelLayout,
        config: RetainedConfig,
        calibration: Calibration | None,
        backend: DecodeBackend,
    ) -> None:
        """Attach to a model; users call ``for_model``."""
        super().__init__(model, layout)
        self._config = config
        self._backend = backend
        self._codec = None if calibration is None else SphericalCodec(calibration)
        self._has_new_logits = False
        self._unwatch = None if config.gate is None else _watch_logits(self, model)
        self.reset()

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        budget: str | int | ByteBudget = DEFAULT_BUDGET,
        *,
        calibration: Calibration | Path | str | None = None,
        options: RetentionOptions | None = None,
    ) -> RetainedCache:
        """Make a cache for a model and route the model's attention through it.

        Args:
            model: A causal language model with full attention in every layer, on the CPU.
            budget: Ceiling of the sequence at every step: ``"10%"`` of a dense bfloat16 cache,
                ``"512B/token"``, ``"64MiB"`` or whole bytes, everything charged.
            calibration: Codebooks or a file of them; fitted on the prompt if None.
            options: Protected spans, policy and backend.

        Raises:
            UnsupportedModelError: The model cannot be served; the message says why.
            ValueError: The calibration or the policy belongs to another model.
        """
        options = options or RetentionOptions()
        layout = describe_model(model)
        _check_layout(layout)
        policy = options.policy
        if isinstance(policy, Path | str):
            policy = load_policy(Path(policy))
        config = RetainedConfig(
            layout.geometry,
            layout.ropes,
            ByteBudget.parse(budget),
            policy=policy or RetentionPolicy(),
            protection=ProtectionRule(spans=tuple(options.protect)),
            segments=SegmentSpans(tuple(options.retrieved)),
            gate=options.gate,
        )
        if isinstance(calibration, Path | str):
            calibration = load_calibration(
                calibration, geometry=layout.geometry, ropes=layout.ropes
            )
        return cls(model, layout, config, calibration, get_backend(options.backend))

    @property
    def config(self) -> RetainedConfig:
        """Tiers, policy and budget in use."""
        return self._config

    @property
    def backend_name(self) -> str:
        """What runs decode attention."""
        return self._backend.name

    @property
    def budget(self) -> ByteBudget:
        """The budget."""
        return self._config.budget

    @property
    def length(self) -> int:
        """Tokens the cache was given."""
        return self._length

    @property
    def is_real(self) -> Tensor:
        """``[1, tokens]``: nothing is padding."""
        return torch.ones(1, self.length, dtype=torch.bool)

    @property
    def needs_mask(self) -> bool:
        """Only the prompt's pass runs the model's own attention, which reads a mask."""
        return self._length == 0

    def ledger(self) -> ByteLedger:
        """Resident bytes by kind; the controller's notes are tags."""
        return self.sequence.ledger()

    def __repr__(self) -> str:
        """Budget and how much it holds."""
        return (
            f"RetainedCache(budget={str(self.budget)!r}, tokens={self.length}, "
            f"bytes={self.ledger().total})"
        )

    def reset(self) -> None:
        """Forget all tokens; a calibration stays."""
        self._calibrator = None
        codec = self._codec
        if codec is None:
            self._calibrator = self._start_calibrating()
            codec = SphericalCodec(self._calibrator.calibration)
        self.sequence = RetainedSequence(self._config, codec, self._backend)
        self._length = 0
        self._fresh: dict[int, tuple[Tensor, Tensor]] = {}

    def _start_calibrating(self) -> PromptCalibrator:
        tiers = self._config.tiers
        layout = self._layout
        config = CacheConfig(
            layout.geometry, layout.ropes, layout.windows, tiers, tiers[tiers.dense_id].name
        )
        return PromptCalibrator(config, model_id="prompt")

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RetainedCache:
        """Called by the hook on the decoder before each forward pass that uses this cache."""
        self._check_inference()
        step = read_step(args, kwargs, self)
        if step.is_real.shape[0] != 1:
            raise ValueError(
                f"RetainedCache holds one sequence, the batch has {step.is_real.shape[0]}: budgets "
                "are per sequence, and beams would share one"
            )
        if not bool(step.is_real.all()):
            raise ValueError("RetainedCache takes no padding: a single sequence needs none")
        step.check_continues(self.is_real)
        self._fresh.clear()
        return self

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the new states of a layer; ``attend`` stores them."""
        self._check_attached()
        self._fresh[layer_idx] = (key_states.detach(), value_states.detach())
        return key_states, value_states

    def attend(self, call: AttentionCall) -> AttentionResult:
        """Attention of one layer."""
        keys, values = (states[0] for states in self._fresh.pop(call.layer))
        query = call.query.detach()[0]
        if self._length == 0:
            result = call.dense()
            if self._calibrator is not None:
                self._fit(self._calibrator, call.layer, query, keys)
            self.sequence.prefill(call.layer, keys, values, query=query)
            return result
        options = read_options(call, None)
        sinks = call.options.get("s_aux")
        output = self.sequence.attend(call.layer, query, keys, values, options, sink_logits=sinks)
        return output.to(query.dtype).transpose(0, 1)[None].contiguous(), None

    def _fit(self, calibrator: PromptCalibrator, layer: int, query: Tensor, keys: Tensor) -> None:
        positions = torch.arange(keys.shape[1])
        sinks = self._config.protection.sink_tokens
        calibrator.observe(layer, query, positions)
        calibrator.fit(layer, keys[:, sinks:], positions[sinks:])

    def finish(self, *, is_failed: bool) -> None:
        """The pass ended; a failed one leaves the cache as it was before."""
        self._fresh.clear()
        if is_failed:
            self._crop_to(self._length)
            return
        if self._calibrator is not None:
            self._codec = SphericalCodec(self._calibrator.calibration)
            self._calibrator = None
        self._length = self.sequence.num_tokens()
        self._has_new_logits = True

    def see_logits(self, logits: Tensor) -> None:
        """Tell the gate how close the decision after a pass of this cache is."""
        if self._has_new_logits:
            self._has_new_logits = False
            self.sequence.refresher.observe_logits(logits[0, -1])

    def detach(self) -> None:
        """Let go of the model; the last cache to do so gives it back as it was."""
        super().detach()
        if self._unwatch is not None:
            self._unwatch()

    @property
    def batch_size(self) -> int:
        """One sequence; -1 while the cache is empty."""
        return 1 if self._length else -1

    def _crop_to(self, length: int) -> None:
        if length == 0:
            self.reset()
            return
        self.sequence.crop(length)
        self._length = length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """One sequence stays where it is."""
        if beam_idx.tolist() != [0]:
            raise ValueError(f"RetainedCache holds one sequence, got rows {beam_idx.tolist()}")


def _check_layout(layout: ModelLayout) -> None:
    if any(window is not None for window in layout.windows):
        raise UnsupportedModelError(
            "layers with a sliding window forget by themselves, and the controller does not know "
            "windows: use SphericalCache"
        )
    device = next(layout.decoder.parameters()).device
    if device.type != "cpu":
        raise UnsupportedModelError(
            f"RetainedCache serves models on the CPU, this one is on {device}: use SphericalCache"
        )


def _watch_logits(
    cache: RetainedCache, model: PreTrainedModel
) -> weakref.finalize[[], RetainedCache]:
    """Show a cache what the language-model head says, for as long as the cache lives."""
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language-model head, whose margins a gate needs"
        )
    watcher = weakref.ref(cache)

    def look(_: torch.nn.Module, __: tuple[Any, ...], logits: Tensor) -> None:
        if (watching := watcher()) is not None:
            watching.see_logits(logits)

    handle = head.register_forward_hook(look)
    release = weakref.finalize(cache, handle.remove)
    release.atexit = False
    return release
