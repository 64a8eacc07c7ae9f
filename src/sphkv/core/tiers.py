# SPDX-License-Identifier: Apache-2.0
"""Precision tiers: bits and exact bytes of a stored state."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any, Literal

TierKind = Literal["drop", "coded", "dense"]

DENSE_BITS = 16
VALUE_BITS = (2, 3, 4, 8, DENSE_BITS)
RUN_TOKENS = 16
# The page header has one flag bit per state and room for this many.
MAX_PAGE_TOKENS = 128
CODED_PAGE_MULTIPLE = 32
MAX_TIERS = 256
MAX_KEY_BITS = 8.0


@dataclass(frozen=True, slots=True)
class TierSpec:
    """How one precision tier stores a state, the key and value of one token and head.

    Attributes:
        name: Label in reports, such as ``"k2v3"``.
        kind: ``"drop"`` stores nothing, ``"coded"`` packed codes, ``"dense"`` bfloat16.
        key_bits: Code bits per key element, without the radius; 16 if dense, 0 if dropped.
        value_bits: Bits per value element: 2, 3, 4, 8 or 16; 0 if dropped.
        page_tokens: States of one page: a multiple of 32 if coded, of 16 if dense, at most
            128; 0 if dropped.
    """

    name: str
    kind: TierKind
    key_bits: float
    value_bits: int
    page_tokens: int

    def __post_init__(self) -> None:
        """Reject a specification that no page can hold."""
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"tier name must be a non-empty string, got {self.name!r}")
        for name in ("value_bits", "page_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} of tier {self.name!r} must be an integer, got {value!r}")
        if isinstance(self.key_bits, bool) or not isinstance(self.key_bits, int | float):
            raise ValueError(
                f"key_bits of tier {self.name!r} must be a number, got {self.key_bits!r}"
            )
        object.__setattr__(self, "key_bits", float(self.key_bits))
        if self.kind == "drop":
            self._check_fixed(key_bits=0.0, value_bits=0, page_tokens=0)
        elif self.kind == "dense":
            self._check_fixed(key_bits=float(DENSE_BITS), value_bits=DENSE_BITS)
            self._check_page_tokens(RUN_TOKENS)
        elif self.kind == "coded":
            if not 0.0 < self.key_bits <= MAX_KEY_BITS:
                raise ValueError(
                    f"key_bits of tier {self.name!r} must be in (0, {MAX_KEY_BITS}], "
                    f"got {self.key_bits!r}"
                )
            if self.value_bits not in VALUE_BITS:
                raise ValueError(
                    f"value_bits of tier {self.name!r} must be one of {VALUE_BITS}, "
                    f"got {self.value_bits!r}"
                )
            self._check_page_tokens(CODED_PAGE_MULTIPLE)
        else:
            raise ValueError(
                f"kind of tier {self.name!r} must be drop, coded or dense, got {self.kind!r}"
            )

    def _check_fixed(self, **expected: float) -> None:
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name} of {self.kind} tier {self.name!r} must be {value}, "
                    f"got {getattr(self, name)!r}"
                )

    def _check_page_tokens(self, multiple: int) -> None:
        if not 0 < self.page_tokens <= MAX_PAGE_TOKENS or self.page_tokens % multiple:
            raise ValueError(
                f"page_tokens of tier {self.name!r} must be a multiple of {multiple} up to "
                f"{MAX_PAGE_TOKENS}, got {self.page_tokens!r}"
            )

    @property
    def is_coded(self) -> bool:
        """Whether keys are stored as codes."""
        return self.kind == "coded"

    @property
    def has_value_codes(self) -> bool:
        """Whether values are codes with a scale, not raw bfloat16."""
        return self.is_coded and self.value_bits != DENSE_BITS

    def key_nibbles(self, head_dim: int) -> int:
        """Four-bit slots of one key: the number nearest to its code bits, at least two."""
        if not self.is_coded:
            return 0
        return max(2, math.floor(self.key_bits * head_dim / 4 + 0.5))

    def key_code_bytes(self, head_dim: int, num_tokens: int = 1) -> int:
        """Bytes of the key elements of ``num_tokens`` states, rounded up to a whole byte."""
        if self.kind == "dense":
            return num_tokens * head_dim * DENSE_BITS // 8
        return math.ceil(num_tokens * self.key_nibbles(head_dim) / 2)

    def key_bytes(self, head_dim: int) -> int:
        """Bytes of one key with its radius code, rounded up to a whole byte."""
        return self.key_code_bytes(head_dim) + int(self.is_coded)

    def value_code_bytes(self, head_dim: int, num_tokens: int = 1) -> int:
        """Bytes of the value elements of ``num_tokens`` states, rounded up to a whole byte."""
        return math.ceil(num_tokens * head_dim * self.value_bits / 8)

    def value_bytes(self, head_dim: int) -> int:
        """Bytes of one value with its scale code, if it has one."""
        return self.value_code_bytes(head_dim) + int(self.has_value_codes)

    def state_bytes(self, head_dim: int) -> int:
        """Bytes of one state in a page, header and positions excluded."""
        return self.key_bytes(head_dim) + self.value_bytes(head_dim)

    def key_bits_stored(self, head_dim: int) -> float:
        """Bits per key element that are really stored, radius included."""
        if not self.is_coded:
            return 8 * self.key_bytes(head_dim) / head_dim
        return (4 * self.key_nibbles(head_dim) + 8) / head_dim

    def value_bits_stored(self, head_dim: int) -> float:
        """Bits per value element that are really stored, scale included."""
        return 8 * self.value_bytes(head_dim) / head_dim


_FIELD_NAMES = tuple(field.name for field in fields(TierSpec))


@dataclass(frozen=True, slots=True)
class TierTable:
    """The ordered tiers of a cache: drop first, dense last, coded ones by rising bytes.

    A tier's id is its place in the table and fits one byte. Bytes depend on the head dimension,
    so ``check_head_dim`` compares them where the table is used; two tiers may cost the same.

    Attributes:
        tiers: The tiers in order.
    """

    tiers: tuple[TierSpec, ...]

    def __post_init__(self) -> None:
        """Reject tables out of order or with a repeated name."""
        object.__setattr__(self, "tiers", tuple(self.tiers))
        if not 2 <= len(self.tiers) <= MAX_TIERS:
            raise ValueError(f"a tier table has 2 to {MAX_TIERS} tiers, got {len(self.tiers)}")
        kinds = [tier.kind for tier in self.tiers]
        if kinds != ["drop", *["coded"] * (len(kinds) - 2), "dense"]:
            raise ValueError(f"tiers must be drop, then coded ones, then dense; got {kinds}")
        names = [tier.name for tier in self.tiers]
        if len(set(names)) != len(names):
            raise ValueError(f"tier names must differ, got {names}")

    def __len__(self) -> int:
        """Number of tiers, drop included."""
        return len(self.tiers)

    def __iter__(self) -> Iterator[TierSpec]:
        """Tiers in order."""
        return iter(self.tiers)

    def __getitem__(self, key: int | str) -> TierSpec:
        """Tier of an id or a name."""
        return self.tiers[self.id_of(key) if isinstance(key, str) else self._check_id(key)]

    def id_of(self, name: str) -> int:
        """Id of the tier called ``name``."""
        for tier_id, tier in enumerate(self.tiers):
            if tier.name == name:
                return tier_id
        raise ValueError(f"no tier {name!r}; tiers are {[tier.name for tier in self.tiers]}")

    def _check_id(self, tier_id: int) -> int:
        if not 0 <= tier_id < len(self.tiers):
            raise ValueError(f"tier id must be in 0..{len(self.tiers) - 1}, got {tier_id!r}")
        return tier_id

    @property
    def drop_id(self) -> int:
        """Id of the tier that stores nothing."""
        return 0

    @property
    def dense_id(self) -> int:
        """Id of the protected maximum."""
        return len(self.tiers) - 1

    def state_bytes(self, head_dim: int) -> tuple[int, ...]:
        """Bytes of one state at every tier, in order of ids."""
        return tuple(tier.state_bytes(head_dim) for tier in self.tiers)

    def check_head_dim(self, head_dim: int) -> None:
        """Raise if a tier costs less than one below it, or as much as a dense one."""
        sizes = self.state_bytes(head_dim)
        if any(low > high for low, high in pairwise(sizes)) or sizes[-2] == sizes[-1]:
            names = [tier.name for tier in self.tiers]
            raise ValueError(
                f"state bytes of the tiers must rise, got {sizes} for {names} at head_dim "
                f"{head_dim}"
            )

    def to_json(self) -> str:
        """Canonical JSON text of the table."""
        return json.dumps({"tiers": [asdict(tier) for tier in self.tiers]}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "TierTable":
        """Rebuild a table from ``to_json`` text; unknown or missing keys are errors."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"tier table is no JSON: {error}") from error
        if not isinstance(data, dict) or set(data) != {"tiers"}:
            raise ValueError(f"tier table must be an object with the key 'tiers', got {data!r}")
        if not isinstance(data["tiers"], list):
            raise ValueError(f"'tiers' must be a list, got {data['tiers']!r}")
        return cls(tuple(_tier_from_dict(entry) for entry in data["tiers"]))


