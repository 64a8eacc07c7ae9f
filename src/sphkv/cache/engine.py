# SPDX-License-Identifier: Apache-2.0
"""A batch of sequences that starts dense and becomes coded, free of any model library."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sphkv.attention.api import get_backend
from sphkv.attention.request import AttentionOptions, DecodeBackend
from sphkv.cache.plan import CacheConfig
from sphkv.cache.prompt import PromptCalibrator
from sphkv.cache.rows import attend_rows
from sphkv.cache.sequence import SphericalSequence, open_store, prefill_rows
from sphkv.cache.step import StepTokens
from sphkv.codec.calibration import Calibration
from sphkv.codec.states import SphericalCodec
from sphkv.store.ledger import ByteLedger
from sphkv.store.store import PageStore


class CacheEngine:
    """The cache of a batch, one forward pass after another.

    A pass is ``begin``; then for every layer ``update``, and either the model's own attention
    followed by ``settle`` or ``attend``; then ``finish``. While the cache is dense it returns
    everything it holds from ``update``. The pass in which it knows enough to code ends with
    every state in the page store.

    Attributes:
        config: Sizes and tiers.
        backend: What runs decode attention.
        rows: The coded sequences, one per batch row; empty while the cache is dense.
        store: Their pages; None while the cache is dense.
        is_real: ``[batch, slots]`` bool on the CPU: which slots of the padded batch hold tokens.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        calibration: Calibration | None = None,
        backend: DecodeBackend | None = None,
        model_id: str = "unknown",
    ) -> None:
        """Start empty.

        Args:
            config: Sizes and tiers.
            calibration: Codebooks; fitted on the first tokens if None.
            backend: What runs decode attention; the fastest one that can by default.
            model_id: Name of the model, for the record of a calibration made here.

        Raises:
            ValueError: The calibration belongs to another model.
        """
        self.config = config
        self._model_id = model_id
        self._calibrator: PromptCalibrator | None = None
        self._codec: SphericalCodec | None = None
        self.backend = backend or get_backend("auto", config.device)
        if calibration is not None:
            self.use_calibration(calibration)
        self.reset()

    @property
    def calibration(self) -> Calibration | None:
        """The codebooks in use; None until the cache has them."""
        return None if self._codec is None else self._codec.calibration

    @property
    def backend_name(self) -> str:
        """What runs decode attention."""
        return self.backend.name

    @property
    def is_coded(self) -> bool:
        """Whether states are in the page store."""
        return bool(self.rows)

    @property
    def length(self) -> int:
        """Slots of the padded batch."""
        return self.is_real.shape[1]

    @property
    def batch_size(self) -> int:
        """Sequences in the batch; 0 while the cache is empty."""
        return self.is_real.shape[0]

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer."""
        return self.config.windows[layer]

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each sequence, padding excluded."""
        return [int(count) for count in self.is_real.sum(1)]

    def use_calibration(self, calibration: Calibration) -> None:
        """Code with given codebooks from now on; the cache must not be coded yet."""
        if calibration.geometry != self.config.geometry:
            raise ValueError(
                f"calibration of {calibration.model_id!r} is for {calibration.geometry}, the "
                f"cache is for {self.config.geometry}"
            )
        for layer, ours in enumerate(self.config.ropes):
            theirs = calibration.ropes[layer]
            if theirs != ours:
                raise ValueError(
                    f"calibration of {calibration.model_id!r} has another rotary embedding in "
                    f"layer {layer}: {theirs.kind} instead of {ours.kind}, or other frequencies"
                )
        self._codec = SphericalCodec(calibration)

    def reset(self) -> None:
        """Forget all tokens; a calibration stays."""
        layers = self.config.geometry.num_layers
        # other caches may share the store, so rows are given back one by one
        for row in getattr(self, "rows", []):
            row.free()
        self.store: PageStore | None = None
        self.rows: list[SphericalSequence] = []
        self.is_real = torch.zeros(0, 0, dtype=torch.bool)
        self._dense: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self._fresh: dict[int, tuple[Tensor, Tensor]] = {}
        self._step: StepTokens | None = None
        self._is_encoding = False
        self._broken = ""
        if self._codec is None:
            self._calibrator = None

    def begin(self, step: StepTokens) -> None:
        """Start a forward pass.

        Raises:
            ValueError: The batch or the positions do not continue what the cache holds.
        """
        if self._broken:
            raise RuntimeError(self._broken)
        if self._step is not None:
            self.finish(is_failed=True)
        batch, _ = step.is_real.shape
        if self.length == 0:
            self.is_real = torch.zeros(batch, 0, dtype=torch.bool)
        elif batch != self.batch_size:
            raise ValueError(f"the cache holds {self.batch_size} sequences, the step has {batch}")
        step.check_continues(self.is_real)
        self._step = step
        self._is_encoding = not self.is_coded and self._is_ready(step)
        if self._is_encoding:
            self._open_store(batch)

    def _is_ready(self, step: StepTokens) -> bool:
        """Whether after this step there is enough to code with."""
        if not self.config.spec.is_coded or self._codec is not None:
            return True
        if self._calibrator is None:
            self._calibrator = PromptCalibrator(self.config, model_id=self._model_id)
        counts = self.is_real.sum(1) + step.is_real.cpu().sum(1)
        samples = int((counts - self.config.sink_tokens).clamp(min=0).sum())
        return samples >= self.config.min_calibration_tokens - self.config.sink_tokens

    def _open_store(self, batch: int) -> None:
        codec = self._codec
        if codec is None and self._calibrator is not None:
            codec = SphericalCodec(self._calibrator.calibration)
        self.store = open_store(self.config, batch, codec, self.backend)
        for sequence in range(batch):
            self.store.create(sequence)
            self.rows.append(SphericalSequence(self.config, self.store, sequence, self.backend))

    @property
    def is_dense_step(self) -> bool:
        """Whether the model's own attention runs in this pass."""
        return self._is_encoding or not self.is_coded

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take the new states of a layer.

        Args:
            layer: The layer.
            keys: ``[batch, kv_heads, tokens, head_dim]`` after RoPE.
            values: ``[batch, kv_heads, tokens, head_dim]``.

        Returns:
            What attention may read as dense tensors: everything, padding included, while the
            cache is dense; else the new states only.
        """
        if self._step is None:
            raise RuntimeError("update before begin: no forward pass is running")
        keys, values = keys.detach(), values.detach()
        if not self.is_dense_step:
            self._fresh[layer] = (keys, values)
            return keys, values
        held = self._dense[layer]
        if held is not None:
            keys, values = torch.cat([held[0], keys], 2), torch.cat([held[1], values], 2)
        self._dense[layer] = (keys, values)
        return keys, values

    def settle(self, layer: int, query: Tensor) -> None:
        """After the model's own attention: learn from the queries, and code if it is time.

        Args:
            layer: The layer.
            query: ``[batch, query_heads, tokens, head_dim]`` after RoPE, of this step.
        """
        step, held = self._step, self._dense[layer]
        if step is None or held is None:
            raise RuntimeError(f"settle without update in layer {layer}")
        calibrator = self._calibrator if self._codec is None else None
        if calibrator is not None:
            real = step.is_real.to(query.device)
            positions = step.positions.to(query.device)[real]
            calibrator.observe(layer, query.transpose(0, 1)[:, real], positions)
        if not self._is_encoding:
            return
        keys, values = held
        self._dense[layer] = None
        every = torch.cat([self.is_real, step.is_real.cpu()], 1)
        if calibrator is not None:
            positions = every.cumsum(1) - 1
            chosen = every & (positions >= self.config.sink_tokens)
            positions, chosen = positions[chosen].to(keys.device), chosen.to(keys.device)
            calibrator.fit(layer, keys.transpose(0, 1)[:, chosen], positions)
        prefill_rows(self.rows, layer, keys, values, every)

    def attend(
        self,
        layer: int,
        query: Tensor,
        options: AttentionOptions,
        *,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Attention of the new tokens over the coded cache and themselves.

        Args:
            layer: The layer, whose new states ``update`` was given.
            query: ``[batch, query_heads, tokens, head_dim]`` after RoPE.
            options: Scale, soft-cap and window.
            sink_logits: ``[query_heads]`` learned sink logits.

        Returns:
            ``[batch, query_heads, tokens, head_dim]`` in the query's dtype; zero for padding.
        """
        if self._step is None or layer not in self._fresh:
            raise RuntimeError(f"attend without update in layer {layer}")
        states = (query, *self._fresh.pop(layer))
        return attend_rows(
            self.rows, self._step.is_real, layer, states, options, sink_logits=sink_logits
        )

    def finish(self, *, is_failed: bool = False) -> None:
        """End a forward pass; a failed one leaves no trace where that is possible."""
        step, self._step = self._step, None
        if step is None:
            return
        self._fresh.clear()
        if is_failed:
            self._undo()
            return
        self.is_real = torch.cat([self.is_real, step.is_real.cpu()], 1)
        if self._is_encoding and self._codec is None and self._calibrator is not None:
            self._codec = SphericalCodec(self._calibrator.calibration)
            self._calibrator = None
        self._is_encoding = False
        for row in self.rows:
            row.forget_outside_windows()

    def _undo(self) -> None:
        if self._is_encoding:
            self._broken = (
                "the forward pass in which the cache was coded failed, and the dense states are "
                "gone: call reset() and give the prompt again"
            )
            return
        for row, count in zip(self.rows, self.num_tokens, strict=False):
            row.crop(count)
        self._trim_dense(self.length)

    def _trim_dense(self, length: int) -> None:
        for layer, held in enumerate(self._dense):
            if held is not None:
                self._dense[layer] = (held[0][:, :, :length], held[1][:, :, :length])

    def crop(self, length: int) -> None:
        """Forget slots of the padded batch from ``length`` on.

        Raises:
            ValueError: A layer with a sliding window has given up what would be needed.
        """
        if length >= self.length:
            return
        if length <= 0:
            self.reset()
            return
        counts = [int(count) for count in self.is_real[:, :length].sum(1)]
        for row, count in zip(self.rows, counts, strict=False):
            row.check_crop(count)
        for row, count in zip(self.rows, counts, strict=False):
            row.crop(count)
        self._trim_dense(length)
        self.is_real = self.is_real[:, :length]

    def select_rows(self, index: Tensor) -> None:
        """Make row ``i`` a copy of row ``index[i]``; coded pages are shared, not copied.

        Args:
            index: ``[new batch]`` int64.
        """
        if self.length == 0:
            return
        wanted: list[int] = index.tolist()
        for layer, held in enumerate(self._dense):
            if held is not None:
                at = index.to(held[0].device)
                self._dense[layer] = (held[0][at], held[1][at])
        if self.is_coded:
            for source, row in enumerate(self.rows):
                if source not in wanted:
                    row.free()
            taken: set[int] = set()
            rows = []
            for source in wanted:
                row = self.rows[source]
                rows.append(row.fork() if source in taken else row)
                taken.add(source)
            self.rows = rows
        self.is_real = self.is_real[index.cpu()]

    def fork(self) -> CacheEngine:
        """A cache of its own with the same tokens; pages are shared."""
        other = CacheEngine(self.config, backend=self.backend, model_id=self._model_id)
        other._codec = self._codec
        other.store, other.is_real = self.store, self.is_real
        other.rows = [row.fork() for row in self.rows]
        other._dense = list(self._dense)
        if self._calibrator is not None:
            other._calibrator = self._calibrator.fork()
        return other

    def ledger(self) -> ByteLedger:
        """Resident bytes by kind; dense states of the start count at their own width."""
        if self.store is not None:
            return self.store.ledger()
        kinds = dict.fromkeys(ByteLedger.__slots__, 0)
        for held in self._dense:
            if held is not None:
                kinds["codes"] += held[0].nbytes
                kinds["values"] += held[1].nbytes
        return ByteLedger(**kinds)

    def export_state(self) -> dict[str, Tensor]:
        """Everything but pages and codebooks, by name, for saving."""
        if self._step is not None:
            raise RuntimeError("a cache cannot be saved inside a forward pass")
        state = {"is_real": self.is_real.to(torch.uint8)}
        for layer, held in enumerate(self._dense):
            if held is not None:
                state[f"keys.{layer}"], state[f"values.{layer}"] = held
        if self._calibrator is not None:
            state["moments"] = self._calibrator.moments
            state["num_queries"] = self._calibrator.num_queries
        return state

    def import_state(self, state: dict[str, Tensor], files: list[Path], *, codec_hash: str) -> None:
        """Take over what ``export_state`` gave and the saved sequences.

        Args:
            state: Tensors by name.
            files: File of each sequence; none if the cache was dense.
            codec_hash: Names the codebooks of the sequences.
        """
        self.reset()
        self.is_real = state["is_real"].cpu().bool()
        if "moments" in state:
            self._calibrator = PromptCalibrator(self.config, model_id=self._model_id)
            self._calibrator.moments.copy_(state["moments"])
            self._calibrator.num_queries.copy_(state["num_queries"])
        if files:
            self.store = open_store(self.config, len(files), self._codec, self.backend)
            for sequence, file in enumerate(files):
                self.store.load(sequence, file, codec_hash=codec_hash)
                row = SphericalSequence(self.config, self.store, sequence, self.backend)
                self.rows.append(row)
        elif self.length:
            for layer in range(self.config.geometry.num_layers):
                self._dense[layer] = (state[f"keys.{layer}"], state[f"values.{layer}"])
