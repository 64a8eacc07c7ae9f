# SPDX-License-Identifier: Apache-2.0
"""What decoding asks of a backend, and what every backend promises.

Shapes, positions and page lists are known to the host, so that nothing here waits for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sphkv.attention.partial import PartialAttention
from sphkv.codec.states import SphericalCodec
from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import TierTable
from sphkv.store.order import PageCodec, PageOrder
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
        query: ``[query_heads, queries, head_dim]`` after RoPE, finite; only on the CPU is that
            checked, since a GPU would have to be waited for.
        positions: ``[queries]`` int64 on the CPU; a query sees keys at its own position and before.
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
        heads, head_dim = geometry.num_query_heads, geometry.head_dim
        shape = tuple(self.query.shape)
        if len(shape) != 3 or (shape[0], shape[2]) != (heads, head_dim):
            raise ValueError(f"query must be [{heads}, queries, {head_dim}], got {shape}")
        _check_positions(self.positions, shape[1])
        _check_finite(self.query)

    def codec(self) -> SphericalCodec:
        """The codec that wrote the sequence's pages."""
        return spherical_codec(self.store, self.sequence)


@dataclass(frozen=True, slots=True, eq=False)
class BatchRequest:
    """One query of each of several sequences in one layer: a decode step of a ragged batch.

    Attributes:
        store: Pages and tails.
        sequences: Sequence in the store of each row.
        layer: Layer to read.
        query: ``[rows, query_heads, head_dim]`` after RoPE, finite; see ``DecodeRequest``.
        positions: ``[rows]`` int64 on the CPU; a query sees keys at its own position and before.
        options: Scale, soft-cap and window.
    """

    store: PageStore
    sequences: tuple[int, ...]
    layer: int
    query: Tensor
    positions: Tensor
    options: AttentionOptions

    def __post_init__(self) -> None:
        """Reject queries that do not fit the store."""
        geometry = self.store.config.geometry
        expected = (len(self.sequences), geometry.num_query_heads, geometry.head_dim)
        if not self.sequences or tuple(self.query.shape) != expected:
            raise ValueError(
                f"query of {len(self.sequences)} sequences must be [rows, {expected[1]}, "
                f"{expected[2]}], got {tuple(self.query.shape)}"
            )
        _check_positions(self.positions, len(self.sequences))
        _check_finite(self.query)

    def select(self, rows: Sequence[int]) -> BatchRequest:
        """The same question for some rows, in the given order."""
        index = torch.tensor(rows, dtype=torch.int64)
        return BatchRequest(
            self.store,
            tuple(self.sequences[row] for row in rows),
            self.layer,
            self.query.index_select(0, index.to(self.query.device, non_blocking=True)),
            self.positions[index],
            self.options,
        )

    def row(self, row: int) -> DecodeRequest:
        """What one row asks for."""
        return DecodeRequest(
            self.store,
            self.sequences[row],
            self.layer,
            self.query[row].unsqueeze(1),
            self.positions[row : row + 1],
            self.options,
        )


def _check_positions(positions: Tensor, num_queries: int) -> None:
    if positions.dtype != torch.int64 or tuple(positions.shape) != (num_queries,):
        raise ValueError(
            f"positions must be int64 [{num_queries}], got {positions.dtype} "
            f"{tuple(positions.shape)}"
        )
    if not positions.is_cpu:
        raise ValueError(f"positions must be on the CPU, whoever attends; got {positions.device}")


def _check_finite(query: Tensor) -> None:
    # the sum tells in one pass; only where it overflows must each element be looked at
    if query.is_cpu and not math.isfinite(query.sum()) and not bool(torch.isfinite(query).all()):
        raise ValueError("query holds values that are not finite")


def spherical_codec(store: PageStore, sequence: int) -> SphericalCodec:
    """The codec that wrote a sequence's pages.

    Raises:
        ValueError: It is none that kernels can read.
    """
    codec = store.codec(sequence)
    if not isinstance(codec, SphericalCodec):
        raise ValueError(f"sequence {sequence} has coded pages but no spherical codec")
    return codec


