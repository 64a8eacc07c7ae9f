# SPDX-License-Identifier: Apache-2.0
"""A vLLM block with a fixed number of bytes that its KV heads share unequally.

A block of one layer holds pages of 32 tokens. When it becomes full, the controller's allocation
gives every page of every head a tier, or drops it, so that the block's bytes suffice. A directory
at its start says the tiers; the pages follow it without gaps, and the kernels read them in place.

    | tier of every head and part, one byte each | sinks of block 0 | page | page | ... | slack |
"""

from __future__ import annotations

import torch
from torch import Tensor

from sphkv.attention.native.backend import layout_fields
from sphkv.codec.states import SphericalCodec
from sphkv.core.tiers import CODED_PAGE_MULTIPLE, TierTable, ladder
from sphkv.integrations.vllm.blocks import (
    PageKindFields,
    PagePlaces,
    SinkPages,
)
from sphkv.retention.solver import TierChoices, allocate_tiers
from sphkv.store.layout import PAGE_ALIGNMENT, PageLayout, write_pages
from sphkv.store.paging import PageRows, PositionMode

_PART_TIERS = ("k1v2", "k1.5v2", "k2v3", "k3v4", "k4v4")

PART_TOKENS = CODED_PAGE_MULTIPLE
"""Tokens of one page, the unit of the decision."""


def part_tiers(head_dim: int) -> TierTable:
    """Some tiers of the ladder, with pages of one part."""
    return ladder(head_dim, page_tokens=PART_TOKENS, names=_PART_TIERS)


