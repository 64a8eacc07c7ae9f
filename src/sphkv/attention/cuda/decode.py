# SPDX-License-Identifier: Apache-2.0
"""Decode attention on the GPU over coded pages in fragment order.

A :class:`CudaDecode` belongs to one layer, tier and position mode. It owns its tables and
workspace, so that a call allocates nothing, never waits for the device and can be captured into a
CUDA graph.

The output of :meth:`CudaDecode.attend` is always in the model's own coordinates (the rotation of
coded values undone), so results over other keys, of a dense tail or of another tier, can be merged
in the same launch with ``merge_with``.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.attention.cuda.compiler import architecture, load_cubin
from sphkv.attention.cuda.driver import Kernel
from sphkv.attention.cuda.geometry import KernelShape, ceil_div
from sphkv.attention.cuda.pages import PageLists, PagePool
from sphkv.attention.cuda.tables import build_tables, turn_rows
from sphkv.attention.partial import PartialAttention
from sphkv.attention.request import AttentionOptions
from sphkv.codec.codebook import AngleCodebook
from sphkv.core.rope import RopeSpec

ENTRY_POINT = "sphkv_decode"
MAX_WINDOW = (1 << 31) - 1
"""Widest window; it hides nothing but keys behind a query."""
_LOG2E = math.log2(math.e)


class _Params(ctypes.Structure):
    """Mirror of ``Params`` in ``kernels/layout.cuh``."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "pages",
                "page_list",
                "row_start",
                "shares",
                "tables",
                "turns",
                "query",
                "query_positions",
                "sinks",
                "other_out",
                "other_lse",
                "out",
                "lse",
                "part_out",
                "part_lse",
            )
        ),
        *(
            (name, ctypes.c_int)
            for name in (
                "batch",
                "kv_heads",
                "group",
                "blocks",
                "ctas",
                "uneven",
                "turn_rows",
                "turn_shift",
                "window",
                "query_is_bf16",
                "out_is_bf16",
                "unrotate",
            )
        ),
        *((name, ctypes.c_float) for name in ("logit_scale", "softcap")),
    )


