# SPDX-License-Identifier: Apache-2.0
"""Engines and requests of ``gpu_vllm.py``: models, caches, prompts, and answers side by side."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
from pathlib import Path
from typing import Any

from sphkv.integrations.vllm.options import SCHEDULER_PATH

WORKER = "sphkv.integrations.vllm.worker.SphericalWorker"
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
_TINY = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen8b": _LLAMA
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
    },
    "gptoss": _LLAMA
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "router_aux_loss_coef": 0.9,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    },
    "tiny": _LLAMA | _TINY,
    "tinyqwen3": _LLAMA | _TINY | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    # made by transformers, see save_gpt_oss
    "tinyoss": {
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 256,
        "intermediate_size": 256,
        "vocab_size": 4096,
        "sliding_window": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32768,
        "eos_token_id": None,
        "pad_token_id": None,
    },
}
WEIGHTS = ("tiny", "tinyqwen3", "tinyoss")
"""Models that have weights of their own; the others are filled by vLLM."""

LOGPROBS = 64
"""Candidates of a token whose logprobs ``quality`` asks for."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # the engine in its own process would hide tracebacks
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "PYTHONUNBUFFERED": "1",
}


def model_folder(root: Path, name: str, layers: int | None, *, has_weights: bool) -> Path:
    """A folder with a config and, for small models, weights whose attention is not flat."""
    config = dict(MODELS[name])
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    if name == "tinyoss":
        return save_gpt_oss(root / f"{name}-{config['num_hidden_layers']}", config)
    if "sliding_window" in config:
        kinds = ("sliding_attention", "full_attention")
        config["layer_types"] = [kinds[at % 2] for at in range(config["num_hidden_layers"])]
    path = root / f"{name}-{config['num_hidden_layers']}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    weights = path / "model.safetensors"
    if has_weights and not weights.is_file():
        part = weights.with_suffix(f".{os.getpid()}")
        _save_weights(config, part)
        part.replace(weights)
    return path


def _save_weights(config: dict[str, Any], path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        states = torch.randn(rows, columns, generator=generator) * gain / columns**0.5
        return states.to(torch.bfloat16)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], hidden, hidden**0.5),
        "lm_head.weight": matrix(config["vocab_size"], hidden, 3.0),
        "model.norm.weight": ones.clone(),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors |= {
            f"{at}self_attn.q_proj.weight": matrix(heads * dim, hidden, 1.2),
            f"{at}self_attn.k_proj.weight": matrix(kv_heads * dim, hidden, 1.2),
            f"{at}self_attn.v_proj.weight": matrix(kv_heads * dim, hidden),
            f"{at}self_attn.o_proj.weight": matrix(hidden, heads * dim),
            f"{at}mlp.gate_proj.weight": matrix(inner, hidden),
            f"{at}mlp.up_proj.weight": matrix(inner, hidden),
            f"{at}mlp.down_proj.weight": matrix(hidden, inner),
            f"{at}input_layernorm.weight": ones.clone(),
            f"{at}post_attention_layernorm.weight": ones.clone(),
        }
        if config["model_type"] == "qwen3":
            for part in ("q_norm", "k_norm"):
                # attention that is not flat
                gain = 1.0 + torch.rand(dim, generator=generator)
                tensors[f"{at}self_attn.{part}.weight"] = gain.to(torch.bfloat16)
    save_file(tensors, str(path))


def save_gpt_oss(path: Path, config: dict[str, Any]) -> Path:
    """A small model with windows on every other layer, learned sinks and experts."""
    import torch
    from transformers import AutoModelForCausalLM, GptOssConfig

    if (path / "config.json").is_file():
        return path
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GptOssConfig(**config)).to(torch.bfloat16)
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight.data *= 4
        if name.endswith("sinks"):
            weight.data.normal_(2.0, 1.0)
    part = path.with_suffix(f".{os.getpid()}")
    model.save_pretrained(part)
    try:
        part.replace(path)
    except OSError:
        # another process was faster
        if not (path / "config.json").is_file():
            raise
    return path


def engine_options(given: argparse.Namespace, kv: str) -> dict[str, Any]:
    """Arguments of ``LLM``."""
    has_weights = bool(given.folder) or given.model in WEIGHTS
    folder = Path(given.folder)
    if not given.folder:
        folder = model_folder(Path(given.work), given.model, given.layers, has_weights=has_weights)
    options: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": not given.folder,
        "dtype": given.dtype,
        "max_model_len": given.max_model_len,
        "max_num_seqs": given.max_num_seqs or max(16, given.batch),
        "gpu_memory_utilization": given.gpu_mem,
        "enable_prefix_caching": given.prefix,
        "seed": 0,
        "disable_log_stats": given.mode == "time",
    }
    if given.mode == "quality":
        options |= {"enable_trace_replay": True, "max_logprobs": LOGPROBS}
    if not has_weights:
        options["load_format"] = "dummy"
    if given.kv_bytes:
        options["kv_cache_memory_bytes"] = given.kv_bytes
    if given.batched_tokens:
        options["max_num_batched_tokens"] = given.batched_tokens
    if given.quick:
        options["kernel_config"] = {
            "enable_jit_warmup": False,
            "enable_flashinfer_autotune": False,
        }
    options |= _graph_options(given, options["max_num_seqs"])
    if kv.startswith("sphkv"):
        chosen = {"calibration_tokens": given.calibration_tokens, **_coded_options(kv)}
        options |= {"worker_cls": WORKER, "additional_config": {"sphkv": chosen}}
        return options | ({"scheduler_cls": SCHEDULER_PATH} if given.request_budget else {})
    return options | {"kv_cache_dtype": kv}


