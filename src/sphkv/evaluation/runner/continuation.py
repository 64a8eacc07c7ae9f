# SPDX-License-Identifier: Apache-2.0
"""One measured point: a prompt stored by a method, and what the model says after it.

A prompt is read once by the dense model. Each method then stores those states its own way, so that
its cost is the time to store and the time to decode.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sphkv.cache.method import CacheMethod
from sphkv.core.geometry import KVGeometry
from sphkv.evaluation.metrics.answers import (
    begins_with_answer,
    best_f1,
    exact_match,
    token_f1,
)
from sphkv.evaluation.metrics.stability import Reply, reply_failures
from sphkv.evaluation.metrics.throughput import DecodeTimes
from sphkv.evaluation.ranges import gpu_range
from sphkv.evaluation.runner.decoding import AttendClock, decode_tokens, stop_rule, stop_timing
from sphkv.evaluation.runner.drift import answer_drift, token_drift
from sphkv.evaluation.runner.mechanism import describe_allocation, describe_margins
from sphkv.evaluation.runner.methods import decode_bytes, realisation_of, setting_of
from sphkv.evaluation.runner.reading import ReadCase
from sphkv.evaluation.runner.rollout import episode_quality, run_episode
from sphkv.integrations.prompt_states import (
    PromptStates,
    continue_prompt,
    store_prompt,
)


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


def measure_case(
    model: Any, tokenizer: Any, read: ReadCase, method: CacheMethod, window: DecodeWindow
) -> dict[str, Any]:
    """Store a read prompt in an empty method and measure what follows.

    Returns:
        ``quality``, ``memory`` and ``times``; everything that varies from run to run is in the
        last. A controller's points on texts also have their ``allocation``.
    """
    reused_s = read.work.reused_s
    began = time.perf_counter()
    with gpu_range("allocate and write"):
        store_prompt(method, read.states)
    # what an earlier cache found out is charged as if it had been found out again
    store_s = time.perf_counter() - began + read.work.reused_s - reused_s
    stored_bytes = method.resident_bytes()
    if read.case.following_ids:
        quality, steps, inside = _follow_text(model, read, method, window)
    elif read.case.task is not None:
        assert read.episode is not None
        last = read.states.hidden[-1:]
        episode = run_episode(model, tokenizer, read.case.task, method, last)
        quality = episode_quality(episode, read.episode)
        steps, inside = episode.step_s, episode.attend_s
    else:
        quality, steps, inside = _answer(model, tokenizer, read, method, window)
    allocation = describe_allocation(method) if read.case.following_ids else None
    times = DecodeTimes(read.prefill_s, store_s, tuple(steps), window.num_warm, tuple(inside))
    return {
        "quality": quality,
        "memory": _memory(method, geometry_of(read.states), stored_bytes),
        **({} if allocation is None else {"allocation": allocation}),
        "times": times.to_dict(),
    }


def _follow_text(
    model: Any, read: ReadCase, method: CacheMethod, window: DecodeWindow
) -> tuple[dict[str, Any], Sequence[float], Sequence[float]]:
    """Teacher forcing: single steps first, which are timed, then the rest at once."""
    ids = read.states.following
    num_steps = min(ids.shape[1], window.num_warm + window.num_measured)
    rows, seconds, inside = [], [], []
    clock = AttendClock(method)
    for at in range(num_steps):
        began, before = time.perf_counter(), clock.seconds
        with gpu_range("decode step"):
            rows.append(continue_prompt(model, clock, ids[:, at : at + 1]))
        seconds.append(time.perf_counter() - began)
        inside.append(clock.seconds - before)
    if num_steps < ids.shape[1]:
        stop_timing(method)
        rows.append(continue_prompt(model, method, ids[:, num_steps:]))
    hidden = torch.cat(rows)
    drift = token_drift(model, read.reference, hidden, ids[0, 1:])
    quality: dict[str, Any] = drift.summary()
    quality["kl_counts"] = drift.counts()
    quality["by_margin"] = describe_margins(drift, method)
    return quality, seconds, inside


def _answer(
    model: Any, tokenizer: Any, read: ReadCase, method: CacheMethod, window: DecodeWindow
) -> tuple[dict[str, Any], Sequence[float], Sequence[float]]:
    """The method's own greedy answer, scored against the truth and the exact model's answer."""
    case = read.case
    stops = stop_rule(tokenizer, at_line_end=case.stops_at_newline)
    got = decode_tokens(
        model, method, read.states.hidden[-1:], case.max_new_tokens, stops,
        num_timed=window.num_warm + window.num_measured,
    )  # fmt: skip
    text = tokenizer.decode(got.token_ids, skip_special_tokens=True).strip()
    exact = tokenizer.decode(read.answer_ids, skip_special_tokens=True).strip()
    ours = Reply(text, got.token_ids, got.is_ended)
    dense = Reply(exact, read.answer_ids, len(read.answer_ids) < case.max_new_tokens)
    quality = {
        "answer": text,
        "reference_answer": exact,
        "f1": best_f1(text, case.answers),
        "f1_reference": best_f1(exact, case.answers),
        "agreement_f1": 1.0 if text == exact else token_f1(text, exact),
        "em": exact_match(text, case.answers),
        "found": begins_with_answer(text, case.answers),
        "is_same": float(got.token_ids == read.answer_ids),
        "length": len(got.token_ids),
        "length_drift": len(got.token_ids) - len(read.answer_ids),
        "is_ended": float(got.is_ended),
        "failures": list(reply_failures(ours, dense)),
        "kl": answer_drift(model, got, read.reference, read.answer_ids),
    }
    return quality, got.step_s, got.attend_s


def geometry_of(states: PromptStates) -> KVGeometry:
    """Shape of the cache that a prompt's states fill."""
    first = states.layers[0]
    return KVGeometry(
        num_layers=len(states.layers),
        num_kv_heads=first.keys.shape[0],
        num_query_heads=first.query.shape[0],
        head_dim=first.keys.shape[2],
    )


def _memory(method: CacheMethod, geometry: KVGeometry, stored_bytes: int) -> dict[str, Any]:
    """``M_KV`` by kind and the figures the paper derives from it."""
    ledger, tokens = method.ledger(), method.num_tokens()
    return {
        "active_tokens": tokens,
        "ledger": ledger.to_dict(),
        "b_kv": ledger.b_kv(tokens),
        "eta_meta": ledger.eta_meta,
        "stored_bytes": stored_bytes,
        "peak_bytes": max(stored_bytes, method.resident_bytes()),
        "b_hbm": decode_bytes(method, geometry),
        "b_hbm_source": "counted",
        "realisation": realisation_of(method),
        "setting": setting_of(method),
    }
