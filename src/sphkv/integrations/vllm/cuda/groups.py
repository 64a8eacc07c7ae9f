# SPDX-License-Identifier: Apache-2.0
"""Dense memory of the layers that share a block table: tails, sinks, and what a graph reads.

A sequence's newest states are bfloat16 in the slot of its request until their block is full. Its
first tokens may stay dense for good; then they are a small page of their own beside vLLM's blocks,
found by the id of the sequence's first block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sphkv.attention.cuda.dense import DenseStates
from sphkv.attention.cuda.geometry import PAGE_TOKENS, ceil_div
from sphkv.attention.cuda.pages import PageLists
from sphkv.attention.partial import PartialAttention
from sphkv.attention.triton.block_lists import CutLists, list_pages
from sphkv.integrations.vllm.cuda.retain import Cut, kept_blocks
from sphkv.integrations.vllm.cuda.steps import (
    DECODE_FIELDS,
    BatchRows,
    ChunkPlan,
    Integers,
    SealPlan,
    TailWrites,
    plan_chunks,
    plan_decode,
    plan_seals,
    plan_tails,
)
from sphkv.store.layout import COUNT_OFFSET, HEADER_BYTES

_HALF = torch.bfloat16.itemsize
_PINNED_POWERS = 24


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Sizes of a group of layers.

    Attributes:
        num_layers: Layers.
        num_kv_heads: KV heads of this worker.
        num_query_heads: Query heads of this worker.
        head_dim: Elements of a key.
        num_slots: Sequences that may run.
        num_sinks: Sequences whose first tokens can be kept dense.
        sink_tokens: How many tokens of each.
        max_tokens: Longest sequence.
        window: Positions a query sees; None for all.
        page_bytes: Bytes of a coded page.
        kept_share: Part of a prompt's blocks that stays when it is complete; 1.0 for all.
    """

    num_layers: int
    num_kv_heads: int
    num_query_heads: int
    head_dim: int
    num_slots: int
    num_sinks: int
    sink_tokens: int
    max_tokens: int
    window: int | None = None
    page_bytes: int = 0
    kept_share: float = 1.0

    @property
    def has_cuts(self) -> bool:
        """Whether prompts are cut to a budget."""
        return self.kept_share < 1.0

    @property
    def tail_bytes(self) -> int:
        """Bytes of all tails, one more than slots."""
        states = self.num_layers * (self.num_slots + 1) * self.num_kv_heads * PAGE_TOKENS
        return 2 * _HALF * states * self.head_dim

    @property
    def sink_page_bytes(self) -> int:
        """Bytes of the first tokens of one sequence, layer and head."""
        return HEADER_BYTES + 2 * _HALF * self.sink_tokens * self.head_dim

    @property
    def sink_bytes(self) -> int:
        """Bytes of all of them, and of an empty one."""
        pages = self.num_layers * (self.num_sinks + 1) * self.num_kv_heads
        return pages * self.sink_page_bytes

    @property
    def key_offset(self) -> int:
        """Where the keys of such a page begin."""
        return HEADER_BYTES

    @property
    def value_offset(self) -> int:
        """Where its values begin."""
        return HEADER_BYTES + _HALF * self.sink_tokens * self.head_dim

    @property
    def page_tokens(self) -> int:
        """Tokens of such a page; a kernel divides by it."""
        return max(1, self.sink_tokens)


class SinkLedger:
    """Which sequences have their first tokens dense, and where.

    A row belongs to the first block of a sequence. It stays while the block may be found by its
    prefix, and is free when vLLM gives the block to someone else. Where rows run out a first block
    is coded as any other.
    """

    def __init__(self, num_rows: int, *, keeps_prefixes: bool) -> None:
        self._keeps_prefixes = keeps_prefixes
        self._free = list(range(num_rows))
        self._row_of: dict[int, int] = {}
        self._first_block: dict[str, int] = {}

    @property
    def num_used(self) -> int:
        """Rows in use."""
        return len(self._row_of)

    def begin(self, request: str, blocks: Sequence[int], num_found: int) -> None:
        """A request got its first blocks, of which some were found by their prefix."""
        if blocks:
            self._first_block[request] = blocks[0]
        self.reuse(blocks[num_found:])

    def reuse(self, blocks: Sequence[int]) -> None:
        """Blocks were given to a request that will write them."""
        if self._row_of:
            for block in blocks:
                row = self._row_of.pop(block, None)
                if row is not None:
                    self._free.append(row)

    def end(self, request: str) -> None:
        """A request is gone."""
        block = self._first_block.pop(request, None)
        if block is not None and not self._keeps_prefixes:
            self.reuse([block])

    def assign(self, request: str) -> None:
        """Find a row for a request whose first block becomes full."""
        block = self._first_block.get(request)
        if block is not None and block not in self._row_of and self._free:
            self._row_of[block] = self._free.pop()

    def row(self, request: str) -> int:
        """Row of a request; -1 if it has none."""
        return self._row_of.get(self._first_block.get(request, -1), -1)


