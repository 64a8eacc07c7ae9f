# SPDX-License-Identifier: Apache-2.0
"""Methods that code states, against examples small enough to work out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.baselines.coded_layer import Coded, PairCodec, StateBlock
from sphkv.baselines.integer_codes import (
    ChannelIntegers,
    TokenIntegers,
    pack_bits,
    packed_bytes,
    unpack_bits,
)
from sphkv.baselines.kivi import KiviCodec, TracedIntegers, kivi_codec, trace_outliers
from sphkv.baselines.outlier_codes import (
    CorrectedIntegers,
    NonuniformRows,
    join_outliers,
    split_outliers,
)
from sphkv.baselines.polarquant import PolarPairs, PolarQuantRope, PolarTree, angle_levels
from sphkv.baselines.quantised import QuantisedCache
from sphkv.baselines.rotation_lloyd import NearestLevel, random_rotation
from sphkv.baselines.rounding import Float8, RotatedIntegers
from sphkv.baselines.settings import MethodShape
from sphkv.baselines.turboquant import (
    RotatedLevels,
    SignSketch,
    TurboQuant,
    sketch_rows,
    sphere_levels,
)
from sphkv.baselines.zipcache import SalientIntegers, saliency
from sphkv.codec.hadamard import unrotate
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

TINY = KVGeometry(num_layers=1, num_kv_heads=1, num_query_heads=1, head_dim=2)


def shaped(geometry: KVGeometry, budget: float, num_new: int = 0) -> MethodShape:
    return MethodShape(
        geometry, [RopeSpec.unrotated(geometry.head_dim)] * geometry.num_layers, budget, num_new
    )


RAMP = torch.tensor([0.0, 1.0, 2.2, 3.0])
# levels 0 1 2 3 of two bits, lowest bits first
RAMP_BYTE = 0 + (1 << 2) + (2 << 4) + (3 << 6)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(bits=st.integers(1, 8), count=st.integers(0, 70), seed=st.integers(0, 9))
def test_packing_round_trips(bits: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (2, count), generator=generator).to(torch.uint8)
    packed = pack_bits(codes, bits=bits)
    assert packed.shape == (2, packed_bytes(count, bits))
    assert torch.equal(unpack_bits(packed, bits=bits, count=count), codes)


def test_packing_by_hand() -> None:
    """Codes 5 and 3 of three bits: 101 and 011, lowest bit first, make 0b011101."""
    codes = torch.tensor([5, 3], dtype=torch.uint8)
    assert pack_bits(codes, bits=3).tolist() == [0b011101]
    with pytest.raises(ValueError, match="below 4, got 5"):
        pack_bits(codes, bits=2)
    with pytest.raises(ValueError, match="got 9"):
        pack_bits(codes, bits=9)


def test_fp8_by_hand() -> None:
    """1 is 0x38, -2 is 0xC0; 0.3 lies between 9/32 and 10/32; 500 is beyond 448."""
    codes = Float8().encode(torch.tensor([[[1.0, -2.0, 0.3, 500.0]]]))
    assert codes["codes"].flatten().tolist() == [0x38, 0xC0, 0x2A, 0x7E]
    assert Float8().decode(codes, 1).flatten().tolist() == [1.0, -2.0, 0.3125, 448.0]


def test_token_integers_by_hand() -> None:
    tensors = TokenIntegers(2, 4).encode(RAMP.view(1, 1, 4))
    assert tensors["codes"].tolist() == [[[RAMP_BYTE]]]
    assert tensors["scale"].flatten().tolist() == [0.0, 1.0]
    restored = TokenIntegers(2, 4).decode(tensors, 1)
    assert restored.flatten().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_kivi_keys_by_hand() -> None:
    """Channel 0 is the ramp over four tokens, channel 1 is constant."""
    x = torch.stack([RAMP, torch.full((4,), 10.0)], -1)[None]
    tensors = ChannelIntegers(2, 4).encode(x)
    assert tensors["codes"].flatten().tolist() == [RAMP_BYTE, 0]
    assert tensors["scale"].flatten().tolist() == [0.0, 1.0, 10.0, 0.0]
    restored = ChannelIntegers(2, 4).decode(tensors, 4)
    assert restored[0].tolist() == [[0.0, 10.0], [1.0, 10.0], [2.0, 10.0], [3.0, 10.0]]


def test_kivi_residual_by_hand() -> None:
    """Of ten tokens and a residual of four, eight keys are coded, and all values but four."""
    codec = KiviCodec(ChannelIntegers(2, 4), TokenIntegers(2, 2, 4), residual_tokens=4)
    method = QuantisedCache("kivi", shaped(TINY, 2.0), [codec])
    method.codec = codec
    states = noise(1, 10, 2).bfloat16().float()
    method.prefill(0, states, states)
    held = method.read(0)
    assert torch.equal(held.keys[:, 8:], states[:, 8:])
    assert not torch.equal(held.keys[:, :8], states[:, :8])
    assert torch.equal(held.values[:, 6:], states[:, 6:])
    # keys: 2 groups x 2 channels of a byte and 4 scale bytes, two dense keys of 4 bytes
    assert method.ledger().codes == 2 * 2 * 1 + 2 * 4
    assert method.ledger().radii == 2 * 2 * 4
    # values: 6 tokens of a byte and 4 scale bytes, four dense ones; one header and pointer
    assert method.ledger().values == 6 * (1 + 4) + 4 * 4
    assert method.ledger().total == 12 + 16 + 46 + 64 + 8


def test_kivi_values_leave_one_by_one() -> None:
    """After two more tokens all keys are coded, and values but the newest four."""
    codec = KiviCodec(ChannelIntegers(2, 4), TokenIntegers(2, 2, 4), residual_tokens=4)
    method = QuantisedCache("kivi", shaped(TINY, 2.0), [codec])
    method.codec = codec
    states = noise(1, 12, 2).bfloat16().float()
    method.prefill(0, states[:, :10], states[:, :10])
    new = states[:, 10:]
    method.attend(0, new, new, new, AttentionOptions(scale=1.0))
    held = method.read(0)
    assert method.tier_shares() == {"k2v2": 1.0, "max": 0.0}
    assert torch.equal(held.values[:, 8:], states[:, 8:])
    one_by_one = TokenIntegers(2, 2, 4)
    assert torch.equal(held.values[:, :8], one_by_one.decode(one_by_one.encode(states[:, :8]), 8))


def test_turboquant_levels_by_hand() -> None:
    """In three dimensions a coordinate is uniform; in two, the mean of a half is 2 / pi."""
    assert sphere_levels(1, 3).tolist() == pytest.approx([-0.5, 0.5], abs=1e-4)
    assert sphere_levels(2, 3).tolist() == pytest.approx([-0.75, -0.25, 0.25, 0.75], abs=1e-3)
    assert sphere_levels(1, 2).tolist() == pytest.approx([-2 / math.pi, 2 / math.pi], abs=1e-3)


@pytest.mark.parametrize(("bits", "dim"), [(1, 2), (3, 64), (8, 64), (8, 2)])
def test_levels_by_look_up_are_those_of_a_search(bits: int, dim: int) -> None:
    """On the edges themselves, one step beside them, and at and beyond the ends."""
    levels = sphere_levels(bits, dim)
    edges = (levels[1:] + levels[:-1]) / 2
    beside = [torch.nextafter(edges, torch.tensor(end)) for end in (-2.0, 2.0)]
    x = torch.cat([edges, *beside, torch.tensor([-1.001, -1.0, 1.0, 1.001]), noise(5000) / 8])
    nearest = NearestLevel(levels)
    codes = nearest.codes(x)
    assert torch.equal(codes.long(), torch.bucketize(x, edges))
    assert torch.equal(nearest.values(codes), levels[codes.long()])


def test_levels_too_close_for_a_grid_are_refused() -> None:
    with pytest.raises(ValueError, match="levels lie closer"):
        NearestLevel(torch.tensor([0.0, 1e-7, 2e-7]))


def test_turboquant_by_hand() -> None:
    """One bit keeps the signs of the rotated vector, and the norm."""
    x = noise(1, 3, 8) * 5
    codec = RotatedLevels(1, 8)
    tensors = codec.encode(x)
    signs = (x @ random_rotation(8, 1) > 0).to(torch.uint8)
    assert torch.equal(unpack_bits(tensors["codes"], bits=1, count=8), signs)
    level = sphere_levels(1, 8)[1]
    expected = (signs * 2.0 - 1) * level @ random_rotation(8, 1).T
    norm = x.norm(dim=-1, keepdim=True).half().float()
    assert torch.allclose(codec.decode(tensors, 3), expected * norm, atol=1e-5)


def test_turboquant_norm_correction_by_hand() -> None:
    """Levels of a half each make a coded direction of norm sqrt(3)/2; the stored norm undoes it."""
    x = torch.tensor([[[3.0, 0.0, 4.0]]])
    codec = RotatedLevels(1, 3, rotates=False, corrects_norm=True)
    tensors = codec.encode(x)
    assert tensors["norm"].item() == pytest.approx(5 / (math.sqrt(3) / 2), rel=1e-3)
    assert codec.decode(tensors, 1).norm().item() == pytest.approx(5.0, rel=1e-3)


def test_turboquant_keeps_sinks_in_the_rotated_basis() -> None:
    """Four dense sinks come back as they were, and attention is that of what is read."""
    geometry = KVGeometry(num_layers=1, num_kv_heads=1, num_query_heads=1, head_dim=8)
    method = TurboQuant().build(shaped(geometry, 0.9))
    states = noise(1, 100, 8)
    method.prefill(0, states, states, query=states)
    assert torch.allclose(method.read(0).keys[:, :4], states[:, :4], atol=2e-2)
    # 96 vectors of 6 or 8 bits with a norm, sinks, header and tables: 2,248 and 3,400 of 3,200
    assert method.setting == "k6v6"


def test_polarquant_rope_shares_a_range_over_the_head() -> None:
    """Values of 64 channels have one minimum and spacing, not two."""
    geometry = KVGeometry(num_layers=1, num_kv_heads=1, num_query_heads=1, head_dim=64)
    codec = PolarQuantRope().codecs(geometry, [RopeSpec(64, 64, (1.0,) * 32)])[0]
    assert codec.values.encode(noise(1, 5, 64))["scale"].shape == (1, 5, 1, 2)


def test_outliers_by_hand() -> None:
    """100 and -50 leave; the middle of 0 and 10 takes their places."""
    row = torch.tensor([0.0, 3.0, 7.0, 10.0, 100.0, -50.0, 3.0, 7.0])
    rest, index, value = split_outliers(row, 0.01)
    assert rest.tolist() == [0.0, 3.0, 7.0, 10.0, 5.0, 5.0, 3.0, 7.0]
    assert (index.tolist(), value.tolist()) == ([5, 4], [-50.0, 100.0])
    assert index.dtype == torch.uint8
    assert torch.equal(join_outliers(rest, index, value), row)


def test_outlier_index_of_long_rows() -> None:
    """16-bit indices beyond the sign bit come back."""
    row = noise(40_000)
    row[39_999] = 50.0
    rest, index, value = split_outliers(row, 1e-9)
    assert index.dtype == torch.int16
    assert torch.allclose(join_outliers(rest, index, value), row, atol=0.02)


def test_kvquant_by_hand() -> None:
    """Four distinct entries beside two outliers: two bits hold them exactly."""
    row = torch.tensor([0.0, 3.0, 7.0, 10.0, 100.0, -50.0, 3.0, 7.0])
    for is_per_channel, x in ((True, row.view(1, 8, 1)), (False, row.view(1, 1, 8))):
        codec = NonuniformRows(2, x.shape[2], is_per_channel)
        tensors = codec.encode(x)
        # the range 0 to 10 is scaled to -1 to 1
        assert tensors["range"].flatten().tolist() == [5.0, 5.0]
        assert tensors["levels"].tolist() == pytest.approx([-1.0, -0.4, 0.4, 1.0], abs=1e-3)
        assert torch.allclose(codec.decode(tensors, x.shape[1]), x, atol=5e-3)


def test_kvquant_codes_keys_before_rope() -> None:
    """A key that only turns is constant before RoPE, and constant channels cost no error."""
    rope = RopeSpec(2, 2, (1.0,))
    plain = torch.tensor([3.0, 4.0]).expand(1, 16, 2)
    turned = rope.apply(plain, torch.arange(5, 21))
    codec = PairCodec(
        NonuniformRows(2, 2, True), TokenIntegers(2, 2), block_tokens=128, ropes=[rope]
    )
    tensors = codec.encode(0, StateBlock(turned, turned, 5))
    restored, _ = codec.decode(0, Coded(tensors, 5, 16))
    assert torch.allclose(restored, turned, atol=5e-3)


def test_gear_by_hand() -> None:
    """With two channels a correction of rank two is the whole error."""
    x = noise(1, 8, 2)
    codec = CorrectedIntegers(ChannelIntegers(1, 4), is_per_channel=True, rank=2)
    tensors = codec.encode(x)
    assert tensors["left"].shape == (1, 8, 2)
    assert torch.allclose(codec.decode(tensors, 8), x, atol=3e-3)
    bare = ChannelIntegers(1, 4)
    assert not torch.allclose(bare.decode(bare.encode(x), 8), x, atol=0.1)


def test_rotatekv_by_hand() -> None:
    """Two heads of two channels whose joint rotation is the ramp."""
    x = unrotate(RAMP).view(1, 2, 2).transpose(0, 1)
    codec = RotatedIntegers(TokenIntegers(2, 4), num_heads=2)
    tensors = codec.encode(x)
    assert tensors["codes"].flatten().tolist() == [RAMP_BYTE]
    expected = unrotate(torch.tensor([0.0, 1.0, 2.0, 3.0])).view(2, 1, 2)
    assert torch.allclose(codec.decode(tensors, 1), expected, atol=1e-2)


def test_ott_by_hand() -> None:
    """The small third key stays dense; the others span 10 to 16 as if it were not there."""
    column = torch.tensor([10.0, 12.0, 0.125, 16.0])
    x = torch.stack([column, column], -1)[None]
    codec = TracedIntegers(kivi_codec(TINY, 2, 2, group=4, residual=4), group=4, num_outliers=1)
    tensors = codec.encode(0, StateBlock(x, x, 0))
    assert tensors["prot.index"].flatten().tolist() == [2]
    assert tensors["codes.outlier_keys"].flatten().tolist() == [0.125, 0.125]
    keys, values = codec.decode(0, Coded(tensors, 0, 4))
    # values take one range per token, and here both channels are equal
    assert torch.equal(keys, x)
    assert torch.equal(values, x)


def test_ott_groups_compete_for_one_pool() -> None:
    """One place, one spill: 4 enters, 3 takes its place, 2 would spill a second token and stops."""
    magnitude = torch.tensor([[[9.0, 4.0], [3.0, 8.0], [7.0, 6.0], [2.0, 5.0], [1.0, 1.0]]])
    taken = trace_outliers(magnitude, 1, 1)
    assert taken[0].int().tolist() == [[0, 1], [1, 0], [0, 0], [0, 0], [0, 0]]
    assert trace_outliers(magnitude, 1, 9)[0].int().tolist() == [
        [0, 1], [1, 0], [0, 0], [1, 0], [1, 0],
    ]  # fmt: skip


def test_ott_pools_come_back() -> None:
    """Three places over three groups of four; a free place repeats a token that is there."""
    x = torch.tensor([[[0.25, 8.0, 8.0, 8.0, 8.0, 0.5, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0]]])
    x = x.view(1, 12, 1).expand(1, 12, 2)
    codec = TracedIntegers(
        kivi_codec(TINY, 2, 2, group=4, residual=4), group=4, num_outliers=1, num_spilled=2
    )
    tensors = codec.encode(0, StateBlock(x, x, 0))
    assert tensors["prot.index"].tolist() == [[0, 0, 0]]
    keys, _ = codec.decode(0, Coded(tensors, 0, 12))
    assert keys[0, :, 0].tolist() == [0.25, 8, 8, 8, 8, 0.5, 8, 8, 8, 8, 8, 8]


def test_zipcache_saliency_by_hand() -> None:
    """Equal weights: row r gives 1 / (r + 1); a token's sum is divided by the rows that see it."""
    keys = torch.zeros(1, 40, 2)
    salient = saliency(StateBlock(keys, keys, 0, keys))[0]
    random = torch.randperm(38, generator=torch.Generator().manual_seed(0))[:2].tolist()
    rows = [*random, 38, 39]
    assert salient[0].item() == pytest.approx(sum(1 / (row + 1) for row in rows) / 4)
    assert salient[38].item() == pytest.approx((1 / 39 + 1 / 40) / 2)
    assert salient[39].item() == pytest.approx(1 / 40)


