# SPDX-License-Identifier: Apache-2.0
"""Dense keys to radius and angle codes, and logits straight from the codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.codec import native
from sphkv.codec.affine import check_finite
from sphkv.codec.codebook import (
    CELL_BITS,
    PAIR_LEVELS,
    SLOT_LEVELS,
    AngleCodebook,
    PlaneCodebooks,
    find_nearest,
    nearest_point,
    point_kernels_for,
    sum_points,
    take_points,
)
from sphkv.core.rope import RopeSpec

# cosine between a key and its code below which the radius correction would blow up noise
_LEAST_COSINE = 0.2
_CHUNK_SCORES = 1 << 25
_SLOT_BLOCK = 8


@dataclass(frozen=True, slots=True, eq=False)
class SphericalCode:
    """Radius and angle codes of some keys.

    Attributes:
        codes: ``[heads, slots, tokens]`` uint8, each below 16.
        radius: ``[heads, tokens]`` float32; scales the coded direction, which has no unit norm.
    """

    codes: Tensor
    radius: Tensor


def encode_keys(
    keys: Tensor, positions: Tensor, codebook: AngleCodebook, rope: RopeSpec
) -> SphericalCode:
    """Code keys as radius and pre-RoPE angle codes.

    The radius is stored so that the coded key has the key's own length along the key: the
    logit of a query in a random direction is then unbiased.

    Args:
        keys: ``[heads, tokens, head_dim]`` as the model caches them, after RoPE.
        positions: ``[tokens]`` or ``[heads, tokens]`` integers.
        codebook: Slots of the layer and tier.
        rope: The layer's rotary embedding.

    Returns:
        Codes and radii. A key of norm zero gets radius zero.
    """
    _check_keys(keys, codebook, rope)
    keys = keys.float()
    radius = keys.norm(dim=-1)
    z = rope.unrotate(rope.to_planes(keys), positions)
    unit = z / radius.clamp(min=torch.finfo(torch.float32).tiny)[..., None, None]
    found = native.snap_to_slots(unit, codebook)
    if found is None:
        codes, coded = snap_to_slots(unit, codebook)
        cosine = (unit * coded).sum((-1, -2))
        length = _length(coded)
    else:
        codes, cosine, length = found
    return SphericalCode(codes, radius * _radius_gain(cosine, length))


def recode_keys(
    keys: Tensor, positions: Tensor, planes: PlaneCodebooks, cells: Tensor, rope: RopeSpec
) -> tuple[Tensor, Tensor]:
    """What tiers make of the same keys, up to the rounding of radii; waits for no device.

    Every plane is searched once per cell class, whichever tiers use it: the points of a class are
    the same in all of them.

    Args:
        keys: ``[heads, tokens, head_dim]`` float32 after RoPE, finite (checked on a CPU).
        positions: ``[heads, tokens]`` integers.
        planes: Fitted points of the layer.
        cells: ``[tiers, heads, planes]`` int64 cell class of each plane, an index of ``CELL_BITS``.
        rope: The layer's rotary embedding.

    Returns:
        Coded directions ``[tiers, heads, tokens, planes, 2]`` before RoPE and radii
        ``[tiers, heads, tokens]``, as ``encode_keys`` finds them.
    """
    if not keys.is_cuda:
        check_finite(keys, name="keys")
    radius = keys.norm(dim=-1)
    unit = rope.unrotate(rope.to_planes(keys), positions)
    unit = unit / radius.clamp(min=torch.finfo(torch.float32).tiny)[..., None, None]
    by_class = _code_cells(unit.transpose(1, 2), planes)  # [classes, heads, planes, tokens, 2]
    wanted = cells[..., None, None].expand(-1, -1, -1, *by_class.shape[3:])
    coded = by_class.gather(0, wanted).transpose(2, 3)
    return coded, radius * _radius_gain((unit * coded).sum((-1, -2)), _length(coded))


def _code_cells(by_plane: Tensor, planes: PlaneCodebooks) -> Tensor:
    """Coded points ``[classes, heads, planes, tokens, 2]`` of ``[heads, planes, tokens, 2]``."""
    if by_plane.is_cuda and (kernels := point_kernels_for(by_plane)) is not None:
        coded: Tensor = kernels.code_cells(by_plane, planes)
        return coded
    root = planes.metric_root.flatten(0, 1).mT
    x = torch.bmm(by_plane.flatten(0, 1), root)

    def nearest(rest: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest of points ``[n, levels, 2]``, and what it leaves over in the metric."""
        seen = torch.bmm(points, root)
        index = find_nearest(rest, seen)
        return take_points(points, index), rest - take_points(seen, index)

    pair, single, joint = (
        part.flatten(0, 1) for part in (planes.pair, planes.single, planes.joint)
    )
    half, tail = planes.halves.flatten(0, 1).unbind(1)
    first, second, third = planes.stages.flatten(0, 1).unbind(1)
    mean = planes.mean.flatten(0, 1)[:, None].expand(-1, x.shape[1], -1)
    coarse, rest = nearest(x, sum_points(first, second))
    found = [
        mean,
        nearest(x, pair)[0],
        nearest(x, single)[0],
        nearest(x, sum_points(joint, half))[0],
        coarse,
        coarse + nearest(rest, tail)[0],
        coarse + nearest(rest, third)[0],
    ]
    return torch.stack(found).view(len(found), *by_plane.shape)


