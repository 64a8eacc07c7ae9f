# SPDX-License-Identifier: Apache-2.0
"""One measured point: a prompt stored by a method, and what the model says after it.

A prompt is read once by the dense model. Each method then stores those states its own way, so that
its cost is the time to store and the time to decode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sphkv.cache.method import CacheMethod
from sphkv.core.geometry import KVGeometry
from sphkv.evaluation.dense_reference import DenseReference
from sphkv.evaluation.methods import decode_bytes, realisation_of, setting_of
from sphkv.evaluation.metrics.answers import (
    begins_with_answer,
    best_f1,
    exact_match,
    token_f1,
)
from sphkv.evaluation.metrics.throughput import DecodeTimes
from sphkv.evaluation.workloads.case import Case
from sphkv.integrations.prompt_states import (
    PromptStates,
    continue_prompt,
    read_prompt,
    store_prompt,
)
from sphkv.integrations.teacher_forcing import log_probabilities

DRIFT_EDGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Nats between which tokens are counted."""


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


@dataclass(frozen=True, slots=True, eq=False)
class ReadCase:
    """A case whose prompt was read.

    Attributes:
        case: The case.
        states: States of the prompt.
        reference: What the exact model says: hidden states after the following tokens, or after
            each token of its own answer.
        answer_ids: The exact model's answer; empty for language modelling.
        prefill_s: Seconds of the dense pass, a shared document counted whole.
    """

    case: Case
    states: PromptStates
    reference: Tensor
    answer_ids: tuple[int, ...]
    prefill_s: float


class PromptReader:
    """Reads cases; a document that several share is read once."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._group = ""
        self._shared: PromptStates | None = None
        self._shared_s = 0.0

    def read(self, case: Case) -> ReadCase:
        """Run the dense model over a case."""
        began = time.perf_counter()
        extra = 0.0
        if case.following_ids:
            ids = torch.tensor([[*case.prompt_ids, *case.following_ids]])
            states = read_prompt(self._model, ids, num_following=len(case.following_ids))
            return ReadCase(case, states, states.hidden[1:], (), time.perf_counter() - began)
        if 0 < case.num_shared < case.context:
            states, extra = self._read_shared(case)
        else:
            states = read_prompt(self._model, torch.tensor([case.prompt_ids]))
        seconds = time.perf_counter() - began + extra
        hidden, answer = self._exact_answer(states, case)
        return ReadCase(case, states, hidden, answer, seconds)

    def _read_shared(self, case: Case) -> tuple[PromptStates, float]:
        """The whole prompt's states, and the seconds the document took if it was read before."""
        ids = torch.tensor([case.prompt_ids])
        known = self._shared is not None and self._group == case.group
        if not known:
            began = time.perf_counter()
            self._shared = read_prompt(self._model, ids[:, : case.num_shared])
            self._group, self._shared_s = case.group, time.perf_counter() - began
        assert self._shared is not None
        rest = ids[:, case.num_shared :]
        exact = DenseReference(self._shared, capacity=rest.shape[1])
        hidden = continue_prompt(self._model, exact, rest)
        return exact.extended(self._shared, rest, hidden), self._shared_s if known else 0.0

    def _exact_answer(self, states: PromptStates, case: Case) -> tuple[Tensor, tuple[int, ...]]:
        exact = DenseReference(states, capacity=case.max_new_tokens)
        steps = decode_greedily(
            self._model,
            exact,
            states.hidden[-1:],
            case.max_new_tokens,
            stop_rule(self._tokenizer, at_line_end=case.stops_at_newline),
        )
        return steps.hidden, steps.token_ids


@dataclass(frozen=True, slots=True, eq=False)
class DecodedAnswer:
    """A greedy answer.

    Attributes:
        token_ids: Its tokens, without the one that ended it.
        hidden: ``[steps, width]`` final hidden states each token was chosen from, the last one
            ending the answer.
        step_s: Seconds of each forward pass.
        is_ended: Whether the model ended it, and not the limit.
    """

    token_ids: tuple[int, ...]
    hidden: Tensor
    step_s: tuple[float, ...]
    is_ended: bool


