# SPDX-License-Identifier: Apache-2.0
"""The step machine of a batch: dense first, then coded, free of any model library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sphkv.attention.api import get_backend
from sphkv.attention.request import AttentionOptions, DecodeBackend, StepGraph
from sphkv.cache.ahead import StepAhead, join_all
from sphkv.cache.config import CacheConfig, ResidencyPlan
from sphkv.cache.dense import DenseStates, PromptCalibrator
from sphkv.cache.method import MethodRecord
from sphkv.cache.plan import Ceiling, choose_residency
from sphkv.cache.prompt import prepare_prompts, settle_prompts
from sphkv.cache.residency import Residency, UniformResidency
from sphkv.cache.retention import RetentionResidency
from sphkv.cache.rows import CodedRows
from sphkv.cache.sequence import CacheSequence
from sphkv.cache.step import BatchPlaces, StepTokens
from sphkv.codec.calibration import Calibration
from sphkv.codec.states import SphericalCodec
from sphkv.core.contract import WriteContract
from sphkv.core.devices import join_beside
from sphkv.retention.measure import PromptWork
from sphkv.store.ledger import ByteLedger
from sphkv.store.store import PageStore


class CacheEngine:
    """The cache of a batch, one forward pass after another.

    A pass is ``begin``; then for every layer ``update``, and either ``end_layer`` and, before or
    after it, the model's own attention, or ``attend``; then ``finish``. While the cache is dense it
    returns everything it holds from ``update``. The pass in which it knows enough to code, and has
    so many tokens that the budget can hold, ends with every state in the page store.

    Attributes:
        config: Sizes, budget and tiers.
        backend: What runs decode attention.
        ahead: The next captured step, if it runs already; what changes the cache comes behind it.
        ceiling: Bytes a sequence may keep resident.
        plan: How states stay resident; None while the cache is dense.
        places: Which places of the padded batch hold tokens.
        on_contract: Told the controller's decision about every row's prompt, which nothing keeps;
            for studies.
        peak_bytes: Most bytes that were resident at any moment since the prompt was coded.
        peak_share: Most that they were of the ceiling of their moment; 0 without a budget.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        calibration: Calibration | None = None,
        backend: DecodeBackend | None = None,
        model_id: str = "unknown",
        work: PromptWork | None = None,
    ) -> None:
        """Start empty.

        Args:
            config: Sizes, budget and tiers.
            calibration: Codebooks; fitted on the first tokens if None.
            backend: What runs decode attention; the fastest one that can by default.
            model_id: Name of the model, for the record of a calibration made here.
            work: What caches of the same prompt under other budgets share; None shares nothing.

        Raises:
            ValueError: The calibration belongs to another model.
        """
        self.config = config
        self._model_id = model_id
        self._work = work
        self.ahead = StepAhead()
        self.on_contract: Callable[[WriteContract], None] | None = None
        self._calibrator: PromptCalibrator | None = None
        self._codec: SphericalCodec | None = None
        self.backend = backend or get_backend("auto", config.device)
        retention = config.retention
        tables = (config.tiers,) if retention is None else (retention.tiers, retention.long_tiers)
        self.backend.prepare([tiers for tiers in tables if tiers is not None], config.geometry)
        prepare_prompts(config)
        if calibration is not None:
            self.use_calibration(calibration)
        self._coded: CodedRows | None = None
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
        return self._coded is not None

    @property
    def rows(self) -> list[CacheSequence]:
        """The coded sequences, one per batch row; none while the cache is dense."""
        return [] if self._coded is None else self._coded.rows

    @property
    def store(self) -> PageStore | None:
        """Pages of the coded sequences; None while the cache is dense."""
        return None if self._coded is None else self._coded.store

    @property
    def graph(self) -> StepGraph | None:
        """Captured attention of single steps; None while steps are not captured."""
        return None if self._coded is None else self._coded.graph

    @property
    def length(self) -> int:
        """Places of the padded batch."""
        return self.places.length

    @property
    def batch_size(self) -> int:
        """Sequences in the batch; 0 while the cache is empty."""
        return self.places.batch_size

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer."""
        return self.config.windows[layer]

    @property
    def num_tokens(self) -> list[int]:
        """Tokens of each sequence, padding excluded."""
        return self.places.counts

    @property
    def is_real(self) -> Tensor:
        """``[batch, length]`` bool on the CPU: which places of the padded batch hold tokens."""
        return self.places.is_real

    @property
    def has_padding(self) -> bool:
        """Whether some place of the batch holds no token."""
        return self.places.has_padding

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
        self.ahead.join()
        if self._coded is not None:
            self._coded.free()
            self._forget_peak()
        self._coded = None
        self.plan: ResidencyPlan | None = None
        self.ceiling = Ceiling.of(self.config, is_calibrated=self._codec is not None)
        self.places = BatchPlaces(torch.zeros(0, 0, dtype=torch.bool))
        self.peak_bytes, self.peak_share = 0, 0.0
        self._dense = DenseStates(self.config)
        self._fresh: dict[int, tuple[Tensor, Tensor]] = {}
        self._step: StepTokens | None = None
        self._is_encoding = False
        self._broken = ""
        if self._codec is None:
            self._calibrator = None

    def begin(self, step: StepTokens) -> None:
        """Start a forward pass; pages that its tokens would overflow seal now.

        Raises:
            ValueError: The batch or the positions do not continue what the cache holds.
            BudgetError: Nothing is left that may be dropped to hold the budget.
        """
        join_all()
        if self._step is not None:
            # an interrupt ended the pass before this one, and nobody was told
            self.finish(is_failed=True)
        if self._broken:
            raise RuntimeError(self._broken)
        self._free_orphans()
        batch, _ = step.is_real.shape
        if self.length == 0:
            self.places = BatchPlaces(torch.zeros(batch, 0, dtype=torch.bool))
        elif batch != self.batch_size:
            raise ValueError(f"the cache holds {self.batch_size} sequences, the step has {batch}")
        step.check_continues(self.num_tokens)
        if self._coded is not None:
            self._coded.make_room(step.is_real)
        else:
            self._dense.begin()
            if self._calibrator is not None:
                self._calibrator.begin()
            self._is_encoding = self._is_ready(step)
            if self._is_encoding:
                self._open_store(batch)
        self._step = step

    def begin_graph(self, *, max_tokens: int) -> bool:
        """Have the next single steps captured, where backend and residency allow it.

        Args:
            max_tokens: Tokens a sequence may reach before ``end_graph``.
        """
        return self._coded is not None and self._coded.begin_graph(max_tokens=max_tokens)

    @property
    def owns_store(self) -> bool:
        """Whether no other cache shares the pages, who might move them."""
        return self._coded is not None and self._coded.owns_store

    @property
    def has_room_ahead(self) -> bool:
        """Whether pages and lists are ready for a captured step that is yet to begin."""
        return self._coded is not None and self._coded.has_room_ahead

    @property
    def has_work_next(self) -> bool:
        """Whether the host has more to do beside the next captured step than to count along."""
        return self._coded is not None and self._coded.has_work_next

    def end_graph(self) -> None:
        """Captured steps are over: something else changes the cache."""
        self.ahead.join()
        if self._coded is not None:
            self._coded.end_graph()

    def _is_ready(self, step: StepTokens) -> bool:
        """Whether after this step there is enough to code with, and to hold the budget."""
        counts = torch.tensor(self.num_tokens) + step.is_real.cpu().sum(1)
        # short rows may take what they would be allowed at the least length that holds
        least = min(int(counts.max()), max(int(counts.min()), self.ceiling.holds_from or 0))
        self.plan = choose_residency(self.config, least)
        is_coded = self.plan is None or self.plan.spec.is_coded
        if self._codec is None and is_coded:
            if self._calibrator is None:
                self._calibrator = PromptCalibrator(self.config, model_id=self._model_id)
            samples = int((counts - self.config.sink_tokens).clamp(min=0).sum())
            if samples < self.config.min_calibration_tokens - self.config.sink_tokens:
                self.plan = None
        return self.plan is not None

    def _open_store(self, batch: int) -> None:
        self.ceiling = Ceiling.of(self.config, self.plan)
        codec = self._codec
        if codec is None and self._calibrator is not None:
            codec = SphericalCodec(self._calibrator.calibration)
        coded = self._new_rows(batch, codec)
        for sequence in range(batch):
            coded.store.create(sequence)
            coded.add(sequence, self._make_residency(coded.store, sequence))
        self._coded = coded

    def _new_rows(self, batch: int, codec: SphericalCodec | None) -> CodedRows:
        """A store for so many sequences, without any yet."""
        assert self.plan is not None
        order = self.backend.page_order
        config = self.plan.store_config(self.config, batch, is_aligned=order is not None)
        store = PageStore(config, codec, order=order, kernels=self.backend.page_codec)
        return CodedRows(self.config, self.plan, store, self.backend)

    def _make_residency(self, store: PageStore, sequence: int) -> Residency:
        assert self.plan is not None
        if not self.plan.is_retention:
            return UniformResidency(self.config, self.plan, store, sequence)
        return RetentionResidency(
            self.config,
            self.plan,
            store,
            sequence,
            self.ceiling,
            work=self._work,
            on_contract=self.on_contract,
        )

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
        return self._dense.append(layer, keys, values)

    def end_layer(self, layer: int, query: Tensor) -> None:
        """Beside the model's own attention: learn from the queries, and code if it is time.

        A prompt under a controller is decided about here, with its last layer.

        Args:
            layer: The layer.
            query: ``[batch, query_heads, tokens, head_dim]`` after RoPE, of this step.

        Raises:
            BudgetError: What must stay dense of the prompt does not fit a budget.
        """
        step = self._step
        if step is None or not self._dense.has(layer):
            raise RuntimeError(f"end_layer without update in layer {layer}")
        query = query.detach()
        calibrator = self._calibrator if self._codec is None else None
        if calibrator is not None:
            calibrator.observe(layer, query, step.is_real.cpu(), step.positions.cpu())
        queries = self._dense.watch(layer, query, is_kept=not self._is_encoding)
        if not self._is_encoding:
            return
        assert self._coded is not None
        keys, values = self._dense.take(layer)
        every = torch.cat([self.is_real, step.is_real.cpu()], 1)
        if calibrator is not None:
            settle_prompts(self.config)
            positions = every.cumsum(1) - 1
            is_chosen = every & (positions >= self.config.sink_tokens)
            calibrator.fit(layer, keys, is_chosen, positions)
        self._coded.take_prompt(layer, queries, keys, values, every)

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
        if self._step is None or self._coded is None or layer not in self._fresh:
            raise RuntimeError(f"attend without update in layer {layer}")
        states = (query.detach(), *self._fresh.pop(layer))
        return self._coded.attend(
            layer, states, self._step.is_real, options, sink_logits=sink_logits
        )

    def finish(self, *, is_failed: bool = False) -> None:
        """End a forward pass; a failed one leaves no trace where that is possible.

        Raises:
            BudgetError: What must stay dense of a prompt does not fit a budget.
        """
        step, self._step = self._step, None
        if step is None:
            return
        self._fresh.clear()
        if is_failed:
            self._undo()
            return
        if self._is_encoding and self._coded is not None:
            try:
                self._coded.end_prompt()
            except BaseException:
                self._undo()
                raise
        if self.graph is not None:
            self.graph.commit()
        self.places.append(step.is_real.cpu())
        if self._is_encoding and self._codec is None and self._calibrator is not None:
            self._codec = SphericalCodec(self._calibrator.calibration)
            self._calibrator = None
        self._is_encoding = False
        if self.graph is None:
            for row in self.rows:
                row.finish_pass()
        self._note_peak()
        if self._coded is not None and self._coded.graph is not None:
            self._coded.prepare_next()

    def _note_peak(self) -> None:
        """Keep the most bytes of any moment of the pass, and their part of the ceiling."""
        if self._coded is None:
            return
        most = self._coded.store.take_peak() + self._coded.note_bytes
        self.peak_bytes = max(self.peak_bytes, most)
        limit = self.limit_bytes()
        if limit:
            self.peak_share = max(self.peak_share, most / limit)

    def resident_bytes(self) -> int:
        """Bytes of every tensor the batch keeps alive, codebooks excepted."""
        if self._coded is None:
            return self.ledger().total
        self._free_orphans()
        return self._coded.store.live_bytes + self._coded.note_bytes

    def limit_bytes(self) -> int | None:
        """Bytes the ceiling allows at the present lengths; None without a budget.

        Forks share a store, so once there is one, all of its sequences count.
        """
        counts = self.num_tokens
        if self.store is not None:
            counts = [self.store.num_tokens(sequence) for sequence in self.store.sequences]
        limits = [self.ceiling.bytes_at(count) for count in counts]
        return None if None in limits else sum(limit for limit in limits if limit is not None)

    def see_logits(self, logits: Tensor) -> None:
        """Tell every row how close its next decision is: ``[batch, tokens, vocabulary]``."""
        for row, is_real, own in zip(self.rows, self.is_real, logits, strict=False):
            if bool(is_real[-1]):
                row.residency.observe_logits(own[-1])

    def _undo(self) -> None:
        if self._is_encoding:
            # what is measured beside still reads what is given up
            join_beside(torch.device(self.config.device))
            self._coded = None
            self._broken = (
                "the forward pass in which the cache was coded failed, and the dense states are "
                "gone: call reset() and give the prompt again"
            )
            return
        self.end_graph()
        if self._coded is not None:
            self._coded.undo(self.num_tokens)
        self._dense.undo(self.length)
        if self._calibrator is not None:
            self._calibrator.undo()

    def crop(self, length: int) -> None:
        """Forget places of the padded batch from ``length`` on.

        The controller meets the ceiling of the shorter length at once. With one tier, slabs that
        still hold a page stay: until the sequence has grown again it may hold a slab more.

        Raises:
            ValueError: A layer with a sliding window has given up what would be needed.
        """
        if length >= self.length:
            return
        if length <= 0:
            self.reset()
            return
        self.end_graph()
        counts = [int(count) for count in self.is_real[:, :length].sum(1)]
        if self._coded is not None:
            self._coded.crop(counts)
        self._dense.crop(length, num_removed=self.length - length)
        self.places = BatchPlaces(self.is_real[:, :length].clone())
        self._forget_peak()

    def _free_orphans(self) -> None:
        """Give back the pages of forks that nobody holds any more."""
        if self._coded is not None:
            self._coded.free_orphans()

    def _forget_peak(self) -> None:
        """What was resident at other lengths, or of other rows, is no part of the next pass."""
        if self.store is not None:
            self.store.take_peak()

    def select_rows(self, index: Tensor) -> None:
        """Make row ``i`` a copy of row ``index[i]``; coded pages are shared, not copied.

        Args:
            index: ``[new batch]`` int64.
        """
        if self.length == 0:
            return
        self.end_graph()
        self._dense.select(index)
        if self._coded is not None:
            self._coded.select(index.tolist())
        self.places = BatchPlaces(self.is_real[index.cpu()])
        self._forget_peak()

    def fork(self) -> CacheEngine:
        """A cache of its own with the same tokens; pages are shared."""
        # the other one may move pages that captured steps have listed
        self.end_graph()
        other = CacheEngine(self.config, backend=self.backend, model_id=self._model_id)
        other._codec = self._codec
        other.plan, other.ceiling = self.plan, self.ceiling
        other.places = BatchPlaces(self.is_real.clone())
        other._coded = None if self._coded is None else self._coded.fork()
        other._dense = self._dense.fork()
        other.peak_bytes, other.peak_share = self.peak_bytes, self.peak_share
        other._broken = self._broken
        if self._calibrator is not None:
            other._calibrator = self._calibrator.fork()
        return other

    def ledger(self) -> ByteLedger:
        """Resident bytes by kind; dense states of the start count at their own width.

        A cache and its forks share a store, whose bytes are counted once for all of them.
        """
        self._free_orphans()
        tables = self._table_bytes()
        if self._coded is not None:
            ledger = self._coded.store.ledger()
            return replace(ledger, tags=ledger.tags + self._coded.note_bytes, tables=tables)
        kinds = dict.fromkeys(ByteLedger.__slots__, 0) | self._dense.bytes_by_kind()
        return ByteLedger(**{**kinds, "tables": tables})

    def describe(self) -> MethodRecord:
        """What is in use, for a record: residency, setting, share of states by tier."""
        if self.plan is None or self._coded is None:
            return MethodRecord("dense", "not coded yet", "kernel-realized", {"max": 1.0}, "dense")
        name = "joint" if self.plan.is_retention else "spherical"
        setting, tiers = self.rows[0].residency.describe(), self._coded.tier_shares()
        return MethodRecord(name, setting, "kernel-realized", tiers, self.plan.kind)

    def _table_bytes(self) -> int:
        """Bytes of codebooks, and of the tables a backend made of them."""
        if self._codec is None:
            return 0
        return self._codec.num_bytes + self.backend.table_bytes(self._codec)

    def export_state(self) -> dict[str, Tensor]:
        """Everything but pages and codebooks, by name, for saving."""
        if self._broken:
            raise RuntimeError(self._broken)
        if self._step is not None:
            raise RuntimeError("a cache cannot be saved inside a forward pass")
        state = {"is_real": self.is_real.to(torch.uint8), **self._dense.state()}
        if self._calibrator is not None:
            state.update(self._calibrator.state())
        for index, row in enumerate(self.rows):
            for name, tensor in row.residency.state().items():
                state[f"row.{index}.{name}"] = tensor
        return state

    def import_state(
        self,
        state: Mapping[str, Tensor],
        files: Sequence[Path],
        *,
        codec_hash: str,
        plan: ResidencyPlan | None,
    ) -> None:
        """Take over what ``export_state`` gave and the saved sequences.

        Args:
            state: Tensors by name.
            files: File of each sequence; none if the cache was dense.
            codec_hash: Names the codebooks of the sequences.
            plan: How the sequences stay resident; None if the cache was dense.
        """
        self.reset()
        self.places = BatchPlaces(state["is_real"].cpu().bool())
        if "moments" in state:
            self._calibrator = PromptCalibrator(self.config, model_id=self._model_id)
            self._calibrator.load_state(state)
        if files:
            self.plan = plan
            self.ceiling = Ceiling.of(self.config, plan)
            coded = self._new_rows(len(files), self._codec)
            for sequence, file in enumerate(files):
                coded.store.load(sequence, file, codec_hash=codec_hash)
                residency, lead = self._make_residency(coded.store, sequence), f"row.{sequence}."
                own = {
                    name.removeprefix(lead): tensor
                    for name, tensor in state.items()
                    if name.startswith(lead)
                }
                residency.load_state(own)
                coded.add(sequence, residency)
            self._coded = coded
        elif self.length:
            self._dense.load_state(state)
