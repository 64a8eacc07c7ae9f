# SPDX-License-Identifier: Apache-2.0
"""Decode attention in native code: one call per sequence, layer and step."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from sphkv.attention.native.plans import CodebookCache, build_plan
from sphkv.attention.partial import PartialAttention
from sphkv.attention.plans import PlanCache
from sphkv.attention.request import (
    AttentionOptions,
    BatchRequest,
    DecodeRequest,
    EagerBackend,
)
from sphkv.codec.states import SphericalCodec
from sphkv.core.native import require_kernels
from sphkv.store.order import PageCodec, PageOrder
from sphkv.store.store import PageStore

Precision = Literal["int8", "float32"]

EXACT_VARIANT = "float32"

# Query rows of one KV head per call: more would push their tables out of the cache.
_MAX_ROWS = 32


class NativeBackend(EagerBackend):
    """C++ kernels on CPU pages.

    Attributes:
        name: ``"native"``.
        page_order: None: pages as ``store/layout.py`` has them.
        page_codec: None: the codec encodes, with native kernels of its own.
        variant: Instruction set that runs, such as ``"neon"``; ``"float32"`` is portable.
    """

    name = "native"
    page_order: PageOrder | None = None
    page_codec: PageCodec | None = None

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
