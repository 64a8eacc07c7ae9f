# SPDX-License-Identifier: Apache-2.0
"""Answers of a model over a stored prompt, token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sphkv.baselines.quantised import QuantisedCache
from sphkv.cache.method import CacheMethod
from sphkv.cache.retained import RetainedSequence
from sphkv.evaluation.ranges import gpu_range
from sphkv.integrations.prompt_states import continue_prompt
from sphkv.integrations.teacher_forcing import log_probabilities

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
    """

    token_ids: tuple[int, ...]
    hidden: Tensor
    step_s: tuple[float, ...]
    attend_s: tuple[float, ...]
    is_ended: bool


class AttendClock:
    """Stands for a method and adds up the seconds inside its ``attend``.

    Attributes:
        seconds: The sum so far.
    """

    def __init__(self, method: CacheMethod) -> None:
        """Nothing was timed yet."""
        self._method = method
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        """Everything else is the method's own."""
        return getattr(self._method, name)

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the method does."""
        began = time.perf_counter()
        with gpu_range("cache attend"):
            output = self._method.attend(*args, **kwargs)
        self.seconds += time.perf_counter() - began
        return output


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
    method: CacheMethod,
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
        method: Holds the prompt.
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
    clock = AttendClock(method)
    while True:
        row = next(log_probabilities(model, rows[-1]))[1][0]
        _tell_gate(method, row)
        token = int(choose(row).argmax())
        is_ended = stops.ends(token, ids)
        if is_ended or len(ids) == limit:
            break
        ids.append(token)
        feed = torch.tensor([[token]], device=last.device)
        if len(seconds) == num_timed:
            stop_timing(method)
        began, before = time.perf_counter(), clock.seconds
        with gpu_range("decode step"):
            rows.append(continue_prompt(model, clock, feed)[-1:])
        if num_timed is None or len(seconds) < num_timed:
            seconds.append(time.perf_counter() - began)
            inside.append(clock.seconds - before)
    return DecodedAnswer(tuple(ids), torch.cat(rows), tuple(seconds), tuple(inside), is_ended)


def _tell_gate(method: CacheMethod, row: Tensor) -> None:
    """A controller's gate opens and closes by the margin of the step that is to be decided."""
    if isinstance(method, RetainedSequence):
        method.refresher.observe_logits(row)


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


def stop_timing(method: CacheMethod) -> None:
    """Once no step is timed any more, a method need not rebuild what it rebuilt before."""
    if isinstance(method, QuantisedCache):
        method.keep_rebuilt()
