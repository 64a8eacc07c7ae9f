# SPDX-License-Identifier: Apache-2.0
"""States that no budget may drop or demote, and the parts of a prompt that are weighed apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import torch
from torch import Tensor

from sphkv.core.configs import freeze_sequences
from sphkv.core.tiers import RUN_TOKENS


@dataclass(frozen=True, slots=True)
class ProtectionRule:
    """What stays at the dense tier.

    Attributes:
        sink_tokens: First tokens of the prompt.
        suffix_tokens: Newest tokens of the prompt that later decoding may not compress either.
        spans: Token ranges ``(start, stop)`` the caller marks: evidence, safety, tool schemas.
        outlier_ratio: A key whose radius is above this many times its head's median is an
            outlier; None protects none.
        max_outliers: Most outliers of a head that are protected, the longest first.
    """

    sink_tokens: int = RUN_TOKENS
    suffix_tokens: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    outlier_ratio: float | None = 3.0
    max_outliers: int = RUN_TOKENS

    def __post_init__(self) -> None:
        """Reject negative sizes and empty spans."""
        freeze_sequences(self, "spans")
        for name in ("sink_tokens", "suffix_tokens", "max_outliers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
        for start, stop in self.spans:
            if not 0 <= start < stop:
                raise ValueError(f"a protected span must not be empty, got {(start, stop)}")
        if self.outlier_ratio is not None and not self.outlier_ratio > 1:
            raise ValueError(f"outlier_ratio must be above 1, got {self.outlier_ratio!r}")

    def token_mask(self, num_tokens: int, device: torch.device | str = "cpu") -> Tensor:
        """``[tokens]`` bool: tokens that every head protects."""
        mask = torch.zeros(num_tokens, dtype=torch.bool, device=device)
        mask[: self.sink_tokens] = True
        if self.suffix_tokens:
            mask[-self.suffix_tokens :] = True
        for start, stop in self.spans:
            if stop > num_tokens:
                raise ValueError(
                    f"protected span {(start, stop)} passes the prompt's {num_tokens} tokens"
                )
            mask[start:stop] = True
        return mask

    def most_states(self, num_tokens: int) -> int:
        """States of a head that are protected at most."""
        outliers = 0 if self.outlier_ratio is None else self.max_outliers
        marked = sum(stop - start for start, stop in self.spans)
        return min(num_tokens, self.sink_tokens + self.suffix_tokens + marked + outliers)

    def state_mask(self, radius: Tensor) -> Tensor:
        """Protected states of one layer.

        Args:
            radius: ``[heads, tokens]`` key norms.

        Returns:
            ``[heads, tokens]`` bool.
        """
        mask = self.token_mask(radius.shape[1], radius.device).expand_as(radius).clone()
        if self.outlier_ratio is not None and radius.shape[1]:
            mask |= self._outliers(radius)
        return mask

    def _outliers(self, radius: Tensor) -> Tensor:
        most = min(self.max_outliers, radius.shape[1])
        find = _middle_and_largest if radius.device.type == "cpu" else _middle_and_largest_by_sort
        median, largest = find(radius, most)
        excess = radius / median.clamp(min=torch.finfo(torch.float32).tiny)
        top = torch.zeros_like(excess, dtype=torch.bool)
        top.scatter_(1, largest, True)
        return top & (excess > float(self.outlier_ratio or 0))


def _middle_and_largest(radius: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Median ``[heads, 1]`` of norms, and places ``[heads, most]`` of the largest."""
    return radius.median(dim=1, keepdim=True).values, radius.topk(most, dim=1).indices


def _middle_and_largest_by_sort(radius: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The same: a GPU sorts all heads in less time than it finds the median of a few."""
    ordered, place = radius.sort(dim=1)
    tokens = radius.shape[1]
    return ordered[:, (tokens - 1) // 2, None], place[:, tokens - most :]


def widen_to_runs(mask: Tensor) -> Tensor:
    """Protect the whole aligned run of 16 tokens around each protected state."""
    tokens = mask.shape[-1]
    rest = -tokens % RUN_TOKENS
    padded = torch.nn.functional.pad(mask, (0, rest)) if rest else mask
    any_in_run: Tensor = padded.unflatten(-1, (-1, RUN_TOKENS)).any(-1, keepdim=True)
    whole = any_in_run.expand(*any_in_run.shape[:-1], RUN_TOKENS).flatten(-2)
    return whole[..., :tokens]


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
        freeze_sequences(self, "retrieved")
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
