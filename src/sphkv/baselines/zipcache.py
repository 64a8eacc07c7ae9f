# SPDX-License-Identifier: Apache-2.0
"""ZipCache: tokens that probes attend to at 4 bits, the rest at 2.

He et al., 2024, "ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token
Identification". The saliency of a token is the attention it receives from probe queries, 5% of
them the latest and 5% random, divided by the number of probes that can see it. Keys take one range
per channel; values are divided by the root of each channel's largest entry and take one range per
token ("channel-separable tokenwise").

Deviations: the share of salient tokens (the paper's runs use 40% to 60%) is the largest that fits
the budget; each KV head has its own salient tokens; tokens after the prompt are coded 100 at a
time as in the paper, but all at the high width, since their later attention is not recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from sphkv.baselines.attention_scores import mean_over_group, probe_attention
from sphkv.baselines.coded_layer import Coded, CodedLayer, StateBlock
from sphkv.baselines.eviction import highest
from sphkv.baselines.held_states import Tagged
from sphkv.baselines.integer_codes import (
    ChannelIntegers,
    TokenIntegers,
    as_float16,
    pack_bits,
    unpack_bits,
)
from sphkv.baselines.quantised import CodedSettings
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

SHARES = (0.95, 0.8, 0.6, 0.4, 0.2, 0.05)
"""Shares of salient tokens, the best first."""

_PROBE_SEED = 0


@dataclass(frozen=True)
class ScaledTokens:
    """Integers per token after every channel was divided by a factor of its own."""

    integers: TokenIntegers

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Codes and scales per token, factors ``[heads, 1, head_dim]`` float16."""
        largest = x.abs().amax(1, keepdim=True).sqrt()
        factor = as_float16(torch.where(largest > 0, largest, 1.0), name="channel factor")
        return {**self.integers.encode(x / factor), "factor": factor.half()}

    def decode(self, tensors: dict[str, Tensor], num_tokens: int) -> Tensor:
        """``[heads, tokens, head_dim]`` float32."""
        return self.integers.decode(tensors, num_tokens) * tensors["factor"].float()


def saliency(block: StateBlock) -> Tensor:
    """Normalised attention ``[kv_heads, tokens]`` that the tokens of a prompt receive."""
    assert block.query is not None
    tokens = block.keys.shape[1]
    count = max(1, tokens // 20)
    generator = torch.Generator().manual_seed(_PROBE_SEED)
    random = torch.randperm(tokens - count, generator=generator)[:count]
    rows = torch.cat([random.sort().values, torch.arange(tokens - count, tokens)])
    rows = rows.to(block.keys.device)
    received = probe_attention(block.query, block.keys, rows)
    place = torch.arange(tokens, device=rows.device)
    seen_by = (rows[:, None] >= place).sum(0).clamp(min=1)
    return mean_over_group(received / seen_by, block.keys.shape[0])


@dataclass(frozen=True)
class SalientIntegers:
    """Two widths in one block.

    Attributes:
        head_dim: Channels of a head.
        share: Share of salient tokens.
        high_bits: Width of salient tokens.
        low_bits: Width of the others.
        residual_tokens: Newest tokens that stay dense.
        sink_tokens: First tokens that stay dense.
    """

    head_dim: int
    share: float
    high_bits: int = 4
    low_bits: int = 2
    residual_tokens: int = 0
    sink_tokens: int = 0

    block_tokens: ClassVar[int] = 100

    @property
    def label(self) -> str:
        """Both widths and the share of the first."""
        return f"{self.high_bits}/{self.low_bits}@{self.share:g}"

    def encode(self, layer: int, block: StateBlock) -> dict[str, Tensor]:
        """Both sets of tokens, and one bit per token that tells them apart."""
        heads, tokens, _ = block.keys.shape
        if block.query is None:
            is_salient = torch.ones(heads, tokens, dtype=torch.bool, device=block.keys.device)
        else:
            is_salient = highest(saliency(block), max(1, round(self.share * tokens)))
        tensors = {"prot.salient": pack_bits(is_salient.to(torch.uint8), bits=1)}
        for name, bits, chosen in self._sets(is_salient):
            pair = (block.keys, block.values)
            keys, values = (x[chosen].view(heads, -1, self.head_dim).float() for x in pair)
            if keys.shape[1] == 0:
                continue
            for own, tensor in ChannelIntegers(bits, None).encode(keys).items():
                kind = "codes" if own == "codes" else "radii"
                tensors[f"{kind}.{name}_{own}"] = tensor
            for own, tensor in self._values(bits).encode(values).items():
                tensors[f"values.{name}_{own}"] = tensor
        return tensors

    def decode(self, layer: int, coded: Coded) -> tuple[Tensor, Tensor]:
        """Both sets, back in their order."""
        packed = coded.tensors["prot.salient"]
        is_salient = unpack_bits(packed, bits=1, count=coded.num_tokens).bool()
        heads = packed.shape[0]
        shape = (heads, coded.num_tokens, self.head_dim)
        keys, values = (torch.empty(shape, device=packed.device) for _ in range(2))
        for name, bits, chosen in self._sets(is_salient):
            own = _named(coded.tensors, name)
            count = int(chosen[0].sum())
            if count == 0:
                continue
            part = ChannelIntegers(bits, None).decode(own["keys"], count)
            keys[chosen] = part.reshape(-1, self.head_dim)
            part = self._values(bits).decode(own["values"], count)
            values[chosen] = part.reshape(-1, self.head_dim)
        return keys, values

    def _sets(self, is_salient: Tensor) -> list[tuple[str, int, Tensor]]:
        return [("high", self.high_bits, is_salient), ("low", self.low_bits, ~is_salient)]

    def _values(self, bits: int) -> ScaledTokens:
        return ScaledTokens(TokenIntegers(bits, self.head_dim))

    def layer(self, layer: int, keys: Tensor, values: Tensor) -> CodedLayer:
        """An empty layer."""
        return CodedLayer(self, layer, keys, values)

    def tables(self) -> list[Tagged]:
        """None."""
        return []


def _named(tensors: dict[str, Tensor], name: str) -> dict[str, dict[str, Tensor]]:
    """Tensors of one set, keys and values apart, under the names their codecs use."""
    found: dict[str, dict[str, Tensor]] = {"keys": {}, "values": {}}
    for full, tensor in tensors.items():
        kind, _, rest = full.partition(".")
        own = rest.removeprefix(f"{name}_")
        if own != rest:
            found["values" if kind == "values" else "keys"][own] = tensor
    return found


@dataclass(frozen=True)
class ZipCache(CodedSettings):
    """ZipCache at 4 and 2 bits.

    Attributes:
        high_bits: Width of salient tokens.
        low_bits: Width of the others.
    """

    high_bits: int = 4
    low_bits: int = 2

    name: ClassVar[str] = "zipcache"

    def trials(self) -> tuple[Self, ...]:
        """Three pairs of widths, without and with dense tokens at both ends."""
        return tuple(
            type(self)(sinks, residual, high, low)
            for sinks, residual in ((None, None), (4, 32))
            for high, low in ((4, 2), (4, 1), (3, 2))
        )

    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> list[SalientIntegers]:
        """All shares of salient tokens."""
        widths = (self.high_bits, self.low_bits)
        return [SalientIntegers(geometry.head_dim, share, *widths) for share in SHARES]
