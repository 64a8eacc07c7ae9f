# SPDX-License-Identifier: Apache-2.0
"""What a baseline is built from: the model's shape, a budget, and its own hyper-parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

from torch import Tensor

from sphkv.attention.api import get_backend
from sphkv.attention.request import DecodeBackend
from sphkv.baselines.held_states import HeldStates
from sphkv.cache.method import CacheMethod, MethodRecord
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

NUM_TRIALS = 6
"""Settings of every method that are tried on the development split."""

NUM_NEW = 512
"""Tokens that follow a prompt unless the caller knows better."""


@dataclass(frozen=True, slots=True, eq=False)
class MethodShape:
    """What a method must know before it sees a prompt.

    Attributes:
        geometry: Sizes of the model.
        ropes: Rotary embedding of each layer.
        budget: Share of the bytes of a dense bfloat16 cache of the same length that may be
            resident, after the prompt and after every later token.
        num_new: Tokens that will follow the prompt, for which room is set aside.
        backend: Runs decode attention of methods with pages; the fastest here if None.
    """

    geometry: KVGeometry
    ropes: Sequence[RopeSpec]
    budget: float
    num_new: int = NUM_NEW
    backend: DecodeBackend | None = None

    def __post_init__(self) -> None:
        """Reject budgets and counts that mean nothing."""
        check_budget(self.budget)
        if isinstance(self.num_new, bool) or self.num_new < 0:
            raise ValueError(f"num_new must not be negative, got {self.num_new!r}")
        if len(self.ropes) != self.geometry.num_layers:
            raise ValueError(
                f"{len(self.ropes)} rotary embeddings for {self.geometry.num_layers} layers"
            )

    def limit_bytes(self, num_tokens: int) -> int:
        """Bytes that may be resident when so many tokens have been given."""
        return int(self.budget * self.geometry.dense_bytes_per_token * num_tokens)

    def layer_limit_bytes(self, num_tokens: int) -> int:
        """An equal share of ``limit_bytes`` for one layer."""
        return self.limit_bytes(num_tokens) // self.geometry.num_layers

    def decode_backend(self) -> DecodeBackend:
        """What runs decode attention."""
        return self.backend or get_backend("auto")


class Baseline(CacheMethod, Protocol):
    """A ``CacheMethod`` that can be compared with."""

    def plan(self, num_tokens: int) -> object:
        """Settle what a prompt of so many tokens is stored as.

        Raises:
            ValueError: Nothing fits the budget; the message says which share would do.
        """
        ...

    def describe(self) -> MethodRecord:
        """What a record says about the method."""
        ...

    def read(self, layer: int) -> HeldStates:
        """What queries of a layer see; a copy for measurements."""
        ...

    def peak_bytes(self) -> int:
        """Resident bytes and what one step stages besides."""
        ...

    def live_tensors(self) -> list[Tensor]:
        """Every tensor the method keeps alive."""
        ...


class MethodSettings(Protocol):
    """Hyper-parameters of a method, a frozen dataclass with the paper's as defaults."""

    def trials(self) -> tuple[Self, ...]:
        """Settings to be tried on the development split, the paper's first.

        ``NUM_TRIALS`` of them, or one where there is nothing to choose.
        """
        ...

    def build(self, shape: MethodShape) -> Baseline:
        """An empty cache."""
        ...


def changed_fields(settings: Any, *, but: Sequence[str] = ()) -> str:
    """Fields that differ from their defaults, such as ``"kernel=17"``; for reports.

    Args:
        settings: A dataclass with defaults for all fields.
        but: Fields to leave out.
    """
    default = type(settings)()
    return ",".join(
        f"{field.name}={getattr(settings, field.name)}"
        for field in fields(settings)
        if field.name not in but and getattr(settings, field.name) != getattr(default, field.name)
    )


def check_budget(budget: float) -> float:
    """Reject shares of dense bytes that are not positive."""
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 2:
        raise ValueError(f"budget must be a share of dense bytes in (0, 2], got {budget!r}")
    return float(budget)
