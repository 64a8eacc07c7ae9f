# SPDX-License-Identifier: Apache-2.0
"""Small constant tensors, made once per device: copying one there waits for all work before it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

Numbers = tuple[float, ...] | tuple[int, ...] | tuple[bool, ...]


def constant(
    values: Numbers, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Tensor:
    """A shared tensor of some numbers, which callers must not write to.

    Args:
        values: The numbers.
        device: Where the tensor lives.
        dtype: Its type; what ``torch.tensor`` would choose if None.

    Returns:
        ``[len(values)]``.
    """
    kind = type(values[0]).__name__ if values else ""
    return _made(values, dtype, torch.device(device), kind)


# without a limit: captured graphs hold addresses of these
@functools.cache
def _made(values: Numbers, dtype: torch.dtype | None, device: torch.device, kind: str) -> Tensor:
    # 1, 1.0 and True are equal keys but other tensors, hence the kind; and a tensor first made
    # under inference mode could never meet autograd again.
    del kind
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)
