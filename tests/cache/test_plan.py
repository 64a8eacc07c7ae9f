# SPDX-License-Identifier: Apache-2.0
"""Which pages the controller's prompts have: small ones, and large ones where prompts are long."""

from dataclasses import replace
from typing import Any

import pytest
from tests.cache.test_retention import GEOMETRY, NoAttention, check_bytes, make_engine, run

from sphkv.cache import plan
from sphkv.cache.config import CacheConfig, RetentionConfig
from sphkv.cache.plan import (
    choose_residency,
    choose_seal_tier,
    holds_from,
    long_tiers,
    parse_tiers,
    refresh_shares,
    retention_tiers,
)
from sphkv.core.budget import ByteBudget
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.retention.policy import RetentionPolicy
from sphkv.retention.protection import ProtectionRule, SegmentSpans
from sphkv.store.layout import PageLayout

HEAD_DIM = 128


class TwoSizes:
    """The page order of a kernel that reads pages of 64 and of 128 states."""

    page_sizes: tuple[int, ...] = (64, 128)

    def takes(self, layout: PageLayout) -> bool:
        return layout.num_nibbles <= 128

    def alignment(self, layout):
        return layout.page_bytes

    def to_slab(self, layout, pages):
        return pages

    def from_slab(self, layout, pages):
        return pages


def gpu_config(budget: str) -> CacheConfig:
    """A cache of Llama-3.1-8B's shape on a GPU."""
    geometry, order = KVGeometry(32, 8, 32, HEAD_DIM), TwoSizes()
    tiers, asked = retention_tiers(HEAD_DIM, order=order), ByteBudget.parse(budget)
    shares = refresh_shares(tiers, order)
    retention = RetentionConfig(
        tiers,
        choose_seal_tier(tiers, asked, geometry, order=order),
        long_tiers(tiers, order, HEAD_DIM),
        refresh_share=shares[0],
        long_refresh_share=shares[1],
        demotes=False,
    )
    return CacheConfig(
        geometry,
        (RopeSpec.from_config({"rope_theta": 5e5}, HEAD_DIM),) * 32,
        (None,) * 32,
        parse_tiers(None, HEAD_DIM),
        budget=asked,
        retention=retention,
        is_retention_forced=True,
        device="cuda",
    )


@pytest.mark.parametrize(
    ("budget", "tokens", "size"),
    [
        ("10%", 4096, 64),
        ("10%", 32767, 64),
        ("10%", 32768, 128),
        ("5%", 131072, 128),
        # large tails would take too much of what there is
        ("1%", 32768, 64),
        ("64MiB", 131072, 64),
        ("1GiB", 131072, 128),
    ],
)
def test_long_prompts_have_large_pages_where_little_is_lost(budget, tokens, size):
    config = gpu_config(budget)
    found = choose_residency(config, tokens)
    assert found is not None
    assert found.spec.page_tokens == size
    assert config.retention is not None
    assert found.tier == config.retention.seal_tier
    assert found.refresh_share == (1 / 32 if size == 64 else 1 / 8)


@pytest.mark.parametrize(("budget", "tokens"), [("25%", 512), ("10%", 1024), ("5%", 2048)])
def test_short_prompts_of_a_gpu_hold_their_budget(budget, tokens):
    start = holds_from(gpu_config(budget))
    assert start is not None
    assert start <= tokens


def test_asking_for_a_size_leaves_no_other():
    order = TwoSizes()
    tiers = retention_tiers(HEAD_DIM, 128, order=order)
    assert long_tiers(tiers, order, HEAD_DIM) is None
    assert refresh_shares(tiers, order) == (1 / 8, 1 / 8)
    portable = retention_tiers(HEAD_DIM)
    assert long_tiers(portable, None, HEAD_DIM) is None
    assert refresh_shares(portable, None) == (0.0, 0.0)


def test_long_tiers_are_the_same_tiers():
    config = gpu_config("10%").retention
    assert config is not None
    with pytest.raises(ValueError, match="long_tiers must be the same tiers"):
        replace(config, long_tiers=retention_tiers(HEAD_DIM, 128))


def test_a_long_prompt_is_stored_in_large_pages(monkeypatch):
    """Decided, written and decoded under its ceiling, with pages that its tail becomes."""
    monkeypatch.setattr(plan, "LONG_PROMPT_TOKENS", 1200)
    # these prompts are still so short that their tails take much
    monkeypatch.setattr(plan, "_LONG_FIXED_PART", 1.0)
    larger = retention_tiers(GEOMETRY.head_dim, 64)
    for tokens, size in ((1000, 32), (1500, 64)):
        engine = make_engine("25%", long_tiers=larger)
        run(engine, tokens)
        assert engine.plan is not None
        assert engine.store is not None
        assert engine.plan.spec.page_tokens == size
        assert {tier.page_tokens for tier in engine.store.config.tiers if tier.is_coded} == {size}
        for _ in range(2 * size):
            run(engine, 1)
        check_bytes(engine)
        assert engine.resident_bytes() <= (engine.limit_bytes() or 0)


def test_kernels_of_both_page_sizes_are_made_ready(monkeypatch):
    asked = []
    monkeypatch.setattr(
        NoAttention, "prepare", lambda self, tables, geometry: asked.append((tables, geometry))
    )
    larger = retention_tiers(GEOMETRY.head_dim, 64)
    make_engine("25%", long_tiers=larger)
    make_engine("25%")
    sizes = [
        [{tier.page_tokens for tier in tiers if tier.is_coded} for tiers in tables]
        for tables, _ in asked
    ]
    assert sizes == [[{32}, {64}], [{32}]]


def test_lists_in_a_config_are_values():
    """What came from JSON has lists where dataclasses say tuples."""
    wanted = gpu_config("10%")
    asked = wanted.retention
    assert asked is not None
    policy = RetentionPolicy(sensitivity=((1.0,) * 32,) * 32)
    retention = replace(
        asked,
        policy=policy,
        protection=ProtectionRule(spans=((32, 64),)),
        segments=SegmentSpans(((96, 128),)),
    )
    wanted = replace(wanted, retention=retention)
    given: dict[str, Any] = {
        "sensitivity": [[1.0] * 32] * 32,
        "segment_weights": [1.0, 1.0, 1.0],
        "spans": [[32, 64]],
        "retrieved": [[96, 128]],
        "horizon": list(retention.horizon),
        "windows": [None] * 32,
        "ropes": list(wanted.ropes),
    }

    def take(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names}

    lists = replace(
        retention,
        policy=RetentionPolicy(**take("sensitivity", "segment_weights")),
        protection=ProtectionRule(**take("spans")),
        segments=SegmentSpans(**take("retrieved")),
        **take("horizon"),
    )
    config = replace(wanted, retention=lists, **take("windows", "ropes"))
    assert config == wanted
    assert holds_from(config) == holds_from(wanted)
