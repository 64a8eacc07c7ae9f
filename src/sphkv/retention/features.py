# SPDX-License-Identifier: Apache-2.0
"""What the controller learns from a prompt, one layer at a time, keeping no attention matrix.

Future attention is predicted by rows of weights: what the queries of an observation window gave
to every token, and what queries with the head's mean and spread would give a little later, in
closed form. Derivation: docs/math/retention.md, sections 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from sphkv.retention.protection import Segment

_TINY = torch.finfo(torch.float32).tiny
# Sums of weights in float32 are no better than this.
_LEAST_MASS = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRows:
    """Predicted attention of one KV head group.

    Attributes:
        weight: ``[heads, rows, tokens]`` float32, each row a softmax over what it sees.
        share: ``[heads, rows]`` float32 importance of each row.
        is_valid: ``[rows, tokens]`` bool: whether the row stands as far from the token as later
            queries will; a row next to a token says nothing about them.
    """

    weight: Tensor
    share: Tensor
    is_valid: Tensor

    def coverage(self) -> Tensor:
        """``[heads, tokens]`` part of the importance that is valid for each token."""
        total = self.share.sum(1, keepdim=True).clamp(min=_TINY)
        return (self.share @ self.is_valid.to(self.share.dtype) / total).clamp(min=_TINY)


@dataclass(frozen=True, slots=True, eq=False)
class TokenFeatures:
    """What one layer of a prompt told the controller.

    Attributes:
        mass: ``[heads, tokens]`` expected attention weight, the observation-window vote.
        energy: ``[heads, tokens]`` expected squared weight.
        shift: ``[heads, tokens]`` expected squared move of the output if the state were gone.
        radius: ``[heads, tokens]`` key norms.
        value_norm: ``[heads, tokens]`` value norms.
        reuse: ``[heads]`` share of the attention that goes beyond sinks and recent tokens, u_lh.
        stability: ``[heads]`` in [0, 1): how clear the first choice of attention is, s_lh.
        output_energy: ``[heads]`` mean squared norm of the head's output.
        surprise: ``[heads, tokens]`` part of ``shift`` due to queries that no row predicts; None
            if there are none.
    """

    mass: Tensor
    energy: Tensor
    shift: Tensor
    radius: Tensor
    value_norm: Tensor
    reuse: Tensor
    stability: Tensor
    output_energy: Tensor
    surprise: Tensor | None = None

    def to(self, device: torch.device | str) -> TokenFeatures:
        """The same on a device."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: part.to(device) for name, part in held.items() if part is not None}
        return TokenFeatures(**moved)


def weigh_tokens(features: TokenFeatures, weight: Tensor) -> TokenFeatures:
    """The same features with every token's losses multiplied by ``weight [tokens]``."""
    return replace(
        features,
        mass=features.mass * weight,
        energy=features.energy * weight,
        shift=features.shift * weight,
        surprise=None if features.surprise is None else features.surprise * weight,
    )


