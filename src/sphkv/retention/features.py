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

from sphkv.core.devices import constant
from sphkv.core.rope import RopeSpec
from sphkv.retention.protection import Segment

_TINY = torch.finfo(torch.float32).tiny
# Sums of weights in float32 are no better than this.
_LEAST_MASS = 1e-6
# Tokens among which the largest weight is found first; two of these then hold the largest two.
_PEAK_TOKENS = 64
# Elements of moved outputs that exist at once: bounds the memory of many blocks.
_MOVED_ELEMENTS = 1 << 28


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
        surprise: ``[heads, tokens]`` the same move due to queries that no row predicts; None if
            there are none.
        drop_only: ``[heads, tokens]`` part of it that codes do not lose, and which is no part of
            ``shift`` therefore; None if there is none.
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
    drop_only: Tensor | None = None

    @property
    def drop_shift(self) -> Tensor:
        """``[heads, tokens]`` expected squared move if the state were gone, all surprise in it."""
        return self.shift if self.drop_only is None else self.shift + self.drop_only

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
        drop_only=None if features.drop_only is None else features.drop_only * weight,
    )


def pool_runs(features: TokenFeatures, run: int) -> TokenFeatures:
    """Features of aligned runs of tokens, whose losses are the sums over the run.

    Radius and value norm become means weighted by what they are multiplied with.

    Args:
        features: Features ``[heads, tokens]``.
        run: Tokens of a run; the last one may be shorter.
    """

    def total(each: Tensor) -> Tensor:
        return in_units(each, run).sum(2)

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
        drop_only=None if features.drop_only is None else total(features.drop_only),
    )


def in_units(per_token: Tensor, granularity: int) -> Tensor:
    """``[..., tokens]`` as units of tokens ``[..., units, granularity]``, the last one padded."""
    rest = -per_token.shape[-1] % granularity
    # padding by nothing would be a copy
    padded = torch.nn.functional.pad(per_token, (0, rest)) if rest else per_token
    units: Tensor = padded.unflatten(-1, (-1, granularity))
    return units


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
    keys: Tensor,
    rope: RopeSpec,
    *,
    scale: float,
    horizon: tuple[int, ...],
    share: Tensor | None = None,
) -> AttentionRows:
    """Weights that queries like those seen would give ``horizon`` tokens after the prompt.

    With queries of mean ``m`` and covariance ``S`` before rotation the expected exponential of a
    logit is that of its mean, the product of a key with ``m`` at the query's position, plus half
    its variance. The softmax divides by a sum that rises with it, so half of that is taken.

    Args:
        query_planes: ``[query_heads, samples, planes, 2]`` queries before RoPE.
        keys: ``[heads, tokens, head_dim]`` after RoPE, at positions 0, 1, ...
        rope: Rotary embedding of the layer.
        scale: Factor on the dot product.
        horizon: Tokens after the prompt's last at which to look.
        share: ``[query_heads]`` importance of each query head; equal if None.
    """
    heads, tokens, _ = keys.shape
    keys, ahead = keys.float(), constant(horizon, device=keys.device)
    mean = rope.rotate(query_planes.float().mean(1)[:, None], tokens - 1 + ahead)
    mean = rope.from_planes(mean).reshape(heads, -1, keys.shape[2])  # [heads, group * horizon, dim]
    # the isotropic part of the spread, which no rotation changes
    spread = query_planes.float().var(1, unbiased=False).sum(-1) / 2
    spread = spread.reshape(heads, -1, spread.shape[-1])
    energy = rope.to_planes(keys).square().sum(-1)  # [heads, tokens, planes]
    variance = scale**2 * spread @ energy.transpose(1, 2)  # [heads, group, tokens]
    logits = scale * mean @ keys.transpose(1, 2)
    logits += (variance / 4).repeat_interleave(len(horizon), 1)
    weight = logits.softmax(-1)
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
    rows: AttentionRows,
    keys: Tensor,
    values: Tensor,
    *,
    sinks: int,
    recent: int,
    output: Tensor | None = None,
) -> TokenFeatures:
    """Features of every state of a layer.

    Args:
        rows: Predicted attention.
        keys: ``[heads, tokens, head_dim]``.
        values: ``[heads, tokens, head_dim]``.
        sinks: First tokens that do not count as reuse.
        recent: Newest tokens that do not count as reuse.
        output: ``[heads, rows, head_dim]`` what the rows give; found out if None.
    """
    values = values.float()
    if output is None:
        output = rows.weight @ values
    norm = values.square().sum(-1)
    tokens = keys.shape[1]
    far = rows.weight[..., sinks : max(sinks, tokens - recent)].sum(-1)
    top = _top_two(rows.weight)
    margin = (top[..., 0] / top[..., -1].clamp(min=_TINY)).log()
    coverage, total = rows.coverage(), rows.share.sum(1).clamp(min=_TINY)
    share = rows.share[:, None]  # [heads, 1, rows]
    weight = rows.weight * rows.is_valid
    mass = (share @ weight)[:, 0] / coverage
    square = weight.square_()
    energy = (share @ square)[:, 0] / coverage
    pull = square.mul_(_squared_gaps(output, values, norm))
    return TokenFeatures(
        mass=mass,
        energy=energy,
        shift=(share @ pull)[:, 0] / coverage,
        radius=keys.float().norm(dim=-1),
        value_norm=norm.sqrt(),
        reuse=(rows.share * far).sum(1) / total,
        stability=(rows.share * (margin / (1 + margin))).sum(1) / total,
        output_energy=(rows.share * output.square().sum(-1)).sum(1) / total,
    )


