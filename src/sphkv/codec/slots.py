# SPDX-License-Identifier: Apache-2.0
"""Bits per plane by exact reverse water-filling, and the slots that carry them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.codec.codebook import (
    CELL_BITS,
    PAIR_LEVELS,
    SLOT_LEVELS,
    AngleCodebook,
    PlaneCodebooks,
)
from sphkv.core.devices import Replay, constant

PAIR_STEP = 2
"""Pair slots of a head come in multiples of this, so that kernels see few shapes."""

_UNIT_BITS = 2
_SLOT_BITS = 4
_GROUP_PAIRS = 8
_CELL_UNITS = tuple(bits // _UNIT_BITS for bits in CELL_BITS)
_HAS_HALF = tuple(bits % _SLOT_BITS > 0 for bits in CELL_BITS)


def most_pairs(num_planes: int, num_slots: int) -> int | None:
    """Most pair slots of a head; None for any number.

    Kernels look pair slots up twice, eight at a time. From two bits per element on one such group
    has to do in heads of up to 128 elements; below that planes of two bits are worth more.
    """
    return max(_GROUP_PAIRS, num_planes // 8) if num_slots >= num_planes else None


def allocate_plane_bits(
    distortion: Tensor,
    num_slots: int,
    *,
    pair_step: int = PAIR_STEP,
    max_pairs: int | None = None,
) -> Tensor:
    """Choose a cell class per plane that minimises distortion at exactly ``num_slots`` nibbles.

    Dynamic programming over planes, vectorised over heads: the state is (bits spent, number of
    planes with half a slot, modulo ``2 * pair_step`` if any number will do), so the answer is the
    optimum, not a greedy one.

    Args:
        distortion: ``[heads, planes, 7]`` error by cell class, in the order of ``CELL_BITS``.
        num_slots: Nibbles per key.
        pair_step: Pair slots must be a multiple of this.
        max_pairs: Most pair slots of a head; any number if None.

    Returns:
        ``[heads, planes]`` int64 bits per plane.
    """
    return _allocate(distortion, (num_slots,), pair_step=pair_step, max_pairs=max_pairs)[0]


def _allocate(
    distortion: Tensor, slots: tuple[int, ...], *, pair_step: int, max_pairs: int | None
) -> Tensor:
    """``allocate_plane_bits`` of several numbers of slots, ``[len(slots), heads, planes]``.

    The table of the most slots has the optima of all fewer ones in it.
    """
    heads, planes, _ = distortion.shape
    most = planes * CELL_BITS[-1] // _SLOT_BITS
    for num_slots in slots:
        if not 0 <= num_slots <= most:
            raise ValueError(
                f"num_slots must be in [0, {most}] for {planes} planes, got {num_slots}"
            )
    period, device = 2 * pair_step, distortion.device
    units, counts = max(slots) * _SLOT_BITS // _UNIT_BITS, 2 * (max_pairs or 0) + 1
    if max_pairs is None:
        counts = period
    before = _states_before(units, counts, max_pairs is None, device)  # [cells, states]
    num_states = before.shape[1]
    cost = distortion.double().unbind(1)
    # the state behind the last cannot be reached
    best = torch.full((heads, num_states + 1), torch.inf, dtype=torch.float64, device=device)
    best[:, 0] = 0.0
    choices = torch.empty(planes, heads, num_states, dtype=torch.uint8, device=device)
    for plane in range(planes):
        candidates = best[:, before.flatten()].view(heads, *before.shape)
        value, choice = (candidates + cost[plane][..., None]).min(1)
        best[:, :num_states], choices[plane] = value, choice
    bits_of = constant(slots, device=device) * _SLOT_BITS // _UNIT_BITS
    ends = best[:, :num_states].view(heads, -1, counts)[:, bits_of, ::period]
    least, pairs = ends.min(2)  # [heads, slots]
    if device.type == "cpu" and bool(torch.isinf(least).any()):
        raise ValueError(f"{slots} slots cannot be spread over {planes} planes")
    state, cells = bits_of * counts + period * pairs, []
    for plane in reversed(range(planes)):
        cell = choices[plane].gather(1, state).long()
        cells.append(cell)
        state = before.flatten()[cell * num_states + state]
    bits: Tensor = constant(CELL_BITS, device=device)[torch.stack(cells[::-1])]
    return bits.permute(2, 1, 0)


@functools.lru_cache(maxsize=32)
def _states_before(units: int, counts: int, wraps: bool, device: torch.device) -> Tensor:
    """``[cells, states]`` int64: the state from which a plane's cell leads to each state.

    A state is bits spent times ``counts`` plus planes with half a slot; one past the last stands
    for none.
    """
    unit, count = torch.arange(units + 1)[:, None], torch.arange(counts)
    found = []
    for cell_units, has_half in zip(_CELL_UNITS, _HAS_HALF, strict=True):
        old_unit, old_count = unit - cell_units, count - int(has_half)
        if wraps:
            old_count = old_count % counts
        is_state = (old_unit >= 0) & (old_count >= 0)
        found.append(torch.where(is_state, old_unit * counts + old_count, (units + 1) * counts))
    with torch.inference_mode(False):
        return torch.stack(found).flatten(1).to(device)


def order_planes(bits: Tensor) -> Tensor:
    """Planes in the order of their slots.

    Planes of whole slots come first, by falling bits; then those that share one, likewise, so that
    the single slots of a pair's two planes follow each other in the order of the pairs.

    Args:
        bits: ``[heads, planes]`` int64 bits of each plane.

    Returns:
        ``[heads, planes]`` int64.
    """
    is_halved = bits % _SLOT_BITS > 0
    return (is_halved * (CELL_BITS[-1] + 1) - bits).argsort(dim=1, stable=True)


def order_slots(bits: Tensor) -> tuple[list[int], list[tuple[int, int]]]:
    """Plane of each single slot and planes of each pair slot of a head; see ``order_planes``.

    Args:
        bits: ``[planes]`` bits of each plane.
    """
    order, of_plane = order_planes(bits[None])[0].tolist(), bits.tolist()
    halved = [plane for plane in order if of_plane[plane] % _SLOT_BITS]
    single = [plane for plane in order for _ in range(of_plane[plane] // _SLOT_BITS)]
    return single, list(zip(halved[::2], halved[1::2], strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class SlotLayout:
    """Which of a layer's fitted points every slot of a tier has: a codebook without its points.

    Attributes:
        plane_bits: ``[heads, planes]`` uint8 cell class of each plane.
        slot_plane: ``[heads, slots, 2]`` uint8; as ``AngleCodebook.slot_plane``.
        source: ``[heads, slots, 2]`` uint8 set of points of each half: of a single slot the 4-bit
            cell, the first stage of the 6-bit cell or one of three stages, of a pair slot's
            planes the 2-bit cell or the last stage of 6 or 10 bits.
    """

    plane_bits: Tensor
    slot_plane: Tensor
    source: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.plane_bits.nbytes + self.slot_plane.nbytes + self.source.nbytes

    @classmethod
    def join(cls, parts: Sequence[SlotLayout], device: torch.device) -> SlotLayout:
        """Layouts of the heads of all parts, wherever these are, on a device."""
        each = ([getattr(part, name).to(device) for part in parts] for name in cls.__slots__)
        return cls(*(torch.cat(tensors) for tensors in each))

    def split(self, num_heads: int) -> list[SlotLayout]:
        """Layouts of so many heads each."""
        parts = (each.split(num_heads) for each in (self.plane_bits, self.slot_plane, self.source))
        return [SlotLayout(*part) for part in zip(*parts, strict=True)]

    def codebook(self, planes: PlaneCodebooks) -> AngleCodebook:
        """The slots with the points of the layer they were laid out for, where those are."""
        heads, num_slots = self.slot_plane.shape[:2]
        device = planes.mean.device
        bits, slot_plane, source = (
            part.to(device).long() for part in (self.plane_bits, self.slot_plane, self.source)
        )
        num_pairs = (bits % _SLOT_BITS > 0).sum(1) // 2
        slot = torch.arange(num_slots, device=device)
        is_pair = (slot >= num_slots - num_pairs[:, None])[..., None, None]
        head = torch.arange(heads, device=device)[:, None]
        code = torch.arange(SLOT_LEVELS, device=device)
        whole = torch.cat([planes.single[:, :, None], planes.joint[:, :, None], planes.stages], 2)
        half = torch.cat([planes.pair[:, :, None], planes.halves], 2)
        halves = half[head[..., None], slot_plane, source.clamp(max=half.shape[2] - 1)]
        points = torch.zeros(heads, num_slots, 2, SLOT_LEVELS, 2, device=device)
        points[:, :, 0] = torch.where(
            is_pair,
            halves[:, :, 0, code % PAIR_LEVELS],
            whole[head, slot_plane[..., 0], source[..., 0]],
        )
        points[:, :, 1] = torch.where(is_pair, halves[:, :, 1, code // PAIR_LEVELS], 0.0)
        return AngleCodebook(
            plane_bits=bits,
            num_pairs=num_pairs,
            slot_plane=slot_plane,
            points=points,
            constant=torch.where(bits.unsqueeze(-1) == 0, planes.mean, 0.0),
            metric_root=planes.metric_root,
        )


def lay_out_slots(
    planes: PlaneCodebooks, num_slots: int, *, pair_step: int = PAIR_STEP
) -> SlotLayout:
    """Divide a layer's bits among its planes and lay out the slots of one tier.

    Args:
        planes: Fitted points of every plane.
        num_slots: Nibbles per key of the tier.
        pair_step: Pair slots of a head are a multiple of this.

    Returns:
        The slots, in the order of ``order_planes``.
    """
    return lay_out_tiers(planes.distortion, (num_slots,), pair_step=pair_step)[num_slots]


def lay_out_tiers(
    distortion: Tensor, slots: Sequence[int], *, pair_step: int = PAIR_STEP
) -> dict[int, SlotLayout]:
    """``lay_out_slots`` of several tiers at once; waits for no device.

    Args:
        distortion: ``[heads, planes, 7]`` error of every plane by cell class; heads may be those
            of several layers.
        slots: Nibbles per key of each tier.
        pair_step: Pair slots of a head are a multiple of this.

    Returns:
        The slots of each tier by number.
    """
    num_planes = distortion.shape[1]
    found: dict[int, SlotLayout] = {}
    limits = {num_slots: most_pairs(num_planes, num_slots) for num_slots in slots}
    for limit in dict.fromkeys(limits.values()):
        alike = tuple(num_slots for num_slots in limits if limits[num_slots] == limit)
        (bits,) = _bit_allocator(alike, pair_step, limit)(distortion)
        found |= {each: _lay_out(of_tier, each) for each, of_tier in zip(alike, bits, strict=True)}
    return found


@functools.lru_cache(maxsize=32)
def _bit_allocator(slots: tuple[int, ...], pair_step: int, max_pairs: int | None) -> Replay:
    """What divides bits for so many slots each."""
    return Replay(
        lambda distortion: (_allocate(distortion, slots, pair_step=pair_step, max_pairs=max_pairs),)
    )


def _lay_out(bits: Tensor, num_slots: int) -> SlotLayout:
    """Slots of planes with ``bits [heads, planes]``."""
    num_planes, device = bits.shape[1], bits.device
    order = order_planes(bits)
    own = bits.gather(1, order)
    singles = own // _SLOT_BITS
    ends = singles.cumsum(1)
    num_pairs = (bits % _SLOT_BITS > 0).sum(1, keepdim=True) // 2
    slot = torch.arange(num_slots, device=device).expand(len(bits), -1).contiguous()
    pair = slot - (num_slots - num_pairs)
    is_pair = pair >= 0
    # planes that share slots are the last ones, two to a slot
    alone = torch.searchsorted(ends, slot, right=True).clamp(max=num_planes - 1)
    shared = (num_planes - 2 * num_pairs + 2 * pair).clamp(min=0)
    low, high = torch.where(is_pair, shared, alone), torch.where(is_pair, shared + 1, alone)
    cell_low, cell_high = own.gather(1, low), own.gather(1, high)
    stage = slot - (ends - singles).gather(1, alone)
    # in the order of ``SlotLayout.codebook``
    whole = torch.where(cell_low == _SLOT_BITS + _UNIT_BITS, 1, 2 + stage)
    whole = torch.where(cell_low == _SLOT_BITS, 0, whole)
    first = torch.where(is_pair, cell_low // _SLOT_BITS, whole)
    second = torch.where(is_pair, cell_high // _SLOT_BITS, 0)
    plane = torch.stack([order.gather(1, low), order.gather(1, high)], -1)
    source = torch.stack([first, second], -1)
    return SlotLayout(*(part.to(torch.uint8) for part in (bits, plane, source)))


def build_angle_codebook(
    planes: PlaneCodebooks, num_slots: int, *, pair_step: int = PAIR_STEP
) -> AngleCodebook:
    """The slots of one layer at one tier with their points; see ``lay_out_slots``."""
    return lay_out_slots(planes, num_slots, pair_step=pair_step).codebook(planes)
