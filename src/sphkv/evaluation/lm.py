# SPDX-License-Identifier: Apache-2.0
"""How far a cache moves a language model: KL to the dense model under teacher forcing."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sphkv.codec.calibration import default_calibration
from sphkv.core.configs import check_name
from sphkv.core.tiers import DENSE_BITS
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.harness.states import hidden_states, read_prompt
from sphkv.evaluation.key_methods import (
    COORDINATES,
    METHODS,
    CoordinateMethod,
    SphericalMethod,
    StateMethod,
    comparison_method,
    tier_for_bits,
)
from sphkv.evaluation.metrics.divergence import token_divergence
from sphkv.evaluation.runner.session import Session
from sphkv.evaluation.workloads.case import check_context
from sphkv.evaluation.workloads.texts import read_tokens
from sphkv.integrations.transformers.listening import transformed_states

CALIBRATION_TOKENS = 4096
SELF_CALIBRATION_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class LMConfig:
    """One measurement of language-model loss.

    Attributes:
        model: ``smollm2``, a local folder, or a hub name.
        text: UTF-8 file to read; its first tokens are the context.
        context: Tokens; never more than the model allows or the text has.
        key_bits: Bits per key element at most, all metadata included.
        value_bits: Bits per value element at most; 16 keeps values.
        method: One of ``METHODS``.
        calibration_text: Text to calibrate on; None calibrates on the context's beginning.
        calibration: A calibration file instead of a text.
        calibration_tokens: Tokens of the calibration text.
        offset: Characters of the text to skip.
        dense_tokens: Leading tokens kept dense.
    """

    model: str
    text: str
    context: int
    key_bits: float = 2.25
    value_bits: float = 16.0
    method: str = "spherical"
    calibration_text: str | None = None
    calibration: str | None = None
    calibration_tokens: int = CALIBRATION_TOKENS
    offset: int = 0
    dense_tokens: int = 4

    def __post_init__(self) -> None:
        """Reject what cannot be measured."""
        check_name("method", self.method, METHODS)
        if self.context < 2:
            raise ValueError(f"context must be at least 2 tokens, got {self.context}")
        for name in ("key_bits", "value_bits"):
            if not 0 < getattr(self, name) <= DENSE_BITS:
                raise ValueError(
                    f"{name} must be above 0 and at most {DENSE_BITS}, got {getattr(self, name)}"
                )
        for name in ("offset", "dense_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.calibration is not None and self.calibration_text is not None:
            raise ValueError("give calibration or calibration_text, not both")


class LMRunner:
    """A text read once, and any number of codecs measured on it."""

    def __init__(self, config: LMConfig) -> None:
        given = (config.calibration_text, config.calibration)
        text, file = (None if path is None else Path(path) for path in given)
        self._session = Session(
            config.model,
            calibration_text=text,
            calibration_tokens=config.calibration_tokens,
            calibration_file=file,
        )
        check_context(config.context, self._session.shape.max_tokens, extra=0)
        self.input_ids = read_tokens(
            self._session.tokenizer, config.text, config.context, offset=config.offset
        )
        if text is None and file is None:
            self._session.calibrate_on(self.input_ids[:, :SELF_CALIBRATION_TOKENS])
        self._dense = hidden_states(self._session.model, self.input_ids)

    @cached_property
    def _calibration_keys(self) -> list[Tensor]:
        """Keys of every layer of the text that codebooks are fitted on."""
        ids = torch.tensor([self._session.calibration_ids])
        states = read_prompt(self._session.model, ids)
        return [part.keys for part in states.layers]

    def _method(self, config: LMConfig) -> StateMethod:
        shape = self._session.shape
        head_dim = shape.geometry.head_dim
        if config.method in ("spherical", "spherical-default"):
            tier = tier_for_bits(config.key_bits, config.value_bits, head_dim)
            if config.method == "spherical":
                calibration = self._session.calibration
            else:
                calibration = default_calibration(shape.geometry, shape.ropes)
            return SphericalMethod(calibration, tier, dense_tokens=config.dense_tokens)
        if config.method in COORDINATES:
            return CoordinateMethod(
                config.method,
                config.key_bits,
                config.value_bits,
                calibration_keys=self._calibration_keys,
                dense_tokens=config.dense_tokens,
            )
        return comparison_method(
            config.method,
            config.key_bits,
            config.value_bits,
            head_dim=head_dim,
            dense_tokens=config.dense_tokens,
        )

    def run(self, config: LMConfig) -> dict[str, Any]:
        """Measure one setting.

        Returns:
            A record with ``kl``, ``nll_delta``, ``same_top1``, the bits really stored, and for
            the product's own codec ``b_kv`` and ``ledger``.
        """
        began = time.perf_counter()
        method = self._method(config)
        calibrated = time.perf_counter()
        model = self._session.model
        with transformed_states(model, method):
            coded = hidden_states(model, self.input_ids)
        found = token_divergence(model, self._dense, coded, self.input_ids[0, 1:]).summary()
        record: dict[str, Any] = {
            **{name: found[name] for name in ("kl", "kl_without_worst", "nll_delta", "same_top1")},
            "method": config.method,
            "key_bits": method.key_bits,
            "value_bits": method.value_bits,
            "b_kv": None,
            "ledger": None,
            "realisation": "format-only",
            "calibrate_s": calibrated - began,
            "run_s": time.perf_counter() - calibrated,
            "config": asdict(config),
            "environment": describe_environment(),
        }
        if isinstance(method, CoordinateMethod):
            record["angle_bits"], record["table_bytes"] = method.angle_bits, method.table_bytes
        if isinstance(method, SphericalMethod):
            ledger = method.ledger()
            record["b_kv"] = ledger.b_kv(config.context)
            record["ledger"] = ledger.to_dict()
            record["tier"] = method.tier.name
            record["dense_b_kv"] = self._session.shape.geometry.dense_bytes_per_token
        return record