def decode_greedily(
    model: Any, method: CacheMethod, last: Tensor, limit: int, stops: StopRule
) -> DecodedAnswer:
    """Most likely tokens after a stored prompt.

    Args:
        model: The model.
        method: Holds the prompt.
        last: ``[1, width]`` final hidden state of the prompt's last token.
        limit: Most tokens.
        stops: What ends the answer.
    """
    return decode_tokens(model, method, last, limit, stops, choose=lambda row: row)


def decode_tokens(
    model: Any,
    method: CacheMethod,
    last: Tensor,
    limit: int,
    stops: StopRule,
    *,
    choose: Callable[[Tensor], Tensor],
) -> DecodedAnswer:
    """Tokens after a stored prompt, each the one that ``choose`` scores highest.

    Args:
        model: The model.
        method: Holds the prompt.
        last: ``[1, width]`` final hidden state of the prompt's last token.
        limit: Most tokens.
        stops: What ends the answer.
        choose: Scores ``[vocabulary]`` from log-probabilities; called once per step.
    """
    ids: list[int] = []
    rows, seconds = [last], []
    while True:
        row = next(log_probabilities(model, rows[-1]))[1][0]
        token = int(choose(row).argmax())
        is_ended = stops.ends(token, ids)
        if is_ended or len(ids) == limit:
            break
        ids.append(token)
        began = time.perf_counter()
        rows.append(continue_prompt(model, method, torch.tensor([[token]]))[-1:])
        seconds.append(time.perf_counter() - began)
    return DecodedAnswer(tuple(ids), torch.cat(rows), tuple(seconds), is_ended)


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends an answer.

    Attributes:
        end_ids: Tokens that always do.
        line_ids: Line ends, which do once the answer has begun.
    """

    end_ids: frozenset[int]
    line_ids: frozenset[int] = frozenset()

    def ends(self, token: int, before: Sequence[int]) -> bool:
        """Whether a token ends an answer that so far consists of ``before``."""
        if token in self.end_ids:
            return True
        return token in self.line_ids and any(other not in self.line_ids for other in before)


def stop_rule(tokenizer: Any, *, at_line_end: bool) -> StopRule:
    """The model's end token, and line ends if a line is enough."""
    ends = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    lines = set()
    for text in ("\n", "\n\n", ".\n", ".\n\n", ";\n") if at_line_end else ():
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if len(ids) == 1:
            lines.add(int(ids[0]))
    return StopRule(frozenset(ends), frozenset(lines))


def measure_case(
    model: Any, tokenizer: Any, read: ReadCase, method: CacheMethod, window: DecodeWindow
) -> dict[str, Any]:
    """Store a read prompt in an empty method and measure what follows.

    Returns:
        ``quality``, ``memory`` and ``times``; everything that varies from run to run is in the
        last.
    """
    began = time.perf_counter()
    store_prompt(method, read.states)
    store_s = time.perf_counter() - began
    stored_bytes = method.resident_bytes()
    steps: Sequence[float]
    if read.case.following_ids:
        quality, steps = _follow_text(model, read, method, window)
    else:
        quality, steps = _answer(model, tokenizer, read, method)
    times = DecodeTimes(read.prefill_s, store_s, tuple(steps), window.num_warm)
    return {
        "quality": quality,
        "memory": _memory(method, geometry_of(read.states), stored_bytes),
        "times": times.to_dict(),
    }


