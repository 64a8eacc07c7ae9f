# SPDX-License-Identifier: Apache-2.0
"""The recursive polar tree: channels pair up into radii, radii pair up again, up to one root.

Derivation: docs/math/coordinates.md, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.codec.coordinates.base import checked_floats, checked_keys, checked_query
from sphkv.core.rope import principal_angle


def _levels(head_dim: int) -> list[tuple[int, slice]]:
    """Pairs joined at each level and the place of their angles, leaves first."""
    levels, start, nodes = [], 0, head_dim
    while nodes > 1:
        pairs = nodes // 2
        levels.append((pairs, slice(start, start + pairs)))
        start, nodes = start + pairs, nodes - pairs
    return levels


@dataclass(frozen=True, slots=True)
class PolarTreeMap:
    """A binary tree of angles, stored level by level from the leaves to the root.

    A leaf angle is the azimuth of two neighbouring channels, in (-pi, pi]; an upper angle splits
    a radius between its two children, in [0, pi / 2]. Where a level has an odd number of nodes
    the last one moves up unchanged and costs no angle: the same as padding the key with zeros to
    a power of two and leaving out the angles that are always 0. Positions are not read.
    """

    @property
    def name(self) -> str:
        """Label in configs and reports."""
        return "polar_tree"

    def num_angles(self, head_dim: int) -> int:
        """One less than the channels."""
        return head_dim - 1

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

    def cosine(
        self, query_unit: Tensor, angles: Tensor, *, positions: Tensor | None = None
    ) -> Tensor:
        """Cosine ``[...]`` of queries ``[..., head_dim]`` and keys as angles."""
        angles = checked_floats("angles", angles)
        return self.cosine_from_trig(query_unit, angles.cos(), angles.sin())

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
