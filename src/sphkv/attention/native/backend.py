# SPDX-License-Identifier: Apache-2.0
"""Decode attention in native code: one call per layer and step."""

from __future__ import annotations

from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sphkv.attention.native.plans import CodebookCache, build_plan
from sphkv.attention.partial import PartialAttention
from sphkv.attention.request import AttentionOptions, DecodeRequest
from sphkv.core.native import require_kernels
from sphkv.store.sequence import PointerTable

Precision = Literal["int8", "float32"]

EXACT_VARIANT = "float32"

# Query rows of one KV head per call: more would push their tables out of the cache.
_MAX_ROWS = 32


class NativeBackend:
    """C++ kernels on CPU pages.

    Attributes:
        name: ``"native"``.
        variant: Instruction set that runs, such as ``"neon"``; ``"float32"`` is portable.
    """

    name = "native"

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
        self._plans: WeakKeyDictionary[PointerTable, tuple[int, object]] = WeakKeyDictionary()

    def attend(self, request: DecodeRequest) -> PartialAttention:
        """Attention over all pages and the tail; see ``DecodeBackend.attend``."""
        query = request.query
        if not query.is_cpu:
            raise ValueError(f"native kernels read CPU tensors, got {query.device}")
        heads, queries, head_dim = query.shape
        output = torch.empty(heads, queries, head_dim)
        lse = torch.empty(heads, queries)
        step = max(1, _MAX_ROWS // request.store.config.geometry.group_size)
        if 0 < queries <= step:
            self._call(request, query.float().contiguous(), request.positions, (output, lse))
            return PartialAttention(output, lse)
        for at in range(0, queries, step):
            part = slice(at, at + step)
            rows = query[:, part].float().contiguous()
            out = (torch.empty_like(rows), torch.empty(rows.shape[:2]))
            self._call(request, rows, request.positions[part], out)
            output[:, part], lse[:, part] = out
        return PartialAttention(output, lse)

    def _call(
        self, request: DecodeRequest, query: Tensor, positions: Tensor, out: tuple[Tensor, Tensor]
    ) -> None:
        geometry = request.store.config.geometry
        positions = positions.contiguous()
        tail = request.store.open_tail(request.sequence, request.layer)
        call = self._kernels.Call()
        if tail is not None:
            keys = tail.keys
            call.set_tail(
                keys.data_ptr(),
                tail.values.data_ptr(),
                keys.stride(0),
                tail.num_tokens,
                tail.first_position,
            )
        num_queries = query.shape[1]
        call.set_queries(
            query.data_ptr(),
            positions.data_ptr(),
            num_queries,
            geometry.group_size * num_queries,
        )
        call.set_options(*_option_fields(request.options), self._threads())
        engine = self._engine if geometry.head_dim % 4 == 0 else self._exact
        plan = self._plan(request)
        self._kernels.attend(engine, plan, call, out[0].data_ptr(), out[1].data_ptr())

    def _threads(self) -> int:
        return self._num_threads or torch.get_num_threads()

    def _plan(self, request: DecodeRequest) -> object:
        table = request.store.table(request.sequence, request.layer)
        held = self._plans.get(table)
        if held is not None and held[0] == table.version:
            return held[1]
        plan = build_plan(request, self._codebooks)
        self._plans[table] = (table.version, plan)
        return plan


def _option_fields(options: AttentionOptions) -> tuple[float, float, int]:
    """Scale, soft-cap and window, with zero for none."""
    return options.scale, options.softcap or 0.0, options.window or 0
