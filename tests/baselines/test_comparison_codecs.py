# SPDX-License-Identifier: Apache-2.0
"""Comparison key codecs against examples worked by hand."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from sphkv.baselines.rotation_lloyd import RotationLloyd, gaussian_levels, random_rotation

Codec = RotationLloyd
CODECS = (RotationLloyd,)


def _keys(heads: int, tokens: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(heads, tokens, dim, generator=torch.Generator().manual_seed(seed))


def _relative_error(codec: Codec, x: Tensor) -> float:
    return float((codec.roundtrip(x) - x).square().sum() / x.square().sum())


def test_gaussian_levels_are_the_classical_ones() -> None:
    """One bit is sqrt(2 / pi); two and three bits are Max's table of 1960."""
    assert gaussian_levels(1)[1].item() == pytest.approx(math.sqrt(2 / math.pi), abs=1e-6)
    assert gaussian_levels(2).tolist() == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=5e-4)
    assert gaussian_levels(3)[4:].tolist() == pytest.approx(
        [0.2451, 0.7560, 1.344, 2.152], abs=5e-4
    )


def test_rotation_lloyd_by_hand() -> None:
    """One bit keeps the signs of the rotated key and its norm."""
    x = _keys(2, 5, 8) * 3
    rotation = random_rotation(8, 1)
    expected = (x @ rotation).sign() / math.sqrt(8) @ rotation.T
    restored = RotationLloyd(bits=1).roundtrip(x)
    norm = x.norm(dim=-1, keepdim=True)
    assert torch.allclose(restored / norm, expected, atol=1e-3)
    assert torch.allclose(restored.norm(dim=-1), norm[..., 0], rtol=1e-3)


def test_random_rotation_is_orthogonal_and_seeded() -> None:
    """Same seed, same matrix; another seed, another matrix."""
    rotation = random_rotation(80, 1)
    assert torch.allclose(rotation @ rotation.T, torch.eye(80), atol=1e-5)
    random_rotation.cache_clear()
    assert torch.equal(random_rotation(80, 1), rotation)
    assert not torch.allclose(random_rotation(80, 2), rotation, atol=0.1)


def test_rotation_lloyd_error_is_the_distortion_of_its_levels() -> None:
    """Within 8% of the known 0.1175, 0.03454 and 0.009497 for a Gaussian source."""
    x = _keys(2, 256, 128)
    for bits, distortion in ((2, 0.1175), (3, 0.03454), (4, 0.009497)):
        assert _relative_error(RotationLloyd(bits), x) == pytest.approx(distortion, rel=0.08)


@pytest.mark.parametrize(
    ("codec", "head_dim", "expected"),
    [
        (RotationLloyd(3), 128, 3 + 16 / 128),
        (RotationLloyd(2), 64, 2 + 16 / 64),
    ],
)
def test_bits_per_element_counts_metadata(codec: Codec, head_dim: int, expected: float) -> None:
    """Norms, minima and spacings are paid for."""
    assert codec.bits_per_element(head_dim) == expected


@pytest.mark.parametrize("codec_class", CODECS)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_error_shrinks_with_bits(codec_class: type[Codec], head_dim: int) -> None:
    """Each bit at least halves the squared error; eight bits are nearly exact."""
    x = _keys(2, 100, head_dim)
    errors = [_relative_error(codec_class(bits), x) for bits in (1, 2, 3, 4, 6, 8)]
    assert all(after < before / 2 for before, after in itertools.pairwise(errors))
    assert errors[-1] < 1e-4


@pytest.mark.parametrize("codec_class", CODECS)
def test_zero_and_empty_keys(codec_class: type[Codec]) -> None:
    """Zero keys come back as zero, no keys as none."""
    codec = codec_class(3)
    assert (codec.roundtrip(torch.zeros(2, 5, 64)) == 0).all()
    assert codec.roundtrip(torch.zeros(2, 0, 64)).shape == (2, 0, 64)


@pytest.mark.parametrize("codec_class", CODECS)
def test_half_precision_input_gives_float32(codec_class: type[Codec]) -> None:
    """bf16 keys behave like their float32 copies."""
    x = _keys(1, 40, 64).bfloat16()
    restored = codec_class(4).roundtrip(x)
    assert restored.dtype == torch.float32
    assert torch.equal(restored, codec_class(4).roundtrip(x.float()))


@pytest.mark.parametrize("codec_class", CODECS)
def test_bad_input_is_named(codec_class: type[Codec]) -> None:
    """Widths, shapes, dtypes, NaN and numbers that metadata cannot hold."""
    with pytest.raises(ValueError, match="got 9"):
        codec_class(9)
    codec = codec_class(2)
    with pytest.raises(ValueError, match="got 0"):
        codec.bits_per_element(0)
    with pytest.raises(ValueError, match=r"\(4, 8\)"):
        codec.roundtrip(torch.ones(4, 8))
    with pytest.raises(ValueError, match="int64"):
        codec.roundtrip(torch.ones(1, 4, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match="nan"):
        codec.roundtrip(torch.full((1, 4, 8), float("nan")))
    with pytest.raises(ValueError, match="must fit float16"):
        codec.roundtrip(_keys(1, 4, 8) * 1e6)
