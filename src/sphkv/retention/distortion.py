# SPDX-License-Identifier: Apache-2.0
"""Expected loss of a state at every tier: attention weight times error, angle, radius and value.

Derivation: docs/math/retention.md, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.retention.features import TokenFeatures
from sphkv.retention.policy import RetentionPolicy

# Beyond this a logit is noise and its weight arbitrary.
_MOST_VARIANCE = 3.0


@dataclass(frozen=True, slots=True, eq=False)
class TierErrors:
    """Error models of one layer: what a tier does to a state of unit norm.

    Attributes:
        angle: ``[heads, tiers]`` squared logit error from the direction, per squared radius.
        radius: ``[heads, tiers]`` squared logit error from the radius, per squared radius.
        value: ``[heads, tiers]`` squared error of a value, per squared norm.
    """

    angle: Tensor
    radius: Tensor
    value: Tensor

    def __post_init__(self) -> None:
        """Reject shapes that differ and errors that are negative or not finite."""
        for name in ("angle", "radius", "value"):
            tensor = getattr(self, name)
            if tensor.shape != self.angle.shape or tensor.dim() != 2:
                raise ValueError(f"{name} must be [heads, tiers], got {tuple(tensor.shape)}")
            if not bool((torch.isfinite(tensor) & (tensor >= 0)).all()):
                raise ValueError(f"{name} errors must be finite and not negative")


def state_distortion(
    features: TokenFeatures,
    errors: TierErrors,
    policy: RetentionPolicy,
    *,
    head: int,
) -> Tensor:
    """Expected loss of every state of a head at every tier.

    A key error moves the output by the state's own pull on it, ``a |v - o|``; a value error by
    ``a``. Errors of different states are independent, so squares add. Tier 0 is the pull itself.

    Args:
        features: The layer's features.
        errors: The layer's error models.
        policy: Weights.
        head: The head.

    Returns:
        ``[tokens, tiers]`` float32.
    """
    energy = features.radius[head].square()
    loss = policy.alpha_theta * weight_error(torch.outer(energy, errors.angle[head]))
    loss += policy.alpha_r * torch.outer(energy, errors.radius[head])
    loss *= features.shift[head][:, None]
    value = features.energy[head] * features.value_norm[head].square()
    loss.addr_(value, policy.alpha_value * errors.value[head])
    loss[:, 0] = policy.alpha_drop * features.shift[head]
    return loss


def weight_error(logit_variance: Tensor) -> Tensor:
    """Relative squared error of ``exp(logit)`` if the logit has a Gaussian error.

    For small variances it is the variance; at one bit per key element it is several times that.
    """
    variance = logit_variance.clamp(max=_MOST_VARIANCE)
    return (2 * variance).exp() - 2 * (variance / 2).exp() + 1


def segment_weight(policy: RetentionPolicy, segments: Tensor) -> Tensor:
    """``[tokens]`` float32 weight of every token's segment."""
    table = torch.tensor(policy.segment_weights, device=segments.device)
    return table[segments.to(torch.int64)]


def recipe_distortion(
    features: TokenFeatures, errors: TierErrors, policy: RetentionPolicy, segments: Tensor
) -> Tensor:
    """The paper's fixed recipe, Algorithm 1, step 3, which knows heads and segments only.

    Returns:
        ``[heads, tokens, tiers]`` float32 with a unit error for a dropped state.
    """
    weight = segment_weight(policy, segments)
    theta = policy.alpha_theta * features.reuse
    radial = policy.alpha_r * (1 - features.stability)
    angle, radius = errors.angle.sqrt(), errors.radius.sqrt()
    angle = angle.index_fill(1, torch.tensor([0], device=angle.device), 1.0)
    per_head = theta[:, None] * angle + radial[:, None] * radius
    return weight[None, :, None] * per_head[:, None]
