# SPDX-License-Identifier: Apache-2.0
"""Bits per plane by exact reverse water-filling, and the slots that carry them."""

from __future__ import annotations

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
_CELL_UNITS = tuple(bits // _UNIT_BITS for bits in CELL_BITS)
_PAIR_CLASS = CELL_BITS.index(2)


def allocate_plane_bits(
    distortion: Tensor, num_slots: int, *, pair_step: int = PAIR_STEP
) -> Tensor:
    """Choose a cell class per plane that minimises distortion at exactly ``num_slots`` nibbles.

    Dynamic programming over planes, vectorised over heads: the state is (bits spent, number of
    2-bit planes modulo ``2 * pair_step``), so the answer is the optimum, not a greedy one.

    Args:
        distortion: ``[heads, planes, 5]`` error by cell class, in the order of ``CELL_BITS``.
        num_slots: Nibbles per key.
        pair_step: Pair slots must be a multiple of this.

    Returns:
        ``[heads, planes]`` int64 bits per plane.
    """
    heads, planes, _ = distortion.shape
    most = planes * CELL_BITS[-1] // _SLOT_BITS
    if not 0 <= num_slots <= most:
        raise ValueError(f"num_slots must be in [0, {most}] for {planes} planes, got {num_slots}")
    units = num_slots * _SLOT_BITS // _UNIT_BITS
    period = 2 * pair_step
    cost = distortion.double().cpu()
    best = torch.full((heads, units + 1, period), torch.inf, dtype=torch.float64)
    best[:, 0, 0] = 0.0
    choices = torch.zeros(planes, heads, units + 1, period, dtype=torch.uint8)
    for plane in range(planes):
        best, choices[plane] = _relax(best, cost[:, plane])
    if bool(torch.isinf(best[:, units, 0]).any()):
        raise ValueError(f"{num_slots} slots cannot be spread over {planes} planes")
    bits = torch.zeros(heads, planes, dtype=torch.int64)
    row = torch.arange(heads)
    spent = torch.full((heads,), units)
    pairs = torch.zeros(heads, dtype=torch.int64)
    for plane in reversed(range(planes)):
        cell = choices[plane][row, spent, pairs].long()
        bits[:, plane] = torch.tensor(CELL_BITS)[cell]
        spent = spent - torch.tensor(_CELL_UNITS)[cell]
        pairs = (pairs - (cell == _PAIR_CLASS).long()) % period
    return bits


def _relax(best: Tensor, cost: Tensor) -> tuple[Tensor, Tensor]:
    """Add one plane. ``best [heads, units + 1, period]``, ``cost [heads, 5]``."""
    candidates = []
    for cell, units in enumerate(_CELL_UNITS):
        moved = torch.full_like(best, torch.inf)
        if units <= best.shape[1] - 1:
            moved[:, units:] = best[:, : best.shape[1] - units]
        if cell == _PAIR_CLASS:
            moved = moved.roll(1, dims=2)
        candidates.append(moved + cost[:, cell, None, None])
    value, choice = torch.stack(candidates).min(0)
    return value, choice.to(torch.uint8)


def build_angle_codebook(
    planes: PlaneCodebooks, num_slots: int, *, pair_step: int = PAIR_STEP
) -> AngleCodebook:
    """Lay out the slots of one layer at one tier.

    Args:
        planes: Fitted points of every plane.
        num_slots: Nibbles per key of the tier.
        pair_step: Pair slots of a head are a multiple of this.

    Returns:
        The slots, single ones first, by falling bits of their plane.
    """
    bits = allocate_plane_bits(planes.distortion, num_slots, pair_step=pair_step)
    heads = bits.shape[0]
    slot_plane = torch.zeros(heads, num_slots, 2, dtype=torch.int64)
    points = torch.zeros(heads, num_slots, 2, SLOT_LEVELS, 2)
    num_pairs = torch.zeros(heads, dtype=torch.int64)
    for head in range(heads):
        at = 0
        for plane in torch.argsort(bits[head], descending=True, stable=True).tolist():
            stages = _stages_of(planes, head, plane, int(bits[head, plane]))
            for stage in stages:
                slot_plane[head, at] = plane
                points[head, at, 0] = stage
                at += 1
        paired = torch.nonzero(bits[head] == CELL_BITS[_PAIR_CLASS])[:, 0].reshape(-1, 2)
        num_pairs[head] = len(paired)
        for first, second in paired.tolist():
            slot_plane[head, at] = torch.tensor([first, second])
            code = torch.arange(SLOT_LEVELS)
            points[head, at, 0] = planes.pair[head, first].cpu()[code % PAIR_LEVELS]
            points[head, at, 1] = planes.pair[head, second].cpu()[code // PAIR_LEVELS]
            at += 1
    constant = torch.where(bits.unsqueeze(-1) == 0, planes.mean.cpu(), torch.zeros(()))
    return AngleCodebook(
        plane_bits=bits,
        num_pairs=num_pairs,
        slot_plane=slot_plane,
        points=points,
        constant=constant,
        metric_root=planes.metric_root.cpu(),
    ).to(planes.mean.device)


def _stages_of(planes: PlaneCodebooks, head: int, plane: int, bits: int) -> list[Tensor]:
    """Points of each single slot of one plane."""
    if bits == _SLOT_BITS:
        return [planes.single[head, plane].cpu()]
    if bits > _SLOT_BITS:
        return list(planes.stages[head, plane, : bits // _SLOT_BITS].cpu())
    return []
