# SPDX-License-Identifier: Apache-2.0
"""Score, allocate, write: from the layers of a prompt and a byte budget to a contract."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sphkv.core.contract import WriteContract
from sphkv.core.tiers import RUN_TOKENS
from sphkv.errors import BudgetError
from sphkv.retention.policy import ControlOptions
from sphkv.retention.pricing import NO_TIER, PageCosts, PricedLayer
from sphkv.retention.variants import Decision, PromptBlocks, decide_blocks

_ROUNDS = 16
# A contract that leaves less than this part of the budget is not improved further; so much less of
# it is aimed at that a contract which uses a little more than it should is near as well.
_SLACK_PART, _AIMED_PART = 250, 1000
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
        self._layers: list[PricedLayer] = []

    def add_layer(self, layer: PricedLayer) -> None:
        """Take the next layer, priced with the same costs and options."""
        self._layers.append(layer)

    def decide(self, budget: int, exact_bytes: Callable[[WriteContract], int]) -> WriteContract:
        """Choose the tier of every state.

        Args:
            budget: Bytes for everything that stays resident.
            exact_bytes: Resident bytes of a contract, everything included.

        Raises:
            BudgetError: Protected states and fixed parts alone exceed the budget.
        """
        protected = torch.stack([layer.protected for layer in self._layers])
        dense, drop = self.costs.tiers.dense_id, self.costs.tiers.drop_id
        dropped = torch.where(protected, dense, drop).to(torch.uint8)
        empty = WriteContract(dropped, protected, self.options.granularity)
        fixed = exact_bytes(empty)
        if fixed > budget:
            raise BudgetError(fixed, budget, budget, "what must be kept")
        blocks = PromptBlocks(self._layers)
        best: tuple[WriteContract, Decision] | None = None
        best_bytes = -1
        bracket = _Bracket(budget - fixed)
        too_small: BudgetError | None = None
        for _ in range(_ROUNDS):
            try:
                decision = decide_blocks(blocks, bracket.room, self.costs.tiers, self.options)
            except BudgetError as error:
                if bracket.is_first:
                    raise
                too_small = error
                if not bracket.widen():
                    break
                continue
            contract = self._contract(empty, decision)
            used = exact_bytes(contract)
            if best_bytes < used <= budget:
                best, best_bytes = (contract, decision), used
            is_near = 0 <= budget - used < budget // _SLACK_PART
            if is_near or not bracket.correct(budget - used, budget // _AIMED_PART):
                break
        if best is None and too_small is not None:
            raise too_small
        if best is None:
            return empty
        contract, decision = best
        self.price, self.loss = decision.price, decision.loss()
        return contract

    def _contract(self, empty: WriteContract, decision: Decision) -> WriteContract:
        """The contract of a decision about what is not protected, given that which drops it."""
        tokens, tier_id = empty.num_tokens, empty.tier_id
        chosen = decision.spread(tokens)
        if decision.blocks.is_in_runs:
            # what is protected is so in whole runs
            tier_id = tier_id[..., ::RUN_TOKENS]
        chosen = chosen.view_as(tier_id)
        tier_id = torch.where(chosen == NO_TIER, tier_id, chosen)
        if decision.blocks.is_in_runs:
            tier_id = tier_id.repeat_interleave(RUN_TOKENS, 2)[..., :tokens]
        return WriteContract(tier_id, empty.protected, self.options.granularity)


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

    def correct(self, slack: int, aimed: int) -> bool:
        """Take the bytes that were left, negative if too many were used; false at the end.

        Args:
            slack: These bytes.
            aimed: Those that should be left.
        """
        if slack >= 0:
            self._low = self.room
        else:
            self._high = self.room
        return self._step(self.room + slack - aimed)

    def _step(self, corrected: int | None) -> bool:
        if self._high - self._low <= self._least:
            return False
        self._num_steps += 1
        is_inside = corrected is not None and self._low < corrected < self._high
        if corrected is None or not is_inside or (self._num_steps > 2 and self._num_steps % 2):
            corrected = (self._low + self._high) // 2
        self.room = max(0, corrected)
        return True