def pool_runs(features: TokenFeatures, run: int) -> TokenFeatures:
    """Features of aligned runs of tokens, whose losses are the sums over the run.

    Radius and value norm become means weighted by what they are multiplied with.

    Args:
        features: Features ``[heads, tokens]``.
        run: Tokens of a run; the last one may be shorter.
    """

    def total(each: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(each, (0, -each.shape[1] % run))
        return padded.reshape(each.shape[0], -1, run).sum(2)

    shift, energy = total(features.shift), total(features.energy)
    radius = total(features.shift * features.radius.square()) / shift.clamp(min=_TINY)
    norm = total(features.energy * features.value_norm.square()) / energy.clamp(min=_TINY)
    return replace(
        features,
        mass=total(features.mass),
        energy=energy,
        shift=shift,
        radius=radius.sqrt(),
        value_norm=norm.sqrt(),
        surprise=None if features.surprise is None else total(features.surprise),
    )


def window_rows(
    query: Tensor, positions: Tensor, keys: Tensor, *, scale: float, share: Tensor | None = None
) -> AttentionRows:
    """Weights that the queries of an observation window gave.

    A query counts for a token if it stands at least half as far from it as the prompt's end.

    Args:
        query: ``[query_heads, window, head_dim]`` after RoPE.
        positions: ``[window]`` int64 positions of the queries.
        keys: ``[heads, tokens, head_dim]`` after RoPE, at positions 0, 1, ...
        scale: Factor on the dot product.
        share: ``[query_heads]`` importance of each query head; equal if None.
    """
    heads, tokens, _ = keys.shape
    window = query.shape[1]
    grouped = query.float().reshape(heads, -1, query.shape[2])
    index = torch.arange(tokens, device=keys.device)
    distance = positions.to(index.device)[:, None] - index
    is_valid = 2 * distance >= tokens - index
    # the newest tokens have no such query; take what the last one gave them
    is_valid[-1] |= ~is_valid.any(0)
    repeats = grouped.shape[1] // window
    is_valid, is_visible = is_valid.repeat(repeats, 1), (distance >= 0).repeat(repeats, 1)
    logits = scale * grouped @ keys.float().transpose(1, 2)
    weight = logits.masked_fill_(~is_visible, -torch.inf).softmax(-1)
    return AttentionRows(weight, _row_share(share, weight, window), is_valid)


def _row_share(share: Tensor | None, weight: Tensor, repeats: int) -> Tensor:
    heads, rows, _ = weight.shape
    if share is None:
        return torch.full((heads, rows), 1.0 / rows, device=weight.device)
    spread = share.to(weight).reshape(heads, -1).repeat_interleave(repeats, 1)
    return spread / repeats


def expected_rows(
    query_planes: Tensor,
    key_planes: Tensor,
    frequencies: Tensor,
    *,
    scale: float,
    horizon: tuple[int, ...],
    share: Tensor | None = None,
) -> AttentionRows:
    """Weights that queries like those seen would give ``horizon`` tokens after the prompt.

    In angle coordinates a query ``D`` tokens after a key meets it turned by ``w D``. With queries
    of mean ``m`` and covariance ``S`` before rotation the expected exponential of a logit is that
    of its mean plus half its variance. The softmax divides by a sum that rises with it, so half
    of that is taken.

    Args:
        query_planes: ``[query_heads, samples, planes, 2]`` queries before RoPE.
        key_planes: ``[heads, tokens, planes, 2]`` keys before RoPE.
        frequencies: ``[planes]`` radians per position.
        scale: Factor on the dot product.
        horizon: Tokens after the prompt's last at which to look.
        share: ``[query_heads]`` importance of each query head; equal if None.
    """
    heads, tokens, planes, _ = key_planes.shape
    mean = query_planes.float().mean(1).reshape(heads, -1, planes, 2)
    # the isotropic part of the spread, which no rotation changes
    spread = query_planes.float().var(1, unbiased=False).sum(-1) / 2
    spread = spread.reshape(heads, -1, planes)
    energy = key_planes.float().square().sum(-1)  # [heads, tokens, planes]
    variance = scale**2 * spread @ energy.transpose(1, 2)  # [heads, group, tokens]
    last = torch.arange(tokens, device=key_planes.device)
    x, y = key_planes.float().unbind(-1)
    rows = []
    for ahead in horizon:
        angle = (tokens - 1 + ahead - last)[:, None] * frequencies.to(x)
        cos, sin = angle.cos(), angle.sin()
        # the key turned back by the distance, seen by the query before its rotation
        turned = torch.stack([x * cos + y * sin, y * cos - x * sin], -1).flatten(2)
        logits = scale * mean.flatten(2) @ turned.transpose(1, 2) + variance / 4
        rows.append(logits.softmax(-1))
    weight = torch.stack(rows, 2).flatten(1, 2)  # [heads, group * horizon, tokens]
    is_valid = torch.ones(weight.shape[1:], dtype=torch.bool, device=weight.device)
    return AttentionRows(weight, _row_share(share, weight, len(horizon)), is_valid)


def mix_rows(votes: AttentionRows, expected: AttentionRows | None, mix: float) -> AttentionRows:
    """Both kinds of rows; the expected ones get the part ``mix`` of the importance."""
    if expected is None or mix == 0:
        return votes
    return AttentionRows(
        torch.cat([votes.weight, expected.weight], 1),
        torch.cat([(1 - mix) * votes.share, mix * expected.share], 1),
        torch.cat([votes.is_valid, expected.is_valid]),
    )


def measure_features(
    rows: AttentionRows, keys: Tensor, values: Tensor, *, sinks: int, recent: int
) -> TokenFeatures:
    """Features of every state of a layer.

    Args:
        rows: Predicted attention.
        keys: ``[heads, tokens, head_dim]``.
        values: ``[heads, tokens, head_dim]``.
        sinks: First tokens that do not count as reuse.
        recent: Newest tokens that do not count as reuse.
    """
    values = values.float()
    output = rows.weight @ values  # [heads, rows, dim]
    norm = values.square().sum(-1)
    apart = output.square().sum(-1, keepdim=True) + norm[:, None]
    apart = (apart - 2 * output @ values.transpose(1, 2)).clamp_(min=0)
    coverage = rows.coverage()
    share = rows.share[..., None] * rows.is_valid
    mass = (share * rows.weight).sum(1) / coverage
    square = rows.weight.square().mul_(share)
    tokens = keys.shape[1]
    far = rows.weight[..., sinks : max(sinks, tokens - recent)].sum(-1)
    total = rows.share.sum(1).clamp(min=_TINY)
    top = rows.weight.topk(min(2, tokens), dim=-1).values
    margin = (top[..., 0] / top[..., -1].clamp(min=_TINY)).log()
    return TokenFeatures(
        mass=mass,
        energy=square.sum(1) / coverage,
        shift=(square * apart).sum(1) / coverage,
        radius=keys.float().norm(dim=-1),
        value_norm=norm.sqrt(),
        reuse=(rows.share * far).sum(1) / total,
        stability=(rows.share * (margin / (1 + margin))).sum(1) / total,
        output_energy=(rows.share * output.square().sum(-1)).sum(1) / total,
    )


def mean_output(rows: AttentionRows, values: Tensor) -> Tensor:
    """``[heads, head_dim]`` float32 output of a head, averaged over its rows."""
    weight = (rows.share[..., None] * rows.weight).sum(1) / rows.share.sum(1)[:, None]
    return (weight[:, None] @ values.float())[:, 0]


def squared_distance(values: Tensor, output: Tensor) -> Tensor:
    """``[heads, tokens]`` squared distance of values to the head's mean output."""
    return (values.float() - output[:, None]).square().sum(-1)


def surprise_shift(rows: AttentionRows, values: Tensor) -> Tensor:
    """Expected squared move if queries turned to tokens that are gone, once per factor e of age.

    Distances of copies have no scale of their own: each factor of two gets as many.

    Args:
        rows: Predicted attention.
        values: ``[heads, tokens, head_dim]``.

    Returns:
        ``[heads, tokens]`` float32 share of every token in it.
    """
    apart = squared_distance(values, mean_output(rows, values))
    return rows.share.sum(1)[:, None] * _inverse_age(values) * apart


def _inverse_age(values: Tensor) -> Tensor:
    """``[tokens]`` float32, one over the distance to the first token after the prompt."""
    return 1 / torch.arange(values.shape[1], 0, -1, device=values.device)


def expect_surprise(
    features: TokenFeatures, rows: AttentionRows, values: Tensor, chance: Tensor
) -> TokenFeatures:
    """The same features if some later queries turn to a token that no row gives weight to.

    Args:
        features: What the rows predict.
        rows: Predicted attention.
        values: ``[heads, tokens, head_dim]``.
        chance: ``[heads]`` part of the later queries that do, per factor e of age.
    """
    chance = chance.to(rows.share)
    surprise = chance[:, None] * surprise_shift(rows, values)
    each = (chance * rows.share.sum(1))[:, None] * _inverse_age(values)
    return replace(
        features,
        mass=features.mass + each,
        energy=features.energy + each,
        shift=features.shift + surprise,
        surprise=surprise,
    )


def drop_losses(rows: AttentionRows, values: Tensor, blocks: Tensor, head: int) -> Tensor:
    """Loss of dropping ever more blocks of one head, measured on the rows.

    The last block goes first. What is left is renormalised, as softmax does. A row takes no notice
    of tokens it is not valid for.

    Args:
        rows: Predicted attention.
        values: ``[heads, tokens, head_dim]``.
        blocks: ``[blocks, states]`` int64 tokens of each block, padded with -1.
        head: The head.

    Returns:
        ``[blocks + 1]`` float32 expected squared move of the output when the last 0, 1, ...
        blocks are gone.
    """
    weight, value = rows.weight[head], values[head].float()
    output = weight @ value
    # one row per token, so that a block's weights are gathered as whole rows
    by_token = (weight * rows.is_valid).T.contiguous()
    first_gone = blocks.flip(0)
    index, live = first_gone.clamp(min=0), first_gone >= 0
    part = by_token[index] * live[..., None]  # [blocks, states, rows]
    gone = part.sum(1).cumsum(0)  # [blocks, rows]
    moved = torch.bmm(part.transpose(1, 2), value[index]).cumsum(0)  # [blocks, rows, dim]
    moved -= gone[..., None] * output
    # a head that keeps next to nothing shows what is left at full weight
    move = moved.square_().sum(-1) / (1 - gone).clamp(min=_LEAST_MASS).square()
    loss = move @ rows.share[head]
    return torch.cat([loss.new_zeros(1), loss])


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
