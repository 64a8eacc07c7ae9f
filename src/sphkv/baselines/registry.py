# SPDX-License-Identifier: Apache-2.0
"""The baselines by name: what each is, where it comes from, and how to make one.

Nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from sphkv.attention.request import DecodeBackend
from sphkv.baselines.settings import NUM_NEW, Baseline, MethodSettings, MethodShape
from sphkv.cache.method import Realisation
from sphkv.core.configs import check_name
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

Family = Literal["dense", "retention", "bits", "both", "system"]


@dataclass(frozen=True, slots=True)
class BaselineSpec:
    """One method that can be compared with.

    Attributes:
        name: Name in commands and records.
        family: Whether it drops tokens, codes them, does both, or moves them.
        realisation: ``"kernel-realized"`` reads its pages as they are with a kernel;
            ``"format-only"`` stores real codes but rebuilds a layer to attend to it.
        paper: Authors and year.
        place: Module below ``sphkv.baselines`` and the settings class in it, as ``module.Class``.
        arguments: Fields of the settings that belong to the name.
    """

    name: str
    family: Family
    realisation: Realisation
    paper: str
    place: str
    arguments: tuple[tuple[str, str], ...] = ()

    def settings(self) -> MethodSettings:
        """Hyper-parameters as in the paper; ``trials()`` of them has others."""
        module, name = self.place.split(".")
        found = getattr(importlib.import_module(f"sphkv.baselines.{module}"), name)
        return cast(MethodSettings, found(**dict(self.arguments)))


def _retention(name: str, paper: str, place: str) -> BaselineSpec:
    return BaselineSpec(name, "retention", "kernel-realized", paper, place)


def _bits(name: str, paper: str, place: str) -> BaselineSpec:
    return BaselineSpec(name, "bits", "format-only", paper, place)


def _both(name: str, paper: str, place: str, **arguments: str) -> BaselineSpec:
    return BaselineSpec(name, "both", "format-only", paper, place, tuple(arguments.items()))


def _system(name: str, paper: str, place: str) -> BaselineSpec:
    return BaselineSpec(name, "system", "kernel-realized", paper, place)


_VOTES = {
    "snapkv": "Li et al. 2024",
    "snapkv+adakv": "Li, Feng et al. 2024",
    "kvzip": "Kim et al. 2025",
}
_CODES = {"int4": "4-bit integers", "int3": "3-bit integers", "kivi2": "KIVI's 2-bit integers"}


_SPECS = (
    BaselineSpec(
        "dense", "dense", "kernel-realized", "Kwon et al. 2023 (paged bfloat16)", "keep_all.KeepAll"
    ),
    _bits("fp8", "Micikevicius et al. 2022", "rounding.Fp8"),
    _bits("int4", "round to nearest", "rounding.Int4"),
    _bits("int2", "round to nearest", "rounding.Int2"),
    _bits("kivi", "Liu et al. 2024", "kivi.Kivi"),
    _bits("turboquant", "Zandieh et al. 2025", "turboquant.TurboQuant"),
    _retention("streaming_llm", "Xiao et al. 2023", "step_eviction.SinksAndWindow"),
    _retention("h2o", "Zhang et al. 2023", "step_eviction.HeavyHitters"),
    _retention("tova", "Oren et al. 2024", "step_eviction.LastQuery"),
    _retention("snapkv", "Li et al. 2024", "prompt_eviction.WindowVotes"),
    _retention("adakv", "Feng et al. 2024", "prompt_eviction.AdaptiveVotes"),
    _retention("pyramidkv", "Cai et al. 2024", "prompt_eviction.PyramidVotes"),
    _retention("cake", "Qin et al. 2025", "cake.MeanAndVariance"),
    _retention("expected_attention", "Devoto et al. 2025", "prompt_eviction.ExpectedWeights"),
    _retention("kvzip", "Kim et al. 2025", "prompt_eviction.ReconstructionVotes"),
    _retention("duo_attention", "Xiao et al. 2024", "duo_attention.HeadKinds"),
    _bits("kvquant", "Hooper et al. 2024", "outlier_codes.KVQuant"),
    _bits("zipcache", "He et al. 2024", "zipcache.ZipCache"),
    _bits("gear", "Kang et al. 2024", "outlier_codes.Gear"),
    _bits("rotatekv", "Su et al. 2025", "rounding.RotateKV"),
    _bits("ott", "Su et al. 2025", "kivi.Ott"),
    _bits("polarquant_recursive", "Han et al. 2025", "polarquant.PolarQuantRecursive"),
    _bits("polarquant_rope", "Wu et al. 2025", "polarquant.PolarQuantRope"),
    _bits("qjl", "Zandieh et al. 2024", "turboquant.Qjl"),
    *(
        _both(
            f"{votes}+{code}", f"{paper} with {words}", "composed.Composed", votes=votes, code=code
        )
        for votes, paper in _VOTES.items()
        for code, words in _CODES.items()
    ),
    _both("rdkv", "RDKV, 2026", "mixed_widths.RateDistortion"),
    _both("diffkv", "Zhang et al. 2024", "mixed_widths.DiffKV"),
    _system("offload", "Sheng et al. 2023", "keep_all.NewestPages"),
    _system("prefix_reuse", "Zheng et al. 2024", "keep_all.SharedPrefix"),
)

BASELINES: dict[str, BaselineSpec] = {spec.name: spec for spec in _SPECS}
"""Every baseline by name."""


def names() -> tuple[str, ...]:
    """Names of all baselines."""
    return tuple(BASELINES)


def find(name: str) -> BaselineSpec:
    """The baseline of that name.

    Raises:
        ValueError: There is none; the message says which names are near.
    """
    return BASELINES[check_name("baseline", name, BASELINES)]


def make_baseline(
    name: str,
    geometry: KVGeometry,
    ropes: Sequence[RopeSpec],
    budget: float,
    *,
    num_tokens: int | None = None,
    num_new: int = NUM_NEW,
    settings: MethodSettings | None = None,
    backend: DecodeBackend | None = None,
) -> Baseline:
    """A baseline, empty, that stays within a share of dense bytes at every token.

    Args:
        name: One of ``names()``.
        geometry: Sizes of the model.
        ropes: Rotary embedding of each layer.
        budget: Share of the bytes of a dense bfloat16 cache of the same length; 1 is all.
        num_tokens: Length of the prompt, to be told now whether the budget can be met; without
            it the first ``prefill`` tells.
        num_new: Tokens that will follow the prompt.
        settings: Hyper-parameters, one of ``find(name).settings().trials()``; the paper's if None.
        backend: Runs decode attention of methods with pages; the fastest here if None.

    Raises:
        ValueError: The name is unknown, or no setting fits; the message says the least share.
    """
    spec = find(name)
    shape = MethodShape(geometry, ropes, budget, num_new, backend)
    method = (settings or spec.settings()).build(shape)
    if method.name != name:
        raise ValueError(f"settings of {method.name!r} were given for {name!r}")
    if num_tokens is not None:
        method.plan(num_tokens)
    return method
