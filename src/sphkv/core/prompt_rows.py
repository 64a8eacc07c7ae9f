# SPDX-License-Identifier: Apache-2.0
"""Rows of attention that are never written down: their queries, and the kernels that read keys.

The controller knows what to ask (``retention/streamed.py``), kernels how to find it
(``attention/triton/prompt_rows.py``); neither knows the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowShape:
    """What rows of prompts have in common, whatever their length.

    Attributes:
        head_dim: Elements of a key.
        votes: Rows of the observation window of a KV head.
        expected: Rows of expected queries; 0 for none.
        groups: Biases that these share.
        dtype: Type of the states.
    """

    head_dim: int
    votes: int
    expected: int
    groups: int
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True, eq=False)
class RowPart:
    """Some rows of a layer, all of one kind.

    Attributes:
        query: ``[heads, rows, head_dim]`` after RoPE, contiguous, in the type of the keys or
            in float32.
        share: ``[heads, rows]`` float32 importance of each row.
        seen: ``[rows]`` int32 last token that a row sees.
        valid: ``[rows]`` int32 last token that a row is valid for; not beyond ``seen``.
        scale: Factor on the dot product.
        bias: ``[heads, groups, tokens]`` float32 added to the logits of as many rows for each
            group; None adds nothing.
    """

    query: Tensor
    share: Tensor
    seen: Tensor
    valid: Tensor
    scale: float
    bias: Tensor | None = None


class PartTotals(NamedTuple):
    """What each row of a part gives, over all tokens; everything is float32.

    Attributes:
        lse: ``[heads, rows]`` logarithm of the sum of exponentials.
        output: ``[heads, rows, head_dim]`` weighted sum of values.
        far: ``[heads, rows]`` weight of the tokens between two.
        top: ``[heads, rows, 2]`` largest two weights.
    """

    lse: Tensor
    output: Tensor
    far: Tensor
    top: Tensor


class RowKernels(Protocol):
    """Sums over rows and tokens, each by one pass over keys and values.

    Keys and values are ``[heads, tokens, head_dim]`` of any float type, keys after RoPE.
    """

    def prepare(self, shape: RowShape | None, device: torch.device) -> None:
        """Compile what prompts need, behind what the caller does next.

        Args:
            shape: Of the rows that will be measured; None if only codebooks are fitted.
            device: The GPU.
        """
        ...

    def settle(self) -> None:
        """Wait for what is being compiled: no other thread then uses the device for it.

        ``spread`` and ``totals`` do so by themselves; who captures a device's work must.
        """
        ...

    def spread(self, keys: Tensor, weight: Tensor) -> Tensor:
        """``[heads, groups, tokens]`` float32: squared keys times ``[heads, groups, head_dim]``."""
        ...

    def totals(
        self, part: RowPart, keys: Tensor, values: Tensor, far: tuple[int, int]
    ) -> PartTotals:
        """What each row gives; ``far`` names the first token that counts and the one behind."""
        ...

    def sums(
        self, part: RowPart, keys: Tensor, values: Tensor, totals: PartTotals
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What tokens get of the rows valid for them, by their importance, ``[heads, tokens]``.

        Weights, their squares, and squares times the squared distance of value and output.
        """
        ...

    def apart(self, values: Tensor, mean: Tensor) -> Tensor:
        """``[heads, tokens]`` float32 squared distance of values to ``[heads, head_dim]``."""
        ...

    def drop_losses(
        self,
        part: RowPart,
        keys: Tensor,
        values: Tensor,
        totals: PartTotals,
        units: Tensor,
        granularity: int,
        least_left: float,
    ) -> Tensor:
        """Squared moves of the output as ever more blocks go, the last one first.

        Args:
            part: The rows.
            keys: Keys.
            values: Values.
            totals: What the rows give.
            units: ``[heads, blocks, units]`` int64 units of each block, padded with -1.
            granularity: Tokens of a unit.
            least_left: Least weight by which what is left is divided.

        Returns:
            ``[heads, blocks]`` float32, by the importance of rows.
        """
        ...
