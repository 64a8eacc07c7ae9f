# SPDX-License-Identifier: Apache-2.0
"""Three coordinate maps of the sphere: rotary planes, the classical angles, and a polar tree.

A map turns the direction of a key into angles and scores a query against those angles without
ever putting the key together. Derivations: docs/math/coordinates.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from sphkv.core.rope import RopeSpec, principal_angle

COORDINATE_NAMES = ("planes", "hyperspherical", "polar_tree")


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


def make_coordinates(name: str, rope: RopeSpec) -> CoordinateMap:
    """The coordinate map of that name; only ``"planes"`` uses the rotary embedding."""
    if name == "planes":
        return PlaneMap(rope)
    if name == "hyperspherical":
        return HypersphericalMap()
    if name == "polar_tree":
        return PolarTreeMap()
    raise ValueError(f"coordinates must be one of {COORDINATE_NAMES}, got {name!r}")


@dataclass(frozen=True, slots=True)
class PlaneMap:
    """A key as ``cos(psi_i) * exp(j * (theta_i + w_i * p))`` in plane ``i``.

    The angles of a key are all elevations, in [0, pi / 2], then all azimuths, in (-pi, pi]. They
    do not depend on the key's position ``p``: the phase ``w_i * p`` is taken off the azimuth
    when a key is read and added again when it is scored. Without positions there is no phase.
    See docs/math/coordinates.md, sections 1 and 2.

    Attributes:
        rope: The rotary embedding that defines planes and frequencies.
    """

    rope: RopeSpec

    @property
    def name(self) -> str:
        """Label in configs and reports."""
        return "planes"

    def num_angles(self, head_dim: int) -> int:
        """As many as channels: the elevations obey one constraint and keep it redundant."""
        if head_dim != self.rope.head_dim:
            raise ValueError(f"head_dim must be {self.rope.head_dim}, got {head_dim}")
        return head_dim

    def is_circular(self, head_dim: int) -> Tensor:
        """Only the azimuths wrap, ``[angles]`` bool."""
        return torch.arange(self.num_angles(head_dim)) >= self.rope.num_planes

    def to_angles(self, unit_keys: Tensor, *, positions: Tensor | None = None) -> Tensor:
        """Angles ``[..., head_dim]`` of post-RoPE keys ``[..., head_dim]``."""
        z = self.rope.to_planes(checked_keys(unit_keys, self.rope.head_dim))
        if positions is not None:
            z = self.rope.unrotate(z, positions)
        own = z.square().sum(-1)
        # what lies in all other planes: sums from both ends, so nothing cancels
        before = pad(own.cumsum(-1)[..., :-1], (1, 0))
        after = pad(own.flip(-1).cumsum(-1)[..., :-1], (1, 0)).flip(-1)
        elevation = torch.atan2((before + after).sqrt(), own.sqrt())
        # adding 0 clears the sign of zeros, which would turn an azimuth of 0 into pi
        x, y = (z + 0.0).unbind(-1)
        return torch.cat((elevation, principal_angle(torch.atan2(y, x))), dim=-1)

    def from_angles(self, angles: Tensor, *, positions: Tensor | None = None) -> Tensor:
        """Post-RoPE keys ``[..., head_dim]``; of length 1 if the elevations are consistent."""
        elevation, azimuth = self._split(checked_floats("angles", angles))
        z = elevation.cos().unsqueeze(-1) * torch.stack((azimuth.cos(), azimuth.sin()), dim=-1)
        return self.rope.from_planes(z if positions is None else self.rope.rotate(z, positions))

    def cosine(
        self, query_unit: Tensor, angles: Tensor, *, positions: Tensor | None = None
    ) -> Tensor:
        """Cosine ``[...]`` as the sum of ``cos(psi) * |q| * cos(theta + w * p - arg(q))``."""
        elevation, azimuth = self._split(checked_floats("angles", angles))
        x, y = self._query_planes(query_unit, angles).unbind(-1)
        if positions is not None:
            azimuth = azimuth + self.rope.phases(positions)
        return (elevation.cos() * torch.hypot(x, y) * (azimuth - torch.atan2(y, x)).cos()).sum(-1)

    def cosine_from_trig(
        self, query_unit: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None
    ) -> Tensor:
        """Cosine from trigonometric tables: the query turns back instead of the key forth."""
        query = self._query_planes(query_unit, cos, sin)
        if positions is not None:
            query = self.rope.unrotate(query, positions)
        x, y = query.unbind(-1)
        amplitude, azimuth_cos = self._split(cos)
        return (amplitude * (azimuth_cos * x + self._split(sin)[1] * y)).sum(-1)

    def _query_planes(self, query_unit: Tensor, *angles: Tensor) -> Tensor:
        query = checked_query(query_unit, self.rope.head_dim, *angles)
        return self.rope.to_planes(query)

    def _split(self, angles: Tensor) -> tuple[Tensor, Tensor]:
        if angles.dim() == 0 or angles.shape[-1] != self.rope.head_dim:
            raise ValueError(
                f"angles must be [..., {self.rope.head_dim}], got shape {tuple(angles.shape)}"
            )
        return angles[..., : self.rope.num_planes], angles[..., self.rope.num_planes :]


@dataclass(frozen=True, slots=True)
class _PostRopeMap(ABC):
    """As many angles as the sphere has dimensions, of the key as it is after the rotary embedding.

    Positions are not read, and only the cosines and sines of the angles are needed to score a key.
    """

    def num_angles(self, head_dim: int) -> int:
        """One less than the channels."""
        return head_dim - 1

    def cosine(
        self, query_unit: Tensor, angles: Tensor, *, positions: Tensor | None = None
    ) -> Tensor:
        """Cosine ``[...]`` of queries ``[..., head_dim]`` and keys as angles."""
        angles = checked_floats("angles", angles)
        return self.cosine_from_trig(query_unit, angles.cos(), angles.sin())

    @abstractmethod
    def cosine_from_trig(
        self, query_unit: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None
    ) -> Tensor:
        """As :meth:`cosine`, from the cosines and sines ``[..., angles]`` of the angles."""


@dataclass(frozen=True, slots=True)
class HypersphericalMap(_PostRopeMap):
    """Peels off one channel per angle: angle ``i`` is that between the rest of the key and axis i.

    All angles lie in [0, pi] except the last, in (-pi, pi]. Scored by a Horner recurrence:
    docs/math/coordinates.md, section 3.
    """

    @property
    def name(self) -> str:
        """Label in configs and reports."""
        return "hyperspherical"

    def is_circular(self, head_dim: int) -> Tensor:
        """Only the last angle wraps, ``[angles]`` bool."""
        return torch.arange(head_dim - 1) == head_dim - 2

    def to_angles(self, unit_keys: Tensor, *, positions: Tensor | None = None) -> Tensor:
        """Angles ``[..., head_dim - 1]`` of keys ``[..., head_dim]``."""
        keys = checked_keys(unit_keys)
        # norm of what follows each channel: a sum of squares, so nothing cancels
        tail = keys[..., 1:].square().flip(-1).cumsum(-1).flip(-1).sqrt()
        polar = torch.atan2(tail[..., :-1], keys[..., :-2])
        last = principal_angle(torch.atan2(keys[..., -1:], keys[..., -2:-1]))
        return torch.cat((polar, last), dim=-1)

    def from_angles(self, angles: Tensor, *, positions: Tensor | None = None) -> Tensor:
        """Unit keys ``[..., head_dim]`` of angles ``[..., head_dim - 1]``."""
        angles = checked_floats("angles", angles)
        one = torch.ones_like(angles[..., :1])
        outer = torch.cat((one, angles.sin().cumprod(-1)), dim=-1)
        return outer * torch.cat((angles.cos(), one), dim=-1)

    def cosine_from_trig(
        self, query_unit: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None
    ) -> Tensor:
        """Cosine by ``value = q_i * cos_i + sin_i * value``, from the last angle inwards."""
        query = checked_query(query_unit, cos.shape[-1] + 1, cos, sin)
        value = query[..., -1]
        for i in reversed(range(cos.shape[-1])):
            value = query[..., i] * cos[..., i] + sin[..., i] * value
        return value


@dataclass(frozen=True, slots=True)
class PolarTreeMap(_PostRopeMap):
    """A binary tree of angles, stored level by level from the leaves to the root.

    A leaf angle is the azimuth of two neighbouring channels, in (-pi, pi]; an upper angle splits
    a radius between its two children, in [0, pi / 2]. Where a level has an odd number of nodes
    the last one moves up unchanged and costs no angle: the same as padding the key with zeros to
    a power of two and leaving out the angles that are always 0. See docs/math/coordinates.md,
    section 4.
    """

    @property
    def name(self) -> str:
        """Label in configs and reports."""
        return "polar_tree"

    def is_circular(self, head_dim: int) -> Tensor:
        """Only the leaf angles wrap, ``[angles]`` bool."""
        return torch.arange(head_dim - 1) < head_dim // 2

    def to_angles(self, unit_keys: Tensor, *, positions: Tensor | None = None) -> Tensor:
        """Angles ``[..., head_dim - 1]`` of keys ``[..., head_dim]``."""
        nodes = checked_keys(unit_keys)
        angles = []
        for pairs, _ in _levels(nodes.shape[-1]):
            left, right = nodes[..., 0 : 2 * pairs : 2], nodes[..., 1 : 2 * pairs : 2]
            angles.append(principal_angle(torch.atan2(right, left)))
            nodes = torch.cat((torch.hypot(left, right), nodes[..., 2 * pairs :]), dim=-1)
        return torch.cat(angles, dim=-1)

    def from_angles(self, angles: Tensor, *, positions: Tensor | None = None) -> Tensor:
        """Unit keys ``[..., head_dim]`` of angles ``[..., head_dim - 1]``."""
        angles = checked_floats("angles", angles)
        nodes = torch.ones_like(angles[..., :1])
        for pairs, place in reversed(_levels(angles.shape[-1] + 1)):
            radius, angle = nodes[..., :pairs], angles[..., place]
            children = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1)
            nodes = torch.cat((children.flatten(-2), nodes[..., pairs:]), dim=-1)
        return nodes

    def cosine_from_trig(
        self, query_unit: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None
    ) -> Tensor:
        """Cosine by ``value = cos * left + sin * right`` at each node, leaves up."""
        value = checked_query(query_unit, cos.shape[-1] + 1, cos, sin)
        for pairs, place in _levels(value.shape[-1]):
            left, right = value[..., 0 : 2 * pairs : 2], value[..., 1 : 2 * pairs : 2]
            joined = cos[..., place] * left + sin[..., place] * right
            carried = value[..., 2 * pairs :].expand(*joined.shape[:-1], -1)
            value = torch.cat((joined, carried), dim=-1)
        return value.squeeze(-1)


def _levels(head_dim: int) -> list[tuple[int, slice]]:
    """Pairs joined at each level and the place of their angles, leaves first."""
    levels, start, nodes = [], 0, head_dim
    while nodes > 1:
        pairs = nodes // 2
        levels.append((pairs, slice(start, start + pairs)))
        start, nodes = start + pairs, nodes - pairs
    return levels


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
