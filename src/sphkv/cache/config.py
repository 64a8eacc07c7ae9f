# SPDX-License-Identifier: Apache-2.0
"""What a cache is built from: the model's shape, a budget, and how states may stay resident."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sphkv.codec.calibration import LEAST_TOKENS, CalibrationOptions
from sphkv.codec.codebook import CodebookFit
from sphkv.core.budget import ByteBudget
from sphkv.core.configs import freeze_sequences
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import RUN_TOKENS, TierSpec, TierTable
from sphkv.retention.gate import GateOptions
from sphkv.retention.policy import ControlOptions, RetentionPolicy
from sphkv.retention.protection import ProtectionRule, SegmentSpans
from sphkv.store.config import StoreConfig

PROMPT_CALIBRATION = CalibrationOptions(
    skip_tokens=0,
    max_tokens=1024,
    fit=CodebookFit(iterations=5, refinements=3, stage_tokens=1024),
)
"""Half the effort of a calibration that is kept: the user waits for the first token."""

_MAX_SLAB_PAGES = 64
_MAX_GPU_SLAB_PAGES = 2048
# Small slabs, so that a dropped page soon gives its bytes back; larger ones where each costs a page
# more.
_RETENTION_SLAB_PAGES = 4
_ALIGNED_SLAB_PAGES = 128


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    """How the controller decides, and what it does while decoding.

    Attributes:
        tiers: Tiers it chooses from; coded pages all of one size.
        seal_tier: Tier at which new states leave the dense tail.
        long_tiers: The same tiers with larger pages, for long prompts; None for none.
        policy: Weights of the distortion.
        options: Variant, shapes and solver.
        protection: States that stay dense.
        segments: Retrieved passages of the prompt.
        gate: Stability gate; None switches it off (A5, NoGate).
        horizon: Tokens after the prompt for which attention is predicted.
        error_samples: States per head on which error models are measured.
        new_run_scale: Loss of a run that was decoded, relative to one of the prompt of its age.
        young_pages: Newest sealed pages of a head that keep their tier.
        refresh_share: Part of the ceiling that is freed at once when old pages must give way, so
            that the next pages to seal find room; where it is too little for these, none is.
        long_refresh_share: The same with the larger pages of long prompts.
        demotes: Whether pages at the seal tier may be coded again at a lower one before they are
            dropped; without it pages, those of the prompt too, stay as they are or go.
    """

    tiers: TierTable
    seal_tier: str = "k4v4"
    long_tiers: TierTable | None = None
    policy: RetentionPolicy = field(default_factory=RetentionPolicy)
    options: ControlOptions = field(default_factory=ControlOptions)
    protection: ProtectionRule = field(default_factory=ProtectionRule)
    segments: SegmentSpans = field(default_factory=SegmentSpans)
    gate: GateOptions | None = None
    horizon: tuple[int, ...] = (8, 32, 96)
    error_samples: int = 256
    new_run_scale: float = 0.3
    young_pages: int = 1
    refresh_share: float = 0.0
    long_refresh_share: float = 0.0
    demotes: bool = True

    def __post_init__(self) -> None:
        """Reject tiers that cannot be decided about together."""
        freeze_sequences(self, "horizon")
        for tiers in (self.tiers, self.long_tiers):
            if tiers is not None:
                _check_pages(tiers)
        names, long = ([tier.name for tier in each] for each in (self.tiers, self.paged_long))
        if names != long:
            raise ValueError(f"long_tiers must be the same tiers, got {long} for {names}")
        if not self.tiers[self.seal_tier].is_coded:
            raise ValueError(f"seal_tier must be a coded tier, got {self.seal_tier!r}")
        for name in ("refresh_share", "long_refresh_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)!r}")

    @property
    def paged_long(self) -> TierTable:
        """Tiers with the pages of long prompts."""
        return self.tiers if self.long_tiers is None else self.long_tiers

    @property
    def page_tokens(self) -> int:
        """States of a coded page."""
        return next(tier.page_tokens for tier in self.tiers if tier.is_coded)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """What a cache is built from.

    Attributes:
        geometry: Shape of the cache.
        ropes: Rotary embedding of every layer.
        windows: Sliding window of every layer in tokens; None for full attention.
        tiers: Tiers that one-tier residency chooses from.
        tier: The tier of sealed pages; None lets the budget choose when states are coded.
        budget: Ceiling on the resident bytes of each sequence; None for none.
        retention: How the controller works; None never uses it.
        is_retention_forced: Whether the controller decides at any budget.
        context: Tokens at which a budget of total bytes must hold with one tier.
        sink_tokens: First tokens that stay dense in layers with full attention.
        recent_tokens: Newest tokens that stay dense with one tier.
        min_calibration_tokens: Tokens that are seen, and kept dense, before the cache
            calibrates itself.
        calibration: How it does.
        device: Torch device of the cache.
    """

    geometry: KVGeometry
    ropes: tuple[RopeSpec, ...]
    windows: tuple[int | None, ...]
    tiers: TierTable
    tier: str | None = None
    budget: ByteBudget | None = None
    retention: RetentionConfig | None = None
    is_retention_forced: bool = False
    context: int | None = None
    sink_tokens: int = 4
    recent_tokens: int = 32
    min_calibration_tokens: int = 512
    calibration: CalibrationOptions = field(default_factory=lambda: PROMPT_CALIBRATION)
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Reject sizes that do not fit together."""
        freeze_sequences(self, "ropes", "windows")
        layers = self.geometry.num_layers
        for name in ("ropes", "windows"):
            if len(getattr(self, name)) != layers:
                raise ValueError(f"{len(getattr(self, name))} {name} for {layers} layers")
        for name, least in (
            ("sink_tokens", 0),
            ("recent_tokens", 1),
            ("min_calibration_tokens", LEAST_TOKENS + self.sink_tokens),
        ):
            _check_count(name, getattr(self, name), least)
        if self.context is not None:
            _check_count("context", self.context, 1)
        if self.tier is None and self.budget is None:
            raise ValueError("a cache needs a tier or a budget")
        if self.is_retention_forced and (self.retention is None or self.budget is None):
            raise ValueError("retention needs a budget")
        if self.tier is not None:
            self.tiers.id_of(self.tier)
        self.tiers.check_head_dim(self.geometry.head_dim)
        if self.retention is not None:
            self.retention.tiers.check_head_dim(self.geometry.head_dim)
            shape = self.geometry
            self.retention.policy.check_shape(
                shape.num_layers, shape.num_query_heads, shape.num_kv_heads
            )

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers with full attention."""
        return tuple(layer for layer, window in enumerate(self.windows) if window is None)


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """How the states of a batch stay resident, decided when they are coded.

    Attributes:
        kind: ``"uniform"``: every sealed page at one tier; ``"retention"``: the controller decides.
        tiers: Tiers of the pages.
        tier: Tier at which pages seal.
        recent_tokens: Newest tokens that stay dense when a page seals.
        max_bytes: Hard limit on the bytes of one sequence; None for none.
        refresh_share: Part of the ceiling that is freed at once; see ``RetentionConfig``.
    """

    kind: str
    tiers: TierTable
    tier: str
    recent_tokens: int
    max_bytes: int | None = None
    refresh_share: float = 0.0

    @property
    def spec(self) -> TierSpec:
        """Tier at which pages seal."""
        return self.tiers[self.tier]

    @property
    def is_retention(self) -> bool:
        """Whether the controller decides."""
        return self.kind == "retention"

    @property
    def window_margin(self) -> int:
        """Tokens kept beyond a sliding window, so that a crop finds them."""
        return self.spec.page_tokens + self.recent_tokens

    def slab_pages(self, config: CacheConfig, *, is_aligned: bool = False) -> int:
        """Pages of the largest slab; a GPU counts in gigabytes and likes few allocations."""
        if self.is_retention:
            # no more than seal at once: one slab is kept in reserve
            seals = config.geometry.num_layers * config.geometry.num_kv_heads
            return min(_ALIGNED_SLAB_PAGES, seals) if is_aligned else _RETENTION_SLAB_PAGES
        return _MAX_SLAB_PAGES if config.device == "cpu" else _MAX_GPU_SLAB_PAGES

    def store_config(
        self, config: CacheConfig, num_sequences: int, *, is_aligned: bool = False
    ) -> StoreConfig:
        """Config of a store for a batch of so many sequences."""
        limit = None if self.max_bytes is None else self.max_bytes * num_sequences
        return StoreConfig(
            config.geometry,
            self.tiers,
            seal_tier=self.tier,
            recent_tokens=self.recent_tokens,
            max_bytes=limit,
            max_slab_pages=self.slab_pages(config, is_aligned=is_aligned),
            has_few_kinds=is_aligned and self.is_retention,
            device=config.device,
        )


def allowed_bytes(budget: ByteBudget, config: CacheConfig, num_tokens: int) -> int:
    """Bytes a budget allows a sequence; a share is of a dense cache with the same windows."""
    if budget.kind != "share":
        return budget.resolve(config.geometry, num_tokens)
    held = sum(
        num_tokens if window is None else min(window, num_tokens) for window in config.windows
    )
    return budget.resolve(replace(config.geometry, num_layers=1), held)


def _check_pages(tiers: TierTable) -> None:
    """Reject tiers whose pages cannot stand for one another."""
    sizes = {tier.page_tokens for tier in tiers if tier.is_coded}
    if len(sizes) != 1:
        raise ValueError(f"coded pages must all hold as many states, got {sorted(sizes)}")
    if tiers[tiers.dense_id].page_tokens != RUN_TOKENS:
        raise ValueError(f"dense pages must hold {RUN_TOKENS} states")


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
