# SPDX-License-Identifier: Apache-2.0
"""The cache of a batch of sequences: dense first, then coded, under a byte budget."""

from sphkv.cache.engine import CacheEngine
from sphkv.cache.method import CacheMethod
from sphkv.cache.plan import CacheConfig, budget_tiers, plan_cache, sequence_bytes
from sphkv.cache.sequence import SphericalSequence
from sphkv.cache.step import StepTokens

__all__ = [
    "CacheConfig",
    "CacheEngine",
    "CacheMethod",
    "SphericalSequence",
    "StepTokens",
    "budget_tiers",
    "plan_cache",
    "sequence_bytes",
]
