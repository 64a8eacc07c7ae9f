# SPDX-License-Identifier: Apache-2.0
"""What a layer of a prompt would lose at every tier: the one place where states are valued.

A score says the loss of every unit of every head at every tier, dropping included; ranking, bytes
and budget are the same for all scores. A new one is a class here and its line in ``SCORES``.
Derivation of the default: docs/math/retention.md, section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from sphkv.core.devices import constant
from sphkv.retention.errors import TierErrors
from sphkv.retention.features import (
    TokenFeatures,
    in_units,
    pool_runs,
    weigh_tokens,
)

if TYPE_CHECKING:
    from sphkv.retention.measure import LayerInput
    from sphkv.retention.policy import RetentionPolicy

_LEAST = 1e-30
# Slopes of a curve that are compared at once on a device.
_SLOPES = 1 << 26


class BlockLosses(NamedTuple):
    """Losses of blocks, and of all of them as one block.

    Attributes:
        each: ``[heads, blocks, tiers]`` float32.
        together: ``[heads, tiers]`` float32.
    """

    each: Tensor
    together: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class UnitLosses:
    """Losses of a layer's units, and of blocks of them that are decided about together.

    Attributes:
        loss: ``[heads, units, tiers]`` float32, not negative; tier 0 is the loss of dropping the
            unit alone, by which units are ranked, and the dense tier loses nothing.
        granularity: Tokens of a unit; the last one may be shorter.
    """

    loss: Tensor
    granularity: int

    def of_blocks(self, units: Tensor) -> BlockLosses:
        """Loss of blocks of every head at every tier: the sum over their units.

        Args:
            units: ``[heads, blocks, units]`` int64, most important block first, padded with -1.
        """
        each = sum_blocks(self.loss, units)
        return BlockLosses(each, each.sum(1))


class StateScore(Protocol):
    """A way to value states.

    Attributes:
        name: The name that ``ControlOptions.score`` takes.
    """

    name: str

    def losses(self, layer: LayerInput, *, granularity: int) -> UnitLosses:
        """Loss of every unit of every head at every tier.

        Args:
            layer: What was measured; ``token_weight`` multiplies every loss.
            granularity: Tokens of a unit, aligned to the first token.
        """
        ...


class AttentionScore:
    """The expected squared move of a head's output, in nats if the policy is fitted.

    Errors of coded states are independent and add up. Drops are not: each moves the output towards
    what is left, so blocks are dropped one after the other, least important first, and the loss
    of each is what it adds to those that went before it.

    Attributes:
        name: ``"attention"``.
    """

    def __init__(self, policy: RetentionPolicy) -> None:
        """Take the weights of the distortion."""
        self.name = "attention"
        self._policy = policy

    def losses(self, layer: LayerInput, *, granularity: int) -> UnitLosses:
        """Loss of every unit, see ``StateScore``."""
        # tokens that few rows speak for count as much as the others
        weight = 1 / layer.rows.coverage()
        if layer.token_weight is not None:
            weight = weight * layer.token_weight
        scale = torch.ones((), device=weight.device, dtype=torch.float64)
        if self._policy.sensitivity is None:
            # outputs of layers differ in size and only the relative move matters
            energy = layer.features.output_energy.view(layer.num_layers, -1)
            scale = 1.0 / energy.sum(1).double().clamp(min=_LEAST)
            scale = scale.repeat_interleave(energy.shape[1])[:, None, None]
        units = _weighed_units(layer, granularity)
        return _NestedLosses(
            scale.float() * state_distortion(units, layer.errors, self._policy),
            granularity,
            layer,
            weight,
            (self._policy.alpha_drop * scale).float().view(-1, 1),
            units.surprise,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _NestedLosses(UnitLosses):
    """Losses whose drop column is that of nested sets, renormalised as softmax does.

    Attributes:
        layer: The layer, for its rows and values.
        weight: ``[heads, tokens]`` factor on the loss of dropping a token.
        drop_scale: ``[heads or 1, 1]`` float32 factor on every squared move.
        surprise: ``[heads, units]`` squared move by queries that no row predicts; None if none.
    """

    layer: LayerInput
    weight: Tensor
    drop_scale: Tensor
    surprise: Tensor | None

    def of_blocks(self, units: Tensor) -> BlockLosses:
        values, size = self.layer.values, self.granularity
        drops = self.drop_scale * self.layer.rows.drop_losses(
            values, units, granularity=size, output=self.layer.output
        )
        each = sum_blocks(self.loss, units)
        together = each.sum(1)
        weight = sum_blocks(sum_units(self.weight, size)[..., None], units)[..., 0]
        states = count_states(units, size, values.shape[1])
        mean = weight / states.clamp(min=1)
        each[..., 0] = convex_steps(drops).flip(1) * mean
        together[:, 0] = drops[:, -1] * weight.sum(1) / states.sum(1).clamp(min=1)
        if self.surprise is not None:
            unforeseen = self.drop_scale * sum_blocks(self.surprise[..., None], units)[..., 0]
            each[..., 0] += unforeseen
            together[:, 0] += unforeseen.sum(1)
        return BlockLosses(each, together)


class RecipeScore:
    """The paper's fixed recipe, Algorithm 1, step 3, which knows heads and segments only.

    The angle error of a tier counts by how much a head attends beyond sinks and recent tokens, the
    radius error by how unclear its first choice is; a dropped state has an angle error of one.

    Attributes:
        name: ``"recipe"``.
    """

    def __init__(self, policy: RetentionPolicy) -> None:
        """Take ``alpha_theta`` and ``alpha_r``; the other weights are not part of the recipe."""
        self.name = "recipe"
        self._policy = policy

    def losses(self, layer: LayerInput, *, granularity: int) -> UnitLosses:
        """Loss of every unit, see ``StateScore``."""
        features, errors = layer.features, layer.errors
        theta = self._policy.alpha_theta * features.reuse
        radial = self._policy.alpha_r * (1 - features.stability)
        angle = errors.angle.sqrt()
        angle[:, 0] = 1.0
        per_head = theta[:, None] * angle + radial[:, None] * errors.radius.sqrt()
        weight = features.mass.new_ones(features.mass.shape[1])
        if layer.token_weight is not None:
            weight = layer.token_weight
        padded = torch.nn.functional.pad(weight, (0, -weight.numel() % granularity))
        per_unit = padded.view(-1, granularity).sum(1)
        return UnitLosses(per_head[:, None] * per_unit[None, :, None], granularity)


class VoteScore:
    """Attention votes alone, as eviction methods use them, with the tiers' measured errors.

    A state is worth the attention it got from the observation window, whatever its value and its
    head; a tier loses as much of that as it does on average over the head.

    Attributes:
        name: ``"votes"``.
    """

    def __init__(self, policy: RetentionPolicy) -> None:
        """Take the weights of the tiers' errors."""
        self.name = "votes"
        self._policy = policy

    def losses(self, layer: LayerInput, *, granularity: int) -> UnitLosses:
        """Loss of every unit, see ``StateScore``."""
        units = _weighed_units(layer, granularity)
        ratio = tier_ratio(state_distortion(units, layer.errors, self._policy))
        # without the policy's weights of heads: the votes of every head sum to about one
        votes = units.mass / layer.rows.share.sum(1, keepdim=True).clamp(min=_LEAST)
        return UnitLosses(votes[..., None] * ratio[:, None], granularity)