def _top_two(weight: Tensor) -> Tensor:
    """``[..., 2]`` largest two weights of ``[..., tokens]``, in falling order; one of one token."""
    tokens = weight.shape[-1]
    whole = tokens // _PEAK_TOKENS * _PEAK_TOKENS
    if whole < 2 * _PEAK_TOKENS:
        return weight.topk(min(2, tokens), dim=-1).values
    parts = weight[..., :whole].unflatten(-1, (-1, _PEAK_TOKENS))
    best = parts.amax(-1).topk(2, dim=-1).indices[..., None]
    near = parts.gather(-2, best.expand(*best.shape[:-1], _PEAK_TOKENS)).flatten(-2)
    return torch.cat([near, weight[..., whole:]], -1).topk(2, dim=-1).values


def _squared_gaps(output: Tensor, values: Tensor, norm: Tensor) -> Tensor:
    """Squared distances ``[heads, rows, tokens]`` of outputs and values with squared norms."""
    one, own = torch.ones_like(norm[..., None]), output.square().sum(-1, keepdim=True)
    left = torch.cat([-2 * output, own, torch.ones_like(own)], -1)
    right = torch.cat([values, one, norm[..., None]], -1)
    return torch.bmm(left, right.transpose(1, 2)).clamp_(min=0)


def mean_output(rows: AttentionRows, values: Tensor) -> Tensor:
    """``[heads, head_dim]`` float32 output of a head, averaged over its rows."""
    weight = (rows.share[:, None] @ rows.weight)[:, 0] / rows.share.sum(1)[:, None]
    return (weight[:, None] @ values.float())[:, 0]


def squared_distance(values: Tensor, output: Tensor) -> Tensor:
    """``[heads, tokens]`` squared distance of values to the head's mean output."""
    return (values.float() - output[:, None]).square().sum(-1)


def surprise_shift(rows: AttentionRows, values: Tensor, *, even: float = 0.0) -> Tensor:
    """Expected squared move if queries turned to tokens that are gone, once per factor e of age.

    Args:
        rows: Predicted attention.
        values: ``[heads, tokens, head_dim]``.
        even: See ``surprise_prior``.

    Returns:
        ``[heads, tokens]`` float32 share of every token in it.
    """
    apart = squared_distance(values, mean_output(rows, values))
    return rows.share.sum(1)[:, None] * surprise_prior(values, even) * apart


def surprise_prior(values: Tensor, even: float) -> Tensor:
    """``[tokens]`` float32 chances of tokens; they add up to the factors e in the prompt's length.

    Copies have no scale of their own: each factor of two of the distance gets as many. A question
    may ask for any part of a document alike: the part ``even`` of the chances is the same for all.
    """
    age = 1 / torch.arange(values.shape[1], 0, -1, device=values.device)
    return (1 - even) * age + even * age.mean()


