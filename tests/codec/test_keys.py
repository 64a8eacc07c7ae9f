# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import torch

from sphkv.codec.codebook import (
    CELL_BITS,
    CodebookFit,
    PlaneCodebooks,
    fit_plane_codebooks,
)
from sphkv.codec.keys import (
    angle_logits_reference,
    decode_directions,
    decode_keys,
    encode_keys,
    snap_to_slots,
)
from sphkv.codec.slots import SlotLayout, allocate_plane_bits, build_angle_codebook
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.testing.cases import random_calibration, random_states

ROPE = RopeSpec.from_config({"rope_theta": 1e4}, 64)
GEOMETRY = KVGeometry(1, 2, 4, 64)


@pytest.fixture(scope="module")
def calibration():
    return random_calibration(GEOMETRY, ROPE, num_tokens=400)


def phases(rope, positions):
    phase = rope.phases(positions).T[None]
    return phase.cos(), phase.sin()


@pytest.mark.parametrize("num_slots", [2, 8, 16, 24, 32, 48, 64, 96])
def test_logits_from_codes_equal_logits_of_the_decoded_key(calibration, num_slots):
    codebook = calibration.codebook(0, num_slots)
    positions = torch.arange(500, 500 + 173)
    keys, _, queries = random_states(GEOMETRY, ROPE, 173, first=500)
    code = encode_keys(keys, positions, codebook, ROPE)
    query = queries[:, -1].reshape(2, 2, 64)
    logits = angle_logits_reference(ROPE.to_planes(query), code, phases(ROPE, positions), codebook)
    decoded = decode_keys(code, positions, codebook, ROPE)
    expected = torch.einsum("hgd,htd->hgt", query.double(), decoded.double())
    assert (logits - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_codes_name_the_direction_that_was_measured(calibration):
    keys, _, _ = random_states(GEOMETRY, ROPE, 90)
    z = ROPE.unrotate(ROPE.to_planes(keys), torch.arange(90))
    unit = z / keys.norm(dim=-1)[..., None, None]
    for num_slots in (16, 32, 64):
        codebook = calibration.codebook(0, num_slots)
        codes, coded = snap_to_slots(unit, codebook)
        torch.testing.assert_close(decode_directions(codes, codebook), coded)


def test_every_plane_gets_its_nearest_point(calibration):
    """No other code of any single slot, pair half or two-stage sum is nearer in the metric."""
    keys, _, _ = random_states(GEOMETRY, ROPE, 20)
    z = ROPE.unrotate(ROPE.to_planes(keys), torch.arange(20))
    unit = z / keys.norm(dim=-1)[..., None, None]
    seen = set()
    for num_slots in (32, 48):
        codebook = calibration.codebook(0, num_slots)
        _, coded = snap_to_slots(unit, codebook)
        root = codebook.metric_root
        error = torch.einsum("hnij,htnj->htni", root, unit - coded).square().sum(-1)
        for head, plane in itertools.product(range(2), range(32)):
            bits = int(codebook.plane_bits[head, plane])
            if bits not in (2, 4, 6, 8):
                continue
            seen.add(bits)
            options = torch.zeros(1, 2)
            for slot in (codebook.slot_plane[head] == plane).any(-1).nonzero()[:, 0].tolist():
                half = int(codebook.slot_plane[head, slot, 0] != plane)
                points = codebook.points[head, slot, half]
                options = (options[:, None] + points).flatten(0, 1)
            offset = unit[head, :, plane, None] - options[None]
            best = torch.einsum("ij,tkj->tki", root[head, plane], offset).square().sum(-1).amin(1)
            torch.testing.assert_close(error[head, :, plane], best, rtol=1e-4, atol=1e-7)
    assert seen == {2, 4, 6, 8}


def test_planes_may_own_single_slots_and_half_a_pair_slot(calibration):
    """The codes of such planes are read from all their slots, single ones first."""
    found = set()
    for num_slots in (24, 32, 48, 64):
        codebook = calibration.codebook(0, num_slots)
        singles = num_slots - codebook.num_pairs
        for head, plane in itertools.product(range(2), range(32)):
            bits = int(codebook.plane_bits[head, plane])
            owner = (codebook.slot_plane[head] == plane).any(-1)
            slots = owner.nonzero()[:, 0]
            found.add(bits)
            assert int((slots < singles[head]).sum()) == bits // 4
            assert int((slots >= singles[head]).sum()) == (bits % 4) // 2
    assert found >= {2, 4, 6, 8, 10}


def test_error_shrinks_with_slots_and_radius_keeps_the_key(calibration):
    keys, _, _ = random_states(GEOMETRY, ROPE, 300)
    positions = torch.arange(300)
    errors = []
    for num_slots in (8, 16, 32, 48, 64):
        codebook = calibration.codebook(0, num_slots)
        decoded = decode_keys(
            encode_keys(keys, positions, codebook, ROPE), positions, codebook, ROPE
        )
        errors.append(float((decoded - keys).square().mean() / keys.square().mean()))
        along = (decoded * keys).sum(-1) / keys.square().sum(-1)
        torch.testing.assert_close(along, torch.ones_like(along), rtol=1e-3, atol=1e-3)
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < 5e-3


def test_positions_do_not_change_the_codes(calibration):
    """The same pre-RoPE key far out in the text has the same codes, up to rounding."""
    codebook = calibration.codebook(0, 32)
    plain = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(3))
    near = encode_keys(ROPE.apply(plain, torch.arange(50)), torch.arange(50), codebook, ROPE)
    far_positions = torch.arange(1_000_000, 1_000_050)
    far = encode_keys(ROPE.apply(plain, far_positions), far_positions, codebook, ROPE)
    assert (near.codes == far.codes).float().mean() > 0.999


