# SPDX-License-Identifier: Apache-2.0
"""Look-up tables of the decode kernel: points turned by row, entry maps, turns by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.attention.cuda.geometry import (
    LANES,
    LEVELS,
    PAGE_TOKENS,
    ROWS_BEFORE,
    TILE_KEYS,
    KernelShape,
    ceil_div,
    lane_coordinates,
)
from sphkv.codec.codebook import AngleCodebook
from sphkv.core.rope import RopeSpec
from sphkv.store.paging import PositionMode

_STEP = 8


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Terms of a head's logit in the order of the product: slots, second look-ups, constants.

    Attributes:
        plane: ``[heads, entries]`` int64.
        points: ``[heads, look-up entries, 16, 2]`` float64.
        constants: ``[heads, constant entries, 2]`` float64.
    """

    plane: Tensor
    points: Tensor
    constants: Tensor


def list_entries(codebook: AngleCodebook, shape: KernelShape) -> Entries:
    """Spread a codebook over the entries of a kernel shape; padding has zero points."""
    heads, slots = codebook.slot_plane.shape[:2]
    twice = slice(slots - _STEP * shape.double_steps, slots)
    plane = [codebook.slot_plane[:, :, 0], codebook.slot_plane[:, twice, 1]]
    points = torch.cat([codebook.points[:, :, 0], codebook.points[:, twice, 1]], 1).double()
    num_constants = _STEP * shape.constant_steps
    # planes without bits first, in their own order; the rest pads with zero points
    order = torch.argsort((codebook.plane_bits != 0).long(), dim=1, stable=True)
    chosen = order[:, :num_constants]
    constants = codebook.constant.gather(1, chosen[..., None].expand(-1, -1, 2)).double()
    plane.append(chosen)
    if int((codebook.plane_bits == 0).sum(1).max()) > num_constants:
        raise ValueError(f"{num_constants} entries cannot hold all planes without bits")
    if int(codebook.num_pairs.max()) > _STEP * shape.double_steps:
        raise ValueError(f"{_STEP * shape.double_steps} second look-ups do not cover all pairs")
    padding = shape.entries - sum(part.shape[1] for part in plane)
    plane.append(plane[0].new_zeros(heads, padding))
    return Entries(torch.cat(plane, 1), points, constants)


def build_tables(codebook: AngleCodebook, rope: RopeSpec, shape: KernelShape) -> Tensor:
    """Tables of all heads as the kernel copies them to shared memory.

    Args:
        codebook: Slots of one layer and tier.
        rope: The layer's rotary embedding.
        shape: Kernel shape.

    Returns:
        ``[heads, table_bytes]`` uint8 on the codebook's device.
    """
    if (codebook.num_slots, codebook.num_planes) != (shape.nibbles, shape.planes):
        raise ValueError(
            f"codebook has {codebook.num_slots} slots and {codebook.num_planes} planes, "
            f"the kernel {shape.nibbles} and {shape.planes}"
        )
    entries = list_entries(codebook, shape)
    heads, device = entries.plane.shape[0], entries.plane.device
    words = torch.zeros(heads, shape.table_bytes // 4, dtype=torch.int32, device=device)
    frequency = rope.frequencies(device)[entries.plane]  # [heads, entries]
    _put_words(words, shape.frequency_offset, _turn_fractions(frequency))
    if shape.positions is PositionMode.TOKENS:
        # every key has its own position, so the table leaves points where they are
        frequency = torch.zeros_like(frequency)
    num_lookups = _STEP * shape.lookup_steps
    _put_points(words, entries.points, frequency[:, :num_lookups], shape)
    _put_constants(words, entries.constants, frequency[:, num_lookups:], shape)
    _put_words(words, shape.map_offset, _map_words(entries.plane, rope))
    return words.view(torch.uint8)


def turn_rows(rope: RopeSpec, num_positions: int, *, step: int, device: torch.device) -> Tensor:
    """Cosine and sine of every plane, rows of positions 16 apart next to each other.

    Args:
        rope: The rotary embedding.
        num_positions: Positions covered, rounded up to a multiple of 16.
        step: Power of two up to 16; only multiples of it can be a tile's base.
        device: Where the table lives.

    Returns:
        ``[16 / step, rows, planes, 2]`` int32, two halves each: cosine and minus sine, sine and
        cosine. Entry ``[phase, row]`` belongs to position ``16 * (row - ROWS_BEFORE) + step *
        phase``.
    """
    if step not in (1, 2, 4, 8, 16):
        raise ValueError(f"step must be a power of two up to 16, got {step}")
    # eight rows more than asked for: a page that begins at the last position reads past it
    rows = ceil_div(num_positions, TILE_KEYS) + PAGE_TOKENS // TILE_KEYS
    row = torch.arange(-ROWS_BEFORE, rows, device=device)
    positions = torch.arange(0, TILE_KEYS, step, device=device)[:, None] + TILE_KEYS * row
    phase = rope.phases(positions)
    cos, sin = phase.cos(), phase.sin()
    return _half2(torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2)))


