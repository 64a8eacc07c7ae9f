# SPDX-License-Identifier: Apache-2.0
"""The tokens of one forward pass, and the places of a padded batch that hold tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StepTokens:
    """The tokens one forward pass brings.

    Attributes:
        is_real: ``[batch, tokens]`` bool, false for padding, which is never stored.
        positions: ``[batch, tokens]`` int64 positions the model gave them; padding's are ignored.
    """

    is_real: Tensor
    positions: Tensor

    def __post_init__(self) -> None:
        """Reject shapes that differ."""
        if self.is_real.dim() != 2 or self.is_real.shape != self.positions.shape:
            raise ValueError(
                f"is_real and positions must be [batch, tokens], got {tuple(self.is_real.shape)} "
                f"and {tuple(self.positions.shape)}"
            )

    def check_continues(self, counts: Sequence[int]) -> None:
        """Raise unless each row's tokens continue its positions without a gap.

        Args:
            counts: Tokens of each row that are cached already.
        """
        if self.is_real.shape[1] == 1 and self.positions.is_cpu:
            # most steps bring one token of every row
            found = self.positions[:, 0].tolist()
            if found == list(counts) and bool(self.is_real.all()):
                return
        real = self.is_real.cpu()
        expected = torch.tensor(counts)[:, None] + real.cumsum(1) - 1
        wrong = (real & (self.positions.cpu() != expected)).any(1).nonzero()[:, 0].tolist()
        if wrong:
            row = wrong[0]
            found, wanted = (x[row][real[row]][:4].tolist() for x in (self.positions, expected))
            raise ValueError(
                f"positions of batch row {row} are {found}..., expected {wanted}...: tokens must "
                "be at 0, 1, 2, ... with padding not counted; pass position_ids as generate() does"
            )


class BatchPlaces:
    """Which places of a padded batch hold tokens.

    A step must not cost more the longer the batch is, so places are appended to a buffer that
    grows by half, and tokens are counted along.

    Attributes:
        counts: Tokens of each row, padding excluded.
        length: Places of every row.
    """

    def __init__(self, is_real: Tensor) -> None:
        """Take over places ``[batch, length]`` bool on the CPU."""
        self._buffer = is_real
        self.length: int = is_real.shape[1]
        self.counts: list[int] = is_real.sum(1).tolist()

    @property
    def is_real(self) -> Tensor:
        """``[batch, length]`` bool on the CPU; a view."""
        return self._buffer[:, : self.length]

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self._buffer.shape[0]

    @property
    def has_padding(self) -> bool:
        """Whether some place holds no token."""
        return any(count < self.length for count in self.counts)

    def append(self, is_real: Tensor) -> None:
        """Add the places ``[batch, tokens]`` of a step."""
        end = self.length + is_real.shape[1]
        if end > self._buffer.shape[1]:
            room = torch.zeros(self.batch_size, end + end // 2, dtype=torch.bool)
            room[:, : self.length] = self.is_real
            self._buffer = room
        self._buffer[:, self.length : end] = is_real
        self.length = end
        new = is_real.sum(1).tolist()
        self.counts = [count + more for count, more in zip(self.counts, new, strict=True)]