def test_bad_keys(calibration):
    codebook = calibration.codebook(0, 16)
    keys, _, _ = random_states(GEOMETRY, ROPE, 5)
    with pytest.raises(ValueError, match=r"\[2, tokens, 64\]"):
        encode_keys(keys[:1], torch.arange(5), codebook, ROPE)
    for bad in (torch.nan, torch.inf):
        broken = keys.clone()
        broken[0, 0, 0] = bad
        with pytest.raises(ValueError, match="keys"):
            encode_keys(broken, torch.arange(5), codebook, ROPE)
    zero = encode_keys(torch.zeros_like(keys), torch.arange(5), codebook, ROPE)
    assert torch.equal(zero.radius, torch.zeros(2, 5))
    empty = encode_keys(keys[:, :0], torch.arange(0), codebook, ROPE)
    assert empty.codes.shape == (2, 16, 0)


def brute_force(distortion, num_slots, pair_step, max_pairs=None):
    best = None
    for cells in itertools.product(range(len(CELL_BITS)), repeat=distortion.shape[0]):
        bits = [CELL_BITS[c] for c in cells]
        halves = sum(b % 4 > 0 for b in bits)
        if sum(bits) != 4 * num_slots or halves % (2 * pair_step):
            continue
        if max_pairs is not None and halves > 2 * max_pairs:
            continue
        cost = sum(float(distortion[p, c]) for p, c in enumerate(cells))
        best = cost if best is None else min(best, cost)
    return best


@pytest.mark.parametrize(
    ("num_slots", "pair_step", "max_pairs"),
    [(1, 1, None), (3, 1, 1), (5, 1, None), (6, 1, 1), (6, 2, None), (12, 2, 0)],
)
def test_bits_per_plane_are_the_optimum(num_slots, pair_step, max_pairs):
    generator = torch.Generator().manual_seed(num_slots)
    scale = torch.rand(3, 5, 1, generator=generator) * 10
    noise = 1 + 0.3 * torch.rand(3, 5, 7, generator=generator)
    distortion = scale * torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001]) * noise
    bits = allocate_plane_bits(distortion, num_slots, pair_step=pair_step, max_pairs=max_pairs)
    index = torch.tensor([CELL_BITS.index(b) for b in bits.flatten().tolist()]).reshape(3, 5)
    for head in range(3):
        assert int(bits[head].sum()) == 4 * num_slots
        assert (bits[head] % 4 > 0).sum() % (2 * pair_step) == 0
        cost = float(distortion[head].gather(1, index[head, :, None]).sum())
        assert cost == pytest.approx(
            brute_force(distortion[head], num_slots, pair_step, max_pairs), rel=1e-6
        )


def test_impossible_slots_are_refused():
    with pytest.raises(ValueError, match="got 100"):
        allocate_plane_bits(torch.rand(1, 4, 7), 100)


def test_queries_decide_where_bits_go():
    torch.manual_seed(0)
    z = torch.randn(1, 500, 8, 2) * 0.1
    metric = torch.eye(2).repeat(1, 8, 1, 1)
    metric[0, 2] *= 400
    metric[0, 5] *= 1e-4
    planes = fit_plane_codebooks(z, metric, CodebookFit())
    bits = build_angle_codebook(planes, 8).plane_bits[0]
    assert bits[2] == bits.max()
    assert bits[5] == bits.min()
    assert bits[2] > bits[5]


def test_fit_reaches_the_known_gaussian_distortion():
    torch.manual_seed(1)
    z = torch.randn(1, 4096, 2, 2)
    planes = fit_plane_codebooks(z, torch.eye(2).expand(1, 2, 2, 2), CodebookFit(20, 20, 4096))
    relative = (planes.distortion / planes.distortion[..., :1]).mean(1)[0]
    # 16-point plane quantiser of a Gaussian: 0.1059 per point pair; two scalar 16-level: 0.0095
    assert relative[CELL_BITS.index(2)] == pytest.approx(0.3634, rel=0.04)
    assert relative[CELL_BITS.index(4)] == pytest.approx(0.106, rel=0.06)
    assert relative[CELL_BITS.index(8)] < 0.0099
    assert relative[CELL_BITS.index(12)] < 0.0015


def test_default_calibration_codes_unseen_keys():
    from sphkv.codec.calibration import default_calibration

    calibration = default_calibration(GEOMETRY, (ROPE,))
    assert calibration.source == "default"
    keys = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    codebook = calibration.codebook(0, 32)
    decoded = decode_keys(
        encode_keys(keys, torch.arange(64), codebook, ROPE), torch.arange(64), codebook, ROPE
    )
    assert (decoded - keys).square().mean() < 0.2 * keys.square().mean()


def test_codebooks_move_between_devices_and_rows(calibration):
    codebook = calibration.codebook(0, 32)
    rows = codebook.rows(torch.tensor([1, 1, 0]))
    assert torch.equal(rows.points[1], codebook.points[1])
    assert torch.equal(rows.points[2], codebook.points[0])
    assert isinstance(calibration.planes.to("cpu"), PlaneCodebooks)


def test_layouts_of_layers_are_joined_where_they_are_wanted():
    """Those of a calibration that was read back may have been laid out on several devices."""
    part = SlotLayout(
        *(torch.zeros(size, dtype=torch.uint8) for size in ((2, 4), (2, 3, 2), (2, 3, 2)))
    )
    other = SlotLayout(*(getattr(part, name).to("meta") for name in SlotLayout.__slots__))
    joined = SlotLayout.join([part, other], torch.device("meta"))
    assert {getattr(joined, name).device.type for name in SlotLayout.__slots__} == {"meta"}
    assert joined.slot_plane.shape == (4, 3, 2)
