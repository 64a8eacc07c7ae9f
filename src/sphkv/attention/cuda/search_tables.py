# SPDX-License-Identifier: Apache-2.0
"""What the encode kernel reads of a layer: a record per plane and per slot, and search grids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sphkv.attention.cuda.geometry import LANES
from sphkv.attention.cuda.search_grid import build_search_grid, joint_planes
from sphkv.attention.triton.search import SearchTable
from sphkv.codec.clipping import CLIP_RANGE, NUM_CELLS, clip_weights
from sphkv.codec.codebook import PAIR_LEVELS, SLOT_LEVELS

PLANE_WORDS = 12
SLOT_WORDS = 80

_ROW_BYTES = 256  # of a channel in shared memory


@dataclass(frozen=True, slots=True, eq=False)
class EncodeTables:
    """Tables of one layer and tier.

    Attributes:
        kinds: ``[heads, 5]`` int32, see ``SearchTable.counts``.
        planes: ``[heads, planes, 12]`` int32, ``Plane`` of the kernel.
        slots: ``[heads, 80 * slots]`` float32, ``Slots`` of the kernel.
        places: ``[heads, slots]`` int16, where the kernel keeps codes.
        grid: ``[heads, most, 48 * 48, 8]`` uint8, see ``SearchGrid.candidates``.
    """

    kinds: Tensor
    planes: Tensor
    slots: Tensor
    places: Tensor
    grid: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors but ``kinds``, which belong to the search table."""
        return sum(each.nbytes for each in (self.planes, self.slots, self.places, self.grid))

    @classmethod
    def join(cls, parts: Sequence[EncodeTables]) -> EncodeTables:
        """Tables of the heads of all parts; grids get room for as many planes as any has."""
        most = max(part.grid.shape[1] for part in parts)
        grids = (pad(part.grid, (0, 0, 0, 0, 0, most - part.grid.shape[1])) for part in parts)
        return cls(
            torch.cat([part.kinds for part in parts]),
            torch.cat([part.planes for part in parts]),
            torch.cat([part.slots for part in parts]),
            torch.cat([part.places for part in parts]),
            torch.cat([*grids]),
        )

    def split(self, num_parts: int) -> list[EncodeTables]:
        """The heads in so many equal parts, which keep no memory of their own."""
        names = ("kinds", "planes", "slots", "places", "grid")
        each = (getattr(self, name).chunk(num_parts) for name in names)
        return [EncodeTables(*part) for part in zip(*each, strict=True)]


def build_encode_tables(table: SearchTable) -> EncodeTables:
    """Records of all heads."""
    joint = joint_planes(table)
    grid = build_search_grid(table, joint)
    heads, num_planes, _ = table.planes.shape
    planes = torch.zeros(
        heads, num_planes, PLANE_WORDS, dtype=torch.int32, device=table.planes.device
    )
    rows = _shared_rows(table.planes[..., 1:3])
    planes[..., 0] = rows[..., 0] | rows[..., 1] << 16
    singles = table.planes[..., 3].long()
    planes[..., 1] = (joint.first | singles << 16 | joint.number << 24).to(torch.int32)
    turn = table.turns[table.planes[..., 0].long()]
    planes[..., 2:4] = turn[..., None].view(torch.int32)
    planes[..., 4:8] = table.roots.view(torch.int32)
    boxes = grid.boxes.gather(1, joint.number[..., None].expand(-1, -1, 4))
    boxes = boxes.masked_fill(~joint.is_joint[..., None], 0.0)
    # a plane without bits has its constant there
    rank = torch.arange(num_planes, device=rows.device)[:, None]
    is_bare = rank >= num_planes - table.counts[:, None, 4:]
    boxes[..., :2] = torch.where(is_bare, table.constants, boxes[..., :2])
    planes[..., 8:] = boxes.view(torch.int32)
    slots = _SlotKinds.of(table)
    places = _code_places(slots, joint.first, singles, rows)
    words = _slot_words(table, slots, joint.first, singles)
    return EncodeTables(table.counts, planes, words, places, grid.candidates)


