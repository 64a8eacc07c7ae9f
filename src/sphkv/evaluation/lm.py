# SPDX-License-Identifier: Apache-2.0
"""How far a cache moves a language model: KL to the dense model under teacher forcing."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sphkv.codec.calibration import Calibration, default_calibration
from sphkv.codec.calibration_file import load_calibration
from sphkv.core.tiers import DENSE_BITS
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.key_methods import (
    METHODS,
    SphericalMethod,
    StateMethod,
    comparison_method,
    tier_for_bits,
)
from sphkv.evaluation.text import read_tokens
from sphkv.integrations.models import load_model
from sphkv.integrations.teacher_forcing import (
    hidden_states,
    log_probabilities,
    transformed_states,
)
from sphkv.integrations.transformers.architecture import model_geometry, model_ropes
from sphkv.integrations.transformers.calibrate import calibrate_model

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
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
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
    """Loads a model and a text once and measures any number of settings on them."""

    def __init__(self, config: LMConfig) -> None:
        self._model, self._tokenizer = load_model(config.model, torch.float32)
        self._geometry = model_geometry(self._model)
        self._ropes = model_ropes(self._model)
        self._calibration: Calibration | None = None
        limit = getattr(self._model.config, "max_position_embeddings", None)
        if limit is not None and config.context > limit:
            raise ValueError(f"context {config.context} is longer than the model's {limit}")
        self._base = config
        self.input_ids = read_tokens(
            self._tokenizer, config.text, config.context, offset=config.offset
        )
        self._dense = hidden_states(self._model, self.input_ids)

    def calibration(self, config: LMConfig) -> Calibration:
        """The calibration a config asks for; made once."""
        if self._calibration is not None:
            return self._calibration
        if config.calibration is not None:
            found = load_calibration(config.calibration, geometry=self._geometry, ropes=self._ropes)
        elif config.calibration_text is not None:
            ids = read_tokens(self._tokenizer, config.calibration_text, config.calibration_tokens)
            found = calibrate_model(self._model, ids, model_id=config.model)
        else:
            ids = self.input_ids[:, :SELF_CALIBRATION_TOKENS]
            found = calibrate_model(self._model, ids, model_id=config.model, source="prompt")
        self._calibration = found
        return found

    def _method(self, config: LMConfig) -> StateMethod:
        head_dim = self._geometry.head_dim
        if config.method in ("spherical", "spherical-default"):
            tier = tier_for_bits(config.key_bits, config.value_bits, head_dim)
            if config.method == "spherical":
                calibration = self.calibration(config)
            else:
                calibration = default_calibration(self._geometry, self._ropes)
            return SphericalMethod(calibration, tier, dense_tokens=config.dense_tokens)
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
        with transformed_states(self._model, method):
            coded = hidden_states(self._model, self.input_ids)
        quality = self._compare(coded)
        record: dict[str, Any] = {
            **quality,
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
        if isinstance(method, SphericalMethod):
            ledger = method.ledger()
            record["b_kv"] = ledger.b_kv(config.context)
            record["ledger"] = ledger.to_dict()
            record["tier"] = method.tier.name
            record["dense_b_kv"] = self._geometry.dense_bytes_per_token
        return record

    def _compare(self, coded: Tensor) -> dict[str, float]:
        """KL, loss difference and top-1 agreement over all positions."""
        kl = nll = same = 0.0
        tokens = self.input_ids.shape[1]
        following = self.input_ids[0, 1:]
        pairs = zip(
            log_probabilities(self._model, self._dense),
            log_probabilities(self._model, coded),
            strict=True,
        )
        for (rows, dense), (_, ours) in pairs:
            kl += float((dense.exp() * (dense - ours)).sum(-1).double().sum())
            same += float((dense.argmax(-1) == ours.argmax(-1)).sum())
            target = following[rows]
            pick = (torch.arange(len(target)), target)
            nll += float((dense[pick] - ours[pick]).double().sum())
        return {"kl": kl / tokens, "nll_delta": nll / (tokens - 1), "same_top1": same / tokens}
