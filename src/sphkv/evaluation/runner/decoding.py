# SPDX-License-Identifier: Apache-2.0
"""Answers and bounded tool episodes of a model over a stored prompt, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sphkv.evaluation.harness.decode import ByteTrace, Decoder
from sphkv.evaluation.harness.states import log_probabilities
from sphkv.evaluation.harness.subject import Subject
from sphkv.evaluation.metrics.answers import (
    Failure,
    is_looping,
    is_refusal,
)
from sphkv.evaluation.schema import EpisodeQuality
from sphkv.evaluation.workloads.tools import MAX_STEPS, ApiTask, ToolTask

TEMPERATURE = 0.7
"""At which answers over seeds are drawn."""

_MOST_REPLY = 150


@dataclass(frozen=True, slots=True, eq=False)
class DecodedAnswer:
    """A greedy answer.

    Attributes:
        token_ids: Its tokens, without the one that ended it.
        hidden: ``[steps, width]`` final hidden states each token was chosen from, the last one
            ending the answer.
        step_s: Seconds of each forward pass that was timed.
        attend_s: Of these, seconds inside the cache method.
        is_ended: Whether the model ended it, and not the limit.
        trace: Bytes of every pass.
    """

    token_ids: tuple[int, ...]
    hidden: Tensor
    step_s: tuple[float, ...]
    attend_s: tuple[float, ...]
    is_ended: bool
    trace: ByteTrace


def most_likely(row: Tensor) -> Tensor:
    """Scores under which greedy decoding is the choice of the highest."""
    return row


def drawn(seed: int) -> Callable[[Tensor], Tensor]:
    """Scores whose highest is a draw at ``TEMPERATURE``; a seed draws alike for all caches."""
    generator = torch.Generator().manual_seed(seed)

    def choose(row: Tensor) -> Tensor:
        noise = torch.rand(row.shape, generator=generator).clamp(min=1e-12).to(row.device)
        # the largest of log p / T plus Gumbel noise is a sample at temperature T
        return row / TEMPERATURE - (-noise.log()).log()

    return choose


def decode_tokens(
    model: Any,
    subject: Subject,
    last: Tensor,
    limit: int,
    stops: StopRule,
    *,
    choose: Callable[[Tensor], Tensor] = most_likely,
    num_timed: int | None = None,
) -> DecodedAnswer:
    """Tokens after a stored prompt, each the one that ``choose`` scores highest.

    Args:
        model: The model.
        subject: Holds the prompt.
        last: ``[1, width]`` final hidden state of the prompt's last token.
        limit: Most tokens.
        stops: What ends the answer.
        choose: Scores ``[vocabulary]`` from log-probabilities; called once per step.
        num_timed: Steps to time; later ones may reuse what a method rebuilt. None times all.
    """
    ids: list[int] = []
    rows = [last]
    seconds: list[float] = []
    inside: list[float] = []
    decoder = Decoder(subject)
    while True:
        row = next(log_probabilities(model, rows[-1]))[1][0]
        token = int(choose(row).argmax())
        is_ended = stops.ends(token, ids)
        if is_ended or len(ids) == limit:
            break
        ids.append(token)
        if len(seconds) == num_timed:
            subject.stop_timing()
        done = decoder.feed(torch.tensor([[token]], device=last.device))
        rows.append(done.hidden[-1:])
        if num_timed is None or len(seconds) < num_timed:
            seconds.append(done.seconds)
            inside.append(done.attend_s)
    return DecodedAnswer(
        tuple(ids), torch.cat(rows), tuple(seconds), tuple(inside), is_ended, decoder.trace
    )


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


@dataclass(frozen=True, slots=True)
class Episode:
    """What happened.

    Attributes:
        actions: Statements the model wrote, in order: the trajectory.
        is_solved: Whether one of them solved the task; the episode ends there.
        num_valid: Statements that ran.
        num_tokens: Tokens the model wrote.
        is_ended: Whether every statement was ended by the model and not by the limit.
        is_looping: Whether a statement ran in circles.
        step_s: Seconds of each step of the model.
        attend_s: Of these, seconds inside the cache method.
        trace: Bytes of every pass.
    """

    actions: tuple[str, ...]
    is_solved: bool
    num_valid: int
    num_tokens: int
    is_ended: bool
    is_looping: bool
    step_s: tuple[float, ...] = ()
    attend_s: tuple[float, ...] = ()
    trace: ByteTrace = field(default_factory=ByteTrace)


def run_episode(
    model: Any,
    tokenizer: Any,
    task: ToolTask | ApiTask,
    subject: Subject,
    last: Tensor,
    *,
    max_new_tokens: int = 48,
    max_steps: int = MAX_STEPS,
) -> Episode:
    """Let the model write statements and read replies until it solves the task or gives out.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        task: The task, whose prompt the subject holds.
        subject: The cache; grows with the episode.
        last: ``[1, width]`` final hidden state of the prompt's last token.
        max_new_tokens: Most tokens of a statement.
        max_steps: Most statements.
    """
    stops = stop_rule(tokenizer, at_line_end=True)
    actions: list[str] = []
    solved, valid, tokens, ended, looping = False, 0, 0, True, False
    steps: list[float] = []
    inside: list[float] = []
    trace = ByteTrace()
    for _ in range(max_steps):
        got = decode_tokens(model, subject, last, max_new_tokens, stops)
        text = str(tokenizer.decode(got.token_ids, skip_special_tokens=True)).strip()
        actions.append(text)
        tokens += len(got.token_ids)
        steps += got.step_s
        trace.steps += got.trace.steps
        inside += got.attend_s
        ended &= got.is_ended
        looping |= is_looping(got.token_ids)
        reply = task.respond(text)
        valid += reply.is_valid
        solved = reply.is_solved
        if solved:
            break
        said = ("\nResult: ", reply.text, task.again)
        before, body, after = (tokenizer(t, add_special_tokens=False).input_ids for t in said)
        ids = [*before, *body[:_MOST_REPLY], *after]
        reply_ids = torch.tensor([ids], device=last.device)
        decoder = Decoder(subject)
        last = decoder.feed_text(reply_ids)[-1:]
        trace.steps += decoder.trace.steps
    return Episode(
        tuple(actions), solved, valid, tokens, ended, looping, tuple(steps), tuple(inside), trace
    )


def episode_failures(ours: Episode, dense: Episode) -> list[Failure]:
    """What went wrong that did not with dense."""
    found: list[Failure] = []
    if any(map(is_refusal, ours.actions)) != any(map(is_refusal, dense.actions)):
        found.append("refusal flip")
    if ours.num_valid < len(ours.actions) and dense.num_valid == len(dense.actions):
        found.append("tool corruption")
    if ours.is_looping and not dense.is_looping:
        found.append("derailment")
    if dense.is_ended and not ours.is_ended:
        found.append("termination")
    return found


def episode_quality(ours: Episode, dense: Episode) -> EpisodeQuality:
    """One episode beside dense's, as a sweep records it."""
    return {
        "success": float(ours.is_solved),
        "success_reference": float(dense.is_solved),
        "schema_validity": ours.num_valid / len(ours.actions),
        "actions": list(ours.actions),
        "is_same": float(ours.actions == dense.actions),
        "length": ours.num_tokens,
        "length_drift": ours.num_tokens - dense.num_tokens,
        "is_ended": float(ours.is_ended),
        "failures": list(episode_failures(ours, dense)),
    }
