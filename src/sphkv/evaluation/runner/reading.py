# SPDX-License-Identifier: Apache-2.0
"""Prompts read once by the dense model, for every method to store.

A sweep stores a prompt many times. Work that depends on the prompt alone is kept, with the seconds
it took, so that every point can still be charged for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sphkv.baselines.attention_scores import SharedAttention, SharedScores
from sphkv.evaluation.environment import gpu_range
from sphkv.evaluation.harness.states import DenseReference, LayerStates, PromptStates, read_prompt
from sphkv.evaluation.harness.subject import MethodSubject
from sphkv.evaluation.runner.decoding import Episode, decode_tokens, run_episode, stop_rule
from sphkv.evaluation.workloads.case import Case
from sphkv.integrations.transformers.architecture import model_geometry
from sphkv.retention.measure import PromptWork

_GPU_TOKENS = 2048


class SharedWork:
    """Work on one prompt.

    Attributes:
        scores: What policies that drop tokens found out.
        layers: What the controller found out about this prompt.
        sampled: Score of the exact model's answer by seed.
    """

    def __init__(self, attention: SharedAttention) -> None:
        """Nothing is found yet.

        Args:
            attention: What tokens receive, for caches that count it; prompts with the same
                beginning share it.
        """
        self.scores = SharedScores(attention)
        self.layers = PromptWork()
        self.sampled: dict[int, float] = {}

    @property
    def reused_s(self) -> float:
        """Seconds saved so far."""
        return self.scores.attention.reused_s + self.scores.reused_s + self.layers.reused_s


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
        work: What the caches that store it share.
        episode: The exact model's episode; of a task only.
    """

    case: Case
    states: PromptStates
    reference: Tensor
    answer_ids: tuple[int, ...]
    prefill_s: float
    work: SharedWork
    episode: Episode | None = None


class PromptReader:
    """Reads cases; a document that several share is read once.

    The model may be on a GPU; what was read is handed out on the CPU, where methods store it.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._geometry = model_geometry(model)
        self._tokenizer = tokenizer
        self._group = ""
        self._shared: PromptStates | None = None
        self._shared_s = 0.0
        self._attention = SharedAttention(0)

    def read(self, case: Case) -> ReadCase:
        """Run the dense model over a case."""
        with gpu_range("prefill"):
            return self._read(case)

    def _read(self, case: Case) -> ReadCase:
        began = time.perf_counter()
        extra = 0.0
        if case.following_ids:
            ids = self._ids([*case.prompt_ids, *case.following_ids])
            states = self._dense_pass(ids, num_following=len(case.following_ids))
            seconds = time.perf_counter() - began
            work = SharedWork(SharedAttention(case.context, device=ids.device))
            states = _on_cpu(states)
            return ReadCase(case, states, states.hidden[1:], (), seconds, work)
        if 0 < case.num_shared < case.context:
            states, extra = self._read_shared(case)
        else:
            states = self._dense_pass(self._ids(case.prompt_ids))
            self._attention = SharedAttention(case.context, device=self._model.device)
        seconds = time.perf_counter() - began + extra
        work = SharedWork(self._attention)
        if case.task is not None:
            exact = exact_subject(self._model, states, case.max_new_tokens)
            last = states.hidden[-1:]
            episode = run_episode(self._model, self._tokenizer, case.task, exact, last)
            states = _on_cpu(states)
            return ReadCase(case, states, states.hidden[-1:], (), seconds, work, episode)
        hidden, answer = self._exact_answer(states, case)
        return ReadCase(case, _on_cpu(states), hidden.cpu(), answer, seconds, work)

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([ids], device=self._model.device)

    def _dense_pass(self, ids: Tensor, *, num_following: int = 0) -> PromptStates:
        """As ``read_prompt``, in parts where a GPU would hold the logits of a whole prompt."""
        prompt = ids.shape[1] - num_following
        if ids.device.type == "cpu" or prompt <= _GPU_TOKENS:
            return read_prompt(self._model, ids, num_following=num_following)
        first = read_prompt(self._model, ids[:, :_GPU_TOKENS])
        exact = DenseReference(first, capacity=ids.shape[1] - _GPU_TOKENS)
        rest = ids[:, _GPU_TOKENS:prompt]
        for part in rest.split(_GPU_TOKENS, 1):
            hidden = self._go_on(exact, part)
        states = exact.extended(first, rest, hidden)
        if num_following == 0:
            return states
        after = self._go_on(exact, ids[:, prompt:])
        whole = torch.cat([states.hidden, after])
        return PromptStates(ids[:, :prompt], ids[:, prompt:], states.layers, whole)

    def _go_on(self, exact: DenseReference, input_ids: Tensor) -> Tensor:
        return MethodSubject(self._model, exact, self._geometry).feed(input_ids).hidden

    def _read_shared(self, case: Case) -> tuple[PromptStates, float]:
        """The whole prompt's states, and the seconds the document took if it was read before."""
        ids = self._ids(case.prompt_ids)
        known = self._shared is not None and self._group == case.group
        if not known:
            self._shared = None
            began = time.perf_counter()
            self._shared = self._dense_pass(ids[:, : case.num_shared])
            self._group, self._shared_s = case.group, time.perf_counter() - began
            self._attention = SharedAttention(case.num_shared, device=ids.device)
        assert self._shared is not None
        rest = ids[:, case.num_shared :]
        exact = DenseReference(self._shared, capacity=rest.shape[1])
        hidden = self._go_on(exact, rest)
        return exact.extended(self._shared, rest, hidden), self._shared_s if known else 0.0

    def _exact_answer(self, states: PromptStates, case: Case) -> tuple[Tensor, tuple[int, ...]]:
        exact = exact_subject(self._model, states, case.max_new_tokens)
        steps = decode_tokens(
            self._model,
            exact,
            states.hidden[-1:],
            case.max_new_tokens,
            stop_rule(self._tokenizer, at_line_end=case.stops_at_newline),
        )
        return steps.hidden, steps.token_ids


def exact_subject(model: Any, states: PromptStates, capacity: int) -> MethodSubject:
    """The exact model after a prompt, with room for so many tokens."""
    return MethodSubject(model, DenseReference(states, capacity=capacity), states.geometry)


def _on_cpu(states: PromptStates) -> PromptStates:
    layers = [
        LayerStates(part.query.cpu(), part.keys.cpu(), part.values.cpu()) for part in states.layers
    ]
    return PromptStates(states.input_ids.cpu(), states.following.cpu(), layers, states.hidden.cpu())
