# SPDX-License-Identifier: Apache-2.0
"""What every block of a layer costs and loses at every tier; no budget enters here.

Budgets of one prompt differ only in what is made of these prices.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.core.tiers import RUN_TOKENS
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
        self._segments = segments if options.use_segments else None

    @property
    def key(self) -> Hashable:
        """Equal for pricers that price a layer alike, given the same costs and policy."""
        options = self.options
        return options.shapes, options.use_segments, options.variant == "decoupled"

    def price(self, layer: LayerInput) -> PricedLayer:
        """Blocks of every head of a layer."""
        protected = layer.protected
        if any(shape.granularity > 1 for shape in self.options.shapes):
            # a run is decided as a whole, so one that is partly protected is protected whole
            protected = widen_to_runs(protected)
        features = layer.features
        # tokens that few rows speak for count as much as the others
        weight = 1 / layer.rows.coverage()
        if self._segments is not None:
            by_segment = segment_weight(self.policy, self._segments).to(weight.device)
            features = weigh_tokens(features, by_segment)
            weight = weight * by_segment
        pooled = pool_runs(features, RUN_TOKENS)
        scale = 1.0
        if self.policy.sensitivity is None:
            # outputs of layers differ in size and only the relative move matters
            scale = 1.0 / max(float(features.output_energy.sum()), 1e-30)
        heads = []
        for head in range(protected.shape[0]):
            shapes = {}
            for shape in self.options.shapes:
                source = features if shape is BlockShape.TOKENS else pooled
                loss = scale * state_distortion(source, layer.errors, self.policy, head=head)
                units = self._units(self._score(source, head, loss), ~protected[head], shape)
                tokens = unit_tokens(units, shape.granularity, layer.values.shape[1])
                drops = drop_losses(layer.rows, layer.values, tokens, head)
                drops *= self.policy.alpha_drop * scale
                distortion = sum_blocks(loss, units)
                distortion[:, 0] = _drop_steps(drops, tokens, weight[head])
                if source.surprise is not None:
                    unforeseen = sum_blocks(source.surprise[head][:, None], units)[:, 0]
                    distortion[:, 0] += self.policy.alpha_drop * scale * unforeseen
                shapes[shape] = HeadBlocks(shape, tokens, distortion, self._bytes(tokens, shape))
            heads.append(shapes)
        return PricedLayer(protected, tuple(heads))

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

    def _score(self, features: TokenFeatures, head: int, loss: Tensor) -> Tensor:
        if self.options.variant == "decoupled":
            # a separate first stage knows attention votes only
            return features.mass[head]
        return loss[:, 0]

    def _bytes(self, tokens: Tensor, shape: BlockShape) -> Tensor:
        """``[blocks, tiers]`` int64; only the last block may be smaller."""
        counts = (tokens >= 0).sum(1)
        full = int(counts[0]) if counts.numel() else 0
        cost = torch.tensor(self.costs.block_cost(full, shape), dtype=torch.int64)
        cost = cost.repeat(counts.numel(), 1)
        if counts.numel():
            cost[-1] = torch.tensor(self.costs.block_cost(int(counts[-1]), shape))
        return cost


def _drop_steps(drops: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
    """Loss of dropping each block ``[blocks]``, from that of dropping the last ones together."""
    counts = (tokens >= 0).sum(1)
    mean = sum_blocks(weight[:, None], tokens)[:, 0] / counts.clamp(min=1)
    return convex_steps(drops).flip(0).to(mean.device) * mean
