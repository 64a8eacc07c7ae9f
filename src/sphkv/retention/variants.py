# SPDX-License-Identifier: Apache-2.0
"""Joint control and the partial variants it is compared with, on the same blocks and bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sphkv.core.tiers import TierTable
from sphkv.errors import BudgetError
from sphkv.retention.policy import BlockShape, ControlOptions
from sphkv.retention.pricing import HeadBlocks
from sphkv.retention.solver import Allocation, TierChoices, allocate_tiers

Decision = list[tuple[HeadBlocks, Tensor]]

_SHAPE_ROUNDS = 4


def decide_blocks(
    heads: Sequence[dict[BlockShape, HeadBlocks]],
    budget: int,
    tiers: TierTable,
    options: ControlOptions,
) -> tuple[Decision, float]:
    """Tier of every block of every head, and the price of a byte.

    Args:
        heads: Blocks of each head in every shape that is allowed, layer by layer.
        budget: Bytes for all blocks.
        tiers: The tiers.
        options: Variant and solver.

    Raises:
        BudgetError: The variant drops nothing and the lowest tier does not fit.
    """
    if options.variant == "quant":
        return _quant(heads, budget, tiers, keep=None), 0.0
    if options.variant == "decoupled":
        return _quant(heads, budget, tiers, keep=options.keep_share), 0.0
    if options.variant == "keepdrop":
        return _keep_drop(heads, budget, tiers, options)
    if options.uniform_heads:
        return _uniform_heads(heads, budget, options)
    decision, found = _joint(heads, budget, list(range(len(tiers))), options)
    return decision, found.price


def _joint(
    heads: Sequence[dict[BlockShape, HeadBlocks]],
    budget: int,
    columns: list[int],
    options: ControlOptions,
) -> tuple[Decision, Allocation]:
    """All tiers in ``columns`` and every shape; also what the solver found."""
    chosen = [_first_shape(head) for head in heads]
    best: tuple[Allocation, list[HeadBlocks]] | None = None
    for _ in range(_SHAPE_ROUNDS):
        found = _solve(chosen, budget, columns, options)
        if best is None or found.loss < best[0].loss:
            best = (found, chosen)
        again = [_best_shape(head, found.price, columns) for head in heads]
        if all(a is b for a, b in zip(again, chosen, strict=True)):
            break
        chosen = again
    assert best is not None
    return _split(best[1], best[0].tier_id, columns), best[0]


def _first_shape(head: dict[BlockShape, HeadBlocks]) -> HeadBlocks:
    """The finest shape of a head, with which every byte count can be met."""
    order = (BlockShape.TOKENS, BlockShape.RUNS, BlockShape.WHOLE)
    return next(head[shape] for shape in order if shape in head)


def _best_shape(head: dict[BlockShape, HeadBlocks], price: float, columns: list[int]) -> HeadBlocks:
    """The shape with the least loss plus price times bytes."""

    def total(blocks: HeadBlocks) -> float:
        each = blocks.distortion[:, columns] + price * blocks.cost[:, columns]
        return float(each.amin(1).sum()) if each.numel() else 0.0

    return min(head.values(), key=total)


def _solve(
    chosen: Sequence[HeadBlocks], budget: int, columns: list[int], options: ControlOptions
) -> Allocation:
    choices = TierChoices(
        torch.cat([blocks.distortion[:, columns] for blocks in chosen]),
        torch.cat([blocks.cost[:, columns] for blocks in chosen]),
    )
    return allocate_tiers(choices, budget, solver=options.solver)


def _split(chosen: Sequence[HeadBlocks], tier_id: Tensor, columns: list[int]) -> Decision:
    ids = torch.tensor(columns, device=tier_id.device)[tier_id.long()]
    sizes = [blocks.tokens.shape[0] for blocks in chosen]
    return list(zip(chosen, ids.split(sizes), strict=True))


def _keep_drop(
    heads: Sequence[dict[BlockShape, HeadBlocks]],
    budget: int,
    tiers: TierTable,
    options: ControlOptions,
) -> tuple[Decision, float]:
    """One tier for everything that is kept, named or the one that promises the least loss."""
    if options.fixed_tier is not None:
        fixed = [tiers.id_of(options.fixed_tier)]
    else:
        fixed = list(range(1, len(tiers)))
    tried = [_joint(heads, budget, [tiers.drop_id, tier], options) for tier in fixed]
    decision, found = min(tried, key=lambda pair: pair[1].loss)
    return decision, found.price


def _uniform_heads(
    heads: Sequence[dict[BlockShape, HeadBlocks]], budget: int, options: ControlOptions
) -> tuple[Decision, float]:
    """The same tiers for every head: blocks of equal rank are one unit."""
    chosen = [_first_shape(head) for head in heads]
    ranks = max(blocks.tokens.shape[0] for blocks in chosen)
    tiers = chosen[0].distortion.shape[1]
    loss = torch.zeros(ranks, tiers)
    cost = torch.zeros(ranks, tiers, dtype=torch.int64)
    for blocks in chosen:
        loss[: blocks.tokens.shape[0]] += blocks.distortion
        cost[: blocks.tokens.shape[0]] += blocks.cost
    found = allocate_tiers(TierChoices(loss, cost), budget, solver=options.solver)
    decision = [(blocks, found.tier_id[: blocks.tokens.shape[0]]) for blocks in chosen]
    return decision, found.price


def _quant(
    heads: Sequence[dict[BlockShape, HeadBlocks]],
    budget: int,
    tiers: TierTable,
    keep: float | None,
) -> Decision:
    """One tier for all that is kept, the next higher one for the first heads while bytes last.

    Args:
        heads: Blocks of each head.
        budget: Bytes for all blocks.
        tiers: The tiers.
        keep: Share of each head's blocks that an earlier stage kept; None keeps all.
    """
    if keep is None:
        chosen = [head.get(BlockShape.WHOLE) or _first_shape(head) for head in heads]
        kept = [blocks.tokens.shape[0] for blocks in chosen]
    else:
        chosen = [_first_shape(head) for head in heads]
        kept = _keep_best(chosen, keep)
    costs = torch.stack(
        [blocks.cost[:count].sum(0) for blocks, count in zip(chosen, kept, strict=True)]
    )
    total = costs.sum(0)
    fitting = [tier for tier in range(1, len(tiers)) if int(total[tier]) <= budget]
    if not fitting:
        raise BudgetError(int(total[1]), budget, budget, "the lowest tier")
    base = fitting[-1]
    tier_of_head = torch.full((len(heads),), base)
    if base + 1 < len(tiers):
        extra = (costs[:, base + 1] - costs[:, base]).cumsum(0)
        tier_of_head[extra <= budget - int(total[base])] = base + 1
    decision = []
    for blocks, count, tier in zip(chosen, kept, tier_of_head.tolist(), strict=True):
        ids = torch.full((blocks.tokens.shape[0],), tier)
        ids[count:] = tiers.drop_id
        decision.append((blocks, ids))
    return decision


def _keep_best(chosen: Sequence[HeadBlocks], share: float) -> list[int]:
    """Blocks of each head among the best of all heads together, by the loss of dropping them."""
    drop = torch.cat([blocks.distortion[:, 0] for blocks in chosen])
    owner = torch.cat(
        [torch.full((blocks.tokens.shape[0],), head) for head, blocks in enumerate(chosen)]
    )
    count = max(1, round(share * drop.numel()))
    best = drop.argsort(descending=True, stable=True)[:count]
    return torch.bincount(owner[best], minlength=len(chosen)).tolist()
