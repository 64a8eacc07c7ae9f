# SPDX-License-Identifier: Apache-2.0
"""Decode attention in native code: one call per sequence, layer and step; and demotion.

What the kernels read, page addresses and codebooks, is prepared once per change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sphkv.attention.partial import PartialAttention
from sphkv.attention.plans import PlanCache
from sphkv.attention.request import (
    AttentionOptions,
    BatchRequest,
    DecodeRequest,
    EagerBackend,
    spherical_codec,
)
from sphkv.codec.clipping import CLIP_RANGE, NUM_CELLS, NUM_RATIOS
from sphkv.codec.codebook import AngleCodebook
from sphkv.codec.native import clip_table
from sphkv.codec.states import SphericalCodec
from sphkv.codec.values import COARSE_STEP, NUM_REFINEMENTS, READ_GAIN
from sphkv.core.contract import StateCodec
from sphkv.core.devices import native_variant, require_kernels
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import TierSpec
from sphkv.store.layout import RADIUS_LO_OFFSET, PageLayout, blank_pages
from sphkv.store.order import CodecOnly, PageCodec, PageOrder
from sphkv.store.paging import PageBatch, PageRows
from sphkv.store.sequence import PageGroup
from sphkv.store.store import PageStore

Precision = Literal["int8", "float32"]
EXACT_VARIANT = "float32"
# Query rows of one KV head per call: more would push their tables out of the cache.
_MAX_ROWS = 32


class CodebookCache:
    """Codebooks in the kernels' form, by codec, layer and slots.

    Layers of one rotary embedding share its phases, which are larger than a layer's codebook.
    """

    def __init__(self) -> None:
        self._held: WeakKeyDictionary[SphericalCodec, _Tables] = WeakKeyDictionary()

    def get(self, codec: SphericalCodec, layer: int, tier: TierSpec) -> Any:
        """The codebook of a layer at a tier, built once."""
        tables = self._held.setdefault(codec, _Tables())
        key = (layer, tier.key_nibbles(codec.calibration.geometry.head_dim))
        if key not in tables.books:
            rotary = tables.rotary(codec.calibration.ropes[layer])
            tables.books[key] = _make_codebook(codec.codebook(layer, tier), rotary)
        return tables.books[key]

    def nbytes(self, codec: SphericalCodec) -> int:
        """Bytes of all codebooks of a codec, and of the phases of their rotary embeddings."""
        tables = self._held.get(codec)
        if tables is None:
            return 0
        held = (*tables.books.values(), *tables.rotaries.values())
        return sum(int(table.nbytes) for table in held)


@dataclass(slots=True)
class _Tables:
    """What the kernels read of one codec."""

    books: dict[tuple[int, int], Any] = field(default_factory=dict)
    rotaries: dict[tuple[bytes, bytes], Any] = field(default_factory=dict)

    def rotary(self, rope: RopeSpec) -> Any:
        """Phases of a rotary embedding, made once however many layers have it."""
        radians, channels = rope.frequencies(), rope.plane_channels().contiguous()
        key = (radians.numpy().tobytes(), channels.numpy().tobytes())
        if key not in self.rotaries:
            self.rotaries[key] = require_kernels().Rotary(
                rope.num_planes, radians.data_ptr(), channels.data_ptr()
            )
        return self.rotaries[key]


def _make_codebook(book: AngleCodebook, rotary: Any) -> Any:
    parts = (
        book.points.float().contiguous(),
        book.slot_plane.contiguous(),
        book.num_pairs.contiguous(),
        book.constant.float().contiguous(),
    )
    heads, slots = book.slot_plane.shape[:2]
    return require_kernels().Codebook(rotary, heads, slots, *(part.data_ptr() for part in parts))


def build_plan(store: PageStore, sequence: int, layer: int, codebooks: CodebookCache) -> Any:
    """Addresses of all pages of a layer, head by head, lowest tier first."""
    groups = store.pages(sequence, layer)
    kinds = []
    for group in groups:
        tier, book = group.layout.tier, None
        if tier.is_coded:
            book = codebooks.get(spherical_codec(store, sequence), layer, tier)
        kinds.append(require_kernels().make_kind(layout_fields(group.layout), book))
    geometry = store.config.geometry
    addresses, kind_ids, first_page = _by_head(store, groups, geometry.num_kv_heads)
    return require_kernels().make_plan(
        geometry.num_kv_heads,
        geometry.head_dim,
        kinds,
        addresses.data_ptr(),
        kind_ids.data_ptr(),
        first_page.data_ptr(),
    )


def _by_head(
    store: PageStore, groups: list[PageGroup], num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Addresses and kinds ``[pages]``, and ``[heads + 1]`` where each head begins; int64."""
    none = torch.zeros(0, dtype=torch.int64)
    ids = torch.cat([none, *(group.flat_ids() for group in groups)])
    heads = torch.cat([none, *(group.head_ids() for group in groups)])
    sizes = torch.tensor([int(group.num_pages.sum()) for group in groups], dtype=torch.int64)
    kind_ids = torch.arange(len(groups)).repeat_interleave(sizes)
    order = heads.argsort(stable=True)
    addresses = store.allocator.addresses(ids)
    ends = heads.bincount(minlength=num_heads).cumsum(0)
    first_page = torch.cat([ends.new_zeros(1), ends])
    return addresses[order].contiguous(), kind_ids[order].contiguous(), first_page


