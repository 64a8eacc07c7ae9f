# SPDX-License-Identifier: Apache-2.0
"""Fit the codebooks of a model on a text, and generate text with a coded cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from sphkv.codec.calibration_file import save_calibration
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.workloads.texts import read_tokens
from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.cache import (
    CacheOptions,
    RetentionOptions,
    SphericalCache,
)
from sphkv.integrations.transformers.calibrate import calibrate_model
from sphkv.retention.gate import GateOptions


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """A prompt and how its cache is kept.

    Attributes:
        model: ``smollm2``, a local folder, or a hub name.
        prompt: The prompt itself; exactly one of this and ``prompt_file`` is given.
        prompt_file: UTF-8 file with the prompt.
        budget: Byte budget of the cache.
        tier: Tier name instead of a budget.
        calibration: Calibration file; the prompt is used if None.
        backend: Decode backend.
        max_new_tokens: Tokens to generate; 0 only fills the cache.
        is_chat: Whether the prompt goes through the model's chat template.
        save_cache: Folder to save the cache in.
        retention: Whether the controller decides at any budget (True) or never (False); the
            budget says if None.
        policy: Weights of the controller, a file; equal weights if None.
        is_gated: Whether its stability gate watches the margins of decisions.
    """

    model: str
    prompt: str | None = None
    prompt_file: str | None = None
    budget: str | None = None
    tier: str | None = None
    calibration: str | None = None
    backend: str = "auto"
    max_new_tokens: int = 64
    is_chat: bool = False
    save_cache: str | None = None
    retention: bool | None = None
    policy: str | None = None
    is_gated: bool = False

    def __post_init__(self) -> None:
        """Reject contradictions."""
        if (self.prompt is None) == (self.prompt_file is None):
            raise ValueError("give exactly one of prompt and prompt_file")
        if self.budget is not None and self.tier is not None:
            raise ValueError(f"give budget {self.budget!r} or tier {self.tier!r}, not both")
        if self.policy is not None and not self.retention:
            raise ValueError(f"policy {self.policy!r} needs the controller: retention")
        if self.is_gated and not self.retention:
            raise ValueError("a gate needs the controller: retention")
        if self.retention and self.tier is not None:
            raise ValueError(f"the controller decides under a budget, got tier {self.tier!r}")
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must not be negative, got {self.max_new_tokens}")

    def text(self) -> str:
        """The prompt, read from its file if need be."""
        if self.prompt_file is None:
            return self.prompt or ""
        file = Path(self.prompt_file)
        if not file.is_file():
            raise FileNotFoundError(f"no prompt file at {file}")
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is no UTF-8 text: {error}") from error


def generate(config: GenerateConfig) -> dict[str, Any]:
    """Greedy continuation with a coded cache, and what the cache holds afterwards."""
    text = config.text()
    model, tokenizer = load_model(config.model, torch.float32)
    ids = _prompt_ids(config, tokenizer, text)
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and ids.shape[1] + config.max_new_tokens > limit:
        raise ValueError(
            f"{ids.shape[1]} prompt tokens and {config.max_new_tokens} new ones are more than the "
            f"model's {limit}"
        )
    with _make_cache(config, model) as cache:
        began = time.perf_counter()
        output = cast(Any, model).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=max(1, config.max_new_tokens),
            do_sample=False,
        )
        seconds = time.perf_counter() - began
        if config.save_cache:
            cache.save(config.save_cache)
        return _describe(
            cache, str(tokenizer.decode(output[0, ids.shape[1] :])), seconds, output, ids
        )


def _make_cache(config: GenerateConfig, model: Any) -> SphericalCache:
    retention: bool | RetentionOptions | None = config.retention
    if retention:
        gate = GateOptions() if config.is_gated else None
        retention = RetentionOptions(policy=config.policy, gate=gate)
    return SphericalCache.for_model(
        model,
        config.budget,
        retention=retention,
        tiers=config.tier,
        calibration=config.calibration,
        options=CacheOptions(backend=config.backend),
    )


def _prompt_ids(config: GenerateConfig, tokenizer: Any, text: str) -> Tensor:
    if config.is_chat:
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids
    if ids.shape[1] == 0:
        raise ValueError("the prompt is empty")
    return ids


def _describe(
    cache: SphericalCache, text: str, seconds: float, output: Tensor, ids: Tensor
) -> dict[str, Any]:
    ledger, tokens = cache.ledger(), cache.get_seq_length()
    return {
        "text": text,
        "residency": cache.residency,
        "tier": None if cache.tier is None else cache.tier.name,
        "backend": cache.backend_name,
        "tokens": tokens,
        "b_kv": ledger.b_kv(tokens),
        "dense_b_kv": cache.config.geometry.dense_bytes_per_token,
        "ledger": ledger.to_dict(),
        "seconds": seconds,
        "tokens_per_s": (output.shape[1] - ids.shape[1]) / seconds,
        "environment": describe_environment(),
    }


@dataclass(frozen=True, slots=True)
class CalibrateConfig:
    """What to calibrate on.

    Attributes:
        model: ``smollm2``, a local folder, or a hub name.
        text: UTF-8 file.
        tokens: Tokens of the text to use.
        out: Safetensors file to write.
    """

    model: str
    text: str
    tokens: int
    out: str

    def __post_init__(self) -> None:
        """Reject a text too short to fit anything."""
        if self.tokens < 128:
            raise ValueError(f"tokens must be at least 128, got {self.tokens}")


def calibrate_to_file(config: CalibrateConfig) -> dict[str, Any]:
    """Run one forward pass, fit, save; returns what was done and how long it took."""
    model, tokenizer = load_model(config.model, torch.float32)
    ids = read_tokens(tokenizer, config.text, config.tokens)
    began = time.perf_counter()
    calibration = calibrate_model(model, ids, model_id=config.model)
    seconds = time.perf_counter() - began
    save_calibration(calibration, config.out)
    return {
        "file": config.out,
        "bytes": Path(config.out).stat().st_size,
        "model": config.model,
        "tokens": config.tokens,
        "samples_per_head": calibration.num_tokens,
        "seconds": seconds,
    }
