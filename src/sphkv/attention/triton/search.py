# SPDX-License-Identifier: Apache-2.0
"""What encoding reads: planes by falling bits, and their points as queries see them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sphkv.attention.triton.tables import turn_steps
from sphkv.codec.calibration import Calibration
from sphkv.codec.codebook import AngleCodebook
from sphkv.codec.states import SphericalCodec
from sphkv.core.devices import send
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import TierSpec

PLANE_FIELDS = 4
"""Words that describe a plane: its number, its two channels, its single slots."""

NUM_KINDS = 5
"""Kinds of planes a head counts: 12, 8, 4 bits, pairs that share a slot, planes without bits."""


@dataclass(frozen=True, slots=True, eq=False)
class SearchTable:
    """The slots of one layer and tier, in the order an encoder fills them.

    Attributes:
        counts: ``[heads, 5]`` int32: planes of 12, 8 and 4 bits, pair slots, planes without bits.
        planes: ``[heads, planes, 4]`` int32: number, channels and single slots. Planes of whole
            slots by falling bits, then the two planes of each pair slot, then those without bits.
        roots: ``[heads, planes, 4]`` float32 metric roots, in the same order.
        seen: ``[heads, slots, 2, 16, 2]`` float32 points in the query metric.
        points: The same points as stored.
        constants: ``[heads, planes, 2]`` float32, in the order of ``planes``.
        turns: ``[planes]`` int64, see ``turn_steps``.
    """

    counts: Tensor
    planes: Tensor
    roots: Tensor
    seen: Tensor
    points: Tensor
    constants: Tensor
    turns: Tensor


def build_search_table(
    codebook: AngleCodebook, rope: RopeSpec, device: torch.device | str
) -> SearchTable:
    """Order the planes of every head as its slots are."""
    book = codebook.to(device)
    order = _plane_order(book.plane_bits)
    bits = book.plane_bits.gather(1, order)
    counts = [(bits == 12).sum(1), (bits == 8).sum(1), (bits == 4).sum(1), book.num_pairs]
    counts.append((bits == 0).sum(1))
    channels = rope.plane_channels(order.device)[order]
    root = book.metric_root.gather(1, order[..., None, None].expand(-1, -1, 2, 2))
    head = torch.arange(len(order), device=order.device)[:, None, None]
    seen = book.points @ book.metric_root[head, book.slot_plane].mT  # [heads, slots, 2, 16, 2]
    parts = (
        torch.stack(counts, 1).to(torch.int32),
        torch.cat([order[..., None], channels, bits[..., None] // 4], -1).to(torch.int32),
        root.flatten(2),
        seen,
        book.points,
        book.constant.gather(1, order[..., None].expand(-1, -1, 2)),
        _turns(rope, order.device),
    )
    return SearchTable(*(part.contiguous() for part in parts))


def _plane_order(bits: Tensor) -> Tensor:
    """Planes ``[heads, planes]``: those of whole slots, of pair slots, and those without bits."""
    is_halved, is_bare = bits % 4 > 0, bits == 0
    return (100 * is_halved + 1000 * is_bare - bits).argsort(dim=1, stable=True)


@functools.lru_cache(maxsize=64)
def _turns(rope: RopeSpec, device: torch.device) -> Tensor:
    """``turn_steps`` on a device, which nothing waits for."""
    with torch.inference_mode(False):
        return send(turn_steps(rope), device)


class SearchTables:
    """Search tables by calibration, layer and slots, built once in a process."""

    def table_bytes(self, codec: SphericalCodec) -> int:
        """Bytes of the tables made of a codec's calibration."""
        held = _HELD.get(codec.calibration, {}).values()
        return sum(getattr(table, name).nbytes for table in held for name in table.__slots__)

    def get(
        self, codec: SphericalCodec, layer: int, tier: TierSpec, device: torch.device
    ) -> SearchTable:
        """The table of a layer at a tier."""
        held = _HELD.setdefault(codec.calibration, {})
        slots = tier.key_nibbles(codec.calibration.geometry.head_dim)
        key = (layer, slots, str(device))
        if key not in held:
            book, rope = codec.codebook(layer, tier, device), codec.calibration.ropes[layer]
            held[key] = build_search_table(book, rope, device)
        return held[key]


_HELD: WeakKeyDictionary[Calibration, dict[tuple[int, int, str], SearchTable]]
_HELD = WeakKeyDictionary()
