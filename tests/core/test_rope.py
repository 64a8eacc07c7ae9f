# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sphkv.core.rope import RopeSpec

PI = Fraction("3.14159265358979323846264338327950288419716939937510582097494459")

PLAIN = {"rope_theta": 10_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32_768,
}
SCALINGS = {
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
    "linear-partial": {
        "rope_type": "linear",
        "rope_theta": 10_000.0,
        "factor": 2.0,
        "partial_rotary_factor": 0.5,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "llama3-by-32": {**LLAMA3, "factor": 32.0},
    "yarn": YARN,
    "yarn-attention": {**YARN, "attention_factor": 0.7},
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-mscale": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn-one-mscale": {**YARN, "mscale": 0.7},
    "yarn-untruncated": {
        **YARN,
        "rope_theta": 150_000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "yarn-partial": {**YARN, "partial_rotary_factor": 0.25},
}


def spec(head_dim=64, rotary_dim=64, **changes):
    inv_freq = tuple(10_000.0 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2))
    return RopeSpec(head_dim, rotary_dim, inv_freq, **changes)


def llama_config(parameters, head_dim=64, **extra):
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters=dict(parameters),
        **extra,
    )


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_match_transformers(name, head_dim):
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    config = llama_config(SCALINGS[name], head_dim)
    expected, attention = rope_utils.ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]](config, "cpu")
    rope = RopeSpec.from_config(config.to_dict(), head_dim)
    actual = torch.tensor(rope.inv_freq, dtype=torch.float64)
    torch.testing.assert_close(actual, expected.double(), rtol=2e-6, atol=0)
    assert rope.attention_factor == pytest.approx(attention, rel=1e-12)
    assert rope.kind == SCALINGS[name]["rope_type"]


@pytest.mark.parametrize("seq_len", [None, 1, 131_072, 131_073, 500_000])
def test_dynamic_frequencies_follow_the_sequence_length(seq_len):
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    config = llama_config(SCALINGS["dynamic"])
    expected, _ = rope_utils.ROPE_INIT_FUNCTIONS["dynamic"](config, "cpu", seq_len=seq_len)
    rope = RopeSpec.from_config(config.to_dict(), 64, seq_len=seq_len)
    actual = torch.tensor(rope.inv_freq, dtype=torch.float64)
    torch.testing.assert_close(actual, expected.double(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("name", ["linear", "dynamic", "llama3", "yarn", "yarn-mscale"])
def test_old_config_files_read_like_new_ones(name):
    scaling = dict(SCALINGS[name])
    old_config = {
        "rope_theta": scaling.pop("rope_theta"),
        "max_position_embeddings": 131_072,
        "rope_scaling": {"type": scaling.pop("rope_type"), **scaling},
    }
    new_config = {"max_position_embeddings": 131_072, "rope_parameters": SCALINGS[name]}
    assert RopeSpec.from_config(old_config, 64) == RopeSpec.from_config(new_config, 64)


def test_trained_length_beside_the_parameters_wins_and_defaults_to_the_maximum():
    scaling = {key: value for key, value in YARN.items() if not key.startswith("original")}
    outside = {
        "rope_scaling": {**YARN, "original_max_position_embeddings": 7},
        "original_max_position_embeddings": 32_768,
    }
    default = {"rope_parameters": scaling, "max_position_embeddings": 32_768}
    expected = RopeSpec.from_config({"rope_parameters": YARN}, 64)
    assert RopeSpec.from_config(outside, 64) == expected
    assert RopeSpec.from_config(default, 64) == expected


def test_yarn_without_factor_takes_the_ratio_of_lengths():
    scaling = {key: value for key, value in YARN.items() if key != "factor"}
    config = {"rope_parameters": scaling, "max_position_embeddings": 131_072}
    assert RopeSpec.from_config(config, 64) == RopeSpec.from_config({"rope_parameters": YARN}, 64)


def test_layer_types_have_their_own_parameters():
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    parameters = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    }
    config = transformers.Gemma3TextConfig(
        head_dim=64,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=parameters,
    )
    module = modeling.Gemma3RotaryEmbedding(config)
    for layer_type in parameters:
        rope = RopeSpec.from_config(config.to_dict(), 64, layer_type=layer_type)
        expected = getattr(module, f"{layer_type}_inv_freq").double()
        actual = torch.tensor(rope.inv_freq, dtype=torch.float64)
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=0)
    with pytest.raises(ValueError, match=r"layer_type must be one of .* got None"):
        RopeSpec.from_config(config.to_dict(), 64)