def test_zipcache_widths_by_hand() -> None:
    """Of ten tokens the five that the last query looks at most take four bits."""
    query = torch.zeros(1, 10, 2)
    query[..., 0] = 50.0
    x = torch.stack([torch.arange(10.0), torch.arange(10.0) % 3], -1)[None]
    codec = SalientIntegers(2, 0.5)
    tensors = codec.encode(0, StateBlock(x, x, 0, query))
    assert unpack_bits(tensors["prot.salient"], bits=1, count=10).tolist()[0][-3:] == [1, 1, 1]
    # two channels of five codes: 20 bits are three bytes, 10 bits are two
    assert tensors["codes.high_codes"].numel() == 2 * 3
    assert tensors["codes.low_codes"].numel() == 2 * 2
    keys, _ = codec.decode(0, Coded(tensors, 0, 10))
    assert (keys - x).abs().max() < 1.6
    every = codec.encode(0, StateBlock(x, x, 0))
    assert "codes.low_codes" not in every


def test_polarquant_recursive_by_hand() -> None:
    """Angle 45 degrees is the middle of the first of four cells."""
    x = torch.tensor([[[1.0, 1.0]]]) @ random_rotation(2, 1).T
    codec = PolarTree(2, 2, 1)
    tensors = codec.encode(x)
    assert tensors["codes"].tolist() == [[[0]]]
    assert tensors["radius"].item() == pytest.approx(math.sqrt(2), abs=1e-3)
    assert torch.allclose(codec.decode(tensors, 1), x, atol=1e-3)


