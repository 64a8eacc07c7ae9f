# SPDX-License-Identifier: Apache-2.0
"""Runs of coded pages back to bfloat16, for pages that are coded again at a lower tier.

One launch decodes the pages of a layout, of all layers, and leaves every run of 16 states where
the page it belongs to is encoded from. Attention never does this.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from sphkv.attention.triton.coded import centred_values
from sphkv.attention.triton.pieces import (
    RADIUS_LO,
    RADIUS_STEP,
    RUN_TOKENS,
    SCALE_LO,
    SCALE_STEP,
    read_float,
    turn_angle,
)
from sphkv.attention.triton.rebuild import fragment_terms, plane_slots, value_fields
from sphkv.attention.triton.tables import turn_steps
from sphkv.codec.calibration import Calibration
from sphkv.codec.codebook import SLOT_LEVELS, AngleCodebook
from sphkv.codec.hadamard import rotation_matrix
from sphkv.codec.states import SphericalCodec
from sphkv.core.tiers import RUN_TOKENS as _RUN_TOKENS
from sphkv.store.layout import PageLayout
from sphkv.store.order import PageRuns
from sphkv.store.paging import PositionMode

_LEVELS = tl.constexpr(SLOT_LEVELS)
_MAX_HEAD_DIM = 128
# Packed codes of token-transposed pages are multiples of so many tokens.
_LEAST_TOKENS = 32


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRunsTables:
    """What the kernel reads besides pages, of the heads of all layers.

    Attributes:
        terms: ``[heads, planes, terms, 2]`` int32: where the codes of a slot begin, and bytes from
            one group of tokens to the next.
        points: ``[heads, planes, terms, 16, 2]`` float32; zero for terms that a plane lacks.
        constants: ``[heads, planes, 2]`` float32.
        turns: ``[layers, planes]`` int64, see ``turn_steps``.
        offsets: ``[layers, 16, planes, 2]`` float32 cosine and sine of the first positions.
        channels: ``[planes, 2]`` int32.
        fields: See ``RebuildTables.value_bits``; empty if pages are token-transposed.
        strides: See ``RebuildTables.value_strides``.
        rotation: ``[head_dim, head_dim]`` float16 signs of the inverse rotation.
    """

    terms: Tensor
    points: Tensor
    constants: Tensor
    turns: Tensor
    offsets: Tensor
    channels: Tensor
    fields: Tensor
    strides: Tensor
    rotation: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(getattr(self, each.name).nbytes for each in fields(self))


def _build(
    codec: SphericalCodec, layout: PageLayout, is_plain: bool, device: torch.device
) -> DecodeRunsTables:
    """Tables of all layers of a codec."""
    calibration = codec.calibration
    layers = range(calibration.geometry.num_layers)
    books = [codec.codebook(layer, layout.tier, device).to("cpu") for layer in layers]
    joined = (torch.cat([getattr(book, name) for book in books]) for name in books[0].__slots__)
    book = AngleCodebook(*joined)
    slots, points = plane_slots(book)
    none = torch.zeros(0, dtype=torch.int32)
    if is_plain:
        # a slot has a byte for every two tokens, which follow one another
        first = slots * (layout.page_tokens // 2)
        terms, value_bits, strides = torch.stack([first, torch.ones_like(first)], -1), none, none
    else:
        terms = fragment_terms(slots, book.num_slots)
        value_bits, strides = value_fields(layout)
    phases = torch.stack([rope.phases(torch.arange(_RUN_TOKENS)) for rope in calibration.ropes])
    parts = (
        terms.to(torch.int32),
        points,
        book.constant.float(),
        torch.stack([turn_steps(rope) for rope in calibration.ropes]),
        torch.stack([phases.double().cos(), phases.double().sin()], -1).float(),
        calibration.ropes[0].plane_channels().to(torch.int32),
        value_bits,
        strides,
        rotation_matrix(layout.head_dim).sign().to(torch.float16),
    )
    return DecodeRunsTables(*(part.contiguous().to(device) for part in parts))


@triton.jit
def _fragment_values(
    page, token, fields_ptr, strides_ptr,
    HEAD_DIM: tl.constexpr, BITS: tl.constexpr, FIELDS: tl.constexpr, VALUE_OFFSET: tl.constexpr,
):  # fmt: skip
    """Values ``[16, HEAD_DIM]`` in fragment order: codes less their midpoint, or bfloat16."""
    dim = tl.arange(0, HEAD_DIM)
    tile, upper = token // 16, token % 16 // 8
    lane, odd = token % 8 // 2, token % 2
    stream = page + VALUE_OFFSET + tile * (HEAD_DIM * BITS * 2)
    code = tl.zeros([RUN_TOKENS, HEAD_DIM], tl.int32)
    for field in tl.static_range(FIELDS):
        at = (dim[None, :] * 2 + upper[:, None]) * FIELDS + field
        place = tl.load(fields_ptr + at * 2) + lane[:, None] * tl.load(strides_ptr + at)
        where = stream[:, None] + place + 2 * odd[:, None]
        if BITS == 16:
            code = tl.load(where.to(tl.pointer_type(tl.uint16))).to(tl.int32)
        else:
            part = tl.load(where).to(tl.int32) >> tl.load(fields_ptr + at * 2 + 1)
            if FIELDS == 1:
                code += part & ((1 << BITS) - 1)
            else:
                code += (part & 1) << field
    if BITS == 16:
        return (code << 16).to(tl.float32, bitcast=True)
    return code.to(tl.float32) - ((1 << BITS) - 1) * 0.5


@triton.jit
def _coded_directions(
    page, head, token, terms_ptr, points_ptr, constants_ptr,
    PLANES: tl.constexpr, SLOTS: tl.constexpr, TERMS: tl.constexpr, PAGE: tl.constexpr,
    KEY_OFFSET: tl.constexpr, IS_PLAIN: tl.constexpr,
):  # fmt: skip
    """Sums of points ``[16, PLANES]`` before rotation, x and y."""
    if IS_PLAIN:
        group, nibble = token % (PAGE // 2), token // (PAGE // 2)
        codes = page + KEY_OFFSET + token * 0
    else:
        group, nibble = token % 8, token % 16 // 8
        codes = page + KEY_OFFSET + token // 16 * (SLOTS * 8)
    table = head * PLANES + tl.arange(0, PLANES)
    x = tl.zeros([RUN_TOKENS, PLANES], tl.float32)
    y = x + tl.load(constants_ptr + table * 2 + 1)[None, :]
    x += tl.load(constants_ptr + table * 2)[None, :]
    for term in tl.static_range(TERMS):
        at = table * TERMS + term
        first = tl.load(terms_ptr + at * 2)
        step = tl.load(terms_ptr + at * 2 + 1)
        byte = tl.load(codes[:, None] + first[None, :] + group[:, None] * step[None, :])
        code = (byte.to(tl.int32) >> (4 * nibble)[:, None]) & 15
        point = points_ptr + (at[None, :] * _LEVELS + code) * 2
        x += tl.load(point)
        y += tl.load(point + 1)
    return x, y


# one build for lists of any length: where they begin depends on how many pages there are
@triton.jit(do_not_specialize_on_alignment=["address_ptr", "head_ptr", "start_ptr", "place_ptr"])
def _decode_runs_kernel(
    address_ptr,  # [pages] i64
    head_ptr,  # [pages] i64
    start_ptr,  # [pages, runs] i64 first positions
    place_ptr,  # [pages, runs] i64 places of runs, below 0 for none
    keys_ptr,  # [places * 16, HEAD_DIM] bf16
    values_ptr,
    terms_ptr,
    points_ptr,
    constants_ptr,
    turns_ptr,
    offsets_ptr,
    channels_ptr,
    fields_ptr,
    strides_ptr,
    rotation_ptr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SLOTS: tl.constexpr,
    TERMS: tl.constexpr,
    BITS: tl.constexpr,
    FIELDS: tl.constexpr,
    KEY_OFFSET: tl.constexpr,
    RADIUS_OFFSET: tl.constexpr,
    SCALE_OFFSET: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    IS_PLAIN: tl.constexpr,
):
    PLANES: tl.constexpr = HEAD_DIM // 2
    page_id, part = tl.program_id(0), tl.program_id(1)
    run = page_id * (PAGE // RUN_TOKENS) + part
    place = tl.load(place_ptr + run)
    if place < 0:
        return
    page = tl.load(address_ptr + page_id).to(tl.pointer_type(tl.uint8))
    head = tl.load(head_ptr + page_id)
    inside = tl.arange(0, RUN_TOKENS)
    token = part * RUN_TOKENS + inside
    row = place * RUN_TOKENS + inside
    if IS_PLAIN:
        radius_at, scale_at = RADIUS_OFFSET + token, SCALE_OFFSET + token
    else:
        # codes of radii and scales of keys g and g + 8 of a tile are side by side
        WIDTH: tl.constexpr = 2 if BITS == 16 else 4
        radius_at = RADIUS_OFFSET + (token // 16 * 8 + token % 8) * WIDTH + token % 16 // 8
        scale_at = radius_at + 2
    code = tl.load(page + radius_at).to(tl.float32)
    radius = read_float(page, RADIUS_LO) + read_float(page, RADIUS_STEP) * code
    x, y = _coded_directions(
        page, head, token, terms_ptr, points_ptr, constants_ptr,
        PLANES, SLOTS, TERMS, PAGE, KEY_OFFSET, IS_PLAIN,
    )  # fmt: skip
    plane = tl.arange(0, PLANES)
    layer = head // HEADS * PLANES
    # all states of a run are turned by its first position, and then by their places
    angle = turn_angle(tl.load(turns_ptr + layer + plane), tl.load(start_ptr + run))
    cos, sin = tl.cos(angle)[None, :], tl.sin(angle)[None, :]
    offset = offsets_ptr + ((layer * RUN_TOKENS + plane)[None, :] + inside[:, None] * PLANES) * 2
    more_cos, more_sin = tl.load(offset) * radius[:, None], tl.load(offset + 1) * radius[:, None]
    x, y = x * cos - y * sin, x * sin + y * cos
    to = keys_ptr + row[:, None] * HEAD_DIM
    first = tl.load(channels_ptr + plane * 2)[None, :]
    second = tl.load(channels_ptr + plane * 2 + 1)[None, :]
    tl.store(to + first, (x * more_cos - y * more_sin).to(tl.bfloat16))
    tl.store(to + second, (x * more_sin + y * more_cos).to(tl.bfloat16))
    dim = tl.arange(0, HEAD_DIM)
    if IS_PLAIN:
        value = centred_values(page, token, inside >= 0, dim, HEAD_DIM, PAGE, VALUE_OFFSET, BITS)
    else:
        value = _fragment_values(
            page, token, fields_ptr, strides_ptr, HEAD_DIM, BITS, FIELDS, VALUE_OFFSET
        )
    if BITS < 16:
        code = tl.load(page + scale_at).to(tl.float32)
        scale = read_float(page, SCALE_LO) + read_float(page, SCALE_STEP) * code
        signs = tl.load(rotation_ptr + dim[:, None] * HEAD_DIM + dim[None, :])
        value = tl.dot(value.to(tl.float16), signs) * (scale * (HEAD_DIM**-0.5))[:, None]
    to = values_ptr + row[:, None] * HEAD_DIM + dim[None, :]
    tl.store(to, value.to(tl.bfloat16))


class RunDecoder:
    """Decodes runs of coded pages in one launch per layout.

    Args:
        is_plain: Whether slabs keep pages as ``store/layout.py`` has them, else in fragment order.
    """

    def __init__(self, *, is_plain: bool) -> None:
        self._is_plain = is_plain
        self._held: WeakKeyDictionary[
            Calibration, dict[tuple[int, int, int, str], DecodeRunsTables]
        ] = WeakKeyDictionary()

    @staticmethod
    def takes(layout: PageLayout) -> bool:
        """Whether the kernel decodes such pages."""
        head_dim, tokens = layout.head_dim, layout.page_tokens
        return (
            layout.tier.is_coded
            and layout.position_mode is not PositionMode.TOKENS
            and head_dim & (head_dim - 1) == 0
            and 32 <= head_dim <= _MAX_HEAD_DIM
            and tokens % _LEAST_TOKENS == 0
        )

    def table_bytes(self, codec: SphericalCodec) -> int:
        """Bytes of the tables made of a codec's calibration."""
        return sum(each.num_bytes for each in self._held.get(codec.calibration, {}).values())

    def _table(
        self, codec: SphericalCodec, layout: PageLayout, device: torch.device
    ) -> DecodeRunsTables:
        held = self._held.setdefault(codec.calibration, {})
        tier = layout.tier
        key = (layout.num_nibbles, tier.value_bits, layout.page_tokens, str(device))
        if key not in held:
            held[key] = _build(codec, layout, self._is_plain, device)
        return held[key]

    def decode(
        self,
        layout: PageLayout,
        codec: SphericalCodec,
        pages: PageRuns,
        states: tuple[Tensor, Tensor],
    ) -> None:
        """Write the states of runs to their places; see ``PageCodec.decode_runs``."""
        tables = self._table(codec, layout, states[0].device)
        grid = (len(pages.addresses), layout.page_tokens // _RUN_TOKENS)
        _decode_runs_kernel[grid](
            pages.addresses,
            pages.heads,
            pages.starts,
            pages.places,
            *states,
            *(getattr(tables, each.name) for each in fields(tables)),
            HEADS=codec.calibration.geometry.num_kv_heads,
            HEAD_DIM=layout.head_dim,
            PAGE=layout.page_tokens,
            SLOTS=layout.num_nibbles,
            TERMS=tables.terms.shape[2],
            BITS=layout.tier.value_bits,
            FIELDS=1 if self._is_plain else tables.fields.shape[2],
            KEY_OFFSET=layout.key_offset,
            RADIUS_OFFSET=layout.radius_offset,
            SCALE_OFFSET=layout.scale_offset,
            VALUE_OFFSET=layout.value_offset,
            IS_PLAIN=self._is_plain,
            num_warps=4,
        )
