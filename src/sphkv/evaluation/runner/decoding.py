# SPDX-License-Identifier: Apache-2.0
"""Answers of a model over a stored prompt, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sphkv.evaluation.harness.decode import ByteTrace, Decoder
from sphkv.evaluation.harness.states import log_probabilities
from sphkv.evaluation.harness.subject import Subject

TEMPERATURE = 0.7
"""At which answers over seeds are drawn."""


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