def test_polarquant_levels_by_hand() -> None:
    """Under sin 2x the mean of the lower half of the angles is one half."""
    assert angle_levels(2, 1).tolist() == pytest.approx([0.5, math.pi / 2 - 0.5], abs=1e-3)


def test_polarquant_recursive_bits() -> None:
    """Of 16 channels: 8 angles of 4 bits, 7 of 2 in three streams, one float16 radius."""
    tensors = PolarTree(16, 4, 2).encode(noise(1, 1, 16))
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    assert sizes == {"codes": 4, "level2": 1, "level3": 1, "level4": 1, "radius": 2}


def test_polarquant_rope_by_hand() -> None:
    """Radii 5 and 10 and two angles are the ends of their ranges, so one bit is exact."""
    pair = torch.tensor([[3.0, 4.0], [8.0, 6.0]])
    x = pair.repeat(64, 1)[None]
    codec = PolarPairs(RopeSpec(2, 2, (1.0,)), 1, 1)
    tensors = codec.encode(x)
    low, step = tensors["scale"].flatten().tolist()
    assert low == pytest.approx(math.atan2(6, 8), abs=1e-3)
    assert low + step == pytest.approx(math.atan2(4, 3), abs=2e-3)
    assert tensors["radius_scale"].flatten().tolist() == [5.0, 5.0]
    assert torch.allclose(codec.decode(tensors, 128), x, atol=2e-2)


