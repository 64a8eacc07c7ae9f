# SPDX-License-Identifier: Apache-2.0
"""What every coordinate map of the sphere offers, and its quantised twin.

A map turns the direction of a key into angles and scores a query against those angles without
ever putting the key together. Derivations: docs/math/coordinates.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sphkv.codec.coordinates.lloyd import MAX_BITS, lloyd_max, nearest_level


class CoordinateMap(Protocol):
    """Angles of a unit key, and the cosine between a query and a key given by its angles.

    ``positions`` are integer token positions ``[tokens]``, or any shape that broadcasts against
    the leading dimensions of the keys. Only maps that know the rotary embedding read them.
    """

    @property
    def name(self) -> str:
        """Label in configs and reports."""

    def num_angles(self, head_dim: int) -> int:
        """Angles of one key."""

    def is_circular(self, head_dim: int) -> Tensor:
        """Which angles wrap at a full turn, ``[angles]`` bool; the others are bounded."""

    def to_angles(self, unit_keys: Tensor, *, positions: Tensor | None = None) -> Tensor:
        """Angles ``[..., angles]`` of post-RoPE keys ``[..., head_dim]`` of any length.

        A zero key has the angles of the first channel's axis.
        """

    def from_angles(self, angles: Tensor, *, positions: Tensor | None = None) -> Tensor:
        """Undo :meth:`to_angles`; for tests, never in decode."""

    def cosine(
        self, query_unit: Tensor, angles: Tensor, *, positions: Tensor | None = None
    ) -> Tensor:
        """Cosine ``[...]`` of post-RoPE queries ``[..., head_dim]`` and keys as angles.

        The leading dimensions of both broadcast.
        """

    def cosine_from_trig(
        self, query_unit: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None
    ) -> Tensor:
        """As :meth:`cosine`, from the cosines and sines ``[..., angles]`` of the angles."""


@dataclass(frozen=True, slots=True, eq=False)
class ScalarAngleCodebook:
    """Levels of every angle of every head, one code per angle.

    Attributes:
        levels: ``[heads, angles, 2**bits]`` float radians, ascending.
        is_circular: ``[angles]`` bool, angles that wrap at a full turn.
    """

    levels: Tensor
    is_circular: Tensor

    def __post_init__(self) -> None:
        shape = tuple(self.levels.shape)
        sizes = [2**bits for bits in range(MAX_BITS + 1)]
        if len(shape) != 3 or shape[-1] not in sizes or not self.levels.is_floating_point():
            raise ValueError(
                "levels must be float [heads, angles, 2**bits], "
                f"got {self.levels.dtype} of shape {shape}"
            )
        if not self.levels.isfinite().all() or (self.levels.diff(dim=-1) < 0).any():
            raise ValueError("levels must be finite and ascending")
        if self.is_circular.shape != shape[1:2] or self.is_circular.dtype != torch.bool:
            raise ValueError(
                f"is_circular must be bool [{shape[1]}], "
                f"got {self.is_circular.dtype} of shape {tuple(self.is_circular.shape)}"
            )

    @property
    def bits(self) -> int:
        """Bits per code."""
        return int(self.levels.shape[-1]).bit_length() - 1

    def look_up(self, table: Tensor, codes: Tensor) -> Tensor:
        """Entries of ``table`` chosen by the codes.

        Args:
            table: ``[heads, angles, 2**bits]``, such as the cosines of the levels.
            codes: ``[..., heads, tokens, angles]`` uint8.

        Returns:
            ``[..., heads, tokens, angles]`` in the table's dtype.
        """
        num_heads, num_angles, num_levels = self.levels.shape
        shape = tuple(codes.shape)
        if len(shape) < 3 or (shape[-3], shape[-1]) != (num_heads, num_angles):
            raise ValueError(
                f"codes must be [..., {num_heads} heads, tokens, {num_angles} angles], got {shape}"
            )
        if codes.dtype != torch.uint8:
            raise ValueError(f"codes must be uint8, got {codes.dtype}")
        if codes.numel() and int(codes.max()) >= num_levels:
            raise ValueError(f"codes must be below {num_levels}, got {int(codes.max())}")
        head = torch.arange(num_heads, device=codes.device)[:, None, None]
        angle = torch.arange(num_angles, device=codes.device)
        return table[head, angle, codes.long()]


def fit_angle_codebook(
    coordinates: CoordinateMap,
    keys: Tensor,
    *,
    bits: int,
    positions: Tensor | None = None,
    weight: Tensor | None = None,
) -> ScalarAngleCodebook:
    """Fit the levels of each angle to calibration keys.

    Args:
        coordinates: The map that makes the angles.
        keys: ``[heads, tokens, head_dim]`` post-RoPE keys of any length.
        bits: Bits per angle, 0 to 8.
        positions: Token positions, for maps that read them.
        weight: ``[heads, tokens, angles]`` weight of each angle's squared error.
    """
    if keys.dim() != 3:
        raise ValueError(f"keys must be [heads, tokens, head_dim], got {tuple(keys.shape)}")
    angles = coordinates.to_angles(keys, positions=positions)
    circular = coordinates.is_circular(keys.shape[-1]).to(keys.device)
    levels = lloyd_max(
        angles.transpose(1, 2),
        bits=bits,
        weight=None if weight is None else weight.transpose(1, 2),
        is_circular=circular.expand(keys.shape[0], -1),
    )
    return ScalarAngleCodebook(levels=levels, is_circular=circular)


def encode_angles(
    coordinates: CoordinateMap,
    keys: Tensor,
    codebook: ScalarAngleCodebook,
    *,
    positions: Tensor | None = None,
) -> Tensor:
    """Code each angle of each key by its nearest level.

    Args:
        coordinates: The map that the codebook was fitted with.
        keys: ``[..., heads, tokens, head_dim]`` post-RoPE keys of any length.
        codebook: Levels of the same heads.
        positions: Token positions, for maps that read them.

    Returns:
        ``[..., heads, tokens, angles]`` uint8.
    """
    angles = coordinates.to_angles(keys, positions=positions)
    num_heads, num_angles, _ = codebook.levels.shape
    shape = tuple(angles.shape)
    if len(shape) < 3 or (shape[-3], shape[-1]) != (num_heads, num_angles):
        raise ValueError(
            f"a codebook of {num_heads} heads and {num_angles} angles does not fit "
            f"keys of shape {tuple(keys.shape)}"
        )
    batches = angles.unsqueeze(0).flatten(0, -4)
    rows = batches.permute(1, 3, 0, 2)  # [heads, angles, batch, tokens]
    circular = codebook.is_circular.expand(num_heads, -1)
    codes = nearest_level(rows.flatten(2), codebook.levels, circular)
    return codes.view(rows.shape).permute(2, 0, 3, 1).reshape(shape).to(torch.uint8)


def cosine_from_codes(
    coordinates: CoordinateMap,
    query_unit: Tensor,
    codes: Tensor,
    codebook: ScalarAngleCodebook,
    *,
    positions: Tensor | None = None,
) -> Tensor:
    """Cosine between queries and coded keys, from tables of the levels' cosines and sines.

    Args:
        coordinates: The map that the codes were made with.
        query_unit: ``[..., heads, queries, head_dim]`` post-RoPE queries.
        codes: ``[..., heads, tokens, angles]`` uint8.
        codebook: Levels of the same heads.
        positions: Positions of the coded tokens, ``[tokens]`` or ``[..., heads, tokens]``.

    Returns:
        ``[..., heads, queries, tokens]``.
    """
    cos = codebook.look_up(codebook.levels.cos(), codes).unsqueeze(-3)
    sin = codebook.look_up(codebook.levels.sin(), codes).unsqueeze(-3)
    if positions is not None:
        positions = positions.unsqueeze(-2)
    return coordinates.cosine_from_trig(query_unit.unsqueeze(-2), cos, sin, positions=positions)


def split_radius(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Length ``[...]`` and direction ``[..., head_dim]`` of keys.

    A zero key has radius 0 and the direction of the first channel's axis.
    """
    directions = checked_keys(keys)
    norm = torch.linalg.vector_norm(directions, dim=-1, keepdim=True)
    radius = keys.to(directions.dtype).abs().amax(dim=-1, keepdim=True) * norm
    return radius.squeeze(-1), directions / norm


