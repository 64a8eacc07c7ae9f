# SPDX-License-Identifier: Apache-2.0
"""Score, allocate, write: from the layers of a prompt and a byte budget to a contract."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sphkv.core.contract import WriteContract
from sphkv.errors import BudgetError
from sphkv.retention.policy import BlockShape, ControlOptions
from sphkv.retention.pricing import HeadBlocks, PageCosts, PricedLayer
from sphkv.retention.variants import decide_blocks

_ROUNDS = 16
# A contract that leaves less than this part of the budget is not improved further.
_SLACK_PART = 250
# Rooms nearer to each other than this part of the first give the same contract.
_BRACKET_PARTS = 4000


class RetentionController:
    """Collects the layers of a prompt, then decides about all of them at once.

    Attributes:
        costs: Bytes of pages.
        options: What is decided, and how.
        price: Loss a byte is worth at the decision; 0 before it.
        loss: Predicted loss of the decision; in nats per token if the policy is fitted.
    """

    def __init__(self, costs: PageCosts, options: ControlOptions | None = None) -> None:
        """Start without layers."""
        self.costs = costs
        self.options = options or ControlOptions()
        self.price = 0.0
        self.loss = 0.0
        self._heads: list[dict[BlockShape, HeadBlocks]] = []
        self._protected: list[Tensor] = []

    def add_layer(self, layer: PricedLayer) -> None:
        """Take the next layer, priced with the same costs and options."""
        self._protected.append(layer.protected)
        self._heads.extend(layer.heads)

    def decide(self, budget: int, exact_bytes: Callable[[WriteContract], int]) -> WriteContract:
        """Choose the tier of every state.

        Args:
            budget: Bytes for everything that stays resident.
            exact_bytes: Resident bytes of a contract, everything included.

        Raises:
            BudgetError: Protected states and fixed parts alone exceed the budget.
        """
        empty = self._contract(None)
        fixed = exact_bytes(empty)
        if fixed > budget:
            raise BudgetError(fixed, budget, budget, "what must be kept")
        best: WriteContract | None = None
        best_bytes = -1
        bracket = _Bracket(budget - fixed)
        too_small: BudgetError | None = None
        for _ in range(_ROUNDS):
            try:
                decision, price = decide_blocks(
                    self._heads, bracket.room, self.costs.tiers, self.options
                )
            except BudgetError as error:
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
    """Predicted loss of a decision."""
    return sum(float(blocks.distortion.gather(1, tier[:, None]).sum()) for blocks, tier in decision)
