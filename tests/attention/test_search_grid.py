# SPDX-License-Identifier: Apache-2.0
"""The grid finds the nearest sum of two points, and keeps few candidates."""

import torch

from sphkv.attention.cuda.search_grid import CELLS, build_search_grid, joint_planes
from sphkv.attention.triton.search import build_search_table
from sphkv.codec.states import SphericalCodec
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import coded_tier
from sphkv.testing.cases import CacheCase, random_calibration, random_states


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
    for head in range(2):
        for at, joint in enumerate(joint_planes(table, head)):
            kinds.add(joint.half)
            plane = int(table.planes[head, joint.plane, 0])
            point = unit[head, :, plane] @ table.roots[head, joint.plane].view(2, 2).T
            second = table.seen[head, joint.second, joint.half or 0]
            if joint.half is not None:
                # codes beyond the fourth point of a half must not be named
                second = torch.cat([second[:: 1 + 3 * joint.half][:4], torch.full((12, 2), 1e3)])
            sums = (table.seen[head, joint.first, 0][:, None] + second).flatten(0, 1)
            box = grid.boxes[head, at]
            cell = ((point - box[:2]) * box[2:]).clamp(0, CELLS - 1).long()
            chosen = grid.candidates[head, at, cell[:, 0] * CELLS + cell[:, 1]].long()
            distance = torch.cdist(point.double(), sums.double())
            found = distance.gather(1, chosen).amin(1)
            is_long = (chosen[:, 1] == chosen[:, 0]) & (chosen[:, -1] != chosen[:, 0])
            assert float(is_long.float().mean()) < 0.1
            found = torch.where(is_long, distance.amin(1), found)
            torch.testing.assert_close(found, distance.amin(1), rtol=1e-6, atol=1e-9)
    assert kinds == {None, 0, 1}
