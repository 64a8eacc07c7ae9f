# SPDX-License-Identifier: Apache-2.0
"""The tokens of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

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

    def check_continues(self, is_real: Tensor) -> None:
        """Raise unless each row's tokens continue its positions without a gap.

        Args:
            is_real: ``[batch, slots]`` bool of what is cached already.
        """
        real = self.is_real.cpu()
        expected = is_real.sum(1, keepdim=True) + real.cumsum(1) - 1
        wrong = (real & (self.positions.cpu() != expected)).any(1).nonzero()[:, 0].tolist()
        if wrong:
            row = wrong[0]
            found, wanted = (x[row][real[row]][:4].tolist() for x in (self.positions, expected))
            raise ValueError(
                f"positions of batch row {row} are {found}..., expected {wanted}...: tokens must "
                "be at 0, 1, 2, ... with padding not counted; pass position_ids as generate() does"
            )
