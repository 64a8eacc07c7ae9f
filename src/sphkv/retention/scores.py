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
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sphkv.retention.errors import TierErrors
from sphkv.retention.features import TokenFeatures, drop_losses, pool_runs, weigh_tokens

if TYPE_CHECKING:
    from sphkv.retention.measure import LayerInput
    from sphkv.retention.policy import RetentionPolicy

_LEAST = 1e-30


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

    def of_blocks(self, head: int, units: Tensor) -> Tensor:
        """Loss of blocks of a head at every tier: the sum over their units.

        Args:
            head: The head.
            units: ``[blocks, units]`` int64, most important block first, padded with -1.

        Returns:
            ``[blocks, tiers]`` float32.
        """
        return sum_blocks(self.loss[head], units)


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
        scale = 1.0
        if self._policy.sensitivity is None:
            # outputs of layers differ in size and only the relative move matters
            scale = 1.0 / max(float(layer.features.output_energy.sum()), _LEAST)
        units = _weighed_units(layer, granularity)
        return _NestedLosses(
            scale * _distortion(units, layer.errors, self._policy),
            granularity,
            layer,
            weight,
            self._policy.alpha_drop * scale,
            units.surprise,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _NestedLosses(UnitLosses):
    """Losses whose drop column is that of nested sets, renormalised as softmax does.

    Attributes:
        layer: The layer, for its rows and values.
        weight: ``[heads, tokens]`` factor on the loss of dropping a token.
        drop_scale: Factor on every squared move.
        surprise: ``[heads, units]`` squared move by queries that no row predicts; None if none.
    """

    layer: LayerInput
    weight: Tensor
    drop_scale: float
    surprise: Tensor | None

    def of_blocks(self, head: int, units: Tensor) -> Tensor:
        values = self.layer.values
        tokens = unit_tokens(units, self.granularity, values.shape[1])
        drops = self.drop_scale * drop_losses(self.layer.rows, values, tokens, head)
        mean = sum_blocks(self.weight[head][:, None], tokens)[:, 0]
        mean = mean / (tokens >= 0).sum(1).clamp(min=1)
        loss = sum_blocks(self.loss[head], units)
        loss[:, 0] = convex_steps(drops).flip(0).to(mean.device) * mean
        if self.surprise is not None:
            unforeseen = sum_blocks(self.surprise[head][:, None], units)[:, 0]
            loss[:, 0] += self.drop_scale * unforeseen
        return loss


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
        ratio = tier_ratio(_distortion(units, layer.errors, self._policy))
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
    features: TokenFeatures,
    errors: TierErrors,
    policy: RetentionPolicy,
    *,
    head: int,
) -> Tensor:
    """Expected loss of every state of a head at every tier.

    A key error moves the output by the state's own pull on it, ``a |v - o|``; a value error by
    ``a``. Errors of different states are independent, so squares add, but for the part that all
    values of a head share. Tier 0 is the pull itself.

    Args:
        features: The layer's features.
        errors: The layer's error models.
        policy: Weights.
        head: The head.

    Returns:
        ``[tokens, tiers]`` float32.
    """
    energy = features.radius[head].square()
    loss = policy.alpha_theta * torch.outer(energy, errors.angle[head])
    loss += policy.alpha_r * torch.outer(energy, errors.radius[head])
    loss *= features.shift[head][:, None]
    value = features.energy[head] * features.value_norm[head].square()
    loss.addr_(value, policy.alpha_value * errors.value[head])
    loss.addr_(features.mass[head], policy.alpha_value * errors.common[head])
    loss[:, 0] = policy.alpha_drop * features.shift[head]
    return loss


def _distortion(features: TokenFeatures, errors: TierErrors, policy: RetentionPolicy) -> Tensor:
    """``state_distortion`` of every head, ``[heads, units, tiers]``."""
    heads = range(features.mass.shape[0])
    return torch.stack([state_distortion(features, errors, policy, head=head) for head in heads])


def _weighed_units(layer: LayerInput, granularity: int) -> TokenFeatures:
    """Features of units, with the weight of their tokens."""
    features = layer.features
    if layer.token_weight is not None:
        features = weigh_tokens(features, layer.token_weight)
    return features if granularity == 1 else pool_runs(features, granularity)


def segment_weight(policy: RetentionPolicy, segments: Tensor) -> Tensor:
    """``[tokens]`` float32 weight of every token's segment."""
    table = torch.tensor(policy.segment_weights, device=segments.device)
    return table[segments.to(torch.int64)]


def tier_ratio(loss: Tensor) -> Tensor:
    """Loss of each tier over that of dropping, over all units of a head.

    Args:
        loss: ``[heads, units, tiers]``.

    Returns:
        ``[heads, tiers]`` float32; 1 at tier 0 unless nothing is lost there.
    """
    return loss.sum(1) / loss[..., :1].sum(1).clamp(min=_LEAST)


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


def sum_blocks(per_unit: Tensor, blocks: Tensor) -> Tensor:
    """Sum ``[units, n]`` over the units of each block: ``[blocks, n]``."""
    live = (blocks >= 0)[..., None].to(per_unit.dtype)
    return (per_unit[blocks.clamp(min=0)] * live).sum(1)
