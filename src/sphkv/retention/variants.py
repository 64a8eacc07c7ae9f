# SPDX-License-Identifier: Apache-2.0
"""Joint control and the partial variants it is compared with, on the same blocks and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.core.tiers import RUN_TOKENS, TierTable
from sphkv.errors import BudgetError
from sphkv.retention.policy import BlockShape, ControlOptions
from sphkv.retention.pricing import NO_TIER, LayerBlocks, PricedLayer
from sphkv.retention.solver import Allocation, BudgetSolver, HullSteps, TierChoices

_SHAPE_ROUNDS = 4
_FINEST_FIRST = (BlockShape.TOKENS, BlockShape.RUNS, BlockShape.WHOLE)


class PromptBlocks:
    """Blocks of all heads of a prompt, those of every shape side by side.

    What a solver finds out about blocks before it knows a budget is kept here, so that deciding for
    one budget after the other costs little.

    Attributes:
        blocks: Blocks of every head by shape, heads counted layer by layer.
        distortion: ``[heads, columns, tiers]`` float32; a column is a block of one shape.
        cost: ``[heads, columns, tiers]`` int64 bytes.
        is_block: ``[heads, columns]`` bool: columns that hold states.
        shape_ids: ``[columns]`` int64 number of each column's shape in ``blocks``.
    """

    def __init__(self, layers: Sequence[PricedLayer]) -> None:
        """Put the layers of a prompt behind one another."""
        shapes = layers[0].blocks
        self.blocks = {
            shape: LayerBlocks.join([layer.blocks[shape] for layer in layers]) for shape in shapes
        }
        parts = list(self.blocks.values())
        self.distortion = torch.cat([part.distortion for part in parts], 1)
        self.cost = torch.cat([part.cost for part in parts], 1)
        self.is_block = torch.cat([part.states > 0 for part in parts], 1)
        self._is_empty = ~self.is_block
        self.shape_ids = torch.cat(
            [torch.full_like(part.states[0], number) for number, part in enumerate(parts)]
        )
        self._solvers: dict[tuple[tuple[int, ...], bytes], tuple[Tensor, BudgetSolver]] = {}
        self._hulls: dict[tuple[int, ...], HullSteps | None] = {}
        self._columns: Tensor | None = None

    @property
    def num_heads(self) -> int:
        """Heads of all layers."""
        return self.distortion.shape[0]

    def shape_id(self, *wanted: BlockShape) -> int:
        """Number of the first of some shapes that is there."""
        shapes = list(self.blocks)
        return next(shapes.index(shape) for shape in wanted if shape in shapes)

    def all_of(self, shape_id: int) -> Tensor:
        """``[heads]`` int64: the same shape for every head."""
        return torch.full((self.num_heads,), shape_id, device=self.distortion.device)

    def columns_of(self, shape_of_head: Tensor) -> Tensor:
        """``[heads, columns]`` bool: the blocks of each head's shape."""
        return (self.shape_ids == shape_of_head[:, None]) & self.is_block

    def solver(
        self, shape_of_head: NDArray[np.uint8], tiers: Sequence[int]
    ) -> tuple[Tensor, BudgetSolver]:
        """Places of the blocks of each head's shape, and what chooses among some tiers for them.

        Shapes are on the CPU, where comparing them waits for nothing.
        """
        key = (tuple(tiers), shape_of_head.tobytes())
        if key not in self._solvers:
            shapes = torch.from_numpy(shape_of_head).to(self.distortion.device)
            place = self.columns_of(shapes).flatten().nonzero()[:, 0]
            loss, cost = (part[place] for part in self._choices(tiers))
            hulls = self._hulls_of(tiers)
            steps = None if hulls is None else hulls.select(place)
            self._solvers[key] = place, BudgetSolver(TierChoices(loss, cost), steps)
        return self._solvers[key]

    def _choices(self, tiers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """``[heads * columns, tiers]`` distortion and bytes at some tiers."""
        loss, cost = self.distortion.flatten(0, 1), self.cost.flatten(0, 1)
        if len(tiers) < loss.shape[1]:
            loss, cost = loss[:, list(tiers)], cost[:, list(tiers)]
        return loss, cost

    def _hulls_of(self, tiers: Sequence[int]) -> HullSteps | None:
        """Steps of all blocks at some tiers, found once; None of too many blocks."""
        key = tuple(tiers)
        if key not in self._hulls:
            self._hulls[key] = HullSteps.of(*self._choices(tiers))
        return self._hulls[key]

    def spread(self, tier_id: Tensor, num_tokens: int) -> Tensor:
        """The tier of every unit of a prompt, given those of its blocks.

        Args:
            tier_id: ``[heads, columns]`` uint8.
            num_tokens: Tokens of the prompt.

        Returns:
            ``[heads, units]`` uint8, runs of 16 where no shape has other units, else tokens;
            ``NO_TIER`` where no chosen block holds the unit.
        """
        # a head has one shape: all others say ``NO_TIER``, which is the largest number
        if not self.is_in_runs:
            sizes = [part.states.shape[1] for part in self.blocks.values()]
            parts = zip(self.blocks.values(), tier_id.split(sizes, 1), strict=True)
            return torch.stack([each.spread(own, num_tokens) for each, own in parts]).amin(0)
        if self._columns is None:
            self._columns = self._find_columns(-(-num_tokens // RUN_TOKENS))
        padded = torch.nn.functional.pad(tier_id, (0, 1), value=NO_TIER)
        of_shapes = padded.gather(1, self._columns).view(len(padded), len(self.blocks), -1)
        return of_shapes.amin(1)

    @property
    def is_in_runs(self) -> bool:
        """Whether the blocks of all shapes consist of runs of 16 tokens."""
        return all(shape.granularity == RUN_TOKENS for shape in self.blocks)

    def _find_columns(self, num_runs: int) -> Tensor:
        """``[heads, shapes * num_runs]`` int64 column of each run, shape by shape.

        One past the last column where no block holds the run.
        """
        found, first, end = [], 0, self.distortion.shape[1]
        for part in self.blocks.values():
            # padding writes to a place of its own behind the last run
            index = torch.where(part.units >= 0, part.units, num_runs)
            each = torch.arange(first, first + index.shape[1], device=index.device)
            columns = index.new_full((len(index), num_runs + 1), end)
            columns.scatter_(1, index.flatten(1), each[:, None].expand_as(index).flatten(1))
            found.append(columns[:, :num_runs])
            first += index.shape[1]
        return torch.cat(found, 1)

    def best_shapes(self, price: float, tiers: Sequence[int]) -> Tensor:
        """``[heads]`` uint8: the shape of each head with the least loss plus price times bytes."""
        each = self.distortion + price * self.cost
        if len(tiers) < each.shape[2]:
            each = each[..., list(tiers)]
        least = each.amin(2).masked_fill(self._is_empty, 0.0)
        sizes = [part.states.shape[1] for part in self.blocks.values()]
        best, *others = (part.sum(1) for part in least.split(sizes, 1))
        found = torch.zeros_like(best, dtype=torch.uint8)
        for number, total in enumerate(others, start=1):
            is_better = total < best
            best, found = torch.where(is_better, total, best), found.masked_fill(is_better, number)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """A tier for every block that was chosen.

    Attributes:
        blocks: All blocks.
        tier_id: ``[heads, columns]`` uint8; ``NO_TIER`` for blocks of other shapes and empty ones.
        price: Loss a byte is worth; 0 where that was not asked.
    """

    blocks: PromptBlocks
    tier_id: Tensor
    price: float

    def loss(self) -> float:
        """Predicted loss."""
        is_chosen = self.tier_id != NO_TIER
        index = self.tier_id.masked_fill(~is_chosen, 0).long()[..., None]
        each = self.blocks.distortion.gather(2, index)[..., 0]
        return float(each.masked_fill(~is_chosen, 0.0).double().sum())

    def spread(self, num_tokens: int) -> Tensor:
        """``[heads, units]`` uint8 tiers; see ``PromptBlocks.spread``."""
        return self.blocks.spread(self.tier_id, num_tokens)


def decide_blocks(
    blocks: PromptBlocks, budget: int, tiers: TierTable, options: ControlOptions
) -> Decision:
    """Tier of every block of every head, and the price of a byte.

    Args:
        blocks: Blocks of each head in every shape that is allowed.
        budget: Bytes for all blocks.
        tiers: The tiers.
        options: Variant and solver.

    Raises:
        BudgetError: The variant drops nothing and the lowest tier does not fit.
    """
    if options.variant == "quant":
        return _quant(blocks, budget, tiers, keep=None)
    if options.variant == "decoupled":
        return _quant(blocks, budget, tiers, keep=options.keep_share)
    if options.variant == "keepdrop":
        return _keep_drop(blocks, budget, tiers, options)
    if options.uniform_heads:
        return _uniform_heads(blocks, budget, options)
    num_tiers = len(tiers) if options.may_be_dense else tiers.dense_id
    return _joint(blocks, budget, range(num_tiers), options)[0]


def _joint(
    blocks: PromptBlocks, budget: int, tiers: Sequence[int], options: ControlOptions
) -> tuple[Decision, Allocation]:
    """All of some tiers and every shape; also what the solver found."""
    finest = blocks.shape_id(*_FINEST_FIRST)
    shape_of_head = np.full(blocks.num_heads, finest, dtype=np.uint8)
    best: tuple[Allocation, Tensor] | None = None
    for _ in range(_SHAPE_ROUNDS):
        place, solver = blocks.solver(shape_of_head, tiers)
        found = solver.allocate(budget, solver=options.solver)
        if best is None or found.loss < best[0].loss:
            best = (found, place)
        if len(blocks.blocks) == 1:
            break
        again = blocks.best_shapes(found.price, tiers).cpu().numpy()
        if (again == shape_of_head).all():
            break
        shape_of_head = again
    assert best is not None
    found, place = best
    chosen = found.tier_id.to(torch.uint8)
    if list(tiers) != list(range(blocks.distortion.shape[2])):
        chosen = torch.tensor(list(tiers), dtype=torch.uint8, device=place.device)[chosen.long()]
    tier_id = blocks.is_block.new_full(blocks.is_block.shape, NO_TIER, dtype=torch.uint8)
    tier_id.view(-1)[place] = chosen
    return Decision(blocks, tier_id, found.price), found


def _keep_drop(
    blocks: PromptBlocks, budget: int, tiers: TierTable, options: ControlOptions
) -> Decision:
    """One tier for everything that is kept, named or the one that promises the least loss."""
    if options.fixed_tier is not None:
        fixed = [tiers.id_of(options.fixed_tier)]
    else:
        fixed = list(range(1, len(tiers)))
    tried = [_joint(blocks, budget, [tiers.drop_id, tier], options) for tier in fixed]
    return min(tried, key=lambda pair: pair[1].loss)[0]


def _uniform_heads(blocks: PromptBlocks, budget: int, options: ControlOptions) -> Decision:
    """The same tiers for every head: blocks of equal rank are one unit."""
    is_chosen = blocks.columns_of(blocks.all_of(blocks.shape_id(*_FINEST_FIRST)))
    rank = is_chosen.any(0).nonzero()[:, 0]
    loss, cost = (
        part.masked_fill(~is_chosen[..., None], 0).sum(0)[rank]
        for part in (blocks.distortion, blocks.cost)
    )
    found = BudgetSolver(TierChoices(loss, cost)).allocate(budget, solver=options.solver)
    of_rank = torch.full_like(is_chosen[0], NO_TIER, dtype=torch.uint8)
    of_rank[rank] = found.tier_id.to(torch.uint8)
    tier_id = of_rank.expand_as(is_chosen).masked_fill(~is_chosen, NO_TIER)
    return Decision(blocks, tier_id, found.price)


def _quant(blocks: PromptBlocks, budget: int, tiers: TierTable, keep: float | None) -> Decision:
    """One tier for all that is kept, the next higher one for the first heads while bytes last.

    Args:
        blocks: Blocks of each head.
        budget: Bytes for all blocks.
        tiers: The tiers.
        keep: Share of each head's blocks that an earlier stage kept; None keeps all.
    """
    order = _FINEST_FIRST if keep is not None else (BlockShape.WHOLE, *_FINEST_FIRST)
    is_chosen = blocks.columns_of(blocks.all_of(blocks.shape_id(*order)))
    is_kept = is_chosen if keep is None else _keep_best(blocks, is_chosen, keep)
    costs = blocks.cost.masked_fill(~is_kept[..., None], 0).sum(1).cpu()  # [heads, tiers]
    total = costs.sum(0).tolist()
    fitting = [tier for tier in range(1, len(tiers)) if total[tier] <= budget]
    if not fitting:
        raise BudgetError(total[1], budget, budget, "the lowest tier")
    base = fitting[-1]
    tier_of_head = torch.full((blocks.num_heads,), base, dtype=torch.uint8)
    if base + 1 < len(tiers):
        extra = (costs[:, base + 1] - costs[:, base]).cumsum(0)
        tier_of_head[extra <= budget - total[base]] = base + 1
    tier_id = tier_of_head.to(is_kept.device)[:, None].expand_as(is_kept)
    tier_id = tier_id.masked_fill(~is_kept, tiers.drop_id).masked_fill(~is_chosen, NO_TIER)
    return Decision(blocks, tier_id, 0.0)


def _keep_best(blocks: PromptBlocks, is_chosen: Tensor, share: float) -> Tensor:
    """``[heads, columns]`` bool: as many first blocks of each head as it has among the best of all.

    Blocks are compared by the loss of dropping them.
    """
    place = is_chosen.flatten().nonzero()[:, 0]
    drop = blocks.distortion[..., 0].flatten()[place]
    count = max(1, round(share * drop.numel()))
    best = place[drop.argsort(descending=True, stable=True)[:count]]
    kept = (best // is_chosen.shape[1]).bincount(minlength=blocks.num_heads)
    return is_chosen & (is_chosen.cumsum(1) <= kept[:, None])
