# SPDX-License-Identifier: Apache-2.0
"""Coordinate maps of the sphere: one per file, all behind :class:`CoordinateMap`."""

from __future__ import annotations

from sphkv.codec.coordinates.base import (
    CoordinateMap,
    ScalarAngleCodebook,
    cosine_from_codes,
    encode_angles,
    fit_angle_codebook,
    split_radius,
)
from sphkv.codec.coordinates.hyperspherical import HypersphericalMap
from sphkv.codec.coordinates.lloyd import lloyd_max, nearest_level
from sphkv.codec.coordinates.planes import PlaneMap
from sphkv.codec.coordinates.polar_tree import PolarTreeMap
from sphkv.core.rope import RopeSpec

__all__ = [
    "COORDINATE_NAMES",
    "CoordinateMap",
    "HypersphericalMap",
    "PlaneMap",
    "PolarTreeMap",
    "ScalarAngleCodebook",
    "cosine_from_codes",
    "encode_angles",
    "fit_angle_codebook",
    "lloyd_max",
    "make_coordinates",
    "nearest_level",
    "split_radius",
]

COORDINATE_NAMES = ("planes", "hyperspherical", "polar_tree")


def make_coordinates(name: str, rope: RopeSpec) -> CoordinateMap:
    """The coordinate map of that name; only ``"planes"`` uses the rotary embedding."""
    if name == "planes":
        return PlaneMap(rope)
    if name == "hyperspherical":
        return HypersphericalMap()
    if name == "polar_tree":
        return PolarTreeMap()
    raise ValueError(f"coordinates must be one of {COORDINATE_NAMES}, got {name!r}")
