# SPDX-License-Identifier: Apache-2.0
"""Bytes copied between places of a GPU's memory, wherever slabs lie: one launch for all."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from sphkv.core.devices import upload

_WORD_BYTES = 4
_BLOCK_WORDS = 1024


# one build for all sizes: what differs is as fast
@triton.jit(
    do_not_specialize=["words"], do_not_specialize_on_alignment=["source_ptr", "target_ptr"]
)
def _copy_kernel(source_ptr, target_ptr, words, BLOCK: tl.constexpr):
    """One program per copy and block: addresses ``[copies]`` i64 of rows of ``words`` words."""
    row = tl.program_id(0)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(source_ptr + row).to(tl.pointer_type(tl.int32))
    target = tl.load(target_ptr + row).to(tl.pointer_type(tl.int32))
    tl.store(target + word, tl.load(source + word, mask=word < words), mask=word < words)


class TritonCopier:
    """A ``PageCopier`` of the store.

    Args:
        device: Where the bytes are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, sources: NDArray[np.int64], targets: NDArray[np.int64], num_bytes: int) -> None:
        """Queue copies on the current stream; see ``PageCopier.copy``."""
        if num_bytes % _WORD_BYTES:
            raise ValueError(f"num_bytes must be a multiple of {_WORD_BYTES}, got {num_bytes}")
        if not len(sources) or not num_bytes:
            return
        places = upload(np.concatenate([sources, targets]), self._device).view(2, -1)
        words = num_bytes // _WORD_BYTES
        block = min(_BLOCK_WORDS, triton.next_power_of_2(words))
        grid = (len(sources), triton.cdiv(words, block))
        _copy_kernel[grid](places[0], places[1], words, BLOCK=block, num_warps=4)
