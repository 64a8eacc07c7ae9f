# SPDX-License-Identifier: Apache-2.0
"""Rows of predicted attention that are never written down, for prompts on a GPU.

A row is its query: whoever needs its weights finds them again from keys and the logarithm of its
sum. What a matrix of rows and tokens would cost to write and to read a dozen times is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sphkv.core.devices import constant
from sphkv.core.prompt_rows import PartTotals, RowKernels, RowPart
from sphkv.retention.rows import (
    LEAST_MASS,
    MOVED_ELEMENTS,
    RowTotals,
    TokenSums,
    log_margin,
    mean_output,
    spread_share,
)

if TYPE_CHECKING:
    from sphkv.core.rope import RopeSpec

_TINY = torch.finfo(torch.float32).tiny


class StreamedRows:
    """Predicted attention of a layer; see ``PredictedRows``.

    Attributes:
        share: ``[heads, rows]`` float32 importance of each row.
    """

    def __init__(
        self,
        kernels: RowKernels,
        parts: Sequence[RowPart],
        keys: Tensor,
        totals: Sequence[PartTotals],
    ) -> None:
        """Take rows and what they give; see ``stream``."""
        self.share = torch.cat([part.share for part in parts], 1)
        self._kernels = kernels
        self._parts = tuple(parts)
        self._keys = keys
        self._totals = tuple(totals)
        self._coverage: Tensor | None = None

    @classmethod
    def stream(
        cls,
        kernels: RowKernels,
        parts: Sequence[RowPart],
        states: tuple[Tensor, Tensor],
        *,
        sinks: int,
        recent: int,
    ) -> StreamedRows:
        """Rows of several kinds, one behind the other.

        Args:
            kernels: What reads keys and values.
            parts: The rows.
            states: Keys and values, ``[heads, tokens, head_dim]`` each.
            sinks: First tokens that do not count as far.
            recent: Newest tokens that do not count as far.
        """
        keys, values = states
        far = (sinks, max(sinks, keys.shape[1] - recent))
        return cls(kernels, parts, keys, [kernels.totals(p, keys, values, far) for p in parts])

    def first_part(self, share: Tensor) -> StreamedRows:
        """The rows of the first kind alone, with an importance of their own."""
        part = replace(self._parts[0], share=share)
        return StreamedRows(self._kernels, (part,), self._keys, self._totals[:1])

    def coverage(self) -> Tensor:
        """Part of the importance that is valid; see ``PredictedRows``."""
        if self._coverage is None:
            index = torch.arange(self._keys.shape[1], device=self._keys.device)
            valid = torch.cat([part.valid for part in self._parts])
            covered = self.share @ (valid[:, None] >= index).to(self.share.dtype)
            total = self.share.sum(1, keepdim=True).clamp(min=_TINY)
            self._coverage = (covered / total).clamp(min=_TINY)
        return self._coverage

    def totals(self, values: Tensor, *, sinks: int, recent: int) -> RowTotals:
        """What each row gave when it was streamed, with the ``sinks`` and ``recent`` of then."""
        output, far, top = (
            torch.cat([getattr(each, name) for each in self._totals], 1)
            for name in ("output", "far", "top")
        )
        return RowTotals(output, far, log_margin(top))

    def sums(self, values: Tensor, output: Tensor) -> TokenSums:
        """What each token gets; see ``PredictedRows``."""
        coverage = self.coverage()
        found = [
            self._kernels.sums(part, self._keys, values, totals)
            for part, totals in zip(self._parts, self._totals, strict=True)
        ]
        return TokenSums(*(_add(each) / coverage for each in zip(*found, strict=True)))

    def apart(self, values: Tensor, output: Tensor | None = None) -> Tensor:
        """Squared distance to the mean output; see ``PredictedRows``."""
        if output is None:
            output = torch.cat([each.output for each in self._totals], 1)
        return self._kernels.apart(values, mean_output(self.share, output))

    def norms(self, states: Tensor) -> Tensor:
        """Norms of keys or values: how far they are from nothing; see ``PredictedRows``."""
        nothing = self.share.new_zeros(states.shape[0], states.shape[2])
        return self._kernels.apart(states, nothing).sqrt()

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of some tokens; see ``PredictedRows``."""
        wanted = index[..., None].expand(-1, -1, self._keys.shape[2])
        keys = self._keys.gather(1, wanted).float().transpose(1, 2)
        weight, is_valid = [], []
        for part, totals in zip(self._parts, self._totals, strict=True):
            logits = part.scale * part.query.float() @ keys
            if part.bias is not None:
                rows = part.query.shape[1] // part.bias.shape[1]
                near = part.bias.gather(2, index[:, None].expand(-1, part.bias.shape[1], -1))
                logits += near.repeat_interleave(rows, 1)
            is_seen = index[:, None] <= part.seen[:, None]
            # logits of what a row does not see may lie far above its sum
            hidden = (logits - totals.lse[..., None]).masked_fill(~is_seen, -torch.inf)
            weight.append(hidden.exp())
            is_valid.append(index[:, None] <= part.valid[:, None])
        return torch.cat(weight, 1), torch.cat(is_valid, 1)

    def drop_losses(
        self,
        values: Tensor,
        units: Tensor,
        *,
        granularity: int = 1,
        output: Tensor | None = None,
    ) -> Tensor:
        """Loss of dropping ever more blocks; see ``PredictedRows``."""
        heads, blocks, _ = units.shape
        size = blocks * self.share.shape[1] * values.shape[2]
        step = max(1, MOVED_ELEMENTS // max(1, size))
        losses = []
        for at in range(0, heads, step):
            own = slice(at, at + step)
            found = [
                self._kernels.drop_losses(
                    _heads_of(part, own),
                    self._keys[own],
                    values[own],
                    PartTotals(*(each[own] for each in totals)),
                    units[own],
                    granularity,
                    LEAST_MASS,
                )
                for part, totals in zip(self._parts, self._totals, strict=True)
            ]
            losses.append(_add(found))
        loss = losses[0] if len(losses) == 1 else torch.cat(losses)
        return torch.nn.functional.pad(loss, (1, 0))


def _add(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(tuple(parts)).sum(0)


def _heads_of(part: RowPart, heads: slice) -> RowPart:
    bias = None if part.bias is None else part.bias[heads]
    return replace(part, query=part.query[heads], share=part.share[heads], bias=bias)


def window_part(
    query: Tensor, positions: Tensor, keys: Tensor, *, scale: float, share: Tensor | None
) -> RowPart:
    """``window_rows`` without their weights; positions rise to that of the newest token."""
    heads, tokens, dim = keys.shape
    repeats = query.shape[0] // heads
    # 2 (position - token) >= tokens - token; the newest row speaks for tokens that no row has.
    # To write one element would wait for the device.
    is_newest = positions == tokens - 1
    valid = torch.where(is_newest, positions, 2 * positions - tokens)
    grouped = query.reshape(heads, -1, dim).contiguous()
    return RowPart(
        grouped,
        spread_share(share, grouped, query.shape[1]),
        positions.int().repeat(repeats),
        valid.int().repeat(repeats),
        scale,
    )


def expected_part(
    kernels: RowKernels,
    query_planes: Tensor,
    keys: Tensor,
    rope: RopeSpec,
    *,
    scale: float,
    horizon: tuple[int, ...],
    share: Tensor | None,
) -> RowPart:
    """``expected_rows`` without their weights."""
    heads, tokens, dim = keys.shape
    planes = query_planes.float()
    ahead = constant(horizon, device=keys.device)
    mean = rope.rotate(planes.mean(1)[:, None], tokens - 1 + ahead)
    mean = rope.from_planes(mean).reshape(heads, -1, dim).contiguous()
    # as in expected_rows: a quarter of the variance, both channels of a plane alike
    spread = planes.var(1, unbiased=False).sum(-1) / 2
    channels = rope.from_planes(torch.stack([spread, spread], -1))
    weight = (scale**2 / 4) * channels.reshape(heads, -1, dim)
    last = torch.full((mean.shape[1],), tokens - 1, dtype=torch.int32, device=keys.device)
    return RowPart(
        mean,
        spread_share(share, mean, len(horizon)),
        last,
        last,
        scale,
        kernels.spread(keys, weight.contiguous()),
    )