SCORES: dict[str, Callable[[RetentionPolicy], StateScore]] = {
    "attention": AttentionScore,
    "recipe": RecipeScore,
    "votes": VoteScore,
}


def check_score(name: str) -> None:
    """Raise if there is no score of this name, naming those there are."""
    if name not in SCORES:
        near = get_close_matches(name, SCORES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"score must be one of {', '.join(SCORES)}, got {name!r}{hint}")


def make_score(name: str, policy: RetentionPolicy) -> StateScore:
    """The score of a name.

    Raises:
        ValueError: There is no such score.
    """
    check_score(name)
    return SCORES[name](policy)


def state_distortion(
    features: TokenFeatures, errors: TierErrors, policy: RetentionPolicy
) -> Tensor:
    """Expected loss of every state at every tier.

    A key error moves the output by the state's own pull on it, ``a |v - o|``; a value error by
    ``a``. Errors of different states are independent, so squares add, but for the part that all
    values of a head share. Tier 0 is the pull itself, and that of queries nobody predicts.

    Args:
        features: The layer's features.
        errors: The layer's error models.
        policy: Weights.

    Returns:
        ``[heads, tokens, tiers]`` float32.
    """
    key = policy.alpha_theta * errors.angle + policy.alpha_r * errors.radius
    shift = features.shift[..., None]
    loss = shift * (features.radius.square()[..., None] * key[:, None])
    value = features.energy * features.value_norm.square()
    loss += value[..., None] * (policy.alpha_value * errors.value)[:, None]
    loss += features.mass[..., None] * (policy.alpha_value * errors.common)[:, None]
    loss[..., 0] = policy.alpha_drop * features.drop_shift
    return loss