@dataclass(frozen=True, slots=True, eq=False)
class _SlotKinds:
    """What every slot of every head is, all ``[heads, slots]``.

    Attributes:
        plane: int64 place of its plane in ``SearchTable.planes``; the first one's of a pair slot.
        is_lead: bool, the first slot of a plane of 12 bits.
        is_last: bool, the last slot of such a plane.
        is_alone: bool, the slot of a plane of 4 bits.
        is_pair: bool.
    """

    plane: Tensor
    is_lead: Tensor
    is_last: Tensor
    is_alone: Tensor
    is_pair: Tensor

    @classmethod
    def of(cls, table: SearchTable) -> _SlotKinds:
        heads, num_slots = table.seen.shape[:2]
        num_12, num_8, num_4, pairs, _ = table.counts.long().split(1, 1)
        slot = torch.arange(num_slots, device=table.seen.device).expand(heads, -1).contiguous()
        ends = table.planes[..., 3].long().cumsum(1)
        alone = torch.searchsorted(ends, slot, right=True).clamp(max=ends.shape[1] - 1)
        pair = slot - (num_slots - pairs)
        shared = (num_12 + num_8 + num_4 + 2 * pair).clamp(0, ends.shape[1] - 1)
        first_4 = 3 * num_12 + 2 * num_8
        return cls(
            torch.where(pair >= 0, shared, alone),
            (slot < 3 * num_12) & (slot % 3 == 0),
            (slot < 3 * num_12) & (slot % 3 == 2),
            (slot >= first_4) & (slot < first_4 + num_4),
            pair >= 0,
        )


def _shared_rows(channel: Tensor) -> Tensor:
    """Where the kernel's transposed load leaves channels in shared memory, in bytes.

    A piece of 16 bytes lies at its own offset in the row, XOR-ed with the lowest bits.
    """
    row = channel // 32 * 32 + channel % 8 // 2 * 8 + channel % 32 // 8 * 2 + channel % 2
    return row * _ROW_BYTES + row % 8 * 16


