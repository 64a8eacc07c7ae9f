# SPDX-License-Identifier: Apache-2.0
"""One vLLM block of one KV head as a coded page, with room for dense sinks behind it.

The bytes of a full block are a page exactly as ``sphkv.store.layout`` writes it, so the kernels
read vLLM's memory in place. Block 0 of a sequence keeps its first tokens out of the coded page:
they follow it as a small dense page, whose room every block reserves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sphkv.codec.states import SphericalCodec
from sphkv.core.tiers import DENSE_BITS, RUN_TOKENS, TierSpec
from sphkv.store.layout import HEADER_BYTES, PageLayout, write_dense_pages, write_pages
from sphkv.store.paging import PageRows, PositionMode

_CODED_ID, _DENSE_ID = 1, 2
_DENSE_TIER = TierSpec("max", "dense", float(DENSE_BITS), DENSE_BITS, RUN_TOKENS)
_BYTES_PER_ELEMENT = 2


@dataclass(frozen=True, slots=True)
class SinkPage:
    """Where the dense page of the first tokens lies inside a block.

    Attributes:
        offset: First byte, from the start of the block.
        value_offset: First byte of the values, from the start of the dense page.
        num_bytes: Header, keys and values.
    """

    offset: int
    value_offset: int
    num_bytes: int


class CodedBlock:
    """Byte layout of a block and how a full block is written.

    Attributes:
        layout: Page of the coded states.
        sink_tokens: Dense tokens of block 0.
    """

    def __init__(self, tier: TierSpec, head_dim: int, sink_tokens: int) -> None:
        self.layout = PageLayout(_CODED_ID, tier, head_dim, PositionMode.CONTIGUOUS)
        self.sink_tokens = sink_tokens

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return self.layout.page_tokens

    @cached_property
    def sinks(self) -> SinkPage | None:
        """The dense page, or None without sinks."""
        if self.sink_tokens == 0:
            return None
        half = self.sink_tokens * self.layout.head_dim * _BYTES_PER_ELEMENT
        return SinkPage(self.layout.page_bytes, HEADER_BYTES + half, HEADER_BYTES + 2 * half)

    @property
    def content_bytes(self) -> int:
        """Bytes of one token and head in vLLM's page, the block's overhead spread over it."""
        total = self.layout.page_bytes + (self.sinks.num_bytes if self.sinks else 0)
        return -(-total // self.tokens)

    def coded_fields(self) -> list[int]:
        """Offsets of the coded page in the order the kernels read them."""
        layout = self.layout
        return [
            layout.page_tokens,
            layout.key_offset,
            layout.radius_offset,
            layout.scale_offset,
            layout.value_offset,
            layout.position_offset,
            layout.tier.value_bits,
            layout.page_bytes,
            int(layout.position_mode),
        ]

    def sink_fields(self) -> list[int]:
        """Offsets of the dense page in the order the kernels read them."""
        if self.sinks is None:
            raise ValueError("blocks without sinks have no dense page")
        end, values = self.sinks.num_bytes, self.sinks.value_offset
        head = [RUN_TOKENS, HEADER_BYTES, values, values, values, end]
        return [*head, DENSE_BITS, end, int(PositionMode.CONTIGUOUS)]

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
        encoded = codec.encode(
            layer,
            self.layout.tier,
            keys,
            values,
            rows.positions,
            head_ids=torch.arange(heads).repeat(blocks),
            counts=rows.counts,
        )
        out = torch.zeros(blocks * heads, self.content_bytes * tokens, dtype=torch.uint8)
        out[:, : self.layout.page_bytes] = write_pages(self.layout, encoded, rows)
        out = out.view(blocks, heads, -1)
        if self.sinks is not None and bool(is_first.any()):
            dense = self._sink_bytes(states[0][is_first], states[1][is_first])
            out[is_first, :, self.sinks.offset : self.sinks.offset + self.sinks.num_bytes] = dense
        return out

    def _sink_bytes(self, keys: Tensor, values: Tensor) -> Tensor:
        """Dense pages ``[blocks, heads, bytes]`` of the first tokens of block 0."""
        blocks, heads = keys.shape[:2]
        layout = PageLayout(_DENSE_ID, _DENSE_TIER, self.layout.head_dim, PositionMode.CONTIGUOUS)
        rows = PageRows(
            positions=torch.arange(RUN_TOKENS).expand(blocks * heads, -1),
            counts=torch.full((blocks * heads,), self.sink_tokens),
            flags=torch.zeros(blocks * heads, RUN_TOKENS, dtype=torch.bool),
        )
        states = [part[:, :, :RUN_TOKENS].flatten(0, 1) for part in (keys, values)]
        pages = write_dense_pages(layout, states[0], states[1], rows)
        size = self.sink_tokens * layout.head_dim * _BYTES_PER_ELEMENT
        parts = [
            pages[:, :HEADER_BYTES],
            pages[:, layout.key_offset : layout.key_offset + size],
            pages[:, layout.value_offset : layout.value_offset + size],
        ]
        return torch.cat(parts, 1).view(blocks, heads, -1)
