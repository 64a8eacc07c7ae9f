# SPDX-License-Identifier: Apache-2.0
"""What a cache under a byte budget is built from."""

from __future__ import annotations

from dataclasses import dataclass, field

from sphkv.codec.rope import RopeSpec
from sphkv.core.budget import ByteBudget
from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import (
    DENSE_BITS,
    RUN_TOKENS,
    TierSpec,
    TierTable,
    coded_tier,
)
from sphkv.retention.blocks import BlockShape, PageCosts
from sphkv.retention.gate import GateOptions
from sphkv.retention.options import ControlOptions
from sphkv.retention.policy import RetentionPolicy
from sphkv.retention.protection import ProtectionRule
from sphkv.retention.segments import SegmentSpans
from sphkv.store.allocator import slab_bytes
from sphkv.store.config import StoreConfig
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PositionMode

# Small slabs, so that a dropped page soon gives its bytes back; larger ones where each costs a page
# more.
_SLAB_PAGES = 4
_ALIGNED_SLAB_PAGES = 32
_TABLE_ENTRY_BYTES = 10

_RETENTION_BITS = (
    *((1.0, 2), (1.5, 2), (2.0, 2), (2.0, 3), (3.0, 3)),
    *((3.0, 4), (4.0, 4), (6.0, 8)),
)
_MODE_OF_SHAPE = {
    BlockShape.WHOLE: PositionMode.CONTIGUOUS,
    BlockShape.RUNS: PositionMode.RUNS,
    BlockShape.TOKENS: PositionMode.TOKENS,
}


def retention_tiers(page_tokens: int = 32) -> TierTable:
    """Drop, eight coded tiers and bfloat16, with pages small enough for a tight budget."""
    coded = [coded_tier(k, v, page_tokens=page_tokens) for k, v in _RETENTION_BITS]
    dense = TierSpec("max", "dense", float(DENSE_BITS), DENSE_BITS, RUN_TOKENS)
    return TierTable((TierSpec("drop", "drop", 0.0, 0, 0), *coded, dense))


@dataclass(frozen=True, slots=True)
class RetainedConfig:
    """A cache that keeps what matters under a byte budget.

    Attributes:
        geometry: Shape of the cache.
        ropes: Rotary embedding of every layer.
        budget: Ceiling on resident bytes; a share or bytes per token grow with the sequence.
        tiers: Precision tiers; coded pages all of one size.
        policy: Weights of the distortion.
        options: Variant, shapes and solver.
        protection: States that stay dense.
        segments: Retrieved passages of the prompt.
        gate: Stability gate; None switches it off (A5, NoGate).
        horizon: Tokens after the prompt for which attention is foretold.
        error_samples: States per head on which error models are measured.
        device: Torch device of the pages, and of what is measured on a prompt.
        is_aligned: Whether slabs begin at multiples of the page size, see ``PageOrder``.
    """

    geometry: KVGeometry
    ropes: tuple[RopeSpec, ...]
    budget: ByteBudget
    tiers: TierTable = field(default_factory=retention_tiers)
    policy: RetentionPolicy = field(default_factory=RetentionPolicy)
    options: ControlOptions = field(default_factory=ControlOptions)
    protection: ProtectionRule = field(default_factory=ProtectionRule)
    segments: SegmentSpans = field(default_factory=SegmentSpans)
    gate: GateOptions | None = None
    horizon: tuple[int, ...] = (8, 32, 96)
    error_samples: int = 256
    device: str = "cpu"
    is_aligned: bool = False

    def __post_init__(self) -> None:
        """Reject parts that do not fit together."""
        if len(self.ropes) != self.geometry.num_layers:
            raise ValueError(f"{len(self.ropes)} ropes for {self.geometry.num_layers} layers")
        sizes = {tier.page_tokens for tier in self.tiers if tier.is_coded}
        if len(sizes) != 1:
            raise ValueError(f"coded pages must all hold as many states, got {sorted(sizes)}")
        if self.tiers[self.tiers.dense_id].page_tokens != RUN_TOKENS:
            raise ValueError(f"dense pages must hold {RUN_TOKENS} states")
        geometry = self.geometry
        self.policy.check_shape(
            geometry.num_layers, geometry.num_query_heads, geometry.num_kv_heads
        )
        self.store_config()

    @property
    def page_tokens(self) -> int:
        """States of a coded page."""
        return next(tier.page_tokens for tier in self.tiers if tier.is_coded)

    def store_config(self) -> StoreConfig:
        """Config of the store: newest states seal into dense pages, which are demoted later."""
        return StoreConfig(
            self.geometry,
            self.tiers,
            seal_tier=self.tiers[self.tiers.dense_id].name,
            recent_tokens=0,
            max_slab_pages=_ALIGNED_SLAB_PAGES if self.is_aligned else _SLAB_PAGES,
            device=self.device,
        )

    def page_costs(self) -> PageCosts:
        """Bytes of one page of every tier and shape, counters and table entry included."""
        costs = {}
        for shape, mode in _MODE_OF_SHAPE.items():
            sizes = [0]
            for tier_id in range(1, len(self.tiers)):
                page_mode = mode
                # a dense page is one run of 16 tokens, which is contiguous
                if tier_id == self.tiers.dense_id and shape is BlockShape.RUNS:
                    page_mode = PositionMode.CONTIGUOUS
                layout = PageLayout(tier_id, self.tiers[tier_id], self.geometry.head_dim, page_mode)
                sizes.append(self._page_bytes(layout) + _TABLE_ENTRY_BYTES)
            costs[shape] = tuple(sizes)
        return PageCosts(self.tiers, costs)

    def _page_bytes(self, layout: PageLayout) -> int:
        """Bytes of a page with its part of what a slab costs."""
        pages = _ALIGNED_SLAB_PAGES if self.is_aligned else 1
        return -(
            -slab_bytes(layout, pages, alignment=layout.page_bytes if self.is_aligned else 1)
            // pages
        )

    def page_tier_bytes(self) -> tuple[int, ...]:
        """Bytes of one full page of a coded page's states at every tier, in runs."""
        return tuple(self.page_costs().block_cost(self.page_tokens, BlockShape.RUNS))

    def dense_page_bytes(self) -> int:
        """Most bytes of one dense page of every head of every layer, a slab for each layer."""
        dense = PageLayout(
            self.tiers.dense_id,
            self.tiers[self.tiers.dense_id],
            self.geometry.head_dim,
            PositionMode.CONTIGUOUS,
        )
        heads = self.geometry.num_kv_heads
        return self.geometry.num_layers * slab_bytes(
            dense, heads, alignment=dense.page_bytes if self.is_aligned else 1
        )
