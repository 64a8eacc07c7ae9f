# SPDX-License-Identifier: Apache-2.0
"""Byte order of packed codes, and that packing loses nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sphkv.codec.packing import (
    VALUE_BITS,
    pack_nibbles,
    pack_value_codes,
    unpack_nibbles,
    unpack_value_codes,
)


def _random_codes(shape: tuple[int, ...], bits: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=generator)


def _value_bytes_by_definition(codes: Tensor, bits: int) -> list[int]:
    """Bytes of ``codes [tokens, dim]``, one bit field at a time as the page format words it."""
    tokens, dim = codes.shape
    fields = {8: [(8, 0)], 4: [(4, 0)], 3: [(2, 0), (1, 2)], 2: [(2, 0)]}[bits]
    out: list[int] = []
    for width, shift in fields:
        block_tokens = 4 * (8 // width)
        for block in range(tokens // block_tokens):
            for i in range(dim):
                for j in range(4):
                    byte = 0
                    for m in range(8 // width):
                        code = int(codes[block * block_tokens + 4 * m + j, i]) >> shift
                        byte |= (code % 2**width) << (m * width)
                    out.append(byte)
    return out


def test_nibble_byte_holds_tokens_half_a_page_apart() -> None:
    """Low nibble token j, high nibble token j + 16."""
    codes = torch.zeros(2, 32, dtype=torch.uint8)
    codes[1, 3] = 5
    codes[1, 3 + 16] = 9
    packed = pack_nibbles(codes)
    assert packed.shape == (2, 16)
    assert packed[1, 3] == 5 + 16 * 9
    assert packed.sum() == 5 + 16 * 9


@pytest.mark.parametrize(
    ("bits", "token", "dim", "byte", "value"),
    [
        # head dim 2, 64 tokens; code 2**bits - 1 at one place
        (8, 6, 1, 4 * (1 * 2 + 1) + 2, 255),
        (4, 13, 1, 4 * (1 * 2 + 1) + 1, 15 << 4),
        (2, 16 + 9, 0, 4 * (1 * 2 + 0) + 1, 3 << 4),
    ],
)
def test_value_code_lands_in_its_byte(
    bits: int, token: int, dim: int, byte: int, value: int
) -> None:
    """One code at a time, at the place worked out by hand."""
    codes = torch.zeros(64, 2, dtype=torch.uint8)
    codes[token, dim] = 2**bits - 1
    packed = pack_value_codes(codes, bits=bits)
    assert packed.nonzero().flatten().tolist() == [byte]
    assert packed[byte] == value


def test_three_bit_code_splits_into_two_streams() -> None:
    """Low two bits and top bit of one token, found in both streams."""
    codes = torch.zeros(64, 2, dtype=torch.uint8)
    codes[32 + 4 * 5 + 3, 1] = 0b110
    packed = pack_value_codes(codes, bits=3)
    low_bytes = 64 * 2 * 2 // 8
    # token 55: 2-bit block 3, m = 1, j = 3; 1-bit block 1, m = 5, j = 3
    assert packed[4 * (3 * 2 + 1) + 3] == 0b10 << 2
    assert packed[low_bytes + 4 * (1 * 2 + 1) + 3] == 1 << 5
    assert packed.count_nonzero() == 2


@pytest.mark.parametrize("bits", VALUE_BITS)
@pytest.mark.parametrize(("tokens", "dim"), [(32, 5), (96, 2)])
def test_value_bytes_match_definition(bits: int, tokens: int, dim: int) -> None:
    """Equal to the format spelled out bit by bit."""
    codes = _random_codes((tokens, dim), bits)
    packed = pack_value_codes(codes, bits=bits)
    assert packed.tolist() == _value_bytes_by_definition(codes, bits)


@given(
    bits=st.sampled_from(VALUE_BITS),
    blocks=st.integers(0, 4),
    dim=st.integers(1, 9),
    batch=st.lists(st.integers(0, 3), max_size=2),
    seed=st.integers(0, 2**31),
)
def test_value_packing_round_trips(
    bits: int, blocks: int, dim: int, batch: list[int], seed: int
) -> None:
    """Nothing is lost, whatever the shape."""
    codes = _random_codes((*batch, 32 * blocks, dim), bits, seed)
    packed = pack_value_codes(codes, bits=bits)
    assert packed.shape == (*batch, 32 * blocks * dim * bits // 8)
    restored = unpack_value_codes(packed, bits=bits, num_tokens=32 * blocks, head_dim=dim)
    assert torch.equal(restored, codes)


@given(
    blocks=st.integers(0, 4),
    slots=st.integers(0, 7),
    batch=st.lists(st.integers(0, 3), max_size=2),
    seed=st.integers(0, 2**31),
)
def test_nibble_packing_round_trips(blocks: int, slots: int, batch: list[int], seed: int) -> None:
    """Nothing is lost, whatever the shape."""
    codes = _random_codes((*batch, slots, 32 * blocks), 4, seed)
    packed = pack_nibbles(codes)
    assert packed.shape == (*batch, slots, 16 * blocks)
    assert torch.equal(unpack_nibbles(packed), codes)


@pytest.mark.parametrize("bits", VALUE_BITS)
def test_every_byte_pattern_is_a_valid_packing(bits: int) -> None:
    """No bit of the packed form is unused."""
    packed = _random_codes((3, 64 * 6 * bits // 8), 8)
    codes = unpack_value_codes(packed, bits=bits, num_tokens=64, head_dim=6)
    assert torch.equal(pack_value_codes(codes, bits=bits), packed)


def test_packing_reads_strided_input() -> None:
    """Memory order of the input does not matter."""
    codes = _random_codes((6, 64), 3)
    strided = pack_value_codes(codes.T, bits=3)
    assert torch.equal(strided, pack_value_codes(codes.T.contiguous(), bits=3))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_value_code_too_large_is_named(bits: int) -> None:
    """A code that does not fit is an error, not a corrupt neighbour."""
    codes = torch.zeros(32, 4, dtype=torch.uint8)
    codes[7, 1] = 2**bits
    with pytest.raises(ValueError, match=f"largest is {2**bits}"):
        pack_value_codes(codes, bits=bits)


def test_slot_code_too_large_is_named() -> None:
    """A slot code above 15 is an error."""
    with pytest.raises(ValueError, match="largest is 200"):
        pack_nibbles(torch.full((1, 32), 200, dtype=torch.uint8))


@pytest.mark.parametrize("tokens", [1, 31, 48])
def test_tokens_must_fill_blocks(tokens: int) -> None:
    """Both packings want whole blocks of 32 tokens."""
    with pytest.raises(ValueError, match=f"multiple of 32, got {tokens}"):
        pack_value_codes(torch.zeros(tokens, 4, dtype=torch.uint8), bits=4)
    with pytest.raises(ValueError, match=f"multiple of 32, got {tokens}"):
        pack_nibbles(torch.zeros(2, tokens, dtype=torch.uint8))


@pytest.mark.parametrize("bits", [0, 1, 5, 16])
def test_unknown_width_is_rejected(bits: int) -> None:
    """Only the four widths of the format exist."""
    with pytest.raises(ValueError, match=f"got {bits}$"):
        pack_value_codes(torch.zeros(32, 4, dtype=torch.uint8), bits=bits)


def test_other_dtypes_are_rejected() -> None:
    """Codes and bytes are uint8."""
    with pytest.raises(ValueError, match="int64"):
        pack_nibbles(torch.zeros(1, 32, dtype=torch.int64))
    with pytest.raises(ValueError, match="float32"):
        pack_value_codes(torch.zeros(32, 4), bits=4)
    with pytest.raises(ValueError, match="int8"):
        unpack_nibbles(torch.zeros(1, 16, dtype=torch.int8))


def test_wrong_byte_count_is_rejected() -> None:
    """A byte too few is named."""
    with pytest.raises(ValueError, match="take 48 bytes, got 47"):
        unpack_value_codes(torch.zeros(47, dtype=torch.uint8), bits=3, num_tokens=32, head_dim=4)


def test_missing_dimension_is_rejected() -> None:
    """Value codes need tokens and dimensions."""
    with pytest.raises(ValueError, match=r"\(32,\)"):
        pack_value_codes(torch.zeros(32, dtype=torch.uint8), bits=4)
