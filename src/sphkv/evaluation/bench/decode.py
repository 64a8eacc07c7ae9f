# SPDX-License-Identifier: Apache-2.0
"""Decode attention over coded pages against dense attention, timed side by side."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sphkv.attention.api import decode_attention, get_backend
from sphkv.attention.request import AttentionOptions, DecodeBackend, DecodeRequest
from sphkv.codec.calibration import Calibration
from sphkv.codec.states import SphericalCodec
from sphkv.core.contract import EncodedStates, LayerContract
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import DENSE, DROP, TierSpec, TierTable
from sphkv.evaluation.environment import describe_environment
from sphkv.evaluation.lm import shared_bits, tier_for_bits
from sphkv.store.config import StoreConfig
from sphkv.store.store import PageStore
from sphkv.testing.cases import dense_oracle, random_calibration, random_states

GEOMETRIES = {
    "smollm2": (KVGeometry(1, 3, 9, 64), 100_000.0),
    "llama-3.1-8b": (KVGeometry(1, 8, 32, 128), 500_000.0),
}

_CHECK_TOKENS = 1029
_SINK_TOKENS = 4
_ERROR_BOUND = 4e-3
# A contestant that took this long has had its say after the least number of rounds.
_PATIENCE_SECONDS = 4.0
_LEAST_ROUNDS = 3
_MOST_TOKENS = 1 << 21
_MOST_REPEATS = 10_000


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What to time.

    Attributes:
        geometries: Names out of ``GEOMETRIES``.
        contexts: Tokens in the cache.
        bits: Pairs of key and value bits per element, metadata included.
        backend: Decode backend; ``auto`` takes the fastest that runs here.
        threads: Threads of both sides.
        repeats: Timed rounds; each times every contestant once. One that is slow beyond seconds
            sits out after three.
    """

    geometries: tuple[str, ...] = ("smollm2",)
    contexts: tuple[int, ...] = (8192,)
    bits: tuple[tuple[float, float], ...] = ((2.25, 3.25), (3.25, 4.25))
    backend: str = "auto"
    threads: int = 2
    repeats: int = 15

    def __post_init__(self) -> None:
        """Reject what cannot be timed."""
        for name in self.geometries:
            if name not in GEOMETRIES:
                raise ValueError(f"geometry must be one of {sorted(GEOMETRIES)}, got {name!r}")
        for context in self.contexts:
            if not 256 <= context <= _MOST_TOKENS:
                raise ValueError(f"context must be in 256..{_MOST_TOKENS}, got {context}")
        for name in ("threads", "repeats"):
            if not 1 <= getattr(self, name) <= _MOST_REPEATS:
                raise ValueError(f"{name} must be in 1..{_MOST_REPEATS}, got {getattr(self, name)}")


