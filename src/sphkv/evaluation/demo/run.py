# SPDX-License-Identifier: Apache-2.0
"""The demonstration: one model, one long document, three caches side by side."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sphkv.cache.config import PROMPT_CALIBRATION
from sphkv.codec.calibration import Calibration
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
    prefill_with_queries,
    score,
)
from sphkv.retention.policy import RetentionPolicy

_CALIBRATION_TOKENS = 1024
_ANSWER_TOKENS = 6
# More than any sentence has, also where tokens are bytes: a document grows up to its length.
_MOST_SENTENCE_TOKENS = 160
_OPENING = " In the spring of that year"


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """What the demonstration runs.

    Attributes:
        model: ``smollm2``, a local folder, or a hub name.
        context: Tokens of the document.
        tier: Tier of the cache with one tier.
        budget: Ceiling of the cache under the controller.
        decode_tokens: Tokens after the document that are fed one by one, timed and compared.
    """

    model: str = "smollm2"
    context: int = 8000
    tier: str = "k2v3"
    budget: str = "10%"
    decode_tokens: int = 48

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


@dataclass(frozen=True, slots=True, eq=False)
class _Followed:
    """Tokens fed one by one after the document.

    Attributes:
        input_ids: ``[1, tokens]`` that were fed.
        log_probs: ``[tokens, vocabulary]`` after each of them.
        seconds: Of each step.
        num_tokens: Tokens held after the document and after each step.
        peak_bytes: Most bytes of the same moments; those of a dense bfloat16 cache if it is dense.
        limit_bytes: What a budget allowed then; None without one.
    """

    input_ids: Tensor
    log_probs: Tensor
    seconds: list[float]
    num_tokens: list[int]
    peak_bytes: list[int]
    limit_bytes: list[int] | None


def run_demo(config: DemoConfig, tell: Callable[[str], None]) -> dict[str, Any]:
    """Prefill once, code twice, then answer and go on with all three caches.

    Args:
        config: Model, context, tier and budget.
        tell: Called with a line of progress.

    Returns:
        Figures for the table and the report; ``caches`` has one entry per cache.
    """
    tell(f"loading {config.model}")
    stage = _Stage(*load_model(config.model, torch.float32), tell)
    _check_fits(stage, config)
    facts = hidden_facts()
    document = _make_document(stage, config.context, facts)
    tell(f"prefill of {config.context} tokens")
    watched = RetentionPolicy().watched_tokens
    dense, queries, prefill_s = prefill_with_queries(stage.model, document, watched)
    tell("calibration on the document's beginning")
    began = time.perf_counter()
    calibration = calibrate_model(
        stage.model,
        document[:, :_CALIBRATION_TOKENS],
        model_id=config.model,
        options=PROMPT_CALIBRATION,
        source="prompt",
    )
    calibrate_s = time.perf_counter() - began
    tell("asking the dense cache, and letting it go on")
    shown = [_show_dense(stage, config, dense, facts)]
    text = shown[0].pop("ids")
    truth = shown[0].pop("log_probs")
    for name in ("tier", "controller"):
        tell(f"coding: {name}")
        with _make_cache(stage, config, name, calibration) as cache:
            began = time.perf_counter()
            encode_dense_cache(cache, dense, queries=queries if name == "controller" else None)
            encode_s = time.perf_counter() - began
            tell(f"asking and going on: {name}")
            shown.append(_show_coded(stage, config, name, cache, facts, text, truth))
            shown[-1]["encode_s"] = encode_s
            backend = cache.backend_name
    return {
        "config": {name: getattr(config, name) for name in DemoConfig.__slots__},
        "prefill_s": prefill_s,
        "calibrate_s": calibrate_s,
        "dense_b_kv": model_geometry(stage.model).dense_bytes_per_token,
        "backend": backend,
        "facts": [{"question": fact.question.strip(), "answer": fact.answer} for fact in facts],
        "text": stage.tokenizer.decode(text[0]),
        "caches": shown,
        "environment": describe_environment(),
    }


def _check_fits(stage: _Stage, config: DemoConfig) -> None:
    """A wrong tier, budget or length must not cost a prefill."""
    limit = getattr(stage.model.config, "max_position_embeddings", config.context)
    if config.context + config.decode_tokens + 64 > limit:
        raise ValueError(f"context {config.context} leaves no room in the model's {limit} tokens")
    for name in ("tier", "controller"):
        with _make_cache(stage, config, name, None) as cache:
            start = cache.holds_from
        if start is not None and start > config.context:
            raise ValueError(
                f"budget {config.budget} holds from {start} tokens on, got context {config.context}"
            )


def _make_cache(
    stage: _Stage, config: DemoConfig, name: str, calibration: Calibration | None
) -> SphericalCache:
    if name == "tier":
        return SphericalCache.for_model(stage.model, tiers=config.tier, calibration=calibration)
    return SphericalCache.for_model(
        stage.model, config.budget, retention=True, calibration=calibration
    )


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


def _show_dense(
    stage: _Stage, config: DemoConfig, dense: Any, facts: list[HiddenFact]
) -> dict[str, Any]:
    """Answers of the dense cache, and the text that the others are compared on."""
    per_token = model_geometry(stage.model).dense_bytes_per_token
    answers = [_ask(stage, fact, dense) for fact in facts]
    begin = dense.get_seq_length()
    followed = _follow(
        stage,
        dense,
        stage.tokens(_OPENING),
        lambda: (dense.get_seq_length() * per_token, None),
        num_new=config.decode_tokens,
    )
    dense.crop(begin - dense.get_seq_length())
    return {
        "name": "dense",
        "setting": "bfloat16",
        **_figures(followed, followed.log_probs, answers, facts),
        "ids": followed.input_ids,
        "log_probs": followed.log_probs,
    }


def _show_coded(
    stage: _Stage,
    config: DemoConfig,
    name: str,
    cache: SphericalCache,
    facts: list[HiddenFact],
    text: Tensor,
    truth: Tensor,
) -> dict[str, Any]:
    """Answers of a coded cache, then the dense cache's text token by token."""
    answers = []
    for fact in facts:
        with _branch(cache) as branch:
            answers.append(_ask(stage, fact, branch))
    engine = cache.engine

    def peak() -> tuple[int, int | None]:
        found = max(engine.peak_bytes, engine.resident_bytes())
        engine.peak_bytes = 0
        return found, engine.limit_bytes()

    assert engine.store is not None
    followed = _follow(stage, cache, text, peak)
    return {
        "name": name,
        "setting": config.tier if name == "tier" else config.budget,
        **_figures(followed, truth, answers, facts),
        "tiers": cache.describe().tiers,
        "ledger": cache.ledger().to_dict(),
        "tier_map": tier_map(engine.store, cache.length),
    }


