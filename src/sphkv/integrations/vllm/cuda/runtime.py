# SPDX-License-Identifier: Apache-2.0
"""Codebooks, kernels and dense memory of a worker on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sphkv.attention.cuda.decode import CudaDecode
from sphkv.attention.cuda.dense import MAX_GROUP, DenseDecode
from sphkv.attention.cuda.encode import CudaEncoder
from sphkv.attention.cuda.geometry import PAGE_TOKENS, is_served
from sphkv.attention.cuda.kernel_cache import DecodeKernels
from sphkv.attention.cuda.pages import PagePool
from sphkv.attention.partial import PartialAttention
from sphkv.attention.request import AttentionOptions
from sphkv.attention.triton.rebuild import (
    RebuildTables,
    build_rebuild_tables,
    rebuild_pages,
)
from sphkv.codec.calibration import Calibration
from sphkv.codec.codebook import PlaneCodebooks
from sphkv.codec.states import SphericalCodec
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.integrations.vllm.cuda.groups import (
    CudaStep,
    DecodeStep,
    DeviceChunks,
    DeviceSeals,
    GroupShape,
    LayerGroup,
    reserve_pinned,
)
from sphkv.integrations.vllm.cuda.retain import Cut, compact, request_share
from sphkv.integrations.vllm.cuda.steps import Integers
from sphkv.integrations.vllm.options import ServeOptions
from sphkv.integrations.vllm.runtime import WorkerRuntime
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PageRows, PositionMode

_CODED_ID = 1
# Sequences whose first tokens are dense, if their prefixes are kept: this part of all blocks, so
# that prompts of a thousand tokens each find room.
_SINK_SHARE = 8
_LEAST_SINKS = 4
_WORKSPACE_TOKENS = 32768
_WORD = torch.int64


class ChunkAttention(Protocol):
    """Causal attention of chunks to the states of their own rows, the last ones in line."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        chunks: DeviceChunks,
        options: AttentionOptions,
        sink_logits: Tensor | None,
    ) -> None:
        """Write ``output [queries, query_heads, head_dim]``; keys are ``[states, heads, ...]``."""


@dataclass(frozen=True, slots=True, eq=False)
class FlatHeads:
    """Heads of all layers with the same rotary embedding, as if they were heads of one layer.

    Attributes:
        codec: Their codec.
        tables: What rebuilding reads.
        layers: The layers, in the order of their heads.
    """

    codec: SphericalCodec
    tables: RebuildTables
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a layer is: among flat heads, and in its group."""

    flat: FlatHeads
    first_head: int
    group: LayerGroup
    index: int


def _kept_share(budget_bytes: int | None, layout: PageLayout) -> float:
    """Part of a prompt's blocks that a budget of bytes per token and head leaves."""
    if budget_bytes is None:
        return 1.0
    share = budget_bytes * PAGE_TOKENS / layout.page_bytes
    if share >= 1.0:
        raise ValueError(
            f"budget_bytes must be below the {layout.page_bytes / PAGE_TOKENS} bytes "
            f"that tier {layout.tier.name} takes, got {budget_bytes}"
        )
    return share


