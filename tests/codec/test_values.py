# SPDX-License-Identifier: Apache-2.0
"""Value codes, and the rotation and affine byte they are built from."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sphkv.codec.affine import quantise_affine_u8
from sphkv.codec.hadamard import rotate, rotation_matrix, unrotate
from sphkv.codec.packing import VALUE_BITS, pack_value_codes, unpack_value_codes
from sphkv.codec.values import (
    ValueCode,
    decode_values,
    encode_values,
    unbiased_scale,
    value_contribution,
)

HEAD_DIMS = (64, 80, 96, 128, 256)

# Relative squared error on Gaussian values: below the limit of one uniform step for all tokens
# (0.1188, 0.0374, 0.0115 and 8.8e-5), because each token has its own.
GAUSSIAN_BOUND = {2: 0.1185, 3: 0.0370, 4: 0.0112, 8: 6e-5}


def _gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _relative_error(restored: Tensor, exact: Tensor) -> float:
    return float((restored - exact).square().sum() / exact.square().sum())


@pytest.mark.parametrize("dim", [1, 2, 3, 5, *HEAD_DIMS, 112, 192, 200])
def test_rotation_is_orthonormal_symmetric_and_mixes_everything(dim: int) -> None:
    """No entry is zero, so a single large channel reaches every rotated one."""
    matrix = rotation_matrix(dim, dtype=torch.float64)
    identity = torch.eye(dim, dtype=torch.float64)
    assert (matrix @ matrix.T - identity).abs().max() < 1e-13
    assert torch.allclose(matrix, matrix.T, atol=1e-15)
    odd = dim // math.gcd(dim, 2**30)
    smallest = math.sqrt(2) * math.sin(math.pi / (4 * odd)) / math.sqrt(dim)
    assert matrix.abs().min() >= smallest * (1 - 1e-9)


def test_rotation_of_four_is_sylvester() -> None:
    """The matrix by hand."""
    expected = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    assert torch.equal(rotation_matrix(4), expected)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_rotation_undone(dim: int) -> None:
    """Inverse within float32 rounding, and the norm kept."""
    x = _gaussian(7, dim)
    rotated = rotate(x)
    assert torch.allclose(unrotate(rotated), x, atol=2e-6)
    assert torch.allclose(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-6)


def test_rotation_survives_inference_mode() -> None:
    """A matrix first built under inference mode still takes part in autograd."""
    with torch.inference_mode():
        rotate(torch.ones(1, 48))
    x = torch.ones(1, 48, requires_grad=True)
    rotate(x).sum().backward()
    assert x.grad is not None


def test_rotation_rejects_integers_and_empty_dimension() -> None:
    """Bad input is named."""
    with pytest.raises(ValueError, match="int64"):
        rotate(torch.ones(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="got 0"):
        rotation_matrix(0)


def test_affine_by_hand() -> None:
    """Range 0 to 510 has step 2; ties go to the even code."""
    code = quantise_affine_u8(torch.tensor([0.0, 3.0, 4.9, 510.0]))
    assert code.code.tolist() == [0, 2, 2, 255]
    assert (code.lo.item(), code.step.item()) == (0.0, 2.0)
    assert code.dequantise().tolist() == [0.0, 4.0, 4.0, 510.0]


@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40),
    live=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_affine_is_monotone_and_within_half_a_step(values: list[float], live: list[bool]) -> None:
    """Both promises hold for any live scalars; masked ones neither matter nor show."""
    x = torch.tensor(values)
    mask = torch.tensor(live[: len(values)])
    code = quantise_affine_u8(x.masked_fill(~mask, float("nan")), mask)
    assert (code.code[~mask] == 0).all()
    kept, order = x[mask].sort()
    assert (code.code[mask][order].int().diff() >= 0).all()
    error = (code.dequantise()[mask][order].double() - kept.double()).abs()
    rounding = 2e-7 * x[mask].double().abs().max() if mask.any() else 0.0
    assert (error <= code.step.double() * 0.5 + rounding + 1e-42).all()


def test_affine_degenerate_pages() -> None:
    """One value, all zero, nothing live: exact, and never NaN."""
    x = torch.tensor([[7.25, 7.25], [0.0, 0.0], [3.0, 9.0]])
    mask = torch.tensor([[True, True], [True, True], [False, False]])
    code = quantise_affine_u8(x, mask)
    assert code.lo.tolist() == [7.25, 0.0, 0.0]
    assert code.step.tolist() == [0.0, 0.0, 0.0]
    assert code.dequantise().tolist() == [[7.25, 7.25], [0.0, 0.0], [0.0, 0.0]]
    assert quantise_affine_u8(torch.zeros(3, 0)).lo.tolist() == [0.0, 0.0, 0.0]


def test_affine_mask_broadcasts_and_ranges_are_per_page() -> None:
    """A masked outlier does not widen the range."""
    x = torch.tensor([[1.0, 2.0, 1e9], [10.0, 30.0, -1e9]])
    code = quantise_affine_u8(x, torch.tensor([True, True, False]))
    assert code.lo.tolist() == [1.0, 10.0]
    assert torch.allclose(code.step * 255, torch.tensor([1.0, 20.0]))


def test_affine_full_float32_range() -> None:
    """A range beyond the largest float32 is still coded."""
    limit = torch.finfo(torch.float32).max
    code = quantise_affine_u8(torch.tensor([-limit, 0.0, limit]))
    assert code.code.tolist() == [0, 128, 255]
    assert code.step.isfinite()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_affine_rejects_non_finite(bad: float) -> None:
    """The offending scalar is named."""
    with pytest.raises(ValueError, match=f"got {bad}"):
        quantise_affine_u8(torch.tensor([1.0, bad]))


def test_affine_rejects_bad_masks_and_dtypes() -> None:
    """Shape and dtype are named."""
    with pytest.raises(ValueError, match="uint8"):
        quantise_affine_u8(torch.ones(2), torch.ones(2, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"\(3,\)"):
        quantise_affine_u8(torch.ones(2), torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="int64"):
        quantise_affine_u8(torch.ones(2, dtype=torch.int64))


def test_values_by_hand() -> None:
    """Rotated values on the levels of step 2 come back exactly."""
    levels = torch.tensor([[-3.0, -1.0, 1.0, 3.0], [3.0, 3.0, -1.0, -1.0]])
    code = encode_values(unrotate(levels), bits=2)
    assert code.codes.tolist() == [[0, 1, 2, 3], [3, 3, 1, 1]]
    assert torch.allclose(code.scale.dequantise(), torch.tensor([2.0, 2.0]), rtol=1e-6)
    assert code.midpoint == 1.5
    assert torch.allclose(rotate(decode_values(code)), levels, atol=1e-5)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("bits", VALUE_BITS)
def test_gaussian_values_stay_within_bound(bits: int, head_dim: int) -> None:
    """Codes fit their width and the error its bound, step byte included."""
    values = _gaussian(4, 128, head_dim)
    code = encode_values(values, bits=bits)
    assert code.codes.dtype == torch.uint8
    assert int(code.codes.max()) < 2**bits
    assert code.scale.code.shape == (4, 128)
    assert _relative_error(decode_values(code), values) < GAUSSIAN_BOUND[bits]


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_step_search_beats_absmax_and_is_near_exhaustive(bits: int) -> None:
    """Against the plain step, and within 2% of 400 steps tried per token (8 bits: 15%)."""
    values = _gaussian(1, 64, 96)
    rotated = rotate(values)
    peak = rotated.abs().amax(dim=-1, keepdim=True)
    midpoint = ((1 << bits) - 1) / 2

    def error(step: Tensor) -> Tensor:
        centred = (rotated / step + midpoint).round().clamp(0, 2 * midpoint) - midpoint
        return (centred * step - rotated).square().sum(dim=-1)

    tried = torch.stack([error(peak / midpoint * r) for r in torch.linspace(0.2, 1.2, 400)])
    ours = (decode_values(encode_values(values, bits=bits)) - values).square().sum()
    assert ours < error(peak / midpoint).sum()
    assert ours < tried.amin(dim=0).sum() * (1.15 if bits == 8 else 1.02)


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_codes_are_nearest_to_the_stored_step(bits: int) -> None:
    """No neighbouring code is closer under the step a reader sees."""
    values = _gaussian(2, 32, 64) * _gaussian(2, 32, 1, seed=1).exp()
    code = encode_values(values, bits=bits)
    step = code.scale.dequantise()[..., None]
    rotated = rotate(values)
    chosen = ((code.codes.float() - code.midpoint) * step - rotated).abs()
    for move in (-1, 1):
        other = (code.codes.float() + move).clamp(0, 2**bits - 1)
        assert (chosen <= ((other - code.midpoint) * step - rotated).abs() + 1e-5 * step).all()


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_one_large_token_does_not_ruin_its_page(bits: int) -> None:
    """The step byte is shared; a token 30 times larger costs the others little."""
    values = _gaussian(8, 128, 64)
    values[:, 5] *= 30
    others = torch.arange(128) != 5
    restored = decode_values(encode_values(values, bits=bits))
    assert _relative_error(restored[:, others], values[:, others]) < 1.3 * GAUSSIAN_BOUND[bits]


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_sparse_values_come_back_exactly(bits: int) -> None:
    """One channel alone rotates to two levels, which any width holds."""
    values = torch.zeros(32, 128)
    values[torch.arange(32), torch.arange(32)] = 5.0
    assert torch.allclose(decode_values(encode_values(values, bits=bits)), values, atol=1e-5)


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_zero_values_come_back_as_zero(bits: int) -> None:
    """Alone or among others."""
    values = _gaussian(2, 32, 80)
    values[0] = 0.0
    values[1, ::3] = 0.0
    restored = decode_values(encode_values(values, bits=bits))
    assert (restored[0] == 0).all()
    assert (restored[1, ::3] == 0).all()
    assert _relative_error(restored[1], values[1]) < 1.2 * GAUSSIAN_BOUND[bits]


@pytest.mark.parametrize("magnitude", [1e-30, 1e-18, 1e18, 1e30])
def test_magnitude_does_not_matter(magnitude: float) -> None:
    """Squares that leave float32 are never formed."""
    values = _gaussian(1, 32, 64)
    plain = decode_values(encode_values(values, bits=4))
    scaled = decode_values(encode_values(values * magnitude, bits=4)) / magnitude
    assert _relative_error(scaled, plain) < 1e-3


def test_masked_tokens_are_ignored_and_stored_as_zero() -> None:
    """NaN in the slack of a page changes nothing and leaves zero bytes."""
    values = _gaussian(2, 64, 64)
    mask = torch.arange(64) < torch.tensor([[40], [0]])
    slack = values.masked_fill(~mask[..., None], float("nan"))
    code = encode_values(slack, mask, bits=3)
    alone = encode_values(values[0, :40], bits=3)
    assert torch.equal(code.codes[0, :40], alone.codes)
    assert torch.equal(code.scale.code[0, :40], alone.scale.code)
    assert (code.codes[~mask] == 0).all()
    assert (code.scale.code[~mask] == 0).all()
    assert code.scale.lo[1] == 0
    assert code.scale.step[1] == 0


def test_contribution_is_attention_over_decoded_values() -> None:
    """Summing codes and unrotating once equals weighting dense values."""
    code = encode_values(_gaussian(3, 64, 96), bits=4)
    weights = _gaussian(3, 5, 64, seed=1).softmax(dim=-1)
    expected = weights.double() @ decode_values(code).double()
    out = unrotate(value_contribution(weights, code))
    assert (out - expected).abs().max() < 5e-6


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_codes_survive_packing(bits: int) -> None:
    """From values to page bytes and back."""
    code = encode_values(_gaussian(2, 64, 80), bits=bits)
    packed = pack_value_codes(code.codes, bits=bits)
    codes = unpack_value_codes(packed, bits=bits, num_tokens=64, head_dim=80)
    restored = decode_values(ValueCode(codes, code.scale, bits))
    assert torch.equal(restored, decode_values(code))


def test_half_precision_and_empty_values() -> None:
    """bf16 values code like their float32 copies; no tokens, no codes."""
    values = _gaussian(1, 32, 64).bfloat16()
    code = encode_values(values, bits=4)
    assert torch.equal(code.codes, encode_values(values.float(), bits=4).codes)
    assert encode_values(torch.zeros(2, 0, 64), bits=4).codes.shape == (2, 0, 64)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_are_rejected(bad: float) -> None:
    """The offending value is named."""
    values = torch.ones(32, 64)
    values[3, 4] = bad
    with pytest.raises(ValueError, match=f"values must be finite, got {bad}"):
        encode_values(values, bits=4)


def test_values_beyond_float32_after_rotation_are_rejected() -> None:
    """Finite input whose rotation overflows is an error, not a silent infinity."""
    with pytest.raises(ValueError, match=r"exceed float32, largest is 2\.5\d*e\+38"):
        encode_values(torch.full((32, 64), 2.5e38), bits=4)


def test_bad_widths_and_shapes_are_rejected() -> None:
    """Width, dtype and shape are named."""
    with pytest.raises(ValueError, match="got 5"):
        encode_values(torch.ones(32, 64), bits=5)
    with pytest.raises(ValueError, match="int64"):
        encode_values(torch.ones(32, 64, dtype=torch.int64), bits=4)
    with pytest.raises(ValueError, match=r"\(64,\)"):
        encode_values(torch.ones(64), bits=4)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_reader_sees_values_without_a_pull_towards_zero(bits, head_dim):
    values = _gaussian(8, 64, head_dim)
    code = encode_values(values, bits=bits)
    read = ValueCode(code.codes, unbiased_scale(code.scale, bits), bits)
    kept = (decode_values(read) * values).sum() / values.square().sum()
    assert abs(float(kept) - 1) < 0.005
