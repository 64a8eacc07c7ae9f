# SPDX-License-Identifier: Apache-2.0
"""What one decode step asks of a backend."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sphkv.attention.partial import PartialAttention
from sphkv.codec.states import SphericalCodec
from sphkv.store.store import PageStore


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How logits become weights.

    Attributes:
        scale: Factor on the dot product, usually ``head_dim ** -0.5``.
        softcap: Logits become ``softcap * tanh(logit / softcap)``; None for none.
        window: A query sees keys less than this many positions back; None for all.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        """Reject values that give no attention."""
        if not math.isfinite(self.scale) or self.scale <= 0:
            raise ValueError(f"scale must be positive and finite, got {self.scale!r}")
        if self.softcap is not None and not (math.isfinite(self.softcap) and self.softcap > 0):
            raise ValueError(f"softcap must be positive, got {self.softcap!r}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window!r}")


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRequest:
    """Queries of one sequence and layer, and the cache they read.

    Attributes:
        store: Pages and tails.
        sequence: Sequence in the store.
        layer: Layer to read.
        query: ``[query_heads, queries, head_dim]`` after RoPE.
        positions: ``[queries]`` int64; a query sees keys at its own position and before.
        options: Scale, soft-cap and window.
    """

    store: PageStore
    sequence: int
    layer: int
    query: Tensor
    positions: Tensor
    options: AttentionOptions

    def __post_init__(self) -> None:
        """Reject queries that do not fit the store."""
        geometry = self.store.config.geometry
        shape = tuple(self.query.shape)
        if len(shape) != 3 or (shape[0], shape[2]) != (
            geometry.num_query_heads,
            geometry.head_dim,
        ):
            raise ValueError(
                f"query must be [{geometry.num_query_heads}, queries, {geometry.head_dim}], "
                f"got {shape}"
            )
        if self.positions.dtype != torch.int64 or tuple(self.positions.shape) != (shape[1],):
            raise ValueError(
                f"positions must be int64 [{shape[1]}], got {self.positions.dtype} "
                f"{tuple(self.positions.shape)}"
            )
        # the sum tells in one pass; only where it overflows must each element be looked at
        if not math.isfinite(self.query.sum()) and not bool(torch.isfinite(self.query).all()):
            raise ValueError("query holds values that are not finite")

    def codec(self) -> SphericalCodec:
        """The codec that wrote the sequence's pages."""
        codec = self.store.codec(self.sequence)
        if not isinstance(codec, SphericalCodec):
            raise ValueError(f"sequence {self.sequence} has coded pages but no spherical codec")
        return codec


class DecodeBackend(Protocol):
    """One way to carry out a decode step."""

    name: str

    def attend(self, request: DecodeRequest) -> PartialAttention:
        """Attention over all pages and the tail.

        Returns:
            Output ``[query_heads, queries, head_dim]`` and lse ``[query_heads, queries]``.
        """
        ...