def checked_keys(keys: Tensor, head_dim: int | None = None) -> Tensor:
    """Keys scaled to a largest component of 1, so that no square over- or underflows.

    Zero keys become the first axis and negative zeros become zeros: they would flip angles.
    """
    size = keys.shape[-1] if keys.dim() else 0
    if size < 2 or size % 2 or size != (head_dim or size):
        wanted = head_dim or "even head_dim"
        raise ValueError(f"keys must be [..., {wanted}], got shape {tuple(keys.shape)}")
    keys = checked_floats("keys", keys)
    largest = keys.abs().amax(dim=-1, keepdim=True)
    first_axis = keys.new_zeros(size)
    first_axis[0] = 1.0
    return torch.where(largest > 0, keys / largest, first_axis) + 0.0


def checked_query(query: Tensor, head_dim: int, *angles: Tensor) -> Tensor:
    """A query whose last dimension is ``head_dim`` and whose others broadcast with ``angles``."""
    if query.dim() == 0 or query.shape[-1] != head_dim:
        raise ValueError(f"query must be [..., {head_dim}], got shape {tuple(query.shape)}")
    for other in angles:
        sizes = zip(reversed(query.shape[:-1]), reversed(other.shape[:-1]), strict=False)
        if any(a != b and 1 not in (a, b) for a, b in sizes):
            shapes = f"{tuple(query.shape)} against {tuple(other.shape)}"
            raise ValueError(f"query and angles do not broadcast: {shapes}")
    return checked_floats("query", query)


def checked_floats(name: str, x: Tensor) -> Tensor:
    """``x`` as float32, or float64 if it was; NaN and infinite values raise."""
    if not x.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {x.dtype}")
    is_bad = ~x.isfinite()
    if is_bad.any():
        index = tuple(is_bad.nonzero()[0].tolist())
        raise ValueError(f"{name} must be finite, got {x[index].item()} at index {index}")
    return x if x.dtype == torch.float64 else x.to(torch.float32)