def _radius_gain(cosine: Tensor, length: Tensor) -> Tensor:
    """What a key's norm is multiplied with; preserves the norm where the code points away."""
    return torch.where(cosine > _LEAST_COSINE * length, 1 / cosine, 1 / length.clamp(min=1e-6))


def _length(coded: Tensor) -> Tensor:
    return coded.square().sum((-1, -2)).sqrt()


def snap_to_slots(unit: Tensor, codebook: AngleCodebook) -> tuple[Tensor, Tensor]:
    """Nearest points in the query metric, plane by plane.

    Args:
        unit: ``[heads, tokens, planes, 2]`` pre-RoPE components of unit keys.
        codebook: Slots of the layer and tier.

    Returns:
        Codes ``[heads, slots, tokens]`` uint8 and the coded direction, shaped like ``unit``.
    """
    heads, tokens, _, _ = unit.shape
    codes = torch.zeros(heads, codebook.num_slots, tokens, dtype=torch.uint8, device=unit.device)
    coded = codebook.constant[:, None].expand_as(unit).clone()
    by_plane = unit.transpose(1, 2)  # [heads, planes, tokens, 2]
    for bits in CELL_BITS[1:]:
        head, plane = torch.nonzero(codebook.plane_bits == bits, as_tuple=True)
        for at in _chunks(len(head), tokens * (256 if bits > 4 else SLOT_LEVELS)):
            h, p = head[at], plane[at]
            stages = _stages(codebook, h, p, bits)
            root = codebook.metric_root[h, p].mT
            seen = [torch.bmm(stage.points, root) for stage in stages]
            index = _search(torch.bmm(by_plane[h, p], root), seen)
            coded[h, :, p] = sum(
                take_points(stage.points, i) for stage, i in zip(stages, index, strict=True)
            )
            for stage, i in zip(stages, index, strict=True):
                # both planes of a pair slot may be in this chunk, so their codes accumulate
                part = i.to(torch.uint8) << stage.shift[:, None]
                codes.index_put_((h, stage.slot), part, accumulate=True)
    return codes, coded


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """One of the slots, or halves of a slot, of some planes: their points add.

    Attributes:
        slot: ``[n]`` int64.
        shift: ``[n]`` uint8: 2 for the second plane of a pair slot.
        points: ``[n, 16, 2]``, or ``[n, 4, 2]`` of half a slot.
    """

    slot: Tensor
    shift: Tensor
    points: Tensor


