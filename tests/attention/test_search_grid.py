# SPDX-License-Identifier: Apache-2.0
"""The grid finds the nearest sum of two points, and keeps few candidates."""

import torch

from sphkv.attention.cuda import search_grid
from sphkv.attention.cuda.search_grid import (
    CELLS,
    build_search_grid,
    find_candidates,
    joint_planes,
)
from sphkv.attention.triton.grid import candidates_of_cells
from sphkv.attention.triton.search import build_search_table
from sphkv.codec.states import SphericalCodec
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import coded_tier
from sphkv.testing.cases import CacheCase, random_calibration, random_states

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


def test_candidates_hold_the_nearest_sum():
    geometry = CacheCase(head_dim=64, num_kv_heads=2, group_size=2).geometry()
    rope = RopeSpec.from_config({"rope_theta": 10_000.0}, 64)
    codec = SphericalCodec(random_calibration(geometry, rope))
    table = build_search_table(codec.codebook(0, coded_tier(4.0, 4)), rope, "cpu")
    grid = build_search_grid(table)
    keys = random_states(geometry, rope, 256, first=5)[0].float()
    unit = rope.unrotate(rope.to_planes(keys), torch.arange(5, 261))
    unit = unit / keys.norm(dim=-1)[..., None, None]
    kinds = set()
    joint = joint_planes(table)
    for head in range(2):
        for at, place in enumerate(joint.is_joint[head].nonzero()[:, 0].tolist()):
            assert int(joint.number[head, place]) == at
            first, slot, half = (
                int(part[head, place]) for part in (joint.first, joint.second, joint.half)
            )
            kinds.add(half)
            plane = int(table.planes[head, place, 0])
            point = unit[head, :, plane] @ table.roots[head, place].view(2, 2).T
            second = table.seen[head, slot, max(half, 0)]
            if half >= 0:
                # codes beyond the fourth point of a half must not be named
                second = torch.cat([second[:: 1 + 3 * half][:4], torch.full((12, 2), 1e3)])
            sums = (table.seen[head, first, 0][:, None] + second).flatten(0, 1)
            box = grid.boxes[head, at]
            cell = ((point - box[:2]) * box[2:]).clamp(0, CELLS - 1).long()
            chosen = grid.candidates[head, at, cell[:, 0] * CELLS + cell[:, 1]].long()
            distance = torch.cdist(point.double(), sums.double())
            found = distance.gather(1, chosen).amin(1)
            is_long = (chosen[:, 1] == chosen[:, 0]) & (chosen[:, -1] != chosen[:, 0])
            assert float(is_long.float().mean()) < 0.1
            found = torch.where(is_long, distance.amin(1), found)
            torch.testing.assert_close(found, distance.amin(1), rtol=1e-6, atol=1e-9)
    assert kinds == {-1, 0, 1}


def test_the_kernel_names_the_same_candidates(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    sums = torch.randn(2, 16, 1, 2, generator=draw) + torch.randn(2, 1, 16, 2, generator=draw) / 4
    sums, is_sum = sums.flatten(1, 2), torch.ones(2, 256, dtype=torch.bool)
    is_sum[1] = torch.arange(256) % 16 < 4
    given = []

    def listen(*grid):
        given.append(grid)
        return cell_candidates(*grid)

    cell_candidates = search_grid._cell_candidates
    monkeypatch.setattr(search_grid, "_cell_candidates", listen)
    right, _ = find_candidates(sums, is_sum)
    sums, is_sum, lines, middle = (
        torch.stack(part).to(DEVICE) for part in zip(*given, strict=True)
    )
    found = candidates_of_cells(sums, is_sum, lines, middle, block=32 if HAS_GPU else 256)
    is_other = (found.cpu() != right).any(-1)
    # coarse cells have rivals of their own, and sums as near as another may change places
    assert float(is_other.float().mean()) < 0.01
    for number, cell in is_other.nonzero().tolist():
        named = found[number, cell].tolist()
        if named[1] == named[0] != named[-1]:
            continue  # all are searched
        u, v = divmod(cell, CELLS)
        line = lines[number].cpu().double()
        corners = torch.cartesian_prod(line[u : u + 2, 0], line[v : v + 2, 1])
        square = torch.cdist(corners, sums[number].cpu().double()).square()
        for code in set(is_sum[number].cpu().nonzero()[:, 0].tolist()) - set(named):
            is_beaten = (square[:, named] <= (1 + 1e-6) * square[:, [code]]).all(0)
            assert bool(is_beaten.any()), (number, cell, code)
