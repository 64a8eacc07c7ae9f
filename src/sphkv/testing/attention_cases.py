# SPDX-License-Identifier: Apache-2.0
"""One table of attention cases for all backends, and the one rule by which they are judged.

A backend is compared with the float64 oracle on identical codes. Its error may be twice that of
the float32 reference, plus a floor that its arithmetic states, in maximum and in RMS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sphkv.attention.partial import PartialAttention, merge_partials
from sphkv.attention.reference import ReferenceBackend
from sphkv.attention.request import (
    AttentionOptions,
    BatchRequest,
    DecodeBackend,
    DecodeRequest,
)
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import TierSpec, TierTable, coded_tier
from sphkv.store.store import PageStore
from sphkv.testing.cases import CacheCase, build_store, exact_attention, random_states, rope_of

Precision = Literal["float32", "int8", "half"]

_DROP = TierSpec("drop", "drop", 0.0, 0, 0)
_DENSE = TierSpec("max", "dense", 16.0, 16, 16)
ALL_VALUE_BITS = TierTable(
    (
        _DROP,
        coded_tier(1.0, 2),
        coded_tier(1.5, 3),
        coded_tier(2.0, 4),
        coded_tier(3.0, 8),
        coded_tier(4.25, 16),
        _DENSE,
    )
)
ODD_SLOTS = TierTable((_DROP, coded_tier(1.3125, 2), coded_tier(2.0625, 3), _DENSE))
SHORT_PAGES = TierTable(
    (
        _DROP,
        coded_tier(1.3125, 2, page_tokens=32),
        coded_tier(2.0625, 3, page_tokens=96),
        TierSpec("max", "dense", 16.0, 16, 48),
    )
)


@dataclass(frozen=True, slots=True)
class ErrorFloor:
    """Error that an arithmetic may add to twice the reference's own.

    Attributes:
        rms: Of the output's RMS.
        most: Of its largest element.
        lse: Of the log-sum-exp, absolute.
    """

    rms: float
    most: float
    lse: float


FLOORS: dict[Precision, ErrorFloor] = {
    # another order of summation
    "float32": ErrorFloor(rms=3e-6, most=5e-6, lse=1e-5),
    # queries and weights rounded to eight bits in blocks with a scale of their own
    "int8": ErrorFloor(rms=4e-3, most=1.2e-2, lse=2e-2),
    # products and weights in half precision
    "half": ErrorFloor(rms=1e-3, most=4e-3, lse=4e-3),
}
"""What each arithmetic may err by; tiers themselves err by a tenth and more."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A cache and a question to it.

    Attributes:
        cache: What is stored.
        num_queries: Newest positions that ask; some of a chunk may lie in pages.
        scale: Factor on logits; None for what models of the head dimension have.
        softcap: See ``AttentionOptions``.
        window: See ``AttentionOptions``.
        has_sinks: Whether learned sinks take weight.
        is_thinned: Whether every second page of the first head is dropped, which leaves unused
            pointers and heads of unequal length.
        rotary: Rotary embedding: ``"plain"``, ``"linear"``, ``"partial"`` or ``"none"``.
    """

    cache: CacheCase
    num_queries: int = 1
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    has_sinks: bool = False
    is_thinned: bool = False
    rotary: str = "plain"

    def options(self) -> AttentionOptions:
        """Scale, soft-cap and window."""
        scale = self.cache.head_dim**-0.5 if self.scale is None else self.scale
        return AttentionOptions(scale, self.softcap, self.window)

    def rope(self) -> RopeSpec:
        """Rotary embedding of the only layer."""
        config = _ROPES[self.rotary]
        head_dim = self.cache.head_dim
        return RopeSpec.from_config(config, head_dim) if config else RopeSpec.unrotated(head_dim)

    def sink_logits(self) -> Tensor | None:
        """``[query_heads]``, from weightless to almost all; None without sinks."""
        if not self.has_sinks:
            return None
        return torch.linspace(-3, 6, self.cache.geometry().num_query_heads)


_ROPES: dict[str, dict[str, object]] = {
    "plain": {"rope_theta": 1e4},
    "linear": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "partial": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "none": {},
}
_MIXED = CacheCase(num_tokens=200)
_PAGES = CacheCase(mix="k2v3", num_tokens=133, tail_tokens=1)

CASES: dict[str, AttentionCase] = {
    "empty": AttentionCase(CacheCase(num_tokens=0, tail_tokens=0)),
    "one token": AttentionCase(CacheCase(num_tokens=1, tail_tokens=0)),
    "tail only": AttentionCase(CacheCase(num_tokens=0, tail_tokens=5)),
    "page less one": AttentionCase(CacheCase(mix="k2v3", num_tokens=131, tail_tokens=0)),
    "page": AttentionCase(CacheCase(mix="k2v3", num_tokens=132, tail_tokens=0)),
    "page plus one": AttentionCase(_PAGES),
    "full tail": AttentionCase(CacheCase(mix="k2v3", num_tokens=140, tail_tokens=160)),
    "full tail, no page": AttentionCase(CacheCase(num_tokens=0, tail_tokens=160, group_size=1)),
    "mixed tiers": AttentionCase(_MIXED),
    "runs": AttentionCase(CacheCase(mix="runs", num_tokens=250)),
    "unused pointers": AttentionCase(CacheCase(mix="k1v2", num_tokens=500), is_thinned=True),
    "many pages": AttentionCase(CacheCase(mix="k1v2", num_tokens=900, num_kv_heads=1, seed=3)),
    "value bits": AttentionCase(CacheCase(tiers=ALL_VALUE_BITS, num_tokens=180, num_kv_heads=1)),
    "odd slots": AttentionCase(CacheCase(tiers=ODD_SLOTS, num_tokens=200)),
    "short pages": AttentionCase(CacheCase(tiers=SHORT_PAGES, num_tokens=160)),
    "group 1": AttentionCase(CacheCase(num_tokens=150, group_size=1)),
    "group 4": AttentionCase(CacheCase(mix="k2v3", num_tokens=150, group_size=4)),
    "group 8": AttentionCase(CacheCase(mix="k3v4", num_tokens=150, group_size=8)),
    "group 16": AttentionCase(CacheCase(mix="k2v3", group_size=16, num_kv_heads=1)),
    "d80": AttentionCase(CacheCase(mix="k2v3", head_dim=80, group_size=4, num_kv_heads=1)),
    "d96": AttentionCase(CacheCase(mix="k3v4", head_dim=96, group_size=2, num_tokens=150)),
    "d128": AttentionCase(CacheCase(head_dim=128, group_size=8, num_kv_heads=1, num_tokens=200)),
    "d256": AttentionCase(
        CacheCase(mix="k1v2", head_dim=256, group_size=2, num_kv_heads=1, num_tokens=140)
    ),
    "window": AttentionCase(_MIXED, window=90),
    "window of one": AttentionCase(_PAGES, window=1),
    "soft-cap": AttentionCase(_MIXED, scale=0.3, softcap=5.0),
    "sinks": AttentionCase(_MIXED, has_sinks=True),
    "chunk in the tail": AttentionCase(_MIXED, num_queries=5),
    "chunk in pages": AttentionCase(_PAGES, num_queries=30),
    "chunk, window": AttentionCase(_MIXED, num_queries=40, window=90),
    "chunk, soft-cap": AttentionCase(_MIXED, num_queries=7, scale=0.3, softcap=5.0),
    "chunk, full tail": AttentionCase(
        CacheCase(mix="k3v4", num_tokens=140, tail_tokens=160, group_size=1), num_queries=170
    ),
    "linear rope": AttentionCase(_MIXED, rotary="linear"),
    "partial rope": AttentionCase(_PAGES, rotary="partial"),
    "no rope": AttentionCase(_PAGES, rotary="none"),
}


def make_store(
    case: AttentionCase, backend: DecodeBackend | None = None, *, device: str = "cpu"
) -> PageStore:
    """The cache of a case as sequence 0 of a store.

    Args:
        case: What it holds.
        backend: Who will read it: its pages are in his order, and made by his kernels on a GPU.
        device: Where it lives.
    """
    order = None if backend is None else backend.page_order
    # on a CPU they would run in an interpreter, and how pages are made is not the question
    kernels = None if backend is None or device == "cpu" else backend.page_codec
    store = build_store(case.cache, rope=case.rope(), device=device, order=order, kernels=kernels)
    if case.is_thinned:
        for group in store.pages(0, 0):
            ids = group.page_ids[0]
            store.drop(0, 0, ids[ids >= 0][::2])
    return store


def make_request(
    case: AttentionCase, backend: DecodeBackend | None = None, *, device: str = "cpu"
) -> DecodeRequest:
    """The question of a case to a store of its own; see ``make_store``."""
    store = make_store(case, backend, device=device)
    end = max(1, store.num_tokens(0))
    first = max(0, end - case.num_queries)
    _, _, query = random_states(
        case.cache.geometry(), rope_of(store), end - first, first=first, seed=case.cache.seed + 50
    )
    positions = torch.arange(first, end)
    return DecodeRequest(store, 0, 0, query.to(device), positions, case.options())


def make_batch(
    case: AttentionCase, backend: DecodeBackend | None = None, *, device: str = "cpu"
) -> BatchRequest:
    """The cache of a case, a longer copy, an empty sequence and the copy again, one query each."""
    store = make_store(case, backend, device=device)
    geometry, rope = case.cache.geometry(), rope_of(store)
    store.fork(0, 1)
    store.create(2)
    end = store.num_tokens(0)
    keys, values, _ = random_states(geometry, rope, 3, first=end, seed=4)
    store.append(1, 0, keys, values)
    sequences = (0, 1, 2, 1)
    positions = torch.tensor([max(0, store.num_tokens(row) - 1) for row in sequences])
    query = [
        random_states(geometry, rope, 1, first=int(position), seed=60 + row)[2][:, 0]
        for row, position in enumerate(positions)
    ]
    rows = torch.stack(query).to(device)
    return BatchRequest(store, sequences, 0, rows, positions, case.options())


def _answer(
    request: DecodeRequest | BatchRequest, backend: DecodeBackend, sinks: Tensor | None
) -> PartialAttention:
    """What a backend says, rows of a batch first."""
    if isinstance(request, DecodeRequest):
        got, heads_dim = backend.attend(request), 0
    else:
        got, heads_dim = backend.attend_rows(request), 1
    if sinks is None:
        return got
    return merge_partials([got, PartialAttention.of_sinks(sinks, got, heads_dim=heads_dim)])


def _exact_answer(request: DecodeRequest | BatchRequest, sinks: Tensor | None) -> PartialAttention:
    """What is right, in the same form."""
    if isinstance(request, DecodeRequest):
        return exact_attention(request, sink_logits=sinks)
    rows = [
        exact_attention(request.row(row), sink_logits=sinks)
        for row in range(len(request.sequences))
    ]
    return PartialAttention(
        torch.stack([row.output[:, 0] for row in rows]),
        torch.stack([row.lse[:, 0] for row in rows]),
    )


def _errors(got: PartialAttention, exact: PartialAttention) -> tuple[float, float, float]:
    """RMS and largest error of the output, relative, and largest error of the log-sum-exp."""
    gap = got.output.double().cpu() - exact.output.cpu()
    size = exact.output.square().mean().sqrt().clamp(min=1e-9)
    most = exact.output.abs().max().clamp(min=1e-9)
    lse = exact.lse.cpu()
    seen = ~torch.isneginf(lse)
    if not torch.equal(torch.isneginf(got.lse.cpu()), ~seen):
        raise AssertionError("the log-sum-exp must be minus infinity just where nothing is seen")
    lse_gap = (got.lse.double().cpu()[seen] - lse[seen]).abs()
    worst = float(lse_gap.max()) if lse_gap.numel() else 0.0
    return float(gap.square().mean().sqrt() / size), float(gap.abs().max() / most), worst


def assert_attention(
    request: DecodeRequest | BatchRequest,
    backend: DecodeBackend,
    *,
    precision: Precision,
    sink_logits: Tensor | None = None,
) -> None:
    """Raise unless a backend's answer is right.

    Args:
        request: What it is asked.
        backend: Who answers; the reference itself must be within the floor.
        precision: Its arithmetic, a key of ``FLOORS``.
        sink_logits: ``[query_heads]`` learned sinks to merge in.
    """
    if sink_logits is not None:
        sink_logits = sink_logits.to(request.query.device)
    exact = _exact_answer(request, sink_logits)
    errors = _errors(_answer(request, backend, sink_logits), exact)
    own = (0.0, 0.0, 0.0)
    if backend.name != "reference":
        own = _errors(_answer(request, ReferenceBackend(), sink_logits), exact)
    floor = FLOORS[precision]
    bounds = (floor.rms, floor.most, floor.lse)
    named = zip(("RMS", "largest", "log-sum-exp"), errors, own, bounds, strict=True)
    for name, error, reference, bound in named:
        # NaN must not pass
        if not error <= 2 * reference + bound:
            raise AssertionError(
                f"{backend.name}: {name} error {error:.3g} is above twice the reference's "
                f"{reference:.3g} plus {bound:.3g}"
            )
