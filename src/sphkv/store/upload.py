# SPDX-License-Identifier: Apache-2.0
"""Numbers from the host to a device that is busy, without waiting for it."""

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Buffers that are filled in turn: so many transfers may be under way.
_NUM_BUFFERS = 8
_LEAST_NUMBERS = 1 << 14


class _Buffer:
    """Pinned memory, and when the last transfer out of it is over."""

    def __init__(self) -> None:
        self._pinned = torch.empty(0, dtype=torch.int64)
        self._is_read = torch.cuda.Event()

    def send(self, numbers: NDArray[np.int64], device: torch.device) -> Tensor:
        self._is_read.synchronize()
        if len(self._pinned) < len(numbers):
            size = max(_LEAST_NUMBERS, 2 * len(numbers))
            self._pinned = torch.empty(size, dtype=torch.int64, pin_memory=True)
        held = self._pinned[: len(numbers)]
        held.numpy()[:] = numbers
        found = held.to(device, non_blocking=True)
        self._is_read.record()
        return found


class _Buffers:
    """Buffers of a device: pinning memory anew for every transfer may take milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [_Buffer() for _ in range(_NUM_BUFFERS)]
        self._next = 0

    def send(self, numbers: NDArray[np.int64]) -> Tensor:
        self._next = (self._next + 1) % _NUM_BUFFERS
        return self._buffers[self._next].send(numbers, self._device)


@functools.cache
def _buffers(device: torch.device) -> _Buffers:
    return _Buffers(device)


def upload(numbers: NDArray[np.int64], device: torch.device) -> Tensor:
    """A tensor ``[numbers]`` int64 on a device; the current stream has it in order.

    Args:
        numbers: One row of them.
        device: Where they go.
    """
    if device.type != "cuda":
        return torch.from_numpy(numbers).to(device)
    return _buffers(device).send(numbers)
