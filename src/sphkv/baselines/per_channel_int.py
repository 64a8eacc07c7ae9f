# SPDX-License-Identifier: Apache-2.0
"""Keys as asymmetric integers per channel over groups of tokens: the KIVI form."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.codec.affine import check_finite

_FLOAT16_BITS = 16


@dataclass(frozen=True, slots=True)
class PerChannelInt:
    """Round-trip of keys through per-channel integers.

    Every channel of every group of consecutive tokens spans ``2**bits`` equal levels from its
    smallest to its largest entry, with that minimum and the level spacing kept as float16.

    Deviations from KIVI (Liu et al., 2024): no window of recent tokens stays in full precision,
    so every token is coded; a last group that is not full is coded as it stands, and its
    metadata is counted as if it were full. Codes are fitted to the float16 minimum and spacing
    that a reader sees.

    Attributes:
        bits: Bits per entry, 1 to 8.
        group_tokens: Tokens that share one minimum and spacing per channel.
    """

    bits: int
    group_tokens: int = 32

    def __post_init__(self) -> None:
        """Reject widths and groups that cannot be coded."""
        check_bits(self.bits)
        if self.group_tokens < 1:
            raise ValueError(f"group_tokens must be at least 1, got {self.group_tokens}")

    def bits_per_element(self, head_dim: int) -> float:
        """Bits per key entry, minimum and spacing included; the head dim does not matter."""
        check_head_dim(head_dim)
        return self.bits + 2 * _FLOAT16_BITS / self.group_tokens

    def roundtrip(self, x: Tensor) -> Tensor:
        """Keys as they would come back.

        Args:
            x: ``[heads, tokens, head_dim]`` floating point.

        Returns:
            ``[heads, tokens, head_dim]`` float32.

        Raises:
            ValueError: On another shape or dtype, or entries that are not finite or exceed
                float16.
        """
        check_keys(x)
        heads, tokens, dim = x.shape
        if x.numel() == 0:
            return x.float()
        # Repeating the last token leaves the range of its group as it is.
        padding = x[:, -1:].expand(heads, -tokens % self.group_tokens, dim)
        grouped = torch.cat([x, padding], dim=1).reshape(heads, -1, self.group_tokens, dim)
        restored = asymmetric_integers(grouped, bits=self.bits, dim=2)
        return restored.reshape(heads, -1, dim)[:, :tokens]


def asymmetric_integers(x: Tensor, *, bits: int, dim: int) -> Tensor:
    """Round entries to equal levels between the minimum and maximum along one dimension.

    Args:
        x: Floating point, any shape.
        bits: Width of a level index.
        dim: Dimension whose entries share a float16 minimum and spacing.

    Returns:
        float32 of the shape of ``x``.

    Raises:
        ValueError: If a minimum or spacing exceeds float16.
    """
    wide = x.float()
    lo = as_float16(wide.amin(dim=dim, keepdim=True), name="minimum")
    hi = wide.amax(dim=dim, keepdim=True)
    top = 2**bits - 1
    spacing = as_float16((hi - lo).clamp(min=0.0) / top, name="level spacing")
    level = torch.where(spacing > 0, (wide - lo) / spacing, 0.0).round().clamp(0, top)
    return lo + spacing * level


def as_float16(x: Tensor, *, name: str) -> Tensor:
    """Round to what a float16 field keeps.

    Args:
        x: float32, any shape.
        name: What the field holds, for the message.

    Returns:
        float32 of the shape of ``x``.

    Raises:
        ValueError: If an entry does not fit.
    """
    rounded = x.half().float()
    if not bool(rounded.isfinite().all()):
        raise ValueError(f"{name} must fit float16, got {x.abs().max().item()}")
    return rounded


def check_keys(x: Tensor) -> None:
    """Reject anything but finite floating-point ``[heads, tokens, head_dim]``."""
    if x.ndim != 3 or not x.is_floating_point():
        raise ValueError(
            f"keys must be floating-point [heads, tokens, head_dim], got {x.dtype} {tuple(x.shape)}"
        )
    check_finite(x, name="keys")


def check_bits(bits: int) -> None:
    """Reject widths outside 1 to 8."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be between 1 and 8, got {bits}")


def check_head_dim(head_dim: int) -> None:
    """Reject head dims below 1."""
    if head_dim < 1:
        raise ValueError(f"head_dim must be at least 1, got {head_dim}")