def _half2(pair: Tensor) -> Tensor:
    """``[..., 2]`` floats to ``[...]`` words of two halves."""
    return pair.to(torch.float16).contiguous().view(torch.int32).squeeze(-1)


def _turned(points: Tensor, angle: Tensor) -> Tensor:
    """Points ``[..., 2]`` turned by ``angle [...]``."""
    x, y = points.unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([x * cos - y * sin, x * sin + y * cos], -1)


def _put_points(words: Tensor, points: Tensor, frequency: Tensor, shape: KernelShape) -> None:
    """Low nibbles hold keys ``g``, high ones ``g + 8``; slot ``s`` serves entries ``4 * s + t``.

    The second look-ups of slots that are looked up twice come last in ``points``.
    """
    heads, device = points.shape[0], points.device
    g, t = lane_coordinates(device)
    entry = 4 * torch.arange(2 * shape.lookup_steps, device=device)[:, None] + t  # [slots, lanes]
    for half in range(2):
        angle = frequency[:, entry] * (g + 8 * half)  # [heads, slots, lanes]
        turned = _turned(points[:, entry], angle[..., None])  # [heads, slots, lanes, 16, 2]
        word = _half2(turned).permute(0, 1, 3, 2)  # [heads, slots, 16, lanes]
        first = shape.single_slots
        second = first + 2 * shape.double_steps
        single = word[:, :first]
        # the points of a pair behind one another: [heads, double slots, 16, 2 * lanes]
        both = torch.cat([word[:, first:second], word[:, second:]], 3)
        if half == 1 and shape.spread:
            rows = words[:, : shape.high_bytes // 4].view(heads, LEVELS, -1)
            parts = [part.transpose(1, 2).flatten(2) for part in (single, both)]
            spread = torch.cat(parts, 2)
            rows[:, :, : spread.shape[2]] = spread
        else:
            start = 0 if half == 1 else shape.high_bytes // 4
            paired = single.unflatten(1, (-1, 2)).transpose(2, 3).flatten(1)
            packed = torch.cat([paired, both.flatten(1)], 1)
            words[:, start : start + packed.shape[1]] = packed


def _put_constants(words: Tensor, constants: Tensor, frequency: Tensor, shape: KernelShape) -> None:
    heads, device = constants.shape[0], constants.device
    g, t = lane_coordinates(device)
    register = torch.arange(4, device=device)[:, None]
    for step in range(shape.constant_steps):
        entry = 8 * step + 4 * (register // 2) + t  # [4, lanes]
        angle = frequency[:, entry] * (g + 8 * (register % 2))
        word = _half2(_turned(constants[:, entry], angle))
        start = shape.constant_offset // 4 + step * 4 * LANES
        # a lane reads its four registers at once
        words[:, start : start + 4 * LANES] = word.transpose(1, 2).reshape(heads, -1)


def _put_words(words: Tensor, offset: int, entry_words: Tensor) -> None:
    """Word ``16 * pair + 4 * t + i`` belongs to entry ``16 * pair + 4 * i + t``."""
    heads, entries = entry_words.shape
    ordered = entry_words.reshape(heads, -1, 4, 4).transpose(2, 3).reshape(heads, -1)
    words[:, offset // 4 : offset // 4 + entries] = ordered.to(torch.int32)


def _map_words(plane: Tensor, rope: RopeSpec) -> Tensor:
    """Plane and the two query channels of each entry."""
    channel = rope.plane_channels(plane.device)
    return plane | (channel[plane, 0] << 8) | (channel[plane, 1] << 16)


def _turn_fractions(frequency: Tensor) -> Tensor:
    """Radians per position to turns in units of ``2**-32``, as signed 32-bit numbers."""
    fraction = (frequency / (2 * torch.pi) * 2.0**32).round().long() % 2**32
    return torch.where(fraction >= 2**31, fraction - 2**32, fraction)
