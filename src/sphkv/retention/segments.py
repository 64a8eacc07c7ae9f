# SPDX-License-Identifier: Apache-2.0
"""Which part of a prompt a token belongs to: prefix, retrieved passages, or recent suffix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import torch
from torch import Tensor


class Segment(IntEnum):
    """Semantic parts of a prompt, the paper's names."""

    PREFIX = 0
    RETRIEVED = 1
    RECENT = 2


@dataclass(frozen=True, slots=True)
class SegmentSpans:
    """Where the retrieved passages begin and end; before is prefix, after is recent.

    Attributes:
        retrieved: Token ranges ``(start, stop)`` in rising order; may be empty.
    """

    retrieved: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Reject ranges that are empty or out of order."""
        at = 0
        for start, stop in self.retrieved:
            if not at <= start < stop:
                raise ValueError(f"retrieved spans must rise and not be empty: {self.retrieved}")
            at = stop

    def label(self, num_tokens: int, *, recent_tokens: int = 0) -> Tensor:
        """Segment of every token.

        Args:
            num_tokens: Tokens of the prompt.
            recent_tokens: Newest tokens that are recent in any case.

        Returns:
            ``[tokens]`` uint8 values of ``Segment``. A prompt without retrieved spans is prefix
            up to its recent tokens.
        """
        labels = torch.full((num_tokens,), Segment.PREFIX, dtype=torch.uint8)
        if self.retrieved:
            labels[self.retrieved[-1][1] :] = Segment.RECENT
        for start, stop in self.retrieved:
            labels[start:stop] = Segment.RETRIEVED
        if recent_tokens:
            labels[-recent_tokens:] = Segment.RECENT
        return labels


def find_segments(
    token_ids: Sequence[int],
    *,
    passage_marks: Sequence[Sequence[int]],
    turn_marks: Sequence[Sequence[int]] = (),
) -> SegmentSpans:
    """Find retrieved passages by the separators in front of them.

    Everything from the first passage mark to the end of the last passage is retrieved. The last
    passage ends at the next turn mark, or where none follows, after as many tokens as the
    longest other passage has.

    Args:
        token_ids: The prompt.
        passage_marks: Token sequences that open a passage, such as those of ``"Passage "``.
        turn_marks: Token sequences that open another part, such as a chat turn or a question.
    """
    starts = _find_all(token_ids, passage_marks)
    if not starts:
        return SegmentSpans()
    turns = [at for at in _find_all(token_ids, turn_marks) if at > starts[-1]]
    if turns:
        stop = turns[0]
    else:
        longest = max((b - a for a, b in pairwise(starts)), default=0)
        stop = min(len(token_ids), starts[-1] + longest) if longest else len(token_ids)
    return SegmentSpans(((starts[0], stop),))


def _find_all(token_ids: Sequence[int], marks: Sequence[Sequence[int]]) -> list[int]:
    ids = list(token_ids)
    found = {
        at
        for mark in marks
        if mark
        for at in range(len(ids) - len(mark) + 1)
        if ids[at] == mark[0] and ids[at : at + len(mark)] == list(mark)
    }
    return sorted(found)