class CudaRuntime(WorkerRuntime):
    """What the attention layers of a worker share.

    Attributes:
        layout: A block of one KV head.
        room: States of the workspace that context is rebuilt in.
        groups: Memory of the layers that share a block table, by their names.
        num_sinks: Sequences whose first tokens can be kept dense.
        kept_share: Part of a prompt's blocks that stays when it is complete.
        prompt_tokens: ``[slots]`` length of the prompt of every slot in use.
        requests: Id of the request of every slot in use.
        heeds_requests: Whether requests may ask for a part of the budget: only where the scheduler
            gives back what is cut for it.
        planned: The step of each group that was planned last.
    """

    def __init__(
        self,
        options: ServeOptions,
        *,
        num_kv_heads: int,
        num_query_heads: int,
        head_dim: int,
        max_sequences: int,
        max_tokens: int,
        device: torch.device,
        keeps_prefixes: bool,
    ) -> None:
        super().__init__(options, num_kv_heads, max_sequences)
        tier = options.tier(PAGE_TOKENS)
        self.layout = PageLayout(_CODED_ID, tier, head_dim, PositionMode.CONTIGUOUS)
        if not is_served(self.layout) or not tier.has_value_codes:
            raise ValueError(
                f"the CUDA kernels do not read tier {tier.name} with {head_dim} channels: keys of "
                "0.5 to 4 bits and values of 2, 3, 4 or 8 bits, heads of 64 or 128 channels"
            )
        self.kept_share = _kept_share(options.budget_bytes, self.layout)
        group = num_query_heads // num_kv_heads
        if group > MAX_GROUP:
            raise ValueError(f"{group} query heads share a KV head, the kernels take {MAX_GROUP}")
        self.num_query_heads, self.max_tokens, self.device = num_query_heads, max_tokens, device
        self.keeps_prefixes = keeps_prefixes
        self.room = max(max_tokens, _WORKSPACE_TOKENS)
        self.groups: dict[tuple[str, ...], LayerGroup] = {}
        self.num_sinks = 0
        self.requests: Mapping[int, str] = {}
        self.heeds_requests = False
        self.prompt_tokens: Integers | None = None
        self.planned: dict[tuple[str, ...], CudaStep] = {}
        self._ordered: list[list[LayerGroup]] = []
        self._places: dict[int, _Place] = {}
        self._flat: dict[RopeSpec, FlatHeads] = {}
        self._kernels = DecodeKernels(device)
        self._encoder = CudaEncoder()
        self._decode: list[CudaDecode] = []
        self._caches: dict[int, Tensor] = {}
        self._pools: dict[tuple[int, ...], Tensor | None] = {}
        self._page_shape = (PAGE_TOKENS, head_dim)
        self._no_flags = torch.zeros(0, PAGE_TOKENS, dtype=torch.bool, device=device)
        self._side: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        # nobody reads a block in the step that fills it
        self._is_quiet = False
        # what is being encoded beside the model
        self._beside: list[Tensor] = []

    @property
    def head_dim(self) -> int:
        """Elements of a key."""
        return self.layout.head_dim

    @property
    def tier_name(self) -> str:
        """What blocks hold."""
        return self.layout.tier.name

    @property
    def block_bytes_per_token(self) -> float:
        """Bytes of one token in coded blocks, all layers and heads of this worker."""
        return len(self.layer_ids) * self.num_kv_heads * self.layout.page_bytes / PAGE_TOKENS

    @property
    def dense_bytes(self) -> int:
        """Bytes beside vLLM's blocks: tails, sinks, lists and the workspace."""
        groups = sum(group.buffer_bytes for group in self.groups.values())
        return groups + self._workspace[0].nbytes + self._workspace[1].nbytes

    def use(self, calibration: Calibration) -> None:
        """Code with this calibration from now on; builds and checks every kernel.

        Raises:
            KernelMismatchError: A kernel does not give what the oracle gives.
        """
        codec, tier = SphericalCodec(calibration), self.layout.tier
        self._kernels.reserve(self.max_tokens + PAGE_TOKENS, self.max_sequences)
        layers = range(calibration.geometry.num_layers)
        mode = PositionMode.CONTIGUOUS
        self._decode = [self._kernels.get(codec, layer, tier, mode) for layer in layers]
        for kernel in self._decode:
            kernel.overlaps = True
        group = self.num_query_heads // self.num_kv_heads
        self._dense = DenseDecode(self.head_dim, group, self.device)
        for rope in dict.fromkeys(calibration.ropes):
            self._flat[rope] = self._flatten(calibration, rope)
        self._ropes = calibration.ropes
        size = (self.room, self.num_kv_heads, self.head_dim)
        self._workspace = (
            torch.zeros(size, dtype=torch.bfloat16, device=self.device),
            torch.zeros(size, dtype=torch.bfloat16, device=self.device),
        )

        self._warm_up()

    def _warm_up(self) -> None:
        """Encode and rebuild a page with each codec, so that no request waits for a compiler."""
        if self.device.type == "cuda":
            reserve_pinned()
        size = (self.num_kv_heads, PAGE_TOKENS, self.head_dim)
        states = torch.zeros(size, dtype=torch.bfloat16, device=self.device)
        states[..., 0] = 1.0
        none = torch.zeros(1, dtype=torch.int64, device=self.device)
        rows = PageRows(
            torch.arange(PAGE_TOKENS, device=self.device).repeat(len(states), 1),
            torch.full((len(states),), PAGE_TOKENS, device=self.device),
            torch.zeros(len(states), PAGE_TOKENS, dtype=torch.bool, device=self.device),
        )
        heads = torch.arange(len(states), device=self.device)
        for flat in self._flat.values():
            pages = self._encoder.encode(self.layout, 0, flat.codec, (states, states), rows, heads)
            rebuild_pages(
                pages[None], none, none, *self._workspace, flat.tables, self.layout, first_head=0
            )

    def _flatten(self, calibration: Calibration, rope: RopeSpec) -> FlatHeads:
        layers = tuple(at for at, one in enumerate(calibration.ropes) if one == rope)
        planes = calibration.planes
        picked = (getattr(planes, name)[list(layers)] for name in PlaneCodebooks.__slots__)
        flat = PlaneCodebooks(*(part.flatten(0, 1)[None] for part in picked))
        heads = len(layers) * self.num_kv_heads
        group = self.num_query_heads // self.num_kv_heads
        geometry = KVGeometry(
            num_layers=1,
            num_kv_heads=heads,
            num_query_heads=group * heads,
            head_dim=self.head_dim,
        )
        codec = SphericalCodec(
            Calibration(
                geometry,
                (rope,),
                flat,
                calibration.model_id,
                calibration.source,
                calibration.num_tokens,
            )
        )
        book = codec.codebook(0, self.layout.tier)
        tables = build_rebuild_tables(book, rope, self.layout, self.device)
        return FlatHeads(codec, tables, layers)

    def _shape(self, num_layers: int, window: int | None) -> GroupShape:
        if window is not None and self.kept_share < 1.0:
            raise ValueError("coded blocks do not support a window together with budget_bytes")
        has_sinks = window is None and self.options.sink_tokens > 0
        return GroupShape(
            num_layers=num_layers,
            num_kv_heads=self.num_kv_heads,
            num_query_heads=self.num_query_heads,
            head_dim=self.head_dim,
            num_slots=self.max_sequences,
            num_sinks=self.num_sinks if has_sinks else 0,
            sink_tokens=self.options.sink_tokens if has_sinks else 0,
            max_tokens=self.max_tokens,
            window=window,
            page_bytes=self.layout.page_bytes,
            kept_share=self.kept_share,
        )

    def add_group(self, names: Iterable[str], window: int | None) -> LayerGroup:
        """Memory of the layers that share a block table; the same one if asked again."""
        key = tuple(names)
        if key not in self.groups:
            shape = self._shape(len(key), window)
            group = LayerGroup(
                shape,
                self.device,
                room=self.room,
                keeps_prefixes=self.keeps_prefixes,
                is_repeatable=self.options.repeatable,
            )
            self.groups[key] = group
            for index, name in enumerate(key):
                layer = self.layer_ids[name]
                flat = self._flat[self._ropes[layer]]
                first = flat.layers.index(layer) * self.num_kv_heads
                self._places[layer] = _Place(flat, first, group, index)
        return self.groups[key]

    def reserve_sinks(self, block_bytes: int) -> None:
        """Choose how many sequences have dense first tokens, for so many bytes of blocks."""
        if not self.keeps_prefixes:
            # only those that run have any
            self.num_sinks = self.max_sequences
            return
        blocks = block_bytes / (self.block_bytes_per_token * PAGE_TOKENS)
        self.num_sinks = max(_LEAST_SINKS * self.max_sequences, int(blocks) // _SINK_SHARE)

    def expected_bytes(self, num_layers: int) -> int:
        """Bytes of the tails, sinks and lists of so many layers."""
        shape = self._shape(num_layers, None)
        pages = (self.max_tokens // PAGE_TOKENS + 2) * self.num_kv_heads * self.max_sequences
        lists = num_layers if shape.has_cuts else 1
        return shape.tail_bytes + shape.sink_bytes + lists * _WORD.itemsize * pages

    def order_groups(self, groups: Sequence[Sequence[str]]) -> None:
        """Say in which order vLLM names the blocks of groups of layers."""
        self._ordered = [
            [group for names, group in self.groups.items() if set(names) <= set(members)]
            for members in groups
        ]

    def request_names(self, slots: Iterable[int]) -> list[str]:
        """Ids of the requests in some slots; empty words for slots that nobody has."""
        return [self.requests.get(int(slot), "") for slot in slots]

    def prompt_lengths(self, slots: Integers) -> Integers | None:
        """Tokens of the prompts in some slots; None where prompts are left as they are."""
        if self.prompt_tokens is None or self.kept_share == 1.0:
            return None
        # rows of trial runs have a slot more than there are requests
        return self.prompt_tokens[np.minimum(slots, len(self.prompt_tokens) - 1)].astype(np.int64)

    def begin_step(self, scheduled: Any) -> None:
        """Follow vLLM's scheduler: which requests end, begin and get blocks.

        Args:
            scheduled: vLLM's ``SchedulerOutput``.

        Raises:
            RuntimeError: A request begins in the middle of a block.
        """
        self.planned.clear()
        finds = any(new.num_computed_tokens for new in scheduled.scheduled_new_reqs)
        self._is_quiet = not finds and not self.options.repeatable
        gone = {*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())}
        for number, groups in enumerate(self._ordered):
            for group in groups:
                ledger = group.ledger
                for request in gone:
                    group.forget(request)
                for new in scheduled.scheduled_new_reqs:
                    if new.num_computed_tokens % PAGE_TOKENS:
                        raise RuntimeError(
                            f"request {new.req_id} begins at token {new.num_computed_tokens}, "
                            "inside a block"
                        )
                    share = self._request_share(new)
                    if share < 1.0:
                        group.request_shares[new.req_id] = share
                    found = new.num_computed_tokens // PAGE_TOKENS
                    ledger.begin(new.req_id, new.block_ids[number], found)
                for blocks in scheduled.scheduled_cached_reqs.new_block_ids:
                    if blocks is not None:
                        ledger.reuse(blocks[number])

    def _request_share(self, new: Any) -> float:
        """Part of the budget that a request asks for, as the scheduler has read it."""
        budget = self.options.budget_bytes
        if budget is None or not self.heeds_requests:
            return 1.0
        try:
            return request_share(new.sampling_params, budget)
        except ValueError:
            # the scheduler has said so
            return 1.0

    def finish_step(self) -> None:
        """Code the blocks that the step filled, where layers did not do it themselves."""
        self._join()
        self._is_quiet = False
        for names, step in self.planned.items():
            self.finish(step, names)
        self.planned.clear()

    def bind(self, caches: Mapping[str, Tensor]) -> None:
        """Take note of the blocks of every layer, ``[blocks, heads, 1, page_bytes]`` uint8."""
        self._caches = {self.layer_ids[name]: _as_pages(cache) for name, cache in caches.items()}
        self._pools.clear()
        for names, group in self.groups.items():
            group.bind([self._caches[self.layer_ids[name]] for name in names])

    def attend(
        self,
        layer: int,
        states: tuple[Tensor, Tensor, Tensor],
        cache: Tensor,
        step: CudaStep,
        options: AttentionOptions,
        output: Tensor,
        *,
        attend_chunks: ChunkAttention,
        sink_logits: Tensor | None = None,
    ) -> None:
        """Attention of a step, with everything that it stores.

        Args:
            layer: Index of the layer.
            states: Queries, keys and values ``[tokens, heads, head_dim]`` bfloat16.
            cache: ``[blocks, heads, 1, page_bytes]`` uint8.
            step: What the batch is.
            options: Scale, soft-cap and window.
            output: ``[tokens, query_heads, head_dim]``.
            attend_chunks: Dense attention of prompts.
            sink_logits: ``[query_heads]`` float32 learned sinks.
        """
        pages = _as_pages(cache)
        query, keys, values = states
        self._join()
        if step.early_seals is not None and not self._is_quiet:
            # before anyone reads: a request may find what another writes in the same step
            self._seal(layer, (keys, values), pages, step.early_seals)
        if step.decode is not None:
            self._attend_rows(layer, states, pages, step.decode, options, output, sink_logits)
        if not step.chunks:
            return
        if step.seals is not None:
            self._seal(layer, (keys, values), pages, step.seals)
        for chunks in step.chunks:
            part = slice(chunks.plan.first, chunks.plan.end)
            held = (keys[part], values[part])
            if chunks.plan.has_context:
                held = self._gather(layer, held, pages, chunks)
            attend_chunks(query[part], *held, output[part], chunks, options, sink_logits)
            for cut in step.cuts:
                self._score(layer, cut, query[part], held[0], chunks, options.scale)
        self._keep(layer, (keys, values), pages, step)

    def _keep(
        self, layer: int, states: tuple[Tensor, Tensor], pages: Tensor, step: CudaStep
    ) -> None:
        """Store what chunks leave: full blocks, unless that is done, and tails."""
        blocks = None
        if step.early_seals is not None and self._is_quiet:
            # before the tails that they begin with are written
            blocks = self._collect(layer, states, step.early_seals)
        if step.tail_tokens is not None:
            tokens, slots, offsets = step.tail_tokens
            place = self._places[layer]
            for tail, new in zip((place.group.keys, place.group.values), states, strict=True):
                tail[place.index][slots, :, offsets] = new[tokens]
        if step.early_seals is not None and blocks is not None:
            self._code_beside(layer, blocks, pages, step.early_seals)

    def _join(self) -> None:
        """Let what follows wait for blocks that are encoded beside the model."""
        if self._beside:
            torch.cuda.current_stream().wait_stream(self._side)
            self._beside.clear()

    def _score(
        self,
        layer: int,
        cut: Cut,
        query: Tensor,
        keys: Tensor,
        chunks: DeviceChunks,
        scale: float,
    ) -> None:
        """Let the prompt's last queries of a layer say what its pages are worth."""
        at = cut.row - chunks.plan.first_row
        if 0 <= at < len(chunks.plan.query_starts) - 1:
            rows = slice(*chunks.plan.query_starts[at : at + 2].tolist())
            states = slice(*chunks.plan.key_starts[at : at + 2].tolist())
            cut.score(self._places[layer].index, query[rows], keys[states], scale)

    def _attend_rows(
        self,
        layer: int,
        states: tuple[Tensor, Tensor, Tensor],
        pages: Tensor,
        step: DecodeStep,
        options: AttentionOptions,
        output: Tensor,
        sink_logits: Tensor | None,
    ) -> None:
        kernel, rows = self._decode[layer], step.rows
        query, keys, values = (part[:rows] for part in states)
        query = query.contiguous()
        self._dense.attend(
            query,
            keys,
            values,
            step.dense(self._places[layer].index),
            options,
            result=step.partial,
            spare_processors=kernel.spare_processors,
        )
        result = PartialAttention(output[:rows], step.partial.lse)
        kernel.attend(
            query,
            PagePool(pages.flatten(0, 1), PositionMode.CONTIGUOUS),
            step.layer_lists(self._places[layer].index),
            options,
            result=result,
            merge_with=step.partial,
            query_positions=step.positions,
            sink_logits=sink_logits,
        )

    def _seal(
        self, layer: int, states: tuple[Tensor, Tensor], pages: Tensor, seals: DeviceSeals
    ) -> None:
        """Code the blocks that one layer fills in a step with chunks."""
        self._code(layer, self._collect(layer, states, seals), pages, seals)

    def _code_beside(
        self, layer: int, blocks: list[Tensor], pages: Tensor, seals: DeviceSeals
    ) -> None:
        """Encode while the model goes on: it takes long, and little of the device."""
        if self._side is None:
            self._code(layer, blocks, pages, seals)
            return
        self._beside += blocks
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._code(layer, blocks, pages, seals)

    def _collect(
        self, layer: int, states: tuple[Tensor, Tensor], seals: DeviceSeals
    ) -> list[Tensor]:
        """Copies ``[heads * blocks, 128, head_dim]`` of keys and values; keeps first tokens."""
        place = self._places[layer]
        tails = (place.group.keys[place.index], place.group.values[place.index])
        sources = list(states)
        if len(seals.held):
            for at, tail in enumerate(tails):
                held = tail[seals.held].transpose(1, 2).flatten(0, 1)
                sources[at] = torch.cat([states[at], held])
        if len(seals.sink_rows):
            for sinks, source in zip(place.group.sink_states(place.index), sources, strict=True):
                sinks[seals.sink_rows] = source[seals.sink_source].transpose(1, 2)
        return [
            source.transpose(0, 1).index_select(1, seals.source).view(-1, *self._page_shape)
            for source in sources
        ]

    def _code(self, layer: int, blocks: list[Tensor], pages: Tensor, seals: DeviceSeals) -> None:
        """Encode the blocks of a layer and store them."""
        place, heads = self._places[layer], self.num_kv_heads
        coded = self._encode(place.flat, blocks, seals, seals.heads + place.first_head)
        _words(pages)[seals.blocks] = _words(coded.view(heads, -1, coded.shape[1])).transpose(0, 1)

    def _encode(
        self, flat: FlatHeads, states: Sequence[Tensor], seals: DeviceSeals, heads: Tensor
    ) -> Tensor:
        count = len(heads)
        if len(self._no_flags) < count:
            self._no_flags = self._no_flags.new_zeros(count, PAGE_TOKENS)
        positions, counts = seals.positions, seals.counts
        if count > len(counts):
            # pages of several layers, one after the other
            positions = positions.repeat(count // len(counts), 1)
            counts = counts.repeat(count // len(counts))
        rows = PageRows(positions, counts, self._no_flags[:count])
        return self._encoder.encode(self.layout, 0, flat.codec, (states[0], states[1]), rows, heads)

    def _gather(
        self, layer: int, new: tuple[Tensor, Tensor], pages: Tensor, chunks: DeviceChunks
    ) -> tuple[Tensor, Tensor]:
        """States of rows side by side: context from codes and dense memory, then their chunks."""
        place = self._places[layer]
        count = int(chunks.plan.key_starts[-1])
        keys, values = (part[:count] for part in self._workspace)
        if len(chunks.blocks):
            rebuild_pages(
                pages,
                chunks.blocks,
                chunks.page_place,
                keys,
                values,
                place.flat.tables,
                self.layout,
                first_head=place.first_head,
            )
        tails = (place.group.keys[place.index], place.group.values[place.index])
        sinks = place.group.sink_states(place.index)
        for to, tail, sink, own in zip((keys, values), tails, sinks, new, strict=True):
            for held, (row, offset, at) in ((tail, chunks.tails), (sink, chunks.sinks)):
                if len(at):
                    to[at] = held[row, :, offset]
            to[chunks.chunk_places] = own
        return keys, values

    def finish(self, step: CudaStep, names: tuple[str, ...]) -> None:
        """Code the blocks that a step of decoded rows filled, and cut prompts, in all layers."""
        group = self.groups[names]
        members = [self.layer_ids[name] for name in names]
        if step.pending is not None:
            self._seal_group(group, members, step.pending)
        for cut in step.cuts:
            pages = cut.pages()
            for layer in members:
                own = pages[self._places[layer].index]
                compact(_words(self._caches[layer]), cut.blocks, own)

    def _seal_group(self, group: LayerGroup, members: list[int], seals: DeviceSeals) -> None:
        for flat in self._flat.values():
            layers = [layer for layer in members if layer in flat.layers]
            if layers:
                self._seal_tails(group, flat, layers, seals)

    def _seal_tails(
        self, group: LayerGroup, flat: FlatHeads, layers: list[int], seals: DeviceSeals
    ) -> None:
        heads, count = self.num_kv_heads, seals.plan.num_blocks
        index = [self._places[layer].index for layer in layers]
        is_all = index == list(range(group.shape.num_layers))
        # every block of such a step is a slot of its own
        offsets = (seals.source % PAGE_TOKENS).view(1, 1, count, PAGE_TOKENS, 1)
        shifted = len(seals.sink_rows) > 0
        whole, coded = [], []
        for tail in (group.keys, group.values):
            mine = tail if is_all else tail[index]
            held = mine.transpose(1, 2).index_select(2, seals.held)
            whole.append(held)
            if shifted:
                held = held.gather(3, offsets.expand(held.shape))
            coded.append(held.view(-1, *self._page_shape))
        first = [self._places[layer].first_head for layer in layers]
        starts = torch.tensor(first).repeat_interleave(heads * count)
        if self.device.type == "cuda":
            starts = starts.pin_memory().to(self.device, non_blocking=True)
        pages = self._encode(flat, coded, seals, seals.heads.repeat(len(layers)) + starts)
        words = _words(pages.view(len(layers), heads, count, -1)).transpose(1, 2)
        self._store(tuple(layers), seals.blocks, words)
        if shifted:
            self._keep_sinks(group, index, whole, seals)

    def _keep_sinks(
        self, group: LayerGroup, index: list[int], tails: list[Tensor], seals: DeviceSeals
    ) -> None:
        """Copy the first tokens of full first blocks; rare, so layer by layer."""
        offset, held = seals.sink_source % PAGE_TOKENS, seals.sink_source[:, :1] // PAGE_TOKENS
        for at, layer in enumerate(index):
            for sinks, tail in zip(group.sink_states(layer), tails, strict=True):
                sinks[seals.sink_rows] = tail[at].transpose(0, 1)[held, :, offset].transpose(1, 2)

    def _store(self, layers: tuple[int, ...], blocks: Tensor, words: Tensor) -> None:
        """Write ``[layers, blocks, heads, words]`` to some layers, at once where that can be."""
        if layers not in self._pools:
            self._pools[layers] = _join_layers([self._caches[layer] for layer in layers])
        pool = self._pools[layers]
        if pool is not None:
            pool[:, blocks] = words
            return
        for layer, part in zip(layers, words, strict=True):
            _words(self._caches[layer])[blocks] = part


def _join_layers(caches: list[Tensor]) -> Tensor | None:
    """Blocks as one tensor ``[layers, blocks, heads, words]``; None at uneven distances."""
    flat = [_words(cache) for cache in caches]
    steps = {b.data_ptr() - a.data_ptr() for a, b in pairwise(flat)} or {0}
    first, step = flat[0], min(steps)
    memory = {part.untyped_storage().data_ptr() for part in flat}
    if len(memory) > 1 or len(steps) > 1 or step < 0 or step % _WORD.itemsize:
        return None
    size, strides = (len(flat), *first.shape), (step // _WORD.itemsize, *first.stride())
    return first.as_strided(size, strides)


def _as_pages(cache: Tensor) -> Tensor:
    """``[blocks, heads, page_bytes]`` uint8, a head's block in one run of bytes."""
    pages = cache.flatten(2)
    if not pages.is_contiguous():
        raise ValueError(
            f"blocks {tuple(cache.shape)} lie with strides {cache.stride()}: a head's block must "
            "be one run of bytes, layers outermost (KV cache layout LBHNC)"
        )
    return pages.view(torch.uint8)


def _words(pages: Tensor) -> Tensor:
    """Bytes eight by eight, which copies faster."""
    return pages.view(_WORD)