def test_qjl_by_hand() -> None:
    """Signs of the projection, and the sum of signed rows times the norm."""
    x = noise(1, 4, 8)
    codec = SignSketch(8, 2, num_outliers=1)
    tensors = codec.encode(x)
    large = int(x.abs().mean(1).argmax())
    assert tensors["channels"].flatten().tolist() == [large]
    rest = x.clone()
    rest[..., large] = 0.0
    rows = sketch_rows(16, 8)
    signs = (rest @ rows.T).sign()
    assert torch.equal(unpack_bits(tensors["codes"], bits=1, count=16) * 2.0 - 1, signs)
    expected = signs @ rows * rest.norm(dim=-1, keepdim=True) * math.sqrt(math.pi / 2) / 16
    restored = codec.decode(tensors, 4)
    others = [channel for channel in range(8) if channel != large]
    assert torch.allclose(restored[..., others], expected[..., others], atol=1e-3)


def test_qjl_is_unbiased() -> None:
    """With many signs the estimate of a logit comes near the logit."""
    x, query = noise(1, 200, 64), noise(64, seed=1)
    codec = SignSketch(64, 8, num_outliers=8)
    estimate = codec.decode(codec.encode(x), 200) @ query
    exact = x @ query
    slope = (estimate * exact).sum() / exact.square().sum()
    assert slope.item() == pytest.approx(1.0, abs=0.1)


