# SPDX-License-Identifier: Apache-2.0
"""One measured point: a prompt stored by a method, and what the model says after it.

A prompt is read once by the dense model. Each method then stores those states its own way, so that
its cost is the time to store and the time to decode. A point also tells how it came about (tiers,
margins and what tipped over) and, over seeds, whether success is a matter of luck.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sphkv.core.tiers import RUN_TOKENS
from sphkv.evaluation.environment import gpu_range
from sphkv.evaluation.harness.decode import ByteTrace, follow_text
from sphkv.evaluation.harness.subject import Subject, wait_for
from sphkv.evaluation.metrics.answers import (
    Reply,
    begins_with_answer,
    best_f1,
    exact_match,
    reply_failures,
    token_f1,
    trajectory_sensitivity,
)
from sphkv.evaluation.metrics.divergence import TokenDivergence, answer_divergence, token_divergence
from sphkv.evaluation.metrics.statistics import DecodeTimes
from sphkv.evaluation.runner.decoding import (
    decode_tokens,
    drawn,
    episode_quality,
    run_episode,
    stop_rule,
)
from sphkv.evaluation.runner.methods import decode_bytes
from sphkv.evaluation.runner.session import ReadCase, exact_subject
from sphkv.evaluation.schema import (
    AnswerQuality,
    EpisodeQuality,
    MarginCounts,
    Memory,
    Result,
    TextQuality,
)
from sphkv.retention.features import head_spread, segment_spread, state_bytes_of

MARGIN_EDGES = (0.1, 0.3, 1.0, 3.0)
"""Gaps of the two best tokens, in nats, between which tokens are counted; small is brittle."""

_COLUMNS = 96
_FIRST = ord("a")


def describe_allocation(subject: Subject) -> dict[str, Any] | None:
    """Where the controller spent its bytes; None of a method that has no controller.

    ``map`` has one text per layer and head: the tier, by its place in ``tiers`` as a letter, of
    evenly spaced tokens of the prompt.
    """
    decision = subject.decision()
    if decision is None:
        return None
    contract, tiers = decision.contract, decision.tiers
    tier_id = contract.tier_id.flatten(0, 1)
    at = torch.linspace(0, contract.num_tokens - 1, _COLUMNS).round().long()
    each = state_bytes_of(contract.tier_id, tiers.state_bytes(subject.geometry.head_dim))
    spread = head_spread(each)
    labels = decision.segments.label(contract.num_tokens, recent_tokens=RUN_TOKENS)
    return {
        "tiers": [tier.name for tier in tiers],
        "map": ["".join(chr(_FIRST + tier) for tier in row) for row in tier_id[:, at].tolist()],
        "num_tokens": contract.num_tokens,
        "states": contract.state_counts(len(tiers)).sum((0, 1)).tolist(),
        "head_bytes_per_token": [round(size, 3) for size in spread.bytes_per_token],
        "head_entropy": spread.entropy,
        "head_gini": spread.gini,
        "segments": segment_spread(each, labels),
    }


def describe_margins(found: TokenDivergence, subject: Subject) -> MarginCounts:
    """How often the best token changed, by how sure the exact model was of it.

    Args:
        found: The method against the exact model.
        subject: A controller also tells the drift it predicts, to be set against its margins.
    """
    bins = torch.bucketize(found.margin, torch.tensor(MARGIN_EDGES, device=found.margin.device))
    num_bins = len(MARGIN_EDGES) + 1
    counts: MarginCounts = {
        "tokens": torch.bincount(bins, minlength=num_bins).tolist(),
        "tipped": torch.bincount(bins[~found.is_same], minlength=num_bins).tolist(),
    }
    decision = subject.decision()
    if decision is not None:
        counts["drift"] = decision.drift
        counts["margins"] = [round(margin, 4) for margin in found.own_margin.tolist()]
        counts["tipped_at"] = (~found.is_same).nonzero()[:, 0].tolist()
    return counts


def sampled_quality(
    model: Any, tokenizer: Any, read: ReadCase, make: Callable[[], Subject], seeds: range
) -> dict[str, Any]:
    """Scores of sampled answers and ``S_traj``, the same random numbers for both caches.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        read: The prompt.
        make: An empty cache of the method.
        seeds: One answer each.
    """
    case = read.case
    stops = stop_rule(tokenizer, at_line_end=case.stops_at_newline)

    def score(cache: Subject, seed: int) -> float:
        last = read.states.hidden[-1:]
        got = decode_tokens(model, cache, last, case.max_new_tokens, stops, choose=drawn(seed))
        text = tokenizer.decode(got.token_ids, skip_special_tokens=True).strip()
        judge = begins_with_answer if case.workload == "needle" else best_f1
        return judge(text, case.answers)

    ours, dense = [], []
    for seed in seeds:
        cache = make()
        cache.store_prompt(read.states)
        ours.append(score(cache, seed))
        if seed not in read.work.sampled:
            exact = exact_subject(model, read.states, case.max_new_tokens)
            read.work.sampled[seed] = score(exact, seed)
        dense.append(read.work.sampled[seed])
    return {
        "sampled": ours,
        "sampled_reference": dense,
        "s_traj": trajectory_sensitivity({case.case_id: ours}),
        "s_traj_reference": trajectory_sensitivity({case.case_id: dense}),
    }


@dataclass(frozen=True, slots=True)
class DecodeWindow:
    """How decoding is timed; the same for every method.

    Attributes:
        num_warm: Steps that are not timed.
        num_measured: Steps that are.
    """

    num_warm: int = 4
    num_measured: int = 12

    def __post_init__(self) -> None:
        """Reject a window without a measurement."""
        if self.num_warm < 0 or self.num_measured < 1:
            raise ValueError(
                f"window needs warm-up >= 0 and measured >= 1 steps, got {self.num_warm} and "
                f"{self.num_measured}"
            )


@dataclass(frozen=True, slots=True)
class _Continued:
    """What came after a prompt."""

    quality: TextQuality | AnswerQuality | EpisodeQuality
    step_s: Sequence[float]
    attend_s: Sequence[float]
    trace: ByteTrace


def measure_case(
    model: Any, tokenizer: Any, read: ReadCase, subject: Subject, window: DecodeWindow
) -> Result:
    """Store a read prompt in an empty cache and measure what follows.

    Returns:
        ``quality``, ``memory`` and ``times``; everything that varies from run to run is in the
        last. A controller's points on texts also have their ``allocation``.
    """
    reused_s = read.work.reused_s
    began = time.perf_counter()
    with gpu_range("allocate and write"):
        subject.store_prompt(read.states)
        wait_for(read.states.hidden.device)
    # what an earlier cache found out is charged as if it had been found out again
    store_s = time.perf_counter() - began + read.work.reused_s - reused_s
    stored_bytes = subject.resident_bytes()
    if read.case.following_ids:
        done = _follow_text(model, read, subject, window)
    elif read.case.task is not None:
        assert read.episode is not None
        last = read.states.hidden[-1:]
        episode = run_episode(model, tokenizer, read.case.task, subject, last)
        quality = episode_quality(episode, read.episode)
        done = _Continued(quality, episode.step_s, episode.attend_s, episode.trace)
    else:
        done = _answer(model, tokenizer, read, subject, window)
    times = DecodeTimes(
        read.prefill_s, store_s, tuple(done.step_s), window.num_warm, tuple(done.attend_s)
    )
    result: Result = {
        "quality": done.quality,
        "memory": describe_memory(subject, stored_bytes, done.trace),
        "times": times.to_dict(),
    }
    allocation = describe_allocation(subject) if read.case.following_ids else None
    if allocation is not None:
        result["allocation"] = allocation
    return result


def _follow_text(model: Any, read: ReadCase, subject: Subject, window: DecodeWindow) -> _Continued:
    """Teacher forcing: single steps first, which are timed, then the rest."""
    ids = read.states.following
    run = follow_text(subject, ids, num_timed=window.num_warm + window.num_measured)
    found = token_divergence(model, read.reference, run.hidden, ids[0, 1:])
    quality: TextQuality = {**found.summary(), "by_margin": describe_margins(found, subject)}
    return _Continued(quality, run.step_s, run.attend_s, run.trace)


def _answer(
    model: Any, tokenizer: Any, read: ReadCase, subject: Subject, window: DecodeWindow
) -> _Continued:
    """The method's own greedy answer, scored against the truth and the exact model's answer."""
    case = read.case
    stops = stop_rule(tokenizer, at_line_end=case.stops_at_newline)
    got = decode_tokens(
        model, subject, read.states.hidden[-1:], case.max_new_tokens, stops,
        num_timed=window.num_warm + window.num_measured,
    )  # fmt: skip
    text = tokenizer.decode(got.token_ids, skip_special_tokens=True).strip()
    exact = tokenizer.decode(read.answer_ids, skip_special_tokens=True).strip()
    ours = Reply(text, got.token_ids, got.is_ended)
    dense = Reply(exact, read.answer_ids, len(read.answer_ids) < case.max_new_tokens)
    answers = (got.hidden, got.token_ids, read.reference, read.answer_ids)
    quality: AnswerQuality = {
        "answer": text,
        "reference_answer": exact,
        "f1": best_f1(text, case.answers),
        "f1_reference": best_f1(exact, case.answers),
        "agreement_f1": 1.0 if text == exact else token_f1(text, exact),
        "em": exact_match(text, case.answers),
        "found": begins_with_answer(text, case.answers),
        "found_reference": begins_with_answer(exact, case.answers),
        "is_same": float(got.token_ids == read.answer_ids),
        "length": len(got.token_ids),
        "length_drift": len(got.token_ids) - len(read.answer_ids),
        "is_ended": float(got.is_ended),
        "failures": list(reply_failures(ours, dense)),
        "kl": answer_divergence(model, *answers),
    }
    return _Continued(quality, got.step_s, got.attend_s, got.trace)


def describe_memory(subject: Subject, stored_bytes: int, trace: ByteTrace) -> Memory:
    """``M_KV`` by kind and the figures the paper derives from it, at the highest moment.

    Args:
        subject: The cache after its last pass.
        stored_bytes: Resident bytes after the prompt was stored.
        trace: Bytes of every pass since.
    """
    ledger, tokens = subject.ledger(), subject.num_tokens()
    dense = subject.geometry.dense_bytes_per_token * tokens
    after = [step.after / step.num_tokens for step in trace.steps] or [stored_bytes / tokens]
    told = subject.describe()
    return {
        "active_tokens": tokens,
        "ledger": ledger.to_dict(),
        "b_kv": trace.highest(lambda s: s.peak / (s.num_before + 1), stored_bytes / tokens),
        "b_kv_mean": sum(after) / len(after),
        "b_kv_tables": subject.table_bytes() / tokens,
        "eta_meta": ledger.eta_meta,
        "stored_bytes": stored_bytes,
        "peak_bytes": int(trace.highest(lambda s: s.peak, stored_bytes)),
        "peak_share": trace.highest(
            lambda s: s.peak / s.limit, stored_bytes / subject.limit_bytes(tokens)
        ),
        "dense_share": trace.highest(lambda s: s.peak / s.dense, stored_bytes / dense),
        "table_bytes": subject.table_bytes(),
        "b_hbm": decode_bytes(subject),
        "b_hbm_source": "counted",
        "setting": told["setting"],
        "residency": told["residency"],
        "tiers": told["tiers"],
        "realisation": told["realisation"],
        "steps": trace.columns(),
    }
