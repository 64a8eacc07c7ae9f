# SPDX-License-Identifier: Apache-2.0
"""What every block of a layer costs and loses at every tier; no budget enters here.

States of a head are ranked by how much the output would move without them and cut into blocks of
one page each, so that a decision fills whole pages and its bytes are exact. Budgets of one prompt
differ only in what is made of these prices. Derivation: docs/math/retention.md, section 3.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from sphkv.core.devices import constant
from sphkv.core.tiers import RUN_TOKENS, TierTable
from sphkv.retention.features import in_units
from sphkv.retention.measure import LayerInput
from sphkv.retention.policy import BlockShape, ControlOptions, RetentionPolicy
from sphkv.retention.protection import widen_to_runs
from sphkv.retention.scores import count_states, make_score, segment_weight, sum_units


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
class LayerBlocks:
    """The states of some heads that may be coded or dropped, as blocks of one shape.

    Attributes:
        shape: How the states of a block lie.
        units: ``[heads, blocks, units]`` int64 tokens or runs of each block, most important block
            first, padded with -1. A head with fewer blocks than another has empty ones behind.
        states: ``[heads, blocks]`` int64 states of each block.
        distortion: ``[heads, blocks, tiers]`` float32.
        cost: ``[heads, blocks, tiers]`` int64 bytes.
    """

    shape: BlockShape
    units: Tensor
    states: Tensor
    distortion: Tensor
    cost: Tensor

    @classmethod
    def join(cls, parts: Sequence[LayerBlocks]) -> LayerBlocks:
        """Heads of several layers of one prompt, as if they were those of one."""
        names = ("units", "states", "distortion", "cost")
        joined = (torch.cat([getattr(part, name) for part in parts]) for name in names)
        return cls(parts[0].shape, *joined)

    def split(self, num_heads: int) -> list[LayerBlocks]:
        """Layers of so many heads each, which ``join`` put together."""
        names = ("units", "states", "distortion", "cost")
        parts = (getattr(self, name).split(num_heads) for name in names)
        return [LayerBlocks(self.shape, *own) for own in zip(*parts, strict=True)]

    def spread(self, tier_id: Tensor, num_tokens: int) -> Tensor:
        """The tier of every token, given those of blocks.

        Args:
            tier_id: ``[heads, blocks]`` uint8.
            num_tokens: Tokens of the prompt.

        Returns:
            ``[heads, num_tokens]`` uint8; ``NO_TIER`` where no block holds the token.
        """
        size = self.shape.granularity
        count = -(-num_tokens // size)
        # padding writes to a place of its own behind the last unit
        index = torch.where(self.units >= 0, self.units, count).flatten(1)
        each = tier_id[..., None].expand_as(self.units).flatten(1)
        found = tier_id.new_full((len(index), count + 1), NO_TIER).scatter_(1, index, each)
        found = found[:, :count]
        return found if size == 1 else found.repeat_interleave(size, 1)[:, :num_tokens]


NO_TIER = 255
"""What ``LayerBlocks.spread`` writes for tokens that no block holds."""


def rank_units(score: Tensor, is_free: Tensor, *, block_units: int) -> Tensor:
    """Cut the free units of every head, states or runs, into blocks of like importance.

    Args:
        score: ``[heads, units]`` importance.
        is_free: ``[heads, units]`` bool.
        block_units: Units of a block.

    Returns:
        ``[heads, blocks, block_units]`` int64 units, most important block first, padded with -1
        behind a head's last free unit. Ties keep the order of units.
    """
    order = score.masked_fill(~is_free, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.arange(score.shape[1], device=score.device)
    order = torch.where(rank < is_free.sum(1, keepdim=True), order, -1)
    rest = -order.shape[1] % block_units
    padded = torch.nn.functional.pad(order, (0, rest), value=-1) if rest else order
    return padded.view(len(padded), -1, block_units)


@dataclass(frozen=True, slots=True, eq=False)
class PricedLayer:
    """A layer as blocks with their losses and bytes, or several whose heads lie side by side.

    Attributes:
        protected: ``[heads, tokens]`` bool states that stay dense, whole runs if runs are decided.
        blocks: Blocks of every head in every shape that is allowed.
        run_loss: ``[heads, runs, tiers]`` loss of every run by itself; None if none was priced.
    """

    protected: Tensor
    blocks: Mapping[BlockShape, LayerBlocks]
    run_loss: Tensor | None = None

    def split(self, num_heads: int) -> list[PricedLayer]:
        """Layers of so many heads each, without losses of runs."""
        blocks = {shape: part.split(num_heads) for shape, part in self.blocks.items()}
        return [
            PricedLayer(protected, {shape: part[at] for shape, part in blocks.items()})
            for at, protected in enumerate(self.protected.split(num_heads))
        ]


class LayerPricer:
    """Ranks the states of a layer and prices their blocks.

    Attributes:
        costs: Bytes of pages.
        policy: Weights.
        options: What is decided, and how.
        score: What values states, by ``options.score``.
    """

    def __init__(
        self,
        costs: PageCosts,
        policy: RetentionPolicy,
        options: ControlOptions,
        segments: Tensor | None = None,
    ) -> None:
        """Take what does not depend on the layer.

        Args:
            costs: Bytes of pages.
            policy: Weights.
            options: What is decided, and how.
            segments: ``[tokens]`` segment of every token; None if the prompt has none.
        """
        self.costs = costs
        self.policy = policy
        self.options = options
        self.score = make_score(options.score, policy)
        self._weight = None
        # a weight of one changes nothing
        if options.use_segments and segments is not None and set(policy.segment_weights) != {1.0}:
            self._weight = segment_weight(policy, segments)

    @property
    def key(self) -> Hashable:
        """Equal for pricers that price a layer alike, given the same costs and errors."""
        options = self.options
        return (
            options.score,
            options.shapes,
            self.policy.segment_weights if options.use_segments else None,
            options.variant == "decoupled",
        )

    def price(self, layer: LayerInput) -> PricedLayer:
        """Blocks of every head of a layer; waits for no device."""
        protected = layer.protected
        if any(shape.granularity > 1 for shape in self.options.shapes):
            # a run is decided as a whole, so one that is partly protected is protected whole
            protected = widen_to_runs(protected)
        layer = self._weighed(layer)
        sizes = {shape.granularity for shape in self.options.shapes}
        losses = {size: self.score.losses(layer, granularity=size) for size in sizes}
        ranks = {size: self._rank(layer, found.loss, size) for size, found in losses.items()}
        blocks, tokens, together = {}, protected.shape[1], None
        # whole heads last: what all runs of a head lose together is known by then
        for shape in sorted(self.options.shapes, key=lambda shape: shape is BlockShape.WHOLE):
            size = shape.granularity
            units = self._units(ranks[size], ~protected, shape)
            if shape is BlockShape.WHOLE and together is not None:
                distortion = together[:, None]
            else:
                distortion, whole = losses[size].of_blocks(units)
                together = whole if shape is BlockShape.RUNS else together
            states = count_states(units, size, tokens)
            cost = self._bytes(states, shape)
            blocks[shape] = LayerBlocks(shape, units, states, distortion, cost)
        run_loss = losses[RUN_TOKENS].loss if RUN_TOKENS in losses else None
        ordered = {shape: blocks[shape] for shape in self.options.shapes}
        return PricedLayer(protected, ordered, run_loss)

    def run_losses(self, layer: LayerInput) -> Tensor:
        """``[heads, runs, tiers]`` float32 loss of every run of 16 tokens by itself."""
        return self.score.losses(self._weighed(layer), granularity=RUN_TOKENS).loss

    def _weighed(self, layer: LayerInput) -> LayerInput:
        """The layer with the weights of its tokens' segments."""
        if self._weight is None:
            return layer
        # copied to a device once for all layers
        self._weight = self._weight.to(layer.protected.device)
        return replace(layer, token_weight=self._weight)

    def _rank(self, layer: LayerInput, loss: Tensor, granularity: int) -> Tensor:
        """``[heads, units]`` importance by which units are cut into blocks."""
        if self.options.variant != "decoupled":
            return loss[..., 0]
        # a separate first stage knows attention votes only
        votes = layer.features.mass
        if layer.token_weight is not None:
            votes = votes * layer.token_weight
        return sum_units(votes, granularity)

    def _units(self, rank: Tensor, is_free: Tensor, shape: BlockShape) -> Tensor:
        """Blocks of states or runs, ``[heads, blocks, units]``, padded with -1."""
        if shape is not BlockShape.TOKENS:
            is_free = in_units(is_free, RUN_TOKENS).any(2)
        if shape is BlockShape.WHOLE:
            each = torch.arange(is_free.shape[1], device=is_free.device)
            return torch.where(is_free, each, -1)[:, None]
        size = self.costs.block_tokens // shape.granularity
        return rank_units(rank, is_free, block_units=size)

    def _bytes(self, states: Tensor, shape: BlockShape) -> Tensor:
        """``[..., tiers]`` int64 bytes of blocks of so many states; see ``block_cost``."""
        pages = tuple(max(1, tier.page_tokens) for tier in self.costs.tiers)
        sizes = constant(self.costs.page_bytes[shape], device=states.device)
        counts = -(-states[..., None] // constant(pages, device=states.device))
        # tier by tier: a GPU scans rows of a few numbers slowly
        rising = accumulate((counts * sizes).unbind(-1), torch.maximum)
        return torch.stack(list(rising), -1)
