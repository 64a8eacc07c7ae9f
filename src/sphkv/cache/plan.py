# SPDX-License-Identifier: Apache-2.0
"""From a byte budget to how states stay resident, charging everything that does.

A budget is a ceiling at every length from ``holds_from`` on. Below it the dense parts that every
sequence needs, sinks and the open tail, weigh more than a share of so few tokens allows: a batch
stays dense until its longest row has that length, and a shorter row may take what it would be
allowed there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sphkv.cache.config import CacheConfig, ResidencyPlan, allowed_bytes
from sphkv.core.budget import ByteBudget
from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import RUN_TOKENS, TierSpec, TierTable, ladder, parse_tier, tier_table
from sphkv.errors import BudgetError
from sphkv.store.layout import PageLayout
from sphkv.store.order import PageOrder
from sphkv.store.paging import PositionMode
from sphkv.store.slabs import slab_bytes

# Key and value bits from which on one tier for all tokens is taken: it loses little then, and the
# fastest kernels serve it. Below, the controller loses less with the same bytes: it codes finely
# what is asked for and drops what nobody will ask for (docs/suites.md, "25%").
LEAST_UNIFORM_TIER = (4.0, 4)
# The controller watches the queries of this many tokens before it decides.
LEAST_DECIDED_TOKENS = 256

RETENTION_PAGE_TOKENS = 32
"""States of a coded page: small ones suit tight budgets and short prompts."""

RETENTION_TIERS = ("k1v2", "k1.5v2", "k2v2", "k2v3", "k3v3", "k3v4", "k4v4", "k6v8")
"""Coded tiers of the ladder that the controller chooses from."""

FAST_RETENTION_TIERS = ("k2v2", "k3v4", "k4v8", "k6v8")
"""Fewer of them, where every tier of a layer is a launch of a kernel."""

LONG_PROMPT_TOKENS = 32768
"""Prompts from this length on have the largest pages that a backend's kernels read.

Half as many pages are read, listed and given up in less time; what tails and half-filled pages
take of a ceiling, which is why shorter prompts have small ones, is little here.
"""

# Part of a ceiling that tails, sinks and first seals may take where pages are large.
_LONG_FIXED_PART = 1 / 8

# Part of the ceiling that is freed at once where changing pages means listing them anew, by the
# smallest and the largest pages: many pages take long to list, so that it is done rarely.
_FAST_REFRESH_SHARE, _LONG_REFRESH_SHARE = 1 / 32, 1 / 8

# Budgets from this share on seal new states at the finer of two tiers (key and value bits).
_FINE_SEAL_SHARE = 0.04
# The same where changing pages means listing them anew: what is sealed finely soon makes others go.
_FAST_FINE_SEAL_SHARE = 0.15
_FINE_SEAL, _COARSE_SEAL = (6.0, 8), (4.0, 4)
_SEAL_CONTEXT = 8192
_SLAB_GROWTH_SHARE = 16
_TABLE_ENTRY_BYTES = 10
# Bytes of notes about one run of a head: importance and loss of dropping, in half precision.
_RUN_NOTE_BYTES = 4
# Sealed pages of pools with few pages leave places free in their slabs.
_RETENTION_SLACK_PAGES = 24
_LONGEST = 1 << 24


def choose_residency(config: CacheConfig, num_tokens: int) -> ResidencyPlan | None:
    """How sequences of at least so many tokens stay resident; None if they must stay dense.

    Args:
        config: The cache.
        num_tokens: Tokens of the shortest sequence that the budget must hold for.

    Raises:
        BudgetError: A budget of total bytes is too small for any residency.
    """
    if config.tier is not None:
        return ResidencyPlan("uniform", config.tiers, config.tier, config.recent_tokens)
    budget, retention = config.budget, config.retention
    assert budget is not None
    if not config.is_retention_forced:
        tier = _highest_tier(config, num_tokens)
        if tier is not None and (retention is None or _is_good(config.tiers[tier])):
            limit = int(budget.amount) if budget.kind == "total" else None
            return ResidencyPlan("uniform", config.tiers, tier, config.recent_tokens, limit)
    if retention is None:
        return None
    if num_tokens < retention_holds_from(config):
        return None
    is_long = _has_long_pages(config, num_tokens)
    return ResidencyPlan(
        "retention",
        retention.paged_long if is_long else retention.tiers,
        retention.seal_tier,
        0,
        refresh_share=retention.long_refresh_share if is_long else retention.refresh_share,
    )


def _has_long_pages(config: CacheConfig, num_tokens: int) -> bool:
    """Whether sequences of at least so many tokens have the controller's larger pages."""
    budget, retention = config.budget, config.retention
    assert budget is not None
    assert retention is not None
    if num_tokens < LONG_PROMPT_TOKENS or retention.long_tiers is None:
        return False
    fixed = retention_fixed_bytes(config, num_tokens, retention.long_tiers)
    return fixed <= _LONG_FIXED_PART * allowed_bytes(budget, config, num_tokens)


