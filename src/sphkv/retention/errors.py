# SPDX-License-Identifier: Apache-2.0
"""Error models of a layer, measured by coding some of the prompt's own states at every tier.

Sinks and other protected states are no part of the sample: their keys are unlike all others, and
they are never coded. What counts is the move of the output that the window's queries would see,
so states are weighed by the attention they get. Derivation: docs/math/retention.md, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sphkv.core.tiers import CODED_PAGE_MULTIPLE, TierSpec, TierTable
from sphkv.retention.rows import PredictedRows

_TINY = torch.finfo(torch.float32).tiny
DRIFT_QUANTILE = 0.95
"""Part of the keys and queries for which a predicted drift is a bound."""

# A logit error beyond this leaves a weight of one or none.
_MOST_LOGIT_ERROR = 8.0


class RecodingCodec(Protocol):
    """A codec that says what several tiers make of the same states."""

    def recode(
        self,
        layers: Sequence[int],
        tiers: Sequence[TierSpec],
        keys: Tensor,
        values: Tensor,
        index: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """States after coding at every tier, in pages of 32.

        Args:
            layers: Layers of the states, whose heads lie one behind the other; their rotary
                embedding is the same.
            tiers: Coded tiers.
            keys: ``[heads, states, head_dim]`` float32 after RoPE, whole pages.
            values: ``[heads, states, head_dim]`` float32.
            index: ``[heads, states]`` int64 positions.

        Returns:
            Keys and values ``[tiers, heads, states, head_dim]`` float32, and the radius step of
            each state's page, ``[tiers, heads, states]``.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TierErrors:
    """Error models of one layer: what a tier does to a state of unit norm.

    Attributes:
        angle: ``[heads, tiers]`` squared relative change of a weight from the direction of the
            key, per squared radius.
        radius: ``[heads, tiers]`` the same from its length.
        value: ``[heads, tiers]`` squared error of a value, per squared norm.
        common: ``[heads, tiers]`` squared error that all values share, times the part of the
            attention that coded states get: what sums of many values do not average out.
        direction: ``[heads, tiers]`` distance of a key's direction from its coded one that
            95% of the states keep, in radians if small; None if not measured.
        length: ``[heads, tiers]`` the same of its norm, absolute; None if not measured.
    """

    angle: Tensor
    radius: Tensor
    value: Tensor
    common: Tensor
    direction: Tensor | None = None
    length: Tensor | None = None

    def __post_init__(self) -> None:
        """Reject shapes that differ and errors that are negative or not finite.

        Errors on another device than the CPU are not looked at, which would wait for them; the
        solver refuses losses that are not finite.
        """
        for name in ("angle", "radius", "value", "common", "direction", "length"):
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tensor.shape != self.angle.shape or tensor.dim() != 2:
                raise ValueError(f"{name} must be [heads, tiers], got {tuple(tensor.shape)}")
            is_here = tensor.device.type == "cpu"
            if is_here and not bool((torch.isfinite(tensor) & (tensor >= 0)).all()):
                raise ValueError(f"{name} errors must be finite and not negative")


@dataclass(frozen=True, slots=True, eq=False)
class StateSample:
    """States of every head on which errors are measured.

    Attributes:
        index: ``[heads, samples]`` int64 tokens; whole pages, the most important states first.
        weight: ``[heads, samples]`` float32 states that each stands for; 0 for padding.
    """

    index: Tensor
    weight: Tensor


