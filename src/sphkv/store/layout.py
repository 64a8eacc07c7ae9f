# SPDX-License-Identifier: Apache-2.0
"""Byte offsets of a page: the only file that knows them.

A page is one contiguous run of bytes: a 64-byte header, then one stream per kind of data for
up to ``page_tokens`` states. ``docs/pages.md`` has the picture.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.codec.packing import (
    pack_nibbles,
    pack_value_codes,
    unpack_nibbles,
    unpack_value_codes,
)
from sphkv.core.contract import EncodedStates
from sphkv.core.devices import constant
from sphkv.core.tiers import MAX_PAGE_TOKENS, RUN_TOKENS, TierSpec
from sphkv.store.paging import MAX_POSITION, PageRows, PositionMode, live_mask

PAGE_VERSION = 0xA1
PAGE_ALIGNMENT = 64
HEADER_BYTES = 64
FLAG_BYTES = MAX_PAGE_TOKENS // 8
POSITION_BYTES = 4

# Header fields: u8 version, tier, mode, reserved; u16 count, capacity; then 32-bit words.
_VERSION, _TIER, _MODE = 0, 1, 2
COUNT_OFFSET, _CAPACITY = 4, 6
POSITION_BASE_OFFSET = 8
RADIUS_LO_OFFSET, RADIUS_STEP_OFFSET, SCALE_LO_OFFSET, SCALE_STEP_OFFSET = 12, 16, 20, 24
# u32 offsets from the page start: radii, value scales, values, positions, end of payload.
_OFFSETS = 28
FLAGS_OFFSET = 48


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Offsets of the streams of one kind of page.

    Attributes:
        tier_id: Id of the tier in its table.
        tier: The tier, coded or dense.
        head_dim: Elements of one key.
        position_mode: How positions are stored.
    """

    tier_id: int
    tier: TierSpec
    head_dim: int
    position_mode: PositionMode

    def __post_init__(self) -> None:
        """Reject the tier that has no pages."""
        if self.tier.kind == "drop":
            raise ValueError(f"tier {self.tier.name!r} stores nothing and has no pages")

    @property
    def page_tokens(self) -> int:
        """States one page can hold."""
        return self.tier.page_tokens

    @property
    def num_nibbles(self) -> int:
        """Key slots of one state."""
        return self.tier.key_nibbles(self.head_dim)

    @property
    def key_offset(self) -> int:
        """Start of key codes, or of bfloat16 keys."""
        return HEADER_BYTES

    @property
    def radius_offset(self) -> int:
        """Start of radius codes, one byte each."""
        return self.key_offset + self.tier.key_code_bytes(self.head_dim, self.page_tokens)

    @property
    def scale_offset(self) -> int:
        """Start of value scale codes, one byte each."""
        return self.radius_offset + self.page_tokens * int(self.tier.is_coded)

    @property
    def value_offset(self) -> int:
        """Start of value codes, or of bfloat16 values."""
        return self.scale_offset + self.page_tokens * int(self.tier.has_value_codes)

    @property
    def position_offset(self) -> int:
        """Start of the position stream."""
        return self.value_offset + self.tier.value_code_bytes(self.head_dim, self.page_tokens)

    @property
    def num_position_words(self) -> int:
        """Words of the position stream of a page."""
        return {
            PositionMode.CONTIGUOUS: 0,
            PositionMode.RUNS: self.page_tokens // RUN_TOKENS,
            PositionMode.TOKENS: self.page_tokens,
        }[self.position_mode]

    @property
    def payload_end(self) -> int:
        """First byte after the last stream."""
        return self.position_offset + POSITION_BYTES * self.num_position_words

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, rounded up to the alignment."""
        return -(-self.payload_end // PAGE_ALIGNMENT) * PAGE_ALIGNMENT

    def offsets(self) -> tuple[int, int, int, int, int]:
        """The five stream offsets that a header repeats."""
        return (
            self.radius_offset,
            self.scale_offset,
            self.value_offset,
            self.position_offset,
            self.payload_end,
        )


def write_pages(layout: PageLayout, encoded: EncodedStates, rows: PageRows) -> Tensor:
    """Pack coded states into pages; bytes of unused states are zero.

    Args:
        layout: Layout of a coded tier.
        encoded: Codes of the pages.
        rows: Positions, counts and flags of the same pages.

    Returns:
        ``[rows, page_bytes]`` uint8.
    """
    encoded.check(layout.tier, layout.head_dim)
    pages = blank_pages(layout, rows)
    live = rows.live()
    affine = (encoded.radius_lo, encoded.radius_step, encoded.scale_lo, encoded.scale_step)
    # four words that follow one another
    _put(pages, RADIUS_LO_OFFSET, torch.stack(affine, 1))
    codes = encoded.key_codes * live[:, None, :]
    pages[:, layout.key_offset : layout.radius_offset] = pack_nibbles(codes).flatten(1)
    pages[:, layout.radius_offset : layout.scale_offset] = encoded.radius_code * live
    if layout.tier.has_value_codes:
        pages[:, layout.scale_offset : layout.value_offset] = encoded.scale_code * live
        values = pack_value_codes(
            encoded.value_codes * live[:, :, None], bits=layout.tier.value_bits
        )
        pages[:, layout.value_offset : layout.position_offset] = values
    else:
        put_dense(pages, layout.value_offset, encoded.value_codes, live)
    return pages


def write_dense_pages(
    layout: PageLayout, keys: Tensor, values: Tensor, rows: PageRows, *, is_checked: bool = False
) -> Tensor:
    """Write bfloat16 states into pages of the dense tier.

    Args:
        layout: Layout of the dense tier.
        keys: ``[rows, tokens, head_dim]`` keys after rotary embedding.
        values: ``[rows, tokens, head_dim]``.
        rows: Positions, counts and flags of the same pages.
        is_checked: See ``blank_pages``.

    Returns:
        ``[rows, page_bytes]`` uint8.
    """
    shape = (rows.counts.shape[0], layout.page_tokens, layout.head_dim)
    for name, tensor in (("keys", keys), ("values", values)):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    # rows may be on the CPU, where checking them waits for nothing
    pages = blank_pages(layout, rows, is_checked=is_checked).to(keys.device, non_blocking=True)
    live = rows.live().to(keys.device, non_blocking=True)
    put_dense(pages, layout.key_offset, keys, live)
    put_dense(pages, layout.value_offset, values, live)
    return pages


def blank_pages(layout: PageLayout, rows: PageRows, *, is_checked: bool = False) -> Tensor:
    """Pages ``[rows, page_bytes]`` with header, positions and flags only; the rest is zero.

    ``is_checked``: counts and positions are known to fit, so that no device is waited for.
    """
    num_rows, tokens = rows.counts.shape[0], layout.page_tokens
    for name, tensor in (("positions", rows.positions), ("flags", rows.flags)):
        if tuple(tensor.shape) != (num_rows, tokens):
            expected = (num_rows, tokens)
            raise ValueError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")
    live = rows.live()
    is_checked = is_checked or not num_rows
    if not is_checked and not 0 < int(rows.counts.min()) <= int(rows.counts.max()) <= tokens:
        raise ValueError(f"counts of a page must be in 1..{tokens}, got {rows.counts.tolist()}")
    positions = rows.positions.masked_fill(~live, 0)
    if not is_checked and not 0 <= int(positions.min()) <= int(positions.max()) <= MAX_POSITION:
        raise ValueError(f"positions must be in 0..{MAX_POSITION}")
    pages = torch.zeros(num_rows, layout.page_bytes, dtype=torch.uint8, device=positions.device)
    _put_header(pages, layout)
    _put(pages, COUNT_OFFSET, rows.counts.to(torch.int16)[:, None])
    positions = positions.to(torch.int32)
    _put(pages, POSITION_BASE_OFFSET, positions[:, :1])
    _put_flags(pages, rows.flags & live)
    if layout.position_mode is PositionMode.RUNS:
        _put(pages, layout.position_offset, positions[:, ::RUN_TOKENS])
    elif layout.position_mode is PositionMode.TOKENS:
        _put(pages, layout.position_offset, positions)
    return pages


@functools.cache
def header_words(layout: PageLayout) -> tuple[int, ...]:
    """The twelve words before the flags of every page of a layout; what differs is zero."""
    blank = torch.zeros((1, HEADER_BYTES), dtype=torch.uint8)
    blank[:, _VERSION] = PAGE_VERSION
    blank[:, _TIER] = layout.tier_id
    blank[:, _MODE] = int(layout.position_mode)
    _put(blank, _CAPACITY, torch.tensor([[layout.page_tokens]], dtype=torch.int16))
    _put(blank, _OFFSETS, torch.tensor([layout.offsets()], dtype=torch.int32))
    return tuple(blank[0, :FLAGS_OFFSET].view(torch.int32).tolist())


def first_positions(pages: Tensor) -> Tensor:
    """``[rows]`` int64 position of each page's first state, as its header tells it."""
    words = pages[:, POSITION_BASE_OFFSET : POSITION_BASE_OFFSET + torch.int32.itemsize]
    return words.contiguous().view(torch.int32)[:, 0].to(torch.int64)


