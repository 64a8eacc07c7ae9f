# SPDX-License-Identifier: Apache-2.0
"""Every way to keep a cache, by name: ours and the baselines, under one budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sphkv.attention.api import get_backend
from sphkv.baselines.eviction import EvictionCache
from sphkv.baselines.h2o import HeavyHitters
from sphkv.baselines.registry import BASELINES, make_baseline
from sphkv.cache.method import CacheMethod
from sphkv.cache.plan import CacheConfig, budget_tiers, plan_cache
from sphkv.cache.retained import RetainedSequence
from sphkv.cache.retained_config import RetainedConfig, retention_tiers
from sphkv.cache.sequence import SphericalSequence
from sphkv.codec.calibration import Calibration
from sphkv.codec.states import SphericalCodec
from sphkv.core.budget import ByteBudget
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import TierTable
from sphkv.evaluation.harness.subject import MethodSubject, Subject
from sphkv.evaluation.names import check_name
from sphkv.evaluation.runner.shared_work import SharedWork
from sphkv.retention.gate import GateOptions
from sphkv.retention.policy import ControlOptions
from sphkv.retention.policy import RetentionPolicy
from sphkv.retention.protection import ProtectionRule
from sphkv.retention.protection import SegmentSpans
from sphkv.store.store import PageStore

DENSE = "dense"
UNIFORM = "spherical"
JOINT = "joint"
OUR_METHODS = (UNIFORM, JOINT)
_REBUILT_BYTES = 4


def method_names() -> tuple[str, ...]:
    """Every method that can be measured: dense, ours, then the baselines."""
    return (DENSE, *OUR_METHODS, *(name for name in BASELINES if name != DENSE))


@dataclass(frozen=True, slots=True, eq=False)
class ModelShape:
    """What a method must know of a model.

    Attributes:
        geometry: Shape of the cache.
        ropes: Rotary embedding of every layer.
        windows: Sliding window of every layer; None for full attention.
        max_tokens: Longest context; None if the model states none.
    """

    geometry: KVGeometry
    ropes: tuple[RopeSpec, ...]
    windows: tuple[int | None, ...]
    max_tokens: int | None


class MethodFactory:
    """Makes fresh caches inside one model."""

    def __init__(
        self,
        model: Any,
        shape: ModelShape,
        calibration: Calibration,
        *,
        backend: str,
        policy: RetentionPolicy | None = None,
    ) -> None:
        """Take what our methods use.

        Args:
            model: The model.
            shape: Its shape.
            calibration: Codebooks of the angle codes.
            backend: Name of a decode backend, or ``"auto"``.
            policy: The controller's weights; equal weights if None.
        """
        self._policy = policy or RetentionPolicy()
        self._model = model
        self._shape = shape
        self._codec = SphericalCodec(calibration)
        planes = calibration.planes
        points = (planes.mean, planes.pair, planes.single, planes.stages)
        self._table_bytes = sum(part.nbytes for part in points)
        self._backend = get_backend(backend)

    @property
    def backend_name(self) -> str:
        """What runs the decode of our methods."""
        return self._backend.name

    def tiers(self) -> TierTable:
        """Tiers that our methods choose from."""
        return budget_tiers(self._shape.geometry.head_dim)

    def make(
        self, name: str, budget: str, *, context: int, work: SharedWork | None = None
    ) -> Subject:
        """An empty cache.

        Args:
            name: ``dense``, one of ours, or a baseline of the registry.
            budget: Byte budget, such as ``"20%"``; ``dense`` ignores it.
            context: Tokens at which the budget must hold.
            work: What caches of the same prompt share; None shares nothing.

        Raises:
            ValueError: There is no such method, or the budget is too small for it.
        """
        if name == DENSE:
            return self._subject(self._uniform("100%", context, tier="max"), "100%")
        if name == UNIFORM:
            return self._subject(self._uniform(budget, context, tier=None), budget)
        if name == JOINT:
            return self.controlled(budget, work=work)
        check_name("method", name, method_names())
        limit = ByteBudget.parse(budget)
        method = make_registered(name, self._shape, limit, num_tokens=context)
        if work is not None and isinstance(method, EvictionCache):
            method.shared = work.scores
            if isinstance(method.policy, HeavyHitters):
                method.policy.shared = work.scores.attention
        return MethodSubject(self._model, method, self._shape.geometry, budget=limit)

    def _subject(self, method: CacheMethod, budget: str) -> Subject:
        """One of ours, whose codebooks are counted beside it."""
        is_dense = budget == "100%" and method.name == UNIFORM
        return MethodSubject(
            self._model,
            method,
            self._shape.geometry,
            budget=ByteBudget.parse(budget),
            table_bytes=0 if is_dense else self._table_bytes,
        )

    def _config(self, tier: str) -> CacheConfig:
        shape = self._shape
        tiers = budget_tiers(shape.geometry.head_dim)
        return CacheConfig(shape.geometry, shape.ropes, shape.windows, tiers, tier)

    def _uniform(self, budget: str, context: int, *, tier: str | None) -> CacheMethod:
        config = self._config("max")
        if tier is None:
            config = plan_cache(config, ByteBudget.parse(budget), context)
        store = PageStore(config.store_config(1), self._codec)
        store.create(0)
        return SphericalSequence(config, store, 0, self._backend)

    def controlled(
        self,
        budget: str,
        *,
        protection: ProtectionRule | None = None,
        gate: GateOptions | None = None,
        options: ControlOptions | None = None,
        segments: SegmentSpans | None = None,
        page_tokens: int | None = None,
        work: SharedWork | None = None,
    ) -> Subject:
        """The controller's choice of what to keep at which tier.

        Args:
            budget: Byte budget.
            protection: States that stay dense; the usual ones if None.
            gate: Stability gate; None for none.
            options: Variant and solver; the usual ones if None.
            segments: Passages of the prompt; none if None.
            page_tokens: States of a coded page; the usual number if None.
            work: As ``make``; needs the usual protection.
        """
        shape = self._shape
        config = RetainedConfig(
            shape.geometry,
            shape.ropes,
            ByteBudget.parse(budget),
            policy=self._policy,
            protection=protection or ProtectionRule(),
            gate=gate,
            options=options or ControlOptions(),
            segments=segments or SegmentSpans(),
            tiers=retention_tiers() if page_tokens is None else retention_tiers(page_tokens),
        )
        measured = None if work is None else work.layers
        method = RetainedSequence(config, self._codec, self._backend, measured=measured)
        return self._subject(method, budget)


def make_registered(
    name: str, shape: ModelShape, budget: ByteBudget, *, num_tokens: int
) -> CacheMethod:
    """A baseline of ``sphkv.baselines`` for a prompt of so many tokens."""
    geometry = shape.geometry
    share = budget.resolve(geometry, num_tokens) / (geometry.dense_bytes_per_token * num_tokens)
    return make_baseline(name, geometry, shape.ropes, share, num_tokens=num_tokens)


def decode_bytes(subject: Subject) -> int:
    """Bytes that one decode step moves, counted and not profiled.

    Everything stored is read once. A method that rebuilds its states also writes and reads them
    in float32.
    """
    ledger, geometry = subject.ledger(), subject.geometry
    moved = ledger.total - ledger.frag
    if subject.describe()["realisation"] == "format-only":
        rebuilt = 2 * _REBUILT_BYTES * geometry.head_dim * geometry.num_kv_heads
        moved += 2 * rebuilt * geometry.num_layers * subject.num_tokens()
    return moved
