# SPDX-License-Identifier: Apache-2.0
"""Asymmetric integers with a float16 minimum and spacing, packed for real."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.baselines.bit_packing import pack_bits, unpack_bits


def quantise_rows(x: Tensor, *, bits: int) -> tuple[Tensor, Tensor]:
    """Equal levels between the minimum and maximum of each row.

    Args:
        x: ``[..., count]`` float32.
        bits: Width of a code.

    Returns:
        Codes ``[..., count]`` uint8, and minimum and spacing ``[..., 2]`` float16.

    Raises:
        ValueError: A minimum or spacing exceeds float16.
    """
    top = 2**bits - 1
    lo = as_float16(x.amin(-1, keepdim=True), name="minimum")
    span = (x.amax(-1, keepdim=True) - lo).clamp(min=0.0)
    step = as_float16(span / top, name="level spacing")
    level = torch.where(step > 0, (x - lo) / step, 0.0).round_().clamp_(0, top)
    return level.to(torch.uint8), torch.cat([lo, step], -1).half()


def restore_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """Undo ``quantise_rows``: ``[..., count]`` float32."""
    lo, step = scale.float().split(1, -1)
    return codes.float().mul_(step).add_(lo)


def divisor_near(dim: int, wanted: int) -> int:
    """The largest divisor of ``dim`` that is at most ``wanted``."""
    return next(size for size in range(min(dim, wanted), 0, -1) if dim % size == 0)


@dataclass(frozen=True)
class TokenIntegers:
    """Each token spans its own levels.

    Attributes:
        bits: Width of a code, 1 to 8.
        head_dim: Channels of a head.
        group: Channels that share a minimum and spacing; at most this many, all if None.
    """

    bits: int
    head_dim: int
    group: int | None = None

    def __post_init__(self) -> None:
        """Reject widths that cannot be coded."""
        check_bits(self.bits)

    @property
    def label(self) -> str:
        """The bits."""
        return f"{self.bits}"

    @property
    def _groups(self) -> tuple[int, int]:
        size = divisor_near(self.head_dim, self.group or self.head_dim)
        return self.head_dim // size, size

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Codes ``[heads, tokens, bytes]``, scales ``[heads, tokens, groups, 2]``."""
        codes, scale = quantise_rows(x.unflatten(-1, self._groups), bits=self.bits)
        return {"codes": pack_bits(codes.flatten(-2), bits=self.bits), "scale": scale}

    def decode(self, tensors: dict[str, Tensor], num_tokens: int) -> Tensor:
        """``[heads, tokens, head_dim]`` float32."""
        codes = unpack_bits(tensors["codes"], bits=self.bits, count=self.head_dim)
        return restore_rows(codes.unflatten(-1, self._groups), tensors["scale"]).flatten(-2)

    def tables(self) -> list[Tensor]:
        """None."""
        return []


@dataclass(frozen=True)
class ChannelIntegers:
    """Each channel spans its own levels over a group of tokens.

    Attributes:
        bits: Width of a code, 1 to 8.
        group: Tokens that share a minimum and spacing per channel; all of a block if None.
    """

    bits: int
    group: int | None = 32

    def __post_init__(self) -> None:
        """Reject widths that cannot be coded."""
        check_bits(self.bits)

    @property
    def label(self) -> str:
        """The bits."""
        return f"{self.bits}"

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Codes ``[heads, groups, dim, bytes]``, scales ``[heads, groups, dim, 2]``."""
        size = self.group or x.shape[1]
        if x.shape[1] % size:
            raise ValueError(f"{x.shape[1]} tokens are no multiple of the group of {size}")
        rows = x.unflatten(1, (-1, size)).transpose(2, 3)
        codes, scale = quantise_rows(rows, bits=self.bits)
        return {"codes": pack_bits(codes, bits=self.bits), "scale": scale}

    def decode(self, tensors: dict[str, Tensor], num_tokens: int) -> Tensor:
        """``[heads, tokens, head_dim]`` float32."""
        size = self.group or num_tokens
        codes = unpack_bits(tensors["codes"], bits=self.bits, count=size)
        return restore_rows(codes, tensors["scale"]).transpose(2, 3).flatten(1, 2)

    def tables(self) -> list[Tensor]:
        """None."""
        return []


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


def check_bits(bits: int) -> None:
    """Reject widths outside 1 to 8."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be between 1 and 8, got {bits}")
