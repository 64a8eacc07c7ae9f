# SPDX-License-Identifier: Apache-2.0
"""Decides what the heads of a block with a budget keep, when the block becomes full.

Blocks that a prompt fills are judged by the newest queries of its chunk. Blocks that fill token by
token are judged by every fourth of its own queries, whose votes are summed while it is open. The
kernels return a query's log-sum-exp over its whole context, so the weight it gave to a token is
exact although only the block's keys are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.codec.states import SphericalCodec
from sphkv.core.tiers import TierTable
from sphkv.integrations.vllm.budgeted import PART_TOKENS, BudgetedBlock
from sphkv.integrations.vllm.steps import SealedBlock, StepPlan
from sphkv.retention.errors import StateSample, TierErrors, measure_tier_errors
from sphkv.retention.features import TokenFeatures, pool_runs
from sphkv.retention.policy import RetentionPolicy
from sphkv.retention.rows import window_rows
from sphkv.retention.scores import convex_steps, state_distortion

WINDOW = 32
"""Newest queries of a chunk that judge its blocks."""

_POLICY = RetentionPolicy()
# Sums of weights in float32 leave less than this uncertain.
_LEAST_LEFT = 1e-4
States = tuple[Tensor, Tensor, Tensor]
# Every token's vote would cost more than its attention; the last of a block is always one.
_VOTE_STRIDE = 4


@dataclass(frozen=True, slots=True, eq=False)
class Votes:
    """Sums over queries, float32.

    Attributes:
        mass: ``[heads, tokens]`` attention weight.
        energy: ``[heads, tokens]`` squared weight.
        shift: ``[heads, tokens]`` the same times the squared distance of the value to the
            query's output.
        count: ``[heads, tokens]`` queries that could see the token.
        pull: ``[heads, parts, parts]`` products of the moves that the output would make if one
            page or the other were gone; moves of pages dropped together add up.
        pull_count: ``[heads, parts, parts]`` queries that could see all of both.
    """

    mass: Tensor
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
        return cls(*(torch.zeros(size) for size in (*(shape,) * 4, pairs, pairs)))

    def _sums(self) -> tuple[Tensor, ...]:
        return self.mass, self.energy, self.shift, self.count, self.pull, self.pull_count

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
        self.mass[:, :tokens] += weight.sum(1)
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

    def features(self, states: tuple[Tensor, Tensor]) -> TokenFeatures:
        """What the controller's loss is made of, for keys and values ``[heads, tokens, dim]``."""
        count = self.count.clamp(min=1)
        keys, values = (part.float() for part in states)
        # what heads are like is for the paper's recipe, which is not used here
        unknown = torch.zeros(len(keys))
        return TokenFeatures(
            mass=self.mass / count,
            energy=self.energy / count,
            shift=self.shift / count,
            radius=keys.norm(dim=-1),
            value_norm=values.norm(dim=-1),
            reuse=unknown,
            stability=unknown,
            output_energy=unknown,
        )

    def drop_losses(self) -> Tensor:
        """``[heads, parts]`` loss of every page if those that are missed less go before it."""
        pull = self.pull / self.pull_count.clamp(min=1)
        order = pull.diagonal(dim1=1, dim2=2).argsort(1)
        losses = torch.empty(order.shape)
        for head, of_head in enumerate(order):
            # the squared move of the first n pages together, n = 0, 1, ...
            nested = pull[head][of_head][:, of_head].cumsum(0).cumsum(1).diagonal()
            steps = convex_steps(torch.cat([nested.new_zeros(1), nested])[None])[0]
            losses[head, of_head] = steps
        return losses


