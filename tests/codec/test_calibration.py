# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sphkv.codec.calibration import CalibrationOptions, Calibrator
from sphkv.codec.calibration_file import (
    _RECENT,
    find_calibration,
    keep_calibration,
    load_calibration,
    model_key,
    save_calibration,
)
from sphkv.codec.codebook import PlaneCodebooks
from sphkv.codec.states import SphericalCodec
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import coded_tier, ladder
from sphkv.testing.cases import random_calibration, random_states

ROPE = RopeSpec.from_config({"rope_theta": 1e4}, 64)
GEOMETRY = KVGeometry(2, 2, 6, 64)


@pytest.fixture(scope="module")
def calibration():
    return random_calibration(GEOMETRY, ROPE)


@pytest.fixture
def saved(calibration, tmp_path):
    path = tmp_path / "model.safetensors"
    save_calibration(calibration, path)
    return path


def rewrite(path, change):
    """Save the same file with tensors and metadata changed by hand."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors, metadata)
    save_file(tensors, path, metadata)


def test_round_trip(calibration, saved):
    loaded = load_calibration(saved, geometry=GEOMETRY, ropes=calibration.ropes)
    assert (loaded.geometry, loaded.ropes) == (calibration.geometry, calibration.ropes)
    assert (loaded.model_id, loaded.source) == ("random", "text")
    assert loaded.num_tokens == calibration.num_tokens
    for name in PlaneCodebooks.__slots__:
        assert torch.equal(getattr(loaded.planes, name), getattr(calibration.planes, name))
    assert list(saved.parent.iterdir()) == [saved]


def test_another_geometry_is_named(saved):
    with pytest.raises(ValueError, match="num_layers 2 instead of 3"):
        load_calibration(saved, geometry=dataclasses.replace(GEOMETRY, num_layers=3))
    with pytest.raises(ValueError, match="head_dim 64 instead of 128"):
        load_calibration(saved, geometry=dataclasses.replace(GEOMETRY, head_dim=128))


def test_another_rope_is_named(saved):
    other = RopeSpec.from_config({"rope_theta": 5e5}, 64)
    with pytest.raises(ValueError, match="layer 0 differs in inv_freq"):
        load_calibration(saved, geometry=GEOMETRY, ropes=(other, other))


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.99])
def test_truncated_file(saved, keep):
    data = saved.read_bytes()
    saved.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(ValueError, match="safetensors"):
        load_calibration(saved)


def test_tampered_content(saved):
    def change(tensors, metadata):
        tensors["single"][0, 0, 0, 0, 0] += 1

    rewrite(saved, change)
    with pytest.raises(ValueError, match="sha256"):
        load_calibration(saved)


def test_flipped_byte(saved):
    data = bytearray(saved.read_bytes())
    data[-9] ^= 0x10
    saved.write_bytes(data)
    with pytest.raises(ValueError, match="sha256"):
        load_calibration(saved)


def test_changed_metadata(saved):
    def change(tensors, metadata):
        about = json.loads(metadata["sphkv"])
        about["model_id"] = "other"
        metadata["sphkv"] = json.dumps(about, sort_keys=True)

    rewrite(saved, change)
    with pytest.raises(ValueError, match="sha256"):
        load_calibration(saved)


def test_geometry_that_contradicts_the_tensors(saved):
    def change(tensors, metadata):
        about = json.loads(metadata["sphkv"])
        about["geometry"]["num_layers"] = 1_000_000
        metadata["sphkv"] = json.dumps(about, sort_keys=True)

    rewrite(saved, change)
    with pytest.raises(ValueError, match="geometry needs F32"):
        load_calibration(saved)


def test_foreign_files(tmp_path):
    path = tmp_path / "foreign.safetensors"
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="no calibration file"):
        load_calibration(path)
    save_file({"x": torch.zeros(2)}, path, {"sphkv": '{"format": "sphkv-calibration-9"}'})
    with pytest.raises(ValueError, match="calibration-9"):
        load_calibration(path)
    save_file({"x": torch.zeros(2)}, path, {"sphkv": "not json"})
    with pytest.raises(ValueError, match="damaged metadata"):
        load_calibration(path)
    with pytest.raises(FileNotFoundError, match="absent"):
        load_calibration(tmp_path / "absent")


def test_calibrator_refuses_what_it_cannot_fit():
    calibrator = Calibrator(GEOMETRY, (ROPE, ROPE), model_id="x")
    keys, _, queries = random_states(GEOMETRY, ROPE, 67)
    with pytest.raises(ValueError, match="at least 68 tokens, got 67"):
        calibrator.add_layer(0, keys, queries, torch.arange(67))
    keys, _, queries = random_states(GEOMETRY, ROPE, 80)
    with pytest.raises(ValueError, match="heads"):
        calibrator.add_layer(0, queries, keys, torch.arange(80))
    with pytest.raises(ValueError, match="keys"):
        calibrator.add_layer(0, keys * torch.nan, queries, torch.arange(80))
    calibrator.add_layer(1, keys, queries, torch.arange(80))
    with pytest.raises(ValueError, match=r"layers \[0\]"):
        calibrator.finish()
    with pytest.raises(ValueError, match="max_tokens"):
        CalibrationOptions(max_tokens=3)


def test_codec_ignores_slack(calibration):
    codec = SphericalCodec(calibration)
    tier = coded_tier(2.0, 3)
    keys, values, _ = random_states(GEOMETRY, ROPE, 128)
    positions = torch.arange(128).expand(2, -1)
    counts = torch.tensor([128, 40])
    whole = codec.encode(0, tier, keys, values, positions, counts=counts)
    live = torch.arange(128) < counts[:, None]
    cut = codec.encode(
        0, tier, keys * live[..., None], values * live[..., None], positions, counts=counts
    )
    for name in whole.__slots__:
        assert torch.equal(getattr(whole, name), getattr(cut, name)), name


def test_codec_checks_rows(calibration):
    codec = SphericalCodec(calibration)
    keys, values, _ = random_states(GEOMETRY, ROPE, 128)
    with pytest.raises(ValueError, match="3 rows without head_ids"):
        codec.encode(
            0,
            coded_tier(2.0, 3),
            keys[[0, 1, 1]],
            values[[0, 1, 1]],
            torch.arange(128).expand(3, -1),
        )


@pytest.mark.parametrize("tier", [t for t in ladder(64) if t.is_coded], ids=lambda t: t.name)
def test_codec_error_stays_within_the_tier(calibration, tier):
    """Codec error, apart from any kernel: bounds by tier on held-out states."""
    bound = {1: 0.35, 1.5: 0.2, 2: 0.12, 2.5: 0.07, 3: 0.04, 4: 0.012, 5: 0.005, 6: 0.002}[
        tier.key_bits
    ]
    value_bound = {2: 0.14, 3: 0.045, 4: 0.013, 8: 1e-4}[tier.value_bits]
    codec = SphericalCodec(calibration)
    keys, values, _ = random_states(GEOMETRY, ROPE, 128)
    positions = torch.arange(128).expand(2, -1)
    encoded = codec.encode(0, tier, keys, values, positions)
    encoded.check(tier, 64)
    new_keys, new_values = codec.decode(0, tier, encoded, positions)
    assert (new_keys - keys).square().mean() < bound * keys.square().mean()
    assert (new_values - values).square().mean() < value_bound * values.square().mean()


def test_a_kept_calibration_is_found_again_by_its_model(calibration, tmp_path, monkeypatch):
    monkeypatch.setenv("SPHKV_CACHE", str(tmp_path))
    weights = [torch.arange(600.0).view(20, 30), torch.ones(7)]
    key = model_key("tiny", weights)
    where = {"geometry": GEOMETRY, "ropes": calibration.ropes}
    assert find_calibration(key, **where) is None
    path = keep_calibration(calibration, key)
    assert tmp_path in path.parents
    found = find_calibration(key, **where)
    assert found is not None
    assert torch.equal(found.planes.stages, calibration.planes.stages)
    assert found.source == "kept"
    # caches that are made one after the other share it, and so what a device makes of it
    assert find_calibration(key, **where) is found
    path.write_bytes(path.read_bytes()[:-8])
    _RECENT.clear()
    assert find_calibration(key, **where) is None
    with pytest.raises(ValueError, match=r"'\.\./x'"):
        find_calibration("../x", **where)


def test_a_model_key_tells_models_apart():
    weights = [torch.arange(600.0).view(20, 30), torch.ones(7)]
    others = [
        ("tiny", [weights[0].flatten(), weights[1]]),
        ("tiny", [weights[0] + 1, weights[1]]),
        ("tiny", weights[:1]),
        ("huge", weights),
    ]
    keys = {model_key(about, some) for about, some in [("tiny", weights), *others]}
    assert len(keys) == 5
    assert model_key("tiny", [each.clone() for each in weights]) in keys
