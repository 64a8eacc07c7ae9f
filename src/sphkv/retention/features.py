# SPDX-License-Identifier: Apache-2.0
"""What the controller learns from a prompt, one layer at a time, keeping no attention matrix.

Derivation: docs/math/retention.md, sections 1 and 2; the rows of predicted attention are those of
``rows.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from sphkv.retention.protection import Segment
from sphkv.retention.rows import PredictedRows, RowTotals

_TINY = torch.finfo(torch.float32).tiny


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


def measure_features(
    rows: PredictedRows,
    keys: Tensor,
    values: Tensor,
    *,
    sinks: int,
    recent: int,
    totals: RowTotals | None = None,
) -> TokenFeatures:
    """Features of every state of a layer.

    Args:
        rows: Predicted attention.
        keys: ``[heads, tokens, head_dim]``.
        values: ``[heads, tokens, head_dim]``.
        sinks: First tokens that do not count as reuse.
        recent: Newest tokens that do not count as reuse.
        totals: What the rows give; found out if None.
    """
    if totals is None:
        totals = rows.totals(values, sinks=sinks, recent=recent)
    sums, total = rows.sums(values, totals.output), rows.share.sum(1).clamp(min=_TINY)
    stable = totals.margin / (1 + totals.margin)
    return TokenFeatures(
        mass=sums.mass,
        energy=sums.energy,
        shift=sums.shift,
        radius=rows.norms(keys),
        value_norm=rows.norms(values),
        reuse=(rows.share * totals.far).sum(1) / total,
        stability=(rows.share * stable).sum(1) / total,
        output_energy=(rows.share * totals.output.square().sum(-1)).sum(1) / total,
    )


def surprise_shift(
    rows: PredictedRows, values: Tensor, *, even: float = 0.0, output: Tensor | None = None
) -> Tensor:
    """Expected squared move if queries turned to tokens that are gone, once per factor e of age.

    Args:
        rows: Predicted attention.
        values: ``[heads, tokens, head_dim]``.
        even: See ``surprise_prior``.
        output: ``[heads, rows, head_dim]`` what the rows give; found out if None.

    Returns:
        ``[heads, tokens]`` float32 share of every token in it.
    """
    apart = rows.apart(values, output)
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
    rows: PredictedRows,
    values: Tensor,
    chance: Tensor,
    *,
    even: float = 0.0,
    coded: float = 1.0,
    output: Tensor | None = None,
) -> TokenFeatures:
    """The same features if some later queries turn to a token that no row gives weight to.

    Args:
        features: What the rows predict.
        rows: Predicted attention.
        values: ``[heads, tokens, head_dim]``.
        chance: ``[heads]`` part of the later queries that do, per factor e of age.
        even: See ``surprise_prior``.
        coded: How much errors of coded states count to such a query.
        output: ``[heads, rows, head_dim]`` what the rows give; found out if None.
    """
    chance = chance.to(rows.share)
    surprise = chance[:, None] * surprise_shift(rows, values, even=even, output=output)
    each = coded * (chance * rows.share.sum(1))[:, None] * surprise_prior(values, even)
    return replace(
        features,
        mass=features.mass + each,
        energy=features.energy + each,
        shift=features.shift + coded * surprise,
        surprise=surprise,
        drop_only=None if coded == 1 else (1 - coded) * surprise,
    )


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
