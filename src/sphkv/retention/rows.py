# SPDX-License-Identifier: Apache-2.0
"""Rows of predicted attention, and what the controller asks of them.

Future attention is predicted by rows of weights: what the queries of an observation window gave
to every token, and what queries with the head's mean and spread would give a little later, in
closed form. Here they are whole matrices; ``streamed.py`` has the same without any of them.
Derivation: docs/math/retention.md, sections 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sphkv.core.devices import constant, native_kernels, native_variant
from sphkv.core.rope import RopeSpec

_TINY = torch.finfo(torch.float32).tiny
LEAST_MASS = 1e-6
"""Sums of weights in float32 are no better than this."""

# Tokens among which the largest weight is found first; two of these then hold the largest two.
_PEAK_TOKENS = 64
MOVED_ELEMENTS = 1 << 28
"""Elements of moved outputs that exist at once: bounds the memory of many blocks."""


class RowTotals(NamedTuple):
    """What each row gives, over all tokens.

    Attributes:
        output: ``[heads, rows, head_dim]`` float32 weighted sum of values.
        far: ``[heads, rows]`` float32 weight beyond sinks and recent tokens.
        margin: ``[heads, rows]`` float32 logarithm of the largest weight over the second.
    """

    output: Tensor
    far: Tensor
    margin: Tensor


class TokenSums(NamedTuple):
    """What each token gets, over the rows that are valid for it, by their importance.

    Attributes:
        mass: ``[heads, tokens]`` float32 weight.
        energy: ``[heads, tokens]`` float32 squared weight.
        shift: ``[heads, tokens]`` float32 squared weight times the squared distance of value and
            output.
    """

    mass: Tensor
    energy: Tensor
    shift: Tensor


class PredictedRows(Protocol):
    """Predicted attention of the heads of a layer.

    Wherever values are taken, they are ``[heads, tokens, head_dim]``, and ``output`` is that of
    ``totals``; None finds it out.
    """

    @property
    def share(self) -> Tensor:
        """``[heads, rows]`` float32 importance of each row."""
        ...

    def coverage(self) -> Tensor:
        """``[heads, tokens]`` part of the importance that is valid for each token."""
        ...

    def totals(self, values: Tensor, *, sinks: int, recent: int) -> RowTotals:
        """What each row gives; the first ``sinks`` and the last ``recent`` tokens are near."""
        ...

    def sums(self, values: Tensor, output: Tensor) -> TokenSums:
        """What each token gets, over its ``coverage``."""
        ...

    def apart(self, values: Tensor, output: Tensor | None = None) -> Tensor:
        """``[heads, tokens]`` squared distance of values to the head's mean output."""
        ...

    def norms(self, states: Tensor) -> Tensor:
        """``[heads, tokens]`` float32 norms of keys or values."""
        ...

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of some tokens, float32, and whether rows are valid for them, bool.

        Both are ``[heads, rows, samples]``; ``index`` is ``[heads, samples]`` int64.
        """
        ...

    def drop_losses(
        self,
        values: Tensor,
        units: Tensor,
        *,
        granularity: int = 1,
        output: Tensor | None = None,
    ) -> Tensor:
        """Loss of dropping ever more blocks of every head, measured on the rows.

        The last block goes first. What is left is renormalised, as softmax does. A row takes no
        notice of tokens it is not valid for.

        Args:
            values: ``[heads, tokens, head_dim]``.
            units: ``[heads, blocks, units]`` int64 units of each block, padded with -1.
            granularity: Tokens of a unit, aligned to the first token.
            output: ``[heads, rows, head_dim]`` what the rows give; found out if None.

        Returns:
            ``[heads, blocks + 1]`` float32 expected squared move of the output when the last 0,
            1, ... blocks are gone.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRows:
    """Predicted attention as matrices; see ``PredictedRows``.

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
        """Part of the importance that is valid; see ``PredictedRows``."""
        total = self.share.sum(1, keepdim=True).clamp(min=_TINY)
        return (self.share @ self.is_valid.to(self.share.dtype) / total).clamp(min=_TINY)

    def output(self, values: Tensor) -> Tensor:
        """``[heads, rows, head_dim]`` float32 what the rows give."""
        return self.weight @ values.float()

    def totals(self, values: Tensor, *, sinks: int, recent: int) -> RowTotals:
        """What each row gives; see ``PredictedRows``."""
        tokens = values.shape[1]
        far = self.weight[..., sinks : max(sinks, tokens - recent)].sum(-1)
        top = _top_two(self.weight)
        return RowTotals(self.output(values), far, log_margin(top))

    def sums(self, values: Tensor, output: Tensor) -> TokenSums:
        """What each token gets; see ``PredictedRows``."""
        values = values.float()
        share, coverage = self.share[:, None], self.coverage()
        weight = self.weight * self.is_valid
        mass = (share @ weight)[:, 0] / coverage
        square = weight.square_()
        energy = (share @ square)[:, 0] / coverage
        pull = square.mul_(_squared_gaps(output, values, values.square().sum(-1)))
        return TokenSums(mass, energy, (share @ pull)[:, 0] / coverage)

    def apart(self, values: Tensor, output: Tensor | None = None) -> Tensor:
        """Squared distance to the mean output; see ``PredictedRows``."""
        mean = mean_output(self.share, self.output(values) if output is None else output)
        return (values.float() - mean[:, None]).square().sum(-1)

    def norms(self, states: Tensor) -> Tensor:
        """Norms of keys or values; see ``PredictedRows``."""
        found: Tensor = torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32)
        return found

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of some tokens; see ``PredictedRows``."""
        wanted = index[:, None].expand(-1, self.share.shape[1], -1)
        is_valid = self.is_valid.expand(len(index), -1, -1).gather(2, wanted)
        return self.weight.gather(2, wanted), is_valid

    def drop_losses(
        self,
        values: Tensor,
        units: Tensor,
        *,
        granularity: int = 1,
        output: Tensor | None = None,
    ) -> Tensor:
        """Loss of dropping ever more blocks; see ``PredictedRows``."""
        values = values.float()
        if output is None:
            output = self.output(values)
        loss = native_drop_losses(self, values, units, output, granularity)
        if loss is None:
            loss = self._drop_losses(values, units, output, granularity)
        return torch.nn.functional.pad(loss, (1, 0))

    def _drop_losses(
        self, values: Tensor, units: Tensor, output: Tensor, granularity: int
    ) -> Tensor:
        """``[heads, blocks]`` once the last 1, 2, ... blocks are gone."""
        pad = -values.shape[1] % granularity
        weight = self.weight * self.is_valid
        if pad:
            weight, values = (
                torch.nn.functional.pad(weight, (0, pad)),
                torch.nn.functional.pad(values, (0, 0, 0, pad)),
            )
        # one more column counts the weight that is gone
        counted = torch.cat([values, torch.ones_like(values[..., :1])], -1)
        first_gone = units.flip(1)
        size = units.shape[1] * output.shape[1] * counted.shape[2]
        step = max(1, MOVED_ELEMENTS // max(1, size))
        losses = []
        for at in range(0, units.shape[0], step):
            part = slice(at, at + step)
            moved = _moved_outputs(weight[part], counted[part], first_gone[part], granularity)
            gone = moved[..., -1:]
            moved = moved[..., :-1] - gone * output[part, None]
            # a head that keeps next to nothing shows what is left at full weight
            move = moved.square_().sum(-1) / (1 - gone[..., 0]).clamp(min=LEAST_MASS).square()
            losses.append((move * self.share[part, None]).sum(-1))
        return losses[0] if len(losses) == 1 else torch.cat(losses)


def native_drop_losses(
    rows: AttentionRows, values: Tensor, units: Tensor, output: Tensor, granularity: int
) -> Tensor | None:
    """``AttentionRows._drop_losses`` in native code, with sums in double; None without any.

    It writes down no moved outputs, which here are more than a processor's cache holds.
    """
    floats = (rows.weight, rows.share, values, output)
    is_served = all(part.dtype == torch.float32 and not part.requires_grad for part in floats)
    if not is_served or values.device.type != "cpu" or (kernels := native_kernels()) is None:
        return None
    weight, share, values, output = (part.contiguous() for part in floats)
    is_valid, units = rows.is_valid.contiguous(), units.long().contiguous()
    heads, blocks, size = units.shape
    loss = torch.empty(heads, blocks, dtype=torch.float32, device="cpu")
    kernels.drop_losses(
        [*weight.shape, values.shape[2], blocks, size, granularity],
        [part.data_ptr() for part in (weight, is_valid, share, values, output, units)],
        LEAST_MASS,
        torch.get_num_threads(),
        loss.data_ptr(),
        native_variant(),
    )
    return loss


def log_margin(top: Tensor) -> Tensor:
    """``[...]`` logarithm of the first of two weights ``[..., 2]`` over the second."""
    return (top[..., 0] / top[..., -1].clamp(min=_TINY)).log()


def mean_output(share: Tensor, output: Tensor) -> Tensor:
    """``[heads, head_dim]`` float32 output of a head, averaged over its rows."""
    mean = (share[:, None] @ output)[:, 0]
    return mean / share.sum(1).clamp(min=_TINY)[:, None]


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
    return AttentionRows(weight, spread_share(share, weight, window), is_valid)


def spread_share(share: Tensor | None, rows: Tensor, repeats: int) -> Tensor:
    """``[heads, rows]`` float32 importance of each of ``[heads, rows, ...]``.

    Args:
        share: ``[query_heads]`` importance of each query head; equal if None.
        rows: The rows, so many for each query head.
        repeats: How many.
    """
    heads, count = rows.shape[:2]
    if share is None:
        return torch.full((heads, count), 1.0 / count, device=rows.device)
    spread = share.to(rows.device, torch.float32).reshape(heads, -1)
    return spread.repeat_interleave(repeats, 1) / repeats


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
    return AttentionRows(weight, spread_share(share, weight, len(horizon)), is_valid)


def mix_rows(votes: AttentionRows, expected: AttentionRows | None, mix: float) -> AttentionRows:
    """Both kinds of rows; the expected ones get the part ``mix`` of the importance."""
    if expected is None or mix == 0:
        return votes
    return AttentionRows(
        torch.cat([votes.weight, expected.weight], 1),
        torch.cat([(1 - mix) * votes.share, mix * expected.share], 1),
        torch.cat([votes.is_valid, expected.is_valid]),
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