def _is_good(tier: TierSpec) -> bool:
    key_bits, value_bits = LEAST_UNIFORM_TIER
    return not tier.is_coded or (tier.key_bits >= key_bits and tier.value_bits >= value_bits)


def _highest_tier(config: CacheConfig, num_tokens: int) -> str | None:
    """The highest tier with which a sequence fits its budget from ``num_tokens`` on."""
    budget = config.budget
    assert budget is not None
    if budget.kind == "total":
        num_tokens = max(num_tokens, config.context or num_tokens)
    for tier in reversed([tier for tier in config.tiers if tier.kind != "drop"]):
        start = uniform_holds_from(config, tier.name)
        if budget.kind == "total":
            plan = _uniform(config, tier.name)
            if sequence_bytes(config, plan, num_tokens) <= allowed_bytes(
                budget, config, num_tokens
            ):
                return tier.name
        elif start is not None and start <= num_tokens:
            return tier.name
    return None


def _uniform(config: CacheConfig, tier: str) -> ResidencyPlan:
    return ResidencyPlan("uniform", config.tiers, tier, config.recent_tokens)


def holds_from(config: CacheConfig) -> int | None:
    """Shortest length from which on the budget is a ceiling at every step; None without one.

    Raises:
        BudgetError: No residency can hold it at any length, or a total not at ``context``.
    """
    budget = config.budget
    if budget is None:
        return None
    if config.retention is not None:
        return retention_holds_from(config)
    names = [tier.name for tier in config.tiers if tier.kind != "drop"]
    if budget.kind == "total":
        length = config.context or 1
        if _highest_tier(config, length) is not None:
            return 1
    else:
        length = LEAST_DECIDED_TOKENS
        starts = [uniform_holds_from(config, name) for name in names]
        found = min((start for start in starts if start is not None), default=None)
        if found is not None:
            return found
    needed = min(sequence_bytes(config, _uniform(config, name), length) for name in names)
    allowed = allowed_bytes(budget, config, length)
    raise BudgetError(needed, allowed, allowed, f"a sequence of {length} tokens with one tier")


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The bytes a sequence may keep resident at every length.

    Attributes:
        config: The cache.
        holds_from: Shortest length at which the budget itself is the ceiling; None without one.
    """

    config: CacheConfig
    holds_from: int | None

    @classmethod
    def of(
        cls,
        config: CacheConfig,
        plan: ResidencyPlan | None = None,
        *,
        is_calibrated: bool = True,
    ) -> Ceiling:
        """The ceiling of a cache's budget.

        Args:
            config: The cache.
            plan: How its states stay resident, once that is decided: a tier that was chosen for
                long sequences holds the budget of those only, also after a crop.
            is_calibrated: Whether it has codebooks; one that must calibrate itself is dense for
                longer.

        Raises:
            BudgetError: No residency can hold the budget.
        """
        start = holds_from(config)
        budget = config.budget
        if start is not None and not is_calibrated:
            start = max(start, config.min_calibration_tokens)
        if plan is None or plan.is_retention or budget is None or budget.kind == "total":
            return cls(config, start)
        return cls(config, max(start or 0, uniform_holds_from(config, plan.tier) or 0))

    def bytes_at(self, num_tokens: int) -> int | None:
        """Bytes for so many tokens; None without a budget."""
        budget = self.config.budget
        if budget is None:
            return None
        return allowed_bytes(budget, self.config, max(num_tokens, self.holds_from or 0))


# every prompt asks
@functools.lru_cache(maxsize=256)
def uniform_holds_from(config: CacheConfig, tier: str) -> int | None:
    """Shortest length from which on one tier fits a share or per-token budget."""
    plan, step = _uniform(config, tier), config.tiers[tier].page_tokens
    budget = config.budget
    assert budget is not None

    def fits(pages: int) -> bool:
        # the budget grows by the token, bytes grow by the page: just before a page seals
        # counts as much as just after
        tokens = pages * step
        return sequence_bytes(config, plan, tokens + step) <= allowed_bytes(budget, config, tokens)

    # a window stops earning bytes before it stops taking them: from there on both only grow
    longest = max((window for window in config.windows if window is not None), default=0)
    settled = -(-(longest + plan.window_margin) // step) + 1 if longest else 1
    found = _first(fits, _LONGEST // step, settled=settled)
    return None if found is None else found * step


@functools.lru_cache(maxsize=256)
def retention_holds_from(config: CacheConfig) -> int:
    """Shortest length from which on the controller can hold the budget.

    Raises:
        BudgetError: A budget of total bytes, or one too small for windows, never holds.
    """
    budget = config.budget
    assert budget is not None

    def fits(runs: int) -> bool:
        tokens = runs * RUN_TOKENS
        return retention_fixed_bytes(config, tokens) <= allowed_bytes(budget, config, tokens)

    least = LEAST_DECIDED_TOKENS // RUN_TOKENS
    found = least if fits(least) else _first(fits, _LONGEST // RUN_TOKENS)
    if found is None:
        allowed = allowed_bytes(budget, config, LEAST_DECIDED_TOKENS)
        needed = retention_fixed_bytes(config, LEAST_DECIDED_TOKENS)
        raise BudgetError(needed, allowed, allowed, "a sequence of any length")
    return max(found, least) * RUN_TOKENS


def _first(fits: Callable[[int], bool], limit: int, *, settled: int = 1) -> int | None:
    """Least number from 1 on that fits, if all larger ones do.

    Args:
        fits: Asked about a number; from ``settled`` on, what fits once fits always.
        limit: Largest number to ask about.
        settled: Below it every number is asked about.
    """
    high = settled
    while not fits(high):
        high *= 2
        if high > limit:
            return None
    low = high // 2
    if high == settled:
        while high > 1 and fits(high - 1):
            high -= 1
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def sequence_bytes(config: CacheConfig, plan: ResidencyPlan, num_tokens: int) -> int:
    """Most bytes a sequence can keep resident with one tier: pages, free pages, tables, tails.

    Args:
        config: The cache.
        plan: Residency with one tier.
        num_tokens: Tokens of the sequence.
    """
    geometry, tier = config.geometry, plan.spec
    heads = geometry.num_kv_heads
    tail_bytes = heads * (tier.page_tokens + plan.recent_tokens) * geometry.dense_state_bytes
    total = num_tokens and geometry.num_layers * tail_bytes
    coded_pages = sink_pages = 0
    for window in config.windows:
        body = max(0, num_tokens - config.sink_tokens - plan.recent_tokens)
        pages = body // tier.page_tokens
        if window is not None:
            kept = window + plan.window_margin
            pages = min(pages, -(-kept // tier.page_tokens) + 1)
        sinks = -(-min(config.sink_tokens, num_tokens) // RUN_TOKENS)
        coded_pages += heads * pages
        sink_pages += heads * sinks
        total += heads * (8 + _table_entries(pages + sinks) * _TABLE_ENTRY_BYTES)
    total += _pool_bytes(config, plan, plan.tier, coded_pages)
    return total + _pool_bytes(config, plan, plan.tiers[plan.tiers.dense_id].name, sink_pages)


def retention_fixed_bytes(
    config: CacheConfig, num_tokens: int, tiers: TierTable | None = None
) -> int:
    """Bytes that no decision can give up: tails, sinks, windows, notes, and one sealing page.

    Args:
        config: The cache; has a retention part.
        num_tokens: Tokens of the sequence.
        tiers: Tiers of its pages; those of short prompts if None.
    """
    retention = config.retention
    assert retention is not None
    plan = ResidencyPlan("retention", tiers or retention.tiers, retention.seal_tier, 0)
    geometry, seal = config.geometry, plan.spec
    heads, layers = geometry.num_kv_heads, geometry.num_layers
    tails = layers * heads * seal.page_tokens * geometry.dense_state_bytes
    sinks = -(-retention.protection.sink_tokens // RUN_TOKENS) * heads * layers
    seals = heads * layers
    for window in config.windows:
        if window is not None:
            seals += heads * (-(-(window + plan.window_margin) // seal.page_tokens) + 1)
    runs = num_tokens // RUN_TOKENS
    tables = layers * heads * (8 + _table_entries(8) * _TABLE_ENTRY_BYTES)
    notes = len(config.full_layers) * heads * (runs * _RUN_NOTE_BYTES + 8 * len(plan.tiers) + 64)
    dense = plan.tiers[plan.tiers.dense_id].name
    slack = _RETENTION_SLACK_PAGES + seals
    if config.device != "cpu" and retention.demotes:
        # slabs are larger there, and one is kept in reserve for pages that are coded again
        slack += plan.slab_pages(config, is_aligned=True)
    return (
        tails
        + tables
        + notes
        + _page_bytes(config, plan, dense) * sinks
        + _page_bytes(config, plan, plan.tier) * slack
    )


def _table_entries(pages: int) -> int:
    return max(4, pages * 3 // 2 + 1)


def _pool_bytes(config: CacheConfig, plan: ResidencyPlan, tier: str, pages: int) -> int:
    """Bytes of so many pages with the free ones their slabs may hold."""
    most = plan.slab_pages(config)
    spare = min(most - 1, pages // _SLAB_GROWTH_SHARE)
    if config.device != "cpu":
        # kernels want slabs whose pages are aligned, at the price of one page each
        spare += 2 + _SLAB_GROWTH_SHARE + pages // most
    return (pages + spare) * _page_bytes(config, plan, tier)


def _page_bytes(config: CacheConfig, plan: ResidencyPlan, tier: str) -> int:
    """Bytes of one page with its counters."""
    layout = PageLayout(
        plan.tiers.id_of(tier),
        plan.tiers[tier],
        config.geometry.head_dim,
        PositionMode.CONTIGUOUS,
    )
    return slab_bytes(layout, 1)


def retention_tiers(
    head_dim: int,
    page_tokens: int | None = None,
    table: TierTable | None = None,
    *,
    order: PageOrder | None = None,
) -> TierTable:
    """Tiers the controller chooses from.

    Args:
        head_dim: Elements of one key.
        page_tokens: States of a coded page; as few as the kernel reads if None, or as a tight
            budget wants them where any will do.
        table: Tiers to take instead of the default ones.
        order: How the backend keeps pages; with pages of its kernel's size, tiers that the kernel
            reads.
    """
    fits_kernel = order is not None and page_tokens in (None, *order.page_sizes)
    if page_tokens is None:
        page_tokens = RETENTION_PAGE_TOKENS if order is None else order.page_sizes[0]
    names: Iterable[str] = FAST_RETENTION_TIERS if fits_kernel else RETENTION_TIERS
    if table is not None:
        names = [tier.name for tier in table if tier.is_coded]
    elif fits_kernel and order is not None:
        every = ladder(head_dim, page_tokens=page_tokens, names=names)
        names = [tier.name for tier in every if _is_read(order, tier, head_dim)]
    return ladder(head_dim, page_tokens=page_tokens, names=names)


def _is_read(order: PageOrder, tier: TierSpec, head_dim: int) -> bool:
    return tier.is_coded and order.takes(PageLayout(1, tier, head_dim, PositionMode.RUNS))


def is_fast(tiers: TierTable, order: PageOrder | None) -> bool:
    """Whether coded pages are of the size that the backend's kernel reads."""
    coded = next((tier for tier in tiers if tier.is_coded), None)
    return order is not None and coded is not None and coded.page_tokens in order.page_sizes


