# SPDX-License-Identifier: Apache-2.0
"""Named stretches of time that a GPU profiler shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def gpu_range(name: str) -> Iterator[None]:
    """An NVTX range around what runs inside; nothing where CUDA is not in use."""
    # asking whether a GPU is there would start the driver; only a program that uses one pays
    if not torch.cuda.is_initialized():
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