def sample_states(
    importance: Tensor,
    is_free: Tensor,
    count: int,
    *,
    least_free: int = 0,
    num_layers: int = 1,
) -> StateSample:
    """The most important half of a sample, and evenly spaced ranks below.

    Heads of a layer are sampled at the same ranks.

    Args:
        importance: ``[heads, tokens]``.
        is_free: ``[heads, tokens]`` bool: states that may be coded.
        count: States of each head, a multiple of a coded page's.
        least_free: States that every head has free in any case. If these are more than ``count``,
            nothing waits for the device to tell how many there are.
        num_layers: Layers whose heads lie one behind the other; several must have more than
            ``count`` states free in every head.
    """
    if count < 1 or count % (2 * CODED_PAGE_MULTIPLE):
        raise ValueError(
            f"count must be a positive multiple of {2 * CODED_PAGE_MULTIPLE}, got {count}"
        )
    order = importance.masked_fill(~is_free, -1.0).argsort(dim=1, descending=True, stable=True)
    free, top = is_free.sum(1).view(num_layers, -1).amin(1), count // 2
    device = order.device
    if least_free <= count and int(free.min()) <= count:
        if num_layers > 1:
            raise ValueError(f"{num_layers} layers, of which one has only {int(free.min())} free")
        num_free = int(free)
        pages = -(-num_free // CODED_PAGE_MULTIPLE)
        rank = torch.arange(pages * CODED_PAGE_MULTIPLE, device=device)
        weight = (rank < num_free).float()[None]
        rank = rank.clamp(max=max(0, num_free - 1))[None]
    else:
        gap = ((free - top).double() / top).float()[:, None]
        first = torch.arange(top, device=device).expand(num_layers, -1)
        rank = torch.cat([first, top + ((first + 0.5) * gap).long()], 1)
        weight = torch.cat([torch.ones_like(first, dtype=gap.dtype), gap.expand(-1, top)], 1)
    heads = len(order) // num_layers
    rank, weight = (each.repeat_interleave(heads, 0) for each in (rank, weight))
    return StateSample(order.gather(1, rank), weight)


def measure_tier_errors(
    codec: RecodingCodec,
    layers: Sequence[int],
    tiers: TierTable,
    states: tuple[Tensor, Tensor, Tensor],
    votes: PredictedRows,
    sample: StateSample,
    *,
    scale: float,
    output: Tensor | None = None,
) -> TierErrors:
    """Code sampled states at every tier and see how the output of each query would move.

    Args:
        codec: The encoder the store will use.
        layers: Layers of the states, whose heads lie one behind the other.
        tiers: The tiers.
        states: Queries of the window ``[query_heads, window, head_dim]``, keys and values
            ``[heads, tokens, head_dim]``.
        votes: What the window's queries gave to every token.
        sample: States to code.
        scale: Factor on the dot product.
        output: ``[heads, rows, head_dim]`` what the votes give; found out if None.

    Returns:
        Errors of every head and tier; nothing at the drop and dense tiers.
    """
    query, keys, values = states
    heads, _, dim = keys.shape
    coded = [tier for tier in tiers if tier.is_coded]
    if not coded or sample.index.shape[1] == 0:
        return TierErrors(*torch.zeros(6, heads, len(tiers), device=keys.device))
    index = sample.index[..., None].expand(-1, -1, dim)
    if output is None:
        output = votes.totals(values, sinks=0, recent=0).output
    seen = _look(votes, sample, keys.gather(1, index).float(), values, output)
    grouped = scale * query.float().reshape(heads, -1, dim)
    logits = grouped @ seen.keys.transpose(1, 2)
    length = seen.keys.square().sum(-1)
    energy = (seen.pull * length[:, None]).sum((1, 2)).clamp(min=_TINY)
    along = (seen.pull * logits.square()).sum(1) / length.clamp(min=_TINY)
    norm = (seen.square * seen.values.square().sum(-1)).sum(1).clamp(min=_TINY)
    coded_keys, coded_values, step = codec.recode(
        layers, coded, seen.keys, seen.values, sample.index
    )
    wrong = grouped @ coded_keys.transpose(2, 3) - logits
    moved = (seen.pull * weight_move(wrong, seen.weight)).sum((2, 3))  # [tiers, heads]
    # rounding of an 8-bit radius is uniform over its step and scales the logit
    rounding = (step.square() / 12 * along).sum(2)
    missed = coded_values - seen.values
    errors = (
        (moved - rounding).clamp(min=0) / energy,
        rounding / energy,
        (seen.square * missed.square().sum(-1)).sum(2) / norm,
        seen.part * common_error(missed, seen.mass),
        *key_bounds(seen.keys, coded_keys),
    )
    # the drop tier before the coded ones, the dense one behind them
    return TierErrors(*torch.nn.functional.pad(torch.stack(errors).transpose(1, 2), (1, 1)))


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """Sampled states and the attention they got: per row, then summed over rows.

    ``weight`` and ``pull`` are ``[heads, rows, samples]``: attention, and its square times the
    squared distance of value and output, with the row's importance. ``square`` and ``mass`` are
    ``[heads, samples]`` squared and plain attention; ``part [heads]`` is what coded states get.
    """

    keys: Tensor
    values: Tensor
    weight: Tensor
    pull: Tensor
    square: Tensor
    mass: Tensor
    part: Tensor


def _look(
    votes: PredictedRows,
    sample: StateSample,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
) -> _Seen:
    weight, is_valid = votes.at(sample.index)
    share, total = votes.share[..., None] * is_valid, votes.share.sum(1).clamp(min=_TINY)
    coverage = (share.sum(1) / total[:, None]).clamp(min=_TINY)
    share = share * (sample.weight / coverage)[:, None]
    values = values.gather(1, sample.index[..., None].expand_as(keys)).float()
    apart = output.square().sum(-1, keepdim=True) + values.square().sum(-1)[:, None]
    apart = (apart - 2 * output @ values.transpose(1, 2)).clamp(min=0)
    square, mass = share * weight.square(), (share * weight).sum(1)
    part = mass.sum(1) / total
    return _Seen(keys, values, weight, square * apart, square.sum(1), mass, part)


def key_bounds(keys: Tensor, coded: Tensor) -> tuple[Tensor, Tensor]:
    """Errors of direction and length that most coded keys keep.

    Args:
        keys: ``[heads, samples, head_dim]``.
        coded: ``[..., heads, samples, head_dim]`` the same after coding.

    Returns:
        ``[..., heads]`` distance of the unit vectors and difference of the norms, each the
        ``drift_quantile`` of the samples.
    """
    norm, coded_norm = (x.norm(dim=-1).clamp(min=_TINY) for x in (keys, coded))
    apart = (keys / norm[..., None] - coded / coded_norm[..., None]).norm(dim=-1)
    return drift_quantile(apart), drift_quantile((norm - coded_norm).abs())


def drift_quantile(each: Tensor) -> Tensor:
    """``[...]`` least value that at least ``DRIFT_QUANTILE`` of ``[..., n]`` do not exceed."""
    rank = math.ceil(DRIFT_QUANTILE * each.shape[-1])
    return each.sort(dim=-1).values[..., rank - 1]


def weight_move(logit_error: Tensor, weight: Tensor) -> Tensor:
    """Squared relative change of a softmax weight whose own logit is wrong, all others exact.

    For small errors it is the squared logit error; a weight near one hardly moves.
    """
    factor = logit_error.clamp(-_MOST_LOGIT_ERROR, _MOST_LOGIT_ERROR).expm1()
    return (factor / (1 + weight * factor)).square()


def common_error(missed: Tensor, mass: Tensor) -> Tensor:
    """Squared norm ``[..., heads]`` of the mean error, less what independent ones would leave.

    Args:
        missed: ``[..., heads, samples, head_dim]`` errors of values.
        mass: ``[heads, samples]`` attention of the states each stands for.
    """
    part = mass / mass.sum(1, keepdim=True).clamp(min=_TINY)
    mean = (part[..., None] * missed).sum(-2).square().sum(-1)
    noise = (part.square() * missed.square().sum(-1)).sum(-1)
    return (mean - noise).clamp(min=0)
