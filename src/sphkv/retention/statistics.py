# SPDX-License-Identifier: Apache-2.0
"""How an allocation spreads its bytes over heads and segments, by the paper's names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.retention.segments import Segment


@dataclass(frozen=True, slots=True)
class HeadSpread:
    """How unevenly bytes are spent over heads.

    Attributes:
        bytes_per_token: ``a_h`` of every head.
        entropy: ``H_alloc`` in nats; the logarithm of the number of heads if all are equal.
        gini: ``G_alloc``; 0 if all are equal.
    """

    bytes_per_token: tuple[float, ...]
    entropy: float
    gini: float


def head_spread(state_bytes: Tensor) -> HeadSpread:
    """Head-wise allocation statistics.

    Args:
        state_bytes: ``[heads, tokens]`` bytes of every state, 0 if dropped.
    """
    share = state_bytes.double().mean(dim=1)
    total = float(share.sum())
    heads = share.numel()
    if total == 0:
        return HeadSpread((0.0,) * heads, 0.0, 0.0)
    part = share / total
    entropy = float(-(part * part.clamp(min=1e-300).log()).sum())
    gini = float((share[:, None] - share[None, :]).abs().sum()) / (2 * heads * total)
    return HeadSpread(tuple(share.tolist()), entropy, gini)


def segment_spread(state_bytes: Tensor, segments: Tensor) -> dict[str, dict[str, float]]:
    """Retention rate ``rho_S`` and bytes per state ``b_S`` of every segment that occurs.

    Args:
        state_bytes: ``[heads, tokens]`` bytes of every state, 0 if dropped.
        segments: ``[tokens]`` values of ``Segment``.
    """
    spread = {}
    for segment in Segment:
        chosen = state_bytes[:, segments.to(state_bytes.device) == int(segment)]
        if chosen.numel():
            spread[segment.name.lower()] = {
                "rho": float((chosen > 0).double().mean()),
                "bytes": float(chosen.double().mean()),
                "tokens": float(chosen.shape[1]),
            }
    return spread


def state_bytes_of(tier_id: Tensor, tier_bytes: tuple[int, ...]) -> Tensor:
    """Bytes of every state of a contract's ``[layers, heads, tokens]``, as ``[heads, tokens]``."""
    table = torch.tensor(tier_bytes, dtype=torch.int64, device=tier_id.device)
    return table[tier_id.to(torch.int64)].flatten(0, 1)