def _put_header(pages: Tensor, layout: PageLayout) -> None:
    """Store what the headers of all pages of a layout have in common; the rest of them is zero."""
    words = constant(header_words(layout), device=pages.device, dtype=torch.int32)
    _put(pages, 0, words.expand(len(pages), -1))


def _put(pages: Tensor, offset: int, words: Tensor) -> None:
    """Store ``[rows, n]`` words of any width as little-endian bytes."""
    data = words.contiguous().view(torch.uint8)
    pages[:, offset : offset + data.shape[1]] = data


def put_dense(pages: Tensor, offset: int, states: Tensor, live: Tensor) -> None:
    """Store bfloat16 states ``[rows, tokens, head_dim]``, zeros where not ``live``."""
    dense = torch.where(live[:, :, None], states, 0).to(torch.bfloat16)
    _put(pages, offset, dense.flatten(1))


def _put_flags(pages: Tensor, flags: Tensor) -> None:
    weight = 1 << torch.arange(8, dtype=torch.int32, device=pages.device)
    bits = (flags.reshape(flags.shape[0], -1, 8) * weight).sum(dim=2)
    pages[:, FLAGS_OFFSET : FLAGS_OFFSET + bits.shape[1]] = bits.to(torch.uint8)


def _words(pages: Tensor, offset: int, num_words: int, dtype: torch.dtype) -> Tensor:
    """``[rows, words]`` that begin at an offset of every row of bytes."""
    stop = offset + num_words * dtype.itemsize
    return pages[:, offset:stop].contiguous().view(dtype)