def test_largest_setting_that_fits_is_taken() -> None:
    """KIVI-like widths of 2 and 4 bits: the budget decides."""
    geometry = KVGeometry(num_layers=3, num_kv_heads=2, num_query_heads=2, head_dim=64)
    codecs = [kivi_codec(geometry, bits, bits) for bits in (4, 2)]
    for budget, label in ((0.4, "k4v4"), (0.25, "k2v2")):
        method = QuantisedCache("kivi", shaped(geometry, budget), codecs)
        method.plan(1024)
        assert method.setting == label
    # 3 bits of 16 with scales, and 72 bytes of header and pointer per 128 tokens of 256 bytes
    least = 3 / 16 + 72 / (128 * 256)
    with pytest.raises(ValueError, match=f"at least {least:.4f} of the dense bytes of 1024"):
        QuantisedCache("kivi", shaped(geometry, 0.1), codecs).plan(1024)


def test_gear_without_outliers_by_hand() -> None:
    """Where nothing is taken out, only integers and the two factors are left."""
    codec = CorrectedIntegers(ChannelIntegers(1, 4), is_per_channel=True, share=0.0, rank=1)
    x = noise(1, 8, 2)
    tensors = codec.encode(x)
    assert sorted(tensors) == ["codes", "left", "right", "scale"]
    error = x - codec.backbone.decode(tensors, 8)
    left, size, right = torch.linalg.svd(error[0], full_matrices=False)
    best = left[:, :1] * size[:1] @ right[:1]
    correction = tensors["left"].float() @ tensors["right"].float().transpose(1, 2)
    assert torch.allclose(correction[0], best, atol=3e-3)
