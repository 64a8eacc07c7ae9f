# SPDX-License-Identifier: Apache-2.0
"""Codes to page bytes and back: the token-transposed bit order of a page payload.

Consecutive bytes of a stream belong to consecutive tokens of one slot or value dimension, so
that a vector register filled from a page holds the same coordinate of many tokens.
"""

import torch
from torch import Tensor

TOKEN_MULTIPLE = 32
"""Packed token counts are multiples of this: one block of the 1-bit stream."""

VALUE_BITS = (2, 3, 4, 8)
"""Widths of a packed value code."""

# Bytes of one (block, dimension): a 32-bit word is the unit kernels load.
_WORD_BYTES = 4

# A 3-bit code is a 2-bit stream of its low bits, then a 1-bit stream of its top bit.
_STREAMS: dict[int, tuple[tuple[int, int], ...]] = {
    8: ((8, 0),),
    4: ((4, 0),),
    3: ((2, 0), (1, 2)),
    2: ((2, 0),),
}


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack the 4-bit slot codes of a page, two tokens half a page apart in one byte.

    Args:
        codes: ``[..., slots, tokens]`` uint8, each below 16; tokens a multiple of 32.

    Returns:
        ``[..., slots, tokens // 2]`` uint8; byte ``j`` holds token ``j`` in its low nibble and
        token ``j + tokens // 2`` in its high nibble.

    Raises:
        ValueError: On another dtype, a token count that is no multiple of 32, or a code above 15.
    """
    _check_bytes(codes, name="slot codes", min_dims=1)
    _check_num_tokens(codes.shape[-1])
    _check_range(codes, bits=4, name="slot codes")
    low, high = codes.chunk(2, dim=-1)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Recover the slot codes that ``pack_nibbles`` packed.

    Args:
        packed: ``[..., slots, tokens // 2]`` uint8.

    Returns:
        ``[..., slots, tokens]`` uint8, each below 16.

    Raises:
        ValueError: On another dtype or a token count that is no multiple of 32.
    """
    _check_bytes(packed, name="packed slots", min_dims=1)
    _check_num_tokens(2 * packed.shape[-1])
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def pack_value_codes(codes: Tensor, *, bits: int) -> Tensor:
    """Pack value codes in token-interleaved blocks.

    A stream of ``b`` bits is cut into blocks of ``32 / b`` tokens. Each (block, dimension) owns
    four bytes; byte ``j`` holds token ``4 * m + j`` of the block at bit ``m * b``. Three bits are
    a 2-bit stream of the low bits followed by a 1-bit stream of the top bit.

    Args:
        codes: ``[..., tokens, head_dim]`` uint8, each below ``2**bits``; tokens a multiple of 32.
        bits: Width of a code: 2, 3, 4 or 8.

    Returns:
        ``[..., tokens * head_dim * bits // 8]`` uint8.

    Raises:
        ValueError: On another dtype or width, a token count that is no multiple of 32, or a code
            that does not fit.
    """
    streams = _streams(bits)
    _check_bytes(codes, name="value codes", min_dims=2)
    _check_num_tokens(codes.shape[-2])
    _check_range(codes, bits=bits, name="value codes")
    parts = [_pack_stream((codes >> shift) & _low_mask(width), width) for width, shift in streams]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def unpack_value_codes(packed: Tensor, *, bits: int, num_tokens: int, head_dim: int) -> Tensor:
    """Recover the value codes that ``pack_value_codes`` packed.

    Args:
        packed: ``[..., num_tokens * head_dim * bits // 8]`` uint8.
        bits: Width of a code: 2, 3, 4 or 8.
        num_tokens: Tokens packed, a multiple of 32.
        head_dim: Dimensions of a value.

    Returns:
        ``[..., num_tokens, head_dim]`` uint8, each below ``2**bits``.

    Raises:
        ValueError: On another dtype, width or token count, or if the byte count does not match.
    """
    streams = _streams(bits)
    _check_bytes(packed, name="packed values", min_dims=1)
    _check_num_tokens(num_tokens)
    expected = num_tokens * head_dim * bits // 8
    if packed.shape[-1] != expected:
        raise ValueError(
            f"{num_tokens} tokens of {head_dim} x {bits} bits take {expected} bytes, "
            f"got {packed.shape[-1]}"
        )
    codes = packed.new_zeros((*packed.shape[:-1], num_tokens, head_dim))
    start = 0
    for width, shift in streams:
        stop = start + num_tokens * head_dim * width // 8
        stream = _unpack_stream(
            packed[..., start:stop], width, num_tokens=num_tokens, head_dim=head_dim
        )
        codes |= stream << shift
        start = stop
    return codes


def _pack_stream(codes: Tensor, width: int) -> Tensor:
    """Pack one stream, ``[..., tokens, dim]`` to ``[..., tokens * dim * width // 8]``."""
    per_byte = 8 // width
    *batch, tokens, dim = codes.shape
    num_blocks = tokens // (_WORD_BYTES * per_byte)
    grouped = codes.reshape(*batch, num_blocks, per_byte, _WORD_BYTES, dim)
    word = grouped[..., 0, :, :]  # [..., blocks, 4, dim]
    for m in range(1, per_byte):
        word = word | (grouped[..., m, :, :] << (m * width))
    return word.transpose(-1, -2).reshape(*batch, tokens * dim * width // 8)


def _unpack_stream(packed: Tensor, width: int, *, num_tokens: int, head_dim: int) -> Tensor:
    """Unpack one stream, ``[..., bytes]`` to ``[..., tokens, dim]``."""
    per_byte = 8 // width
    num_blocks = num_tokens // (_WORD_BYTES * per_byte)
    batch = packed.shape[:-1]
    word = packed.reshape(*batch, num_blocks, head_dim, _WORD_BYTES).transpose(-1, -2)
    fields = [(word >> (m * width)) & _low_mask(width) for m in range(per_byte)]
    # [..., blocks, per_byte, 4, dim]
    return torch.stack(fields, dim=-3).reshape(*batch, num_tokens, head_dim)


def _low_mask(width: int) -> int:
    return (1 << width) - 1


def _streams(bits: int) -> tuple[tuple[int, int], ...]:
    if bits not in _STREAMS:
        raise ValueError(f"value code bits must be one of {VALUE_BITS}, got {bits}")
    return _STREAMS[bits]


def _check_bytes(tensor: Tensor, *, name: str, min_dims: int) -> None:
    if tensor.dtype != torch.uint8:
        raise ValueError(f"{name} must be uint8, got {tensor.dtype}")
    if tensor.ndim < min_dims:
        raise ValueError(f"{name} need at least {min_dims} dimensions, got {tuple(tensor.shape)}")


def _check_num_tokens(num_tokens: int) -> None:
    if num_tokens % TOKEN_MULTIPLE != 0:
        raise ValueError(f"tokens must be a multiple of {TOKEN_MULTIPLE}, got {num_tokens}")


def _check_range(codes: Tensor, *, bits: int, name: str) -> None:
    if bits >= 8 or codes.numel() == 0:
        return
    largest = int(codes.max())
    if largest > _low_mask(bits):
        raise ValueError(
            f"{name} of {bits} bits must be at most {_low_mask(bits)}, largest is {largest}"
        )
