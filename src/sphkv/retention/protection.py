# SPDX-License-Identifier: Apache-2.0
"""States that no budget may drop or demote."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.core.tiers import RUN_TOKENS


@dataclass(frozen=True, slots=True)
class ProtectionRule:
    """What stays at the dense tier.

    Attributes:
        sink_tokens: First tokens of the prompt.
        suffix_tokens: Newest tokens of the prompt that later decoding may not compress either.
        spans: Token ranges ``(start, stop)`` the caller marks: evidence, safety, tool schemas.
        outlier_ratio: A key whose radius is above this many times its head's median is an
            outlier; None protects none.
        max_outliers: Most outliers of a head that are protected, the longest first.
    """

    sink_tokens: int = RUN_TOKENS
    suffix_tokens: int = 0
    spans: tuple[tuple[int, int], ...] = ()
    outlier_ratio: float | None = 3.0
    max_outliers: int = RUN_TOKENS

    def __post_init__(self) -> None:
        """Reject negative sizes and empty spans."""
        for name in ("sink_tokens", "suffix_tokens", "max_outliers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
        for start, stop in self.spans:
            if not 0 <= start < stop:
                raise ValueError(f"a protected span must not be empty, got {(start, stop)}")
        if self.outlier_ratio is not None and not self.outlier_ratio > 1:
            raise ValueError(f"outlier_ratio must be above 1, got {self.outlier_ratio!r}")

    def token_mask(self, num_tokens: int) -> Tensor:
        """``[tokens]`` bool: tokens that every head protects."""
        mask = torch.zeros(num_tokens, dtype=torch.bool)
        mask[: self.sink_tokens] = True
        if self.suffix_tokens:
            mask[-self.suffix_tokens :] = True
        for start, stop in self.spans:
            if stop > num_tokens:
                raise ValueError(
                    f"protected span {(start, stop)} passes the prompt's {num_tokens} tokens"
                )
            mask[start:stop] = True
        return mask

    def state_mask(self, radius: Tensor) -> Tensor:
        """Protected states of one layer.

        Args:
            radius: ``[heads, tokens]`` key norms.

        Returns:
            ``[heads, tokens]`` bool.
        """
        mask = self.token_mask(radius.shape[1]).to(radius.device).expand_as(radius).clone()
        if self.outlier_ratio is not None and radius.shape[1]:
            mask |= self._outliers(radius)
        return mask

    def _outliers(self, radius: Tensor) -> Tensor:
        median = radius.median(dim=1, keepdim=True).values
        excess = radius / median.clamp(min=torch.finfo(torch.float32).tiny)
        most = min(self.max_outliers, radius.shape[1])
        top = torch.zeros_like(excess, dtype=torch.bool)
        top.scatter_(1, excess.topk(most, dim=1).indices, True)
        return top & (excess > float(self.outlier_ratio or 0))


def widen_to_runs(mask: Tensor) -> Tensor:
    """Protect the whole aligned run of 16 tokens around each protected state."""
    tokens = mask.shape[-1]
    runs = -(-tokens // RUN_TOKENS)
    padded = torch.nn.functional.pad(mask, (0, runs * RUN_TOKENS - tokens))
    any_in_run: Tensor = padded.unflatten(-1, (runs, RUN_TOKENS)).any(-1)
    return any_in_run.repeat_interleave(RUN_TOKENS, -1)[..., :tokens]