def _stages(codebook: AngleCodebook, head: Tensor, plane: Tensor, bits: int) -> list[_Stage]:
    """What planes with ``bits`` bits own: single slots, adjacent, then half a pair slot."""
    owner = codebook.slot_plane[head] == plane[:, None, None]  # [n, slots, 2]
    slot = owner.any(-1).to(torch.uint8).argmax(-1)  # the first
    none = torch.zeros_like(slot, dtype=torch.uint8)
    stages = [_Stage(slot + k, none, codebook.points[head, slot + k, 0]) for k in range(bits // 4)]
    if bits % 4:
        singles = codebook.num_slots - codebook.num_pairs[head]
        is_pair = torch.arange(codebook.num_slots, device=head.device) >= singles[:, None]
        slot = (owner.any(-1) & is_pair).to(torch.uint8).argmax(-1)
        half = (~owner[torch.arange(len(head), device=head.device), slot, 0]).long()
        # the pair's second plane steps its code by four; take one period of either
        level = torch.arange(PAIR_LEVELS, device=head.device) * (1 + 3 * half)[:, None]
        points = codebook.points[head, slot, half]
        points = points.gather(1, level[..., None].expand(-1, -1, 2))
        stages.append(_Stage(slot, (2 * half).to(torch.uint8), points))
    return stages


def _search(x: Tensor, seen: list[Tensor]) -> list[Tensor]:
    """Codes of each stage: of the nearest sum of the first two, and of what that leaves over.

    Args:
        x: ``[n, tokens, 2]`` in the metric.
        seen: Points ``[n, levels, 2]`` of each stage in the metric.
    """
    if len(seen) == 1:
        return [nearest_point(x, seen[0])]
    sums, levels = sum_points(seen[0], seen[1]), seen[1].shape[1]
    joint = nearest_point(x, sums)
    index = [joint // levels, joint % levels]
    if len(seen) == 3:
        index.append(nearest_point(x - take_points(sums, joint), seen[2]))
    return index


def _chunks(rows: int, scores_per_row: int) -> list[slice]:
    step = max(1, _CHUNK_SCORES // max(1, scores_per_row))
    return [slice(at, at + step) for at in range(0, rows, step)]


def decode_directions(codes: Tensor, codebook: AngleCodebook) -> Tensor:
    """Coded pre-RoPE directions; for tests, demotion and measurements only.

    Args:
        codes: ``[heads, slots, tokens]`` uint8.
        codebook: Slots of the layer and tier.

    Returns:
        ``[heads, tokens, planes, 2]`` float32.
    """
    tokens = codes.shape[2]
    coded = codebook.constant.unsqueeze(2).expand(-1, -1, tokens, -1).clone()
    for half in range(2):
        picked = codebook.points[:, :, half].gather(
            2, codes.long().unsqueeze(-1).expand(-1, -1, -1, 2)
        )  # [heads, slots, tokens, 2]
        plane = codebook.slot_plane[:, :, half]
        coded.scatter_add_(1, plane[..., None, None].expand_as(picked), picked)
    return coded.transpose(1, 2)


def decode_keys(
    code: SphericalCode, positions: Tensor, codebook: AngleCodebook, rope: RopeSpec
) -> Tensor:
    """Dense keys after RoPE, ``[heads, tokens, head_dim]``; tests, demotion and fallback only."""
    z = decode_directions(code.codes, codebook) * code.radius[..., None, None]
    return rope.from_planes(rope.rotate(z, positions))


def angle_logits_reference(
    query: Tensor, code: SphericalCode, phase: tuple[Tensor, Tensor], codebook: AngleCodebook
) -> Tensor:
    """Score queries against coded keys without rebuilding the keys.

    A slot's point turned by the position phase is one term of the logit; terms are summed a
    few slots at a time, so no dense key exists at any moment.

    Args:
        query: ``[heads, group, planes, 2]`` float32 planes of queries after RoPE, scaled.
        code: Codes ``[heads, slots, tokens]`` and radii ``[heads, tokens]``.
        phase: Cosine and sine of the position phase, each ``[heads, planes, tokens]`` or
            ``[1, planes, tokens]``.
        codebook: Slots of the layer and tier.

    Returns:
        ``[heads, group, tokens]`` float32 logits.
    """
    heads, group, num_planes, _ = query.shape
    tokens = code.radius.shape[1]
    cos, sin = (part.expand(heads, -1, -1) for part in phase)
    logits = query.new_zeros(heads, group, tokens)
    for at in range(0, codebook.num_slots, _SLOT_BLOCK):
        block = slice(at, at + _SLOT_BLOCK)
        index = code.codes[:, block].long().unsqueeze(-1).expand(-1, -1, -1, 2)
        # the second half only matters where this block holds pair slots
        halves = (
            2 if bool((codebook.num_pairs > codebook.num_slots - at - _SLOT_BLOCK).any()) else 1
        )
        for half in range(halves):
            point = codebook.points[:, block, half].gather(2, index)
            plane = codebook.slot_plane[:, block, half]
            logits += _turned_products(query, point, plane, (cos, sin))
    if bool((codebook.plane_bits == 0).any()):
        every = torch.arange(num_planes, device=query.device).expand(heads, -1)
        point = codebook.constant.unsqueeze(2).expand(-1, -1, tokens, -1)
        for at in range(0, num_planes, _SLOT_BLOCK):
            block = slice(at, at + _SLOT_BLOCK)
            logits += _turned_products(query, point[:, block], every[:, block], (cos, sin))
    return logits * code.radius.unsqueeze(1)


def _turned_products(
    query: Tensor, point: Tensor, plane: Tensor, phase: tuple[Tensor, Tensor]
) -> Tensor:
    """Sum over a few slots of query . (point turned by the phase): ``[heads, group, tokens]``."""
    pick = plane.unsqueeze(-1).expand(-1, -1, point.shape[2])
    cos, sin = phase[0].gather(1, pick), phase[1].gather(1, pick)  # [heads, block, tokens]
    x, y = point.unbind(-1)
    turned = torch.cat([x * cos - y * sin, x * sin + y * cos], 1)
    chosen = query.gather(
        2, plane[:, None, :, None].expand(-1, query.shape[1], -1, 2)
    )  # [heads, group, block, 2]
    return torch.bmm(chosen.transpose(2, 3).flatten(2), turned)


def _check_keys(keys: Tensor, codebook: AngleCodebook, rope: RopeSpec) -> None:
    heads = codebook.plane_bits.shape[0]
    if keys.dim() != 3 or keys.shape[0] != heads or keys.shape[2] != rope.head_dim:
        raise ValueError(
            f"keys must be [{heads}, tokens, {rope.head_dim}], got {tuple(keys.shape)}"
        )
    check_finite(keys, name="keys")
