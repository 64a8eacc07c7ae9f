# SPDX-License-Identifier: Apache-2.0
"""The classical ``d - 1`` angles of the sphere, scored by a Horner recurrence.

Derivation: docs/math/coordinates.md, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.codec.coordinates.base import checked_floats, checked_keys, checked_query
from sphkv.core.rope import principal_angle


@dataclass(frozen=True, slots=True)
class HypersphericalMap:
    """Peels off one channel per angle: angle ``i`` is that between the rest of the key and axis i.

    All angles lie in [0, pi] except the last, in (-pi, pi]. Positions are not read: the angles
    are those of the key as it is, after the rotary embedding.
    """

    @property
    def name(self) -> str:
        """Label in configs and reports."""
        return "hyperspherical"

    def num_angles(self, head_dim: int) -> int:
        """One less than the channels."""
        return head_dim - 1

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

    def cosine(
        self, query_unit: Tensor, angles: Tensor, *, positions: Tensor | None = None
    ) -> Tensor:
        """Cosine ``[...]`` of queries ``[..., head_dim]`` and keys as angles."""
        angles = checked_floats("angles", angles)
        return self.cosine_from_trig(query_unit, angles.cos(), angles.sin())

    def cosine_from_trig(
        self, query_unit: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None
    ) -> Tensor:
        """Cosine by ``value = q_i * cos_i + sin_i * value``, from the last angle inwards."""
        query = checked_query(query_unit, cos.shape[-1] + 1, cos, sin)
        value = query[..., -1]
        for i in reversed(range(cos.shape[-1])):
            value = query[..., i] * cos[..., i] + sin[..., i] * value
        return value
