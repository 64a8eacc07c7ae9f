# SPDX-License-Identifier: Apache-2.0
"""Attaching to a model and letting go: nothing else may change."""

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra sphkv[transformers] is not installed")

import transformers as hf

from sphkv import SphericalCache
from sphkv.errors import UnsupportedModelError
from sphkv.integrations.transformers.architecture import describe_model, model_geometry, model_ropes
from sphkv.integrations.transformers.calibrate import calibrate_model

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def make_tokens(count: int) -> torch.Tensor:
    return torch.randint(3, 97, (1, count), generator=torch.Generator().manual_seed(1))


def test_importing_changes_nothing():
    code = (
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions\n"
        "from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks\n"
        "before = (dict(functions), dict(masks))\n"
        "import sphkv\n"
        "sphkv.SphericalCache\n"
        "import sphkv.integrations.transformers.calibrate\n"
        "assert (dict(functions), dict(masks)) == before\n"
        "assert 'sphkv' not in functions\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_attached_model_without_the_cache_computes_as_before(tiny_model, implementation):
    model, tokens = tiny_model("gemma3"), make_tokens(200)
    model.set_attn_implementation(implementation)
    expected = model(tokens).logits
    hooks = len(model.model._forward_hooks), len(model.model._forward_pre_hooks)
    first = SphericalCache.for_model(model)
    second = SphericalCache.for_model(model)
    assert model.config._attn_implementation == "sphkv"
    assert torch.equal(model(tokens).logits, expected)
    text = model.generate(tokens, max_new_tokens=3, do_sample=False)
    first.detach()
    first.detach()
    assert model.config._attn_implementation == "sphkv"
    second.detach()
    assert model.config._attn_implementation == implementation
    assert hooks == (len(model.model._forward_hooks), len(model.model._forward_pre_hooks))
    assert torch.equal(model(tokens).logits, expected)
    assert torch.equal(model.generate(tokens, max_new_tokens=3, do_sample=False), text)
    model.set_attn_implementation("sdpa")


def test_attention_takes_dropout_by_position(tiny_model, monkeypatch):
    # what other libraries' wrappers of transformers' attention functions do
    interface = hf.modeling_utils.ALL_ATTENTION_FUNCTIONS
    model, ids = tiny_model("qwen3"), make_tokens(20)
    cache = SphericalCache.for_model(model)
    with torch.no_grad():
        plain = model(ids).logits
        ours = interface["sphkv"]

        def wrapped(module, query, key, value, mask, dropout=0.0, **options):
            return ours(module, query, key, value, mask, dropout, **options)

        monkeypatch.setitem(interface._global_mapping, "sphkv", wrapped)
        assert torch.equal(model(ids).logits, plain)
    cache.detach()


def test_forgotten_cache_lets_go(tiny_model):
    model = tiny_model("qwen3")
    cache = SphericalCache.for_model(model)
    assert model.config._attn_implementation == "sphkv"
    del cache
    gc.collect()
    assert model.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_detached_cache_is_refused(tiny_model):
    model = tiny_model("qwen3")
    cache = SphericalCache.for_model(model)
    cache.detach()
    with pytest.raises(RuntimeError, match="detached"):
        model(make_tokens(20), past_key_values=cache)


@torch.no_grad()
def test_failed_forward_does_not_stay_open(tiny_model):
    model = tiny_model("qwen3")
    with SphericalCache.for_model(model, tiers="max") as cache:
        tokens = make_tokens(20)
        model(tokens, past_key_values=cache)
        expected = model(tokens[:, :1], past_key_values=cache).logits
        cache.crop(-1)
        handle = model.model.layers[1].mlp.register_forward_pre_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            model(tokens[:, :1], past_key_values=cache)
        handle.remove()
        assert cache.get_seq_length() == 20
        assert torch.equal(model(tokens[:, :1], past_key_values=cache).logits, expected)


def _fail(*_: object) -> None:
    raise ZeroDivisionError


def test_calibration_restores_the_model_after_an_error(tiny_model):
    model = tiny_model("qwen3")
    with pytest.raises(ValueError, match="at least 68 tokens"):
        calibrate_model(model, make_tokens(30), model_id="tiny")
    assert model.config._attn_implementation == "sdpa"
    assert not model.model._forward_hooks
    with pytest.raises(ValueError, match=r"\[1, tokens\]"):
        calibrate_model(model, make_tokens(30)[0], model_id="tiny")


def test_layouts(tiny_model):
    layout = describe_model(tiny_model("gpt-oss"))
    assert layout.windows == (130, None)
    assert {rope.kind for rope in layout.ropes} == {"yarn"}
    assert layout.ropes[0].attention_factor > 1
    gemma = tiny_model("gemma3")
    assert model_geometry(gemma).head_dim == 32
    local, full = model_ropes(gemma)
    assert local.inv_freq != full.inv_freq
    assert describe_model(tiny_model("mistral")).windows == (260, 260)


def _unsupported() -> dict[str, tuple[Any, str]]:
    mla = hf.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        qk_nope_head_dim=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=2,
    )
    dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    t5 = hf.T5Config(vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    mamba = hf.MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1)
    bloom = hf.BloomConfig(vocab_size=97, hidden_size=16, n_layer=1, n_head=2)
    qwen = hf.Qwen3NextConfig(**SMALL, num_experts=2, num_experts_per_tok=1)
    return {
        "mla": (mla, "latent"),
        "encoder-decoder": (t5, "encoder-decoder"),
        "mamba": (mamba, "attention"),
        "alibi": (bloom, "attention interface|position encoding|ALiBi"),
        "linear attention": (qwen, "linear_attention"),
        "dynamic rope": (hf.LlamaConfig(**SMALL, rope_parameters=dynamic), "dynamic"),
    }


@pytest.mark.parametrize(
    "kind", ["mla", "encoder-decoder", "mamba", "alibi", "linear attention", "dynamic rope"]
)
def test_unsupported_models_say_why(kind):
    config, reason = _unsupported()[kind]
    auto = hf.AutoModelForSeq2SeqLM if kind == "encoder-decoder" else hf.AutoModelForCausalLM
    model = auto.from_config(config)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=reason):
        SphericalCache.for_model(model)
    assert model.config._attn_implementation == before


def test_other_things_are_refused(tiny_model):
    with pytest.raises(UnsupportedModelError, match="transformers model"):
        SphericalCache.for_model(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    model = tiny_model("qwen2")
    with pytest.raises(ValueError, match="budget must look like"):
        SphericalCache.for_model(model, budget="much")
    with pytest.raises(ValueError, match="k2v3"):
        SphericalCache.for_model(model, tiers="tiny")
    assert model.config._attn_implementation == "sdpa"
