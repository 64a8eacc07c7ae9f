# SPDX-License-Identifier: Apache-2.0
"""Pages of equally important states: the units the solver decides about.

States of a head are ranked by how much the output would move without them and cut into blocks of
one page each, so that a decision fills whole pages and its bytes are exact.
Derivation: docs/math/retention.md, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from sphkv.core.tiers import RUN_TOKENS, TierTable


class BlockShape(StrEnum):
    """How the states of a block lie in the prompt, which decides what positions cost.

    ``WHOLE`` is all of a head at one tier, in order; ``RUNS`` are aligned runs of 16 tokens;
    ``TOKENS`` are single tokens.
    """

    WHOLE = "whole"
    RUNS = "runs"
    TOKENS = "tokens"

    @property
    def granularity(self) -> int:
        """Tokens per decision."""
        return 1 if self is BlockShape.TOKENS else RUN_TOKENS


@dataclass(frozen=True, slots=True)
class PageCosts:
    """Resident bytes of one page of every tier, with its table entry and counters.

    Attributes:
        tiers: The tiers.
        page_bytes: Bytes by block shape, one per tier; 0 for the drop tier.
    """

    tiers: TierTable
    page_bytes: Mapping[BlockShape, tuple[int, ...]]

    def __post_init__(self) -> None:
        """Reject a shape or a tier without bytes."""
        for shape in BlockShape:
            if len(self.page_bytes.get(shape, ())) != len(self.tiers):
                raise ValueError(f"page_bytes lacks a cost per tier for shape {shape.value!r}")

    @property
    def block_tokens(self) -> int:
        """States of a block: those of the largest coded page."""
        coded = [tier.page_tokens for tier in self.tiers if tier.is_coded]
        return max(coded, default=self.tiers[self.tiers.dense_id].page_tokens)

    def block_cost(self, num_states: int, shape: BlockShape) -> list[int]:
        """Bytes of so many states at every tier.

        A few states fill no coded page and may take fewer bytes at a higher tier; that one then
        counts as much as those below it.
        """
        sizes = (
            -(-num_states // tier.page_tokens) * size if tier.page_tokens else 0
            for tier, size in zip(self.tiers, self.page_bytes[shape], strict=True)
        )
        return list(accumulate(sizes, max))


@dataclass(frozen=True, slots=True, eq=False)
class HeadBlocks:
    """The states of one head that may be coded or dropped, as blocks.

    Attributes:
        shape: How the states of a block lie.
        tokens: ``[blocks, states]`` int64 tokens of each block, most important block first,
            padded with -1.
        distortion: ``[blocks, tiers]`` float32.
        cost: ``[blocks, tiers]`` int64 bytes.
    """

    shape: BlockShape
    tokens: Tensor
    distortion: Tensor
    cost: Tensor

    def to(self, device: torch.device | str) -> HeadBlocks:
        """The same on a device."""
        parts = (part.to(device) for part in (self.tokens, self.distortion, self.cost))
        return HeadBlocks(self.shape, *parts)

    def spread(self, tier_id: Tensor, out: Tensor) -> None:
        """Write the tier of every block ``[blocks]`` to its tokens in ``out [tokens]``."""
        size = self.shape.granularity
        if out.numel() % size:
            size = 1
        first = self.tokens[:, ::size]
        live = first >= 0
        chosen = tier_id[:, None].expand_as(first)[live].to(out.dtype)
        out.view(-1, size)[first[live] // size] = chosen[:, None]


def rank_units(score: Tensor, is_free: Tensor, *, block_units: int) -> Tensor:
    """Cut the free units of a head, states or runs, into blocks of like importance.

    Args:
        score: ``[units]`` importance.
        is_free: ``[units]`` bool.
        block_units: Units of a block.

    Returns:
        ``[blocks, block_units]`` int64 units, most important block first; the last block is
        padded with -1. Ties keep the order of units.
    """
    chosen = is_free.nonzero()[:, 0]
    flat = chosen[score[chosen].argsort(descending=True, stable=True)]
    blocks = -(-flat.numel() // block_units)
    flat = torch.nn.functional.pad(flat, (0, blocks * block_units - flat.numel()), value=-1)
    return flat.reshape(blocks, block_units)


def unit_tokens(units: Tensor, granularity: int, num_tokens: int) -> Tensor:
    """Tokens of blocks of units: ``[blocks, units]`` to ``[blocks, units * granularity]``."""
    index = units[..., None] * granularity + torch.arange(granularity, device=units.device)
    is_token = (units[..., None] >= 0) & (index < num_tokens)
    return torch.where(is_token, index, -1).flatten(1)


def convex_steps(losses: Tensor) -> Tensor:
    """Steps of the greatest convex curve under ``losses [points]``: rising, ``[points - 1]``.

    Dropping one block more then never looks cheaper than the one before, which a sum of
    independent choices needs.
    """
    values = losses.double().tolist()
    hull = [0]
    for point in range(1, len(values)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (values[b] - values[a]) * (point - b) < (values[point] - values[b]) * (b - a):
                break
            hull.pop()
        hull.append(point)
    steps = torch.empty(max(0, len(values) - 1), dtype=torch.float32)
    for a, b in pairwise(hull):
        steps[a:b] = max(0.0, (values[b] - values[a]) / (b - a))
    return steps


def sum_blocks(per_state: Tensor, blocks: Tensor) -> Tensor:
    """Sum ``[tokens, n]`` over the states of each block: ``[blocks, n]``."""
    live = (blocks >= 0)[..., None].to(per_state.dtype)
    return (per_state[blocks.clamp(min=0)] * live).sum(1)