def test_older_files_give_window_layers_a_base_of_their_own():
    config = {
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    local = RopeSpec.from_config(config, 64, layer_type="sliding_attention")
    full = RopeSpec.from_config(config, 64, layer_type="full_attention")
    assert local == spec()
    assert full.inv_freq[1] == pytest.approx(1_000_000.0 ** (-2 / 64) / 8)


def test_a_layer_type_without_parameters_is_not_rotated():
    config = {"rope_parameters": {"full_attention": None, "sliding_attention": PLAIN}}
    rope = RopeSpec.from_config(config, 64, layer_type="full_attention")
    assert rope == RopeSpec.unrotated(64)
    assert rope.frequencies().tolist() == [0.0] * 32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "none of rope_parameters"),
        ({"rope_parameters": 3}, "must be a mapping, got 3"),
        (
            {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}},
            "unsupported rope_type 'longrope'",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "alpha": 8.0}},
            r"unsupported parameters of rope_type 'dynamic': \['alpha'\]",
        ),
        ({"rope_parameters": {**PLAIN, "mrope_section": [8, 8]}}, "mrope_section"),
        ({"rope_parameters": {"rope_theta": -5.0}}, r"rope_theta must be above 1.0, got -5.0"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta must be above 1.0, got 'big'"),
        ({"rope_parameters": {"rope_theta": math.nan}}, "rope_theta must be above 1.0, got nan"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor must be above 0.0, got None"),
        ({"rope_parameters": {"rope_type": "linear", "factor": True}}, "factor .* got True"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor 1.0"),
        ({"rope_parameters": {**YARN, "truncate": 1}}, "truncate must be true or false, got 1"),
        ({"rope_parameters": {**PLAIN, "partial_rotary_factor": 2}}, "rotary_dim 128 exceeds"),
        ({"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.4}}, "rotary_dim .* got 25"),
    ],
)
def test_unusable_configs_are_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        RopeSpec.from_config(config, 64)


@pytest.mark.parametrize("parameters", [PLAIN, LLAMA3, SCALINGS["yarn-untruncated"]])
def test_apply_is_what_llama_does(parameters):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama_config(parameters)
    x = torch.randn(2, 3, 7, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 17, 60, 100], [5, 6, 7, 8, 9, 10, 11]])
    cos, sin = modeling.LlamaRotaryEmbedding(config)(x, positions)
    expected, _ = modeling.apply_rotary_pos_emb(x, x, cos, sin)
    rope = RopeSpec.from_config(config.to_dict(), 64)
    # the model multiplies in float32: 100 positions times the frequency's rounding
    torch.testing.assert_close(
        rope.apply(x, positions[:, None]), expected, rtol=0, atol=100 * 2**-21
    )


def test_apply_is_what_glm_does_with_interleaved_partial_rotation():
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.glm.modeling_glm")
    config = transformers.GlmConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        rope_parameters={"rope_type": "default", **PLAIN, "partial_rotary_factor": 0.5},
    )
    x = torch.randn(2, 3, 7, 64, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(7).expand(2, 7) * 10
    cos, sin = modeling.GlmRotaryEmbedding(config)(x, positions)
    expected, _ = modeling.apply_rotary_pos_emb(x, x, cos, sin)
    rope = RopeSpec.from_config(config.to_dict(), 64)
    assert (rope.layout, rope.rotary_dim) == ("interleaved", 32)
    torch.testing.assert_close(
        rope.apply(x, positions[:, None]), expected, rtol=0, atol=100 * 2**-21
    )


def test_interleaved_rotation_is_a_complex_product():
    rope = spec(80, 32, layout="interleaved", attention_factor=1.25)
    x = torch.randn(5, 80, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([0, 1, 999, 31_337, 1_000_000])
    turn = torch.polar(
        torch.tensor(1.25, dtype=torch.float64), positions[:, None] * rope.frequencies()[:16]
    )
    rotated = torch.view_as_real(torch.view_as_complex(x[:, :32].reshape(5, 16, 2)) * turn)
    expected = torch.cat((rotated.flatten(1), x[:, 32:]), dim=1)
    torch.testing.assert_close(rope.apply(x, positions), expected, rtol=0, atol=1e-9)


def test_planes_pair_rotated_channels_first_then_halves_of_the_rest():
    half = spec(12, 8)
    assert half.plane_channels().tolist() == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 10], [9, 11]]
    interleaved = dataclasses.replace(half, layout="interleaved")
    assert interleaved.plane_channels().tolist()[:4] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert RopeSpec.unrotated(4).plane_channels().tolist() == [[0, 2], [1, 3]]
    assert half.frequencies().tolist()[4:] == [0.0, 0.0]
    assert half.frequencies().dtype == torch.float64


