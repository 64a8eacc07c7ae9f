# SPDX-License-Identifier: Apache-2.0
"""What the kernels read, prepared once per change: page addresses and codebooks."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sphkv.attention.request import DecodeRequest
from sphkv.codec.states import SphericalCodec
from sphkv.core.native import require_kernels
from sphkv.core.tiers import TierSpec
from sphkv.store.layout import PageLayout
from sphkv.store.sequence import PageGroup


class CodebookCache:
    """Codebooks in the kernels' form, by codec, layer and slots."""

    def __init__(self) -> None:
        self._held: WeakKeyDictionary[SphericalCodec, dict[tuple[int, int], Any]] = (
            WeakKeyDictionary()
        )

    def get(self, codec: SphericalCodec, layer: int, tier: TierSpec) -> Any:
        """The codebook of a layer at a tier, built once."""
        by_layer = self._held.setdefault(codec, {})
        key = (layer, tier.key_nibbles(codec.calibration.geometry.head_dim))
        if key not in by_layer:
            by_layer[key] = _make_codebook(codec, layer, tier)
        return by_layer[key]


def _make_codebook(codec: SphericalCodec, layer: int, tier: TierSpec) -> Any:
    book = codec.codebook(layer, tier)
    rope = codec.calibration.ropes[layer]
    radians, channels = rope.frequencies(), rope.plane_channels().contiguous()
    rotary = require_kernels().Rotary(rope.num_planes, radians.data_ptr(), channels.data_ptr())
    parts = (
        book.points.float().contiguous(),
        book.slot_plane.contiguous(),
        book.num_pairs.contiguous(),
        book.constant.float().contiguous(),
    )
    heads, slots = book.slot_plane.shape[:2]
    return require_kernels().Codebook(rotary, heads, slots, *(part.data_ptr() for part in parts))


def build_plan(request: DecodeRequest, codebooks: CodebookCache) -> Any:
    """Addresses of all pages of a request's layer, head by head, lowest tier first."""
    groups = request.store.pages(request.sequence, request.layer)
    kinds = [_make_kind(request, group.layout, codebooks) for group in groups]
    geometry = request.store.config.geometry
    addresses, kind_ids, first_page = _by_head(request, groups, geometry.num_kv_heads)
    return require_kernels().make_plan(
        geometry.num_kv_heads,
        geometry.head_dim,
        kinds,
        addresses.data_ptr(),
        kind_ids.data_ptr(),
        first_page.data_ptr(),
    )


def _by_head(
    request: DecodeRequest, groups: list[PageGroup], num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Addresses and kinds ``[pages]``, and ``[heads + 1]`` where each head begins; int64."""
    none = torch.empty(0, dtype=torch.int64)
    ids = torch.cat([none, *(group.flat_ids().cpu() for group in groups)])
    heads = torch.cat([none, *(group.head_ids().cpu() for group in groups)])
    sizes = torch.tensor([int(group.num_pages.sum()) for group in groups], dtype=torch.int64)
    kind_ids = torch.arange(len(groups)).repeat_interleave(sizes)
    order = heads.argsort(stable=True)
    addresses = request.store.allocator.addresses(ids)
    ends = heads.bincount(minlength=num_heads).cumsum(0)
    first_page = torch.cat([ends.new_zeros(1), ends])
    return addresses[order].contiguous(), kind_ids[order].contiguous(), first_page


def _make_kind(request: DecodeRequest, layout: PageLayout, codebooks: CodebookCache) -> Any:
    book = None
    if layout.tier.is_coded:
        book = codebooks.get(request.codec(), request.layer, layout.tier)
    return require_kernels().make_kind(layout_fields(layout), book)


def layout_fields(layout: PageLayout) -> list[int]:
    """Offsets in the order that ``make_kind`` of ``csrc/bindings.cpp`` reads."""
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
