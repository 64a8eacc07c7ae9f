# SPDX-License-Identifier: Apache-2.0
"""Random but realistic caches that kernel tests and benchmarks share, and the right answer.

The answer is the slow, obvious one in float64: decode every page, then attend densely.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.attention.partial import PartialAttention
from sphkv.attention.request import DecodeRequest
from sphkv.codec.calibration import Calibration, CalibrationOptions, Calibrator
from sphkv.codec.codebook import CodebookFit
from sphkv.codec.states import SphericalCodec
from sphkv.core.contract import LayerContract, StateCodec
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.core.tiers import RUN_TOKENS, TierTable, ladder
from sphkv.store.config import StoreConfig
from sphkv.store.layout import PageLayout, write_pages
from sphkv.store.order import WORD_BYTES, CodecOnly, PageCodec, PageCopier, PageOrder
from sphkv.store.paging import PageRows
from sphkv.store.store import PageStore

USUAL_TIERS = ("k1v2", "k1.5v2", "k2v3", "k3v4", "k4v4")
"""Coded tiers of most cases: few, and far enough apart to differ in every width of a code."""

_QUICK_FIT = CodebookFit(iterations=3, refinements=2, stage_tokens=256)


@dataclass(frozen=True, slots=True)
class CacheCase:
    """A cache to build.

    Attributes:
        head_dim: Elements of a key.
        num_kv_heads: KV heads.
        group_size: Query heads of a KV head.
        num_tokens: Tokens written as pages.
        tail_tokens: Tokens appended afterwards.
        tiers: Tier table; tokens are spread over it by ``mix``.
        mix: ``"all"`` random tier per token and head, drops included; ``"runs"`` random tier
            per aligned run of 16; or the name of one tier for everything after four dense tokens.
        num_layers: Layers, all alike.
        seed: Of all random numbers.
    """

    head_dim: int = 64
    num_kv_heads: int = 2
    group_size: int = 3
    num_tokens: int = 300
    tail_tokens: int = 7
    tiers: TierTable = field(default_factory=lambda: ladder(64, names=USUAL_TIERS))
    mix: str = "all"
    num_layers: int = 1
    seed: int = 0

    def geometry(self) -> KVGeometry:
        """Its shape."""
        return KVGeometry(
            self.num_layers, self.num_kv_heads, self.num_kv_heads * self.group_size, self.head_dim
        )


class MemoryCopier:
    """Copies bytes of the host as a kernel of a GPU does its own."""

    def copy(self, sources: NDArray[np.int64], targets: NDArray[np.int64], num_bytes: int) -> None:
        """See ``PageCopier.copy``."""
        # all is read before anything is written
        read = [ctypes.string_at(int(source), num_bytes) for source in sources]
        for target, data in zip(targets.tolist(), read, strict=True):
            ctypes.memmove(target, data, num_bytes)

    def gather(self, sources: Tensor, target: Tensor, *, piece: int, stride: int) -> None:
        """See ``PageCopier.gather``."""
        if bool((sources % WORD_BYTES).any()) or piece % WORD_BYTES or stride % WORD_BYTES:
            raise ValueError("a GPU reads whole words")
        pieces = target.nbytes // len(sources) // piece
        read = [
            ctypes.string_at(at + stride * index, piece) if at else bytes(piece)
            for at in sources.tolist()
            for index in range(pieces)
        ]
        ctypes.memmove(target.data_ptr(), b"".join(read), target.nbytes)


class JoiningCodec(CodecOnly):
    """Encodes pages of several layers at once, as a Hopper GPU does, with the codec.

    Args:
        num_heads: KV heads.

    Attributes:
        joined: Pages of every call.
    """

    def __init__(self, num_heads: int) -> None:
        self._num_heads = num_heads
        self.joined: list[int] = []

    def copier(self, device: torch.device) -> PageCopier:
        """Copies in the host's memory."""
        return MemoryCopier()

    def joins_layers(
        self, layout: PageLayout, codec: StateCodec | None, device: torch.device
    ) -> bool:
        """All that are coded."""
        return layout.tier.is_coded

    def encode_layers(
        self,
        layout: PageLayout,
        codec: StateCodec | None,
        states: tuple[Tensor, Tensor],
        rows: PageRows,
        heads: Tensor,
    ) -> Tensor:
        """Layer by layer, after all."""
        assert codec is not None
        self.joined.append(len(heads))
        layers, pages = heads // self._num_heads, []
        for layer in layers.unique().tolist():
            at = (layers == layer).nonzero()[:, 0]
            own = rows.select(at)
            encoded = codec.encode(
                layer,
                layout.tier,
                states[0][at],
                states[1][at],
                own.positions,
                head_ids=heads[at] % self._num_heads,
                counts=own.counts,
            )
            pages.append(write_pages(layout, encoded, own))
        return torch.cat(pages)


