# SPDX-License-Identifier: Apache-2.0
"""The extreme entries of a vector, stored apart so that the rest spans a narrow range."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def split_outliers(rows: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """Take the largest and smallest entries out of each row.

    Args:
        rows: ``[..., count]`` float32.
        share: Share of the entries to take, half from each end, at least one each.

    Returns:
        The rows with those entries replaced by the middle of what is left, their indices
        ``[..., taken]`` in the narrowest integer type, and their values float16.

    Raises:
        ValueError: A row would have no entry left.
    """
    count = rows.shape[-1]
    per_side = max(1, math.ceil(share * count / 2))
    if 2 * per_side >= count:
        raise ValueError(f"{2 * per_side} outliers leave nothing of a row of {count}")
    # one more from each end: the ends of what is left
    low, low_index = rows.topk(per_side + 1, dim=-1, largest=False)
    high, high_index = rows.topk(per_side + 1, dim=-1)
    index = torch.cat([low_index[..., :per_side], high_index[..., :per_side]], -1)
    value = torch.cat([low[..., :per_side], high[..., :per_side]], -1)
    middle = (low[..., per_side:] + high[..., per_side:]) / 2
    rest = rows.scatter(-1, index, middle.expand_as(value))
    return rest, index.to(index_dtype(count)), value.half()


def join_outliers(rest: Tensor, index: Tensor, value: Tensor) -> Tensor:
    """Put outliers back into their rows."""
    return rest.scatter(-1, place(index), value.float())


def place(index: Tensor) -> Tensor:
    """Stored indices as int64; those of 16 bits wrap around at the sign bit."""
    return index.long() % (1 << 16) if index.dtype == torch.int16 else index.long()


def index_dtype(count: int) -> torch.dtype:
    """The narrowest integer type that indexes so many entries; see ``place``."""
    if count <= 1 << 8:
        return torch.uint8
    return torch.int16 if count <= 1 << 16 else torch.int32