def _by_head(x: Tensor, heads: int) -> Tensor:
    """``[rows, query_heads, n]`` as ``[heads, rows * group, n]``, a query's heads together."""
    rows, query_heads, width = x.shape
    grouped = x.reshape(rows, heads, query_heads // heads, width)
    return grouped.transpose(0, 1).reshape(heads, -1, width)


def page_losses(
    votes: Votes, states: tuple[Tensor, Tensor], errors: TierErrors, *, num_blocks: int
) -> Tensor:
    """Expected loss ``[heads, parts, tiers]`` of the pages of a block.

    The controller's loss, docs/math/retention.md, section 2. What is dropped moves the output the
    same way every time, so drops of the ``num_blocks`` blocks of a sequence add up before they
    are squared.
    """
    pages = pool_runs(votes.features(states), PART_TOKENS)
    loss = state_distortion(pages, errors, _POLICY)
    loss[..., 0] = num_blocks * votes.drop_losses()
    return loss


def measure_errors(
    codec: SphericalCodec,
    layer: int,
    tiers: TierTable,
    states: tuple[Tensor, Tensor, Tensor],
    *,
    scale: float,
    sinks: int,
) -> TierErrors:
    """Error models of a layer from the states of a text, as its newest queries see them.

    Args:
        codec: What will code.
        layer: Layer of the states.
        tiers: The tiers.
        states: Queries, keys and values ``[heads, tokens, head_dim]`` of the whole text.
        scale: Factor on the dot product.
        sinks: First tokens that are never coded.
    """
    query, keys, values = states
    heads, tokens, _ = keys.shape
    window = torch.arange(tokens - WINDOW, tokens)
    seen = query[:, window]
    votes = window_rows(seen, window, keys, scale=scale)
    pages = (tokens - WINDOW - sinks) // PART_TOKENS
    index = (sinks + torch.arange(pages * PART_TOKENS)).expand(heads, -1)
    sample = StateSample(index, torch.ones(index.shape))
    return measure_tier_errors(
        codec,
        (layer,),
        tiers,
        (seen, keys, values),
        votes,
        sample,
        scale=scale,
        output=votes.output(values),
    )


class BlockRetention:
    """Votes and decisions of one worker.

    Attributes:
        block: Layout of a block.
    """

    def __init__(self, block: BudgetedBlock, max_sequences: int) -> None:
        self.block = block
        self._slots = max_sequences
        self._errors: dict[int, TierErrors] = {}
        self._votes: dict[int, Votes] = {}

    def learn_errors(
        self, codec: SphericalCodec, layer: int, states: States, *, scale: float
    ) -> None:
        """Measure what the tiers do to a layer; queries, keys, values ``[heads, tokens, dim]``."""
        self._errors[layer] = measure_errors(
            codec, layer, self.block.tiers, states, scale=scale, sinks=self.block.sink_tokens
        )

    def observe(self, layer: int, seen: States, step: StepPlan, scale: float) -> None:
        """Add the votes of single new tokens to the blocks they are in.

        Args:
            layer: Index of the layer.
            seen: Queries and outputs ``[rows, query_heads, head_dim]``, log-sum-exp.
            step: What the batch is.
            scale: Factor on the dot product.
        """
        if layer not in self._votes:
            shape = (self._slots, self.block.heads, self.block.tokens)
            self._votes[layer] = Votes.zeros(*shape)
        votes = self._votes[layer]
        for writes in (step.early, step.late):
            for slot in writes.slots[writes.offsets == 0].tolist():
                votes[slot].clear()
        for sequence in step.sequences:
            if sequence.num_queries != 1 or sequence.num_tokens % _VOTE_STRIDE:
                continue
            row, slot, count = sequence.first_row, sequence.tail_slot, sequence.tail_tokens
            held = (step.pool.keys[layer][slot], step.pool.values[layer][slot])
            votes[slot].add(
                tuple(part[row : row + 1] for part in seen),  # type: ignore[arg-type]
                (held[0][:, :count], held[1][:, :count]),
                torch.arange(count - 1, -1, -1)[None],
                scale,
                skip=0 if sequence.blocks else self.block.sink_tokens,
            )

    def choose(
        self,
        layer: int,
        sealed: SealedBlock,
        states: tuple[Tensor, Tensor],
        seen: States,
        step: StepPlan,
        scale: float,
    ) -> Tensor:
        """Tiers ``[heads, parts]`` of a full block with keys and values ``states``."""
        sequence = step.sequences[sealed.sequence]
        is_first = sealed.first_position == 0
        if sequence.num_queries == 1:
            votes = self._votes[layer][sealed.slot]
        else:
            end = sequence.first_row + sequence.num_queries
            rows = slice(max(sequence.first_row, end - WINDOW), end)
            votes = Votes.zeros(self.block.heads, self.block.tokens)
            at = sealed.first_position + torch.arange(self.block.tokens)
            distance = step.positions[rows, None] - at
            votes.add(
                tuple(part[rows] for part in seen),  # type: ignore[arg-type]
                states,
                distance,
                scale,
                skip=self.block.sink_tokens if is_first else 0,
            )
        num_blocks = sequence.num_tokens // self.block.tokens
        loss = page_losses(votes, states, self._errors[layer], num_blocks=num_blocks)
        return self.block.choose(loss, is_first=is_first)