def expect_surprise(
    features: TokenFeatures,
    rows: AttentionRows,
    values: Tensor,
    chance: Tensor,
    *,
    even: float = 0.0,
    coded: float = 1.0,
) -> TokenFeatures:
    """The same features if some later queries turn to a token that no row gives weight to.

    Args:
        features: What the rows predict.
        rows: Predicted attention.
        values: ``[heads, tokens, head_dim]``.
        chance: ``[heads]`` part of the later queries that do, per factor e of age.
        even: See ``surprise_prior``.
        coded: How much errors of coded states count to such a query.
    """
    chance = chance.to(rows.share)
    surprise = chance[:, None] * surprise_shift(rows, values, even=even)
    each = coded * (chance * rows.share.sum(1))[:, None] * surprise_prior(values, even)
    return replace(
        features,
        mass=features.mass + each,
        energy=features.energy + each,
        shift=features.shift + coded * surprise,
        surprise=surprise,
        drop_only=None if coded == 1 else (1 - coded) * surprise,
    )


def drop_losses(
    rows: AttentionRows,
    values: Tensor,
    units: Tensor,
    *,
    granularity: int = 1,
    output: Tensor | None = None,
) -> Tensor:
    """Loss of dropping ever more blocks of every head, measured on the rows.

    The last block goes first. What is left is renormalised, as softmax does. A row takes no notice
    of tokens it is not valid for.

    Args:
        rows: Predicted attention.
        values: ``[heads, tokens, head_dim]``.
        units: ``[heads, blocks, units]`` int64 units of each block, padded with -1.
        granularity: Tokens of a unit, aligned to the first token.
        output: ``[heads, rows, head_dim]`` what the rows give; found out if None.

    Returns:
        ``[heads, blocks + 1]`` float32 expected squared move of the output when the last 0, 1, ...
        blocks are gone.
    """
    values = values.float()
    if output is None:
        output = rows.weight @ values
    pad = -values.shape[1] % granularity
    weight = rows.weight * rows.is_valid
    if pad:
        weight, values = (
            torch.nn.functional.pad(weight, (0, pad)),
            torch.nn.functional.pad(values, (0, 0, 0, pad)),
        )
    # one more column counts the weight that is gone
    counted = torch.cat([values, torch.ones_like(values[..., :1])], -1)
    first_gone = units.flip(1)
    size = units.shape[1] * output.shape[1] * counted.shape[2]
    step = max(1, _MOVED_ELEMENTS // max(1, size))
    losses = []
    for at in range(0, units.shape[0], step):
        part = slice(at, at + step)
        moved = _moved_outputs(weight[part], counted[part], first_gone[part], granularity)
        gone = moved[..., -1:]
        moved = moved[..., :-1] - gone * output[part, None]
        # a head that keeps next to nothing shows what is left at full weight
        move = moved.square_().sum(-1) / (1 - gone[..., 0]).clamp(min=_LEAST_MASS).square()
        losses.append((move * rows.share[part, None]).sum(-1))
    loss = losses[0] if len(losses) == 1 else torch.cat(losses)
    return torch.nn.functional.pad(loss, (1, 0))


def _moved_outputs(weight: Tensor, values: Tensor, units: Tensor, granularity: int) -> Tensor:
    """Weighted sums over the first 1, 2, ... blocks, ``[heads, blocks, rows, dim]``.

    Args:
        weight: ``[heads, rows, tokens]``.
        values: ``[heads, tokens, dim]``.
        units: ``[heads, blocks, units]``, padded with -1.
        granularity: Tokens of a unit.
    """
    heads, blocks, size = units.shape
    index, live = units.clamp(min=0), (units >= 0).to(values.dtype)
    by_unit = weight.unflatten(2, (-1, granularity))[:, None].expand(-1, blocks, -1, -1, -1)
    wanted = index[:, :, None, :, None].expand(-1, -1, weight.shape[1], -1, granularity)
    part = by_unit.gather(3, wanted).view(heads * blocks, weight.shape[1], -1)
    own = values.unflatten(1, (-1, granularity))
    wanted = index.view(heads, -1, 1, 1).expand(-1, -1, *own.shape[2:])
    chosen = own.gather(1, wanted) * live.view(heads, -1, 1, 1)
    moved = torch.bmm(part, chosen.view(heads * blocks, size * granularity, -1))
    return moved.view(heads, blocks, weight.shape[1], -1).cumsum(1)


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
