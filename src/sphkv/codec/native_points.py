# SPDX-License-Identifier: Apache-2.0
"""Points of the plane in native code: which is nearest, and where samples would have them.

The CPU's side of ``point_kernels.py``: the same functions, a row of samples to a thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sphkv.core.devices import native_variant, require_kernels


def _read(*parts: Tensor) -> tuple[Tensor, ...]:
    """Tensors as the kernels read them."""
    return tuple(part.to("cpu", torch.float32).contiguous() for part in parts)


def find_nearest(x: Tensor, points: Tensor) -> Tensor:
    """Index ``[n, tokens]`` int64 of the closest of ``points [n, levels, 2]``."""
    x, points = _read(x, points)
    found = torch.empty(x.shape[:2], dtype=torch.int64, device="cpu")
    require_kernels().find_points(
        [*x.shape[:2], points.shape[1]],
        [x.data_ptr(), 0, points.data_ptr()],
        torch.get_num_threads(),
        found.data_ptr(),
        native_variant(),
    )
    return found


def grow_points(x: Tensor, weight: Tensor, points: Tensor, rounds: int, split: float) -> Tensor:
    """``[n, 2 * levels, 2]`` points from ``points [n, levels, 2]``, see ``fit_points``."""
    x, weight, points = _read(x, weight, points)
    found = torch.empty(len(x), 2 * points.shape[1], 2, dtype=torch.float32, device="cpu")
    require_kernels().grow_points(
        [*x.shape[:2], found.shape[1], rounds],
        [x.data_ptr(), weight.data_ptr(), points.data_ptr()],
        split,
        torch.get_num_threads(),
        found.data_ptr(),
        native_variant(),
    )
    return found


def alternate_stages(
    x: Tensor, weight: Tensor, stages: tuple[Tensor, Tensor], rounds: int
) -> tuple[Tensor, Tensor]:
    """Stages ``[n, levels, 2]``, each fitted in turn to what the other leaves over."""
    x, weight = _read(x, weight)
    first, second = (stage.clone() for stage in _read(*stages))
    require_kernels().alternate_stages(
        [*x.shape[:2], first.shape[1], rounds],
        [x.data_ptr(), weight.data_ptr()],
        torch.get_num_threads(),
        [first.data_ptr(), second.data_ptr()],
        native_variant(),
    )
    return first, second


def refine_stages(
    x: Tensor,
    weight: Tensor,
    stages: tuple[Tensor, Tensor],
    rounds: int,
    *,
    sweeps: int,
    relaxation: float,
) -> tuple[Tensor, Tensor]:
    """Stages ``[n, levels, 2]``, which may differ in size, fitted by all their sums."""
    x, weight = _read(x, weight)
    first, second = (stage.clone() for stage in _read(*stages))
    one, two = first.shape[1], second.shape[1]
    require_kernels().refine_stages(
        [*x.shape[:2], one * two, one, two, rounds, sweeps],
        [x.data_ptr(), weight.data_ptr()],
        relaxation,
        torch.get_num_threads(),
        [first.data_ptr(), second.data_ptr()],
        native_variant(),
    )
    return first, second