def reserve_pinned() -> None:
    """Let torch have pinned memory in every size that plans of steps take.

    Asking the driver for more would wait for the device in the middle of a step.
    """
    sizes = [1 << power for power in range(_PINNED_POWERS)]
    held = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in 4 * sizes]
    # what is given back here stays with torch
    held.clear()


def _pinned(array: Integers, device: torch.device) -> Tensor:
    """An array where a GPU can fetch it while the host goes on."""
    flat = torch.from_numpy(array)
    return flat.pin_memory() if device.type == "cuda" else flat


def to_device(arrays: Sequence[Integers], device: torch.device) -> list[Tensor]:
    """Copy int64 arrays in one piece, without waiting."""
    flat = _pinned(np.concatenate([array.ravel() for array in arrays]), device)
    flat = flat.to(device, non_blocking=True)
    parts = flat.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStep:
    """What the decoded rows of a step read, in memory that keeps its place.

    Attributes:
        rows: Rows, padded ones included.
        tails: ``[layers, rows, heads, 2]`` int64 addresses.
        extents: ``[rows, 2]`` int64 states of each tail and first position.
        sinks: ``[layers, rows, heads]`` int64 addresses.
        page_start: See ``DenseStates``.
        shape: Where keys and values of sinks begin.
        lists: Pages of each row and head, of the first layer if they differ.
        layer_stride: Entries from one layer's lists to the next one's; 0 if they are the same.
        positions: ``[rows]`` int32 position of each new token; None without a window.
        partial: Where the dense part of a layer goes.
    """

    rows: int
    tails: Tensor
    extents: Tensor
    sinks: Tensor
    page_start: Tensor
    shape: GroupShape
    lists: PageLists
    layer_stride: int
    positions: Tensor | None
    partial: PartialAttention

    def layer_lists(self, index: int) -> PageLists:
        """Pages of a layer, by its index in the group."""
        if not self.layer_stride:
            return self.lists
        entries = self.lists.entries[index * self.layer_stride :]
        return PageLists(entries, self.lists.row_start, self.lists.batch)

    def dense(self, index: int) -> DenseStates:
        """Tails and sinks of a layer, by its index in the group."""
        # a kernel asks the shape where keys and values of a dense page begin
        layout: Any = self.shape
        parts = (self.tails[index], self.extents, self.sinks[index], self.page_start)
        return DenseStates(*parts, layout)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSeals:
    """A ``SealPlan`` on the device.

    Attributes:
        plan: The plan.
        held: ``[m]`` slots.
        source: ``[blocks * 128]`` numbers of states.
        positions: ``[heads * blocks, 128]``.
        counts: ``[heads * blocks]``.
        heads: ``[heads * blocks]`` head of each page, all blocks of a head side by side.
        blocks: ``[blocks]`` ids.
        sink_source: ``[sequences, sink_tokens]``.
        sink_rows: ``[sequences]``.
    """

    plan: SealPlan
    held: Tensor
    source: Tensor
    positions: Tensor
    counts: Tensor
    heads: Tensor
    blocks: Tensor
    sink_source: Tensor
    sink_rows: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DeviceChunks:
    """A ``ChunkPlan`` on the device; only the first two matter without context.

    Attributes:
        plan: The plan.
        query_starts: ``[rows + 1]`` int32.
        key_starts: ``[rows + 1]`` int32.
        blocks: ``[pages]`` ids of pages to rebuild.
        page_place: See ``ChunkPlan``.
        sinks: Rows, offsets and places.
        tails: Slots, offsets and places.
        chunk_places: See ``ChunkPlan``.
    """

    plan: ChunkPlan
    query_starts: Tensor
    key_starts: Tensor
    blocks: Tensor
    page_place: Tensor
    sinks: tuple[Tensor, Tensor, Tensor]
    tails: tuple[Tensor, Tensor, Tensor]
    chunk_places: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CudaStep:
    """What every layer of a group does in a step.

    Attributes:
        num_tokens: Tokens of the batch that count.
        decode: Rows with one new token; None if there is none.
        chunks: Chunks of prompts.
        early_seals: Blocks that chunks fill, coded before anyone reads: a request with one new
            token may have found them in the same step; None if there is none.
        seals: Blocks that decoded rows fill in a step with chunks; None if none does.
        tail_tokens: Tokens of chunks that stay dense: place in the batch, slot, offset.
        pending: Blocks that a step of decoded rows alone fills, coded behind it.
        cuts: Prompts that are complete with this step and lose blocks behind it.
    """

    num_tokens: int
    decode: DecodeStep | None
    chunks: tuple[DeviceChunks, ...]
    early_seals: DeviceSeals | None
    seals: DeviceSeals | None
    tail_tokens: tuple[Tensor, Tensor, Tensor] | None
    pending: DeviceSeals | None
    cuts: tuple[Cut, ...] = ()


