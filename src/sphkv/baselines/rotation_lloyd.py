# SPDX-License-Identifier: Apache-2.0
"""Random rotations and the levels of least squared error for what they make of a vector.

``RotationLloyd`` is the TurboQuant form of keys: a norm, and Gaussian Lloyd-Max levels after a
rotation.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.baselines.integer_codes import as_float16, check_bits
from sphkv.codec.affine import check_finite

_ITERATIONS = 300

# Fewest and most cells of the grid by which codes are looked up.
_LEAST_CELLS = 1 << 13
_MOST_CELLS = 1 << 21
_NORM_BITS = 16
# The outermost of many levels settle slowly, but the squared error does not change any more.
_LLOYD_ITERATIONS = 1000


def lloyd_max_levels(x: Tensor, mass: Tensor, *, bits: int) -> Tensor:
    """Lloyd-Max levels ``[2**bits]`` float64, ascending.

    Starts from the high-rate solution, whose levels are spread like the cube root of the density.

    Args:
        x: ``[points]`` float64, ascending.
        mass: ``[points]`` float64 probability of each point, up to a factor.
        bits: Width of a level index.
    """
    count = 1 << bits
    zero = torch.zeros(1, dtype=torch.float64)
    weight = torch.cat([zero, mass.cumsum(0)])
    moment = torch.cat([zero, (x * mass).cumsum(0)])
    # points need not be evenly spaced: mass per width is the density
    width = torch.gradient(x)[0]
    spread = ((mass / width) ** (1 / 3) * width).cumsum(0)
    start = torch.arange(1, 2 * count, 2, dtype=torch.float64) / (2 * count)
    levels = x[torch.searchsorted(spread / spread[-1], start).clamp(max=x.shape[0] - 1)]
    ends = torch.tensor([0, x.shape[0]])
    for _ in range(_ITERATIONS):
        inner = torch.searchsorted(x, (levels[1:] + levels[:-1]) / 2)
        cut = torch.cat([ends[:1], inner, ends[1:]])
        held = weight[cut].diff()
        levels = torch.where(held > 0, moment[cut].diff() / held.clamp(min=1e-300), levels)
    return levels


class NearestLevel:
    """Codes and levels of entries between -1 and 1, by look-up.

    A grid tells how many edges lie below each of its cells, and which edge lies in it: one
    comparison then settles what a search over all edges would find.
    """

    def __init__(self, levels: Tensor) -> None:
        """Prepare the grid.

        Args:
            levels: ``[count]`` float32, ascending, at most 256.

        Raises:
            ValueError: Two edges are too close for any grid.
        """
        self._levels = levels
        edges = (levels[1:] + levels[:-1]) / 2
        self._cells = _LEAST_CELLS
        while bool((self._cell(edges).diff() < 1).any()):
            self._cells *= 2
            if self._cells > _MOST_CELLS:
                raise ValueError(f"levels lie closer than {2 / _MOST_CELLS:g}: {levels.tolist()}")
        at = self._cell(edges).long()
        # a cell without an edge has one that nothing exceeds
        self._edge = torch.full((self._cells,), torch.inf).index_copy_(0, at, edges)
        below = torch.zeros(self._cells + 1, dtype=torch.uint8).index_fill_(0, at + 1, 1)
        self._below = below.cumsum(0, dtype=torch.uint8)[:-1].contiguous()

    def _cell(self, x: Tensor) -> Tensor:
        """Cell of each entry, flat; it never falls where the entry rises, whatever the rounding."""
        return ((x.flatten() + 1) * (self._cells / 2)).int().clamp_(0, self._cells - 1)

    def codes(self, x: Tensor) -> Tensor:
        """Number of edges below each entry, uint8: the index of its nearest level."""
        cells = self._cell(x)
        is_above = x.flatten() > self._edge.to(x.device).index_select(0, cells)
        return (self._below.to(x.device).index_select(0, cells) + is_above).view(x.shape)

    def values(self, codes: Tensor) -> Tensor:
        """Levels of codes, float32."""
        levels = self._levels.to(codes.device)
        return levels.index_select(0, codes.flatten().int()).view(codes.shape)


@dataclass(frozen=True, slots=True)
class RotationLloyd:
    """Round-trip of keys through a random rotation and scalar Lloyd-Max levels.

    A unit key, rotated and scaled by ``sqrt(head_dim)``, has nearly standard normal entries; each
    takes the nearest of ``2**bits`` levels optimal for that law. The decoded direction is scaled
    back to unit norm before the float16 norm is applied ("norm correction").

    Deviations from TurboQuant (Zandieh et al., 2025): levels for the normal law instead of the
    Beta law of a coordinate on the sphere, the norm correction, no one-bit residual sketch for
    unbiased inner products, and one width for all channels instead of more bits for outliers.

    Attributes:
        bits: Bits per entry, 1 to 8.
        seed: Seed of the rotation, shared by all heads.
    """

    bits: int
    seed: int = 1

    def __post_init__(self) -> None:
        """Reject widths that cannot be coded."""
        check_bits(self.bits)

    def bits_per_element(self, head_dim: int) -> float:
        """Bits per key entry, norm included; the rotation and the levels are constants."""
        check_head_dim(head_dim)
        return self.bits + _NORM_BITS / head_dim

    def roundtrip(self, x: Tensor) -> Tensor:
        """Keys as they would come back.

        Args:
            x: ``[heads, tokens, head_dim]`` floating point.

        Returns:
            ``[heads, tokens, head_dim]`` float32; a zero key comes back as zero.

        Raises:
            ValueError: On another shape or dtype, entries that are not finite, or a norm that
                exceeds float16.
        """
        check_keys(x)
        if x.numel() == 0:
            return x.float()
        head_dim = x.shape[-1]
        rotation = random_rotation(head_dim, self.seed).to(x.device)
        levels = gaussian_levels(self.bits).to(x.device)
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        unit = wide / norm.clamp(min=torch.finfo(torch.float32).tiny)
        rotated = unit @ rotation * math.sqrt(head_dim)
        edges = (levels[1:] + levels[:-1]) / 2
        snapped = levels[torch.bucketize(rotated, edges)]
        direction = snapped / torch.linalg.vector_norm(snapped, dim=-1, keepdim=True)
        restored: Tensor = direction @ rotation.T
        return restored * as_float16(norm, name="key norm")


@functools.lru_cache(maxsize=64)
def random_rotation(dim: int, seed: int) -> Tensor:
    """Orthogonal matrix drawn uniformly; shared and cached, so callers must not write to it.

    Args:
        dim: Order of the matrix.
        seed: Seed of the draw.

    Returns:
        ``[dim, dim]`` float32 on the CPU.
    """
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(seed)
        gaussian = torch.randn(dim, dim, dtype=torch.float64, generator=generator)
        q, r = torch.linalg.qr(gaussian)
        # Without the signs of R's diagonal, QR does not draw from the uniform law.
        rotation: Tensor = q * r.diagonal().sign()
        return rotation.float()


@functools.lru_cache(maxsize=8)
def gaussian_levels(bits: int) -> Tensor:
    """Levels of least squared error for a standard normal variable (Lloyd, Max).

    Alternates the two conditions of optimality in closed form: edges half-way between levels,
    and each level the mean of its cell, ``(phi(a) - phi(b)) / (Phi(b) - Phi(a))``. Starts from
    the high-rate density, a normal law of variance 3.

    Args:
        bits: Width of a level index.

    Returns:
        ``[2**bits]`` float32, ascending and symmetric, on the CPU.
    """
    with torch.inference_mode(False):
        count = 1 << bits
        quantile = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        levels: Tensor = torch.special.ndtri(quantile) * math.sqrt(3)
        outer = torch.tensor([math.inf], dtype=torch.float64)
        for _ in range(_LLOYD_ITERATIONS):
            edges = torch.cat([-outer, (levels[1:] + levels[:-1]) / 2, outer])
            density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
            mass = torch.special.ndtr(edges)
            levels = (density[:-1] - density[1:]) / (mass[1:] - mass[:-1])
            # Rounding in the tails would otherwise break the symmetry of the law.
            levels = (levels - levels.flip(0)) / 2
        return levels.float()


def check_keys(x: Tensor) -> None:
    """Reject anything but finite floating-point ``[heads, tokens, head_dim]``."""
    if x.ndim != 3 or not x.is_floating_point():
        raise ValueError(
            f"keys must be floating-point [heads, tokens, head_dim], got {x.dtype} {tuple(x.shape)}"
        )
    check_finite(x, name="keys")


def check_head_dim(head_dim: int) -> None:
    """Reject head dims below 1."""
    if head_dim < 1:
        raise ValueError(f"head_dim must be at least 1, got {head_dim}")
