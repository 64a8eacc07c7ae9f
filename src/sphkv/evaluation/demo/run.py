# SPDX-License-Identifier: Apache-2.0
"""The demonstration: one model, one long document, dense and coded caches side by side."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sphkv.cache.plan import parse_tiers
from sphkv.codec.calibration import CalibrationOptions
from sphkv.evaluation.demo.text import HiddenFact, hidden_facts, make_document
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.tier_map import tier_map
from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.architecture import model_geometry
from sphkv.integrations.transformers.cache import SphericalCache
from sphkv.integrations.transformers.calibrate import calibrate_model
from sphkv.integrations.transformers.convert import encode_dense_cache
from sphkv.integrations.transformers.stepping import (
    continue_greedily,
    prefill,
    score_and_forget,
)

_CALIBRATION_TOKENS = 1024
_ANSWER_TOKENS = 8
_MOST_SENTENCE_TOKENS = 40


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """What the demonstration runs.

    Attributes:
        model: ``smollm2``, a local folder, or a hub name.
        context: Tokens of the document.
        tier: Tier of sealed pages.
        decode_tokens: Tokens of the continuation that is timed and compared.
    """

    model: str = "smollm2"
    context: int = 8000
    tier: str = "k2v3"
    decode_tokens: int = 32

    def __post_init__(self) -> None:
        """Reject sizes that show nothing."""
        if self.context < 1024:
            raise ValueError(f"context must be at least 1024 tokens, got {self.context}")
        if self.decode_tokens < 2:
            raise ValueError(f"decode_tokens must be at least 2, got {self.decode_tokens}")


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """A model with a tokenizer, and where progress is told."""

    model: Any
    tokenizer: Any
    tell: Callable[[str], None]

    def tokens(self, text: str) -> Tensor:
        ids: Tensor = self.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        return ids


def run_demo(config: DemoConfig, tell: Callable[[str], None]) -> dict[str, Any]:
    """Prefill once, code, then answer and continue with both caches.

    Args:
        config: Model, context and tier.
        tell: Called with a line of progress.

    Returns:
        Figures for the table and the report.
    """
    tell(f"loading {config.model}")
    stage = _Stage(*load_model(config.model, torch.float32), tell)
    limit = getattr(stage.model.config, "max_position_embeddings", config.context)
    longest = config.context + config.decode_tokens + 64
    if longest > limit:
        raise ValueError(f"context {config.context} leaves no room in the model's {limit} tokens")
    # a wrong tier must not cost a prefill
    parse_tiers(config.tier, model_geometry(stage.model).head_dim)
    facts = hidden_facts()
    document = _make_document(stage, config.context, facts)
    tell(f"prefill of {config.context} tokens")
    dense, prefill_s = prefill(stage.model, document)
    tell("calibration on the document's beginning")
    began = time.perf_counter()
    calibration = calibrate_model(
        stage.model,
        document[:, :_CALIBRATION_TOKENS],
        model_id=config.model,
        options=CalibrationOptions(max_tokens=_CALIBRATION_TOKENS),
        source="prompt",
    )
    calibrate_s = time.perf_counter() - began
    tell("encoding")
    began = time.perf_counter()
    with SphericalCache.for_model(stage.model, tiers=config.tier, calibration=calibration) as coded:
        encode_dense_cache(coded, dense)
        encode_s = time.perf_counter() - began
        figures = _compare(stage, config, dense, coded, facts)
    return {
        "config": {"model": config.model, "context": config.context, "tier": config.tier},
        "prefill_s": prefill_s,
        "calibrate_s": calibrate_s,
        "encode_s": encode_s,
        **figures,
        "environment": describe_environment(),
    }


def _make_document(stage: _Stage, context: int, facts: list[HiddenFact]) -> Tensor:
    """Exactly ``context`` tokens; at most the last sentences are cut, and no fact is in them."""
    sentences = context // _MOST_SENTENCE_TOKENS
    while (document := stage.tokens(make_document(sentences, facts))).shape[1] < context:
        missing = context - document.shape[1]
        sentences += max(1, missing // _MOST_SENTENCE_TOKENS)
    document = document[:, :context]
    text = stage.tokenizer.decode(document[0])
    for fact in facts:
        if fact.sentence not in text:
            raise ValueError(f"{context} tokens are too few to hold {fact.sentence!r}")
    return document


def _compare(
    stage: _Stage, config: DemoConfig, dense: Any, coded: SphericalCache, facts: list[HiddenFact]
) -> dict[str, Any]:
    """Questions, a continuation and its probabilities, with the dense cache and the coded one."""
    ledger = coded.ledger()
    dense_b_kv = coded.config.geometry.dense_bytes_per_token
    store = coded.engine.store
    tiers = [] if store is None else tier_map(store, config.context)
    stage.tell("asking for the hidden facts")
    answers = [_ask(stage, fact, dense, coded) for fact in facts]
    stage.tell("continuing the text")
    start = stage.tokens(" In the spring of that year")
    length = config.decode_tokens
    dense_ids, dense_steps = continue_greedily(stage.model, dense, start, length)
    coded_ids, coded_steps = continue_greedily(stage.model, coded, start, length)
    # the dense continuation, scored by both
    forced = torch.cat([start, dense_ids], 1)
    truth = score_and_forget(stage.model, dense, forced)
    ours = score_and_forget(stage.model, coded, forced)
    return {
        "b_kv": ledger.b_kv(config.context),
        "dense_b_kv": dense_b_kv,
        "share_of_dense": ledger.b_kv(config.context) / dense_b_kv,
        "ledger": ledger.to_dict(),
        "tier_map": tiers,
        "backend": coded.engine.backend_name,
        "answers": answers,
        "num_agreeing": sum(a["dense"] == a["coded"] for a in answers),
        "kl": float((truth.exp() * (truth - ours)).sum(-1).mean()),
        "same_top1": float((truth.argmax(-1) == ours.argmax(-1)).float().mean()),
        "dense": _timing(stage, dense_ids, dense_steps, config.context),
        "coded": _timing(stage, coded_ids, coded_steps, config.context),
    }


def _timing(stage: _Stage, ids: Tensor, seconds: list[float], context: int) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "text": stage.tokenizer.decode(ids[0]),
        "tokens_per_s": 1 / median,
        "step_ms": 1e3 * median,
        "step_ms_per_1k_context": 1e6 * median / context,
    }


def _ask(stage: _Stage, fact: HiddenFact, dense: Any, coded: SphericalCache) -> dict[str, Any]:
    question = stage.tokens(fact.question)
    texts = []
    for cache in (dense, coded):
        ids, _ = continue_greedily(stage.model, cache, question, _ANSWER_TOKENS)
        found = re.search(r"\w+", stage.tokenizer.decode(ids[0]))
        texts.append(found.group() if found else "")
    return {
        "question": fact.question.strip(),
        "answer": fact.answer,
        "dense": texts[0],
        "coded": texts[1],
    }
