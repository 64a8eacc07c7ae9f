# SPDX-License-Identifier: Apache-2.0
"""Codes of any width from 1 to 8 bits as a dense stream of bytes."""

from __future__ import annotations

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
