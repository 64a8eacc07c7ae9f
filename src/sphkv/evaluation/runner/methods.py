# SPDX-License-Identifier: Apache-2.0
"""Every way to keep a cache, by name: ours and the baselines, under one budget.

A sweep stores a prompt many times. Work that depends on the prompt alone is kept, with the seconds
it took, so that every point can still be charged for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sphkv.attention.api import get_backend
from sphkv.attention.request import DecodeBackend
from sphkv.baselines.attention_scores import SharedAttention, SharedScores
from sphkv.baselines.eviction import EvictionCache
from sphkv.baselines.registry import BASELINES, find, make_baseline
from sphkv.cache.config import CacheConfig, RetentionConfig
from sphkv.cache.plan import RETENTION_PAGE_TOKENS, choose_seal_tier, retention_tiers
from sphkv.codec.calibration import Calibration
from sphkv.core.budget import ByteBudget
from sphkv.core.configs import check_name
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import TierTable, ladder
from sphkv.evaluation.harness.subject import (
    EngineSubject,
    MethodSubject,
    ProductSubject,
    Subject,
    TimedEngine,
)
from sphkv.integrations.transformers.cache import CacheOptions, RetentionOptions, SphericalCache
from sphkv.retention.gate import GateOptions
from sphkv.retention.measure import PromptWork
from sphkv.retention.policy import BlockShape, ControlOptions, RetentionPolicy
from sphkv.retention.protection import ProtectionRule, SegmentSpans

DENSE = "dense"
AUTO = "auto"
UNIFORM = "spherical"
JOINT = "joint"
OUR_METHODS = (AUTO, UNIFORM, JOINT)
_DENSE_TIER = "max"
_REBUILT_BYTES = 4
_TRIAL = "@"
_VARIANT = ":"
_SEGMENTS = ("prefix", "retrieved", "recent")

VARIANTS: dict[str, ControlOptions] = {
    "keepdrop": ControlOptions(variant="keepdrop", fixed_tier=_DENSE_TIER),
    "keepdrop-best": ControlOptions(variant="keepdrop"),
    "quant": ControlOptions(variant="quant"),
    "decoupled": ControlOptions(variant="decoupled"),
    "uniform-head": ControlOptions(shapes=(BlockShape.RUNS,), uniform_heads=True),
    "noseg": ControlOptions(use_segments=False),
    "one-shot": ControlOptions(solver="one-shot"),
    "recipe": ControlOptions(score="recipe"),
    "votes": ControlOptions(score="votes"),
    "gate": ControlOptions(),
    "rebuild": ControlOptions(),
}
"""What ``joint:NAME`` restricts of the controller, or adds to it: the paper's ablations.

