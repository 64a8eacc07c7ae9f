# SPDX-License-Identifier: Apache-2.0
"""Calibrate a model on a text and keep the result in a file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sphkv.codec.calibration_file import save_calibration
from sphkv.evaluation.text import read_tokens
from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.calibrate import calibrate_model


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