class BudgetedBlock:
    """Byte layout of a block with a budget, and how a full one is written.

    Attributes:
        tokens: Tokens of a block.
        heads: KV heads that share it.
        head_dim: Elements of a key.
        content_bytes: Bytes of one token and head, on average.
        sink_tokens: Dense tokens of block 0.
        tiers: What a page can be.
    """

    def __init__(
        self, tokens: int, heads: int, head_dim: int, *, content_bytes: int, sink_tokens: int
    ) -> None:
        """Check the budget.

        Raises:
            ValueError: Block 0 could not even hold its sinks.
        """
        self.tokens, self.heads, self.head_dim = tokens, heads, head_dim
        self.content_bytes = content_bytes
        self.sink_tokens = sink_tokens
        self.sinks = SinkPages(sink_tokens, head_dim)
        self.tiers = part_tiers(head_dim)
        self._layouts = [
            PageLayout(tier_id, tier, head_dim, PositionMode.CONTIGUOUS)
            for tier_id, tier in enumerate(self.tiers)
            if tier.is_coded
        ]
        sizes = [0, *(layout.page_bytes for layout in self._layouts)]
        self._page_bytes = torch.tensor(sizes, dtype=torch.int64)
        if self.room(is_first=True) < 0:
            raise ValueError(
                f"budget_bytes is {content_bytes}: {tokens} tokens of {heads} heads do not hold "
                f"{sink_tokens} dense sinks"
            )

    @property
    def parts(self) -> int:
        """Pages of one head."""
        return self.tokens // PART_TOKENS

    @property
    def _directory_bytes(self) -> int:
        return -(-self.heads * self.parts // PAGE_ALIGNMENT) * PAGE_ALIGNMENT

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of one layer."""
        return self.heads * self.tokens * self.content_bytes

    def _first_page(self, is_first: bool) -> int:
        return self._directory_bytes + is_first * self.heads * self.sinks.num_bytes

    def room(self, *, is_first: bool) -> int:
        """Bytes for coded pages."""
        return self.block_bytes - self._first_page(is_first)

    def page_kinds(self) -> list[PageKindFields]:
        """Coded pages in order of tiers, then the dense one of the sinks."""
        coded: list[PageKindFields] = [
            (layout_fields(layout), layout.tier) for layout in self._layouts
        ]
        return [*coded, self.sinks.kind()] if self.sink_tokens else coded

    def choose(self, loss: Tensor, *, is_first: bool) -> Tensor:
        """Tiers of the pages of one block.

        Args:
            loss: ``[heads, parts, tiers]`` expected loss of every page; the dense tier last.
            is_first: Whether it is block 0, whose sinks need room.

        Returns:
            ``[heads, parts]`` int64, 0 for a dropped page.
        """
        units = loss[..., :-1].flatten(0, 1)
        choices = TierChoices(units, self._page_bytes)
        found = allocate_tiers(choices, self.room(is_first=is_first), solver="value-per-byte")
        return found.tier_id.view(self.heads, self.parts)

    def write(
        self,
        codec: SphericalCodec,
        layer: int,
        states: tuple[Tensor, Tensor],
        first_position: Tensor,
        tier_ids: Tensor,
    ) -> Tensor:
        """Encode full blocks.

        Args:
            codec: Codebooks of this process's layers and heads.
            layer: Layer of the states.
            states: Keys after RoPE and values, each ``[blocks, heads, tokens, head_dim]``.
            first_position: ``[blocks]`` int64 position of the first token of each block.
            tier_ids: ``[blocks, heads, parts]`` int64.

        Returns:
            ``[blocks, bytes]`` uint8.
        """
        blocks = tier_ids.shape[0]
        out = torch.zeros(blocks, self.block_bytes, dtype=torch.uint8)
        out[:, : self.heads * self.parts] = tier_ids.flatten(1).to(torch.uint8)
        is_first = first_position == 0
        if self.sink_tokens and bool(is_first.any()):
            dense = self.sinks.write(states[0][is_first], states[1][is_first]).flatten(1)
            start = self._directory_bytes
            out[is_first, start : start + dense.shape[1]] = dense
        starts = self._starts(tier_ids, is_first)
        for layout in self._layouts:
            unit = (tier_ids == layout.tier_id).nonzero()
            if unit.numel():
                pages = self._pages(codec, layer, layout, states, first_position, unit)
                at = starts[tuple(unit.T)][:, None] + torch.arange(layout.page_bytes)
                out[unit[:, :1], at] = pages
        return out

    def _starts(self, tier_ids: Tensor, is_first: Tensor) -> Tensor:
        """``[blocks, heads, parts]`` first byte of every page in its block."""
        size = self._page_bytes[tier_ids].flatten(1)
        start = size.cumsum(1) - size + self._first_page(False)
        start += is_first[:, None] * (self._first_page(True) - self._first_page(False))
        return start.view_as(tier_ids)

    def _pages(
        self,
        codec: SphericalCodec,
        layer: int,
        layout: PageLayout,
        states: tuple[Tensor, Tensor],
        first_position: Tensor,
        unit: Tensor,
    ) -> Tensor:
        """Pages ``[units, bytes]`` of one tier; ``unit`` is block, head and part of each."""
        block, head, part = unit.unbind(1)
        is_start = (first_position[block] == 0) & (part == 0)
        shift = torch.where(is_start, self.sink_tokens, 0)
        # the first page of a sequence begins after the sinks; what is past its count is slack
        pick = (shift[:, None] + torch.arange(PART_TOKENS)).clamp(max=PART_TOKENS - 1)
        pick = pick + part[:, None] * PART_TOKENS
        keys, values = (x[block[:, None], head[:, None], pick] for x in states)
        rows = PageRows(
            positions=first_position[block][:, None] + pick,
            counts=PART_TOKENS - shift,
            flags=torch.zeros(pick.shape, dtype=torch.bool),
        )
        encoded = codec.encode(
            layer,
            layout.tier,
            keys,
            values,
            rows.positions,
            head_ids=head,
            counts=rows.counts,
        )
        return write_pages(layout, encoded, rows)

    def locate(self, kv_cache: Tensor, blocks: Tensor, has_first: bool) -> PagePlaces:
        """Pages of full blocks, those of a head in order of tiers."""
        flat = kv_cache.view(kv_cache.shape[0], -1)
        tier_ids = flat[blocks, : self.heads * self.parts].long()
        tier_ids = tier_ids.view(-1, self.heads, self.parts)
        is_first = torch.zeros(blocks.shape, dtype=torch.bool)
        is_first[:1] = has_first
        base = kv_cache.data_ptr() + blocks * kv_cache.stride(0)
        address = base[:, None, None] + self._starts(tier_ids, is_first)
        head = torch.arange(self.heads)[None, :, None].expand_as(tier_ids)
        is_kept = tier_ids > 0
        address, kind, head = address[is_kept], tier_ids[is_kept] - 1, head[is_kept]
        if self.sink_tokens and has_first and blocks.numel():
            each = torch.arange(self.heads)
            sinks = base[0] + self._directory_bytes + each * self.sinks.num_bytes
            address = torch.cat([sinks, address])
            kind = torch.cat([torch.full_like(each, len(self._layouts)), kind])
            head = torch.cat([each, head])
        # one table of look-ups serves neighbours of one kind
        order = (head * (len(self._layouts) + 1) + kind).argsort(stable=True)
        ends = head.bincount(minlength=self.heads).cumsum(0)
        first_page = torch.cat([ends.new_zeros(1), ends])
        return PagePlaces(address[order].contiguous(), kind[order].contiguous(), first_page)
