# SPDX-License-Identifier: Apache-2.0
"""What a block's states meant to the queries that saw them, for the controller to judge.

The kernels return a query's log-sum-exp over its whole context, so the weight it gave to a token
is exact although only the block's keys are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.codec.states import SphericalCodec
from sphkv.core.tiers import CODED_PAGE_MULTIPLE, TierTable

WINDOW = 32
"""Newest queries of a chunk that judge its blocks."""

_TINY = torch.finfo(torch.float32).tiny
# A logit error beyond this leaves a weight of one or none.
_MOST_ERROR = 8.0


@dataclass(frozen=True, slots=True, eq=False)
class Votes:
    """Sums over queries, ``[heads, tokens]`` float32 each.

    Attributes:
        energy: Squared attention weight.
        shift: The same times the squared distance of the value to the query's output.
        count: Queries that could see the token.
    """

    energy: Tensor
    shift: Tensor
    count: Tensor

    @classmethod
    def zeros(cls, *shape: int) -> Votes:
        """Sums over no queries; ``shape`` ends with heads and tokens."""
        return cls(*(torch.zeros(shape) for _ in range(3)))

    def __getitem__(self, slot: int) -> Votes:
        """Views of one slot."""
        return Votes(self.energy[slot], self.shift[slot], self.count[slot])

    def clear(self) -> None:
        """Begin anew."""
        for part in (self.energy, self.shift, self.count):
            part.zero_()

    def add(
        self,
        seen: tuple[Tensor, Tensor, Tensor],
        states: tuple[Tensor, Tensor],
        distance: Tensor,
        scale: float,
    ) -> None:
        """Add queries.

        Args:
            seen: Queries and outputs ``[rows, query_heads, head_dim]`` and log-sum-exp
                ``[rows, query_heads]``.
            states: Keys and values of the tokens, ``[heads, tokens, head_dim]``.
            distance: ``[rows, tokens]`` int64 query position less the token's.
            scale: Factor on the dot product.
        """
        keys, values = (part.float() for part in states)
        heads = keys.shape[0]
        query, output = (_by_head(part.float(), heads) for part in seen[:2])
        lse = _by_head(seen[2][..., None].float(), heads)
        logits = scale * query @ keys.transpose(1, 2) - lse  # [heads, rows, tokens]
        is_seen = (distance >= 0).repeat_interleave(logits.shape[1] // distance.shape[0], 0)
        square = (2 * logits.masked_fill(~is_seen, -torch.inf)).exp()
        apart = output.square().sum(-1, keepdim=True) + values.square().sum(-1)[:, None]
        apart = (apart - 2 * output @ values.transpose(1, 2)).clamp_(min=0)
        at = slice(0, keys.shape[1])
        self.energy[:, at] += square.sum(1)
        self.shift[:, at] += (square * apart).sum(1)
        self.count[:, at] += is_seen.sum(0)


def _by_head(x: Tensor, heads: int) -> Tensor:
    """``[rows, query_heads, n]`` as ``[heads, rows * group, n]``, a query's heads together."""
    rows, query_heads, width = x.shape
    grouped = x.reshape(rows, heads, query_heads // heads, width)
    return grouped.transpose(0, 1).reshape(heads, -1, width)


@dataclass(frozen=True, slots=True, eq=False)
class LayerErrors:
    """What tiers do to the states of a layer, ``[heads, tiers]`` each.

    Attributes:
        key: Squared relative change of a state's softmax weight, per squared radius.
        value: Squared error of a value, per squared norm.
    """

    key: Tensor
    value: Tensor


def state_losses(votes: Votes, states: tuple[Tensor, Tensor], errors: LayerErrors) -> Tensor:
    """Expected loss ``[heads, tokens, tiers]`` of the states of a block.

    The controller's loss, docs/math/retention.md, section 2: a wrong weight moves the output by
    the state's pull on it, a wrong value by its weight, and without the state its pull is lost.
    """
    keys, values = (part.float() for part in states)
    count = votes.count.clamp(min=1)
    shift, energy = votes.shift / count, votes.energy / count
    by_key = shift * keys.square().sum(-1)
    by_value = energy * values.square().sum(-1)
    loss = by_key[..., None] * errors.key[:, None] + by_value[..., None] * errors.value[:, None]
    loss[..., 0] = shift
    return loss


def measure_errors(
    codec: SphericalCodec,
    layer: int,
    tiers: TierTable,
    states: tuple[Tensor, Tensor, Tensor],
    *,
    scale: float,
    sinks: int,
) -> LayerErrors:
    """Error models of a layer from the states of a text, as its newest queries see them.

    Args:
        codec: What will code.
        layer: Layer of the states.
        tiers: The tiers.
        states: Queries, keys and values ``[heads, tokens, head_dim]`` of the whole text.
        scale: Factor on the dot product.
        sinks: First tokens that are never coded.
    """
    query, keys, values = (part.float() for part in states)
    heads, tokens, dim = keys.shape
    pages = (tokens - WINDOW - sinks) // CODED_PAGE_MULTIPLE
    at = sinks + torch.arange(pages * CODED_PAGE_MULTIPLE)
    late = scale * query[:, -WINDOW:].reshape(heads, -1, dim)
    keys, values = keys[:, at], values[:, at]
    logits = late @ keys.transpose(1, 2)
    weight = logits.softmax(-1)
    pull = weight.square()
    total_key = (pull * keys.square().sum(-1)[:, None]).sum((1, 2)).clamp(min=_TINY)
    total_value = (pull * values.square().sum(-1)[:, None]).sum((1, 2)).clamp(min=_TINY)
    key, value = (torch.zeros(heads, len(tiers)) for _ in range(2))
    positions = at.reshape(1, pages, -1).expand(heads, -1, -1).flatten(0, 1)
    head_ids = torch.arange(heads).repeat_interleave(pages)
    split = [x.reshape(heads * pages, -1, dim) for x in (keys, values)]
    for tier_id, tier in enumerate(tiers):
        if not tier.is_coded:
            continue
        encoded = codec.encode(layer, tier, split[0], split[1], positions, head_ids=head_ids)
        coded = codec.decode(layer, tier, encoded, positions, head_ids=head_ids)
        coded_keys, coded_values = (x.reshape(heads, -1, dim) for x in coded)
        wrong = (late @ coded_keys.transpose(1, 2) - logits).clamp(-_MOST_ERROR, _MOST_ERROR)
        factor = wrong.expm1()
        moved = (factor / (1 + weight * factor)).square()
        key[:, tier_id] = (pull * moved).sum((1, 2)) / total_key
        lost = (coded_values - values).square().sum(-1)
        value[:, tier_id] = (pull * lost[:, None]).sum((1, 2)) / total_value
    return LayerErrors(key, value)