def test_phases_stay_exact_at_a_million_tokens():
    rope = spec(128, 128)
    positions = [0, 1, 22, 355, 131_072, 999_999, 1_000_000]
    phases = rope.phases(torch.tensor(positions, dtype=torch.int32))
    assert phases.dtype == torch.float32
    assert phases.shape == (7, 64)
    for row, position in zip(phases.tolist(), positions, strict=True):
        for phase, freq in zip(row, rope.inv_freq, strict=True):
            turns = (Fraction(phase) - Fraction(freq) * position) / (2 * PI)
            assert abs(float((turns - round(turns)) * 2 * PI)) < 1e-6


def test_phases_lie_in_the_half_open_turn():
    pi = torch.tensor(math.pi, dtype=torch.float32).item()
    rope = RopeSpec(2, 2, (math.pi,))
    phases = rope.phases(torch.arange(-9, 10))
    assert ((phases > -pi) & (phases <= pi)).all()
    assert rope.phases(torch.tensor([1, -1])).tolist() == [[pi], [pi]]
    many = spec().phases(torch.arange(100_000))
    assert ((many > -pi) & (many <= pi)).all()


@settings(deadline=None, max_examples=30)
@given(
    planes=st.integers(1, 20),
    rotated=st.integers(0, 20),
    layout=st.sampled_from(["half", "interleaved"]),
    position=st.integers(0, 2**31 - 1),
)
def test_planes_and_rotation_round_trip(planes, rotated, layout, position):
    rotary_dim = 2 * min(planes, rotated)
    rope = (
        spec(2 * planes, rotary_dim, layout=layout)
        if rotary_dim
        else RopeSpec.unrotated(2 * planes)
    )
    x = torch.randn(3, 2 * planes, generator=torch.Generator().manual_seed(planes))
    z = rope.to_planes(x)
    assert torch.equal(rope.from_planes(z), x)
    positions = torch.tensor([position, 0, 1])
    turned = rope.rotate(z, positions)
    torch.testing.assert_close(turned.norm(dim=-1), z.norm(dim=-1))
    torch.testing.assert_close(rope.unrotate(turned, positions), z, rtol=0, atol=2e-6)
    assert torch.equal(turned[:, rotary_dim // 2 :], z[:, rotary_dim // 2 :])


def test_rotation_keeps_the_dtype_and_leaves_the_attention_factor_out():
    rope = spec(attention_factor=3.0)
    z = rope.to_planes(torch.randn(4, 64))
    torch.testing.assert_close(rope.rotate(z, torch.arange(4)).norm(), z.norm())
    assert rope.apply(torch.randn(4, 64).bfloat16(), torch.arange(4)).dtype == torch.bfloat16
    assert rope.rotate(z[:0], torch.arange(0)).shape == (0, 32, 2)


@pytest.mark.parametrize("rope", [spec(80, 32, layout="interleaved", attention_factor=1.5), spec()])
def test_json_round_trip_is_exact(rope):
    assert RopeSpec.from_json(json.loads(json.dumps(rope.to_json()))) == rope


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "unknown keys: .*colour"),
        ({"head_dim": "64"}, "head_dim must be .* got '64'"),
        ({"head_dim": 63}, "head_dim must be .* got 63"),
        ({"rotary_dim": True}, "rotary_dim must be .* got True"),
        ({"rotary_dim": 32}, "tuple of 16 frequencies"),
        ({"inv_freq": "abc"}, "inv_freq must be a list of numbers, got 'abc'"),
        ({"inv_freq": [None] * 32}, "inv_freq must be a list of numbers"),
        ({"inv_freq": [-1.0] * 32}, "inv_freq must hold .* got -1.0"),
        ({"attention_factor": "x"}, "attention_factor must be above 0, got 'x'"),
        ({"attention_factor": 0.0}, "attention_factor must be above 0, got 0.0"),
        ({"layout": "split"}, "layout must be one of .* got 'split'"),
        ({"kind": ""}, "kind must be a non-empty string, got ''"),
    ],
)
def test_malformed_json_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        RopeSpec.from_json({**spec().to_json(), **change})


def test_missing_json_keys_are_refused():
    data = spec().to_json()
    del data["layout"]
    with pytest.raises(ValueError, match=r"missing or unknown keys: .*layout"):
        RopeSpec.from_json(data)


def test_wrong_shapes_and_positions_raise():
    rope = spec()
    with pytest.raises(ValueError, match=r"got shape \(2, 63\)"):
        rope.to_planes(torch.zeros(2, 63))
    with pytest.raises(ValueError, match=r"got shape \(2, 64\)"):
        rope.from_planes(torch.zeros(2, 64))
    with pytest.raises(ValueError, match=r"positions must be integers, got dtype torch\.float32"):
        rope.phases(torch.zeros(3))
    with pytest.raises(ValueError, match="positions do not fit the planes"):
        rope.rotate(torch.zeros(4, 32, 2), torch.arange(3))