def _weighed_units(layer: LayerInput, granularity: int) -> TokenFeatures:
    """Features of units, with the weight of their tokens."""
    features = layer.features
    if layer.token_weight is not None:
        features = weigh_tokens(features, layer.token_weight)
    return features if granularity == 1 else pool_runs(features, granularity)


def segment_weight(policy: RetentionPolicy, segments: Tensor) -> Tensor:
    """``[tokens]`` float32 weight of every token's segment."""
    table = constant(policy.segment_weights, device=segments.device)
    return table[segments.to(torch.int64)]


def tier_ratio(loss: Tensor) -> Tensor:
    """Loss of each tier over that of dropping, over all units of a head.

    Args:
        loss: ``[heads, units, tiers]``.

    Returns:
        ``[heads, tiers]`` float32; 1 at tier 0 unless nothing is lost there.
    """
    return loss.sum(1) / loss[..., :1].sum(1).clamp(min=_LEAST)


def sum_units(per_token: Tensor, granularity: int) -> Tensor:
    """Sum ``[..., tokens]`` over units of tokens; the last one may be shorter."""
    if granularity == 1:
        return per_token
    return in_units(per_token, granularity).sum(-1)


def count_states(units: Tensor, granularity: int, num_tokens: int) -> Tensor:
    """``[...]`` int64 tokens of blocks of units ``[..., units]``, padded with -1."""
    of_unit = (num_tokens - units * granularity).clamp(max=granularity)
    return torch.where(units >= 0, of_unit, 0).sum(-1)


def sum_blocks(per_unit: Tensor, blocks: Tensor) -> Tensor:
    """Sum over the units of each block.

    Args:
        per_unit: ``[heads, units, n]``.
        blocks: ``[heads, blocks, units]`` int64, padded with -1.

    Returns:
        ``[heads, blocks, n]``.
    """
    heads, count, size = blocks.shape
    index = blocks.clamp(min=0).view(heads, -1, 1).expand(-1, -1, per_unit.shape[2])
    live = (blocks >= 0)[..., None].to(per_unit.dtype)
    return (per_unit.gather(1, index).view(heads, count, size, -1) * live).sum(2)


def convex_steps(losses: Tensor) -> Tensor:
    """Steps of the greatest convex curve under each of some curves: rising.

    Dropping one block more then never looks cheaper than the one before, which a sum of
    independent choices needs.

    Args:
        losses: ``[curves, points]``.

    Returns:
        ``[curves, points - 1]`` float32.
    """
    if losses.device.type == "cpu":
        return torch.stack([_hull_steps(curve) for curve in losses.double().tolist()])
    points = losses.shape[1]
    step = max(1, _SLOPES // max(1, points * points))
    return torch.cat([_slope_steps(part) for part in losses.double().split(step)])


def _hull_steps(values: list[float]) -> Tensor:
    """Steps of one curve, point by point."""
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


def _slope_steps(losses: Tensor) -> Tensor:
    """The same of ``[curves, points]`` float64 at once: nothing waits for a device.

    A step is the greatest over its left sides of the least slope to any point on its right.
    """
    points = losses.shape[1]
    place = torch.arange(points, device=losses.device)
    run = (place - place[:, None]).double()  # [left, right]
    slope = (losses[:, None] - losses[..., None]) / run
    slope = slope.masked_fill_(run <= 0, torch.inf)[..., 1:]
    least = slope.flip(-1).cummin(-1).values.flip(-1)  # [curves, left, step]
    is_left = place[:, None] <= place[:-1]
    return least.masked_fill_(~is_left, -torch.inf).amax(1).clamp(min=0).float()
