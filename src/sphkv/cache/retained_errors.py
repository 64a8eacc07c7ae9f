# SPDX-License-Identifier: Apache-2.0
"""Error models of a layer, measured by coding some of the prompt's own states at every tier."""

from __future__ import annotations

import torch
from torch import Tensor

from sphkv.core.contract import StateCodec
from sphkv.core.tiers import TierTable
from sphkv.retention.distortion import TierErrors

_TINY = torch.finfo(torch.float32).tiny


def measure_tier_errors(
    codec: StateCodec,
    layer: int,
    tiers: TierTable,
    states: tuple[Tensor, Tensor, Tensor],
    positions: Tensor,
    *,
    scale: float,
) -> TierErrors:
    """Code sampled states at every tier and see what their queries would notice.

    Args:
        codec: The encoder the store will use.
        layer: Layer of the states.
        tiers: The tiers.
        states: Queries ``[query_heads, window, head_dim]``, keys and values
            ``[heads, samples, head_dim]``.
        positions: ``[samples]`` int64 positions of keys and values.
        scale: Factor on the dot product.

    Returns:
        Errors of every head and tier; nothing at the drop and dense tiers.
    """
    query, keys, values = states
    heads = keys.shape[0]
    keys, values = keys.float(), values.float()
    grouped = scale * query.float().reshape(heads, -1, keys.shape[2])
    radius = keys.norm(dim=-1)
    at = positions.expand(heads, -1)
    shape = (heads, len(tiers))
    angle, radial, value = (torch.zeros(shape) for _ in range(3))
    logits = (grouped @ keys.transpose(1, 2)).square().mean((1, 2))
    for tier_id, tier in enumerate(tiers):
        if not tier.is_coded:
            continue
        encoded = codec.encode(layer, tier, keys, values, at)
        coded_keys, coded_values = codec.decode(layer, tier, encoded, at)
        missed = (grouped @ (coded_keys - keys).transpose(1, 2)).square().mean((1, 2))
        energy = radius.square().mean(1).clamp(min=_TINY)
        # rounding of an 8-bit radius is uniform over its step and scales the logit
        rounding = (encoded.radius_step.square() / 12) / energy * logits
        angle[:, tier_id] = (missed - rounding).clamp(min=0) / energy
        radial[:, tier_id] = rounding / energy
        lost = (coded_values - values).square().sum((1, 2))
        value[:, tier_id] = lost / values.square().sum((1, 2)).clamp(min=_TINY)
    return TierErrors(angle, radial, value)


def sample_positions(first: int, last: int, count: int) -> Tensor:
    """Up to ``count`` evenly spaced positions of ``first..last - 1``."""
    stride = max(1, -(-(last - first) // max(1, count)))
    return torch.arange(first, last, stride)