class LayerGroup:
    """Tails, sinks and lists of the layers that share a block table.

    Attributes:
        shape: Sizes.
        keys: ``[layers, slots + 1, heads, 128, head_dim]`` bfloat16 tails.
        values: The same for values.
        ledger: Who has sinks.
        room: States of the workspace that chunks with context are gathered in.
        request_shares: Part of the budget that requests asked for, where it is not all.
    """

    def __init__(
        self,
        shape: GroupShape,
        device: torch.device,
        *,
        room: int,
        keeps_prefixes: bool,
        is_repeatable: bool = False,
    ) -> None:
        self.shape, self.room, self._device = shape, room, device
        self._is_repeatable = is_repeatable
        self.request_shares: dict[str, float] = {}
        layers, heads, rows = shape.num_layers, shape.num_kv_heads, shape.num_slots
        tail = (layers, rows + 1, heads, PAGE_TOKENS, shape.head_dim)
        self.keys = torch.zeros(tail, dtype=torch.bfloat16, device=device)
        self.values = torch.zeros_like(self.keys)
        pages = (layers, shape.num_sinks + 1, heads, shape.sink_page_bytes)
        sinks = torch.zeros(pages, dtype=torch.uint8, device=device)
        # the last row stays empty
        sinks[:, : shape.num_sinks, :, COUNT_OFFSET] = shape.sink_tokens
        self._sinks = sinks.view(torch.bfloat16)
        self.ledger = SinkLedger(shape.num_sinks, keeps_prefixes=keeps_prefixes)
        self._tail_table = torch.stack([_addresses(self.keys), _addresses(self.values)], -1)
        self._sink_table = _addresses(sinks)
        self._most = ceil_div(shape.max_tokens, PAGE_TOKENS) + 1
        self._make_buffers()

    def _make_buffers(self) -> None:
        shape, device = self.shape, self._device
        layers, heads, rows = shape.num_layers, shape.num_kv_heads, shape.num_slots

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self._plan = zeros(DECODE_FIELDS * rows + 1)
        self._tails = zeros(layers * rows * heads * 2)
        self._sink_pages = zeros(layers * rows * heads)
        # one entry before the first: a kernel may look at the end of an empty list
        self._list_size = heads * rows * self._most
        self._entries = zeros(1 + (layers if shape.has_cuts else 1) * self._list_size)
        self._cuts: dict[str, tuple[int, int]] = {}
        self._cut_lists: CutLists | None = None
        if shape.has_cuts:
            self._cut_lists = CutLists(zeros(layers), shape.page_bytes, self._list_size)
        self._starts = zeros(heads * rows + 1, dtype=torch.int32)
        self._positions = zeros(rows, dtype=torch.int32)
        self._page_start = torch.arange(rows * heads + 1, dtype=torch.int32, device=device)
        if not shape.sink_tokens:
            self._page_start.zero_()
        output = (rows, shape.num_query_heads)
        self._partial = PartialAttention(
            zeros(*output, shape.head_dim, dtype=torch.float32), zeros(*output, dtype=torch.float32)
        )
        self._head = torch.arange(heads, device=device)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of everything here."""
        held = (self.keys, self.values, self._sinks, self._tail_table, self._sink_table)
        buffers = (self._plan, self._tails, self._sink_pages, self._entries, self._partial.output)
        return sum(part.nbytes for part in (*held, *buffers))

    def bind(self, caches: Sequence[Tensor]) -> None:
        """Take note of where the blocks of each layer are."""
        if self._cut_lists is not None:
            addresses = torch.tensor([cache.data_ptr() for cache in caches])
            self._cut_lists.caches.copy_(addresses)

    def forget(self, request: str) -> None:
        """A request is gone."""
        self.ledger.end(request)
        self._cuts.pop(request, None)
        self.request_shares.pop(request, None)

    def sink_states(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[sinks + 1, heads, sink_tokens, head_dim]`` of the first tokens."""
        shape = self.shape
        size = shape.sink_tokens * shape.head_dim
        starts = (shape.key_offset // _HALF, shape.value_offset // _HALF)
        keys, values = (self._sinks[layer, :, :, at : at + size] for at in starts)
        split = (shape.sink_tokens, shape.head_dim)
        return keys.unflatten(-1, split), values.unflatten(-1, split)

    def plan(
        self,
        query_starts: Integers,
        num_tokens: Integers,
        slots: Integers,
        requests: Sequence[str],
        table: Tensor,
        *,
        padded: int,
        prompts: Integers | None = None,
    ) -> CudaStep:
        """Work a step out; nothing waits for the device.

        Args:
            query_starts: ``[rows + 1]`` first token of each row, and the end.
            num_tokens: ``[rows]`` length of each sequence after the step.
            slots: ``[rows]`` slots; each belongs to one running request.
            requests: ``[rows]`` ids of the requests; any other word for rows of a trial run.
            table: ``[padded rows, columns]`` int32 block ids.
            padded: Rows of the graph, for a step of decoded rows alone.
            prompts: ``[rows]`` length of each prompt; needed where prompts are cut.
        """
        rows = self._rows(query_starts, num_tokens, slots, requests)
        decoded, count = rows.num_decoded, len(num_tokens)
        is_decode = decoded == count
        batch = padded if is_decode else decoded
        decode = self._plan_decode(rows, batch, table) if batch else None
        full = np.flatnonzero(num_tokens // PAGE_TOKENS > rows.before // PAGE_TOKENS)
        num_batch = 0 if is_decode else int(query_starts[-1])
        seals = self._plan_seals(rows, full[full < decoded], num_batch, table)
        cuts = self._plan_cuts(rows, requests, table, prompts)
        if is_decode:
            return CudaStep(int(query_starts[-1]), decode, (), None, None, None, seals, cuts)
        early = self._plan_seals(rows, full[full >= decoded], num_batch, table)
        shape = self.shape
        groups = plan_chunks(
            rows,
            room=self.room,
            sink_tokens=shape.sink_tokens,
            window=shape.window,
            is_repeatable=self._is_repeatable,
        )
        chunks = tuple(self._chunks_to_device(group, table) for group in groups)
        tails = self._tails_to_device(rows)
        return CudaStep(int(query_starts[-1]), decode, chunks, early, seals, tails, None, cuts)

    def _plan_seals(
        self, rows: BatchRows, full: Integers, num_batch: int, table: Tensor
    ) -> DeviceSeals | None:
        """Blocks that some rows fill; None if there are no such rows."""
        if not len(full):
            return None
        sinks = self.shape.sink_tokens
        plan = plan_seals(rows, full.tolist(), num_batch=num_batch, sink_tokens=sinks)
        return self._seals_to_device(plan, table)

    def _plan_cuts(
        self, rows: BatchRows, requests: Sequence[str], table: Tensor, prompts: Integers | None
    ) -> tuple[Cut, ...]:
        """Prompts that are complete with this step; from the next one on they have fewer blocks."""
        if prompts is None or not self.shape.has_cuts:
            return ()
        cuts = []
        for row in np.flatnonzero((rows.before < prompts) & (rows.num_tokens >= prompts)).tolist():
            full = int(prompts[row]) // PAGE_TOKENS
            share = self.shape.kept_share * self.request_shares.get(requests[row], 1.0)
            kept = kept_blocks(full, share)
            if requests[row] and kept < full:
                self._cuts[requests[row]] = (kept, full - kept)
                layers, heads = self.shape.num_layers, self.shape.num_kv_heads
                cuts.append(Cut.of(row, table[row, :full].long(), kept, layers, heads))
        return tuple(cuts)

    def _rows(
        self, starts: Integers, num_tokens: Integers, slots: Integers, requests: Sequence[str]
    ) -> BatchRows:
        rows = BatchRows.of(starts, num_tokens, slots)
        if self._cuts:
            cuts = [self._cuts.get(request, (0, 0)) for request in requests]
            rows.kept[:], rows.gap[:] = np.array(cuts, dtype=np.int64).T
        if not self.shape.num_sinks:
            return rows
        # first blocks that fill now may already be found by others in the same step
        for row in np.flatnonzero(rows.seals_first_block()).tolist():
            self.ledger.assign(requests[row])
        rows.sinks[:] = [self.ledger.row(request) for request in requests]
        return rows

    def _plan_decode(self, rows: BatchRows, batch: int, table: Tensor) -> DecodeStep:
        shape = self.shape
        layers, heads = shape.num_layers, shape.num_kv_heads
        packed = plan_decode(
            rows,
            padded=batch,
            sink_tokens=shape.sink_tokens,
            spare_slot=shape.num_slots,
            spare_sink=shape.num_sinks,
            window=shape.window,
        )
        plan = self._plan[: len(packed)]
        plan.copy_(_pinned(packed, self._device), non_blocking=True)
        slots, sinks = plan[6 * batch : 7 * batch], plan[7 * batch : 8 * batch]
        tails = self._tails[: layers * batch * heads * 2].view(layers, batch, heads, 2)
        torch.index_select(self._tail_table, 1, slots, out=tails)
        pages = self._sink_pages[: layers * batch * heads].view(layers, batch, heads)
        torch.index_select(self._sink_table, 1, sinks, out=pages)
        lists = PageLists(self._entries[1:], self._starts[: heads * batch + 1], batch)
        most = int(packed[3 * batch : 4 * batch].max())
        list_pages(plan, table, lists, num_heads=heads, most_pages=most, cuts=self._cut_lists)
        extents = plan[: 2 * batch].view(batch, 2)
        positions = None
        if shape.window is not None:
            positions = self._positions[:batch].copy_(extents.sum(1) - 1)
        partial = PartialAttention(self._partial.output[:batch], self._partial.lse[:batch])
        stride = self._list_size if shape.has_cuts else 0
        where = (tails, extents, pages, self._page_start, shape)
        return DecodeStep(batch, *where, lists, stride, positions, partial)

    def _seals_to_device(self, plan: SealPlan, table: Tensor) -> DeviceSeals:
        held, source, positions, counts, row, column, sink_source, sink_rows = to_device(
            [
                *(plan.held, plan.source, plan.positions, plan.counts),
                *(plan.table_row, plan.table_column, plan.sink_source, plan.sink_rows),
            ],
            self._device,
        )
        heads = self.shape.num_kv_heads
        return DeviceSeals(
            plan,
            held,
            source.flatten(),
            positions.repeat(heads, 1),
            counts.repeat(heads),
            self._head.repeat_interleave(plan.num_blocks, output_size=heads * plan.num_blocks),
            table[row, column].long(),
            sink_source,
            sink_rows,
        )

    def _chunks_to_device(self, plan: ChunkPlan, table: Tensor) -> DeviceChunks:
        if not plan.has_context:
            starts = to_device([plan.query_starts], self._device)[0].to(torch.int32)
            # nothing is gathered, so nobody looks at the places
            none = (starts[:0],) * 3
            return DeviceChunks(plan, starts, starts, *none[:2], none, none, none[0])
        parts = to_device(
            [
                *(plan.query_starts, plan.key_starts),
                *(plan.page_row, plan.page_column, plan.page_place),
                *(plan.sink_rows, plan.sink_offsets, plan.sink_places),
                *(plan.tail_slots, plan.tail_offsets, plan.tail_places),
                plan.chunk_places,
            ],
            self._device,
        )
        row, column, place = parts[2:5]
        return DeviceChunks(
            plan,
            parts[0].to(torch.int32),
            parts[1].to(torch.int32),
            table[row, column].long(),
            place,
            (parts[5], parts[6], parts[7]),
            (parts[8], parts[9], parts[10]),
            parts[11],
        )

    def _tails_to_device(self, rows: BatchRows) -> tuple[Tensor, Tensor, Tensor] | None:
        writes: TailWrites = plan_tails(rows)
        if not len(writes.tokens):
            return None
        tokens, slots, offsets = to_device(
            [writes.tokens, writes.slots, writes.offsets], self._device
        )
        return tokens, slots, offsets


def _addresses(states: Tensor) -> Tensor:
    """Addresses ``[layers, rows, heads]`` int64 of ``states [layers, rows, heads, ...]``."""
    layers, rows, heads = states.shape[:3]
    size = states.stride(2) * states.element_size()
    number = torch.arange(layers * rows * heads, device=states.device)
    return (states.data_ptr() + number * size).view(layers, rows, heads)
