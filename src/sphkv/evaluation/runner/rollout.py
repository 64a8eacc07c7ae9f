# SPDX-License-Identifier: Apache-2.0
"""Bounded tool episodes over a cache method, and how they differ from dense ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sphkv.evaluation.harness.decode import ByteTrace, Decoder
from sphkv.evaluation.harness.subject import Subject
from sphkv.evaluation.metrics.stability import (
    Failure,
    count_failures,
    disagreement,
    failure_rate,
    is_looping,
    is_refusal,
    length_drift,
)
from sphkv.evaluation.runner.decoding import decode_tokens, stop_rule
from sphkv.evaluation.schema import EpisodeQuality
from sphkv.evaluation.workloads.toolbench import ApiTask
from sphkv.evaluation.workloads.tools import MAX_STEPS, ToolTask

_MOST_REPLY = 150


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


def summarise_episodes(ours: Sequence[Episode], dense: Sequence[Episode]) -> dict[str, Any]:
    """Success, validity and the stability figures of some episodes."""
    if len(ours) != len(dense) or not ours:
        raise ValueError(f"{len(ours)} episodes against {len(dense)} of dense")
    failures = [episode_failures(a, b) for a, b in zip(ours, dense, strict=True)]
    num_actions = sum(len(episode.actions) for episode in ours)
    return {
        "num_episodes": len(ours),
        "success": sum(episode.is_solved for episode in ours) / len(ours),
        "dense_success": sum(episode.is_solved for episode in dense) / len(dense),
        "schema_validity": sum(episode.num_valid for episode in ours) / num_actions,
        "disagree": disagreement([e.actions for e in ours], [e.actions for e in dense]),
        "delta_t": length_drift([e.num_tokens for e in ours], [e.num_tokens for e in dense]),
        "r_fail": failure_rate(failures),
        "failures": count_failures(failures),
    }


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