def _coded_options(kv: str) -> dict[str, Any]:
    """Options of coded blocks by their short name."""
    found = re.fullmatch(r"sphkv(?::k([\d.]+)v(\d+))?(?::b(\d+))?(:r)?", kv)
    assert found is not None, kv
    chosen: dict[str, Any] = {}
    if found[1]:
        chosen |= {"key_bits": float(found[1]), "value_bits": int(found[2])}
    if found[3]:
        chosen["budget_bytes"] = int(found[3])
    if found[4]:
        chosen["repeatable"] = True
    return chosen


def _graph_options(given: argparse.Namespace, most: int) -> dict[str, Any]:
    """What is compiled and captured, for up to so many sequences."""
    if given.eager:
        return {"enforce_eager": True}
    sizes = sorted({1, 2, 4, *range(8, 65, 8), most})
    chosen: dict[str, Any] = {"cudagraph_capture_sizes": [n for n in sizes if n <= most]}
    if given.no_compile:
        chosen |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return {"compilation_config": chosen}


def use_flash_3() -> None:
    """TurboQuant asks for FlashAttention 2, which has no code for Hopper in the wheel."""
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.create_engine_config

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = stock(self, *args, **kwargs)
        config.attention_config.flash_attn_version = 3
        return config

    EngineArgs.create_engine_config = patched


def describe(llm: Any) -> dict[str, Any]:
    """What the engine chose."""
    config = llm.llm_engine.vllm_config
    layers = [
        layer
        for layer in config.compilation_config.static_forward_context.values()
        if hasattr(layer, "attn_backend")
    ]
    blocks, size = config.cache_config.num_gpu_blocks or 0, config.cache_config.block_size
    return {
        "tokens_held": blocks * size,
        "block_size": size,
        "graphs": str(config.compilation_config.cudagraph_mode),
        "backends": sorted(
            {x.attn_backend.get_name() for x in layers if hasattr(x, "attn_backend")}
        ),
        "batched_tokens": config.scheduler_config.max_num_batched_tokens,
    }


def random_prompts(
    given: argparse.Namespace, count: int, length: int, seed: int
) -> list[dict[str, Any]]:
    """Prompts of tokens at random."""
    draw = random.Random(seed)
    high = min(MODELS[given.model]["vocab_size"], 30000)
    return [
        {"prompt_token_ids": [draw.randrange(10, high) for _ in range(length)]}
        for _ in range(count)
    ]


def text_pieces(llm: Any, data: Path, lengths: list[int]) -> list[tuple[str, list[int]]]:
    """Pieces of books and of this repository's code in turn, none used twice.

    Args:
        llm: An engine with a tokenizer.
        data: Folder with ``pg19/*.txt``.
        lengths: Tokens of each piece.

    Returns:
        The kind of each piece, and its tokens.

    Raises:
        ValueError: There is not enough text.
    """
    root = Path(__file__).resolve().parents[1]
    files = {
        "book": sorted((data / "pg19").glob("*.txt")),
        "code": sorted([*root.glob("src/**/*.py"), *root.glob("tests/**/*.py")]),
    }
    tokenizer = llm.get_tokenizer()
    pieces, at = [], dict.fromkeys(files, 0)
    tokens = {
        kind: tokenizer.encode("\n".join(path.read_text(errors="replace") for path in paths))
        for kind, paths in files.items()
    }
    for number, length in enumerate(lengths):
        first = list(files)[number % 2 :] + list(files)[: number % 2]
        kind = next((kind for kind in first if at[kind] + length <= len(tokens[kind])), None)
        if kind is None:
            raise ValueError(f"{len(lengths)} pieces of up to {max(lengths)} tokens are too many")
        pieces.append((kind, tokens[kind][at[kind] : at[kind] + length]))
        at[kind] += length
    return pieces


def answer(output: Any) -> dict[str, Any]:
    """Tokens of an answer, and the logprobs of candidates for each."""
    steps = output.logprobs or []
    return {
        "tokens": list(output.token_ids),
        "logprobs": [{str(k): round(v.logprob, 4) for k, v in step.items()} for step in steps],
    }


def same_tokens(one: list[int], other: list[int]) -> int:
    """Tokens before two answers differ."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def gap(one: dict[str, Any], other: dict[str, Any], most: int = 1 << 30) -> float:
    """Mean difference of logprobs of shared candidates up to the first other token."""
    until = min(most, same_tokens(one["tokens"], other["tokens"]) + 1)
    gaps = [
        abs(a[key] - b[key])
        for a, b in zip(one["logprobs"][:until], other["logprobs"][:until], strict=False)
        for key in a
        if key in b
    ]
    return sum(gaps) / len(gaps) if gaps else 9.0
