# SPDX-License-Identifier: Apache-2.0
"""The cache inside every named architecture, against the model's own dense cache."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the extra sphkv[transformers] is not installed")

from transformers import DynamicCache

from sphkv import SphericalCache
from sphkv.codec.calibration import CalibrationOptions
from sphkv.codec.codebook import CodebookFit
from sphkv.integrations.transformers.cache import CacheOptions
from sphkv.integrations.transformers.calibrate import calibrate_model

ARCHITECTURES = ("llama3", "qwen2", "qwen3", "mistral", "gpt-oss", "gemma3")
SHORT = CacheOptions(min_calibration_tokens=128)


class BfloatCache(DynamicCache):
    """A dense bfloat16 cache: the prompt attends to itself exactly, later tokens to bfloat16."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any) -> Any:
        is_prompt = self.get_seq_length(layer_idx) == 0
        keys, values = (x.bfloat16().to(x.dtype) for x in (key_states, value_states))
        held = super().update(keys, values, layer_idx)
        return (key_states, value_states) if is_prompt else held


def make_tokens(count: int, seed: int = 1, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (batch, count), generator=generator)


@torch.no_grad()
def decode(model: Any, tokens: Tensor, prompt: int, cache: Any) -> Tensor:
    """Logits of a prompt, then of single tokens, then of a chunk."""
    cuts = [0, prompt, *range(prompt + 1, prompt + 4), tokens.shape[1]]
    parts = [
        model(tokens[:, low:high], past_key_values=cache).logits for low, high in pairwise(cuts)
    ]
    return torch.cat(parts, 1)


def divergence(reference: Tensor, other: Tensor) -> float:
    """KL divergence in nats per token."""
    p, q = reference.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_dense_tier_equals_a_bfloat16_cache(tiny_model, name):
    model, tokens = tiny_model(name), make_tokens(400)
    expected = decode(model, tokens, 370, BfloatCache())
    with SphericalCache.for_model(model, tiers="max") as cache:
        output = decode(model, tokens, 370, cache)
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.1


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_short_prompts_are_exact(tiny_model, name):
    model, tokens = tiny_model(name), make_tokens(90)
    expected = decode(model, tokens, 60, DynamicCache(config=model.config))
    with SphericalCache.for_model(model, tiers="k2v3") as cache:
        output = decode(model, tokens, 60, cache)
        assert not cache.engine.is_coded
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_coded_tiers_stay_close_and_generate(tiny_model, name):
    model, tokens = tiny_model(name), make_tokens(400)
    expected = decode(model, tokens, 370, DynamicCache(config=model.config))[:, 370:]
    kl = {}
    for tier, bound in (("k2v3", 0.02), ("k4v4", 0.004)):
        with SphericalCache.for_model(model, tiers=tier, options=SHORT) as cache:
            output = decode(model, tokens, 370, cache)[:, 370:]
            assert cache.engine.is_coded
            kl[tier] = divergence(expected, output)
            assert 0 < kl[tier] < bound
            cache.reset()
            text = model.generate(
                tokens[:, :300], past_key_values=cache, max_new_tokens=8, do_sample=False
            )
            assert text.shape == (1, 308)
            assert cache.engine.num_tokens == [307]
    assert kl["k4v4"] < kl["k2v3"]


def test_windowed_layers_hold_only_their_window(tiny_model):
    tokens = make_tokens(700)
    model = tiny_model("gpt-oss")
    with SphericalCache.for_model(model, tiers="k2v3", options=SHORT) as cache:
        decode(model, tokens, 690, cache)
        store = cache.engine.store
        assert store is not None
        sizes = [
            sum([int(group.num_pages.sum()) for group in store.pages(0, layer)])
            for layer in range(2)
        ]
    assert sizes[0] < sizes[1]
    expected = decode(model, tokens, 690, BfloatCache())
    with SphericalCache.for_model(model, tiers="max") as cache:
        output = decode(model, tokens, 690, cache)
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=0)


def test_calibrate_model_matches_what_the_cache_learns(tiny_model):
    model, tokens = tiny_model("qwen2"), make_tokens(400)
    before = model.config._attn_implementation
    calibration = calibrate_model(model, tokens, model_id="tiny")
    assert model.config._attn_implementation == before
    assert (calibration.source, calibration.num_tokens) == ("text", 396)
    with SphericalCache.for_model(model, tiers="k2v3", calibration=calibration) as cache:
        decode(model, tokens, 370, cache)
        assert cache.calibration is calibration
    with SphericalCache.for_model(model, tiers="k2v3", options=SHORT) as cache:
        decode(model, tokens, 370, cache)
        learned = cache.engine.calibration
    assert learned is not None
    given = calibration.planes.distortion.sum((1, 2))
    ratio = learned.planes.distortion.sum((1, 2)) / given
    assert bool(((ratio > 0.8) & (ratio < 1.25)).all())


def test_calibration_of_another_model_is_refused(tiny_model, tmp_path):
    from sphkv.codec.calibration_file import save_calibration

    calibration = calibrate_model(tiny_model("qwen2"), make_tokens(100), model_id="tiny")
    path = tmp_path / "calibration.safetensors"
    save_calibration(calibration, path)
    SphericalCache.for_model(tiny_model("qwen2"), calibration=path).detach()
    with pytest.raises(ValueError, match="rope"):
        SphericalCache.for_model(tiny_model("llama3"), calibration=path)
    with pytest.raises(ValueError, match="rotary embedding"):
        SphericalCache.for_model(tiny_model("llama3"), calibration=calibration)
    assert tiny_model("llama3").config._attn_implementation == "sdpa"


def test_smollm2_keeps_its_distribution(smollm2):
    model, tokenizer = smollm2
    facts = [
        f"In the year {1700 + 7 * i} the town of {name} built bridge number {i} over the river."
        for i, name in enumerate(["Ashby", "Corwen", "Dunmore", "Eltham", "Farley"] * 6)
    ]
    tokens = tokenizer(" ".join(facts), return_tensors="pt").input_ids[:, :600]
    assert tokens.shape == (1, 600)
    expected = decode(model, tokens, 585, DynamicCache())[:, 585:]
    effort = CalibrationOptions(max_tokens=256, fit=CodebookFit(iterations=3, refinements=2))
    options = CacheOptions(calibration=effort)
    with SphericalCache.for_model(model, tiers="k3v4", options=options) as cache:
        output = decode(model, tokens, 585, cache)[:, 585:]
        dense = model.config.num_hidden_layers * 3 * 4 * 64 * 600
        assert cache.engine.is_coded
        assert cache.ledger().total < 0.6 * dense
    assert divergence(expected, output) < 0.02
