# SPDX-License-Identifier: Apache-2.0
"""What the kernels read besides pages: points by entry, and how far each plane turns.

An *entry* is one term of a logit: the point that a stored nibble picks in one plane. A single
slot is one entry, a pair slot two with the same nibble, and a plane without bits one whose 16
points are all alike. A kernel sums entries and need not know the kinds apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sphkv.codec.codebook import SLOT_LEVELS, AngleCodebook
from sphkv.codec.states import SphericalCodec
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import TierSpec

ENTRY_BLOCK = 16
"""Entries a kernel handles at once; tables are padded to whole blocks."""

ENTRY_FIELDS = 4
"""Words of an entry's description: slot, plane, and the plane's two channels."""

OFFSETS = 64
"""Positions a tile may reach beyond its first one."""


@dataclass(frozen=True, slots=True, eq=False)
class EntryTable:
    """The entries of one layer at one tier.

    Attributes:
        entries: ``[heads, entries, 4]`` int32: slot, plane, first and second channel.
        points: ``[heads, entries, 16, 2]`` float32; zero for padding.
        turns: ``[planes]`` int64 turns per position in units of ``2**-64``; products wrap.
        offsets: ``[planes, 64, 2]`` float32 cosine and sine of the first positions.
    """

    entries: Tensor
    points: Tensor
    turns: Tensor
    offsets: Tensor

    @property
    def num_entries(self) -> int:
        """Entries of a head, padding included."""
        return int(self.entries.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of all four."""
        return sum(part.nbytes for part in (self.entries, self.points, self.turns, self.offsets))


def turn_steps(rope: RopeSpec) -> Tensor:
    """Turns of each plane per position, ``[planes]`` int64 in units of ``2**-64``.

    The product with a position wraps like the angle does, so no position is too far.
    """
    steps = []
    for radians in rope.frequencies().tolist():
        whole = round(radians / (2 * math.pi) % 1.0 * 2**64) % 2**64
        steps.append(whole - 2**64 if whole >= 2**63 else whole)
    return torch.tensor(steps, dtype=torch.int64)


def build_entry_table(
    codebook: AngleCodebook, rope: RopeSpec, device: torch.device | str
) -> EntryTable:
    """Spread a codebook over entries."""
    book = codebook.to("cpu")
    heads = [_head_entries(book, head) for head in range(book.slot_plane.shape[0])]
    most = max(len(slot) for slot, _, _ in heads)
    most = -(-most // ENTRY_BLOCK) * ENTRY_BLOCK
    entries = torch.zeros(len(heads), most, ENTRY_FIELDS, dtype=torch.int32)
    points = torch.zeros(len(heads), most, SLOT_LEVELS, 2)
    channels = rope.plane_channels()
    entries[:, :, 2:] = channels[0].to(torch.int32)
    for head, (slot, plane, point) in enumerate(heads):
        entries[head, : len(slot), 0] = slot
        entries[head, : len(slot), 1] = plane
        entries[head, : len(slot), 2:] = channels[plane].to(torch.int32)
        points[head, : len(slot)] = point
    phase = rope.phases(torch.arange(OFFSETS)).T.double()  # [planes, offsets]
    offsets = torch.stack([phase.cos(), phase.sin()], -1).float().contiguous()
    parts = (entries, points, turn_steps(rope), offsets)
    return EntryTable(*(part.to(device) for part in parts))


def _head_entries(book: AngleCodebook, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots, planes and points of one head's entries."""
    slots = torch.arange(book.num_slots)
    pairs = slots[book.num_slots - int(book.num_pairs[head]) :]
    bare = torch.nonzero(book.plane_bits[head] == 0)[:, 0]
    constant = book.constant[head, bare][:, None].expand(-1, SLOT_LEVELS, -1)
    return (
        torch.cat([slots, pairs, torch.zeros_like(bare)]),
        torch.cat([book.slot_plane[head, :, 0], book.slot_plane[head, pairs, 1], bare]),
        torch.cat([book.points[head, :, 0], book.points[head, pairs, 1], constant]),
    )


class EntryTables:
    """Entry tables by codec, layer and slots, built once."""

    def __init__(self) -> None:
        self._held: WeakKeyDictionary[SphericalCodec, dict[tuple[int, int, str], EntryTable]]
        self._held = WeakKeyDictionary()

    def get(
        self, codec: SphericalCodec, layer: int, tier: TierSpec, device: torch.device
    ) -> EntryTable:
        """The table of a layer at a tier."""
        held = self._held.setdefault(codec, {})
        slots = tier.key_nibbles(codec.calibration.geometry.head_dim)
        key = (layer, slots, str(device))
        if key not in held:
            book, rope = codec.codebook(layer, tier), codec.calibration.ropes[layer]
            held[key] = build_entry_table(book, rope, device)
        return held[key]

    def nbytes(self, codec: SphericalCodec) -> int:
        """Bytes of all tables of a codec."""
        return sum(table.nbytes for table in self._held.get(codec, {}).values())
