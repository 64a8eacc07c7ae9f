# SPDX-License-Identifier: Apache-2.0
"""The one way to measure: a stored prompt is continued under its budget, every step's bytes noted.

Text is fed token by token, or in parts that end where the cache says that what it stores changes
next, so that every token sees what it would see alone. The budget holds in every pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sphkv.evaluation.environment import gpu_range
from sphkv.evaluation.harness.subject import Pass, Subject
from sphkv.evaluation.schema import StepColumns

FOLLOWING_TOKENS = 512
"""Tokens after a prompt that are compared unless another number is asked for."""


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Resident bytes around one pass.

    Attributes:
        num_before: Tokens stored before it.
        num_tokens: Tokens stored after it.
        before: Bytes before it.
        peak: Most bytes inside it.
        after: Bytes after it.
        limit: Bytes the budget allows at the pass's first token.
        dense: Bytes of a dense cache at the pass's first token.
    """

    num_before: int
    num_tokens: int
    before: int
    peak: int
    after: int
    limit: int
    dense: int


@dataclass(slots=True)
class ByteTrace:
    """Bytes of all passes since the prompt.

    A part of several tokens is charged its highest bytes at its first token.

    Attributes:
        steps: In order.
    """

    steps: list[StepBytes] = field(default_factory=list)

    def columns(self) -> StepColumns:
        """As a record keeps them."""
        steps = self.steps
        return {
            "num_tokens": [step.num_tokens for step in steps],
            "before": [step.before for step in steps],
            "peak": [step.peak for step in steps],
            "after": [step.after for step in steps],
            "limit": [step.limit for step in steps],
        }

    def highest(self, figure: Callable[[StepBytes], float], default: float) -> float:
        """Largest figure of any pass; ``default`` if there was none."""
        return max(map(figure, self.steps), default=default)


class Decoder:
    """Feeds a subject and keeps the trace of its bytes.

    Attributes:
        subject: What is fed.
        trace: Bytes of every pass so far.
    """

    def __init__(self, subject: Subject) -> None:
        """Nothing was fed yet."""
        self.subject = subject
        self.trace = ByteTrace()

    def feed(self, input_ids: Tensor) -> Pass:
        """One pass over tokens ``[1, tokens]``, which must not cross a change."""
        subject = self.subject
        num_before, before = subject.num_tokens(), subject.resident_bytes()
        with gpu_range("decode step"):
            done = subject.feed(input_ids)
        after = subject.resident_bytes()
        self.trace.steps.append(
            StepBytes(
                num_before,
                subject.num_tokens(),
                before,
                max(before, done.peak_bytes, after),
                after,
                subject.limit_bytes(num_before + 1),
                subject.geometry.dense_bytes_per_token * (num_before + 1),
            )
        )
        return done

    def feed_text(self, input_ids: Tensor, *, is_single: bool = False) -> Tensor:
        """Hidden states ``[tokens, width]`` of a text ``[1, tokens]``, each token as if alone.

        Args:
            input_ids: The text.
            is_single: Whether to feed single tokens even where parts would give the same.
        """
        rows, at, total = [], 0, input_ids.shape[1]
        while at < total:
            count = 1 if is_single else min(total - at, self.subject.tokens_until_change())
            rows.append(self.feed(input_ids[:, at : at + count]).hidden)
            at += count
        return torch.cat(rows)


@dataclass(frozen=True, slots=True, eq=False)
class TextRun:
    """A text that was continued over a stored prompt.

    Attributes:
        hidden: ``[tokens, width]`` final hidden states.
        trace: Bytes of every pass.
        step_s: Seconds of the timed single steps.
        attend_s: Of these, seconds inside the cache.
    """

    hidden: Tensor
    trace: ByteTrace
    step_s: tuple[float, ...] = ()
    attend_s: tuple[float, ...] = ()


def follow_text(
    subject: Subject, input_ids: Tensor, *, num_timed: int = 0, is_single: bool = False
) -> TextRun:
    """Teacher forcing under the budget.

    Args:
        subject: Holds the prompt.
        input_ids: ``[1, tokens]`` that came after it in the text.
        num_timed: Leading tokens that are fed singly and timed.
        is_single: Whether the others are fed singly too.
    """
    decoder = Decoder(subject)
    num_timed = min(num_timed, input_ids.shape[1])
    timed = [decoder.feed(input_ids[:, at : at + 1]) for at in range(num_timed)]
    rows = [done.hidden for done in timed]
    if num_timed < input_ids.shape[1]:
        subject.stop_timing()
        rows.append(decoder.feed_text(input_ids[:, num_timed:], is_single=is_single))
    return TextRun(
        torch.cat(rows),
        decoder.trace,
        tuple(done.seconds for done in timed),
        tuple(done.attend_s for done in timed),
    )
