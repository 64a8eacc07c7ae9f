# SPDX-License-Identifier: Apache-2.0
"""Random pages in fragment order and the right answer in float64, for checks and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.attention.cuda.fragments import unpack_gains, unpack_keys, unpack_values
from sphkv.attention.cuda.geometry import PAGE_TOKENS, TILE_KEYS
from sphkv.attention.partial import PartialAttention
from sphkv.attention.request import AttentionOptions
from sphkv.codec.codebook import CELL_BITS, AngleCodebook
from sphkv.codec.hadamard import unrotate
from sphkv.codec.slots import allocate_plane_bits, most_pairs, order_slots
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import TierSpec
from sphkv.store.layout import (
    COUNT_OFFSET,
    PAGE_VERSION,
    POSITION_BASE_OFFSET,
    RADIUS_LO_OFFSET,
    RADIUS_STEP_OFFSET,
    SCALE_LO_OFFSET,
    SCALE_STEP_OFFSET,
    PageLayout,
)
from sphkv.store.paging import PositionMode

# Standard deviation of log2 of a plane's energy; gives about the cell counts that real models get.
_ENERGY_SPREAD = 1.8
_RADIUS = (10.0, 0.08)
_SCALE = (0.02, 0.0004)


def synthetic_codebook(
    heads: int, planes: int, slots: int, *, seed: int, device: torch.device | str
) -> AngleCodebook:
    """A codebook with random points and water-filled bits, different in every head."""
    generator = torch.Generator().manual_seed(seed)
    log_energy = _ENERGY_SPREAD * torch.randn(heads, planes, generator=generator)
    bits = torch.tensor(CELL_BITS, dtype=torch.float32)
    plane_bits = allocate_plane_bits(
        torch.exp2(log_energy[..., None] - bits), slots, max_pairs=most_pairs(planes, slots)
    )
    amplitude = torch.exp2(log_energy / 2)
    amplitude = amplitude / (2 * amplitude.square().sum(1, keepdim=True)).sqrt()
    slot_plane = torch.zeros(heads, slots, 2, dtype=torch.int64)
    points = torch.zeros(heads, slots, 2, 16, 2)
    noise = torch.randn(heads, slots, 2, 16, 2, generator=generator)
    num_pairs = (plane_bits % 4 > 0).sum(1) // 2
    code = torch.arange(16)
    for head in range(heads):
        single, paired = order_slots(plane_bits[head])
        for at, plane in enumerate(single):
            stage = single[:at].count(plane)
            slot_plane[head, at] = plane
            points[head, at, 0] = noise[head, at, 0] * amplitude[head, plane] / 4**stage
        for at, pair in enumerate(paired, len(single)):
            slot_plane[head, at] = torch.tensor(pair)
            for half, index in enumerate((code % 4, code // 4)):
                scale = amplitude[head, pair[half]] / 4 ** single.count(pair[half])
                points[head, at, half] = noise[head, at, half, index] * scale
    mean = torch.randn(heads, planes, 2, generator=generator) * amplitude[..., None]
    constant = torch.where(plane_bits[..., None] == 0, mean, torch.zeros(()))
    root = torch.eye(2).expand(heads, planes, 2, 2).contiguous()
    return AngleCodebook(plane_bits, num_pairs, slot_plane, points, constant, root).to(device)


def tier_layout(
    head_dim: int,
    nibbles: int,
    value_bits: int,
    mode: PositionMode = PositionMode.CONTIGUOUS,
    page_tokens: int = PAGE_TOKENS,
) -> PageLayout:
    """Layout of a coded tier with so many slots."""
    tier = TierSpec("case", "coded", 4 * nibbles / head_dim, value_bits, page_tokens)
    return PageLayout(1, tier, head_dim, mode)


def random_pages(layout: PageLayout, num_pages: int, *, device: torch.device | str) -> Tensor:
    """Pages of random codes, full, at position 0: ``[num_pages, page_bytes]`` uint8."""
    pages = torch.randint(0, 256, (num_pages, layout.page_bytes), dtype=torch.uint8, device=device)
    if layout.tier.value_bits == 16:
        size = (num_pages, layout.page_tokens * layout.head_dim)
        values = 0.1 * torch.randn(size, device=device)
        pages[:, layout.value_offset : layout.position_offset] = values.bfloat16().view(torch.uint8)
    header = torch.zeros(num_pages, 64, dtype=torch.uint8, device=device)
    header[:, 0], header[:, 1], header[:, 2] = PAGE_VERSION, layout.tier_id, layout.position_mode
    affine = torch.tensor([*_RADIUS, *_SCALE], device=device).expand(num_pages, -1)
    header[:, RADIUS_LO_OFFSET : SCALE_STEP_OFFSET + 4] = affine.contiguous().view(torch.uint8)
    pages[:, :64] = header
    set_counts(pages, torch.full((num_pages,), layout.page_tokens, device=device))
    return pages


def set_counts(pages: Tensor, counts: Tensor) -> None:
    """Write the number of live states of each page."""
    pages[:, COUNT_OFFSET : COUNT_OFFSET + 2] = counts.to(torch.int16)[:, None].view(torch.uint8)


def set_bases(pages: Tensor, layout: PageLayout, bases: Tensor) -> None:
    """Write positions: ``[pages]`` of contiguous pages, ``[pages, runs]``, or of each token."""
    is_contiguous = layout.position_mode is PositionMode.CONTIGUOUS
    first = bases if is_contiguous else bases[:, 0]
    pages[:, POSITION_BASE_OFFSET : POSITION_BASE_OFFSET + 4] = (
        first.to(torch.int32)[:, None].contiguous().view(torch.uint8)
    )
    if not is_contiguous:
        words = bases.to(torch.int32).contiguous().view(torch.uint8)
        pages[:, layout.position_offset : layout.position_offset + words.shape[1]] = words


def _floats(pages: Tensor, offset: int) -> Tensor:
    return pages[:, offset : offset + 4].contiguous().view(torch.float32).double()


def _positions(pages: Tensor, layout: PageLayout) -> Tensor:
    """``[pages, tokens]`` int64."""
    index = torch.arange(layout.page_tokens, device=pages.device)
    if layout.position_mode is PositionMode.CONTIGUOUS:
        base = (
            pages[:, POSITION_BASE_OFFSET : POSITION_BASE_OFFSET + 4]
            .contiguous()
            .view(torch.int32)
            .long()
        )
        return base + index
    size = 4 * layout.num_position_words
    words = pages[:, layout.position_offset : layout.position_offset + size]
    stored = words.contiguous().view(torch.int32).long()
    if layout.position_mode is PositionMode.TOKENS:
        return stored
    return stored[:, index // TILE_KEYS] + index % TILE_KEYS


@dataclass(frozen=True, slots=True, eq=False)
class Oracle:
    """Attention of one head in float64, straight from the definition.

    Attributes:
        codebook: Slots of all heads.
        rope: Rotary embedding.
        layout: Layout of the pages.
        dtype: Precision of the arithmetic; float32 gives the reference's own error.
    """

    codebook: AngleCodebook
    rope: RopeSpec
    layout: PageLayout
    dtype: torch.dtype = torch.float64

    def _logits(self, query: Tensor, pages: Tensor, head: int) -> Tensor:
        """``[queries, pages * tokens]`` without soft-cap or mask, scale left out."""
        layout, book = self.layout, self.codebook
        stream = pages[:, layout.key_offset : layout.radius_offset]
        codes = unpack_keys(stream, tokens=layout.page_tokens).long()
        codes = codes.transpose(0, 1).flatten(1)  # [slots, tokens]
        z = book.constant[head].to(self.dtype)[:, None].expand(-1, codes.shape[1], -1).clone()
        slot = torch.arange(codes.shape[0], device=codes.device)[:, None]
        for half in range(2):
            picked = book.points[head, :, half].to(self.dtype)[slot, codes]
            z.index_add_(0, book.slot_plane[head, :, half], picked)
        positions = _positions(pages, layout).flatten()
        phase = (self.rope.frequencies(pages.device)[:, None] * positions.double()).remainder(
            2 * torch.pi
        )
        turned = torch.view_as_complex(z) * torch.polar(torch.ones_like(phase), phase).to(
            torch.complex128 if self.dtype == torch.float64 else torch.complex64
        )
        planes = torch.view_as_complex(self.rope.to_planes(query.to(self.dtype)).contiguous())
        gains = self._gains(pages)
        radius = (
            _floats(pages, RADIUS_LO_OFFSET)
            + _floats(pages, RADIUS_STEP_OFFSET) * gains[:, 0].double()
        ).flatten()
        return (planes.conj() @ turned).real * radius.to(self.dtype)

    def largest_logit(
        self, query: Tensor, pages: Tensor, head: int, options: AttentionOptions
    ) -> float:
        """Largest logit of queries ``[queries, head_dim]``, without soft-cap or mask."""
        return float(self._logits(query, pages, head).abs().amax()) * options.scale

    def _values(self, pages: Tensor) -> Tensor:
        """``[pages * tokens, head_dim]``, rotated where coded."""
        layout, bits = self.layout, self.layout.tier.value_bits
        stream = pages[:, layout.value_offset : layout.position_offset]
        codes = unpack_values(
            stream, bits=bits, head_dim=layout.head_dim, tokens=layout.page_tokens
        ).to(self.dtype)
        if bits == 16:
            return codes.flatten(0, 1)
        gains = self._gains(pages)
        scale = (
            _floats(pages, SCALE_LO_OFFSET)
            + _floats(pages, SCALE_STEP_OFFSET) * gains[:, 1].double()
        ).to(self.dtype)
        return ((codes - ((1 << bits) - 1) / 2) * scale[..., None]).flatten(0, 1)

    def _gains(self, pages: Tensor) -> Tensor:
        layout = self.layout
        stream = pages[:, layout.radius_offset : layout.value_offset]
        return unpack_gains(stream, tokens=layout.page_tokens)

    def _nothing(self, query: Tensor, sinks: Tensor | None) -> PartialAttention:
        empty = query.new_full(query.shape[:1], -torch.inf, dtype=self.dtype)
        lse = empty if sinks is None else sinks.to(self.dtype)
        return PartialAttention(torch.zeros_like(query, dtype=self.dtype), lse)

    def attend(
        self,
        query: Tensor,
        pages: Tensor,
        head: int,
        options: AttentionOptions,
        *,
        query_position: int | None = None,
        sinks: Tensor | None = None,
    ) -> PartialAttention:
        """Output ``[queries, head_dim]`` and log-sum-exp of ``query [queries, head_dim]``."""
        if len(pages) == 0:
            return self._nothing(query, sinks)
        logits = self._logits(query, pages, head) * options.scale
        if options.softcap is not None:
            logits = options.softcap * torch.tanh(logits / options.softcap)
        counts = pages[:, COUNT_OFFSET : COUNT_OFFSET + 2].contiguous().view(torch.int16).long()
        index = torch.arange(self.layout.page_tokens, device=pages.device)
        hidden = index >= counts
        if options.window is not None and query_position is not None:
            distance = query_position - _positions(pages, self.layout)
            hidden = hidden | (distance < 0) | (distance >= options.window)
        logits = logits.masked_fill(hidden.flatten(), -torch.inf)
        if sinks is not None:
            logits = torch.cat([logits, sinks.to(self.dtype)[:, None]], 1)
        lse = torch.logsumexp(logits, 1)
        safe = torch.where(torch.isneginf(lse), 0.0, lse)
        weight = (logits - safe[:, None]).exp()[:, : hidden.numel()]
        output = weight @ self._values(pages)
        return PartialAttention(
            output if self.layout.tier.value_bits == 16 else unrotate(output), lse
        )
