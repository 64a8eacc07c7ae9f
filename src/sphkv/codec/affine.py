# SPDX-License-Identifier: Apache-2.0
"""One byte per state for a scalar, affine over a page: key radii and value scales.

A page stores ``lo`` and ``step`` once; state ``t`` reads ``lo + step * code[t]``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_CODE = 255
"""Largest code of one byte."""


@dataclass(frozen=True, slots=True, eq=False)
class AffineCode:
    """Scalars of a page's states as bytes.

    Attributes:
        code: ``[..., states]`` uint8; 0 for masked states.
        lo: ``[...]`` float32, the value of code 0.
        step: ``[...]`` float32, at least 0: the value of one code step.
    """

    code: Tensor
    lo: Tensor
    step: Tensor

    def dequantise(self) -> Tensor:
        """Scalars as a reader sees them.

        Returns:
            ``[..., states]`` float32; masked states read ``lo``.
        """
        return self.lo[..., None] + self.step[..., None] * self.code.float()


def quantise_affine_u8(
    x: Tensor, mask: Tensor | None = None, *, is_checked: bool = False
) -> AffineCode:
    """Code scalars between the smallest and the largest live one of their page.

    The code never decreases when the scalar grows, and the error is at most half a step plus
    float32 rounding. A page whose live scalars are equal has step 0 and keeps them exactly; a
    page with no live state has ``lo`` and ``step`` 0.

    Args:
        x: ``[..., states]`` floating point; masked entries may hold anything, NaN included.
        mask: bool, broadcastable to ``x``, true for live states; all are live when omitted.
        is_checked: Whether all scalars are known to be finite; looking waits for a device.

    Returns:
        The code of every state and the range of every page.

    Raises:
        ValueError: If ``x`` has no states dimension or is not floating point, if a live scalar
            is not finite in float32, or if the mask does not fit.
    """
    if x.ndim == 0 or not x.is_floating_point():
        raise ValueError(
            f"affine code needs floating-point [..., states], got {x.dtype} {tuple(x.shape)}"
        )
    live = live_mask(x, mask)
    # Cast before the range is taken, so that lo is itself a float32 and no code is negative.
    rounded = x.float().masked_fill(~live, 0.0)
    if not is_checked:
        check_finite(rounded, name="scalars of an affine code")
    # float64, so that a range close to the float32 limit does not overflow on the way.
    wide = rounded.double()
    has_live = live.any(dim=-1)
    if x.shape[-1] == 0:
        lo = hi = wide.new_zeros(x.shape[:-1])
    else:
        lo = wide.masked_fill(~live, float("inf")).amin(dim=-1).where(has_live, 0.0)
        hi = wide.masked_fill(~live, float("-inf")).amax(dim=-1).where(has_live, 0.0)
    step = ((hi - lo) / MAX_CODE).float()
    inverse = torch.where(step > 0, 1.0 / step.double(), 0.0)
    code = ((wide - lo[..., None]) * inverse[..., None]).round().clamp(0, MAX_CODE)
    return AffineCode(code=code.masked_fill(~live, 0.0).to(torch.uint8), lo=lo.float(), step=step)


def live_mask(x: Tensor, mask: Tensor | None) -> Tensor:
    """Expand an optional mask of live states to a full one.

    Args:
        x: ``[..., states]``, the shape to match.
        mask: bool, broadcastable to ``x``, or None for all live.

    Returns:
        bool of the shape of ``x``.

    Raises:
        ValueError: If the mask is not bool or cannot be broadcast.
    """
    if mask is None:
        return torch.ones_like(x, dtype=torch.bool)
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, got {mask.dtype}")
    try:
        return mask.to(x.device).expand(x.shape)
    except RuntimeError as error:
        raise ValueError(
            f"mask {tuple(mask.shape)} does not broadcast to {tuple(x.shape)}"
        ) from error


def check_finite(x: Tensor, *, name: str) -> None:
    """Reject NaN and infinity.

    Args:
        x: Any shape, floating point.
        name: What the tensor holds, for the message.

    Raises:
        ValueError: Naming the first offending entry and their number.
    """
    finite = x.isfinite()
    if bool(finite.all()):
        return
    bad = x[~finite]
    raise ValueError(f"{name} must be finite, got {bad[0].item()} ({bad.numel()} such entries)")