@dataclass(slots=True, eq=False)
class TurnTable:
    """Cosines and sines by position; one table serves all layers with the same embedding.

    Attributes:
        rows: ``[phases, rows, planes, 2]`` int32, see :func:`turn_rows`.
        step: Every tile base must be a multiple of it.
    """

    rows: Tensor
    step: int
    _halves: Tensor | None = None

    @classmethod
    def build(
        cls, rope: RopeSpec, *, max_positions: int, device: torch.device, step: int = 1
    ) -> TurnTable:
        """Table for positions below ``max_positions``."""
        return cls(turn_rows(rope, max_positions, step=step, device=device), step)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, and of their halves if a kernel asked for them."""
        return self.rows.nbytes + (0 if self._halves is None else self._halves.nbytes)

    def for_shape(self, shape: KernelShape) -> Tensor:
        """What a kernel copies from: whole rows, or the second word of every turn side by side.

        Pages of runs copy eight rows each: half as long, they are half the way.
        """
        if not shape.has_half_turns:
            return self.rows
        if self._halves is None:
            self._halves = self.rows[..., 1].contiguous()
        return self._halves


class CudaDecode:
    """Attention of one layer over the pages of one coded tier that store positions alike.

    Args:
        codebook: Slots of the layer and tier, on the GPU.
        rope: The layer's rotary embedding.
        turns: Cosines and sines of the same embedding.
        value_bits: Width of value codes: 2, 3, 4, 8 or 16.
        group: Query heads per KV head.
        max_batch: Largest batch of a call.
        shape: Kernel shape; by default the one that fits the codebook, for contiguous pages.
        tables: What ``build_tables`` makes of codebook and shape, where it was made before.

    Attributes:
        passes: Times the pages are read, a few query heads at a time.
        tables: Look-up tables; calls that share them may share nothing else.
        overlaps: Begin while the kernel queued last still runs, which must be one that lets others
            begin and whose only result read here is ``merge_with``. It must not be this decoder's
            own: launches side by side would wait for each other's parts for ever.
    """

    def __init__(
        self,
        codebook: AngleCodebook,
        rope: RopeSpec,
        turns: TurnTable,
        *,
        value_bits: int,
        group: int,
        max_batch: int,
        shape: KernelShape | None = None,
        tables: Tensor | None = None,
    ) -> None:
        device = codebook.points.device
        self.shape = shape or KernelShape.of_codebook(codebook, value_bits=value_bits, group=group)
        self.kv_heads, self.group, self.max_batch = codebook.points.shape[0], group, max_batch
        self.overlaps = False
        self._turns = turns
        self._kernel = Kernel(
            load_cubin(ENTRY_POINT, self.shape.defines(), architecture(device)),
            ENTRY_POINT,
            shared_bytes=self.shape.shared_bytes,
            threads=self.shape.threads,
        )
        self.tables = build_tables(codebook, rope, self.shape) if tables is None else tables
        columns, passes = self.shape.columns, ceil_div(group, self.shape.columns)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.passes, self._most_blocks = passes, max(self.kv_heads, processors // passes)
        self._even_blocks = self._most_blocks // self.kv_heads * self.kv_heads
        parts = passes * (self.kv_heads * max_batch + self._most_blocks) * columns
        # a word of a part is there when it is not minus one; a launch leaves all of them so again
        words = torch.full((parts, self.shape.head_dim), -1, dtype=torch.int32, device=device)
        self._part_out, self._part_lse = words, words[:, : self.shape.head_dim // 64].clone()
        self._params = _Params(
            turns=turns.for_shape(self.shape).data_ptr(),
            part_out=self._part_out.data_ptr(),
            part_lse=self._part_lse.data_ptr(),
            kv_heads=self.kv_heads,
            group=group,
            blocks=passes,
            turn_rows=turns.rows.shape[1],
            turn_shift=turns.step.bit_length() - 1,
        )
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))

    @property
    def spare_processors(self) -> int:
        """Multiprocessors that a launch leaves free."""
        properties = torch.cuda.get_device_properties(self._part_out.device)
        return properties.multi_processor_count - self.passes * self._even_blocks

    def blocks_of(self, lists: PageLists) -> int:
        """Thread blocks of a pass over lists, as many for every head or shared by its pages."""
        if lists.blocks is None:
            return self._even_blocks
        return min(max(lists.blocks, self.kv_heads), self._most_blocks)

    @property
    def table_bytes(self) -> int:
        """Bytes of the look-up tables."""
        return self.tables.nbytes

    def empty_result(self, batch: int, dtype: torch.dtype = torch.float32) -> PartialAttention:
        """Output buffers for a batch, to be passed to :meth:`attend` again and again."""
        heads, device = self.kv_heads * self.group, self._part_out.device
        return PartialAttention(
            torch.empty(batch, heads, self.shape.head_dim, dtype=dtype, device=device),
            torch.empty(batch, heads, device=device),
        )

    def is_clear(self) -> bool:
        """Whether the workspace is as a launch must find it; waits for the device."""
        return all(bool((words == -1).all()) for words in (self._part_out, self._part_lse))

    def attend(
        self,
        query: Tensor,
        pool: PagePool,
        lists: PageLists,
        options: AttentionOptions,
        *,
        result: PartialAttention,
        query_positions: Tensor | None = None,
        sink_logits: Tensor | None = None,
        merge_with: PartialAttention | None = None,
    ) -> PartialAttention:
        """One decode step; the work is queued on the current stream.

        Args:
            query: ``[batch, query_heads, head_dim]`` float32 or bfloat16 after RoPE, contiguous.
            pool: Pages in fragment order.
            lists: Pages of each (KV head, sequence).
            options: Scale, soft-cap and window. Without a window every key must lie before the
                queries; with one, also ``MAX_WINDOW``, keys behind a query are hidden from it.
            result: Where the output goes, float32 or bfloat16; see :meth:`empty_result`.
            query_positions: ``[batch]`` int32; needed with a window.
            sink_logits: ``[query_heads]`` float32 learned sinks that take weight.
            merge_with: Attention over other keys of the same queries, such as the dense tail or
                another tier, merged into the result; it may be ``result`` itself.

        Returns:
            ``result``: output ``[batch, query_heads, head_dim]`` and log-sum-exp.
        """
        self._check(query, lists, options, query_positions)
        shape = self.shape
        if pool.mode is not shape.positions:
            raise ValueError(f"positions must be {shape.positions.name}, got {pool.mode.name}")
        if pool.pages.shape[1] != shape.page_bytes:
            raise ValueError(f"pages must have {shape.page_bytes} bytes, got {pool.pages.shape[1]}")
        params, batch = self._params, lists.batch
        params.pages = pool.pages.data_ptr() if pool.address is None else pool.address
        params.tables = self.tables.data_ptr()
        params.page_list = lists.entries.data_ptr()
        params.row_start = lists.row_start.data_ptr()
        params.batch = batch
        params.shares = None if lists.shares is None else lists.shares.data_ptr()
        params.ctas, params.uneven = self.blocks_of(lists), int(lists.blocks is not None)
        params.query = query.data_ptr()
        params.query_is_bf16 = int(query.dtype == torch.bfloat16)
        params.query_positions = None if query_positions is None else query_positions.data_ptr()
        params.sinks = None if sink_logits is None else sink_logits.data_ptr()
        params.other_out = None if merge_with is None else merge_with.output.data_ptr()
        params.other_lse = None if merge_with is None else merge_with.lse.data_ptr()
        params.out, params.lse = result.output.data_ptr(), result.lse.data_ptr()
        params.window = min(options.window or 0, MAX_WINDOW)
        params.logit_scale = options.scale * _LOG2E
        params.softcap = (options.softcap or 0.0) * _LOG2E
        params.unrotate = int(self.shape.value_bits != 16)
        params.out_is_bf16 = int(result.output.dtype == torch.bfloat16)
        grid = (params.ctas, self.passes, 1)
        self._kernel.launch(grid, self._arguments, overlaps=self.overlaps)
        return result

    def _check(
        self,
        query: Tensor,
        lists: PageLists,
        options: AttentionOptions,
        query_positions: Tensor | None,
    ) -> None:
        expected = (lists.batch, self.kv_heads * self.group, self.shape.head_dim)
        if tuple(query.shape) != expected or not query.is_contiguous():
            raise ValueError(f"query must be contiguous {expected}, got {tuple(query.shape)}")
        if query.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"query must be float32 or bfloat16, got {query.dtype}")
        if not 0 < lists.batch <= self.max_batch:
            raise ValueError(f"batch must be in 1..{self.max_batch}, got {lists.batch}")
        if options.window is not None and query_positions is None:
            raise ValueError("a window needs query_positions")
