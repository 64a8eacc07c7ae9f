# SPDX-License-Identifier: Apache-2.0
"""Native encoding against the reference: equal codes, except where two are equally near."""

import pytest
import torch

from sphkv.codec import native
from sphkv.codec.affine import quantise_affine_u8
from sphkv.codec.keys import decode_directions, snap_to_slots
from sphkv.codec.states import SphericalCodec
from sphkv.codec.values import (
    COARSE_STEP,
    NUM_REFINEMENTS,
    _encode_steps,
    _fit_step,
    decode_values,
    encode_values,
)
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import coded_tier
from sphkv.testing.cases import random_calibration, random_states

pytest.importorskip("sphkv._kernels", reason="the native kernels are not built")

GEOMETRY = KVGeometry(1, 2, 4, 64)
ROPE = RopeSpec.from_config({"rope_theta": 10_000.0}, 64)
# The reference ranks squared distances to within this, relative; see ``nearest_point``.
RANKING_ERROR = 2.0**-14


@pytest.fixture(scope="module")
def codec():
    return SphericalCodec(random_calibration(GEOMETRY, ROPE))


def unit_keys(tokens, seed=3):
    keys, _, _ = random_states(GEOMETRY, ROPE, tokens, seed=0, first=seed)
    planes = ROPE.unrotate(ROPE.to_planes(keys), torch.arange(seed, seed + tokens))
    return planes / keys.norm(dim=-1)[..., None, None]


def plane_distances(unit, coded, codebook):
    rest = torch.einsum("hpij,htpj->htpi", codebook.metric_root, unit - coded)
    return rest.square().sum(-1)


@pytest.mark.parametrize("bits", [1.0, 1.3125, 2.0, 3.0, 4.25])
@pytest.mark.parametrize("tokens", [1, 33, 128])
def test_keys_get_the_nearest_points(codec, bits, tokens):
    codebook = codec.codebook(0, coded_tier(bits, 4))
    unit = unit_keys(tokens)
    expected, coded = snap_to_slots(unit, codebook)
    found = native.snap_to_slots(unit, codebook)
    assert found is not None
    codes, cosine, length = found
    assert (codes != expected).float().mean() < 1e-3
    got = decode_directions(codes, codebook)
    bound = plane_distances(unit, coded, codebook) * (1 + RANKING_ERROR) + 1e-9
    assert bool((plane_distances(unit, got, codebook) <= bound).all())
    torch.testing.assert_close(cosine, (unit * got).sum((-1, -2)))
    torch.testing.assert_close(length, got.square().sum((-1, -2)).sqrt())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dim", [64, 80, 100])
def test_values_get_the_same_steps_and_codes(bits, dim):
    generator = torch.Generator().manual_seed(bits)
    unit = torch.randn(3, 40, dim, generator=generator)
    unit[1, 7] = 0.0
    unit = unit / unit.abs().amax(-1, keepdim=True).clamp(min=1e-9)
    step = native.fit_steps(unit, bits=bits, num_refinements=NUM_REFINEMENTS)
    assert step is not None
    expected = _fit_step(unit, bits=bits)
    # a sum in another order may round to the other side of a level
    is_close = torch.isclose(step, expected, rtol=1e-4)
    assert is_close.float().mean() > 0.98
    scale = quantise_affine_u8(expected.squeeze(-1))
    live = torch.ones(3, 40, dtype=torch.bool)
    live[2, 30:] = False
    peak = torch.ones(3, 40, 1)
    found = native.encode_steps(unit, peak, scale, live, bits=bits, coarse=COARSE_STEP[bits])
    reference = _encode_steps(unit, peak, scale, live, bits=bits)
    assert found is not None
    assert (found[0] != reference.codes).float().mean() < 1e-3
    assert (found[1] != reference.scale.code).float().mean() < 0.02
    assert not found[0][2, 30:].any()
    assert not found[1][2, 30:].any()


def test_a_page_costs_no_more_error_than_the_reference(codec, monkeypatch):
    _, values, _ = random_states(GEOMETRY, ROPE, 128)
    mine = decode_values(encode_values(values, bits=3))
    monkeypatch.setattr(native, "native_kernels", lambda: None)
    reference = decode_values(encode_values(values, bits=3))
    ratio = (mine - values).square().sum() / (reference - values).square().sum()
    assert ratio < 1.001


def test_nothing_native_without_the_extension(codec, monkeypatch):
    monkeypatch.setattr(native, "native_kernels", lambda: None)
    assert native.snap_to_slots(unit_keys(4), codec.codebook(0, coded_tier(2.0, 4))) is None
    assert native.fit_steps(torch.ones(2, 4), bits=3, num_refinements=1) is None
