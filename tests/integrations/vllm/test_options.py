# SPDX-License-Identifier: Apache-2.0
"""Options, command line and codebooks of the vLLM plugin; none of it needs vLLM itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sphkv.codec.calibration import default_calibration
from sphkv.codec.calibration_file import save_calibration
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.integrations.vllm.calibrate import (
    built_in_text,
    check_ropes,
    layer_ropes,
    load_share,
)
from sphkv.integrations.vllm.options import SCHEDULER_PATH, ServeOptions, check_block_size
from sphkv.integrations.vllm.plugin import check_version
from sphkv.integrations.vllm.runtime import Runtime, activate, active_runtime
from sphkv.integrations.vllm.serve import scheduler_arguments, server_arguments


def test_options_come_from_additional_config():
    assert ServeOptions.from_config({}) is None
    assert ServeOptions.from_config(None) is None
    assert ServeOptions.from_config({"sphkv": {}}) == ServeOptions()
    options = ServeOptions.from_config({"sphkv": {"key_bits": 3, "value_bits": 4}, "other": 1})
    assert options is not None
    assert options.tier(64).name == "k3v4"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tier": "k2"}, r"unknown options \['tier'\]"),
        ({"value_bits": 5}, "value_bits .* got 5"),
        ({"key_bits": 0}, "key_bits .* got 0"),
        ({"sink_tokens": -1}, "sink_tokens .* got -1"),
        ({"sink_tokens": 17}, "at most 16, got 17"),
        ({"calibration_tokens": 8}, "calibration_tokens .* got 8"),
        ({"calibration": 3}, "calibration must be a path, got 3"),
        ({"budget_bytes": 0}, "budget_bytes .* got 0"),
        ({"budget_bytes": 40.5}, "budget_bytes .* got 40.5"),
        ({"repeatable": 1}, "repeatable .* got 1"),
        ({"repeatable": True, "budget_bytes": 40}, "repeatable .* budget of 40 bytes"),
        ([], "must be an object"),
    ],
)
def test_bad_options_name_the_value(given: object, message: str):
    with pytest.raises(ValueError, match=message):
        ServeOptions.from_config({"sphkv": given})


def test_block_sizes():
    assert check_block_size(128) == 128
    for size in (16, 48, 160):
        with pytest.raises(ValueError, match=f"got {size}"):
            check_block_size(size)


def test_server_arguments_insist_on_the_worker():
    got = server_arguments(["m", "--port", "1", "--sphkv", '{"key_bits": 3}', "--seed", "2"])
    assert got[:4] == ["--model", "m", "--worker-cls", got[3]]
    assert got[3].endswith("SphericalWorker")
    assert json.loads(got[5]) == {"sphkv": {"key_bits": 3}}
    assert got[6:] == ["--port", "1", "--seed", "2"]


def test_blocks_with_a_budget_are_not_shared_between_prompts():
    got = server_arguments(["m", "--sphkv", '{"budget_bytes": 40}'])
    assert got[-1] == "--no-enable-prefix-caching"


@pytest.mark.parametrize("is_cuda", [False, True])
def test_requests_may_have_budgets_on_a_gpu(monkeypatch: pytest.MonkeyPatch, is_cuda: bool):
    platform = SimpleNamespace(is_cuda=lambda: is_cuda)
    stub = SimpleNamespace(current_platform=platform)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=stub))
    monkeypatch.setitem(sys.modules, "vllm.platforms", stub)
    budget = ["m", "--sphkv", '{"budget_bytes": 40}']
    asked = scheduler_arguments(server_arguments(budget))
    assert asked == (["--scheduler-cls", SCHEDULER_PATH] if is_cuda else [])
    assert scheduler_arguments(server_arguments([*budget, "--scheduler-cls=own"])) == []
    assert scheduler_arguments(server_arguments(["m"])) == []


def test_a_tier_that_no_codebook_has_stops_the_start():
    rope = RopeSpec.from_config({"rope_theta": 10_000.0}, 64)
    runtime = Runtime(
        ServeOptions(key_bits=7), block_tokens=32, num_kv_heads=1, head_dim=64, max_sequences=1
    )
    with pytest.raises(ValueError, match="got 112"):
        runtime.use(default_calibration(KVGeometry(1, 1, 1, 64), (rope,)))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--port", "1"],
        ["m", "--sphkv"],
        ["m", "--sphkv", "{"],
        ["m", "--sphkv", '{"nonsense": 1}'],
        ["m", "--worker-cls", "x"],
        ["m", "--additional-config={}"],
    ],
)
def test_bad_server_arguments_are_refused(arguments: list[str]):
    with pytest.raises(ValueError, match=r"model|sphkv|is set by"):
        server_arguments(arguments)


def test_without_our_worker_nothing_serves():
    activate(None)
    with pytest.raises(RuntimeError, match="--worker-cls"):
        active_runtime()


def test_the_built_in_text_is_long_and_stable():
    text = built_in_text()
    assert len(text) > 40_000
    assert text == built_in_text()


def test_ropes_by_layer():
    config = {"rope_theta": 10_000.0, "no_rope_layers": [1, 0, 1]}
    ropes = layer_ropes(config, [1, 2], 64)
    assert ropes == [RopeSpec.unrotated(64), RopeSpec.from_config(config, 64)]
    dynamic = {
        "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 64,
    }
    with pytest.raises(ValueError, match="dynamic"):
        layer_ropes(dynamic, [0], 64)


def test_ropes_must_be_those_of_the_model():
    rope = RopeSpec.from_config({"rope_theta": 10_000.0}, 64)
    angle = torch.arange(32)[:, None] * torch.tensor(rope.inv_freq)
    model = torch.nn.Module()
    model.register_buffer("cos_sin_cache", torch.cat([angle.cos(), angle.sin()], 1).bfloat16())
    check_ropes(model, [rope, RopeSpec.unrotated(64)])
    with pytest.raises(ValueError, match="rotary tables"):
        check_ropes(model, [RopeSpec.from_config({"rope_theta": 500_000.0}, 64)])


def test_a_share_of_a_calibration(tmp_path: Path):
    geometry = KVGeometry(3, 4, 8, 64)
    rope = RopeSpec.from_config({"rope_theta": 10_000.0}, 64)
    whole = default_calibration(geometry, (rope,) * 3)
    whole.planes.mean[2, 3] += 1
    path = tmp_path / "c.safetensors"
    save_calibration(whole, path)
    share = load_share(str(path), geometry, [1, 2], [2, 3], [rope] * 2)
    assert share.geometry == KVGeometry(2, 2, 4, 64)
    assert torch.equal(share.planes.mean, whole.planes.mean[1:, 2:])
    with pytest.raises(ValueError, match="another geometry"):
        load_share(str(path), KVGeometry(3, 4, 16, 64), [1], [0], [rope])
    with pytest.raises(ValueError, match="rope of layer 1"):
        load_share(str(path), geometry, [1], [0], [RopeSpec.unrotated(64)])
    with pytest.raises(FileNotFoundError):
        load_share(str(tmp_path / "none"), geometry, [1], [0], [rope])


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0", "0.3.2"])
def test_other_versions_of_vllm_are_refused_by_name(version: str):
    with pytest.raises(ValueError, match=rf"vLLM {version} is not supported.*0\.32\.x"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu"])
def test_the_tested_version_is_served(version: str):
    check_version(version)


def test_a_device_may_have_defaults_of_its_own():
    given = ServeOptions.from_config({"sphkv": {"key_bits": 3}}, value_bits=4)
    assert given is not None
    assert (given.key_bits, given.value_bits) == (3, 4)
    named = ServeOptions.from_config({"sphkv": {"value_bits": 2}}, value_bits=4)
    assert named is not None
    assert named.value_bits == 2
