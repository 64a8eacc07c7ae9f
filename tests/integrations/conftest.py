# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every named architecture, built from configs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

ARCHITECTURES = ("llama3", "qwen2", "qwen3", "mistral", "gpt-oss", "gemma3")
_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # large enough that attention picks some tokens over others
    "initializer_range": 0.06,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def build_tiny_model(name: str) -> Any:
    """A random model in float32; gpt-oss has learned sinks, YaRN and alternating windows."""
    import transformers as hf

    torch.manual_seed(0)
    if name == "llama3":
        config: Any = hf.LlamaConfig(**_COMMON, rope_parameters=_LLAMA3)
    elif name == "qwen2":
        config = hf.Qwen2Config(**_COMMON)
    elif name == "qwen3":
        config = hf.Qwen3Config(**_COMMON)
    elif name == "mistral":
        config = hf.MistralConfig(**_COMMON, sliding_window=260)
    elif name == "gpt-oss":
        config = hf.GptOssConfig(
            **_COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=130
        )
        assert config.layer_types == ["sliding_attention", "full_attention"]
    elif name == "gemma3":
        config = hf.Gemma3TextConfig(
            **_COMMON,
            sliding_window=130,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=24,
        )
    else:
        raise ValueError(f"no tiny model {name!r}")
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # zero by default; Qwen2's key bias is what breaks codes without a mean
            if parameter_name.endswith(("k_proj.bias", "q_proj.bias", ".sinks")):
                parameter.normal_(0.0, 1.0)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], Any]:
    """Builds each tiny model once."""
    built: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in built:
            built[name] = build_tiny_model(name)
        return built[name]

    return get