def _flags(pages: Tensor, counts: Tensor, page_tokens: int) -> Tensor:
    """``[rows, tokens]`` bool of the header's flags, false for slack."""
    data = pages[:, FLAGS_OFFSET : FLAGS_OFFSET + page_tokens // 8]
    shift = torch.arange(8, dtype=torch.uint8, device=data.device)
    bits = (data[:, :, None] >> shift) & 1
    return bits.flatten(1).to(torch.bool) & live_mask(counts, page_tokens)


def frame_parts(layout: PageLayout) -> tuple[slice, slice]:
    """Bytes of a page that frame its codes: its header and its positions."""
    return slice(0, HEADER_BYTES), slice(layout.position_offset, layout.payload_end)


@dataclass(frozen=True, slots=True, eq=False)
class PageFrames:
    """Headers and positions of pages of one layout.

    Attributes:
        layout: Layout that all pages share.
        frames: ``[rows, frame_bytes]`` uint8: what ``frame_parts`` names, side by side.
    """

    layout: PageLayout
    frames: Tensor

    def counts(self) -> Tensor:
        """``[rows]`` int64 live states of each page."""
        return _words(self.frames, COUNT_OFFSET, 1, torch.int16)[:, 0].to(torch.int64)

    def run_starts(self) -> Tensor:
        """``[rows, runs]`` int64 first position of every run, live or not; not of single tokens."""
        runs = self.layout.page_tokens // RUN_TOKENS
        if self.layout.position_mode is PositionMode.CONTIGUOUS:
            base = _words(self.frames, POSITION_BASE_OFFSET, 1, torch.int32).to(torch.int64)
            return base + RUN_TOKENS * torch.arange(runs, device=base.device)
        return _words(self.frames, HEADER_BYTES, runs, torch.int32).to(torch.int64)

    def positions(self) -> Tensor:
        """``[rows, tokens]`` int64 position of every state, live or not."""
        if self.layout.position_mode is PositionMode.TOKENS:
            tokens = self.layout.page_tokens
            return _words(self.frames, HEADER_BYTES, tokens, torch.int32).to(torch.int64)
        inside = torch.arange(RUN_TOKENS, device=self.frames.device)
        return (self.run_starts()[:, :, None] + inside).flatten(1)

    def is_protected(self) -> Tensor:
        """``[rows]`` bool, true for pages with a protected state."""
        return _flags(self.frames, self.counts(), self.layout.page_tokens).any(1)


@dataclass(frozen=True, slots=True, eq=False)
class PageView:
    """What a kernel reads: pages of one layout, parsed on demand.

    States past a page's count are slack. Radii, scales and bfloat16 data of slack read as
    zero whatever its bytes; its codes and positions are meaningless.

    Attributes:
        layout: Layout that all pages share.
        pages: ``[rows, page_bytes]`` uint8.
    """

    layout: PageLayout
    pages: Tensor

    def __post_init__(self) -> None:
        """Reject bytes of another size."""
        if self.pages.dtype != torch.uint8 or self.pages.dim() != 2:
            raise ValueError(
                f"pages must be uint8 [rows, bytes], got {self.pages.dtype} "
                f"{tuple(self.pages.shape)}"
            )
        if self.pages.shape[1] != self.layout.page_bytes:
            raise ValueError(
                f"pages must have {self.layout.page_bytes} bytes, got {self.pages.shape[1]}"
            )

    def _words(self, offset: int, num_words: int, dtype: torch.dtype) -> Tensor:
        return _words(self.pages, offset, num_words, dtype)

    def counts(self) -> Tensor:
        """``[rows]`` int64 live states of each page."""
        return self._words(COUNT_OFFSET, 1, torch.int16)[:, 0].to(torch.int64)

    def live(self) -> Tensor:
        """``[rows, tokens]`` bool, false for slack."""
        return live_mask(self.counts(), self.layout.page_tokens)

    def flags(self) -> Tensor:
        """``[rows, tokens]`` bool, true for protected states."""
        return _flags(self.pages, self.counts(), self.layout.page_tokens)

    def positions(self) -> Tensor:
        """``[rows, tokens]`` int64 positions."""
        layout = self.layout
        index = torch.arange(layout.page_tokens, device=self.pages.device)
        if layout.position_mode is PositionMode.CONTIGUOUS:
            return self._words(POSITION_BASE_OFFSET, 1, torch.int32).to(torch.int64) + index
        words = self._words(layout.position_offset, layout.num_position_words, torch.int32)
        words = words.to(torch.int64)
        if layout.position_mode is PositionMode.RUNS:
            return words[:, index // RUN_TOKENS] + index % RUN_TOKENS
        return words

    def key_codes(self) -> Tensor:
        """``[rows, nibbles, tokens]`` uint8 slot codes."""
        layout = self.layout
        packed = self.pages[:, layout.key_offset : layout.radius_offset]
        return unpack_nibbles(packed.reshape(-1, layout.num_nibbles, layout.page_tokens // 2))

    def radius_code(self) -> Tensor:
        """``[rows, tokens]`` uint8."""
        return self.pages[:, self.layout.radius_offset : self.layout.scale_offset]

    def radius_affine(self) -> tuple[Tensor, Tensor]:
        """Low end and step of the radius, ``[rows]`` float32 each."""
        words = self._words(RADIUS_LO_OFFSET, 2, torch.float32)
        return words[:, 0], words[:, 1]

    def radius(self) -> Tensor:
        """``[rows, tokens]`` float32 radii."""
        return self._affine(self.radius_code(), self.radius_affine())

    def value_codes(self) -> Tensor:
        """``[rows, tokens, head_dim]`` uint8 value codes."""
        layout = self.layout
        return unpack_value_codes(
            self.pages[:, layout.value_offset : layout.position_offset],
            bits=layout.tier.value_bits,
            num_tokens=layout.page_tokens,
            head_dim=layout.head_dim,
        )

    def scale_code(self) -> Tensor:
        """``[rows, tokens]`` uint8; empty at 16 value bits."""
        return self.pages[:, self.layout.scale_offset : self.layout.value_offset]

    def scale_affine(self) -> tuple[Tensor, Tensor]:
        """Low end and step of the value scale, ``[rows]`` float32 each."""
        words = self._words(SCALE_LO_OFFSET, 2, torch.float32)
        return words[:, 0], words[:, 1]

    def value_scale(self) -> Tensor:
        """``[rows, tokens]`` float32 value scales."""
        return self._affine(self.scale_code(), self.scale_affine())

    def _affine(self, code: Tensor, affine: tuple[Tensor, Tensor]) -> Tensor:
        low, step = affine
        return torch.where(self.live(), low[:, None] + step[:, None] * code, 0.0)

    def dense_keys(self) -> Tensor:
        """``[rows, tokens, head_dim]`` bfloat16 keys of the dense tier."""
        return self._dense(self.layout.key_offset)

    def dense_values(self) -> Tensor:
        """``[rows, tokens, head_dim]`` bfloat16 values of 16 bits."""
        return self._dense(self.layout.value_offset)

    def _dense(self, offset: int) -> Tensor:
        layout = self.layout
        words = self._words(offset, layout.page_tokens * layout.head_dim, torch.bfloat16)
        states = words.reshape(-1, layout.page_tokens, layout.head_dim)
        return states.masked_fill(~self.live()[:, :, None], 0.0)

    def select(self, index: Tensor) -> "PageView":
        """The pages that ``index`` names."""
        return PageView(self.layout, self.pages[index])

    def rows(self) -> PageRows:
        """Positions, counts and flags of the pages."""
        return PageRows(self.positions(), self.counts(), self.flags())

    def encoded(self) -> EncodedStates:
        """Codes of the pages, as the codec made them."""
        if self.layout.tier.has_value_codes:
            value_codes, scale_code = self.value_codes(), self.scale_code()
        else:
            value_codes, scale_code = self.dense_values(), torch.zeros_like(self.radius_code())
        return EncodedStates(
            self.key_codes(),
            self.radius_code(),
            *self.radius_affine(),
            value_codes,
            scale_code,
            *self.scale_affine(),
        )

    def check(self) -> None:
        """Raise if a header contradicts the layout; for pages that come from a file."""
        layout, tokens = self.layout, self.layout.page_tokens
        offsets = torch.tensor(layout.offsets(), dtype=torch.int32, device=self.pages.device)
        expected: list[tuple[str, Tensor, int | Tensor]] = [
            ("version", self.pages[:, _VERSION], PAGE_VERSION),
            ("tier id", self.pages[:, _TIER], layout.tier_id),
            ("position mode", self.pages[:, _MODE], int(layout.position_mode)),
            ("capacity", self._words(_CAPACITY, 1, torch.int16), tokens),
            ("offsets", self._words(_OFFSETS, len(offsets), torch.int32), offsets),
        ]
        for name, found, value in expected:
            if bool((found != value).any()):
                raise ValueError(f"page header has another {name} than {value}")
        counts = self.counts()
        if bool(((counts < 1) | (counts > tokens)).any()):
            raise ValueError(f"page header has a count outside 1..{tokens}")
        if bool((self.positions().masked_fill(~self.live(), 0) < 0).any()):
            raise ValueError("page has a negative position")
        if not bool(torch.isfinite(self._words(RADIUS_LO_OFFSET, 4, torch.float32)).all()):
            raise ValueError("page header has a radius or scale that is not finite")