@contextmanager
def _branch(cache: SphericalCache) -> Iterator[SphericalCache]:
    """A copy to go on with; the cache itself stays as it is."""
    with cache.fork() as copy:
        yield copy
        copy.reset()


def _follow(
    stage: _Stage,
    cache: Any,
    text: Tensor,
    peak: Callable[[], tuple[int, int | None]],
    *,
    num_new: int = 0,
) -> _Followed:
    """Feed a text ``[1, tokens]`` token by token, then ``num_new`` of the most likely ones."""
    rows: list[Tensor] = []
    seconds, lengths, moments = [], [cache.get_seq_length()], [peak()]
    fed = list(text.split(1, dim=1))
    for at in range(len(fed) + num_new):
        if at == len(fed):
            fed.append(rows[-1].argmax(-1, keepdim=True))
        began = time.perf_counter()
        logits = score(stage.model, cache, fed[at])
        seconds.append(time.perf_counter() - began)
        rows.append(logits.log_softmax(-1))
        lengths.append(cache.get_seq_length())
        moments.append(peak())
    limits = [limit for _, limit in moments if limit is not None]
    peaks = [most for most, _ in moments]
    ids = torch.cat(fed, 1)
    return _Followed(ids, torch.cat(rows), seconds, lengths, peaks, limits or None)


def _figures(
    followed: _Followed, truth: Tensor, answers: list[str], facts: list[HiddenFact]
) -> dict[str, Any]:
    ours = followed.log_probs
    median = statistics.median(followed.seconds)
    return {
        "peak_bytes": max(followed.peak_bytes),
        "tokens_per_s": 1 / median,
        "step_ms": 1e3 * median,
        "kl": float((truth.exp() * (truth - ours)).sum(-1).mean()),
        "same_top1": float((truth.argmax(-1) == ours.argmax(-1)).float().mean()),
        "answers": answers,
        "num_found": sum(a == fact.answer for a, fact in zip(answers, facts, strict=True)),
        "steps": {
            "num_tokens": followed.num_tokens,
            "bytes": followed.peak_bytes,
            "limit": followed.limit_bytes,
        },
    }


def _ask(stage: _Stage, fact: HiddenFact, cache: Any) -> str:
    """First word of what the model answers."""
    ids, _ = continue_greedily(stage.model, cache, stage.tokens(fact.question), _ANSWER_TOKENS)
    found = re.search(r"\w+", stage.tokenizer.decode(ids[0]))
    return found.group() if found else ""
