# SPDX-License-Identifier: Apache-2.0
"""Tiny random models whose attention is not plain: windows, soft-cap, learned sinks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.vllm.conftest import START_SECONDS, Generation
from tests.integrations.vllm.test_engine import WORKER, same_start
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig

from sphkv.codec.calibration import default_calibration
from sphkv.codec.calibration_file import save_calibration
from sphkv.core.geometry import KVGeometry
from sphkv.integrations.vllm.calibrate import layer_ropes

pytestmark = pytest.mark.timeout(3 * START_SECONDS)
LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY, WINDOW = 4, 4, 2, 64, 512, 96
CACHE_BYTES = 64 << 20
SHAPE: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": VOCABULARY,
    "sliding_window": WINDOW,
    # an answer never ends early
    "eos_token_id": None,
    "pad_token_id": None,
}


def gemma2() -> Gemma2Config:
    """Windows on every other layer, and a soft-cap that these logits reach."""
    return Gemma2Config(attn_logit_softcapping=5.0, query_pre_attn_scalar=1, **SHAPE)


def gpt_oss() -> GptOssConfig:
    """Windows on every other layer, and learned sinks."""
    return GptOssConfig(num_local_experts=4, num_experts_per_tok=2, **SHAPE)


def save_model(config: Any, folder: Path, change: Callable[[str, torch.Tensor], None]) -> str:
    """A random model whose weights were changed; returns the file of its codebooks."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        change(name, weight.data)
    model.save_pretrained(folder)
    ropes = layer_ropes(config.to_dict(), list(range(LAYERS)), DIM)
    path = folder.with_suffix(".safetensors")
    geometry = KVGeometry(LAYERS, KV_HEADS, HEADS, DIM)
    save_calibration(default_calibration(geometry, tuple(ropes)), path)
    return str(path)


def random_prompts(*lengths: int) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(1)
    return [
        {"prompt_token_ids": torch.randint(2, VOCABULARY, (count,), generator=draw).tolist()}
        for count in lengths
    ]


def engine(codebooks: str | None, **sphkv: Any) -> dict[str, Any]:
    """Arguments of a small engine, stock or coded."""
    given: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "max_num_batched_tokens": 1024,
        "long_prefill_token_threshold": 130,
    }
    if codebooks is not None:
        sphkv = {"sphkv": {"calibration": codebooks, **sphkv}}
        given |= {"worker_cls": WORKER, "block_size": 64, "additional_config": sphkv}
    return given


def agreement(one: Generation, other: Generation) -> float:
    """Part of all tokens that comes before two texts differ."""
    pairs = zip(one.tokens, other.tokens, strict=True)
    return sum(same_start(a, b) for a, b in pairs) / sum(map(len, other.tokens))


@pytest.mark.parametrize("make", [gemma2, gpt_oss])
def test_windows_with_and_without_sinks(
    make: Callable[[], Any], generate: Callable[..., Generation], tmp_path: Path
):
    def change(name: str, weight: torch.Tensor) -> None:
        # attention that looks at few tokens, so that the wrong ones change the text
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight *= 4
        if name.endswith("sinks"):
            weight.normal_(2.0, 1.0)

    model = tmp_path / "model"
    codebooks = save_model(make(), model, change)
    prompts = random_prompts(300, 150, 40)
    stock = generate(model, [prompts], **engine(None))
    ours = generate(model, [prompts], **engine(codebooks, key_bits=16, value_bits=16))
    line = re.search(r"(\d+) bytes per token .* (\d+) tokens in (\d+) blocks", ours.log)
    assert line is not None
    assert 0.9 * CACHE_BYTES < int(line[1]) * int(line[2]) <= CACHE_BYTES
    assert agreement(stock, ours) > 0.9


def test_what_is_not_a_number_stops_the_engine(generate: Callable[..., Generation], tmp_path: Path):
    def change(name: str, weight: torch.Tensor) -> None:
        if name.endswith("layers.1.self_attn.v_proj.weight"):
            weight[3, 5] = torch.nan

    model = tmp_path / "model"
    codebooks = save_model(gpt_oss(), model, change)
    with pytest.raises(AssertionError, match="NaNs detected in logits"):
        generate(model, [random_prompts(40)], **engine(codebooks, key_bits=3, value_bits=4))


def test_compiled_models_and_ranks_in_a_row_give_the_same_text(
    generate: Callable[..., Generation], tmp_path: Path
):
    def change(name: str, weight: torch.Tensor) -> None:
        # attention that matters
        for gain, part in ((4, "q_proj"), (4, "k_proj"), (8, "v_proj"), (8, "o_proj")):
            if name.endswith(f"{part}.weight"):
                weight *= gain

    shape = {key: value for key, value in SHAPE.items() if key != "sliding_window"}
    model = tmp_path / "model"
    codebooks = save_model(LlamaConfig(**shape), model, change)
    prompts = random_prompts(300, 150, 40)
    given = engine(codebooks, key_bits=3, value_bits=4)
    eager = generate(model, [prompts], **given)
    compiled = generate(model, [prompts], **given, enforce_eager=False)
    assert "Warming up model for the compilation" in compiled.log
    assert len({tuple(tokens) for tokens in eager.tokens}) == len(prompts)
    # sums in another order may turn a close decision
    assert agreement(eager, compiled) > 0.9
    # every rank codes its own layers; vLLM's ranks in a row need a compiled model on CPUs
    row = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    ranks = generate(model, [prompts], **given, **row, enforce_eager=False)
    assert ranks.log.count("sphkv serves") == 2
    assert agreement(eager, ranks) > 0.9