def _code_places(slots: _SlotKinds, first: Tensor, singles: Tensor, rows: Tensor) -> Tensor:
    """Where slots leave their codes: in the rows of their own plane, which has been read by then.

    A pair slot is kept behind the single slots of its first plane. A word lies at its own offset in
    half a row, XOR-ed with the lowest bits: a warp that collects codes of 16 slots at once finds
    them in different banks.

    Args:
        slots: What slots are.
        first: ``[heads, planes]`` first single slot of each plane.
        singles: ``[heads, planes]`` single slots of each plane.
        rows: ``[heads, planes, 2]`` where the channels of each plane begin.

    Returns:
        ``[heads, slots]`` int16, in bytes.
    """
    slot = torch.arange(slots.plane.shape[1], device=rows.device)
    k = slot - first.gather(1, slots.plane)
    k = torch.where(slots.is_pair, singles.gather(1, slots.plane), k)
    head = torch.arange(len(rows), device=rows.device)[:, None]
    row = rows[head, slots.plane, k // 2] // _ROW_BYTES * _ROW_BYTES
    place = row + k % 2 * (_ROW_BYTES // 2) + slot % 4 * 8 + slot // 16 % 4 * 32
    return place.to(torch.int16)


def _slot_words(table: SearchTable, slots: _SlotKinds, first: Tensor, singles: Tensor) -> Tensor:
    """``Slots`` of the kernel, ``[heads, 80 * slots]``: what is searched, biases, stored points.

    Sums of points are searched as they are, points alone by their scores.
    """
    heads, num_slots = slots.plane.shape
    seen, points = table.seen[:, :, 0], table.points[:, :, 0]
    roots = table.roots.view(heads, -1, 2, 2)
    head = torch.arange(heads, device=seen.device)[:, None]
    factors, biases, centre = _scores(seen)
    of_keys, key_biases = _scores_of_keys(seen, roots[head, slots.plane])
    is_last, is_alone = slots.is_last[..., None], slots.is_alone[..., None]
    found = torch.where(is_alone, of_keys.flatten(2), seen.flatten(2))
    found = torch.where(is_last, factors.flatten(2), found)
    bias = torch.where(is_last, biases, torch.where(is_alone, key_biases, 0.0))
    # the first slot of three knows the centre of the last
    centre = centre.roll(-2, 1)
    bias[..., :2] = torch.where(slots.is_lead[..., None], centre, bias[..., :2])
    paired, stored = torch.zeros_like(found), torch.zeros_like(found)
    for half in range(2):
        plane = (slots.plane + half).clamp(max=singles.shape[1] - 1)
        own = singles.gather(1, plane)
        level = torch.arange(PAIR_LEVELS, device=seen.device) * (1 + 3 * half)
        words, centre = _half_words(table.seen[:, :, half, level], roots[head, plane], own)
        paired[..., half * SLOT_LEVELS : half * SLOT_LEVELS + words.shape[2]] = words
        at = half * 2 * PAIR_LEVELS
        stored[..., at : at + 2 * PAIR_LEVELS] = table.points[:, :, half, level].flatten(2)
        # behind two slots the first of them knows the centre; others write past the last slot
        target = torch.where(slots.is_pair & (own == 2), first.gather(1, plane), num_slots)
        padded = pad(bias[..., :2], (0, 0, 0, 1))
        padded.scatter_(1, target[..., None].expand(-1, -1, 2), centre)
        bias[..., :2] = padded[:, :-1]
    is_pair = slots.is_pair[..., None]
    found = torch.where(is_pair, paired, found)
    stored = torch.where(is_pair, stored, points.flatten(2))
    return torch.cat([part.flatten(1) for part in (found, bias, stored)], 1)


def _half_words(points: Tensor, roots: Tensor, singles: Tensor) -> tuple[Tensor, Tensor]:
    """What is searched of four points of half a slot, ``[..., 12]``, and their centres.

    Alone they are ranked by their scores of keys, behind one slot they are summed as they are, and
    behind two slots they are ranked by the scores of what those leave over.

    Args:
        points: ``[..., 4, 2]`` as queries see them.
        roots: ``[..., 2, 2]`` of their planes.
        singles: ``[...]`` single slots of their planes.
    """
    key_factors, key_biases = _scores_of_keys(points, roots)
    of_keys = torch.cat([key_factors.flatten(-2), key_biases], -1)
    factors, biases, centre = _scores(points)
    of_rest = torch.cat([factors.flatten(-2), biases], -1)
    as_they_are = torch.cat([points.flatten(-2), torch.zeros_like(biases)], -1)
    own = singles[..., None]
    return torch.where(own == 0, of_keys, torch.where(own == 1, as_they_are, of_rest)), centre


def _scores(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factors that rank points by their distance to ``w``: the nearest has the largest score.

    With ``s`` counted from the centre, ``s . w - |s|^2 / 2`` falls as the distance grows. The bias
    makes the largest score of any ``w`` positive: the centre is a mean, so that some point has
    ``s . w >= 0``.

    Args:
        points: ``[..., levels, 2]``.

    Returns:
        x and y of all levels ``[..., 2, levels]``, biases ``[..., levels]`` and the centres
        ``[..., 2]``.
    """
    centre = points.mean(-2)
    around = points - centre[..., None, :]
    half_square = around.square().sum(-1) / 2
    return around.mT, half_square.amax(-1, keepdim=True) - half_square, centre


def _scores_of_keys(points: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
    """The same for keys ``x`` that are seen as ``w = R x``, with ``R`` folded into the factors.

    ``s . (R x - c) + bias`` is ``(R^T s) . x + (bias - s . c)``.

    Args:
        points: ``[..., levels, 2]`` as queries see them.
        roots: ``[..., 2, 2]``, ``R`` of each.

    Returns:
        Factors ``[..., 2, levels]`` and biases ``[..., levels]``.
    """
    factors, biases, centre = _scores(points.double())
    folded = biases - (factors * centre[..., None]).sum(-2)
    return (roots.double().mT @ factors).float(), folded.float()


def clip_fragments(bits: int) -> Tensor:
    """Weights of the clipping ratios as lanes of the kernel hold them; see ``clip_weights``.

    Returns:
        ``[cells / 32, 3, 32, 4, 4]`` uint8: low and high bytes of the first weight, then the
        second. Lane ``(g, t)`` has ratios ``g`` and ``g + 8`` of cells ``4 * t ...`` of each 16.
        Nothing for a width that is not clipped.
    """
    if bits not in CLIP_RANGE:
        return torch.empty(0, dtype=torch.uint8)
    along, square = clip_weights(bits)
    rows = torch.stack([along & 255, along >> 8, square]).to(torch.uint8)
    # [kind, upper, g, step, half, t, cell] to [step, kind, g, t, half, upper, cell]
    split = rows.view(3, 2, 8, NUM_CELLS // 32, 2, 4, 4).permute(3, 0, 2, 5, 4, 1, 6)
    return split.reshape(-1, 3, LANES, 4, 4).contiguous()