def long_tiers(tiers: TierTable, order: PageOrder | None, head_dim: int) -> TierTable | None:
    """Tiers with the largest pages that the backend's kernel reads; None if there are no larger.

    Args:
        tiers: Tiers of shorter prompts.
        order: How the backend keeps pages.
        head_dim: Elements of one key.
    """
    if order is None or not is_fast(tiers, order):
        return None
    coded = [tier for tier in tiers if tier.is_coded]
    largest = order.page_sizes[-1]
    if coded[0].page_tokens == largest:
        return None
    return ladder(head_dim, page_tokens=largest, names=[tier.name for tier in coded])


def refresh_shares(tiers: TierTable, order: PageOrder | None) -> tuple[float, float]:
    """Parts of the ceiling to free at once, of short and of long prompts; see ``RetentionConfig``.

    Args:
        tiers: Tiers of shorter prompts.
        order: How the backend keeps pages.
    """
    if order is None or not is_fast(tiers, order):
        return 0.0, 0.0
    sizes = {tier.page_tokens for tier in tiers if tier.is_coded}
    has_small = order.page_sizes[-1] not in sizes
    return _FAST_REFRESH_SHARE if has_small else _LONG_REFRESH_SHARE, _LONG_REFRESH_SHARE


def choose_seal_tier(
    tiers: TierTable,
    budget: ByteBudget,
    geometry: KVGeometry,
    *,
    order: PageOrder | None = None,
) -> str:
    """Tier at which new states leave the dense tail: a finer one where bytes are plenty."""
    dense = geometry.dense_bytes_per_token * _SEAL_CONTEXT
    share = budget.resolve(geometry, _SEAL_CONTEXT) / dense
    coded = [tier for tier in tiers if tier.is_coded]
    least = _FAST_FINE_SEAL_SHARE if is_fast(tiers, order) else _FINE_SEAL_SHARE
    wanted = _FINE_SEAL if share >= least else _COARSE_SEAL
    fitting = [tier for tier in coded if (tier.key_bits, tier.value_bits) <= wanted]
    return (fitting or coded)[-1].name


def parse_tiers(
    tiers: TierTable | TierSpec | str | Sequence[TierSpec | str] | None, head_dim: int
) -> TierTable:
    """A tier table from what a user may write: a table, tiers, or names such as ``"k2v3"``."""
    if isinstance(tiers, TierTable):
        return tiers
    if tiers is None:
        return ladder(head_dim)
    wanted = [tiers] if isinstance(tiers, TierSpec | str) else list(tiers)
    parsed = [parse_tier(tier) if isinstance(tier, str) else tier for tier in wanted]
    return tier_table([tier for tier in parsed if tier.is_coded], head_dim)
