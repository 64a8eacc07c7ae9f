# SPDX-License-Identifier: Apache-2.0
"""Payload in fragment order: page bytes as the registers of the tensor cores want them.

Streams keep the offsets and sizes of the token-transposed page; only the order inside a stream
changes. ``docs/gpu.md`` draws it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sphkv.attention.cuda.geometry import LANES, PAGE_SIZES, PAGE_TOKENS, TILE_KEYS
from sphkv.store.layout import PageLayout, PageView

_CHUNK_WORDS = (4, 2, 1)


def pack_keys(codes: Tensor) -> Tensor:
    """Slot codes to key bytes.

    Byte ``i`` of word ``w`` of lane ``(g, t)`` holds slot ``16 * w + 4 * i + t`` of key ``g`` of
    the tile in its low nibble and of key ``g + 8`` in its high nibble.

    Args:
        codes: ``[pages, slots, tokens]`` uint8 below 16; slots a multiple of 16.

    Returns:
        ``[pages, slots * tokens / 2]`` uint8.
    """
    pages, slots, tokens = codes.shape
    if slots % 16 or tokens not in PAGE_SIZES:
        wanted = f"[pages, 16 * n, {' or '.join(map(str, PAGE_SIZES))}]"
        raise ValueError(f"codes must be {wanted}, got {tuple(codes.shape)}")
    tiles = tokens // TILE_KEYS
    # [pages, word, byte, t, tile, half, g]
    split = codes.reshape(pages, slots // 16, 4, 4, tiles, 2, 8)
    byte = split[..., 0, :] | (split[..., 1, :] << 4)
    words = byte.permute(0, 4, 1, 5, 3, 2)  # [pages, tile, word, g, t, byte]
    return _interleave(words.reshape(pages, tiles, slots // 16, LANES, 4))


def unpack_keys(packed: Tensor, *, tokens: int = PAGE_TOKENS) -> Tensor:
    """Undo :func:`pack_keys`: ``[pages, bytes]`` to ``[pages, slots, tokens]``."""
    pages, tiles = packed.shape[0], tokens // TILE_KEYS
    words = _separate(packed, tiles)
    num_words = words.shape[2]
    byte = words.reshape(pages, tiles, num_words, 8, 4, 4).permute(0, 2, 5, 4, 1, 3)
    codes = torch.stack([byte & 15, byte >> 4], dim=5)  # [pages, word, byte, t, tile, half, g]
    return codes.reshape(pages, 16 * num_words, tokens)


def pack_gains(radius_code: Tensor, scale_code: Tensor | None) -> Tensor:
    """Radius and scale codes, side by side for the lane that needs them.

    Args:
        radius_code: ``[pages, tokens]`` uint8.
        scale_code: ``[pages, tokens]`` uint8; None if values have no scale.

    Returns:
        ``[pages, 2 * tokens]`` (or ``tokens``) uint8: per tile and ``g`` the radii of keys
        ``g`` and ``g + 8``, then their scales.
    """
    pages, tokens = radius_code.shape
    parts = [radius_code] if scale_code is None else [radius_code, scale_code]
    tiles = tokens // TILE_KEYS
    split = torch.stack([part.reshape(pages, tiles, 2, 8) for part in parts], dim=2)
    return split.permute(0, 1, 4, 2, 3).reshape(pages, -1)


def unpack_gains(packed: Tensor, *, tokens: int = PAGE_TOKENS) -> Tensor:
    """Undo :func:`pack_gains`: ``[pages, kinds, tokens]``, radius first."""
    pages = packed.shape[0]
    kinds = packed.shape[1] // tokens
    split = packed.reshape(pages, tokens // TILE_KEYS, 8, kinds, 2)
    return split.permute(0, 3, 1, 4, 2).reshape(pages, kinds, tokens)


def pack_values(codes: Tensor, *, bits: int) -> Tensor:
    """Value codes to bytes.

    Feature ``f`` of lane ``(g, t)`` is dimension ``8 * f + g``; its four codes belong to keys
    ``8 * upper + 2 * t + odd``. Byte ``2 * odd + upper`` of a word holds them, bits wide, for
    ``8 / bits`` features. Three bits use the 16 bits of a half, see :func:`_three_bit_places`.

    Args:
        codes: ``[pages, tokens, head_dim]`` uint8 below ``2**bits``; bfloat16 at 16 bits.
        bits: 2, 3, 4, 8 or 16.

    Returns:
        ``[pages, tokens * head_dim * bits / 8]`` uint8.
    """
    pages, tokens, head_dim = codes.shape
    tiles = tokens // TILE_KEYS
    # [pages, tile, upper, t, odd, feature, g]
    split = codes.reshape(pages, tiles, 2, 4, 2, head_dim // 8, 8)
    by_lane = split.permute(0, 1, 5, 6, 3, 4, 2)  # [pages, tile, feature, g, t, odd, upper]
    by_lane = by_lane.reshape(pages, tiles, head_dim // 8, LANES, 2, 2)
    if bits == 16:
        return _pack_bfloat(by_lane)
    if bits == 3:
        return _interleave(_pack_three(by_lane))
    per_byte = 8 // bits
    grouped = by_lane.reshape(pages, tiles, -1, per_byte, LANES, 4)
    word = grouped[:, :, :, 0].clone()
    for k in range(1, per_byte):
        word |= grouped[:, :, :, k] << (k * bits)
    return _interleave(word)


def unpack_values(packed: Tensor, *, bits: int, head_dim: int, tokens: int = PAGE_TOKENS) -> Tensor:
    """Undo :func:`pack_values`: ``[pages, tokens, head_dim]``."""
    pages, tiles = packed.shape[0], tokens // TILE_KEYS
    words = _separate(packed, tiles)
    if bits == 16:
        halves = words.contiguous().view(torch.bfloat16)  # [pages, tile, word, lane, odd]
        split = halves.reshape(pages, tiles, head_dim // 16, 2, 2, LANES, 2)
        by_lane = split.permute(0, 1, 2, 4, 5, 6, 3)  # upper is the outer of a tile's words
    elif bits == 3:
        by_lane = _unpack_three(words, head_dim)
    else:
        per_byte, mask = 8 // bits, (1 << bits) - 1
        fields = [(words >> (k * bits)) & mask for k in range(per_byte)]
        by_lane = torch.stack(fields, dim=3)
    by_lane = by_lane.reshape(pages, tiles, head_dim // 8, 8, 4, 2, 2)
    split = by_lane.permute(0, 1, 6, 4, 5, 2, 3)
    return split.reshape(pages, tokens, head_dim)


def to_fragment_order(view: PageView) -> Tensor:
    """Pages of a coded tier with their payload in fragment order; headers stay as they are.

    Args:
        view: Token-transposed pages, CONTIGUOUS or RUNS.

    Returns:
        ``[rows, page_bytes]`` uint8.
    """
    layout = view.layout
    check_layout(layout)
    pages = view.pages.clone()
    pages[:, layout.key_offset : layout.radius_offset] = pack_keys(view.key_codes())
    has_scales = layout.tier.has_value_codes
    scale_code = view.scale_code() if has_scales else None
    pages[:, layout.radius_offset : layout.value_offset] = pack_gains(
        view.radius_code(), scale_code
    )
    values = view.value_codes() if has_scales else view.dense_values()
    pages[:, layout.value_offset : layout.position_offset] = pack_values(
        values, bits=layout.tier.value_bits
    )
    return pages


def check_layout(layout: PageLayout) -> None:
    """Reject layouts that the kernel cannot read."""
    if not layout.tier.is_coded or layout.page_tokens not in PAGE_SIZES:
        sizes = " or ".join(map(str, PAGE_SIZES))
        raise ValueError(
            f"fragment order needs a coded tier with {sizes} states per page, got {layout.tier}"
        )
    if layout.num_nibbles % 16:
        raise ValueError(f"slots per key must be a multiple of 16, got {layout.num_nibbles}")


def _interleave(words: Tensor) -> Tensor:
    """``[pages, tile, word, lane, 4]`` bytes to a stream with chunks of a lane's words adjacent."""
    pages, tiles, num_words = words.shape[:3]
    parts, start = [], 0
    for size in _CHUNK_WORDS:
        while num_words - start >= size:
            chunk = words[:, :, start : start + size].transpose(2, 3)
            parts.append(chunk.reshape(pages, tiles, -1))
            start += size
    return torch.cat(parts, dim=2).reshape(pages, -1)


