# SPDX-License-Identifier: Apache-2.0
"""What the encode kernel reads of a layer: a record per plane and per slot, and search grids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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


def build_encode_tables(table: SearchTable) -> EncodeTables:
    """Records of all heads."""
    grid = build_search_grid(table)
    heads, num_slots = table.seen.shape[:2]
    device, num_planes = table.seen.device, table.planes.shape[1]
    planes = torch.zeros(heads, num_planes, PLANE_WORDS, dtype=torch.int32, device=device)
    rows = _shared_rows(table.planes[..., 1:3])
    planes[..., 0] = rows[..., 0] | rows[..., 1] << 16
    turn = table.turns[table.planes[..., 0].long()]
    planes[..., 2:4] = turn[..., None].view(torch.int32)
    planes[..., 4:8] = table.roots.view(torch.int32)
    slots = torch.zeros(heads, num_slots * SLOT_WORDS, device=device)
    boxes = torch.zeros(heads, num_planes, 4, device=device)
    places = []
    for head in range(heads):
        joint = [plane.plane for plane in joint_planes(table, head)]
        boxes[head, joint] = grid.boxes[head, : len(joint)]
        first, singles = _first_slots(table, head)
        number = torch.zeros_like(first)
        number[joint] = torch.arange(len(joint), device=device)
        planes[head, :, 1] = (first | singles << 16 | number << 24).to(torch.int32)
        _fill_head(table, head, boxes[head], slots[head])
        places.append(_code_places(table.counts[head].tolist(), first, singles, rows[head]))
    planes[..., 8:] = boxes.view(torch.int32)
    return EncodeTables(table.counts, planes, slots, torch.stack(places), grid.candidates)


def _first_slots(table: SearchTable, head: int) -> tuple[Tensor, Tensor]:
    """First single slot of each plane of a head and how many it has, int64."""
    singles = table.planes[head, :, 3].long()
    return singles.cumsum(0) - singles, singles


def _shared_rows(channel: Tensor) -> Tensor:
    """Where the kernel's transposed load leaves channels in shared memory, in bytes.

    A piece of 16 bytes lies at its own offset in the row, XOR-ed with the lowest bits.
    """
    row = channel // 32 * 32 + channel % 8 // 2 * 8 + channel % 32 // 8 * 2 + channel % 2
    return row * _ROW_BYTES + row % 8 * 16


def _code_places(kinds: list[int], first: Tensor, singles: Tensor, rows: Tensor) -> Tensor:
    """Where slots leave their codes: in the rows of their own plane, which has been read by then.

    A pair slot is kept behind the single slots of its first plane. A word lies at its own offset in
    half a row, XOR-ed with the lowest bits: a warp that collects codes of 16 slots at once finds
    them in different banks.

    Args:
        kinds: Planes of 12, 8 and 4 bits, pair slots, bare planes.
        first: ``[planes]`` first single slot of each plane.
        singles: ``[planes]`` single slots of each plane.
        rows: ``[planes, 2]`` where the channels of each plane begin.

    Returns:
        ``[slots]`` int16, in bytes.
    """
    device = first.device
    plane = torch.arange(len(first), device=device).repeat_interleave(singles)
    k = torch.arange(len(plane), device=device) - first[plane]
    paired = sum(kinds[:3]) + 2 * torch.arange(kinds[3], device=device)
    plane, k = torch.cat([plane, paired]), torch.cat([k, singles[paired]])
    slot = torch.arange(len(plane), device=device)
    row = rows[plane, k // 2] // _ROW_BYTES * _ROW_BYTES
    place = row + k % 2 * (_ROW_BYTES // 2) + slot % 4 * 8 + slot // 16 % 4 * 32
    return place.to(torch.int16)


def _fill_head(table: SearchTable, head: int, boxes: Tensor, slots: Tensor) -> None:
    """Write constants of bare planes ``[planes, 4]`` and slots ``[80 * slots]`` of a head."""
    num_12, num_8, num_4, pairs, _ = table.counts[head].tolist()
    seen, points, roots = table.seen[head], table.points[head], table.roots[head].view(-1, 2, 2)
    sizes = [words * SLOT_LEVELS * len(seen) for words in (2, 1, 2)]
    found, bias, stored = (part.view(len(seen), -1) for part in slots.split(sizes))
    joint, first_4, first_pair = num_12 + num_8, 3 * num_12 + 2 * num_8, len(seen) - pairs
    bare = joint + num_4 + 2 * pairs
    boxes[bare:, :2] = table.constants[head, bare:]
    # sums of points are searched as they are, points alone by their scores
    found[:first_pair] = seen[:first_pair, 0].flatten(1)
    stored[:first_pair] = points[:first_pair, 0].flatten(1)
    last = 3 * torch.arange(num_12, device=seen.device) + 2
    factors, biases, centre = _scores(seen[last, 0])
    found[last], bias[last] = factors.flatten(1), biases
    bias[last - 2, :2] = centre
    end_4 = first_4 + num_4
    factors, biases = _scores_of_keys(seen[first_4:end_4, 0], roots[joint : joint + num_4])
    found[first_4:end_4], bias[first_4:end_4] = factors.flatten(1), biases
    first, singles = (part[joint + num_4 : bare] for part in _first_slots(table, head))
    for half in range(2):
        level = torch.arange(PAIR_LEVELS, device=seen.device) * (1 + 3 * half)
        four, root = seen[first_pair:, half][:, level], roots[joint + num_4 + half : bare : 2]
        words, centre = _half_words(four, root, singles[half::2])
        found[first_pair:, half * SLOT_LEVELS : half * SLOT_LEVELS + words.shape[1]] = words
        is_last = singles[half::2] == 2
        bias[first[half::2][is_last], :2] = centre[is_last]
        at, words = half * 2 * PAIR_LEVELS, points[first_pair:, half][:, level].flatten(1)
        stored[first_pair:, at : at + 2 * PAIR_LEVELS] = words


def _half_words(points: Tensor, roots: Tensor, singles: Tensor) -> tuple[Tensor, Tensor]:
    """What is searched of four points of half a slot, ``[slots, 12]``, and their centres.

    Alone they are ranked by their scores of keys, behind one slot they are summed as they are, and
    behind two slots they are ranked by the scores of what those leave over.

    Args:
        points: ``[slots, 4, 2]`` as queries see them.
        roots: ``[slots, 2, 2]`` of their planes.
        singles: ``[slots]`` single slots of their planes.
    """
    of_keys = torch.cat([part.flatten(1) for part in _scores_of_keys(points, roots)], 1)
    factors, biases, centre = _scores(points)
    of_rest = torch.cat([factors.flatten(1), biases], 1)
    as_they_are = torch.cat([points.flatten(1), torch.zeros_like(biases)], 1)
    kinds = torch.stack([of_keys, as_they_are, of_rest], 1)  # [slots, 3, 12]
    return kinds[torch.arange(len(points), device=points.device), singles], centre


def _scores(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factors that rank points by their distance to ``w``: the nearest has the largest score.

    With ``s`` counted from the centre, ``s . w - |s|^2 / 2`` falls as the distance grows. The bias
    makes the largest score of any ``w`` positive: the centre is a mean, so that some point has
    ``s . w >= 0``.

    Args:
        points: ``[slots, levels, 2]``.

    Returns:
        x and y of all levels ``[slots, 2, levels]``, biases ``[slots, levels]`` and the centres
        ``[slots, 2]``.
    """
    centre = points.mean(1)
    around = points - centre[:, None]
    half_square = around.square().sum(-1) / 2
    return around.mT, half_square.amax(1, keepdim=True) - half_square, centre


def _scores_of_keys(points: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
    """The same for keys ``x`` that are seen as ``w = R x``, with ``R`` folded into the factors.

    ``s . (R x - c) + bias`` is ``(R^T s) . x + (bias - s . c)``.

    Args:
        points: ``[slots, levels, 2]`` as queries see them.
        roots: ``[slots, 2, 2]``, ``R`` of each.

    Returns:
        Factors ``[slots, 2, levels]`` and biases ``[slots, levels]``.
    """
    factors, biases, centre = _scores(points.double())
    folded = biases - (factors * centre[:, :, None]).sum(1)
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
