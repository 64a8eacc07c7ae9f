# SPDX-License-Identifier: Apache-2.0
"""The dense part of a captured decode step: append to tails, attend to tails and dense pages."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.attention.cuda.compiler import architecture, load_cubin
from sphkv.attention.cuda.decode import MAX_WINDOW
from sphkv.attention.cuda.driver import Kernel
from sphkv.attention.cuda.geometry import ceil_div
from sphkv.attention.partial import PartialAttention
from sphkv.attention.request import AttentionOptions
from sphkv.store.layout import PageLayout

ENTRY_POINT = "sphkv_dense"
MAX_GROUP = 16
_ROW_THREADS = 256
# Two rows share a block if shared memory has room for the queries of both.
_PAIRED_GROUP = 8
# Rows that a block may take one after the other before more multiprocessors are used.
_MOST_TURNS = 2
_LOG2E = math.log2(math.e)
_POINTERS = (
    *("tails", "extents", "pages", "page_start", "new_keys", "new_values"),
    *("query", "out", "lse"),
)
_INTEGERS = (
    *("key_stride", "key_head", "value_stride", "value_head"),
    *("page_tokens", "key_offset", "value_offset", "rows", "kv_heads", "window", "query_is_bf16"),
)


class _DenseParams(ctypes.Structure):
    """Mirror of ``DenseParams`` in ``kernels/dense.cu``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in _INTEGERS),
        *((name, ctypes.c_float) for name in ("logit_scale", "softcap")),
    )


@dataclass(frozen=True, slots=True, eq=False)
class DenseStates:
    """What a step attends to beside coded pages: open tails and dense pages.

    Attributes:
        tails: ``[batch, kv_heads, 2]`` int64 addresses of bfloat16 keys and values.
        extents: ``[batch, 2]`` int64: states of a tail, the newest included, and first position.
        pages: Addresses ``[pages]`` int64 of dense pages, sequence by sequence, head by head.
        page_start: ``[batch * kv_heads + 1]`` int32 into ``pages``.
        layout: Layout of the dense pages, positions contiguous.
    """

    tails: Tensor
    extents: Tensor
    pages: Tensor
    page_start: Tensor
    layout: PageLayout


def _block_rows(group: int) -> int:
    return 2 if group <= _PAIRED_GROUP else 1


def definitions(head_dim: int, group: int) -> tuple[str, ...]:
    """Compiler definitions of the kernel for a head dim and query heads per KV head."""
    return (
        f"-DSPHKV_HEAD_DIM={head_dim}",
        f"-DSPHKV_GROUP={group}",
        f"-DSPHKV_ROWS={_block_rows(group)}",
    )


class DenseDecode:
    """One launch that stores the newest states and attends to everything that is not coded.

    A kernel queued right behind it may overlap with it, see ``Kernel.launch``.

    Args:
        head_dim: 64 or 128.
        group: Query heads per KV head, up to 16.
        device: The GPU.
    """

    def __init__(self, head_dim: int, group: int, device: torch.device) -> None:
        if not 0 < group <= MAX_GROUP:
            raise ValueError(f"group must be in 1..{MAX_GROUP}, got {group}")
        self._block_rows = _block_rows(group)
        image = load_cubin(ENTRY_POINT, definitions(head_dim, group), architecture(device))
        threads = _ROW_THREADS * self._block_rows
        self._kernel = Kernel(image, ENTRY_POINT, shared_bytes=0, threads=threads)
        self._params = _DenseParams()
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        states: DenseStates,
        options: AttentionOptions,
        *,
        result: PartialAttention,
        spare_processors: int | None,
    ) -> None:
        """Queue the launch on the current stream.

        Args:
            query: ``[batch, query_heads, head_dim]`` float32 or bfloat16, contiguous.
            keys: Newest keys ``[batch, kv_heads, head_dim]`` bfloat16, elements side by side; they
                are written behind the last ones of the tails.
            values: The same of values.
            states: Where the others are.
            options: Scale, soft-cap and window.
            result: Where the output goes, float32.
            spare_processors: Multiprocessors that the kernel behind this one leaves free. None for
                a launch behind such kernels, which it overlaps with: it takes what becomes free.
        """
        for name, part in (("keys", keys), ("values", values)):
            if part.dtype != torch.bfloat16 or part.stride(2) != 1 or part.stride(1) % 8:
                raise ValueError(
                    f"{name} must be bfloat16 rows of whole 16 bytes, got {part.dtype}"
                )
        params, layout = self._params, states.layout
        params.tails, params.extents = states.tails.data_ptr(), states.extents.data_ptr()
        params.pages, params.page_start = states.pages.data_ptr(), states.page_start.data_ptr()
        params.new_keys, params.new_values = keys.data_ptr(), values.data_ptr()
        params.query, params.query_is_bf16 = query.data_ptr(), query.dtype == torch.bfloat16
        params.out, params.lse = result.output.data_ptr(), result.lse.data_ptr()
        params.key_stride, params.key_head = keys.stride(0) // 2, keys.stride(1) // 2
        params.value_stride, params.value_head = values.stride(0) // 2, values.stride(1) // 2
        params.page_tokens = layout.page_tokens
        params.key_offset, params.value_offset = layout.key_offset, layout.value_offset
        rows = keys.shape[0] * keys.shape[1]
        params.rows, params.kv_heads = rows, keys.shape[1]
        params.window = min(options.window or 0, MAX_WINDOW)
        params.logit_scale = options.scale * _LOG2E
        params.softcap = (options.softcap or 0.0) * _LOG2E
        blocks = ceil_div(rows, self._block_rows)
        if spare_processors is not None and blocks <= _MOST_TURNS * spare_processors:
            blocks = min(blocks, spare_processors)
        self._kernel.launch(blocks, self._arguments, overlaps=spare_processors is None)
