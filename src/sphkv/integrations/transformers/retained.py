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
from sphkv.cache.retained import RetainedSequence
from sphkv.cache.retained_config import RetainedConfig, retention_tiers
from sphkv.cache.retained_engine import RetainedEngine
from sphkv.codec.calibration import Calibration
from sphkv.codec.calibration_file import load_calibration
from sphkv.core.budget import ByteBudget
from sphkv.errors import UnsupportedModelError
from sphkv.integrations.transformers.architecture import ModelLayout, describe_model
from sphkv.integrations.transformers.attached import AttachedCache
from sphkv.integrations.transformers.forward import CachePass, read_step
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
        page_tokens: States of a coded page, a multiple of 32. Small pages suit tight budgets and
            short prompts; the kernel of the ``cuda`` backend reads pages of 128 and leaves others
            to Triton.
    """

    protect: Sequence[Span] = ()
    retrieved: Sequence[Span] = ()
    policy: RetentionPolicy | Path | str | None = None
    gate: GateOptions | None = None
    backend: str = "auto"
    page_tokens: int = 32


class RetainedCache(AttachedCache):
    """Sequences under a byte budget each, which holds after every step.

    The first pass is the prompt: the model's own attention runs, and when its last layer is done
    the controller decides for every token of every head at which tier it stays, if at all. Later
    passes read what is kept; new tokens are decided about as their pages fill.

    Attributes:
        engine: The cache itself, free of transformers.
    """

    def __init__(self, model: PreTrainedModel, layout: ModelLayout, engine: RetainedEngine) -> None:
        """Attach to a model; users call ``for_model``."""
        super().__init__(model, layout)
        self.engine = engine
        self._has_new_logits = False
        self._unwatch = None if engine.config.gate is None else _watch_logits(self, model)

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
            model: A causal language model with full attention in every layer.
            budget: Ceiling of each sequence at every step: ``"10%"`` of a dense bfloat16 cache,
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
        backend = get_backend(options.backend, layout.device)
        config = RetainedConfig(
            layout.geometry,
            layout.ropes,
            ByteBudget.parse(budget),
            retention_tiers(options.page_tokens),
            device=str(layout.device),
            policy=policy or RetentionPolicy(),
            protection=ProtectionRule(spans=tuple(options.protect)),
            segments=SegmentSpans(tuple(options.retrieved)),
            gate=options.gate,
        )
        if isinstance(calibration, Path | str):
            calibration = load_calibration(
                calibration, geometry=layout.geometry, ropes=layout.ropes
            )
        engine = RetainedEngine(config, backend, calibration)
        return cls(model, layout, engine)

    @property
    def config(self) -> RetainedConfig:
        """Tiers, policy and budget in use."""
        return self.engine.config

    @property
    def backend_name(self) -> str:
        """What runs decode attention."""
        return self.engine.backend.name

    @property
    def budget(self) -> ByteBudget:
        """The budget of each sequence."""
        return self.config.budget

    @property
    def sequences(self) -> list[RetainedSequence]:
        """The sequences, one per batch row; none before the prompt."""
        return self.engine.rows

    @property
    def length(self) -> int:
        """Slots of the padded batch, as mask and positions count them."""
        return self.engine.length

    @property
    def batch_size(self) -> int:
        """Sequences in the batch; -1 while the cache is empty."""
        return len(self.sequences) or -1

    def ledger(self) -> ByteLedger:
        """Resident bytes of the whole batch by kind; the controller's notes are tags."""
        return self.engine.ledger()

    def __repr__(self) -> str:
        """Budget and how much it holds."""
        return (
            f"RetainedCache(budget={str(self.budget)!r}, tokens={self.length}, "
            f"bytes={self.ledger().total})"
        )

    def begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RetainedPass:
        """Called by the hook on the decoder before each forward pass that uses this cache."""
        self._check_inference()
        self.engine.begin(read_step(args, kwargs, self.engine))
        return RetainedPass(self)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the new states of a layer; ``attend`` stores them."""
        self._check_attached()
        return self.engine.update(layer_idx, key_states, value_states)

    def expect_logits(self) -> None:
        """A pass of this cache has ended: the next logits are its own."""
        self._has_new_logits = True

    def see_logits(self, logits: Tensor) -> None:
        """Tell the gates how close the decisions after a pass of this cache are."""
        if self._has_new_logits:
            self._has_new_logits = False
            self.engine.see_logits(logits)

    def detach(self) -> None:
        """Let go of the model; the last cache to do so gives it back as it was."""
        super().detach()
        if self._unwatch is not None:
            self._unwatch()

    def reset(self) -> None:
        """Forget all tokens; a calibration stays."""
        self.engine.reset()

    def _crop_to(self, length: int) -> None:
        self.engine.crop(length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give rows other places; none can be there twice, as beams would want."""
        self.engine.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, which only once is possible."""
        self.engine.select_rows(torch.arange(len(self.sequences)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self.engine.select_rows(indices)


class RetainedPass(CachePass):
    """A pass whose logits the cache's gates want to see."""

    def __init__(self, cache: RetainedCache) -> None:
        super().__init__(cache.engine)
        self._cache = cache

    def finish(self, *, is_failed: bool) -> None:
        """The pass ended."""
        super().finish(is_failed=is_failed)
        if not is_failed:
            self._cache.expect_logits()


def _check_layout(layout: ModelLayout) -> None:
    if any(window is not None for window in layout.windows):
        raise UnsupportedModelError(
            "layers with a sliding window forget by themselves, and the controller does not know "
            "windows: use SphericalCache"
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
