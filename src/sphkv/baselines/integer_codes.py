# SPDX-License-Identifier: Apache-2.0
"""Asymmetric integers with a float16 minimum and spacing, packed to the bits that are claimed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# What two, four and eight codes of up to 7 bits fit into.
_WORDS = (torch.int16, torch.int32, torch.int64)


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of ``count`` codes of ``bits`` bits."""
    return (count * bits + 7) // 8


def pack_bits(codes: Tensor, *, bits: int) -> Tensor:
    """Pack the last dimension, lowest bits first.

    Args:
        codes: ``[..., count]`` uint8, each below ``2**bits``.
        bits: Width of a code, 1 to 8.

    Returns:
        ``[..., ceil(count * bits / 8)]`` uint8; the unused bits of the last byte are 0.

    Raises:
        ValueError: On another dtype or width, or a code that does not fit.
    """
    _check(codes, bits)
    if codes.numel() and int(codes.max()) >= 1 << bits:
        raise ValueError(f"codes of {bits} bits must be below {1 << bits}, got {int(codes.max())}")
    count = codes.shape[-1]
    if bits == 8:
        return codes.clone()
    if 8 % bits == 0:
        return _fold(codes, bits)
    return _fold_odd(codes, bits)[..., : packed_bytes(count, bits)]


def unpack_bits(packed: Tensor, *, bits: int, count: int) -> Tensor:
    """Recover the codes that ``pack_bits`` packed.

    Args:
        packed: ``[..., bytes]`` uint8.
        bits: Width of a code, 1 to 8.
        count: Codes packed in the last dimension.

    Returns:
        ``[..., count]`` uint8.

    Raises:
        ValueError: On another dtype or width, or if the byte count does not match.
    """
    _check(packed, bits)
    if packed.shape[-1] != packed_bytes(count, bits):
        raise ValueError(
            f"{count} codes of {bits} bits take {packed_bytes(count, bits)} bytes, "
            f"got {packed.shape[-1]}"
        )
    if bits == 8:
        return packed.clone()
    if 8 % bits == 0:
        return _unfold(packed, bits)[..., :count]
    return _unfold_odd(packed, bits)[..., :count]


def _fold(codes: Tensor, width: int) -> Tensor:
    """Join ``8 / width`` neighbours into a byte; a rest is filled with zeros."""
    per_byte = 8 // width
    rest = -codes.shape[-1] % per_byte
    if rest:
        codes = torch.nn.functional.pad(codes, (0, rest))
    parts = codes.unflatten(-1, (-1, per_byte))
    word: Tensor = parts[..., 0].clone()
    for index in range(1, per_byte):
        word |= parts[..., index] << (index * width)
    return word


def _unfold(packed: Tensor, width: int) -> Tensor:
    mask = (1 << width) - 1
    fields = [(packed >> shift) & mask for shift in range(0, 8, width)]
    return torch.stack(fields, dim=-1).flatten(-2)


def _fold_odd(codes: Tensor, bits: int) -> Tensor:
    """Codes that cross byte borders: eight of them fill ``bits`` bytes.

    Neighbours are joined to pairs, then fours, then a word of eight whose low bytes are kept.
    """
    rest = -codes.shape[-1] % 8
    words = torch.nn.functional.pad(codes, (0, rest)) if rest else codes
    for width, dtype in zip((bits, 2 * bits, 4 * bits), _WORDS, strict=True):
        low, high = words.unflatten(-1, (-1, 2)).unbind(-1)
        words = low.to(dtype) | high.to(dtype) << width
    packed: Tensor = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 8))[..., :bits]
    return packed.flatten(-2)


def _unfold_odd(packed: Tensor, bits: int) -> Tensor:
    """Undo ``_fold_odd``."""
    rest = -packed.shape[-1] % bits
    if rest:
        packed = torch.nn.functional.pad(packed, (0, rest))
    groups = packed.unflatten(-1, (-1, bits))
    words = torch.nn.functional.pad(groups, (0, 8 - bits)).view(torch.int64)
    words = words.flatten(-2)
    for width, dtype in zip((4 * bits, 2 * bits, bits), (*_WORDS[1::-1], torch.uint8), strict=True):
        halves = (words & ((1 << width) - 1)).to(dtype), (words >> width).to(dtype)
        words = torch.stack(halves, -1).flatten(-2)
    return words


def _check(codes: Tensor, bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be between 1 and 8, got {bits}")
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes must be uint8, got {codes.dtype}")


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
