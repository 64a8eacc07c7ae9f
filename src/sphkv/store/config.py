# SPDX-License-Identifier: Apache-2.0
"""What a page store is built from, and its one byte limit."""

from dataclasses import dataclass

from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import TierTable
from sphkv.errors import BudgetError
from sphkv.store.paging import PositionMode


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """What a page store is built from.

    Attributes:
        geometry: Shape of the cache.
        tiers: Precision tiers.
        seal_tier: Name of the tier at which a full tail is sealed; its pages say how many states
            of a head are sealed at once.
        recent_tokens: Newest states that stay dense when a page seals.
        max_bytes: Limit on the bytes of all live tensors; None for no limit.
        max_slab_pages: Pages of the largest slab.
        has_few_kinds: Whether coded pages tell a position per run even where one would do, so
            that kernels meet fewer kinds of pages.
        device: Torch device of pages, tails and pointer tables.
    """

    geometry: KVGeometry
    tiers: TierTable
    seal_tier: str = "k3v4"
    recent_tokens: int = 32
    max_bytes: int | None = None
    max_slab_pages: int = 64
    has_few_kinds: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Reject tiers that do not fit the geometry, and impossible sizes."""
        self.tiers.check_head_dim(self.geometry.head_dim)
        if self.tiers[self.seal_tier].kind == "drop":
            raise ValueError(f"seal_tier must store something, got {self.seal_tier!r}")
        if self.recent_tokens < 0:
            raise ValueError(f"recent_tokens must not be negative, got {self.recent_tokens}")

    def is_in_runs(self, tier_id: int) -> bool:
        """Whether pages of a tier tell a position per run at least."""
        return self.has_few_kinds and self.tiers[tier_id].is_coded

    def span_mode(self, tier_id: int) -> PositionMode:
        """How pages of consecutive tokens store positions."""
        return PositionMode.RUNS if self.is_in_runs(tier_id) else PositionMode.CONTIGUOUS

    @property
    def seal_tokens(self) -> int:
        """States of each head that are sealed at once."""
        return self.tiers[self.seal_tier].page_tokens

    @property
    def tail_capacity(self) -> int:
        """States of a full tail; a page of them is sealed before the next one comes."""
        return self.seal_tokens + self.recent_tokens

    def sealed_tokens(self, num_tokens: int) -> int:
        """Oldest of ``num_tokens`` states to be sealed, so that the rest fits a tail."""
        missing = max(0, num_tokens - self.tail_capacity)
        return -(-missing // self.seal_tokens) * self.seal_tokens

    def seal_tier_id(self, name: str | None = None) -> int:
        """Id of a tier at which the tails of a sequence may be sealed.

        Args:
            name: Its name; ``seal_tier`` if None.

        Raises:
            ValueError: It stores nothing, or its pages do not divide ``seal_tokens``.
        """
        name = self.seal_tier if name is None else name
        tier = self.tiers[name]
        if tier.kind == "drop" or self.seal_tokens % tier.page_tokens:
            raise ValueError(
                f"seal_tier must store {self.seal_tokens} states in whole pages, got {name!r} "
                f"with pages of {tier.page_tokens}"
            )
        return self.tiers.id_of(name)


class ByteMeter:
    """Counts the bytes of all live tensors of a store against one hard limit."""

    def __init__(self, limit: int | None) -> None:
        """Start at zero bytes.

        Args:
            limit: Bytes that may be live at once; None for no limit.
        """
        if limit is not None and (isinstance(limit, bool) or limit < 0):
            raise ValueError(f"byte limit must not be negative, got {limit!r}")
        self.limit = limit
        self.used = 0
        self._peak = 0

    def check(self, delta: int) -> None:
        """Raise if ``delta`` more bytes would pass the limit.

        Raises:
            BudgetError: They would.
        """
        if self.limit is not None and delta > 0 and self.used + delta > self.limit:
            raise BudgetError(delta, self.limit - self.used, self.limit)

    def add(self, delta: int) -> None:
        """Count bytes that are live now, or negative ones that are gone."""
        self.used += delta
        self._peak = max(self._peak, self.used)

    def take_peak(self) -> int:
        """Most bytes that were live at once since the last time this was asked."""
        peak, self._peak = self._peak, self.used
        return peak
