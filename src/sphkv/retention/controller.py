# SPDX-License-Identifier: Apache-2.0
"""Score, allocate, write: from the layers of a prompt and a byte budget to a contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.core.contract import WriteContract
from sphkv.core.tiers import RUN_TOKENS
from sphkv.retention.allocate import InfeasibleBudget
from sphkv.retention.blocks import (
    BlockShape,
    HeadBlocks,
    PageCosts,
    convex_steps,
    rank_units,
    sum_blocks,
    unit_tokens,
)
from sphkv.retention.distortion import TierErrors, segment_weight, state_distortion
from sphkv.retention.features import (
    AttentionRows,
    TokenFeatures,
    drop_losses,
    pool_runs,
    weigh_tokens,
)
from sphkv.retention.options import ControlOptions
from sphkv.retention.policy import RetentionPolicy
from sphkv.retention.protection import widen_to_runs
from sphkv.retention.variants import decide_blocks

_ROUNDS = 16
# A contract that leaves less than this part of the budget is not improved further.
_SLACK_PART = 250
# Rooms nearer to each other than this part of the first give the same contract.
_BRACKET_PARTS = 4000


@dataclass(frozen=True, slots=True, eq=False)
class LayerInput:
    """What the controller needs of one layer.

    Attributes:
        features: Measured features.
        errors: Error models.
        rows: Foretold attention, for the loss of dropping; not kept.
        values: ``[heads, tokens, head_dim]``.
        protected: ``[heads, tokens]`` bool.
    """

    features: TokenFeatures
    errors: TierErrors
    rows: AttentionRows
    values: Tensor
    protected: Tensor


class RetentionController:
    """Collects the layers of a prompt, then decides about all of them at once.

    Attributes:
        costs: Bytes of pages.
        policy: Weights.
        options: What is decided, and how.
        price: Loss a byte is worth at the decision; 0 before it.
        loss: Foretold loss of the decision; in nats per token if the policy is fitted.
    """

    def __init__(
        self,
        costs: PageCosts,
        *,
        policy: RetentionPolicy | None = None,
        options: ControlOptions | None = None,
        segments: Tensor | None = None,
    ) -> None:
        """Start without layers.

        Args:
            costs: Bytes of pages.
            policy: Weights; the fixed recipe if None.
            options: What is decided, and how.
            segments: ``[tokens]`` segment of every token; None if the prompt has none.
        """
        self.costs = costs
        self.policy = policy or RetentionPolicy()
        self.options = options or ControlOptions()
        self.price = 0.0
        self.loss = 0.0
        self._segments = segments if self.options.use_segments else None
        self._weight = torch.empty(0)
        self._heads: list[dict[BlockShape, HeadBlocks]] = []
        self._protected: list[Tensor] = []

    def add_layer(self, layer: LayerInput) -> None:
        """Rank the states of the next layer and price their blocks."""
        protected = layer.protected
        if self.options.granularity > 1:
            protected = widen_to_runs(protected)
        self._protected.append(protected)
        features = layer.features
        if self._segments is not None:
            features = weigh_tokens(features, segment_weight(self.policy, self._segments))
        pooled = pool_runs(features, RUN_TOKENS)
        # tokens that few rows speak for count as much as the others
        self._weight = 1 / layer.rows.coverage()
        if self._segments is not None:
            self._weight = self._weight * segment_weight(self.policy, self._segments)
        scale = 1.0
        if self.policy.sensitivity is None:
            # outputs of layers differ in size and only the relative move matters
            scale = 1.0 / max(float(features.output_energy.sum()), 1e-30)
        for head in range(protected.shape[0]):
            shapes = {}
            for shape in self.options.shapes:
                source = features if shape is BlockShape.TOKENS else pooled
                loss = scale * state_distortion(source, layer.errors, self.policy, head=head)
                score = self._score(source, head, loss)
                units = self._units(score, ~protected[head], shape)
                shapes[shape] = self._price(layer, head, loss, units, shape, scale)
            self._heads.append(shapes)

    def _units(self, score: Tensor, is_free: Tensor, shape: BlockShape) -> Tensor:
        """Blocks of states or runs, ``[blocks, units]``, padded with -1."""
        if shape is not BlockShape.TOKENS:
            runs = torch.nn.functional.pad(is_free, (0, -is_free.numel() % RUN_TOKENS))
            is_free = runs.reshape(-1, RUN_TOKENS).any(1)
        if shape is BlockShape.WHOLE:
            units = is_free.nonzero().reshape(1, -1)
            return units if units.numel() else units.new_empty((0, 1))
        size = self.costs.block_tokens // shape.granularity
        return rank_units(score, is_free, block_units=size)

    def _price(
        self,
        layer: LayerInput,
        head: int,
        loss: Tensor,
        units: Tensor,
        shape: BlockShape,
        scale: float,
    ) -> HeadBlocks:
        """Distortion and bytes of every block at every tier."""
        tokens = unit_tokens(units, shape.granularity, layer.values.shape[1])
        distortion = sum_blocks(loss, units)
        drops = self.policy.alpha_drop * scale * drop_losses(layer.rows, layer.values, tokens, head)
        counts = (tokens >= 0).sum(1)
        mean = sum_blocks(self._weight[head][:, None], tokens)[:, 0] / counts.clamp(min=1)
        distortion[:, 0] = convex_steps(drops).flip(0).to(distortion.device) * mean
        full = int(counts[0]) if counts.numel() else 0
        cost = torch.tensor(self.costs.block_cost(full, shape), dtype=torch.int64)
        cost = cost.repeat(counts.numel(), 1)
        if counts.numel():
            cost[-1] = torch.tensor(self.costs.block_cost(int(counts[-1]), shape))
        return HeadBlocks(shape, tokens, distortion, cost)

    def _score(self, features: TokenFeatures, head: int, loss: Tensor) -> Tensor:
        if self.options.variant == "decoupled":
            # a separate first stage knows attention votes only
            return features.mass[head]
        return loss[:, 0]

    def decide(self, budget: int, exact_bytes: Callable[[WriteContract], int]) -> WriteContract:
        """Choose the tier of every state.

        Args:
            budget: Bytes for everything that stays resident.
            exact_bytes: Resident bytes of a contract, everything included.

        Raises:
            InfeasibleBudget: Protected states and fixed parts alone exceed the budget.
        """
        empty = self._contract(None)
        fixed = exact_bytes(empty)
        if fixed > budget:
            raise InfeasibleBudget(fixed - budget, budget)
        best: WriteContract | None = None
        best_bytes = -1
        bracket = _Bracket(budget - fixed)
        too_small: InfeasibleBudget | None = None
        for _ in range(_ROUNDS):
            try:
                decision, price = decide_blocks(
                    self._heads, bracket.room, self.costs.tiers, self.options
                )
            except InfeasibleBudget as error:
                if bracket.is_first:
                    raise
                too_small = error
                if not bracket.widen():
                    break
                continue
            contract = self._contract(decision)
            used = exact_bytes(contract)
            if best_bytes < used <= budget:
                best, best_bytes, self.price = contract, used, price
                self.loss = _loss_of(decision)
            is_near = 0 <= budget - used < budget // _SLACK_PART
            if is_near or not bracket.correct(budget - used):
                break
        if best is None and too_small is not None:
            raise too_small
        return empty if best is None else best

    def _contract(self, decision: list[tuple[HeadBlocks, Tensor]] | None) -> WriteContract:
        protected = torch.stack(self._protected)
        dense = self.costs.tiers.dense_id
        tier_id = torch.where(protected, dense, self.costs.tiers.drop_id).to(torch.uint8)
        if decision is not None:
            flat = tier_id.flatten(0, 1)
            for head, (blocks, chosen) in enumerate(decision):
                blocks.spread(chosen, flat[head])
        return WriteContract(tier_id, protected, self.options.granularity)


class _Bracket:
    """Looks for the solver's room whose contract just fits.

    The solver's estimate leaves out unequal heads and free pages. Correcting it by the last error
    is quick but may circle, so every other step halves what is left between a room that fitted and
    one that did not.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._low, self._high = -1, 2 * room + 1
        self._least = max(1, room // _BRACKET_PARTS)
        self._num_steps = 0

    @property
    def is_first(self) -> bool:
        """Whether nothing was corrected yet."""
        return self._num_steps == 0

    def widen(self) -> bool:
        """The room was too small for any contract; false at the end."""
        self._low = self.room
        return self._step(None)

    def correct(self, slack: int) -> bool:
        """Take the bytes that were left, negative if too many were used; false at the end."""
        if slack >= 0:
            self._low = self.room
        else:
            self._high = self.room
        return self._step(self.room + slack)

    def _step(self, corrected: int | None) -> bool:
        if self._high - self._low <= self._least:
            return False
        self._num_steps += 1
        is_inside = corrected is not None and self._low < corrected < self._high
        if corrected is None or not is_inside or (self._num_steps > 2 and self._num_steps % 2):
            corrected = (self._low + self._high) // 2
        self.room = max(0, corrected)
        return True


def _loss_of(decision: list[tuple[HeadBlocks, Tensor]]) -> float:
    """Foretold loss of a decision."""
    return sum(float(blocks.distortion.gather(1, tier[:, None]).sum()) for blocks, tier in decision)
