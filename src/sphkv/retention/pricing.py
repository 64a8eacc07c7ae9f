# SPDX-License-Identifier: Apache-2.0
"""What every block of a layer costs and loses at every tier; no budget enters here.

States of a head are ranked by how much the output would move without them and cut into blocks of
one page each, so that a decision fills whole pages and its bytes are exact. Budgets of one prompt
differ only in what is made of these prices. Derivation: docs/math/retention.md, section 3.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from sphkv.core.tiers import RUN_TOKENS, TierTable
from sphkv.retention.measure import LayerInput
from sphkv.retention.policy import BlockShape, ControlOptions, RetentionPolicy
from sphkv.retention.protection import widen_to_runs
from sphkv.retention.scores import make_score, segment_weight, unit_tokens


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


@dataclass(frozen=True, slots=True, eq=False)
class PricedLayer:
    """A layer as blocks with their losses and bytes.

    Attributes:
        protected: ``[heads, tokens]`` bool states that stay dense, whole runs if runs are decided.
        heads: Blocks of each head in every shape that is allowed.
    """

    protected: Tensor
    heads: tuple[dict[BlockShape, HeadBlocks], ...]

    def to(self, device: torch.device | str) -> PricedLayer:
        """The same on a device."""
        heads = tuple({key: each.to(device) for key, each in head.items()} for head in self.heads)
        return PricedLayer(self.protected.to(device), heads)


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
        self._segments = segments if options.use_segments else None

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
        """Blocks of every head of a layer."""
        protected = layer.protected
        if any(shape.granularity > 1 for shape in self.options.shapes):
            # a run is decided as a whole, so one that is partly protected is protected whole
            protected = widen_to_runs(protected)
        layer = self._weighed(layer)
        sizes = {shape.granularity for shape in self.options.shapes}
        losses = {size: self.score.losses(layer, granularity=size) for size in sizes}
        ranks = {size: self._rank(layer, found.loss, size) for size, found in losses.items()}
        heads = []
        for head in range(protected.shape[0]):
            shapes = {}
            for shape in self.options.shapes:
                size = shape.granularity
                units = self._units(ranks[size][head], ~protected[head], shape)
                tokens = unit_tokens(units, size, protected.shape[1])
                distortion = losses[size].of_blocks(head, units)
                shapes[shape] = HeadBlocks(shape, tokens, distortion, self._bytes(tokens, shape))
            heads.append(shapes)
        return PricedLayer(protected, tuple(heads))

    def run_losses(self, layer: LayerInput) -> Tensor:
        """``[heads, runs, tiers]`` float32 loss of every run of 16 tokens by itself."""
        return self.score.losses(self._weighed(layer), granularity=RUN_TOKENS).loss

    def _weighed(self, layer: LayerInput) -> LayerInput:
        """The layer with the weights of its tokens' segments."""
        if self._segments is None:
            return layer
        weight = segment_weight(self.policy, self._segments)
        return replace(layer, token_weight=weight.to(layer.protected.device))

    def _rank(self, layer: LayerInput, loss: Tensor, granularity: int) -> Tensor:
        """``[heads, units]`` importance by which units are cut into blocks."""
        if self.options.variant != "decoupled":
            return loss[..., 0]
        # a separate first stage knows attention votes only
        votes = layer.features.mass
        if layer.token_weight is not None:
            votes = votes * layer.token_weight
        padded = torch.nn.functional.pad(votes, (0, -votes.shape[1] % granularity))
        by_unit: Tensor = padded.unflatten(1, (-1, granularity)).sum(2)
        return by_unit

    def _units(self, rank: Tensor, is_free: Tensor, shape: BlockShape) -> Tensor:
        """Blocks of states or runs, ``[blocks, units]``, padded with -1."""
        if shape is not BlockShape.TOKENS:
            runs = torch.nn.functional.pad(is_free, (0, -is_free.numel() % RUN_TOKENS))
            is_free = runs.reshape(-1, RUN_TOKENS).any(1)
        if shape is BlockShape.WHOLE:
            units = is_free.nonzero().reshape(1, -1)
            return units if units.numel() else units.new_empty((0, 1))
        size = self.costs.block_tokens // shape.granularity
        return rank_units(rank, is_free, block_units=size)

    def _bytes(self, tokens: Tensor, shape: BlockShape) -> Tensor:
        """``[blocks, tiers]`` int64; only the last block may be smaller."""
        counts = (tokens >= 0).sum(1)
        full = int(counts[0]) if counts.numel() else 0
        cost = torch.tensor(self.costs.block_cost(full, shape), dtype=torch.int64)
        cost = cost.repeat(counts.numel(), 1)
        if counts.numel():
            cost[-1] = torch.tensor(self.costs.block_cost(int(counts[-1]), shape))
        return cost
