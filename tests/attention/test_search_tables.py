# SPDX-License-Identifier: Apache-2.0
"""Tables of the encode kernels: scores rank points by distance, lanes have their weights."""

import itertools

import pytest
import torch

from sphkv.attention.cuda.search_grid import joint_planes
from sphkv.attention.cuda.search_tables import build_encode_tables, clip_fragments
from sphkv.attention.triton.search import build_search_table
from sphkv.codec.clipping import CLIP_RANGE, clip_weights
from sphkv.codec.states import SphericalCodec
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import coded_tier
from sphkv.testing.cases import CacheCase, random_calibration


@pytest.fixture(scope="module", params=[2.0, 3.0, 4.0, 5.5])
def tables(request):
    geometry = CacheCase(head_dim=64, num_kv_heads=2, group_size=2).geometry()
    rope = RopeSpec.from_config({"rope_theta": 10_000.0}, 64)
    codec = SphericalCodec(random_calibration(geometry, rope))
    book = codec.codebook(0, coded_tier(request.param, 4))
    table = build_search_table(book, rope, "cpu")
    return table, build_encode_tables(table)


def _split(built, head):
    """Tables, biases and stored points of all slots of a head."""
    slots = built.slots[head].view(5, -1)
    parts = slots[:2].flatten(), slots[2], slots[3:].flatten()
    return tuple(part.view(slots.shape[1] // 16, -1) for part in parts)


def test_the_nearest_point_has_the_largest_score_and_it_is_positive(tables):
    table, built = tables
    draw = torch.Generator().manual_seed(0)
    for head in range(2):
        found, bias, stored = _split(built, head)
        roots = table.roots[head].view(-1, 2, 2)
        num_12, num_8, num_4, pairs, _ = table.counts[head].tolist()
        joint, first_4 = num_12 + num_8, 3 * num_12 + 2 * num_8
        for k in range(num_4):
            slot = first_4 + k
            scores = torch.cat([found[slot], bias[slot]])
            _check_scores(scores, roots[joint + k], None, table.seen[head, slot, 0], draw)
            torch.testing.assert_close(stored[slot].view(16, 2), table.points[head, slot, 0])
        for slot in range(2, 3 * num_12, 3):
            scores, centre = torch.cat([found[slot], bias[slot]]), bias[slot - 2, :2]
            _check_scores(scores, torch.eye(2), centre, table.seen[head, slot, 0], draw)
        first = table.planes[head, :, 3].cumsum(0) - table.planes[head, :, 3]
        for k in range(pairs):
            slot, at = len(found) - pairs + k, joint + num_4 + 2 * k
            for half, stride in ((0, 1), (1, 4)):
                words, points = found[slot, 16 * half :], table.seen[head, slot, half][::stride][:4]
                singles = int(table.planes[head, at + half, 3])
                if singles == 0:
                    _check_scores(words[:12], roots[at + half], None, points, draw)
                elif singles == 1:
                    torch.testing.assert_close(words[:8].view(4, 2), points)
                else:
                    centre = bias[first[at + half], :2]
                    _check_scores(words[:12], torch.eye(2), centre, points, draw)


def test_planes_know_their_slots_and_grids(tables):
    table, built = tables
    word = built.planes[..., 1]
    slot, singles, grid = word & 0xFFFF, word >> 16 & 0xFF, word >> 24 & 0xFF
    assert torch.equal(singles, table.planes[..., 3])
    joint = joint_planes(table)
    for head in range(2):
        for at, plane in enumerate(joint.is_joint[head].nonzero()[:, 0].tolist()):
            assert int(grid[head, plane]) == at
            assert int(slot[head, plane]) == int(joint.first[head, plane])


def _check_scores(scores, root, centre, points, draw):
    """Scores of keys ``root^-1 w``, or of ``w`` as it lies from the centre."""
    x, y, bias = scores.view(3, -1).double()
    spread = points.std()
    w = torch.randn(200, 2, generator=draw).double() * spread * 5 + points.mean(0)
    key = torch.linalg.solve(root.double(), w.T).T - (0 if centre is None else centre.double())
    score = key[:, :1] * x + key[:, 1:] * y + bias
    distance = torch.cdist(w, points.double())
    found = distance.gather(1, score.argmax(1, keepdim=True))[:, 0]
    torch.testing.assert_close(found, distance.amin(1), rtol=1e-4, atol=1e-7)
    assert float(score.amax(1).min()) > -1e-6 * float(spread) ** 2


def test_planes_keep_turns_roots_and_distinct_rows(tables):
    table, built = tables
    rows = _rows(built).flatten(1).sort(1).values
    row = torch.arange(64, dtype=torch.int32)
    assert torch.equal(rows, (256 * row + row % 8 * 16).expand(2, -1))
    turns = built.planes[..., 2:4].contiguous().view(torch.int64)[..., 0]
    assert torch.equal(turns, table.turns[table.planes[..., 0].long()])
    assert torch.equal(built.planes[..., 4:8].view(torch.float32), table.roots)


def test_codes_have_places_in_the_rows_of_their_own_plane(tables):
    table, built = tables
    for head in range(2):
        pairs = int(table.counts[head, 3])
        words = (built.places[head, :, None].long() ^ 4 * torch.arange(32)).sort(1).values
        assert len(words.unique()) == words.numel()
        singles = table.planes[head, :, 3].tolist()
        first_pair, first_shared = sum(singles), int(table.counts[head, :3].sum())
        owners = [plane for plane, count in enumerate(singles) for _ in range(count)]
        owners += [first_shared + 2 * k for k in range(pairs)]
        assert len(owners) == first_pair + pairs == len(words)
        for slot, plane in enumerate(owners):
            own = set((_rows(built)[head, plane] // 256).tolist())
            assert set((words[slot] // 256).tolist()) <= own


def _rows(built):
    """Where the channels of each plane begin."""
    return torch.stack([built.planes[..., 0] & 0xFFFF, built.planes[..., 0] >> 16], -1)


@pytest.mark.parametrize("bits", CLIP_RANGE)
def test_lanes_have_the_weights_of_their_ratios_and_cells(bits):
    along, square = clip_weights(bits)
    fragments = clip_fragments(bits).long()
    for lane, (step, half) in itertools.product(range(32), itertools.product(range(4), range(2))):
        g, t = divmod(lane, 4)
        cell = 32 * step + 16 * half + 4 * t + torch.arange(4)
        for upper in range(2):
            low, high, squares = fragments[step, :, lane, 2 * half + upper]
            assert torch.equal(low + 256 * high, along[g + 8 * upper, cell])
            assert torch.equal(squares, square[g + 8 * upper, cell])


def test_eight_bits_have_no_weights():
    assert clip_fragments(8).numel() == 0
