# SPDX-License-Identifier: Apache-2.0
"""What several launches of a decode step found, made one beside them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from sphkv.attention.cuda.compiler import architecture, load_cubin
from sphkv.attention.cuda.driver import Kernel
from sphkv.attention.cuda.geometry import ceil_div
from sphkv.attention.partial import PartialAttention

ENTRY_POINT = "sphkv_merge"
MOST_PARTS = 12
"""Launches of a step that can be merged."""
_WARPS = 4


class _MergeParams(ctypes.Structure):
    """Mirror of ``MergeParams`` in ``kernels/merge.cu``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("part_out", "part_lse", "sinks", "out", "lse")),
        *((name, ctypes.c_int) for name in ("parts", "queries", "heads", "out_is_bf16")),
    )


def definitions(head_dim: int) -> tuple[str, ...]:
    """Compiler definitions of the kernel for a head dim."""
    return (f"-DSPHKV_HEAD_DIM={head_dim}", f"-DSPHKV_MOST_PARTS={MOST_PARTS}")


class PartsMerge:
    """Buffers that launches over disjoint keys write, and the launch that makes them one.

    The merge is queued behind launches that let others begin, overlaps with them, and takes every
    query as its parts come. All parts of all queries must be written each time, or it waits for
    ever; it leaves them as the next time must find them.

    Args:
        count: Parts, at most ``MOST_PARTS``.
        batch: Sequences.
        heads: Query heads.
        head_dim: 64 or 128.
        device: The GPU.
    """

    def __init__(
        self, count: int, batch: int, heads: int, head_dim: int, device: torch.device
    ) -> None:
        if not 0 < count <= MOST_PARTS:
            raise ValueError(f"parts must be in 1..{MOST_PARTS}, got {count}")
        image = load_cubin(ENTRY_POINT, definitions(head_dim), architecture(device))
        self._kernel = Kernel(image, ENTRY_POINT, shared_bytes=0, threads=32 * _WARPS)
        # a word is there when it is not minus one
        shape = (count, batch, heads)
        words = torch.full((*shape, head_dim), -1, dtype=torch.int32, device=device)
        self._out, self._lse = words, words[..., 0].clone()
        self._params = _MergeParams(
            part_out=words.data_ptr(),
            part_lse=self._lse.data_ptr(),
            queries=batch * heads,
            heads=heads,
        )
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))

    @property
    def parts(self) -> list[PartialAttention]:
        """Where launches write: output ``[batch, heads, head_dim]`` and log-sum-exp, float32."""
        outputs, lse = self._out.view(torch.float32), self._lse.view(torch.float32)
        return [PartialAttention(*each) for each in zip(outputs, lse, strict=True)]

    def is_clear(self) -> bool:
        """Whether the buffers are as launches must find them; waits for the device."""
        return all(bool((words == -1).all()) for words in (self._out, self._lse))

    def merge(
        self, count: int, result: PartialAttention, *, sink_logits: Tensor | None = None
    ) -> None:
        """Queue the merge of the first parts on the current stream.

        Args:
            count: Parts that were queued right before.
            result: Where it goes: ``[batch, heads, head_dim]`` float32 or bfloat16, and float32.
            sink_logits: ``[heads]`` float32 learned sinks, which take weight and give no value.
        """
        params = self._params
        params.parts = count
        params.sinks = None if sink_logits is None else sink_logits.data_ptr()
        params.out, params.lse = result.output.data_ptr(), result.lse.data_ptr()
        params.out_is_bf16 = int(result.output.dtype == torch.bfloat16)
        blocks = ceil_div(params.queries, _WARPS)
        self._kernel.launch(blocks, self._arguments, overlaps=True)
