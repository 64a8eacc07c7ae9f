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
    nearest_point,
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
        length = coded.square().sum((-1, -2)).sqrt()
    else:
        codes, cosine, length = found
    # fall back to preserving the norm where the code points away from the key
    gain = torch.where(cosine > _LEAST_COSINE * length, 1 / cosine, 1 / length.clamp(min=1e-6))
    return SphericalCode(codes, radius * gain)


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
            slot, half = _locate(codebook, h, p)
            root = codebook.metric_root[h, p]
            x = torch.bmm(by_plane[h, p], root.transpose(1, 2))
            index, stages = _search(x, codebook, (h, slot, half), bits)
            coded[h, :, p] = sum_stages(codebook, (h, slot, half), index)
            shift = torch.where(half == 1, 2, 0).to(torch.uint8)[:, None]
            for stage in range(stages):
                # both planes of a pair slot may be in this chunk, so their codes accumulate
                part = index[stage].to(torch.uint8) << shift
                codes.index_put_((h, slot + stage), part, accumulate=True)
    return codes, coded


def _search(
    x: Tensor, codebook: AngleCodebook, where: tuple[Tensor, Tensor, Tensor], bits: int
) -> tuple[list[Tensor], int]:
    """Codes of each stage for planes with ``bits`` bits. ``x [n, tokens, 2]`` in the metric."""
    h, slot, half = where
    plane = codebook.slot_plane[h, slot, half]
    root = codebook.metric_root[h, plane]

    def seen_by_queries(stage: int) -> Tensor:
        return torch.bmm(codebook.points[h, slot + stage, half], root.transpose(1, 2))

    if bits == 2:
        # the pair's second plane steps its code by four; take one period of either
        stride = torch.where(half == 1, PAIR_LEVELS, 1)[:, None]
        rows = torch.arange(PAIR_LEVELS, device=x.device) * stride
        points = seen_by_queries(0).gather(1, rows[..., None].expand(-1, -1, 2))
        return [nearest_point(x, points)], 1
    if bits == 4:
        return [nearest_point(x, seen_by_queries(0))], 1
    sums = sum_points(seen_by_queries(0), seen_by_queries(1))
    joint = nearest_point(x, sums)
    index = [joint // SLOT_LEVELS, joint % SLOT_LEVELS]
    if bits == 12:
        index.append(nearest_point(x - take_points(sums, joint), seen_by_queries(2)))
    return index, len(index)


def sum_stages(
    codebook: AngleCodebook, where: tuple[Tensor, Tensor, Tensor], index: list[Tensor]
) -> Tensor:
    """Coded components ``[n, tokens, 2]`` of planes whose stage codes are ``index``."""
    h, slot, half = where
    stride = torch.where(half == 1, PAIR_LEVELS, 1)[:, None]
    total = take_points(codebook.points[h, slot, half], index[0] * stride)
    for stage in range(1, len(index)):
        total = total + take_points(codebook.points[h, slot + stage, half], index[stage])
    return total


def _locate(codebook: AngleCodebook, head: Tensor, plane: Tensor) -> tuple[Tensor, Tensor]:
    """First slot of each (head, plane), and which half of the slot it is."""
    owner = codebook.slot_plane[head] == plane[:, None, None]  # [n, slots, 2]
    slot = owner.any(-1).to(torch.uint8).argmax(-1)
    row = torch.arange(len(head), device=head.device)
    return slot, (~owner[row, slot, 0]).long()


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
