# SPDX-License-Identifier: Apache-2.0
"""Angles as codes: Lloyd-Max levels of every angle of every head, on the line or on the circle.

A row is one angle of one head. Rows are sorted once; every later step of a fit works on prefix
sums, so its cost depends on the number of levels and hardly on the number of samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.codec.coordinates.maps import CoordinateMap, checked_keys

TURN = 2 * math.pi
MAX_BITS = 8


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


def lloyd_max(
    samples: Tensor,
    *,
    bits: int,
    weight: Tensor | None = None,
    is_circular: Tensor | None = None,
    iterations: int = 60,
) -> Tensor:
    """Fit levels that minimise the weighted squared error of each row.

    Args:
        samples: ``[..., samples]`` values; radians where circular.
        bits: Bits per code, 0 to 8.
        weight: ``[..., samples]`` weights of at least 0. A row without any weight counts its
            samples equally.
        is_circular: ``[...]`` bool, rows whose values wrap at a full turn.
        iterations: Rounds of assigning samples and moving levels.

    Returns:
        ``[..., 2**bits]`` float32 ascending levels. Those of a circular row span less than a
        turn, around the row's mean direction, and may lie outside (-pi, pi].
    """
    _check_samples(samples, bits, weight, is_circular)
    row_shape, count = samples.shape[:-1], samples.shape[-1]
    values = samples.reshape(-1, count).to(torch.float64)
    mass = torch.ones_like(values) if weight is None else weight.reshape(-1, count).to(values)
    mass = torch.where(mass.sum(1, keepdim=True) > 0, mass, torch.ones_like(mass))
    circular = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    if is_circular is not None:
        circular = is_circular.reshape(-1).to(circular)
    levels = values.new_empty(len(values), 2**bits)
    levels[~circular] = _fit(_Rows.on_line(values[~circular], mass[~circular]), bits, iterations)
    middle = _mean_direction(values[circular], mass[circular])
    around = math.pi - torch.remainder(math.pi - (values[circular] - middle), TURN)
    levels[circular] = middle + _fit(_Rows.on_circle(around, mass[circular]), bits, iterations)
    return levels.to(torch.float32).reshape(*row_shape, 2**bits)


def nearest_level(values: Tensor, levels: Tensor, is_circular: Tensor) -> Tensor:
    """Index of the level nearest to each value.

    Args:
        values: ``[..., samples]`` radians.
        levels: ``[..., levels]`` ascending, as :func:`lloyd_max` returns them.
        is_circular: ``[...]`` bool, rows that wrap at a full turn.

    Returns:
        ``[..., samples]`` int64.
    """
    levels = levels.to(values.dtype)
    start = (levels[..., :1] + levels[..., -1:]) / 2 - math.pi
    within = start + torch.remainder(values - start, TURN)
    values = torch.where(is_circular[..., None], within, values)
    return torch.searchsorted(_midpoints(levels).contiguous(), values.contiguous())


@dataclass(frozen=True, slots=True)
class _Rows:
    """Sorted samples and their prefix sums; a circular row holds one more turn on each side.

    Attributes:
        values: ``[rows, n]`` ascending.
        moments: Prefix sums of weight, weight * value and weight * value**2, ``[rows, n + 1]``.
        is_circular: Whether the rows wrap at a full turn.
    """

    values: Tensor
    moments: tuple[Tensor, Tensor, Tensor]
    is_circular: bool

    @classmethod
    def on_line(cls, values: Tensor, mass: Tensor) -> _Rows:
        values, order = values.sort(dim=1)
        return cls(values, _prefix_moments(values, mass.gather(1, order)), False)

    @classmethod
    def on_circle(cls, values: Tensor, mass: Tensor) -> _Rows:
        values, order = values.sort(dim=1)
        values = torch.cat((values - TURN, values, values + TURN), dim=1)
        return cls(values, _prefix_moments(values, mass.gather(1, order).repeat(1, 3)), True)

    def cells(self, levels: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Edges ``[rows, levels + 1]`` of the levels' cells, and the moments inside each."""
        if self.is_circular:
            low = (levels[:, :1] + levels[:, -1:]) / 2 - math.pi
            high = low + TURN
        else:
            low = torch.full_like(levels[:, :1], -math.inf)
            high = torch.full_like(low, math.inf)
        edges = torch.cat((low, _midpoints(levels), high), dim=1)
        cut = torch.searchsorted(self.values, edges)
        mass, first, second = (moment.gather(1, cut).diff(dim=1) for moment in self.moments)
        return edges, (mass, first, second)

    def quantiles(self, shares: Tensor) -> Tensor:
        """Values ``[rows, shares]`` below which the given shares of the weight lie."""
        mass = self.moments[0]
        if self.is_circular:
            shares = (shares + 1) / 3  # those of the middle one of the three turns
        index = torch.searchsorted(mass[:, 1:].contiguous(), mass[:, -1:] * shares)
        return self.values.gather(1, index.clamp(max=self.values.shape[1] - 1))