def random_states(
    geometry: KVGeometry, rope: RopeSpec, num_tokens: int, *, first: int = 0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and queries after RoPE, ``[heads, tokens, head_dim]`` float32.

    Channels differ in scale and mean, as they do in real models: a key bias is part of it.
    """
    # the shape of a head's distribution must not depend on which tokens are drawn
    shape = torch.Generator().manual_seed(1000 + seed)
    draw = torch.Generator().manual_seed(7919 * seed + first)
    positions = torch.arange(first, first + num_tokens)
    heads = (geometry.num_kv_heads, geometry.num_kv_heads, geometry.num_query_heads)
    tensors = []
    for num_heads in heads:
        spread = torch.rand(num_heads, 1, geometry.head_dim, generator=shape) + 0.1
        mean = torch.randn(num_heads, 1, geometry.head_dim, generator=shape)
        noise = torch.randn(num_heads, num_tokens, geometry.head_dim, generator=draw)
        tensors.append(mean + spread * noise)
    keys, values, queries = tensors
    return rope.apply(keys, positions), values, rope.apply(queries, positions)


def random_calibration(
    geometry: KVGeometry, rope: RopeSpec, *, num_tokens: int = 200, seed: int = 0
) -> Calibration:
    """A quick calibration on ``random_states`` of the same seed."""
    ropes = (rope,) * geometry.num_layers
    options = CalibrationOptions(fit=_QUICK_FIT)
    calibrator = Calibrator(geometry, ropes, model_id="random", options=options)
    for layer in range(geometry.num_layers):
        keys, _, queries = random_states(
            geometry, rope, num_tokens, first=10_000, seed=seed + layer
        )
        calibrator.add_layer(layer, keys, queries, torch.arange(10_000, 10_000 + num_tokens))
    return calibrator.finish()


def build_store(
    case: CacheCase,
    *,
    rope: RopeSpec | None = None,
    sequence: int = 0,
    device: str = "cpu",
    order: PageOrder | None = None,
    kernels: PageCodec | None = None,
) -> PageStore:
    """A store with one sequence: pages of mixed tiers, then an open tail."""
    geometry = case.geometry()
    rope = rope or RopeSpec.from_config({"rope_theta": 10_000.0}, case.head_dim)
    codec = SphericalCodec(random_calibration(geometry, rope, seed=case.seed))
    seal_tier = case.tiers[len(case.tiers) - 2].name
    config = StoreConfig(geometry, case.tiers, seal_tier=seal_tier, device=device)
    store = PageStore(config, codec, order=order, kernels=kernels)
    store.create(sequence)
    for layer in range(geometry.num_layers):
        fill_layer(store, case, layer, rope=rope, sequence=sequence)
    return store


def rope_of(store: PageStore, *, sequence: int = 0, layer: int = 0) -> RopeSpec:
    """Rotary embedding of a layer, from the sequence's own codec."""
    codec = store.codec(sequence)
    assert isinstance(codec, SphericalCodec)
    return codec.calibration.ropes[layer]


def fill_layer(
    store: PageStore, case: CacheCase, layer: int, *, rope: RopeSpec, sequence: int = 0
) -> None:
    """Write a case's pages and tail to one layer."""
    geometry, seed = store.config.geometry, case.seed + layer
    if case.num_tokens:
        keys, values, _ = random_states(geometry, rope, case.num_tokens, seed=seed)
        contract = LayerContract(
            _tier_ids(case, seed), torch.zeros(*_shape(case), dtype=torch.bool)
        )
        store.write(sequence, layer, contract, keys, values, torch.arange(case.num_tokens))
    if case.tail_tokens:
        keys, values, _ = random_states(
            geometry, rope, case.tail_tokens, first=case.num_tokens, seed=seed
        )
        store.append(sequence, layer, keys, values)


def _shape(case: CacheCase) -> tuple[int, int]:
    return case.num_kv_heads, case.num_tokens


def _tier_ids(case: CacheCase, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(31 * seed + 5)
    if case.mix not in ("all", "runs"):
        tier_id = torch.full(_shape(case), case.tiers.id_of(case.mix), dtype=torch.uint8)
    else:
        drawn = torch.randint(0, len(case.tiers), _shape(case), generator=generator)
        if case.mix == "runs":
            run = torch.arange(case.num_tokens) // RUN_TOKENS * RUN_TOKENS
            drawn = drawn[:, run]
        tier_id = drawn.to(torch.uint8)
    # where runs are decided, the one that holds the sinks is dense as a whole
    tier_id[:, : RUN_TOKENS if case.mix == "runs" else 4] = case.tiers.dense_id
    return tier_id


def stored_states(request: DecodeRequest, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values (float64) and positions of everything one KV head has stored."""
    keys, values, positions = [], [], []
    for group in request.store.pages(request.sequence, request.layer):
        view, head_ids = request.store.view(group), group.head_ids()
        if group.layout.tier.is_coded:
            pair = request.codec().decode(
                request.layer,
                group.layout.tier,
                view.encoded(),
                view.positions(),
                head_ids=head_ids,
            )
        else:
            pair = view.dense_keys().float(), view.dense_values().float()
        chosen = view.live() & (head_ids == head)[:, None]
        keys.append(pair[0][chosen])
        values.append(pair[1][chosen])
        positions.append(view.positions()[chosen])
    tail = request.store.tail(request.sequence, request.layer)
    keys.append(tail.keys[head].float())
    values.append(tail.values[head].float())
    index = torch.arange(tail.num_tokens, device=tail.keys.device)
    positions.append(tail.first_position + index)
    return torch.cat(keys).double(), torch.cat(values).double(), torch.cat(positions)


def exact_attention(
    request: DecodeRequest, *, sink_logits: Tensor | None = None
) -> PartialAttention:
    """Output ``[query_heads, queries, head_dim]`` and its log-sum-exp in float64.

    Where a query sees nothing, not even a sink, they are zero and minus infinity.
    """
    options = request.options
    group_size = request.store.config.geometry.group_size
    outputs, weights = [], []
    for query_head, query in enumerate(request.query.double()):
        keys, values, positions = stored_states(request, query_head // group_size)
        logits = query @ keys.T * options.scale
        if options.softcap is not None:
            logits = options.softcap * torch.tanh(logits / options.softcap)
        distance = request.positions.to(positions.device)[:, None] - positions
        hidden = distance < 0
        if options.window is not None:
            hidden |= distance >= options.window
        logits = logits.masked_fill(hidden, -torch.inf)
        if sink_logits is not None:
            sink = sink_logits[query_head].double().expand(len(query), 1)
            logits = torch.cat([logits, sink], 1)
            values = torch.cat([values, values.new_zeros(1, values.shape[1])])
        seen = ~torch.isneginf(logits).all(1)
        weight = torch.zeros_like(logits)
        weight[seen] = logits[seen].softmax(-1)
        outputs.append(weight @ values)
        weights.append(logits.logsumexp(-1))
    return PartialAttention(torch.stack(outputs), torch.stack(weights))


def dense_oracle(request: DecodeRequest, *, sink_logits: Tensor | None = None) -> Tensor:
    """Attention output ``[query_heads, queries, head_dim]`` float64; zero where nothing is seen."""
    return exact_attention(request, sink_logits=sink_logits).output
