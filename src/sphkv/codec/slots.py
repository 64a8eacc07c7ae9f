# SPDX-License-Identifier: Apache-2.0
"""Bits per plane by exact reverse water-filling, and the slots that carry them."""

from __future__ import annotations

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
    heads, planes, _ = distortion.shape
    most = planes * CELL_BITS[-1] // _SLOT_BITS
    if not 0 <= num_slots <= most:
        raise ValueError(f"num_slots must be in [0, {most}] for {planes} planes, got {num_slots}")
    units = num_slots * _SLOT_BITS // _UNIT_BITS
    period = 2 * pair_step
    counts = period if max_pairs is None else 2 * max_pairs + 1
    cost = distortion.double().cpu()
    best = torch.full((heads, units + 1, counts), torch.inf, dtype=torch.float64)
    best[:, 0, 0] = 0.0
    choices = torch.zeros(planes, heads, units + 1, counts, dtype=torch.uint8)
    for plane in range(planes):
        best, choices[plane] = _relax(best, cost[:, plane], wraps=max_pairs is None)
    least, pairs = best[:, units, ::period].min(1)
    if bool(torch.isinf(least).any()):
        raise ValueError(f"{num_slots} slots cannot be spread over {planes} planes")
    bits = torch.zeros(heads, planes, dtype=torch.int64)
    row = torch.arange(heads)
    spent, halves = torch.full((heads,), units), period * pairs
    for plane in reversed(range(planes)):
        cell = choices[plane][row, spent, halves].long()
        bits[:, plane] = torch.tensor(CELL_BITS)[cell]
        spent = spent - torch.tensor(_CELL_UNITS)[cell]
        halves = (halves - torch.tensor(_HAS_HALF)[cell].long()) % counts
    return bits


def _relax(best: Tensor, cost: Tensor, *, wraps: bool) -> tuple[Tensor, Tensor]:
    """Add one plane. ``best [heads, units + 1, counts]``, ``cost [heads, 7]``."""
    candidates = []
    for cell, units in enumerate(_CELL_UNITS):
        moved = torch.full_like(best, torch.inf)
        if units <= best.shape[1] - 1:
            moved[:, units:] = best[:, : best.shape[1] - units]
        if _HAS_HALF[cell]:
            moved = moved.roll(1, dims=2)
            if not wraps:
                moved[:, :, 0] = torch.inf
        candidates.append(moved + cost[:, cell, None, None])
    value, choice = torch.stack(candidates).min(0)
    return value, choice.to(torch.uint8)


def order_slots(bits: Tensor) -> tuple[list[int], list[tuple[int, int]]]:
    """Plane of each single slot and planes of each pair slot of a head.

    Planes of whole slots come first, by falling bits; then those that share one, likewise, so that
    the single slots of a pair's two planes follow each other in the order of the pairs.

    Args:
        bits: ``[planes]`` bits of each plane.
    """
    falling = torch.argsort(bits, descending=True, stable=True).tolist()
    of_plane = bits.tolist()
    halved = [plane for plane in falling if of_plane[plane] % _SLOT_BITS]
    whole = [plane for plane in falling if not of_plane[plane] % _SLOT_BITS]
    single = [plane for plane in whole + halved for _ in range(of_plane[plane] // _SLOT_BITS)]
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

    def codebook(self, planes: PlaneCodebooks) -> AngleCodebook:
        """The slots with the points of the layer they were laid out for."""
        heads, num_slots = self.slot_plane.shape[:2]
        bits, slot_plane = self.plane_bits.long(), self.slot_plane.long()
        source = self.source.long()
        num_pairs = (bits % _SLOT_BITS > 0).sum(1) // 2
        is_pair = (torch.arange(num_slots) >= num_slots - num_pairs[:, None])[..., None, None]
        head, code = torch.arange(heads)[:, None], torch.arange(SLOT_LEVELS)
        whole = torch.cat([planes.single[:, :, None], planes.joint[:, :, None], planes.stages], 2)
        half = torch.cat([planes.pair[:, :, None], planes.halves], 2)
        halves = half[head[..., None], slot_plane, source.clamp(max=half.shape[2] - 1)]
        points = torch.zeros(heads, num_slots, 2, SLOT_LEVELS, 2)
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
            constant=torch.where(bits.unsqueeze(-1) == 0, planes.mean, torch.zeros(())),
            metric_root=planes.metric_root,
        )


def lay_out_slots(
    planes: PlaneCodebooks, num_slots: int, *, pair_step: int = PAIR_STEP
) -> SlotLayout:
    """Divide a layer's bits among its planes and lay out the slots of one tier.

    Args:
        planes: Fitted points of every plane, on the CPU.
        num_slots: Nibbles per key of the tier.
        pair_step: Pair slots of a head are a multiple of this.

    Returns:
        The slots, in the order of ``order_slots``.
    """
    num_planes = planes.mean.shape[1]
    bits = allocate_plane_bits(
        planes.distortion,
        num_slots,
        pair_step=pair_step,
        max_pairs=most_pairs(num_planes, num_slots),
    )
    slot_plane, source = [], []
    for of_head in bits:
        cells = of_head.tolist()
        single, paired = order_slots(of_head)
        starts = {plane: at for at, plane in reversed(list(enumerate(single)))}
        whole = [_whole_source(cells[plane], at - starts[plane]) for at, plane in enumerate(single)]
        slot_plane.append([(plane, plane) for plane in single] + paired)
        source.append(
            [(each, 0) for each in whole]
            + [(cells[low] // _SLOT_BITS, cells[high] // _SLOT_BITS) for low, high in paired]
        )
    return SlotLayout(
        bits.to(torch.uint8),
        torch.tensor(slot_plane, dtype=torch.uint8),
        torch.tensor(source, dtype=torch.uint8),
    )


def build_angle_codebook(
    planes: PlaneCodebooks, num_slots: int, *, pair_step: int = PAIR_STEP
) -> AngleCodebook:
    """The slots of one layer at one tier with their points; see ``lay_out_slots``."""
    device, planes = planes.mean.device, planes.to("cpu")
    return lay_out_slots(planes, num_slots, pair_step=pair_step).codebook(planes).to(device)


def _whole_source(bits: int, stage: int) -> int:
    """Points of a single slot, in the order of ``SlotLayout.codebook``."""
    if bits == _SLOT_BITS:
        return 0
    return 1 if bits == _SLOT_BITS + _UNIT_BITS else 2 + stage
