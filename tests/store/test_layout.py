# SPDX-License-Identifier: Apache-2.0
"""Pages byte by byte: what is written is read, whatever the slack holds."""

import struct
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sphkv.core.contract import EncodedStates
from sphkv.core.tiers import DENSE, TierSpec, coded_tier, ladder
from sphkv.store.layout import (
    HEADER_BYTES,
    PageLayout,
    PageView,
    write_dense_pages,
    write_pages,
)
from sphkv.store.paging import PageRows, PositionMode, choose_position_modes

NUM_ROWS = 3


def random_rows(page_tokens: int, mode: PositionMode, generator: torch.Generator) -> PageRows:
    """One full page, one with a single state, one in between."""
    counts = torch.tensor([page_tokens, 1, page_tokens - 5])
    index = torch.arange(page_tokens)
    base = torch.tensor([[0], [1_000_003], [2**31 - 1 - 4 * page_tokens]])
    gaps = {
        PositionMode.CONTIGUOUS: torch.zeros_like(index),
        PositionMode.RUNS: 16 * (index // 16),
        PositionMode.TOKENS: torch.randint(0, 3, (page_tokens,), generator=generator).cumsum(0),
    }
    flags = torch.rand((NUM_ROWS, page_tokens), generator=generator) < 0.5
    return PageRows(base + index + gaps[mode], counts, flags)


def random_codes(layout: PageLayout, generator: torch.Generator) -> EncodedStates:
    tier, tokens, dim = layout.tier, layout.page_tokens, layout.head_dim

    def codes(*shape: int, high: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator).to(torch.uint8)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if tier.has_value_codes:
        values = codes(NUM_ROWS, tokens, dim, high=2**tier.value_bits)
    else:
        values = floats(NUM_ROWS, tokens, dim).to(torch.bfloat16)
    return EncodedStates(
        codes(NUM_ROWS, layout.num_nibbles, tokens, high=16),
        codes(NUM_ROWS, tokens, high=256),
        floats(NUM_ROWS),
        floats(NUM_ROWS),
        values,
        codes(NUM_ROWS, tokens, high=256),
        floats(NUM_ROWS),
        floats(NUM_ROWS),
    )


def spoil_slack(layout: PageLayout, pages: Tensor, rows: PageRows) -> Tensor:
    """Fill with 0xFF every byte that belongs to dead states alone."""
    spoiled = pages.clone()
    dim, tokens = layout.head_dim, layout.page_tokens
    for row, count in enumerate(rows.counts.tolist()):
        streams = [(layout.value_offset, 2 * dim)] if not layout.tier.has_value_codes else []
        if layout.tier.is_coded:
            streams += [(layout.radius_offset, 1)]
            streams += [(layout.scale_offset, 1)] if layout.tier.has_value_codes else []
        else:
            streams += [(layout.key_offset, 2 * dim)]
        if layout.position_mode is PositionMode.TOKENS:
            streams += [(layout.position_offset, 4)]
        for offset, width in streams:
            spoiled[row, offset + count * width : offset + tokens * width] = 0xFF
        spoiled[row, layout.payload_end :] = 0xFF
    return spoiled


@pytest.mark.parametrize("mode", list(PositionMode))
@pytest.mark.parametrize("page_tokens", [32, 128])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize(
    ("key_bits", "value_bits"),
    # 1.0625 bits are an odd number of slots.
    [(1.0, 2), (1.0625, 2), (1.5, 2), (2.0, 3), (3.0, 4), (4.0, 8), (4.0, 16)],
)
def test_coded_pages_round_trip(
    mode: PositionMode, page_tokens: int, head_dim: int, key_bits: float, value_bits: int
) -> None:
    generator = torch.Generator().manual_seed(7)
    tier = coded_tier(key_bits, value_bits, page_tokens=page_tokens)
    layout = PageLayout(5, tier, head_dim, mode)
    rows, encoded = random_rows(page_tokens, mode, generator), random_codes(layout, generator)
    pages = write_pages(layout, encoded, rows)
    assert tuple(pages.shape) == (NUM_ROWS, layout.page_bytes)
    view = PageView(layout, spoil_slack(layout, pages, rows))
    view.check()
    live = rows.live()
    assert torch.equal(view.counts(), rows.counts)
    assert torch.equal(view.live(), live)
    assert torch.equal(view.positions()[live], rows.positions[live])
    assert torch.equal(view.flags(), rows.flags & live)
    assert torch.equal(
        view.key_codes().transpose(1, 2)[live], encoded.key_codes.transpose(1, 2)[live]
    )
    radius = encoded.radius_lo[:, None] + encoded.radius_step[:, None] * encoded.radius_code
    assert torch.equal(view.radius(), radius * live)
    if tier.has_value_codes:
        assert torch.equal(view.value_codes()[live], encoded.value_codes[live])
        scale = encoded.scale_lo[:, None] + encoded.scale_step[:, None] * encoded.scale_code
        assert torch.equal(view.value_scale(), scale * live)
    else:
        assert torch.equal(view.dense_values()[live], encoded.value_codes[live])
        assert not view.dense_values()[~live].any()
    again = write_pages(layout, PageView(layout, pages).encoded(), PageView(layout, pages).rows())
    assert torch.equal(again, pages)


@pytest.mark.parametrize("mode", list(PositionMode))
@pytest.mark.parametrize("page_tokens", [16, 128])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_dense_pages_round_trip(mode: PositionMode, page_tokens: int, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(9)
    layout = PageLayout(6, replace(DENSE, page_tokens=page_tokens), head_dim, mode)
    rows = random_rows(page_tokens, mode, generator)
    keys = torch.randn((NUM_ROWS, page_tokens, head_dim), generator=generator)
    values = torch.randn((NUM_ROWS, page_tokens, head_dim), generator=generator)
    pages = write_dense_pages(layout, keys, values, rows)
    view = PageView(layout, spoil_slack(layout, pages, rows))
    view.check()
    live = rows.live()
    assert torch.equal(view.dense_keys(), keys.to(torch.bfloat16) * live[:, :, None])
    assert torch.equal(view.dense_values(), values.to(torch.bfloat16) * live[:, :, None])
    assert torch.equal(view.positions()[live], rows.positions[live])
    assert torch.equal(view.flags(), rows.flags & live)


def test_page_bytes_as_written_down() -> None:
    """Every field at the offset that ``docs/pages.md`` states, read without torch."""
    generator = torch.Generator().manual_seed(3)
    layout = PageLayout(2, coded_tier(2.0, 3, page_tokens=32), 16, PositionMode.RUNS)
    rows = random_rows(32, PositionMode.RUNS, generator)
    encoded = random_codes(layout, generator)
    row, count = 2, 27
    page = bytes(write_pages(layout, encoded, rows)[row].numpy())
    # 64 header + 8 nibbles * 16 + 32 + 32 + 32 * 16 * 3 / 8 + 2 * 4 = 456, rounded to 512
    assert len(page) == layout.page_bytes == 512
    assert page[:4] == bytes([0xA1, 2, 1, 0])
    assert struct.unpack_from("<HH", page, 4) == (count, 32)
    assert struct.unpack_from("<i", page, 8) == (int(rows.positions[row, 0]),)
    expected = [encoded.radius_lo, encoded.radius_step, encoded.scale_lo, encoded.scale_step]
    assert list(struct.unpack_from("<ffff", page, 12)) == [float(x[row]) for x in expected]
    assert struct.unpack_from("<5I", page, 28) == (192, 224, 256, 448, 456)
    flags = int.from_bytes(page[48:64], "little")
    assert [bool(flags >> i & 1) for i in range(count)] == rows.flags[row, :count].tolist()
    assert flags >> count == 0
    for token in range(count):
        for slot in range(8):
            byte = page[64 + slot * 16 + token % 16]
            nibble = byte >> 4 if token >= 16 else byte & 15
            assert nibble == int(encoded.key_codes[row, slot, token])
        assert page[192 + token] == int(encoded.radius_code[row, token])
        assert page[224 + token] == int(encoded.scale_code[row, token])
        for dim in range(16):
            block, inner = divmod(token, 16)
            low = page[256 + (block * 16 + dim) * 4 + inner % 4] >> (2 * (inner // 4)) & 3
            top = page[256 + 128 + dim * 4 + token % 4] >> (token // 4) & 1
            assert low | top << 2 == int(encoded.value_codes[row, token, dim])
    bases = struct.unpack_from("<2i", page, 448)
    assert bases == (int(rows.positions[row, 0]), int(rows.positions[row, 16]))
    # Unused states and rounding are zero.
    assert page[192 + count : 224] == bytes(32 - count)
    assert page[224 + count : 256] == bytes(32 - count)
    assert page[456:] == bytes(56)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_streams_are_aligned_and_inside_the_page(head_dim: int) -> None:
    for tier_id, tier in enumerate(ladder(64)):
        for mode in PositionMode if tier.kind != "drop" else ():
            layout = PageLayout(tier_id, tier, head_dim, mode)
            offsets = (HEADER_BYTES, *layout.offsets())
            assert list(offsets) == sorted(offsets)
            assert all(offset % 4 == 0 for offset in offsets)
            assert layout.page_bytes % 64 == 0
            assert 0 <= layout.page_bytes - layout.payload_end < 64
            payload = tier.page_tokens * tier.state_bytes(head_dim)
            assert layout.position_offset == HEADER_BYTES + payload


def test_position_modes_are_the_cheapest_that_fit() -> None:
    index = torch.arange(64)
    positions = torch.stack(
        [index + 7, index + 100 * (index // 16), 2 * index, index + 5 * (index >= 20)]
    )
    full = torch.full((4,), 64)
    assert choose_position_modes(positions, full).tolist() == [0, 1, 2, 2]
    # A gap past the count does not matter.
    assert choose_position_modes(positions, torch.full((4,), 16)).tolist() == [0, 0, 2, 0]
    assert choose_position_modes(positions, torch.full((4,), 1)).tolist() == [0, 0, 0, 0]


def test_bad_pages_are_refused() -> None:
    layout = PageLayout(1, DENSE, 64, PositionMode.TOKENS)
    rows = random_rows(16, PositionMode.TOKENS, torch.Generator().manual_seed(0))
    states = torch.zeros((NUM_ROWS, 16, 64))
    with pytest.raises(ValueError, match="keys must have shape"):
        write_dense_pages(layout, states[:, :15], states, rows)
    with pytest.raises(ValueError, match="counts"):
        write_dense_pages(layout, states, states, replace(rows, counts=rows.counts * 0))
    with pytest.raises(ValueError, match="counts"):
        write_dense_pages(layout, states, states, replace(rows, counts=rows.counts + 1))
    with pytest.raises(ValueError, match="positions must be in"):
        write_dense_pages(layout, states, states, replace(rows, positions=rows.positions - 99))
    with pytest.raises(ValueError, match="flags"):
        write_dense_pages(layout, states, states, replace(rows, flags=rows.flags[:, :3]))
    with pytest.raises(ValueError, match="bytes, got 64"):
        PageView(layout, torch.zeros((1, 64), dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        PageView(layout, torch.zeros((1, layout.page_bytes)))
    with pytest.raises(ValueError, match="no pages"):
        PageLayout(0, TierSpec("drop", "drop", 0.0, 0, 0), 64, PositionMode.TOKENS)


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (0, "version"),
        (1, "tier id"),
        (2, "position mode"),
        (5, "count"),
        (6, "capacity"),
        (28, "offsets"),
        (15, "radius"),
        (27, "scale"),
    ],
)
def test_header_check_names_the_field(offset: int, message: str) -> None:
    generator = torch.Generator().manual_seed(1)
    layout = PageLayout(4, coded_tier(2.0, 4), 64, PositionMode.CONTIGUOUS)
    rows = random_rows(128, PositionMode.CONTIGUOUS, generator)
    pages = write_pages(layout, random_codes(layout, generator), rows)
    PageView(layout, pages).check()
    pages[1, offset] = 0x7F
    if offset in (15, 27):
        pages[1, offset - 1] = 0xFF
    with pytest.raises(ValueError, match=message):
        PageView(layout, pages).check()
