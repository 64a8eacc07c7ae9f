# SPDX-License-Identifier: Apache-2.0
"""An orthonormal rotation that spreads every coordinate of a head over all of them.

For a power of two it is Sylvester's Hadamard matrix. Any other dimension ``2**k * m`` with odd
``m`` takes the Kronecker product of that matrix with the Hartley matrix of order ``m``, which
has no zero entry. Both factors are symmetric, so the rotation is its own inverse.
See ``docs/math/values.md``, section 1.
"""

import functools
import math

import torch
from torch import Tensor


def rotation_matrix(
    dim: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """Matrix of the rotation; shared and cached, so callers must not write to it.

    Args:
        dim: Order of the matrix, at least 1.
        dtype: Floating-point type of the result.
        device: Where the result lives.

    Returns:
        ``[dim, dim]`` symmetric, orthonormal, without zero entries.

    Raises:
        ValueError: If ``dim`` is below 1.
    """
    if dim < 1:
        raise ValueError(f"rotation needs a dimension of at least 1, got {dim}")
    return _cached_matrix(dim, dtype, torch.device(device))


def rotate(x: Tensor) -> Tensor:
    """Rotate the last dimension.

    Args:
        x: ``[..., dim]`` floating point.

    Returns:
        ``[..., dim]``: float64 for float64 input, float32 otherwise.

    Raises:
        ValueError: If ``x`` is not floating point or has no dimension.
    """
    if not x.is_floating_point() or x.ndim == 0:
        raise ValueError(
            f"rotation needs floating-point vectors, got {x.dtype} of shape {tuple(x.shape)}"
        )
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.to(dtype) @ rotation_matrix(x.shape[-1], dtype=dtype, device=x.device)


def unrotate(x: Tensor) -> Tensor:
    """Undo ``rotate``; the same product, because the matrix is symmetric and orthonormal.

    Args:
        x: ``[..., dim]`` rotated vectors, or any linear combination of them.

    Returns:
        ``[..., dim]`` in the original basis.
    """
    return rotate(x)


@functools.lru_cache(maxsize=64)
def _cached_matrix(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    # A tensor first made under inference mode could never meet autograd again.
    with torch.inference_mode(False):
        odd = dim
        while odd % 2 == 0:
            odd //= 2
        matrix = torch.kron(_sylvester(dim // odd), _hartley(odd))
        return matrix.to(dtype=dtype, device=device)


def _sylvester(order: int) -> Tensor:
    """Orthonormal Hadamard matrix of a power-of-two order, float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while matrix.shape[0] < order:
        matrix = torch.kron(step, matrix)
    return matrix / math.sqrt(order)


def _hartley(order: int) -> Tensor:
    """Orthonormal Hartley matrix ``cos + sin`` of any order, float64."""
    index = torch.arange(order, dtype=torch.int64)
    # Reduced in integers: the angle of a large product would lose digits.
    angle = (index[:, None] * index[None, :] % order).double() * (2 * math.pi / order)
    return (angle.cos() + angle.sin()) / math.sqrt(order)