def _first_levels(rows: _Rows, num_levels: int) -> Tensor:
    """Levels as dense as the cube root of the samples' density, the optimum for many levels."""
    steps = torch.linspace(0, 1, 4 * num_levels + 1).to(rows.values)
    grid = rows.quantiles(steps)
    # equal weight per step, so its density is 1 / width and the levels it deserves width ** 2/3
    deserved = torch.cat((torch.zeros_like(grid[:, :1]), grid.diff(dim=1) ** (2 / 3)), dim=1)
    deserved = deserved.cumsum(1)
    target = deserved[:, -1:] * steps[2::4]
    right = torch.searchsorted(deserved, target).clamp(1, 4 * num_levels)
    low, high = deserved.gather(1, right - 1), deserved.gather(1, right)
    share = torch.where(high > low, (target - low) / (high - low), 0.0)
    return torch.lerp(grid.gather(1, right - 1), grid.gather(1, right), share)


def _fit(rows: _Rows, bits: int, iterations: int) -> Tensor:
    levels = _first_levels(rows, 2**bits)
    for step in range(iterations):
        edges, (mass, first, second) = rows.cells(levels)
        has_mass = mass > 0
        centre = torch.where(has_mass, first / mass, levels)
        # where hardly any weight lies, the difference of two prefix sums is mostly rounding
        centre = centre.clamp(edges[:, :-1], edges[:, 1:])
        if step < iterations // 2:
            variance = torch.where(has_mass, second / mass - centre.square(), 0.0).clamp(min=0)
            levels = _split_worst_cells(centre, edges, mass, variance)
        else:
            levels = centre
        if rows.is_circular:
            # the copies reach one turn to each side only: stay near the middle one
            levels = levels - TURN * torch.round(levels.mean(1, keepdim=True) / TURN)
    return levels


def _split_worst_cells(centre: Tensor, edges: Tensor, mass: Tensor, variance: Tensor) -> Tensor:
    """Move each level whose cell is empty into one of the cells with the most error."""
    is_empty = mass <= 0
    _, empty = is_empty.to(torch.uint8).sort(dim=1, descending=True, stable=True)
    error, worst = (mass * variance).sort(dim=1, descending=True, stable=True)
    is_move = is_empty.gather(1, empty) & (error > 0)
    spread = variance.gather(1, worst).sqrt()
    middle = centre.gather(1, worst)
    lower = torch.maximum(middle - spread, edges[:, :-1].gather(1, worst))
    upper = torch.minimum(middle + spread, edges[:, 1:].gather(1, worst))
    moved = centre.scatter(1, worst, torch.where(is_move, lower, middle))
    stay = moved.gather(1, empty)
    return moved.scatter(1, empty, torch.where(is_move, upper, stay)).sort(dim=1).values


def _midpoints(levels: Tensor) -> Tensor:
    return (levels[..., 1:] + levels[..., :-1]) / 2


def _mean_direction(values: Tensor, mass: Tensor) -> Tensor:
    y = (mass * values.sin()).sum(1, keepdim=True)
    return torch.atan2(y, (mass * values.cos()).sum(1, keepdim=True))


def _prefix_moments(values: Tensor, mass: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    zero = mass.new_zeros(len(mass), 1)
    mass, first, second = (
        torch.cat((zero, part.cumsum(1)), dim=1)
        for part in (mass, mass * values, mass * values.square())
    )
    return mass, first, second


def _check_samples(
    samples: Tensor, bits: int, weight: Tensor | None, is_circular: Tensor | None
) -> None:
    if not 0 <= bits <= MAX_BITS:
        raise ValueError(f"bits must be 0 to {MAX_BITS}, got {bits}")
    if samples.dim() == 0 or samples.shape[-1] == 0:
        raise ValueError(f"need at least one sample per row, got shape {tuple(samples.shape)}")
    if not samples.isfinite().all():
        raise ValueError("samples hold NaN or infinite values")
    if weight is not None:
        if weight.shape != samples.shape:
            shapes = f"{tuple(weight.shape)} against {tuple(samples.shape)}"
            raise ValueError(f"weight must have the shape of the samples: {shapes}")
        if not (weight.isfinite() & (weight >= 0)).all():
            raise ValueError("weight holds NaN, infinite or negative values")
    if is_circular is not None and is_circular.shape != samples.shape[:-1]:
        shapes = f"{tuple(is_circular.shape)} against {tuple(samples.shape)}"
        raise ValueError(f"is_circular must have one entry per row: {shapes}")
