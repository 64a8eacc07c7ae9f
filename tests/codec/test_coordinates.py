# SPDX-License-Identifier: Apache-2.0
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sphkv.codec.coordinates.levels import (
    ScalarAngleCodebook,
    cosine_from_codes,
    encode_angles,
    fit_angle_codebook,
    lloyd_max,
    nearest_level,
    split_radius,
)
from sphkv.codec.coordinates.maps import (
    COORDINATE_NAMES,
    HypersphericalMap,
    PlaneMap,
    PolarTreeMap,
    make_coordinates,
)
from sphkv.core.rope import RopeSpec

HEAD_DIMS = [64, 80, 96, 128, 256]
PI = torch.tensor(math.pi, dtype=torch.float32).item()


def rope_of(head_dim):
    # partly rotated, so that planes of both kinds take part
    rotary_dim = head_dim // 4 * 2
    inv_freq = tuple(10_000.0 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2))
    return RopeSpec(head_dim, rotary_dim, inv_freq)


def maps_of(head_dim):
    return [make_coordinates(name, rope_of(head_dim)) for name in COORDINATE_NAMES]


def sample(head_dim, heads=4, tokens=300, queries=5, seed=0):
    """Keys with channels of very different size, unit queries, and scattered positions."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(heads, 1, head_dim, generator=generator).exp()
    keys = torch.randn(heads, tokens, head_dim, generator=generator) * size
    query = torch.randn(heads, queries, head_dim, generator=generator)
    positions = torch.randint(0, 100_000, (tokens,), generator=generator)
    return keys, query / query.norm(dim=-1, keepdim=True), positions


def dense_cosine(query, keys):
    return torch.einsum("...qd,...td->...qt", query, keys)


def assert_as_good_as_dense(actual, query, key64, key32):
    """No worse than twice the error of a float32 dot product, plus a few roundings."""
    oracle = dense_cosine(query.double(), key64)
    own = (dense_cosine(query, key32).double() - oracle).abs()
    error = (actual.double() - oracle).abs()
    assert actual.dtype == torch.float32
    assert error.max() <= 2 * own.max() + 3e-7
    assert error.square().mean().sqrt() <= 2 * own.square().mean().sqrt() + 5e-8


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", COORDINATE_NAMES)
def test_cosine_from_angles_is_the_dot_product(name, head_dim):
    coordinates = make_coordinates(name, rope_of(head_dim))
    keys, query, positions = sample(head_dim)
    unit64 = keys.double() / keys.double().norm(dim=-1, keepdim=True)
    angles = coordinates.to_angles(unit64.float(), positions=positions)
    assert angles.shape == (4, 300, coordinates.num_angles(head_dim))
    assert angles.dtype == torch.float32
    actual = coordinates.cosine(query.unsqueeze(-2), angles.unsqueeze(-3), positions=positions)
    assert_as_good_as_dense(actual, query, unit64, unit64.float())
    again = coordinates.from_angles(angles, positions=positions)
    torch.testing.assert_close(again, unit64.float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("head_dim", "bits"), [*((d, 3) for d in HEAD_DIMS), (80, 1), (80, 8)])
@pytest.mark.parametrize("name", COORDINATE_NAMES)
def test_cosine_from_codes_is_the_dot_product_with_the_decoded_key(name, bits, head_dim):
    coordinates = make_coordinates(name, rope_of(head_dim))
    keys, query, positions = sample(head_dim)
    codebook = fit_angle_codebook(coordinates, keys, bits=bits, positions=positions)
    codes = encode_angles(coordinates, keys, codebook, positions=positions)
    assert codes.dtype == torch.uint8
    assert codebook.bits == bits
    levels = codebook.look_up(codebook.levels, codes)
    actual = cosine_from_codes(coordinates, query, codes, codebook, positions=positions)
    assert actual.shape == (4, 5, 300)
    assert_as_good_as_dense(
        actual,
        query,
        coordinates.from_angles(levels.double(), positions=positions),
        coordinates.from_angles(levels, positions=positions),
    )


@pytest.mark.parametrize("name", COORDINATE_NAMES)
def test_quantised_error_shrinks_with_bits(name):
    coordinates = make_coordinates(name, rope_of(80))
    keys, query, positions = sample(80, heads=2, tokens=600)
    truth = dense_cosine(query, split_radius(keys)[1])
    errors = []
    for bits in (0, 1, 2, 3, 4, 6, 8):
        codebook = fit_angle_codebook(coordinates, keys, bits=bits, positions=positions)
        codes = encode_angles(coordinates, keys, codebook, positions=positions)
        cosine = cosine_from_codes(coordinates, query, codes, codebook, positions=positions)
        errors.append((cosine - truth).square().mean().sqrt().item())
    assert all(after < 0.8 * before for before, after in pairwise(errors[1:]))
    assert errors[1] < errors[0]
    assert errors[-1] < errors[1] / 50


@pytest.mark.parametrize("name", COORDINATE_NAMES)
def test_batches_and_per_head_positions(name):
    coordinates = make_coordinates(name, rope_of(64))
    keys, query, _ = sample(64, heads=6)
    positions = torch.randint(0, 9999, (6, 300), generator=torch.Generator().manual_seed(3))
    codebook = fit_angle_codebook(coordinates, keys[:3], bits=3, positions=positions[:3])
    batch, where = keys.view(2, 3, 300, 64), positions.view(2, 3, 300)
    codes = encode_angles(coordinates, batch, codebook, positions=where)
    queries = query.view(2, 3, 5, 64)
    cosine = cosine_from_codes(coordinates, queries, codes, codebook, positions=where)
    for i in range(2):
        part = slice(3 * i, 3 * i + 3)
        where = positions[part]
        one = encode_angles(coordinates, keys[part], codebook, positions=where)
        assert torch.equal(codes[i], one)
        expected = cosine_from_codes(coordinates, query[part], one, codebook, positions=where)
        torch.testing.assert_close(cosine[i], expected, rtol=0, atol=3e-7)


def test_angles_lie_in_their_ranges():
    keys, _, positions = sample(80)
    for coordinates in maps_of(80):
        angles = coordinates.to_angles(keys, positions=positions)
        circular = coordinates.is_circular(80)
        wrapping, bounded = angles[..., circular], angles[..., ~circular]
        assert ((wrapping > -PI) & (wrapping <= PI)).all()
        assert wrapping.max() - wrapping.min() > 6
        highest = PI if coordinates.name == "hyperspherical" else PI / 2
        assert ((bounded >= 0) & (bounded <= highest)).all()


def test_hand_made_angles():
    key = torch.tensor([1.0, 1.0, 1.0, -1.0]) / 2
    quarter = math.pi / 4
    peeled = torch.tensor([math.acos(0.5), math.acos(1 / math.sqrt(3)), -quarter])
    torch.testing.assert_close(HypersphericalMap().to_angles(key), peeled)
    tree = [quarter, -quarter, quarter]
    torch.testing.assert_close(PolarTreeMap().to_angles(key), torch.tensor(tree))
    # of three pairs the third moves up a level unchanged
    six = torch.tensor([3.0, 4.0, 0.0, 12.0, -84.0, 0.0])
    tree = [math.atan2(4, 3), math.pi / 2, math.pi, math.atan2(12, 5), math.atan2(84, 13)]
    torch.testing.assert_close(PolarTreeMap().to_angles(six), torch.tensor(tree))
    planes = PlaneMap(RopeSpec(4, 4, (1.0, 0.5)))
    # plane 0 holds channels 0 and 2, plane 1 holds channels 1 and 3
    flat = [quarter, quarter, quarter, -quarter]
    torch.testing.assert_close(planes.to_angles(key), torch.tensor(flat))
    moved = torch.tensor([quarter, quarter, quarter - 2.0, -quarter - 1.0])
    torch.testing.assert_close(planes.to_angles(key, positions=torch.tensor(2)), moved)


def test_plane_angles_do_not_depend_on_the_position():
    coordinates = PlaneMap(rope_of(128))
    keys, _, positions = sample(128)
    before = coordinates.to_angles(keys)
    after = coordinates.to_angles(coordinates.rope.apply(keys, positions), positions=positions)
    difference = after - before
    difference = torch.atan2(difference.sin(), difference.cos())
    # an azimuth is as uncertain as its plane is short
    assert (difference[..., :64].abs() < 2e-6).all()
    assert (difference[..., 64:].abs() * before[..., :64].cos() < 2e-6).all()


components = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-38, -1e-45, 1e37, 1e-20]),
    st.floats(-1e6, 1e6, width=32),
)


@settings(deadline=None, max_examples=200)
@given(
    key=st.integers(1, 12).flatmap(lambda n: st.lists(components, min_size=2 * n, max_size=2 * n)),
    position=st.integers(0, 1_000_000),
)
def test_any_key_has_a_direction(key, position):
    keys, positions = torch.tensor([key]), torch.tensor([position])
    radius, unit = split_radius(keys)
    exact = torch.linalg.vector_norm(keys.double(), dim=-1)
    assert (radius.double() - exact).abs() <= 1e-6 * exact + 1e-44
    for coordinates in maps_of(len(key)):
        angles = coordinates.to_angles(keys, positions=positions)
        again = coordinates.from_angles(angles, positions=positions)
        torch.testing.assert_close(again, unit, rtol=0, atol=2e-6)
        cosine = coordinates.cosine(unit, angles, positions=positions)
        torch.testing.assert_close(cosine, torch.ones(1), rtol=0, atol=2e-6)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_zero_key_is_the_first_axis_with_radius_zero(zero):
    keys, positions = torch.full((3, 80), zero), torch.tensor([0, 7, 999_999])
    axis = torch.nn.functional.one_hot(torch.zeros(3, dtype=torch.long), 80).float()
    radius, unit = split_radius(keys)
    assert torch.equal(radius, torch.zeros(3))
    assert torch.equal(unit, axis)
    signed = torch.where(axis > 0, axis, zero)
    for coordinates in maps_of(80):
        assert torch.equal(coordinates.to_angles(signed), coordinates.to_angles(axis))
        angles = coordinates.to_angles(keys, positions=positions)
        again = coordinates.from_angles(angles, positions=positions)
        torch.testing.assert_close(again, axis, rtol=0, atol=1e-6)


def test_float64_stays_float64_and_half_becomes_float32():
    keys, query, positions = sample(64)
    unit = keys.double() / keys.double().norm(dim=-1, keepdim=True)
    for coordinates in maps_of(64):
        angles = coordinates.to_angles(unit, positions=positions)
        again = coordinates.from_angles(angles, positions=positions)
        torch.testing.assert_close(again, unit, rtol=0, atol=1e-13)
        assert coordinates.to_angles(keys.bfloat16()).dtype == torch.float32
        cosine = coordinates.cosine(query[:, :1].bfloat16(), angles.float(), positions=positions)
        assert cosine.dtype == torch.float32


def test_no_tokens_give_no_cosines():
    keys, query, positions = sample(64)
    for coordinates in maps_of(64):
        codebook = fit_angle_codebook(coordinates, keys, bits=2, positions=positions)
        codes = encode_angles(coordinates, keys[:, :0], codebook, positions=positions[:0])
        cosine = cosine_from_codes(coordinates, query, codes, codebook, positions=positions[:0])
        assert cosine.shape == (4, 5, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_named(bad):
    keys, query, _ = sample(64, heads=2, tokens=3)
    keys[1, 2, 5] = bad
    query[0, 1, 7] = bad
    for coordinates in maps_of(64):
        with pytest.raises(ValueError, match=rf"keys .* got {bad} at index \(1, 2, 5\)"):
            coordinates.to_angles(keys)
        angles = coordinates.to_angles(torch.ones(2, 1, 3, 64))
        with pytest.raises(ValueError, match=rf"query .* got {bad} at index \(0, 1, 0, 7\)"):
            coordinates.cosine(query.unsqueeze(-2), angles)
        angles[0, 0, 0, 0] = bad
        with pytest.raises(ValueError, match=rf"angles .* got {bad}"):
            coordinates.from_angles(angles)
        with pytest.raises(ValueError, match=rf"angles .* got {bad}"):
            coordinates.cosine(torch.ones(64), angles)
    with pytest.raises(ValueError, match=rf"keys .* got {bad}"):
        split_radius(keys)


def test_wrong_shapes_raise():
    keys, query, positions = sample(64, heads=2, tokens=40)
    for coordinates in maps_of(64):
        angles = coordinates.to_angles(keys)
        with pytest.raises(ValueError, match=r"got shape \(2, 63\)"):
            coordinates.to_angles(torch.ones(2, 63))
        with pytest.raises(ValueError, match="floating point, got torch"):
            coordinates.to_angles(torch.ones(2, 64, dtype=torch.int32))
        with pytest.raises(ValueError, match=r"query must be \[..., 64\]"):
            coordinates.cosine(torch.ones(62), angles)
        with pytest.raises(ValueError, match="do not broadcast"):
            coordinates.cosine(torch.ones(3, 64), angles)
        codebook = fit_angle_codebook(coordinates, keys, bits=2)
        codes = encode_angles(coordinates, keys, codebook)
        with pytest.raises(ValueError, match="a codebook of 2 heads"):
            encode_angles(coordinates, keys[:1], codebook)
        with pytest.raises(ValueError, match="codes must be"):
            cosine_from_codes(coordinates, query, codes[..., 1:], codebook)
        with pytest.raises(ValueError, match=r"codes must be uint8, got torch\.int64"):
            cosine_from_codes(coordinates, query, codes.long(), codebook)
        with pytest.raises(ValueError, match="codes must be below 4, got 255"):
            cosine_from_codes(coordinates, query, codes | 255, codebook)
        with pytest.raises(ValueError, match="keys must be"):
            fit_angle_codebook(coordinates, keys[0], bits=2)
    with pytest.raises(ValueError, match="positions do not fit"):
        PlaneMap(rope_of(64)).to_angles(keys, positions=positions[1:])
    with pytest.raises(ValueError, match="head_dim must be 64, got 80"):
        PlaneMap(rope_of(64)).num_angles(80)
    with pytest.raises(ValueError, match=r"one of .* got 'cubes'"):
        make_coordinates("cubes", rope_of(64))


@pytest.mark.parametrize(
    ("levels", "circular", "message"),
    [
        (torch.zeros(2, 3, 5), torch.zeros(3, dtype=torch.bool), r"shape \(2, 3, 5\)"),
        (torch.tensor([[[1.0, 0.0]]]), torch.zeros(1, dtype=torch.bool), "ascending"),
        (torch.zeros(2, 3, 4), torch.zeros(3), "is_circular must be bool"),
    ],
)
def test_a_malformed_codebook_is_refused(levels, circular, message):
    with pytest.raises(ValueError, match=message):
        ScalarAngleCodebook(levels=levels, is_circular=circular)


def quantisation_error(values, levels, *, is_circular=False):
    circular = torch.full(values.shape[:-1], is_circular)
    error = values - levels.gather(-1, nearest_level(values, levels, circular))
    return torch.atan2(error.sin(), error.cos()) if is_circular else error


@pytest.mark.parametrize(
    ("bits", "distortion"),
    [(0, 1.0), (1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497), (5, 0.002499)],
)
def test_lloyd_reaches_the_known_distortion_of_a_gaussian(bits, distortion):
    # the normal distribution's own quantiles: a sample without sampling error
    share = (torch.arange(50_000, dtype=torch.float64) + 0.5) / 50_000
    values = (torch.special.ndtri(share) * torch.tensor([[1.0], [10.0]])).float()
    levels = lloyd_max(values, bits=bits)
    error = quantisation_error(values, levels)
    relative = error.square().mean(-1) / torch.tensor([1.0, 100.0])
    assert relative.tolist() == pytest.approx([distortion] * 2, rel=0.02)


@pytest.mark.parametrize("middle", [0.0, 1.0, math.pi, -3.0])
def test_circular_lloyd_does_not_see_where_the_circle_is_cut(middle):
    share = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    values = torch.special.ndtri(share) * 0.4 + middle
    values = torch.atan2(values.sin(), values.cos()).float()[None]
    levels = lloyd_max(values, bits=3, is_circular=torch.tensor([True]))
    error = quantisation_error(values, levels, is_circular=True)
    assert error.square().mean().item() / 0.16 == pytest.approx(0.03454, rel=0.02)


@pytest.mark.parametrize("bits", [0, 1, 2, 5, 8])
def test_a_full_circle_gets_even_levels(bits):
    values = (torch.arange(40_000, dtype=torch.float64) / 40_000 - 0.5)[None] * 2 * math.pi
    levels = lloyd_max(values, bits=bits, is_circular=torch.tensor([True])).double()
    assert levels[0, -1] - levels[0, 0] < 2 * math.pi
    error = quantisation_error(values, levels, is_circular=True)
    even = (2 * math.pi / 2**bits) ** 2 / 12
    assert error.square().mean().item() == pytest.approx(even, rel=0.02)


@settings(deadline=None, max_examples=100)
@given(
    values=st.lists(st.floats(-3.125, 3.125, width=16), min_size=1, max_size=40),
    bits=st.integers(0, 4),
    is_circular=st.booleans(),
)
def test_levels_are_ordered_and_codes_are_nearest(values, bits, is_circular):
    circular = torch.tensor([is_circular])
    x = torch.tensor([values])
    levels = lloyd_max(x, bits=bits, is_circular=circular)
    assert (levels.diff(dim=-1) >= 0).all()
    distance = (x[..., None] - levels[:, None]).abs()
    if is_circular:
        distance = torch.remainder(distance, 2 * math.pi)
        distance = torch.minimum(distance, 2 * math.pi - distance)
    chosen = distance.gather(-1, nearest_level(x, levels, circular)[..., None])
    torch.testing.assert_close(chosen[..., 0], distance.amin(-1), rtol=0, atol=2e-6)


def test_weights_pull_levels_and_rows_are_independent():
    values = torch.tensor([[0.0, 1.0, 2.0, 9.0]]).repeat(3, 1)
    weight = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.0] * 4, [0.0, 0.0, 0.0, 2.0]])
    levels = lloyd_max(values, bits=0, weight=weight)
    torch.testing.assert_close(levels, torch.tensor([[1.0], [3.0], [9.0]]))
    mixed = torch.randn(2, 3, 500, generator=torch.Generator().manual_seed(0))
    circular = torch.tensor([[True, False, True], [False, True, False]])
    together = lloyd_max(mixed, bits=3, is_circular=circular)
    for i in range(2):
        for j in range(3):
            alone = lloyd_max(mixed[i, j], bits=3, is_circular=circular[i, j])
            assert torch.equal(together[i, j], alone)


def test_empty_cells_are_put_to_use():
    # most of the weight sits on one point: even quantiles would all fall there
    values = torch.cat((torch.zeros(9500), torch.linspace(0.5, 1.0, 500)))[None]
    levels = lloyd_max(values, bits=3)
    error = quantisation_error(values, levels)
    step = 0.5 / 7
    assert error.square().sum().item() == pytest.approx(500 * step**2 / 12, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 9}, "bits must be 0 to 8, got 9"),
        ({"samples": torch.zeros(3, 0)}, r"at least one sample per row, got shape \(3, 0\)"),
        ({"samples": torch.full((3, 4), math.nan)}, "samples hold NaN"),
        ({"weight": torch.ones(4)}, r"\(4,\) against \(3, 4\)"),
        ({"weight": -torch.ones(3, 4)}, "negative"),
        ({"is_circular": torch.tensor([True])}, r"\(1,\) against \(3, 4\)"),
    ],
)
def test_lloyd_refuses_bad_input(arguments, message):
    arguments = {"samples": torch.zeros(3, 4), "bits": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        lloyd_max(arguments.pop("samples"), **arguments)
