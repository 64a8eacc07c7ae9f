# SPDX-License-Identifier: Apache-2.0
"""Elevation and azimuth of each rotary plane, before the rotary embedding; the default map.

Derivation: docs/math/coordinates.md, sections 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sphkv.codec.coordinates.base import checked_floats, checked_keys, checked_query
from sphkv.core.rope import RopeSpec, principal_angle


@dataclass(frozen=True, slots=True)
class PlaneMap:
    """A key as ``cos(psi_i) * exp(j * (theta_i + w_i * p))`` in plane ``i``.

    The angles of a key are all elevations, in [0, pi / 2], then all azimuths, in (-pi, pi]. They
    do not depend on the key's position ``p``: the phase ``w_i * p`` is taken off the azimuth
    when a key is read and added again when it is scored. Without positions there is no phase.

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
