# SPDX-License-Identifier: Apache-2.0
"""Comparison key codecs against examples worked by hand."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from sphkv.baselines.hadamard_int import HadamardInt
from sphkv.baselines.per_channel_int import PerChannelInt
from sphkv.baselines.rotation_lloyd import RotationLloyd, gaussian_levels, random_rotation
from sphkv.codec.hadamard import unrotate

Codec = HadamardInt | PerChannelInt | RotationLloyd
CODECS = (HadamardInt, PerChannelInt, RotationLloyd)


def _keys(heads: int, tokens: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(heads, tokens, dim, generator=torch.Generator().manual_seed(seed))


def _relative_error(codec: Codec, x: Tensor) -> float:
    return float((codec.roundtrip(x) - x).square().sum() / x.square().sum())


def test_per_channel_by_hand() -> None:
    """Two channels, groups of four tokens, four levels each."""
    first = torch.tensor([[0.0, 10.0], [1.0, 10.0], [2.2, 10.0], [3.0, 10.0]])
    second = torch.tensor([[-6.0, 0.5], [0.0, 0.5]])
    restored = PerChannelInt(bits=2, group_tokens=4).roundtrip(torch.cat([first, second])[None])
    # channel 0: levels 0 1 2 3, then -6 -4 -2 0; channel 1 is constant in each group
    expected = [[0.0, 10.0], [1.0, 10.0], [2.0, 10.0], [3.0, 10.0], [-6.0, 0.5], [0.0, 0.5]]
    assert restored[0].tolist() == expected


def test_per_channel_groups_do_not_see_each_other() -> None:
    """An outlier harms its channel and group only."""
    x = _keys(1, 96, 4)
    spoiled = x.clone()
    spoiled[0, 40, 2] = 1000.0
    codec = PerChannelInt(bits=4)
    before, after = codec.roundtrip(x), codec.roundtrip(spoiled)
    changed = (before != after)[0]
    assert changed[32:64, 2].any()
    assert not changed[:32].any()
    assert not changed[64:].any()
    assert not changed[:, [0, 1, 3]].any()


def test_hadamard_int_by_hand() -> None:
    """A key whose rotation is 0, 1, 2.2, 3 takes levels 0, 1, 2, 3."""
    x = unrotate(torch.tensor([[[0.0, 1.0, 2.2, 3.0]]]))
    expected = unrotate(torch.tensor([[[0.0, 1.0, 2.0, 3.0]]]))
    assert torch.allclose(HadamardInt(bits=2).roundtrip(x), expected, atol=2e-3)


def test_hadamard_int_spreads_a_large_channel() -> None:
    """A single channel rotates to two values, which one bit holds."""
    x = torch.zeros(1, 1, 64)
    x[0, 0, 9] = 8.0
    assert torch.allclose(HadamardInt(bits=1).roundtrip(x), x, atol=1e-5)


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
        (HadamardInt(4), 64, 4 + 32 / 64),
        (PerChannelInt(2), 128, 3.0),
        (PerChannelInt(2, group_tokens=128), 128, 2.25),
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


def test_group_size_must_be_positive() -> None:
    """A group of no tokens is an error."""
    with pytest.raises(ValueError, match="got 0"):
        PerChannelInt(2, group_tokens=0)
