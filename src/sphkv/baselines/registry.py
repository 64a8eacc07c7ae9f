# SPDX-License-Identifier: Apache-2.0
"""The baselines by name: what each is, where it comes from, and how to make one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sphkv.baselines.cake import CakeCache
from sphkv.baselines.dense import DenseCache
from sphkv.baselines.eviction import EvictionCache
from sphkv.baselines.expected_attention import expected_attention
from sphkv.baselines.fp8 import fp8
from sphkv.baselines.gear import gear
from sphkv.baselines.h2o import h2o
from sphkv.baselines.kivi import kivi
from sphkv.baselines.kvquant import kvquant
from sphkv.baselines.offload import OffloadCache
from sphkv.baselines.ott import ott
from sphkv.baselines.polarquant_recursive import polarquant_recursive
from sphkv.baselines.polarquant_rope import polarquant_rope
from sphkv.baselines.prefix_reuse import PrefixReuseCache
from sphkv.baselines.pyramidkv import pyramidkv
from sphkv.baselines.qjl import qjl
from sphkv.baselines.quantised import QuantisedCache
from sphkv.baselines.rotatekv import rotatekv
from sphkv.baselines.snapkv import snapkv
from sphkv.baselines.streaming_llm import streaming_llm
from sphkv.baselines.turboquant import turboquant
from sphkv.baselines.uniform import uniform
from sphkv.baselines.zipcache import zipcache
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

Baseline = EvictionCache | QuantisedCache
Family = Literal["dense", "retention", "bits", "system"]
Realisation = Literal["kernel-realized", "format-only"]
_Factory = Callable[[KVGeometry, Sequence[RopeSpec], float], Baseline]


@dataclass(frozen=True, slots=True)
class BaselineSpec:
    """One method that can be compared with.

    Attributes:
        name: Name in commands and records.
        family: Whether it drops tokens, codes them, or moves them.
        realisation: ``"kernel-realized"`` reads its pages as they are with an ordinary paged
            kernel; ``"format-only"`` stores real codes but rebuilds a layer to attend to it.
        paper: Authors and year.
        make: Builds it from geometry, rotary embeddings and a share of dense bytes.
    """

    name: str
    family: Family
    realisation: Realisation
    paper: str
    make: _Factory


def _retention(name: str, paper: str, make: _Factory) -> BaselineSpec:
    return BaselineSpec(name, "retention", "kernel-realized", paper, make)


def _bits(name: str, paper: str, make: _Factory) -> BaselineSpec:
    return BaselineSpec(name, "bits", "format-only", paper, make)


def _system(name: str, paper: str, make: _Factory) -> BaselineSpec:
    return BaselineSpec(name, "system", "kernel-realized", paper, make)


_SPECS = (
    BaselineSpec(
        "dense",
        "dense",
        "kernel-realized",
        "Kwon et al. 2023 (paged bfloat16)",
        lambda geometry, ropes, budget: DenseCache(geometry, budget),
    ),
    _bits("fp8", "Micikevicius et al. 2022", lambda g, ropes, b: fp8(g, b)),
    _bits("int4", "round to nearest", lambda g, ropes, b: uniform(g, b, bits=4)),
    _bits("int2", "round to nearest", lambda g, ropes, b: uniform(g, b, bits=2)),
    _bits("kivi", "Liu et al. 2024", lambda g, ropes, b: kivi(g, b)),
    _bits("turboquant", "Zandieh et al. 2025", lambda g, ropes, b: turboquant(g, b)),
    _retention("streaming_llm", "Xiao et al. 2023", streaming_llm),
    _retention("h2o", "Zhang et al. 2023", lambda g, ropes, b: h2o(g, b)),
    _retention("snapkv", "Li et al. 2024", lambda g, ropes, b: snapkv(g, b)),
    _retention("pyramidkv", "Cai et al. 2024", lambda g, ropes, b: pyramidkv(g, b)),
    _retention("cake", "Qin et al. 2025", lambda g, ropes, b: CakeCache(g, b)),
    _retention("expected_attention", "Devoto et al. 2025", expected_attention),
    _bits("kvquant", "Hooper et al. 2024", kvquant),
    _bits("zipcache", "He et al. 2024", lambda g, ropes, b: zipcache(g, b)),
    _bits("gear", "Kang et al. 2024", lambda g, ropes, b: gear(g, b)),
    _bits("rotatekv", "Su et al. 2025", rotatekv),
    _bits("ott", "Su et al. 2025", lambda g, ropes, b: ott(g, b)),
    _bits("polarquant_recursive", "Han et al. 2025", lambda g, r, b: polarquant_recursive(g, b)),
    _bits("polarquant_rope", "Wu et al. 2025", polarquant_rope),
    _bits("qjl", "Zandieh et al. 2024", lambda g, ropes, b: qjl(g, b)),
    _system("offload", "Sheng et al. 2023", lambda g, ropes, b: OffloadCache(g, b)),
    _system("prefix_reuse", "Zheng et al. 2024", lambda g, ropes, b: PrefixReuseCache(g, b)),
)

BASELINES: dict[str, BaselineSpec] = {spec.name: spec for spec in _SPECS}
"""Every baseline by name."""


def make_baseline(
    name: str,
    geometry: KVGeometry,
    ropes: Sequence[RopeSpec],
    budget: float,
    *,
    num_tokens: int | None = None,
) -> Baseline:
    """A baseline, empty, that keeps a prompt within a share of dense bytes.

    Methods that code take their largest setting that fits, metadata and dense tokens included;
    which one depends on the length of the prompt, so the choice is made when it is known.

    Args:
        name: One of ``BASELINES``.
        geometry: Sizes of the model.
        ropes: Rotary embedding of each layer.
        budget: Share of the bytes of a dense bfloat16 cache; 1 is all of them.
        num_tokens: Length of the prompt, to be told now whether the budget can be met; without
            it the first ``prefill`` tells.

    Raises:
        ValueError: The name is unknown, or no setting fits; the message says the least share.
    """
    if name not in BASELINES:
        raise ValueError(f"baseline must be one of {sorted(BASELINES)}, got {name!r}")
    if len(ropes) != geometry.num_layers:
        raise ValueError(f"{len(ropes)} rotary embeddings for {geometry.num_layers} layers")
    method = BASELINES[name].make(geometry, ropes, budget)
    if num_tokens is not None:
        method.plan(num_tokens)
    return method
