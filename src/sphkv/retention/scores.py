# SPDX-License-Identifier: Apache-2.0
"""Expected loss of a state at every tier: attention weight times error, angle, radius and value.

Derivation: docs/math/retention.md, section 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sphkv.retention.errors import TierErrors
from sphkv.retention.features import TokenFeatures
from sphkv.retention.policy import RetentionPolicy


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
