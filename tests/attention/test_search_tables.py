# SPDX-License-Identifier: Apache-2.0
"""Tables of the encode kernels: scores rank points by distance, bins give the codec's sums."""

import pytest
import torch

from sphkv.attention.cuda.search_tables import BINNED_BITS, ClipCells, build_encode_tables
from sphkv.attention.triton.search import build_search_table
from sphkv.codec.rope import RopeSpec
from sphkv.codec.states import SphericalCodec
from sphkv.codec.values import _least_squares, _starts
from sphkv.core.tiers import coded_tier
from sphkv.testing.cases import CacheCase, random_calibration


@pytest.fixture(scope="module", params=[2.0, 6.0])
def tables(request):
    geometry = CacheCase(head_dim=64, num_kv_heads=2, group_size=2).geometry()
    rope = RopeSpec.from_config({"rope_theta": 10_000.0}, 64)
    codec = SphericalCodec(random_calibration(geometry, rope))
    book = codec.codebook(0, coded_tier(request.param, 4))
    table = build_search_table(book, rope, "cpu")
    return table, build_encode_tables(table)


def test_the_nearest_point_has_the_largest_score_and_it_is_positive(tables):
    table, built = tables
    draw = torch.Generator().manual_seed(0)
    for head in range(2):
        num_12, num_8, num_4, pairs, _ = table.counts[head].tolist()
        joint, first_4 = num_12 + num_8, 3 * num_12 + 2 * num_8
        for k in range(num_4):
            slot = built.slots[head, first_4 + k]
            place = built.planes[head, joint + k, 8:10].view(torch.float32)
            _check_scores(slot[:48], slot[48:50], table.seen[head, first_4 + k, 0], draw)
            torch.testing.assert_close(place, -slot[48:50])
            points = slot[64:].view(16, 2)
            torch.testing.assert_close(points, table.points[head, first_4 + k, 0])
        for k in range(num_12):
            slot = built.slots[head, 3 * k + 2]
            _check_scores(slot[:48], slot[48:50], table.seen[head, 3 * k + 2, 0], draw)
        for k in range(pairs):
            slot, at = first_4 + num_4 + k, joint + num_4 + 2 * k
            for half, stride in ((0, 1), (1, 4)):
                centre = -built.planes[head, at + half, 8:10].view(torch.float32)
                scores = built.slots[head, slot, 12 * half : 12 * half + 12]
                _check_scores(scores, centre, table.seen[head, slot, half][::stride][:4], draw)


def _check_scores(scores, centre, points, draw):
    x, y, bias = scores.view(3, -1).double()
    spread = points.std()
    w = torch.randn(200, 2, generator=draw).double() * spread * 5 + points.mean(0)
    from_centre = w - centre.double()
    score = from_centre[:, :1] * x + from_centre[:, 1:] * y + bias
    distance = torch.cdist(w, points.double())
    found = distance.gather(1, score.argmax(1, keepdim=True))[:, 0]
    torch.testing.assert_close(found, distance.amin(1), rtol=1e-4, atol=1e-7)
    assert float(score.amax(1).min()) > -1e-6 * float(spread) ** 2


def test_planes_keep_turns_roots_and_distinct_rows(tables):
    table, built = tables
    rows = built.planes[..., :2].flatten(1).sort(1).values
    assert torch.equal(rows, torch.arange(64, dtype=torch.int32).expand(2, -1))
    turns = built.planes[..., 2:4].contiguous().view(torch.int64)[..., 0]
    assert torch.equal(turns, table.turns[table.planes[..., 0].long()])
    assert torch.equal(built.planes[..., 4:8].view(torch.float32), table.roots)


@pytest.mark.parametrize("bits", BINNED_BITS)
def test_bins_give_what_each_clipping_ratio_gives(bits):
    clips = ClipCells.of_bits(bits)
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(bits)).abs()
    unit = (x / x.amax(1, keepdim=True)).double()
    cell = (unit * clips.cells).floor().long()
    member = torch.nn.functional.one_hot(clips.bins()[cell].long(), clips.num_bins).double()
    total, count = (member * unit[..., None]).sum(1), member.sum(1)  # [states, bins]
    weights = clips.weights().view(-1, 8, 4, 2, 2, 4).permute(3, 4, 1, 0, 2, 5).reshape(2, 16, -1)
    levels, squares = weights.double()
    assert bool((levels[15] == 1).all())
    for ratio, start in enumerate(_starts(bits)):
        step, gain = _least_squares(unit, torch.full_like(unit[:, :1], start), bits)
        along = total @ levels[ratio] + unit.sum(1) / 2
        square = count @ squares[ratio] + 128 / 4
        torch.testing.assert_close(along / square, step[:, 0])
        torch.testing.assert_close(along.square() / square, gain[:, 0])
