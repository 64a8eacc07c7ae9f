# SPDX-License-Identifier: Apache-2.0
"""The demonstration: one model, one long document, three caches side by side.

The document is made up by a generator, with facts hidden in it.
"""

from __future__ import annotations

import random
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
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.inspect import tier_map
from sphkv.integrations.models import load_model
from sphkv.integrations.transformers.architecture import model_geometry
from sphkv.integrations.transformers.cache import CacheOptions, SphericalCache
from sphkv.integrations.transformers.calibrate import calibrate_model
from sphkv.integrations.transformers.stepping import (
    continue_greedily,
    encode_dense_cache,
    prefill_with_queries,
    score,
)
from sphkv.retention.policy import RetentionPolicy

_SUBJECTS = (
    "The keeper of the lighthouse", "A carpenter from the lower town", "The ferry captain",
    "An old schoolteacher", "The clerk of the customs house", "A travelling musician",
    "The widow who ran the inn", "A young surveyor", "The baker's eldest son", "The night watchman",
    "A trader in wool and tin", "The doctor of the garrison", "The gardener of the abbey",
)  # fmt: skip
_VERBS = (
    "walked along the harbour wall", "counted the barrels twice", "repaired the broken gate",
    "wrote a long letter to the council", "waited for the evening tide", "mended a torn sail",
    "argued about the price of salt", "carried lanterns down to the pier",
    "read aloud to the guests", "measured the depth of the channel", "painted the shutters blue",
    "asked after the missing cart",
    "listened to the storm on the roof", "kept the fire burning until dawn",
)  # fmt: skip
_REASONS = (
    "because the winter had come early", "while the bells rang for the market",
    "although nobody had asked for it", "so that the ships could leave before noon",
    "since the road over the hills was closed", "as the fog rolled in from the sea",
    "before the first guests arrived", "after the long meeting in the hall",
    "and spoke of it for many years", "without a word to the neighbours",
    "hoping that the harvest would be better", "until the last light faded",
)  # fmt: skip
# What is asked about, and what the answer may be. No two share their words: a small model that
# finds a fact at all then finds the right one.
_FACTS = (
    ("the pass number of the Falcon gate is", "What is the pass number of the Falcon gate?",
     ("52445", "71863", "90127")),
    ("the dog of the ferry captain is called", "What is the dog of the ferry captain called?",
     ("Biscuit", "Pepper", "Ginger")),
    ("the flag over the customs house is coloured",
     "What colour is the flag over the customs house?", ("purple", "orange", "silver")),
    ("the stolen clock came from the city of", "From which city did the stolen clock come?",
     ("Vienna", "Lisbon", "Cairo")),
    ("the new bridge was built by a man named", "Who built the new bridge?",
     ("Edmund", "Victor", "Oliver")),
    ("the treasure lies buried under the old", "Under what does the treasure lie buried?",
     ("windmill", "chapel", "stable")),
)  # fmt: skip
_DEPTHS = (0.08, 0.27, 0.46, 0.65, 0.84, 0.95)

_CALIBRATION_TOKENS = 1024
_ANSWER_TOKENS = 6
# More than any sentence has, also where tokens are bytes: a document grows up to its length.
_MOST_SENTENCE_TOKENS = 160
_OPENING = " In the spring of that year"


@dataclass(frozen=True, slots=True)
class HiddenFact:
    """One fact of the document.

    Attributes:
        sentence: As it stands in the text.
        question: Text to append; the model continues it.
        answer: What the continuation must begin with.
    """

    sentence: str
    question: str
    answer: str


def hidden_facts(seed: int = 7) -> list[HiddenFact]:
    """Six facts of one word each; the seed chooses the words."""
    generator = random.Random(seed)
    facts = []
    for start, question, answers in _FACTS:
        answer = generator.choice(answers)
        facts.append(
            HiddenFact(
                sentence=f"Remember this well: {start} {answer}.",
                question=f"\n\nQuestion: {question}\nAnswer: According to the chronicle, {start}",
                answer=answer,
            )
        )
    return facts


def make_document(num_sentences: int, facts: list[HiddenFact], seed: int = 7) -> str:
    """Paragraphs of plain sentences with the facts at fixed depths."""
    generator = random.Random(seed + 1)
    sentences = []
    for _ in range(num_sentences):
        day, year = generator.randint(1, 28), generator.randint(1702, 1788)
        subject, verb = generator.choice(_SUBJECTS), generator.choice(_VERBS)
        reason = generator.choice(_REASONS)
        form = generator.randrange(3)
        if form == 0:
            sentences.append(f"{subject} {verb} {reason}.")
        elif form == 1:
            sentences.append(f"On day {day} of {year}, {subject[0].lower()}{subject[1:]} {verb}.")
        else:
            sentences.append(f"It is told that {subject[0].lower()}{subject[1:]} {verb} {reason}.")
    for fact, depth in zip(facts, _DEPTHS, strict=True):
        sentences.insert(int(depth * num_sentences), fact.sentence)
    paragraphs = [" ".join(sentences[at : at + 8]) for at in range(0, len(sentences), 8)]
    return "A chronicle of the harbour town.\n\n" + "\n\n".join(paragraphs)


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
    # the demo shows a model that nobody has calibrated
    options = CacheOptions(finds_calibration=False)
    if name == "tier":
        return SphericalCache.for_model(
            stage.model, tiers=config.tier, calibration=calibration, options=options
        )
    return SphericalCache.for_model(
        stage.model, config.budget, retention=True, calibration=calibration, options=options
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
