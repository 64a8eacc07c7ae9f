# SPDX-License-Identifier: Apache-2.0
"""Which pages every thread block of some launches has, found when lists change.

A decode launch can find that by itself; it takes the first microseconds of every block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch

from sphkv.attention.cuda.compiler import architecture, load_cubin
from sphkv.attention.cuda.decode import CudaDecode
from sphkv.attention.cuda.driver import Kernel
from sphkv.attention.cuda.geometry import ceil_div
from sphkv.attention.cuda.pages import PageLists

ENTRY_POINT = "sphkv_share"
_WARPS = 4
# Of a block's share, as ``kernels/block_share.cuh`` lays it out.
_WORDS = 12


class _ShareParams(ctypes.Structure):
    """Mirror of ``ShareParams`` in ``kernels/share.cu``."""

    _fields_ = (("launches", ctypes.c_void_p),)


def _pair(low: int, high: int) -> int:
    """Two integers of the kernel in one of 64 bits."""
    return low | high << 32


class BlockShares:
    """Shares of the blocks of several launches, at addresses that stay.

    Args:
        launches: Kernel and lists of each launch.
        device: The GPU.

    Attributes:
        lists: The same lists with what their blocks have, which holds once ``find`` was queued
            and until the lists change.
    """

    def __init__(
        self, launches: Sequence[tuple[CudaDecode, PageLists]], device: torch.device
    ) -> None:
        image = load_cubin(ENTRY_POINT, (), architecture(device))
        self._kernel = Kernel(image, ENTRY_POINT, shared_bytes=0, threads=32 * _WARPS)
        counts = [kernel.blocks_of(lists) for kernel, lists in launches]
        words = torch.zeros(sum(counts), _WORDS, dtype=torch.int32, device=device)
        own = words.split(counts)
        self.lists = [
            replace(lists, shares=shares) for (_, lists), shares in zip(launches, own, strict=True)
        ]
        jobs = [
            (
                lists.row_start.data_ptr(),
                _pair(lists.batch, kernel.kv_heads),
                _pair(count, int(lists.blocks is not None)),
                _pair(kernel.shape.row_pages, kernel.shape.least_pages),
                shares.data_ptr(),
            )
            for (kernel, lists), count, shares in zip(launches, counts, own, strict=True)
        ]
        self._jobs = torch.tensor(jobs, dtype=torch.int64).to(device)
        self._grid = (ceil_div(max(counts), _WARPS), len(jobs), 1)
        self._params = _ShareParams(self._jobs.data_ptr())
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))

    def find(self) -> None:
        """Find them on the current stream, from the lists as they are then."""
        self._kernel.launch(self._grid, self._arguments)