class _ReplayCodec(SphericalCodec):
    """Encodes one page of every head and repeats its codes: filling a long cache takes seconds.

    Positions still differ from page to page, so every logit does; only timing uses it.
    """

    def __init__(self, codec: SphericalCodec) -> None:
        super().__init__(codec.calibration)
        self._pages: dict[tuple[int, str, int], EncodedStates] = {}

    def encode(
        self,
        layer: int,
        tier: TierSpec,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        *,
        head_ids: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> EncodedStates:
        """Codes of the first page of each row's head, whatever the keys."""
        assert head_ids is not None
        for head in head_ids.unique().tolist():
            if (layer, tier.name, head) not in self._pages:
                row = int((head_ids == head).nonzero()[0, 0])
                at = slice(row, row + 1)
                self._pages[layer, tier.name, head] = super().encode(
                    layer, tier, keys[at], values[at], positions[at], head_ids=head_ids[at]
                )
        pages = [self._pages[layer, tier.name, head] for head in head_ids.tolist()]
        return EncodedStates(
            *(
                torch.cat([getattr(page, name) for page in pages])
                for name in EncodedStates.__slots__
            )
        )


@functools.cache
def _calibration(geometry: KVGeometry, rope: RopeSpec) -> Calibration:
    return random_calibration(geometry, rope)


def _build(
    geometry: KVGeometry, rope: RopeSpec, tier: TierSpec, context: int, *, is_replayed: bool
) -> PageStore:
    codec = SphericalCodec(_calibration(geometry, rope))
    config = StoreConfig(geometry, TierTable((DROP, tier, DENSE)), seal_tier=tier.name)
    store = PageStore(config, _ReplayCodec(codec) if is_replayed else codec)
    store.create(0)
    tail = config.recent_tokens
    pages = (context - _SINK_TOKENS - tail) // tier.page_tokens * tier.page_tokens
    step = 64 * tier.page_tokens
    for at in range(0, _SINK_TOKENS + pages, step):
        tokens = min(step, _SINK_TOKENS + pages - at)
        # the sinks shift the first chunk, so that all coded pages are full
        keys, values, _ = random_states(geometry, rope, tokens, first=at)
        tier_id = torch.ones(geometry.num_kv_heads, tokens, dtype=torch.uint8)
        if at == 0:
            tier_id[:, :_SINK_TOKENS] = config.tiers.dense_id
        contract = LayerContract(tier_id, torch.zeros_like(tier_id, dtype=torch.bool))
        store.write(0, 0, contract, keys, values, torch.arange(at, at + tokens))
    rest = context - store.num_tokens(0)
    keys, values, _ = random_states(geometry, rope, rest, first=context - rest)
    store.append(0, 0, keys, values)
    return store


def _request(store: PageStore, rope: RopeSpec) -> DecodeRequest:
    geometry, end = store.config.geometry, store.num_tokens(0)
    _, _, query = random_states(geometry, rope, 1, first=end - 1, seed=77)
    options = AttentionOptions(scale=geometry.head_dim**-0.5)
    return DecodeRequest(store, 0, 0, query, torch.tensor([end - 1]), options)


def _check(geometry: KVGeometry, rope: RopeSpec, tier: TierSpec, backend: DecodeBackend) -> float:
    """Relative error against float64 on distinct keys; raises if it is too large."""
    request = _request(_build(geometry, rope, tier, _CHECK_TOKENS, is_replayed=False), rope)
    expected = dense_oracle(request)
    got = decode_attention(request, backend=backend)
    error = float((got - expected).norm() / expected.norm())
    if not error < _ERROR_BOUND:
        raise RuntimeError(f"{backend.name} backend is wrong by {error:.3g}; nothing was timed")
    return error


def _dense_calls(geometry: KVGeometry, context: int, dtype: torch.dtype) -> list[Callable[[], Any]]:
    """Torch SDPA over a contiguous cache: grouped heads as heads, and as query rows."""
    generator = torch.Generator().manual_seed(5)
    shape = (1, geometry.num_kv_heads, context, geometry.head_dim)
    keys = torch.randn(shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator).to(dtype)
    query = torch.randn(1, geometry.num_query_heads, 1, geometry.head_dim, generator=generator)
    query = query.to(dtype)
    rows = query.reshape(1, geometry.num_kv_heads, geometry.group_size, geometry.head_dim)
    attend = torch.nn.functional.scaled_dot_product_attention
    return [
        lambda: attend(query, keys, values, enable_gqa=True),
        lambda: attend(rows, keys, values),
    ]


def _medians(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each call; rounds interleave, so that noise hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            taken = times[name]
            if len(taken) >= _LEAST_ROUNDS and sum(taken) > 1e3 * _PATIENCE_SECONDS:
                continue
            began = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(taken) for name, taken in times.items()}


def _bytes_read(request: DecodeRequest) -> int:
    """Bytes a step must touch: every page in use, its address and tag, and the tail."""
    read = 0
    for group in request.store.pages(0, 0):
        pages = int(group.num_pages.sum())
        read += pages * (group.layout.page_bytes + 9)
    tail = request.store.tail(0, 0)
    return read + tail.keys.nbytes + tail.values.nbytes


def _measure(name: str, context: int, bits: tuple[float, float], config: BenchConfig) -> Any:
    geometry, theta = GEOMETRIES[name]
    rope = RopeSpec.from_config({"rope_theta": theta}, geometry.head_dim)
    tier = replace(tier_for_bits(*bits, geometry.head_dim), name="bench")
    backend = get_backend(config.backend)
    error = _check(geometry, rope, tier, backend)
    store = _build(geometry, rope, tier, context, is_replayed=True)
    request = _request(store, rope)
    calls: dict[str, Callable[[], Any]] = {"ours": lambda: backend.attend(request)}
    for dtype, label in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        for number, call in enumerate(_dense_calls(geometry, context, dtype)):
            calls[f"{label}-{number}"] = call
    ms = _medians(calls, config.repeats)
    bf16, fp32 = (min(ms[f"{label}-{n}"] for n in range(2)) for label in ("bf16", "fp32"))
    shared = shared_bits(geometry.head_dim)
    return {
        "geometry": name,
        "context": context,
        "key_bits": tier.key_bits_stored(geometry.head_dim) + shared,
        "value_bits": tier.value_bits_stored(geometry.head_dim) + shared,
        "backend": backend.name,
        "ms": ms["ours"],
        "sdpa_bf16_ms": bf16,
        "sdpa_fp32_ms": fp32,
        "us_per_1k_tokens": 1e6 * ms["ours"] / context,
        "ratio_vs_sdpa_bf16": bf16 / ms["ours"],
        "ratio_vs_sdpa_fp32": fp32 / ms["ours"],
        "bytes_read_over_ledger": _bytes_read(request) / store.ledger().total,
        "error": error,
    }


def bench_decode(config: BenchConfig, *, command: str = "") -> list[dict[str, Any]]:
    """One row per geometry, context and bits; a correctness check comes before each timing."""
    previous = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        rows = [
            _measure(name, context, bits, config)
            for name in config.geometries
            for context in config.contexts
            for bits in config.bits
        ]
    finally:
        torch.set_num_threads(previous)
    about = {**describe_environment(), "num_threads": config.threads, "command": command}
    return [{**row, "environment": about} for row in rows]