def _separate(packed: Tensor, tiles: int) -> Tensor:
    """Undo :func:`_interleave`: ``[pages, bytes]`` to ``[pages, tile, word, lane, 4]``."""
    pages = packed.shape[0]
    stream = packed.reshape(pages, tiles, -1)
    num_words = stream.shape[2] // (4 * LANES)
    parts, start = [], 0
    for size in _CHUNK_WORDS:
        while num_words - start >= size:
            at = start * 4 * LANES
            chunk = stream[:, :, at : at + size * 4 * LANES]
            parts.append(chunk.reshape(pages, tiles, LANES, size, 4).transpose(2, 3))
            start += size
    return torch.cat(parts, dim=2)


def _pack_bfloat(by_lane: Tensor) -> Tensor:
    """Values ``[pages, tile, feature, lane, odd, upper]`` as pairs of bfloat16."""
    pages, tiles, features = by_lane.shape[:3]
    split = by_lane.reshape(pages, tiles, features // 2, 2, LANES, 2, 2)
    words = split.permute(0, 1, 2, 6, 3, 4, 5).contiguous()  # [.., j, upper, h, lane, odd]
    data = words.view(torch.uint8).reshape(pages, tiles, 2 * features, LANES, 4)
    return _interleave(data)


def _three_bit_places(num_words: int) -> list[list[tuple[int, int]]]:
    """Word and bit of each bit of a feature's code: ``[2 * feature + upper][bit]``.

    Inside a half, bits 0-2 and 9-11 hold both codes of one feature, bits 3-5 and 12-14 of another,
    bits 6-8 one code of a third, and bit 15 of three words together one more code.
    """
    places = []
    for feature in range(8 * num_words // 3):
        for upper in range(2):
            single = 2 * (feature - 2 * num_words) + upper
            if feature < 2 * num_words:
                word, first = feature % num_words, 3 * (feature // num_words) + 9 * upper
                places.append([(word, first + bit) for bit in range(3)])
            elif single < num_words:
                places.append([(single, 6 + bit) for bit in range(3)])
            else:
                places.append([(3 * (single - num_words) + bit, 15) for bit in range(3)])
    return places


def _pack_three(by_lane: Tensor) -> Tensor:
    pages, tiles, features = by_lane.shape[:3]
    num_words = 3 * features // 8
    halves = torch.zeros(
        pages, tiles, num_words, LANES, 2, dtype=torch.int32, device=by_lane.device
    )
    for index, bits in enumerate(_three_bit_places(num_words)):
        code = by_lane[:, :, index // 2, :, :, index % 2].int()
        for bit, (word, at) in enumerate(bits):
            halves[:, :, word] |= ((code >> bit) & 1) << at
    return torch.stack([halves & 255, halves >> 8], dim=-1).to(torch.uint8).flatten(4)


def _unpack_three(words: Tensor, head_dim: int) -> Tensor:
    pages, tiles, num_words = words.shape[:3]
    pair = words.int().reshape(pages, tiles, num_words, LANES, 2, 2)
    halves = pair[..., 0] | (pair[..., 1] << 8)
    codes = []
    for bits in _three_bit_places(num_words):
        parts = [((halves[:, :, word] >> at) & 1) << bit for bit, (word, at) in enumerate(bits)]
        codes.append(sum(parts[1:], parts[0]))
    stacked = torch.stack(codes, dim=2).to(torch.uint8)  # [pages, tile, 2 * feature, lane, odd]
    split = stacked.reshape(pages, tiles, head_dim // 8, 2, LANES, 2)
    return split.permute(0, 1, 2, 4, 5, 3)