def _follow_text(
    model: Any, read: ReadCase, method: CacheMethod, window: DecodeWindow
) -> tuple[dict[str, Any], list[float]]:
    """Teacher forcing: single steps first, which are timed, then the rest at once."""
    ids = read.states.following
    num_steps = min(ids.shape[1], window.num_warm + window.num_measured)
    rows, seconds = [], []
    for at in range(num_steps):
        began = time.perf_counter()
        rows.append(continue_prompt(model, method, ids[:, at : at + 1]))
        seconds.append(time.perf_counter() - began)
    if num_steps < ids.shape[1]:
        rows.append(continue_prompt(model, method, ids[:, num_steps:]))
    hidden = torch.cat(rows)
    quality: dict[str, Any] = compare_hidden(model, read.reference, hidden, ids[0, 1:])
    quality["kl_counts"] = drift_counts(model, read.reference, hidden)
    return quality, seconds


def drift_counts(model: Any, reference: Tensor, hidden: Tensor) -> list[int]:
    """Tokens by divergence: below each of ``DRIFT_EDGES`` in turn, and above the last."""
    pairs = zip(log_probabilities(model, reference), log_probabilities(model, hidden), strict=True)
    counts = torch.zeros(len(DRIFT_EDGES) + 1, dtype=torch.int64)
    edges = torch.tensor(DRIFT_EDGES)
    for (_, dense), (_, ours) in pairs:
        kl = (dense.exp() * (dense - ours)).sum(-1)
        counts += torch.bincount(torch.bucketize(kl, edges), minlength=len(counts))
    return [int(count) for count in counts]


def compare_hidden(
    model: Any, reference: Tensor, hidden: Tensor, targets: Tensor
) -> dict[str, float]:
    """KL, loss and top-1 agreement of two runs over the same tokens.

    Args:
        model: Its output head makes logits.
        reference: ``[rows, width]`` hidden states of the exact model.
        hidden: ``[rows, width]`` of the method.
        targets: True next tokens of the first rows; at most one row has none.
    """
    divergences: list[Tensor] = []
    nll = dense_nll = same = 0.0
    pairs = zip(log_probabilities(model, reference), log_probabilities(model, hidden), strict=True)
    for (rows, dense), (_, ours) in pairs:
        divergences.append((dense.exp() * (dense - ours)).sum(-1).double())
        same += float((dense.argmax(-1) == ours.argmax(-1)).sum())
        wanted = targets[rows]
        pick = (torch.arange(len(wanted)), wanted)
        nll -= float(ours[pick].double().sum())
        dense_nll -= float(dense[pick].double().sum())
    kl = torch.cat(divergences)
    count = max(1, len(targets))
    return {
        "kl": float(kl.mean()),
        "kl_p95": float(kl.quantile(0.95)),
        "kl_max": float(kl.max()),
        "nll": nll / count,
        "nll_dense": dense_nll / count,
        "same_top1": same / hidden.shape[0],
        "num_tokens": float(hidden.shape[0]),
    }


def _answer(
    model: Any, tokenizer: Any, read: ReadCase, method: CacheMethod
) -> tuple[dict[str, Any], Sequence[float]]:
    """The method's own greedy answer, scored against the truth and the exact model's answer."""
    case = read.case
    stops = stop_rule(tokenizer, at_line_end=case.stops_at_newline)
    got = decode_greedily(model, method, read.states.hidden[-1:], case.max_new_tokens, stops)
    text = tokenizer.decode(got.token_ids, skip_special_tokens=True).strip()
    exact = tokenizer.decode(read.answer_ids, skip_special_tokens=True).strip()
    common = _common_steps(got.token_ids, read.answer_ids)
    rows = min(common + 1, got.hidden.shape[0], read.reference.shape[0])
    drift = compare_hidden(
        model, read.reference[:rows], got.hidden[:rows], torch.tensor(got.token_ids[:0]).long()
    )
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
        "kl": drift["kl"],
    }
    return quality, got.step_s


def geometry_of(states: PromptStates) -> KVGeometry:
    """Shape of the cache that a prompt's states fill."""
    first = states.layers[0]
    return KVGeometry(
        num_layers=len(states.layers),
        num_kv_heads=first.keys.shape[0],
        num_query_heads=first.query.shape[0],
        head_dim=first.keys.shape[2],
    )


def _common_steps(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Leading tokens that agree."""
    count = 0
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            break
        count += 1
    return count


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