def _tier_from_dict(entry: Any) -> TierSpec:
    if not isinstance(entry, dict):
        raise ValueError(f"a tier must be an object, got {entry!r}")
    unknown = sorted(set(entry) - set(_FIELD_NAMES))
    missing = sorted(set(_FIELD_NAMES) - set(entry))
    if unknown or missing:
        raise ValueError(f"tier {entry!r} has unknown keys {unknown} and lacks {missing}")
    return TierSpec(**entry)


def coded_tier(key_bits: float, value_bits: int, *, page_tokens: int = MAX_PAGE_TOKENS) -> TierSpec:
    """A coded tier named after its bits, such as ``k1.5v2``."""
    return TierSpec(f"k{key_bits:g}v{value_bits}", "coded", key_bits, value_bits, page_tokens)


DROP = TierSpec("drop", "drop", 0.0, 0, 0)
"""The tier that stores nothing."""

DENSE = TierSpec("max", "dense", float(DENSE_BITS), DENSE_BITS, RUN_TOKENS)
"""bfloat16 keys and values, in pages of one run."""

LADDER = (
    *("k1v2", "k1.5v2", "k2v2", "k2v3", "k2.5v3", "k2v4", "k3v3", "k3v4"),
    *("k4v4", "k5v4", "k4v8", "k6v8"),
)
"""Names of the coded tiers that caches choose from, by rising bytes (k2v4 and k3v3 cost as
much)."""


