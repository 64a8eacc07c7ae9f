# SPDX-License-Identifier: Apache-2.0
"""What the kernels read, prepared once per change: page addresses and codebooks."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sphkv.attention.request import spherical_codec
from sphkv.codec.states import SphericalCodec
from sphkv.core.native import require_kernels
from sphkv.core.tiers import TierSpec
from sphkv.store.layout import PageLayout
from sphkv.store.sequence import PageGroup
from sphkv.store.store import PageStore


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

    def nbytes(self, codec: SphericalCodec) -> int:
        """Bytes of all codebooks of a codec, with the phases of their rotary embeddings."""
        return sum(int(book.nbytes) for book in self._held.get(codec, {}).values())


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


def build_plan(store: PageStore, sequence: int, layer: int, codebooks: CodebookCache) -> Any:
    """Addresses of all pages of a layer, head by head, lowest tier first."""
    groups = store.pages(sequence, layer)
    kinds = []
    for group in groups:
        tier, book = group.layout.tier, None
        if tier.is_coded:
            book = codebooks.get(spherical_codec(store, sequence), layer, tier)
        kinds.append(require_kernels().make_kind(layout_fields(group.layout), book))
    geometry = store.config.geometry
    addresses, kind_ids, first_page = _by_head(store, groups, geometry.num_kv_heads)
    return require_kernels().make_plan(
        geometry.num_kv_heads,
        geometry.head_dim,
        kinds,
        addresses.data_ptr(),
        kind_ids.data_ptr(),
        first_page.data_ptr(),
    )


def _by_head(
    store: PageStore, groups: list[PageGroup], num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Addresses and kinds ``[pages]``, and ``[heads + 1]`` where each head begins; int64."""
    none = torch.zeros(0, dtype=torch.int64)
    ids = torch.cat([none, *(group.flat_ids() for group in groups)])
    heads = torch.cat([none, *(group.head_ids() for group in groups)])
    sizes = torch.tensor([int(group.num_pages.sum()) for group in groups], dtype=torch.int64)
    kind_ids = torch.arange(len(groups)).repeat_interleave(sizes)
    order = heads.argsort(stable=True)
    addresses = store.allocator.addresses(ids)
    ends = heads.bincount(minlength=num_heads).cumsum(0)
    first_page = torch.cat([ends.new_zeros(1), ends])
    return addresses[order].contiguous(), kind_ids[order].contiguous(), first_page


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
