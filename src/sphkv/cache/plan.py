# SPDX-License-Identifier: Apache-2.0
"""From a byte budget to the tier of a cache, charging everything that stays resident."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from sphkv.codec.calibration import LEAST_TOKENS, CalibrationOptions
from sphkv.codec.codebook import CodebookFit
from sphkv.core.budget import ByteBudget
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import DENSE_BITS, RUN_TOKENS, TierSpec, TierTable, coded_tier
from sphkv.store.allocator import slab_bytes
from sphkv.store.config import StoreConfig
from sphkv.store.layout import PageLayout
from sphkv.store.paging import PositionMode

DEFAULT_CONTEXT = 8192

PROMPT_CALIBRATION = CalibrationOptions(
    skip_tokens=0,
    max_tokens=1024,
    fit=CodebookFit(iterations=5, refinements=4, stage_tokens=512),
)
"""Half the effort of a calibration that is kept: the user waits for the first token."""

_BUDGET_BITS = (
    *((1.0, 2), (1.5, 2), (2.0, 2), (2.0, 3), (2.5, 3), (3.0, 3)),
    *((3.0, 4), (4.0, 4), (5.0, 4), (4.0, 8), (6.0, 8)),
)
_DENSE_NAME = "max"
_MAX_SLAB_PAGES = 64
_MAX_GPU_SLAB_PAGES = 2048
_SLAB_GROWTH_SHARE = 16
_TABLE_ENTRY_BYTES = 10


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What a cache is built from.

    Attributes:
        geometry: Shape of the cache.
        ropes: Rotary embedding of every layer.
        windows: Sliding window of every layer in tokens; None for full attention.
        tiers: Precision tiers.
        tier: Name of the tier of sealed pages.
        sink_tokens: First tokens that stay dense in layers with full attention.
        recent_tokens: Newest tokens that stay dense.
        min_calibration_tokens: Tokens that are seen, and kept dense, before the cache
            calibrates itself.
        calibration: How it does.
        max_bytes: Hard limit on the bytes of one sequence; None for none.
        device: Torch device of the cache.
    """

    geometry: KVGeometry
    ropes: tuple[RopeSpec, ...]
    windows: tuple[int | None, ...]
    tiers: TierTable
    tier: str
    sink_tokens: int = 4
    recent_tokens: int = 32
    min_calibration_tokens: int = 512
    calibration: CalibrationOptions = field(default_factory=lambda: PROMPT_CALIBRATION)
    max_bytes: int | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Reject sizes that do not fit together."""
        layers = self.geometry.num_layers
        for name in ("ropes", "windows"):
            if len(getattr(self, name)) != layers:
                raise ValueError(f"{len(getattr(self, name))} {name} for {layers} layers")
        for name, least in (
            ("sink_tokens", 0),
            ("recent_tokens", 1),
            ("min_calibration_tokens", LEAST_TOKENS + self.sink_tokens),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        self.store_config(1)

    @property
    def spec(self) -> TierSpec:
        """The tier of sealed pages."""
        return self.tiers[self.tier]

    @property
    def max_slab_pages(self) -> int:
        """Pages of the largest slab; a GPU counts in gigabytes and likes few allocations."""
        return _MAX_SLAB_PAGES if self.device == "cpu" else _MAX_GPU_SLAB_PAGES

    @property
    def window_margin(self) -> int:
        """Tokens kept beyond a sliding window, so that a crop finds them."""
        return self.spec.page_tokens + self.recent_tokens

    def store_config(self, num_sequences: int) -> StoreConfig:
        """Config of a store for a batch of so many sequences."""
        limit = None if self.max_bytes is None else self.max_bytes * num_sequences
        return StoreConfig(
            self.geometry,
            self.tiers,
            seal_tier=self.tier,
            recent_tokens=self.recent_tokens,
            max_bytes=limit,
            max_slab_pages=self.max_slab_pages,
            device=self.device,
        )


def budget_tiers(head_dim: int, coded: Iterable[TierSpec] | None = None) -> TierTable:
    """Tiers a budget chooses from: drop, coded ones in order of bytes, and bfloat16.

    Args:
        head_dim: Elements of one key; tiers that cost the same there are listed once.
        coded: The coded tiers; a fine ladder from 1 to 6 key bits by default.
    """
    if coded is None:
        coded = [coded_tier(key_bits, value_bits) for key_bits, value_bits in _BUDGET_BITS]
    dense = TierSpec(_DENSE_NAME, "dense", float(DENSE_BITS), DENSE_BITS, RUN_TOKENS)
    ladder: list[TierSpec] = []
    for tier in sorted(coded, key=lambda tier: tier.state_bytes(head_dim)):
        is_above = not ladder or tier.state_bytes(head_dim) > ladder[-1].state_bytes(head_dim)
        if is_above and tier.state_bytes(head_dim) < dense.state_bytes(head_dim):
            ladder.append(tier)
    return TierTable((TierSpec("drop", "drop", 0.0, 0, 0), *ladder, dense))


def sequence_bytes(config: CacheConfig, num_tokens: int) -> int:
    """Most bytes a sequence can keep resident: pages, free pages, tables, tails.

    Args:
        config: The cache.
        num_tokens: Tokens of the sequence.
    """
    geometry, tier = config.geometry, config.spec
    heads = geometry.num_kv_heads
    tail_bytes = heads * (tier.page_tokens + config.recent_tokens) * geometry.dense_state_bytes
    total = num_tokens and geometry.num_layers * tail_bytes
    coded_pages = sink_pages = 0
    for window in config.windows:
        body = max(0, num_tokens - config.sink_tokens - config.recent_tokens)
        pages = body // tier.page_tokens
        if window is not None:
            kept = window + config.window_margin
            pages = min(pages, -(-kept // tier.page_tokens) + 1)
        sinks = -(-min(config.sink_tokens, num_tokens) // RUN_TOKENS)
        coded_pages += heads * pages
        sink_pages += heads * sinks
        entries = max(4, (pages + sinks) * 3 // 2 + 1)
        total += heads * (8 + entries * _TABLE_ENTRY_BYTES)
    total += _pool_bytes(config, config.tier, coded_pages)
    return total + _pool_bytes(config, config.tiers[config.tiers.dense_id].name, sink_pages)


def _pool_bytes(config: CacheConfig, tier: str, pages: int) -> int:
    """Bytes of so many pages with the free ones their slabs may hold."""
    spare = min(config.max_slab_pages - 1, pages // _SLAB_GROWTH_SHARE)
    if config.device != "cpu":
        # kernels want slabs whose pages are aligned, at the price of one page each
        spare += 2 + _SLAB_GROWTH_SHARE + pages // config.max_slab_pages
    layout = PageLayout(
        config.tiers.id_of(tier),
        config.tiers[tier],
        config.geometry.head_dim,
        PositionMode.CONTIGUOUS,
    )
    return slab_bytes(layout, pages + spare)


def allowed_bytes(budget: ByteBudget, config: CacheConfig, num_tokens: int) -> int:
    """Bytes a budget allows a sequence; a share is of a dense cache with the same windows."""
    if budget.kind != "share":
        return budget.resolve(config.geometry, num_tokens)
    held = sum(
        num_tokens if window is None else min(window, num_tokens) for window in config.windows
    )
    return budget.resolve(replace(config.geometry, num_layers=1), held)


def holds_from(budget: ByteBudget, config: CacheConfig, *, limit: int = 1 << 24) -> int | None:
    """Shortest context from which on a sequence fits its budget; None if none up to ``limit``.

    Below it the dense sinks, recent tokens and tail weigh more than the codes save.
    """
    step = config.spec.page_tokens

    def fits(pages: int) -> bool:
        return sequence_bytes(config, pages * step) <= allowed_bytes(budget, config, pages * step)

    high = 1
    while not fits(high):
        high *= 2
        if high * step > limit:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * step


def plan_cache(config: CacheConfig, budget: ByteBudget, context: int) -> CacheConfig:
    """The same cache at the highest tier that fits a budget.

    Args:
        config: Sizes and tiers; its own tier is ignored.
        budget: The ceiling of one sequence.
        context: Tokens at which the ceiling must hold.

    Raises:
        ValueError: No tier fits; the message says how many bytes are missing.
    """
    if isinstance(context, bool) or not isinstance(context, int) or context < 1:
        raise ValueError(f"context must be a positive integer, got {context!r}")
    allowed = allowed_bytes(budget, config, context)
    limit = allowed if budget.kind == "total" else None
    stored = [tier for tier in config.tiers if tier.kind != "drop"]
    for tier in reversed(stored):
        chosen = replace(config, tier=tier.name)
        if sequence_bytes(chosen, context) <= allowed:
            return replace(chosen, max_bytes=limit)
    least = replace(config, tier=stored[0].name)
    missing = sequence_bytes(least, context) - allowed
    raise ValueError(
        f"budget {budget} allows {allowed} bytes for {context} tokens; the smallest tier "
        f"{stored[0].name!r} needs {missing} bytes more. {_advice(budget, least)}"
    )


def _advice(budget: ByteBudget, least: CacheConfig) -> str:
    if budget.kind == "total":
        return "Allow more bytes, or pass a shorter context."
    start = holds_from(budget, least)
    if start is None:
        return "Allow more, or pass smaller tiers."
    return f"It would fit from {start} tokens on: pass that context, or allow more."


def parse_tiers(
    tiers: TierTable | TierSpec | str | Sequence[TierSpec | str] | None, head_dim: int
) -> TierTable:
    """A tier table from what a user may write: a table, tiers, or names such as ``"k2v3"``."""
    if isinstance(tiers, TierTable):
        return tiers
    if tiers is None:
        return budget_tiers(head_dim)
    wanted = [tiers] if isinstance(tiers, TierSpec | str) else list(tiers)
    parsed = [_parse_tier(tier) if isinstance(tier, str) else tier for tier in wanted]
    return budget_tiers(head_dim, [tier for tier in parsed if tier is not None and tier.is_coded])


def _parse_tier(name: str) -> TierSpec | None:
    if name == _DENSE_NAME:
        return None
    key, _, value = name.removeprefix("k").partition("v")
    try:
        return coded_tier(float(key), int(value))
    except ValueError as error:
        raise ValueError(
            f"tier {name!r} is not known: write 'k2v3' (key and value bits) or 'max' ({error})"
        ) from error