def parse_tier(name: str, *, page_tokens: int = MAX_PAGE_TOKENS) -> TierSpec:
    """A tier from its name: ``"drop"``, ``"max"``, or bits of a key and value like ``"k2v3"``.

    Args:
        name: The name.
        page_tokens: States of a page, if it is coded.
    """
    for fixed in (DROP, DENSE):
        if name == fixed.name:
            return fixed
    key, _, value = name.removeprefix("k").partition("v")
    try:
        return coded_tier(float(key), int(value), page_tokens=page_tokens)
    except ValueError as error:
        raise ValueError(
            f"tier {name!r} is not known: write 'k2v3' (key and value bits) or 'max' ({error})"
        ) from error


def tier_table(coded: Iterable[TierSpec], head_dim: int) -> TierTable:
    """Drop, coded tiers by rising bytes, and dense.

    Args:
        coded: The coded tiers; of those that cost the same the order is kept. A tier whose codes
            have the size of an earlier one's, or that costs as much as bfloat16, is left out.
        head_dim: Elements of one key.
    """
    kept: dict[tuple[int, int], TierSpec] = {}
    for tier in coded:
        if tier.state_bytes(head_dim) < DENSE.state_bytes(head_dim):
            kept.setdefault((tier.key_nibbles(head_dim), tier.value_bits), tier)
    ordered = sorted(kept.values(), key=lambda tier: tier.state_bytes(head_dim))
    return TierTable((DROP, *ordered, DENSE))


def ladder(
    head_dim: int, *, page_tokens: int = MAX_PAGE_TOKENS, names: Iterable[str] | None = None
) -> TierTable:
    """The usual tiers, or some of them, as a table for one head dimension.

    Args:
        head_dim: Elements of one key.
        page_tokens: States of a coded page.
        names: Coded tiers to choose from, in any order; ``LADDER`` if None. Names outside of it
            that ``parse_tier`` knows are fine.
    """
    wanted = LADDER if names is None else tuple(names)
    tiers = [parse_tier(name, page_tokens=page_tokens) for name in wanted]
    return tier_table([tier for tier in tiers if tier.is_coded], head_dim)
