# SPDX-License-Identifier: Apache-2.0
"""One vLLM block of one KV head as a coded page, with room for dense sinks behind it.

The bytes of a full block are a page exactly as ``sphkv.store.layout`` writes it, so the kernels
read vLLM's memory in place. Block 0 of a sequence keeps its first tokens out of the coded page:
they follow it as a small dense page, whose room every block reserves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from sphkv.attention.native.backend import layout_fields
from sphkv.codec.states import SphericalCodec
from sphkv.core.tiers import DENSE_BITS, RUN_TOKENS, TierSpec
from sphkv.store.layout import HEADER_BYTES, PageLayout, write_dense_pages, write_pages
from sphkv.store.paging import PageRows, PositionMode

_CODED_ID, _DENSE_ID = 1, 2
_DENSE_TIER = TierSpec("max", "dense", float(DENSE_BITS), DENSE_BITS, RUN_TOKENS)
_BYTES_PER_ELEMENT = 2


PageKindFields = tuple[list[int], TierSpec | None]
"""Offsets of a kind of page in the order the kernels read them, and its tier unless dense."""


@dataclass(frozen=True, slots=True, eq=False)
class PagePlaces:
    """Where the pages of some blocks lie, all pages of one head after the other.

    Attributes:
        addresses: ``[pages]`` int64 addresses.
        kinds: ``[pages]`` int64 indices into the block's ``page_kinds``.
        first_page: ``[heads + 1]`` int64 first page of every head, and the end.
    """

    addresses: Tensor
    kinds: Tensor
    first_page: Tensor


class Block(Protocol):
    """What the kernels must know of a block."""

    @property
    def tokens(self) -> int:
        """Tokens of a block."""

    @property
    def head_dim(self) -> int:
        """Elements of a key."""

    @property
    def content_bytes(self) -> int:
        """Bytes of one token and head."""

    def page_kinds(self) -> list[PageKindFields]:
        """Kinds of pages that occur in blocks."""

    def locate(self, kv_cache: Tensor, blocks: Tensor, has_first: bool) -> PagePlaces:
        """Pages of full blocks; ``has_first`` if they begin with block 0 of a sequence."""


class SinkPages:
    """The first tokens of a sequence as one small dense page per head.

    Attributes:
        tokens: Tokens of a page.
        head_dim: Elements of a key.
    """

    def __init__(self, tokens: int, head_dim: int) -> None:
        self.tokens = tokens
        self.head_dim = head_dim

    @property
    def _half(self) -> int:
        return self.tokens * self.head_dim * _BYTES_PER_ELEMENT

    @property
    def num_bytes(self) -> int:
        """Header, keys and values of one page; nothing without sinks."""
        return HEADER_BYTES + 2 * self._half if self.tokens else 0

    def kind(self) -> PageKindFields:
        """The page as the kernels read it."""
        end, values = self.num_bytes, HEADER_BYTES + self._half
        head = [RUN_TOKENS, HEADER_BYTES, values, values, values, end]
        return [*head, DENSE_BITS, end, int(PositionMode.CONTIGUOUS)], None

    def write(self, keys: Tensor, values: Tensor) -> Tensor:
        """Pages ``[blocks, heads, bytes]`` of states ``[blocks, heads, tokens, head_dim]``."""
        blocks, heads = keys.shape[:2]
        layout = PageLayout(_DENSE_ID, _DENSE_TIER, self.head_dim, PositionMode.CONTIGUOUS)
        rows = PageRows(
            positions=torch.arange(RUN_TOKENS).expand(blocks * heads, -1),
            counts=torch.full((blocks * heads,), self.tokens),
            flags=torch.zeros(blocks * heads, RUN_TOKENS, dtype=torch.bool),
        )
        states = [part[:, :, :RUN_TOKENS].flatten(0, 1) for part in (keys, values)]
        pages = write_dense_pages(layout, states[0], states[1], rows)
        parts = [
            pages[:, :HEADER_BYTES],
            pages[:, layout.key_offset : layout.key_offset + self._half],
            pages[:, layout.value_offset : layout.value_offset + self._half],
        ]
        return torch.cat(parts, 1).view(blocks, heads, -1)


class CodedBlock:
    """Byte layout of a block and how a full block is written.

    Attributes:
        layout: Page of the coded states.
        sink_tokens: Dense tokens of block 0.
    """

    def __init__(self, tier: TierSpec, head_dim: int, sink_tokens: int) -> None:
        self.layout = PageLayout(_CODED_ID, tier, head_dim, PositionMode.CONTIGUOUS)
        self.sink_tokens = sink_tokens
        self.sinks = SinkPages(sink_tokens, head_dim)

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return self.layout.page_tokens

    @property
    def head_dim(self) -> int:
        """Elements of a key."""
        return self.layout.head_dim

    @cached_property
    def content_bytes(self) -> int:
        """Bytes of one token and head in vLLM's page, the block's overhead spread over it."""
        return -(-(self.layout.page_bytes + self.sinks.num_bytes) // self.tokens)

    def page_kinds(self) -> list[PageKindFields]:
        """The coded page, then the dense one of the sinks."""
        tier = self.layout.tier
        coded: PageKindFields = (layout_fields(self.layout), tier if tier.is_coded else None)
        return [coded, self.sinks.kind()] if self.sink_tokens else [coded]

    def locate(self, kv_cache: Tensor, blocks: Tensor, has_first: bool) -> PagePlaces:
        """One page per head and block; the sinks of block 0 lie behind its page."""
        heads = kv_cache.shape[1]
        head = torch.arange(heads)[:, None] * kv_cache.stride(1)
        pages = kv_cache.data_ptr() + head + blocks[None] * kv_cache.stride(0)  # [heads, blocks]
        kinds = torch.zeros_like(pages)
        if self.sink_tokens and has_first and blocks.numel():
            pages = torch.cat([pages[:, :1] + self.layout.page_bytes, pages], 1)
            kinds = torch.cat([torch.ones_like(kinds[:, :1]), kinds], 1)
        first_page = torch.arange(heads + 1) * pages.shape[1]
        return PagePlaces(pages.contiguous(), kinds.contiguous(), first_page)

    def write(
        self,
        codec: SphericalCodec,
        layer: int,
        states: tuple[Tensor, Tensor],
        first_position: Tensor,
    ) -> Tensor:
        """Encode full blocks.

        Args:
            codec: Codebooks of this process's layers and heads.
            layer: Layer of the states.
            states: Keys after RoPE and values, each ``[blocks, heads, tokens, head_dim]``.
            first_position: ``[blocks]`` int64 position of the first token of each block.

        Returns:
            ``[blocks, heads, bytes]`` uint8.
        """
        blocks, heads, tokens, head_dim = states[0].shape
        is_first = first_position == 0
        shift = torch.where(is_first, self.sink_tokens, 0)
        # the coded page of block 0 begins after the sinks; what is past its count is slack
        pick = (shift[:, None] + torch.arange(tokens)).clamp(max=tokens - 1)
        index = pick[:, None, :, None].expand(-1, heads, -1, head_dim)
        keys, values = (part.gather(2, index).flatten(0, 1) for part in states)
        rows = PageRows(
            positions=(first_position[:, None] + pick).repeat_interleave(heads, 0),
            counts=(tokens - shift).repeat_interleave(heads),
            flags=torch.zeros(blocks * heads, tokens, dtype=torch.bool),
        )
        if self.layout.tier.is_coded:
            encoded = codec.encode(
                layer,
                self.layout.tier,
                keys,
                values,
                rows.positions,
                head_ids=torch.arange(heads).repeat(blocks),
                counts=rows.counts,
            )
            pages = write_pages(self.layout, encoded, rows)
        else:
            pages = write_dense_pages(self.layout, keys, values, rows)
        out = torch.zeros(blocks * heads, self.content_bytes * tokens, dtype=torch.uint8)
        out[:, : self.layout.page_bytes] = pages
        out = out.view(blocks, heads, -1)
        if self.sink_tokens and bool(is_first.any()):
            dense = self.sinks.write(states[0][is_first], states[1][is_first])
            start = self.layout.page_bytes
            out[is_first, :, start : start + self.sinks.num_bytes] = dense
        return out