class StepGraph(Protocol):
    """Attention of a batch's decode steps at addresses that stay, for a captured graph.

    A step is ``prepare``, then ``advance`` and ``attend`` of every layer, which queue work that may
    be captured once and replayed, then ``commit``.

    Attributes:
        positions: ``[rows, 1]`` int64 on the device: position of each row's newest token.
        max_tokens: Tokens that a sequence may reach.
    """

    positions: Tensor
    max_tokens: int

    def prepare(self, make_room: Callable[[], bool]) -> bool:
        """Make room in the tails for one token more of every row, and list what changed.

        Args:
            make_room: Seals full tails; whether that added pages of the seal tier and nothing
                else was demoted, dropped or moved.

        Returns:
            False if the pages of now need another capture.
        """
        ...

    def advance(self) -> None:
        """Count one token more of every row; the first thing a captured step does."""
        ...

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        options: AttentionOptions,
        *,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Append the new states of a layer and attend; queued on the current stream.

        Args:
            layer: The layer.
            query: ``[rows, query_heads, 1, head_dim]`` after RoPE.
            keys: ``[rows, kv_heads, 1, head_dim]`` after RoPE.
            values: ``[rows, kv_heads, 1, head_dim]``.
            options: Scale and soft-cap.
            sink_logits: ``[query_heads]`` learned sink logits.

        Returns:
            ``[rows, query_heads, 1, head_dim]`` bfloat16 if the query is, else float32.
        """
        ...

    def commit(self) -> None:
        """Tell the store about the step that was queued."""
        ...

    def recount(self) -> None:
        """Take positions and tail lengths from the store again: steps since then did not count."""
        ...


class DecodeBackend(Protocol):
    """One way to carry out decode steps.

    Attributes:
        name: What it is asked for by.
        page_order: How its kernels want pages kept; None for the order of ``store/layout.py``.
        page_codec: Kernels that encode pages; None leaves it to the codec of a sequence.
    """

    name: str
    page_order: PageOrder | None
    page_codec: PageCodec | None

    def prepare(self, tables: Sequence[TierTable], geometry: KVGeometry) -> None:
        """Begin to make ready what a cache of these tiers will need; returns at once.

        Args:
            tables: Tiers that its pages may have; which table they come from a prompt decides.
            geometry: Shape of the cache.
        """
        ...

    def attend(self, request: DecodeRequest) -> PartialAttention:
        """Attention of one sequence's queries, one or many, over all pages and the tail.

        Returns:
            Output ``[query_heads, queries, head_dim]`` and lse ``[query_heads, queries]``.
        """
        ...

    def attend_rows(self, request: BatchRequest) -> PartialAttention:
        """Attention of one query per sequence over all pages and tails.

        Returns:
            Output ``[rows, query_heads, head_dim]`` and lse ``[rows, query_heads]``.
        """
        ...

    def capture(
        self,
        store: PageStore,
        sequences: Sequence[int],
        *,
        max_tokens: int,
        windows: Sequence[int | None] = (),
    ) -> StepGraph | None:
        """Decode steps that a CUDA graph can hold; None where ``why_not`` gives a reason.

        Args:
            store: Pages in this backend's order.
            sequences: Sequence in the store of each row.
            max_tokens: Tokens that a sequence may reach.
            windows: Sliding window of each layer, None for full attention.
        """
        ...

    def why_not(
        self, store: PageStore, sequences: Sequence[int], *, windows: Sequence[int | None] = ()
    ) -> str:
        """Why ``capture`` gives None for these arguments; empty where it does not."""
        ...

    def table_bytes(self, codec: SphericalCodec) -> int:
        """Bytes of look-up tables and codebooks that the backend holds for a codec."""
        ...


class EagerBackend:
    """The part of a ``DecodeBackend`` that is the same where no step can be captured.

    Attributes:
        name: See ``DecodeBackend``.
    """

    name: str

    def prepare(self, tables: Sequence[TierTable], geometry: KVGeometry) -> None:
        """Nothing has to be compiled ahead."""

    def capture(
        self,
        store: PageStore,
        sequences: Sequence[int],
        *,
        max_tokens: int,
        windows: Sequence[int | None] = (),
    ) -> StepGraph | None:
        """None: every step is launched anew."""
        return None

    def why_not(
        self, store: PageStore, sequences: Sequence[int], *, windows: Sequence[int | None] = ()
    ) -> str:
        """Why ``capture`` gives None."""
        return f"the {self.name} backend captures no steps"


def attend_by_codec(
    attend: Callable[[BatchRequest], PartialAttention], request: BatchRequest
) -> PartialAttention:
    """``attend_rows`` of kernels whose tables serve all rows: one call per codec of the rows.

    Args:
        attend: Answers rows of one codec.
        request: Rows of any codecs.
    """
    rows: dict[int, list[int]] = {}
    for row, sequence in enumerate(request.sequences):
        rows.setdefault(id(request.store.codec(sequence)), []).append(row)
    if len(rows) == 1:
        return attend(request)
    parts = [attend(request.select(group)) for group in rows.values()]
    order = torch.tensor([row for group in rows.values() for row in group]).argsort()
    order = order.to(request.query.device, non_blocking=True)
    return PartialAttention(
        torch.cat([part.output for part in parts]).index_select(0, order),
        torch.cat([part.lse for part in parts]).index_select(0, order),
    )


def attend_each(backend: DecodeBackend, request: BatchRequest) -> PartialAttention:
    """``attend_rows`` of a backend that takes one row after the other."""
    parts = [backend.attend(request.row(row)) for row in range(len(request.sequences))]
    return PartialAttention(
        torch.stack([part.output[:, 0] for part in parts]),
        torch.stack([part.lse[:, 0] for part in parts]),
    )