def layout_fields(layout: PageLayout) -> list[int]:
    """Offsets in the order that ``make_kind`` of ``csrc/bindings.cpp`` reads."""
    return [
        layout.page_tokens,
        layout.key_offset,
        layout.radius_offset,
        layout.scale_offset,
        layout.value_offset,
        layout.position_offset,
        layout.tier.value_bits,
        layout.page_bytes,
        int(layout.position_mode),
    ]


class NativePageCodec(CodecOnly):
    """Makes pages with coded values in host memory; everything else is left to the codec.

    A ``PageRecoder``, too.

    Args:
        codebooks: Codebooks in the kernels' form.
        num_threads: Threads of a call; ``torch.get_num_threads()`` if None.
        variant: One of ``_kernels.recoders()``; the fastest if None.
    """

    def __init__(
        self, codebooks: CodebookCache, num_threads: int | None = None, variant: str | None = None
    ) -> None:
        self._codebooks, self._num_threads = codebooks, num_threads
        self._variant = variant or native_variant()

    def encode(
        self,
        layout: PageLayout,
        layer: int,
        codec: StateCodec | None,
        states: tuple[Tensor, Tensor],
        rows: PageRows,
        head_ids: Tensor,
    ) -> Tensor | None:
        """Pages of dense states; see ``PageCodec.encode``."""
        if not self.recodes(layout, codec):
            return None
        assert isinstance(codec, SphericalCodec)
        geometry = codec.calibration.geometry
        _check_states(layout, geometry, layer, states, head_ids)
        keys, values = (part.detach().float().contiguous() for part in states)
        heads = layer * geometry.num_kv_heads + head_ids
        pages = blank_pages(layout, rows)
        made = _Pages(layout, codec, heads.contiguous(), pages)
        require_kernels().encode_pages(
            *made.arguments(self._kinds(layout, codec, {layer})),
            keys.data_ptr(),
            values.data_ptr(),
            self._num_threads or torch.get_num_threads(),
            pages.data_ptr(),
            self._variant,
        )
        _check_pages(pages)
        return pages

    def recodes(self, layout: PageLayout, codec: StateCodec | None) -> bool:
        """Where values are coded; see ``PageRecoder.recodes``."""
        return type(codec) is SphericalCodec and layout.tier.has_value_codes

    def recode(
        self,
        sources: Sequence[tuple[PageLayout, Tensor]],
        layout: PageLayout,
        codec: StateCodec | None,
        batch: PageBatch,
    ) -> Tensor:
        """Code states of pages again; see ``PageRecoder.recode``."""
        assert isinstance(codec, SphericalCodec)
        pages = blank_pages(layout, batch.rows)
        layers = {*(batch.head_ids // codec.calibration.geometry.num_kv_heads).unique().tolist()}
        addresses = torch.cat([address for _, address in sources])
        sizes = torch.tensor([len(address) for _, address in sources])
        kind_ids = torch.arange(len(sources)).repeat_interleave(sizes)
        made = _Pages(layout, codec, batch.head_ids.contiguous(), pages)
        parts = (addresses, kind_ids, batch.source.contiguous())
        require_kernels().recode_pages(
            *made.arguments(self._kinds(layout, codec, layers)),
            [kind for each, _ in sources for kind in self._kinds(each, codec, layers)],
            [part.data_ptr() for part in parts],
            self._num_threads or torch.get_num_threads(),
            pages.data_ptr(),
            self._variant,
        )
        _check_pages(pages)
        return pages

    def _kinds(self, layout: PageLayout, codec: SphericalCodec, layers: set[int]) -> list[Any]:
        """Pages of a layout in every layer as the kernels see them; of use in ``layers`` alone."""
        make, fields, tier = require_kernels().make_kind, layout_fields(layout), layout.tier
        books = [
            self._codebooks.get(codec, layer, tier) if tier.is_coded and layer in layers else None
            for layer in range(codec.calibration.geometry.num_layers)
        ]
        return [make(fields, book) for book in books]


def _check_states(
    layout: PageLayout,
    geometry: KVGeometry,
    layer: int,
    states: tuple[Tensor, Tensor],
    head_ids: Tensor,
) -> None:
    """Raise unless dense states are those of such pages, and of a model of this geometry."""
    shape = (len(head_ids), layout.page_tokens, geometry.head_dim)
    for name, part in zip(("keys", "values"), states, strict=True):
        if tuple(part.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(part.shape)}")
    if layout.head_dim != geometry.head_dim or not 0 <= layer < geometry.num_layers:
        raise ValueError(
            f"the codec is for {geometry}, the pages are of layer {layer} and head_dim "
            f"{layout.head_dim}"
        )
    heads = geometry.num_kv_heads
    if head_ids.dtype != torch.int64 or bool(((head_ids < 0) | (head_ids >= heads)).any()):
        raise ValueError(f"head_ids must be int64 below {heads}, got {head_ids.tolist()}")


def _check_pages(pages: Tensor) -> None:
    """Raise if the kernels met a key or value that float32 does not hold."""
    told = pages[:, RADIUS_LO_OFFSET : RADIUS_LO_OFFSET + 16].contiguous().view(torch.float32)
    if not bool(told.isfinite().all()):
        raise ValueError("keys or values are too large: their norms exceed float32")


class _Pages:
    """Pages in the making, and what the kernels must know to fill them.

    Args:
        layout: Their layout.
        codec: Encoder of the states.
        heads: ``[pages]`` int64 head of each among those of all layers.
        pages: ``[pages, page_bytes]`` with headers and positions.
    """

    def __init__(
        self, layout: PageLayout, codec: SphericalCodec, heads: Tensor, pages: Tensor
    ) -> None:
        self._layout, self._heads, self._pages = layout, heads, pages
        self._geometry = codec.calibration.geometry
        self._roots = codec.calibration.planes.metric_root.float().contiguous()

    def arguments(self, kinds: list[Any]) -> tuple[object, ...]:
        """The first ones of ``encode_pages`` and ``recode_pages``; addresses live as long as this.

        Args:
            kinds: Such pages in every layer.
        """
        bits = self._layout.tier.value_bits
        weights = clip_table(bits) if bits in CLIP_RANGE else None
        return (
            [self._layout.head_dim, self._geometry.num_kv_heads, len(self._pages)],
            kinds,
            [
                self._roots.data_ptr(),
                self._heads.data_ptr(),
                0 if weights is None else weights.data_ptr(),
            ],
            [NUM_RATIOS, NUM_CELLS, NUM_REFINEMENTS],
            [COARSE_STEP[bits], READ_GAIN[bits]],
        )


class NativeBackend(EagerBackend):
    """C++ kernels on CPU pages.

    Attributes:
        name: ``"native"``.
        page_order: None: pages as ``store/layout.py`` has them.
        page_codec: Makes pages of coded tiers.
        variant: Instruction set that runs, such as ``"neon"``; ``"float32"`` is portable.
    """

    name = "native"
    page_order: PageOrder | None = None
    page_codec: PageCodec | None

    def __init__(
        self,
        *,
        precision: Precision = "int8",
        variant: str | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Choose the kernels.

        Args:
            precision: ``"int8"`` quantises queries and softmax weights well below the codec's
                own error; ``"float32"`` does not quantise them and is slow.
            variant: Instruction set; the fastest this processor has if None.
            num_threads: Threads of a step; ``torch.get_num_threads()`` if None.

        Raises:
            ImportError: The extension was not built.
            ValueError: No such precision or variant here.
        """
        if precision not in ("int8", "float32"):
            raise ValueError(f"precision must be int8 or float32, got {precision!r}")
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads!r}")
        self._kernels = require_kernels()
        available = self._kernels.variants()
        if precision == "float32":
            variant = EXACT_VARIANT
        self.variant = available[0] if variant is None else variant
        if self.variant not in available:
            raise ValueError(f"variant must be one of {available}, got {variant!r}")
        self._engine = self._kernels.make_engine(self.variant)
        self._exact = self._kernels.make_engine(EXACT_VARIANT)
        self._num_threads = num_threads
        self._codebooks = CodebookCache()
        self.page_codec = NativePageCodec(self._codebooks, num_threads)
        self._plans = PlanCache(self._build_plan)

    def _build_plan(self, store: PageStore, sequences: tuple[int, ...], layer: int) -> Any:
        (sequence,) = sequences
        return build_plan(store, sequence, layer, self._codebooks)

    def plan(self, store: PageStore, sequence: int, layer: int) -> Any:
        """Page addresses and codebooks of a layer, as the kernels read them; kept until it changes.

        Raises:
            ValueError: The pages lie in an order that these kernels do not read.
        """
        if store.allocator.order is not None:
            raise ValueError("native kernels read pages in the store's own order alone")
        return self._plans.get(store, (sequence,), layer)

    def attend(self, request: DecodeRequest) -> PartialAttention:
        """Attention over all pages and the tail; see ``DecodeBackend.attend``."""
        query = _on_cpu(request.query)
        heads, queries, head_dim = query.shape
        result = PartialAttention(
            torch.empty(heads, queries, head_dim), torch.empty(heads, queries)
        )
        step = max(1, _MAX_ROWS // request.store.config.geometry.group_size)
        place = (request.store, request.sequence, request.layer)
        if 0 < queries <= step:
            self._call(*place, query.contiguous(), request.positions, request.options, result)
            return result
        for at in range(0, queries, step):
            part = slice(at, at + step)
            rows = query[:, part].contiguous()
            out = PartialAttention(torch.empty_like(rows), torch.empty(rows.shape[:2]))
            self._call(*place, rows, request.positions[part], request.options, out)
            result.output[:, part], result.lse[:, part] = out.output, out.lse
        return result

    def attend_rows(self, request: BatchRequest) -> PartialAttention:
        """One call per row; see ``DecodeBackend.attend_rows``."""
        query = _on_cpu(request.query).contiguous()
        output, lse = torch.empty_like(query), torch.empty(query.shape[:2])
        for row, sequence in enumerate(request.sequences):
            # [heads, head_dim] is [heads, 1 query, head_dim] as it lies
            self._call(
                request.store,
                sequence,
                request.layer,
                query[row].unsqueeze(1),
                request.positions[row : row + 1],
                request.options,
                PartialAttention(output[row], lse[row]),
            )
        return PartialAttention(output, lse)

    def table_bytes(self, codec: SphericalCodec) -> int:
        """Bytes of the codebooks of a codec in the kernels' form."""
        return self._codebooks.nbytes(codec)

    def _call(
        self,
        store: PageStore,
        sequence: int,
        layer: int,
        query: Tensor,
        positions: Tensor,
        options: AttentionOptions,
        result: PartialAttention,
    ) -> None:
        """Attend with contiguous float32 queries ``[query_heads, queries, head_dim]``."""
        geometry = store.config.geometry
        positions = positions.contiguous()
        tail = store.open_tail(sequence, layer)
        call = self._kernels.Call()
        if tail is not None:
            call.set_tail(
                tail.keys.data_ptr(),
                tail.values.data_ptr(),
                tail.keys.stride(0),
                tail.num_tokens,
                tail.first_position,
            )
        num_queries = query.shape[1]
        rows = geometry.group_size * num_queries
        call.set_queries(query.data_ptr(), positions.data_ptr(), num_queries, rows)
        threads = self._num_threads or torch.get_num_threads()
        # zero stands for no soft-cap and for no window
        call.set_options(options.scale, options.softcap or 0.0, options.window or 0, threads)
        engine = self._engine if geometry.head_dim % 4 == 0 else self._exact
        plan = self.plan(store, sequence, layer)
        addresses = (result.output.data_ptr(), result.lse.data_ptr())
        self._kernels.attend(engine, plan, call, *addresses)


def _on_cpu(query: Tensor) -> Tensor:
    """The query in float32.

    Raises:
        ValueError: It is on another device.
    """
    if not query.is_cpu:
        raise ValueError(f"native kernels read CPU tensors, got {query.device}")
    return query.float()