``gate`` adds the stability gate; ``rebuild`` decides the same and reads it by a native kernel that
dequantises pages inside its loop. ``keepdrop=TIER``, ``decoupled=SHARE`` and ``prefix=WEIGHT``,
``retrieved=WEIGHT``, ``recent=WEIGHT`` set one value.
"""


@dataclass(frozen=True, slots=True)
class JointVariant:
    """The controller with one thing changed.

    Attributes:
        options: What it decides, and how.
        gate: Its stability gate; None for none.
        segment_weights: Instead of the policy's; None leaves them.
        kernel: Native variant that reads the pages; None for the usual backend.
    """

    options: ControlOptions = field(default_factory=ControlOptions)
    gate: GateOptions | None = None
    segment_weights: tuple[float, float, float] | None = None
    kernel: str | None = None


def find_variant(name: str) -> JointVariant:
    """The variant of a method's name: ``joint``, ``joint:noseg``, ``joint:decoupled=0.3``.

    Raises:
        ValueError: There is no such variant, or its value is none.
    """
    base, _, what = name.partition(_VARIANT)
    if base != JOINT:
        raise ValueError(f"{base} has no variants, got {name!r}")
    if not what:
        return JointVariant()
    kind, is_set, value = what.partition("=")
    check_name("variant", kind, (*VARIANTS, *_SEGMENTS))
    if not is_set:
        if kind in _SEGMENTS:
            raise ValueError(f"{name} needs a weight, such as {name}=2")
        gate = GateOptions() if kind == "gate" else None
        return JointVariant(VARIANTS[kind], gate, kernel=kind if kind == "rebuild" else None)
    if kind == "keepdrop":
        return JointVariant(replace(VARIANTS[kind], fixed_tier=value))
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{name} needs a number behind the equals sign") from None
    if kind == "decoupled":
        return JointVariant(replace(VARIANTS[kind], keep_share=number))
    if kind not in _SEGMENTS:
        raise ValueError(f"{JOINT}:{kind} takes no value, got {name!r}")
    weights = tuple(number if kind == segment else 1.0 for segment in _SEGMENTS)
    return JointVariant(segment_weights=(weights[0], weights[1], weights[2]))


def method_names() -> tuple[str, ...]:
    """Every method that can be measured: dense, ours, then the baselines."""
    return (DENSE, *OUR_METHODS, *(name for name in BASELINES if name != DENSE))


def check_method(name: str) -> str:
    """A method's name, a baseline's with one of its settings: ``snapkv@2``, or ``joint:VARIANT``.

    Raises:
        ValueError: There is no such method or setting.
    """
    if name.partition(_VARIANT)[0] == JOINT:
        find_variant(name)
        return name
    base, mark, number = name.partition(_TRIAL)
    check_name("method", base, method_names())
    if mark:
        if base == DENSE or base in OUR_METHODS:
            raise ValueError(f"{base} has no settings to choose from, got {name!r}")
        count = len(find(base).settings().trials())
        if not number.isdigit() or int(number) >= count:
            raise ValueError(f"{base} has settings 0 to {count - 1}, got {name!r}")
    return name


class SharedWork:
    """Work on one prompt.

    Attributes:
        scores: What policies that drop tokens found out.
        layers: What the controller found out about this prompt.
        sampled: Score of the exact model's answer by seed.
    """

    def __init__(self, attention: SharedAttention) -> None:
        """Nothing is found yet.

        Args:
            attention: What tokens receive, for caches that count it; prompts with the same
                beginning share it.
        """
        self.scores = SharedScores(attention)
        self.layers = PromptWork()
        self.sampled: dict[int, float] = {}

    @property
    def reused_s(self) -> float:
        """Seconds saved so far."""
        return self.scores.attention.reused_s + self.scores.reused_s + self.layers.reused_s


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
        self._calibration = calibration
        self._device: torch.device = model.device
        self._backend = get_backend(backend, self._device)
        self._copies: dict[str, Calibration] = {}

    @property
    def backend_name(self) -> str:
        """What runs the decode of our methods."""
        return self._backend.name

    def tiers(self) -> TierTable:
        """Tiers that one-tier residency chooses from."""
        return ladder(self._shape.geometry.head_dim)

    def controller_tiers(self) -> TierTable:
        """Tiers that the controller chooses from, as ``make`` gives them to it."""
        if self._device.type == "cpu":
            return retention_tiers(self._shape.geometry.head_dim, RETENTION_PAGE_TOKENS)
        return retention_tiers(self._shape.geometry.head_dim, order=self._backend.page_order)

    def page_tokens(self, name: str) -> int:
        """States of a coded page of a method that may use the controller; 0 of any other."""
        if name != AUTO and name.partition(_VARIANT)[0] != JOINT:
            return 0
        return next(tier.page_tokens for tier in self.controller_tiers() if tier.is_coded)

    def make(
        self,
        name: str,
        budget: str,
        *,
        context: int,
        num_new: int = 0,
        segments: SegmentSpans | None = None,
        work: SharedWork | None = None,
    ) -> Subject:
        """An empty cache.

        Args:
            name: ``dense``, one of ours, or a baseline as ``check_method`` reads it.
            budget: Byte budget, such as ``"20%"``; ``dense`` ignores it.
            context: Tokens of the prompt.
            num_new: Tokens that will follow it.
            segments: Passages of the prompt, which the controller weighs; none if None.
            work: What caches of the same prompt share; None shares nothing.

        Raises:
            ValueError: There is no such method, or the budget is too small for it.
        """
        check_method(name)
        if self._device.type != "cpu" and (name == DENSE or name.startswith(OUR_METHODS)):
            return self._product(name, budget, context + num_new, segments or SegmentSpans())
        if name == DENSE:
            return self._ours(DENSE, self._config(None), work)
        if name == UNIFORM:
            return self._ours(UNIFORM, self._config(budget, context=context + num_new), work)
        if name == AUTO:
            retention = self._retention(budget)
            return self._ours(AUTO, self._config(budget, retention=retention), work)
        if name.partition(_VARIANT)[0] == JOINT:
            return self._variant(name, budget, segments, work)
        return self._baseline(name, ByteBudget.parse(budget), context, num_new, work)

    def _product(self, name: str, budget: str, context: int, segments: SegmentSpans) -> Subject:
        """The public cache as a user makes it, on a GPU with its kernels and captured steps."""
        if name == DENSE:
            options = CacheOptions(backend=self._backend.name)
            cache = SphericalCache.for_model(self._model, tiers=_DENSE_TIER, options=options)
            return ProductSubject(self._model, cache, name)
        retention: bool | RetentionOptions | None = False if name == UNIFORM else None
        if name.startswith(JOINT):
            variant = find_variant(name)
            if replace(variant, gate=None) != JointVariant():
                raise ValueError(f"{name} is measured on the CPU only")
            retention = RetentionOptions(
                retrieved=segments.retrieved, policy=self._policy, gate=variant.gate
            )
        return self._public(name, budget, retention, context)

    def _public(
        self,
        name: str,
        budget: str,
        retention: bool | RetentionOptions | None,
        context: int | None,
    ) -> Subject:
        cache = SphericalCache.for_model(
            self._model,
            budget,
            retention=retention,
            context=context,
            # caches of one method share what the GPU's kernels make of the codebooks
            calibration=self._copies.setdefault(name, replace(self._calibration)),
            options=CacheOptions(backend=self._backend.name),
        )
        return ProductSubject(self._model, cache, name)

    def _variant(
        self, name: str, budget: str, segments: SegmentSpans | None, work: SharedWork | None
    ) -> Subject:
        variant = find_variant(name)
        retention = self._retention(
            budget,
            gate=variant.gate,
            options=variant.options,
            segments=segments or SegmentSpans(),
        )
        if variant.segment_weights is not None:
            policy = replace(self._policy, segment_weights=variant.segment_weights)
            retention = replace(retention, policy=policy)
        backend = None
        if variant.kernel is not None:
            from sphkv.attention.native.backend import NativeBackend

            backend = NativeBackend(variant=variant.kernel)
        config = self._config(budget, retention=retention, is_forced=True)
        return self._ours(name, config, work, backend)

    def _baseline(
        self, name: str, budget: ByteBudget, context: int, num_new: int, work: SharedWork | None
    ) -> Subject:
        base, mark, number = name.partition(_TRIAL)
        geometry = self._shape.geometry
        share = budget.resolve(geometry, context) / (geometry.dense_bytes_per_token * context)
        method = make_baseline(
            base,
            geometry,
            self._shape.ropes,
            share,
            num_tokens=context,
            num_new=num_new,
            settings=find(base).settings().trials()[int(number)] if mark else None,
            backend=None if self._device.type == "cpu" else self._backend,
        )
        if work is not None and isinstance(method, EvictionCache):
            method.shared = work.scores
        return MethodSubject(self._model, method, geometry, budget=budget, name=name)

    def controlled(
        self,
        budget: str,
        *,
        protection: ProtectionRule | None = None,
        gate: GateOptions | None = None,
        options: ControlOptions | None = None,
        segments: SegmentSpans | None = None,
        page_tokens: int = RETENTION_PAGE_TOKENS,
        context: int | None = None,
        work: SharedWork | None = None,
    ) -> Subject:
        """The controller's choice of what to keep at which tier, whatever the budget.

        Args:
            budget: Byte budget.
            protection: States that stay dense; the usual ones if None.
            gate: Stability gate; None for none.
            options: Variant and solver; the usual ones if None.
            segments: Passages of the prompt; none if None.
            page_tokens: States of a coded page; on a GPU the backend chooses.
            context: Tokens of the prompt; needed on a GPU for its newest tokens to be protected.
            work: As ``make``; needs the usual protection.

        Raises:
            ValueError: It is asked for on a GPU, whose public cache cannot be told so.
        """
        if self._device.type != "cpu":
            rule = protection or ProtectionRule()
            if options is not None or replace(rule, spans=(), suffix_tokens=0) != ProtectionRule():
                raise ValueError("a controller without its usual safeguards runs on the CPU only")
            newest = ((context or 0) - rule.suffix_tokens, context or 0)
            asked = RetentionOptions(
                protect=(*rule.spans, *((newest,) if rule.suffix_tokens else ())),
                retrieved=segments.retrieved if segments else (),
                policy=self._policy,
                gate=gate,
            )
            return self._public(JOINT, budget, asked, context)
        retention = self._retention(
            budget,
            page_tokens=page_tokens,
            protection=protection or ProtectionRule(),
            gate=gate,
            options=options or ControlOptions(),
            segments=segments or SegmentSpans(),
        )
        config = self._config(budget, retention=retention, is_forced=True)
        return self._ours(JOINT, config, work)

    def _retention(
        self, budget: str, *, page_tokens: int = RETENTION_PAGE_TOKENS, **parts: Any
    ) -> RetentionConfig:
        geometry = self._shape.geometry
        tiers = retention_tiers(geometry.head_dim, page_tokens)
        seal = choose_seal_tier(tiers, ByteBudget.parse(budget), geometry)
        return RetentionConfig(tiers, seal, policy=self._policy, **parts)

    def _config(
        self,
        budget: str | None,
        *,
        context: int | None = None,
        retention: RetentionConfig | None = None,
        is_forced: bool = False,
    ) -> CacheConfig:
        shape = self._shape
        return CacheConfig(
            shape.geometry,
            shape.ropes,
            shape.windows,
            self.tiers(),
            _DENSE_TIER if budget is None else None,
            budget=None if budget is None else ByteBudget.parse(budget),
            retention=retention,
            is_retention_forced=is_forced,
            context=context or shape.max_tokens,
        )

    def _ours(
        self,
        name: str,
        config: CacheConfig,
        work: SharedWork | None,
        backend: DecodeBackend | None = None,
    ) -> Subject:
        # caches of one calibration share the codebooks made of it; a copy of its own counts only
        # what this cache needs, whatever was measured before
        calibration = None if config.budget is None else replace(self._calibration)
        engine = TimedEngine(
            config,
            calibration=calibration,
            backend=backend or self._backend,
            work=None if work is None else work.layers,
        )
        return EngineSubject(self._model, engine, name)


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
