# SPDX-License-Identifier: Apache-2.0
"""A batch of sequences, each under a byte budget of its own."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions, DecodeBackend
from sphkv.cache.plan import CacheConfig
from sphkv.cache.prompt import PromptCalibrator
from sphkv.cache.retained import RetainedSequence
from sphkv.cache.retained_config import RetainedConfig
from sphkv.cache.rows import attend_rows, real_states
from sphkv.cache.step import StepTokens
from sphkv.codec.calibration import Calibration
from sphkv.codec.states import SphericalCodec
from sphkv.store.ledger import ByteLedger


class RetainedEngine:
    """The retained caches of a batch, one forward pass after another.

    A pass is ``begin``; then for every layer ``update``, and either the model's own attention
    followed by ``settle`` (the prompt) or ``attend``; then ``finish``.

    Attributes:
        config: Budget of each sequence, tiers and controller.
        backend: What runs decode attention.
        rows: The sequences, one per batch row; empty before the prompt.
        is_real: ``[batch, slots]`` bool on the CPU: which slots of the padded batch hold tokens.
    """

    def __init__(
        self, config: RetainedConfig, backend: DecodeBackend, calibration: Calibration | None = None
    ) -> None:
        """Start empty; without a calibration one is fitted on the first prompts."""
        self.config = config
        self.backend = backend
        self._codec = None if calibration is None else SphericalCodec(calibration)
        self.reset()

    @property
    def length(self) -> int:
        """Slots of the padded batch."""
        return self.is_real.shape[1]

    @property
    def is_dense_step(self) -> bool:
        """Whether the model's own attention runs in this pass: only in that of the prompt."""
        return self.length == 0

    def window(self, layer: int) -> None:
        """No layer has a sliding window."""

    def reset(self) -> None:
        """Forget all tokens; a calibration stays."""
        self.rows: list[RetainedSequence] = []
        self.is_real = torch.zeros(0, 0, dtype=torch.bool)
        self._calibrator: PromptCalibrator | None = None
        self._step: StepTokens | None = None
        self._fresh: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, step: StepTokens) -> None:
        """Start a forward pass.

        Raises:
            ValueError: The batch or the positions do not continue what the cache holds.
        """
        if self._step is not None:
            self.finish(is_failed=True)
        batch = step.is_real.shape[0]
        if self.length == 0:
            self.is_real = torch.zeros(batch, 0, dtype=torch.bool)
            self._open(batch)
        elif batch != len(self.rows):
            raise ValueError(f"the cache holds {len(self.rows)} sequences, the step has {batch}")
        step.check_continues(self.is_real)
        self._step = step

    def _open(self, batch: int) -> None:
        codec = self._codec
        if codec is None:
            tiers, geometry = self.config.tiers, self.config.geometry
            no_windows = (None,) * geometry.num_layers
            dense = tiers[tiers.dense_id].name
            config = CacheConfig(
                geometry, self.config.ropes, no_windows, tiers, dense, device=self.config.device
            )
            self._calibrator = PromptCalibrator(config, model_id="prompt")
            codec = SphericalCodec(self._calibrator.calibration)
        self.rows = [RetainedSequence(self.config, codec, self.backend) for _ in range(batch)]

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take the new states of a layer, ``[batch, kv_heads, tokens, head_dim]`` after RoPE."""
        self._fresh[layer] = (keys.detach(), values.detach())
        return keys, values

    def settle(self, layer: int, query: Tensor) -> None:
        """After the model's own attention: store a layer of the prompts.

        Args:
            layer: The layer.
            query: ``[batch, query_heads, tokens, head_dim]`` after RoPE.

        Raises:
            BudgetError: What must stay dense does not fit a budget.
        """
        assert self._step is not None
        keys, values = self._fresh.pop(layer)
        real, positions, query = self._step.is_real, self._step.positions, query.detach()
        if self._calibrator is not None:
            real, positions = real.to(keys.device), positions.to(keys.device)
            self._calibrator.observe(layer, query.transpose(0, 1)[:, real], positions[real])
            chosen = real & (positions >= self.config.protection.sink_tokens)
            self._calibrator.fit(layer, keys.transpose(0, 1)[:, chosen], positions[chosen])
        for index, _, own in real_states(real, query, keys, values):
            self.rows[index].prefill(layer, own[1], own[2], query=own[0])

    def attend(
        self,
        layer: int,
        query: Tensor,
        options: AttentionOptions,
        *,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Attention of the new tokens over what is kept and themselves; see ``CacheEngine``."""
        assert self._step is not None
        states = (query.detach(), *self._fresh.pop(layer))
        return attend_rows(
            self.rows, self._step.is_real, layer, states, options, sink_logits=sink_logits
        )

    def finish(self, *, is_failed: bool = False) -> None:
        """End a forward pass; a failed one leaves the cache as it was before."""
        step, self._step = self._step, None
        self._fresh.clear()
        if step is None:
            return
        if is_failed:
            self.crop(self.length)
            return
        if self._calibrator is not None:
            self._codec = SphericalCodec(self._calibrator.calibration)
            self._calibrator = None
        self.is_real = torch.cat([self.is_real, step.is_real.cpu()], 1)

    def see_logits(self, logits: Tensor) -> None:
        """Tell every gate how close its row's next decision is: ``[batch, tokens, vocabulary]``."""
        for row, is_real, own in zip(self.rows, self.is_real, logits, strict=True):
            if bool(is_real[-1]):
                row.refresher.observe_logits(own[-1])

    def crop(self, length: int) -> None:
        """Forget slots of the padded batch from ``length`` on."""
        if length == 0:
            self.reset()
            return
        self.is_real = self.is_real[:, :length]
        for row, is_real in zip(self.rows, self.is_real, strict=True):
            row.crop(int(is_real.sum()))

    def select_rows(self, index: Tensor) -> None:
        """Make row ``i`` what row ``index[i]`` was.

        Raises:
            ValueError: A row would be there twice: a sequence and its budget have no copies.
        """
        wanted: list[int] = index.tolist()
        if len(set(wanted)) < len(wanted):
            raise ValueError(f"rows under a budget cannot be copied, got {wanted}: beams share one")
        if self.length:
            self.rows = [self.rows[row] for row in wanted]
            self.is_real = self.is_real[index.cpu()]

    def ledger(self) -> ByteLedger:
        """Resident bytes of all rows by kind; the controllers' notes are tags."""
        parts = [row.ledger() for row in self.rows]
        kinds = [field.name for field in fields(ByteLedger)]
        return ByteLedger(**{kind: sum(getattr(part, kind) for part in parts) for kind in kinds})
