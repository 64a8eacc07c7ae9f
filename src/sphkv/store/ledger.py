# SPDX-License-Identifier: Apache-2.0
"""Byte accounting: what a store's live tensors hold, by kind."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from sphkv.core.tiers import RUN_TOKENS
from sphkv.store.layout import FLAG_BYTES, HEADER_BYTES, POSITION_BYTES
from sphkv.store.paging import PositionMode
from sphkv.store.sequence import OpenTail, PointerTable
from sphkv.store.slabs import Slab


@dataclass(frozen=True, slots=True)
class ByteLedger:
    """Resident bytes of a cache, ``M_KV``, split as the paper splits them.

    Shared pages are counted once. The sum is the bytes of all live tensors of the store.

    Attributes:
        codes: Key codes of live states; bfloat16 keys at the dense tier and in open tails.
        radii: Radius codes of live states.
        values: Value codes and scales of live states, or bfloat16 values.
        positions: Position streams of live states.
        headers: Headers of pages in use, without the flag bitmap.
        ptr: Pointer tables, and the reference and state counts of slabs.
        tags: Tier tags.
        prot: Protection bitmaps of pages in use.
        frag: Free pages, unused states of pages, rounding, unused tail capacity.
        tables: Codebooks and look-up tables beside the store; not part of ``total``.
    """

    codes: int
    radii: int
    values: int
    positions: int
    headers: int
    ptr: int
    tags: int
    prot: int
    frag: int
    tables: int = 0

    @property
    def payload(self) -> int:
        """Bytes of live states: codes, radii, values and positions."""
        return self.codes + self.radii + self.values + self.positions

    @property
    def meta(self) -> int:
        """Bytes that are not payload."""
        return self.headers + self.ptr + self.tags + self.prot + self.frag

    @property
    def total(self) -> int:
        """Bytes of all live tensors of the store."""
        return self.payload + self.meta

    @property
    def total_with_tables(self) -> int:
        """Bytes of all live tensors, codebooks and look-up tables included."""
        return self.total + self.tables

    @property
    def eta_meta(self) -> float:
        """Share of the bytes that is not payload; 0 for an empty store."""
        return self.meta / self.total if self.total else 0.0

    def b_kv(self, active_tokens: int) -> float:
        """Resident bytes per active token."""
        if active_tokens < 1:
            raise ValueError(f"active_tokens must be positive, got {active_tokens}")
        return self.total / active_tokens

    def to_dict(self) -> dict[str, int]:
        """All kinds with payload and both totals, for a record."""
        return {
            **asdict(self),
            "payload": self.payload,
            "total": self.total,
            "total_with_tables": self.total_with_tables,
        }


def measure_bytes(
    slabs: Iterable[Slab], tables: Iterable[PointerTable], tails: Iterable[OpenTail]
) -> ByteLedger:
    """Account for every tensor of a store."""
    kinds = dict.fromkeys(ByteLedger.__slots__, 0)
    for slab in slabs:
        _add_slab(kinds, slab)
    for table in tables:
        kinds["ptr"] += table.pointer_bytes
        kinds["tags"] += table.tag_bytes
    for tail in tails:
        live = tail.view()
        kinds["codes"] += live.keys.nbytes
        kinds["values"] += live.values.nbytes
        kinds["frag"] += tail.nbytes - live.keys.nbytes - live.values.nbytes
    return ByteLedger(**kinds)


def _add_slab(kinds: dict[str, int], slab: Slab) -> None:
    tier, head_dim = slab.layout.tier, slab.layout.head_dim
    num_pages = slab.num_pages - slab.num_free
    num_states = int(slab.counts.sum())
    used = {
        # Below a byte, codes of several states share one; the split rounds up for keys and
        # down for values.
        "codes": tier.key_code_bytes(head_dim, num_states),
        "radii": num_states * int(tier.is_coded),
        "values": num_states * head_dim * tier.value_bits // 8
        + num_states * int(tier.has_value_codes),
        "positions": POSITION_BYTES * _position_words(slab, num_states),
        "headers": num_pages * (HEADER_BYTES - FLAG_BYTES),
        "prot": num_pages * FLAG_BYTES,
    }
    for kind, size in used.items():
        kinds[kind] += size
    kinds["frag"] += slab.buffer.nbytes - sum(used.values())
    kinds["ptr"] += slab.refcounts.nbytes + slab.counts.nbytes


def _position_words(slab: Slab, num_states: int) -> int:
    match slab.layout.position_mode:
        case PositionMode.TOKENS:
            return num_states
        case PositionMode.RUNS:
            return int(((slab.counts + RUN_TOKENS - 1) // RUN_TOKENS).sum())
        case _:
            return 0
