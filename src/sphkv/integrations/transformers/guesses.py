# SPDX-License-Identifier: Apache-2.0
"""Guessing the next tokens, and whether the guesses are worth a step.

A greedy search takes the most likely token. What samples, bans tokens or fills rows that have ended
takes others; a step that was launched for a wrong token delays the right one by its whole length,
which many right ones have to make up for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Guesses in a row that must be right before a step is launched: at first, and after a wrong step.
_FIRST, _AFTER_WRONG, _MOST = 3, 32, 256
# Right steps in a row that make up for a wrong one.
_PAYS = 32
# Passes without a guess after wrong ones.
_LONGEST_REST = 16
# Parts of a vocabulary among which it is searched side by side.
_PARTS, _LEAST_PARTS = 512, 64


class GuessHistory:
    """Decides by the guesses of the past whether one is made, and whether a step is launched.

    Attributes:
        num_launched: Steps that were launched for a guess.
        num_right: Those of them that were asked for.
    """

    def __init__(self) -> None:
        """Nothing was guessed yet."""
        self.num_launched = self.num_right = 0
        self._streak = self._paid = 0
        self._needed = _FIRST
        self._rest = self._longest_rest = 0
        self._is_launched = False

    def is_due(self) -> bool:
        """Whether the coming token should be guessed; asked once a pass."""
        if self._rest == 0:
            return True
        self._rest -= 1
        return False

    @property
    def is_trusted(self) -> bool:
        """Whether enough guesses were right to launch a step for the next one."""
        return self._streak >= self._needed

    def launch(self) -> None:
        """A step was launched for the guess."""
        self.num_launched += 1
        self._is_launched = True

    def tell(self, *, is_right: bool | None) -> None:
        """What the guess was worth; None if nobody knows, as no token followed."""
        is_launched, self._is_launched = self._is_launched, False
        if is_right is None:
            return
        if is_right:
            self._count_right(is_launched=is_launched)
        else:
            self._count_wrong(is_launched=is_launched)

    def _count_right(self, *, is_launched: bool) -> None:
        self._streak += 1
        if self.is_trusted:
            self._longest_rest = 0
        if is_launched:
            self.num_right += 1
            self._paid += 1
            if self._paid >= _PAYS:
                self._needed = _FIRST

    def _count_wrong(self, *, is_launched: bool) -> None:
        self._streak = self._paid = 0
        if is_launched:
            self._needed = min(max(_AFTER_WRONG, 2 * self._needed), _MOST)
        self._longest_rest = min(max(1, 2 * self._longest_rest), _LONGEST_REST)
        self._rest = self._longest_rest


def most_likely(logits: Tensor) -> Tensor:
    """The token with the largest logit, of several the first.

    A GPU gives a row of ``argmax`` one thread block, which takes far longer than reading it.

    Args:
        logits: ``[rows, vocabulary]``.

    Returns:
        ``[rows, 1]`` int64.
    """
    rows, size = logits.shape
    parts = math.gcd(size, _PARTS)
    if parts < _LEAST_PARTS:
        parts = min(_PARTS, size)
        # what is added comes last, so that it is never the first of the largest
        logits = torch.nn.functional.pad(logits, (0, -size % parts), value=-math.inf)
    best = logits.reshape(rows, parts, -1).max(2)
    part = best.values.argmax(1, keepdim=True)
    return part * (logits.shape[1] // parts) + best.indices.gather(1, part)


@dataclass(slots=True, eq=False)
class DeviceBool:
    """A bool on a device, read along with what a step reads from there anyway.

    Attributes:
        value: The bool, ``[]``.
        told: What it is; None while nobody has read it.
    """

    value: Tensor
    told: bool | None = None
