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
from sphkv.core.tiers import TierTable
from sphkv.integrations.vllm.budgeted import PART_TOKENS

WINDOW = 32
"""Newest queries of a chunk that judge its blocks."""

_TINY = torch.finfo(torch.float32).tiny
# A logit error beyond this leaves a weight of one or none.
_MOST_ERROR = 8.0
# Sums of weights in float32 leave less than this uncertain.
_LEAST_LEFT = 1e-4


@dataclass(frozen=True, slots=True, eq=False)
class Votes:
    """Sums over queries, float32.

    Attributes:
        energy: ``[heads, tokens]`` squared attention weight.
        shift: ``[heads, tokens]`` the same times the squared distance of the value to the
            query's output.
        count: ``[heads, tokens]`` queries that could see the token.
        pull: ``[heads, parts, parts]`` products of the moves that the output would make if one
            page or the other were gone; moves of pages dropped together add up.
        pull_count: ``[heads, parts, parts]`` queries that could see all of both.
    """

    energy: Tensor
    shift: Tensor
    count: Tensor
    pull: Tensor
    pull_count: Tensor

    @classmethod
    def zeros(cls, *shape: int) -> Votes:
        """Sums over no queries; ``shape`` ends with heads and tokens."""
        parts = shape[-1] // PART_TOKENS
        pairs = (*shape[:-1], parts, parts)
        return cls(*(torch.zeros(size) for size in (shape, shape, shape, pairs, pairs)))

    def _sums(self) -> tuple[Tensor, ...]:
        return self.energy, self.shift, self.count, self.pull, self.pull_count

    def __getitem__(self, slot: int) -> Votes:
        """Views of one slot."""
        return Votes(*(part[slot] for part in self._sums()))

    def clear(self) -> None:
        """Begin anew."""
        for part in self._sums():
            part.zero_()

    def add(
        self,
        seen: tuple[Tensor, Tensor, Tensor],
        states: tuple[Tensor, Tensor],
        distance: Tensor,
        scale: float,
        *,
        skip: int = 0,
    ) -> None:
        """Add queries.

        Args:
            seen: Queries and outputs ``[rows, query_heads, head_dim]`` and log-sum-exp
                ``[rows, query_heads]``.
            states: Keys and values of the tokens, ``[heads, tokens, head_dim]``.
            distance: ``[rows, tokens]`` int64 query position less the token's.
            scale: Factor on the dot product.
            skip: First tokens that nothing is decided about.
        """
        keys, values = (part.float() for part in states)
        heads, tokens, _ = keys.shape
        query, output = (_by_head(part.float(), heads) for part in seen[:2])
        lse = _by_head(seen[2][..., None].float(), heads)
        logits = scale * query @ keys.transpose(1, 2) - lse  # [heads, rows, tokens]
        is_seen = (distance >= 0).repeat_interleave(logits.shape[1] // distance.shape[0], 0)
        hidden = ~is_seen | (torch.arange(tokens) < skip)
        weight = logits.masked_fill(hidden, -torch.inf).exp()
        square = weight.square()
        apart = output.square().sum(-1, keepdim=True) + values.square().sum(-1)[:, None]
        apart = (apart - 2 * output @ values.transpose(1, 2)).clamp_(min=0)
        self.energy[:, :tokens] += square.sum(1)
        self.shift[:, :tokens] += (square * apart).sum(1)
        self.count[:, :tokens] += is_seen.sum(0)
        self._add_pulls(weight, values, output, is_seen)

    def _add_pulls(self, weight: Tensor, values: Tensor, output: Tensor, is_seen: Tensor) -> None:
        heads, rows, tokens = weight.shape
        parts = tokens // PART_TOKENS
        if parts == 0:
            return
        split = weight[..., : parts * PART_TOKENS].reshape(heads, rows, parts, PART_TOKENS)
        of_page = values[:, : parts * PART_TOKENS].reshape(heads, parts, PART_TOKENS, -1)
        move = torch.einsum("hrpt,hptd->hrpd", split, of_page)
        mass = split.sum(-1, keepdim=True)
        # without the page, what is left has all the weight; too little of it says nothing
        rest = (move - mass * output[:, :, None]) / (1 - mass).clamp(min=_LEAST_LEFT)
        move = torch.where(mass > 1 - _LEAST_LEFT, output[:, :, None], rest)
        is_whole = is_seen[:, PART_TOKENS - 1 :: PART_TOKENS][:, :parts].float()  # [rows, parts]
        move *= is_whole[..., None]
        self.pull[:, :parts, :parts] += torch.einsum("hrpd,hrqd->hpq", move, move)
        self.pull_count[:, :parts, :parts] += is_whole.T @ is_whole

    def drop_losses(self) -> Tensor:
        """``[heads, parts]`` loss of every page if those that are missed less go before it."""
        pull = self.pull / self.pull_count.clamp(min=1)
        alone = pull.diagonal(dim1=1, dim2=2)
        order = alone.argsort(1)
        rank = order.argsort(1)
        before = rank[:, :, None] > rank[:, None]
        return alone + 2 * (pull * before).sum(2).clamp(min=0)


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


def page_losses(
    votes: Votes, states: tuple[Tensor, Tensor], errors: LayerErrors, *, num_blocks: int
) -> Tensor:
    """Expected loss ``[heads, parts, tiers]`` of the pages of a block.

    The controller's loss, docs/math/retention.md, section 2: a wrong weight moves the output by
    the state's pull on it and a wrong value by its weight, independently of other states. What is
    dropped moves it the same way every time, so drops of the ``num_blocks`` blocks of a sequence
    add up before they are squared.
    """
    keys, values = (part.float() for part in states)
    count = votes.count.clamp(min=1)
    by_key = _by_page(votes.shift / count * keys.square().sum(-1))
    by_value = _by_page(votes.energy / count * values.square().sum(-1))
    loss = by_key[..., None] * errors.key[:, None] + by_value[..., None] * errors.value[:, None]
    loss[..., 0] = num_blocks * votes.drop_losses()
    return loss


def _by_page(x: Tensor) -> Tensor:
    """Sums ``[heads, parts]`` of ``[heads, tokens]``."""
    return x.reshape(x.shape[0], -1, PART_TOKENS).sum(2)


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
    pages = (tokens - WINDOW - sinks) // PART_TOKENS
    at = sinks + torch.arange(pages * PART_TOKENS)
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
