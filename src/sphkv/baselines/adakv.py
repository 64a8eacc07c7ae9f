# SPDX-License-Identifier: Apache-2.0
"""Ada-KV: the heads of a layer share its room by where their votes are.

Feng et al., 2024, "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for
Efficient LLM Inference". The highest votes of all heads of a layer are sought together; a head's
room is how many of them are its own, mixed with a fifth (the safeguard) of an equal share. Votes
are SnapKV's.

Deviations: rooms are whole pages of 16 tokens, at least one per head; while decoding the rooms are
found again from the scores at hand. Otherwise as SnapKV here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.baselines.layer_pages import PAGE_TOKENS
from sphkv.baselines.snapkv import WindowVotes

SAFEGUARD = 0.2


@dataclass(frozen=True)
class AdaptiveVotes(WindowVotes):
    """Window votes that heads compete with.

    Attributes:
        safeguard: Share of the room that is divided equally.
    """

    safeguard: float = SAFEGUARD

    @property
    def name(self) -> str:
        """Label in reports."""
        return "adakv"

    def head_pages(self, scores: Tensor, total: int) -> list[int]:
        """By joint votes."""
        return adaptive_units(scores, total, unit=PAGE_TOKENS, safeguard=self.safeguard)


def adaptive_units(scores: Tensor, total: int, *, unit: int, safeguard: float) -> list[int]:
    """Units of each head, at least one, by how many of the highest scores are its own.

    Args:
        scores: ``[heads, tokens]``.
        total: Units of all heads; at least one per head.
        unit: Tokens of a unit.
        safeguard: Share that is divided equally.

    Returns:
        Numbers that add up to ``total``.
    """
    heads, tokens = scores.shape
    wanted = min(total * unit, heads * tokens)
    chosen = scores.flatten().topk(wanted).indices // tokens
    own = chosen.bincount(minlength=heads).double() / max(1, wanted)
    share = total * (safeguard / heads + (1 - safeguard) * own)
    units = share.floor().clamp(min=1)
    # what rounding left over, or took too much, where it changes least
    while int(units.sum()) < total:
        units[(share - units).argmax()] += 1
    while int(units.sum()) > total and bool((units > 1).any()):
        units[torch.where(units > 1, units - share, -torch.inf).argmax()] -= 1
    return [int(count) for count in units]
