# SPDX-License-Identifier: Apache-2.0
"""Integers per channel for keys and per token for values: KIVI, and OTT's tokens kept apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from sphkv.baselines.coded_layer import Coded, CodedLayer, PairCodec, StateBlock, StateLayer
from sphkv.baselines.held_states import HeldStates, Tagged
from sphkv.baselines.integer_codes import ChannelIntegers, TokenIntegers
from sphkv.baselines.outlier_codes import index_dtype, place
from sphkv.baselines.quantised import CodedSettings
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

WIDTHS = ((8, 8), (8, 4), (4, 4), (4, 3), (3, 3), (3, 2), (2, 2))
"""Bits of keys and of values, the best first."""

TRACED_GROUP = 128


def kivi_codec(
    geometry: KVGeometry, key_bits: int, value_bits: int, *, group: int = 32, residual: int = 128
) -> PairCodec:
    """KIVI's integers, keys and values coded together in blocks of ``residual`` tokens."""
    if residual % group:
        raise ValueError(f"residual {residual} is no multiple of the group of {group}")
    return PairCodec(
        ChannelIntegers(key_bits, group),
        TokenIntegers(value_bits, geometry.head_dim, group),
        block_tokens=residual,
    )


class _Nothing:
    """The half of a state that another layer keeps."""

    label = ""

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """No tensors."""
        return {}

    def decode(self, tensors: dict[str, Tensor], num_tokens: int) -> Tensor:
        """Never asked: a half is read by ``KiviLayer``."""
        raise AssertionError("a half of a state has nothing to decode")

    def tables(self) -> list[Tensor]:
        """None."""
        return []


@dataclass(frozen=True)
class _Half(PairCodec):
    """Keys alone or values alone."""

    def decode(self, layer: int, coded: Coded) -> tuple[Tensor, Tensor]:
        own = {name.partition(".")[2]: tensor for name, tensor in coded.tensors.items()}
        if isinstance(self.keys, _Nothing):
            decoded = self.values.decode(own, coded.num_tokens)
            return decoded[..., :0], decoded
        decoded = self.keys.decode(own, coded.num_tokens)
        return decoded, decoded[..., :0]


@dataclass(frozen=True)
class KiviCodec:
    """Keys that leave together, values that leave one by one.

    Attributes:
        keys: Codec of the keys.
        values: Codec of the values.
        residual_tokens: Keys coded together, and newest values that stay dense.
        sink_tokens: First tokens that stay dense.
    """

    keys: ChannelIntegers
    values: TokenIntegers
    residual_tokens: int = 128
    sink_tokens: int = 0

    @property
    def label(self) -> str:
        """Bits of keys and values."""
        return f"k{self.keys.label}v{self.values.label}"

    def layer(self, layer: int, keys: Tensor, values: Tensor) -> StateLayer:
        """An empty layer."""
        return KiviLayer(self, layer, keys, values)

    def tables(self) -> list[Tagged]:
        """None."""
        return []


class KiviLayer:
    """Keys in one coded layer and values in another.

    Attributes:
        keeps_rebuilt: Whether what was rebuilt once is kept for later reads.
    """

    def __init__(self, codec: KiviCodec, layer: int, keys: Tensor, values: Tensor) -> None:
        """Start empty, on the device of the given states."""
        self.keeps_rebuilt = False
        sinks, residual = codec.sink_tokens, codec.residual_tokens
        key_half = _Half(codec.keys, _Nothing(), residual, 0, sinks)
        value_half = _Half(_Nothing(), codec.values, 1, residual, sinks)
        self._keys = CodedLayer(key_half, layer, keys, values[..., :0])
        self._values = CodedLayer(value_half, layer, keys[..., :0], values)

    @property
    def num_tokens(self) -> int:
        """Tokens of the layer."""
        return self._keys.num_tokens

    @property
    def num_coded(self) -> int:
        """Tokens whose keys are coded."""
        return self._keys.num_coded

    def store_prompt(self, block: StateBlock) -> None:
        """Divide a prompt, keys and values each their own way."""
        self._keys.store_prompt(StateBlock(block.keys, block.values[..., :0], 0))
        self._values.store_prompt(StateBlock(block.keys[..., :0], block.values, 0))

    def room(self) -> int:
        """One: a value leaves with every token."""
        return min(self._keys.room(), self._values.room())

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens."""
        self._keys.append(keys, values[..., :0])
        self._values.append(keys[..., :0], values)

    def seal(self) -> None:
        """Code what has waited long enough."""
        self._keys.seal()
        self._values.seal()

    def read(self) -> HeldStates:
        """Everything the layer holds, rebuilt in float32."""
        self._keys.keeps_rebuilt = self._values.keeps_rebuilt = self.keeps_rebuilt
        keys, values = self._keys.read(), self._values.read()
        return HeldStates(keys.keys, values.values, keys.positions)

    def check_crop(self, num_tokens: int) -> None:
        """Refuse a cut through a block of keys."""
        self._keys.check_crop(num_tokens)

    def crop(self, num_tokens: int) -> None:
        """Forget tokens; ``check_crop`` has allowed it."""
        self._keys.crop(num_tokens)
        self._values.crop(num_tokens)

    def tensors(self) -> list[Tagged]:
        """Every live tensor with its ledger kind."""
        return [pair for pair in self._keys.tensors() + self._values.tensors() if pair[1].numel()]

    def page_counts(self) -> int:
        """Pages of the keys; the values lie in the same."""
        return self._keys.page_counts()


@dataclass(frozen=True)
class Kivi(CodedSettings):
    """KIVI: keys as integers per channel, values as integers per token, recent tokens dense.

    Liu et al., 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache". Keys share a
    float16 minimum and spacing per channel and 32 tokens, values per token and 32 channels. Keys
    wait dense until 128 of them are coded together; of the values the newest 128 are always dense,
    and each is coded when it leaves.

    Deviations: where several widths fit the budget the widest is taken (the paper has 2 and 4
    bits), keys before values.

    Attributes:
        group: Tokens, or channels, that share a minimum and spacing.
        residual_tokens: Keys coded together, and newest values that stay dense; 128 if None.
    """

    group: int = 32

    name: ClassVar[str] = "kivi"

    def trials(self) -> tuple[Self, ...]:
        """Two groups, three residuals."""
        return tuple(
            type(self)(group=group, residual_tokens=residual)
            for group in (32, 64)
            for residual in (128, 64, 192)
        )

    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> list[KiviCodec]:
        """All widths."""
        if (self.residual_tokens or 128) % self.group:
            raise ValueError(
                f"residual {self.residual_tokens} is no multiple of the group of {self.group}"
            )
        return [
            KiviCodec(
                ChannelIntegers(k, self.group), TokenIntegers(v, geometry.head_dim, self.group)
            )
            for k, v in WIDTHS
        ]


@dataclass(frozen=True)
class TracedIntegers:
    """Groups of integers beside their outlier tokens.

    Attributes:
        integers: Codes the tokens that fit; its blocks are multiples of ``group``.
        group: Tokens of a group.
        num_outliers: Places of a head's pool.
        num_spilled: Places for tokens that left the pool.
        residual_tokens: Newest tokens that stay dense.
        sink_tokens: First tokens that stay dense.
    """

    integers: PairCodec
    group: int = TRACED_GROUP
    num_outliers: int = 3
    num_spilled: int = 32
    residual_tokens: int = 32
    sink_tokens: int = 0

    block_tokens: ClassVar[int] = TRACED_GROUP

    @property
    def label(self) -> str:
        """Bits and dense tokens."""
        return f"{self.integers.label}o{self.num_outliers}"

    def encode(self, layer: int, block: StateBlock) -> dict[str, Tensor]:
        """The integers of all groups, and index, key and value of the tokens in both pools."""
        magnitude = block.keys.float().abs().sum(-1).unflatten(1, (-1, self.group))
        taken = trace_outliers(magnitude, self.num_outliers, self.num_spilled)
        filled = StateBlock(
            _fill(block.keys, taken), _fill(block.values, taken), block.first_position
        )
        index = self._places(taken.flatten(1))
        wide = index[..., None].expand(*index.shape, block.keys.shape[-1])
        return {
            **self.integers.encode(layer, filled),
            "prot.index": index.to(index_dtype(block.keys.shape[1])),
            "codes.outlier_keys": block.keys.gather(1, wide).bfloat16(),
            "values.outlier_values": block.values.gather(1, wide).bfloat16(),
        }

    def _places(self, taken: Tensor) -> Tensor:
        """Tokens of both pools ``[heads, places]``; a free place repeats another token."""
        most = taken.shape[1] // self.group * self.num_outliers
        size = min(self.num_outliers + self.num_spilled, most)
        index = taken.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :size]
        is_free = torch.arange(size, device=taken.device) >= taken.sum(1, keepdim=True)
        return torch.where(is_free, index[:, :1], index)

    def decode(self, layer: int, coded: Coded) -> tuple[Tensor, Tensor]:
        """Integers, overwritten by the outlier tokens."""
        own = ("prot.index", "codes.outlier_keys", "values.outlier_values")
        rest = {name: tensor for name, tensor in coded.tensors.items() if name not in own}
        inner = Coded(rest, coded.first_position, coded.num_tokens)
        index, *dense = (coded.tensors[name] for name in own)
        wide = place(index)[..., None].expand_as(dense[0])
        keys, values = self.integers.decode(layer, inner)
        return keys.scatter(1, wide, dense[0].float()), values.scatter(1, wide, dense[1].float())

    def layer(self, layer: int, keys: Tensor, values: Tensor) -> CodedLayer:
        """An empty layer."""
        return CodedLayer(self, layer, keys, values)

    def tables(self) -> list[Tagged]:
        """None."""
        return []


def trace_outliers(magnitude: Tensor, num_places: int, num_spilled: int) -> Tensor:
    """Tokens that are in the pool after some group, ``[heads, groups, tokens]`` bool.

    Args:
        magnitude: ``[heads, groups, tokens]`` of the keys, in the order the groups are coded.
        num_places: Places of the pool.
        num_spilled: Tokens of a head that may leave the pool before tracing stops.
    """
    heads, groups = magnitude.shape[:2]
    taken = torch.zeros(magnitude.shape, dtype=torch.bool, device=magnitude.device)
    pool = magnitude.new_full((heads, num_places), torch.inf)
    left = torch.zeros(heads, dtype=torch.int64, device=magnitude.device)
    is_tracing = torch.ones_like(left, dtype=torch.bool)
    for number in range(groups):
        rivals = torch.cat([pool, magnitude[:, number]], 1)
        smallest, winners = rivals.topk(num_places, dim=1, largest=False)
        stays = torch.zeros_like(rivals, dtype=torch.bool).scatter_(1, winners, True)
        leaving = (~stays[:, :num_places] & pool.isfinite()).sum(1)
        is_tracing &= left + leaving <= num_spilled
        taken[:, number] = stays[:, num_places:] & is_tracing[:, None]
        pool = torch.where(is_tracing[:, None], smallest, pool)
        left += leaving * is_tracing
    return taken


def _fill(states: Tensor, taken: Tensor) -> Tensor:
    """Replace taken tokens ``[heads, groups, tokens]`` by the mean of the others of their group."""
    grouped = states.float().unflatten(1, taken.shape[1:])
    kept = grouped.masked_fill(taken[..., None], 0.0)
    mean = kept.sum(2, keepdim=True) / (~taken).sum(2)[..., None, None]
    return torch.where(taken[..., None], mean, grouped).flatten(1, 2)


@dataclass(frozen=True)
class Ott(CodedSettings):
    """OTT with groups of 128 and a residual of 32.

    OTT: KIVI's integers, with the tokens that do not fit their group kept dense.

    Su et al., 2025, "Accurate KV Cache Quantization with Outlier Tokens Tracing". In channels where
    keys are large, a few tokens have small keys and widen the range of their whole group. Each head
    has a pool of three tokens that stay in full precision. Every group of 128 that is coded
    competes for it: the smallest sums of absolute key entries win and are left out of their group's
    range. Tokens that lose their place again stay dense in a second pool of 32, and once that is
    full, nothing is traced any more. The newest 32 tokens are dense.

    Deviations: the pools compete over the groups of a prompt; a group that fills while decoding has
    pools of its own. Every layer has pools, where the paper does best without them in the first
    two.

    Attributes:
        num_outliers: Places of a head's pool.
    """

    num_outliers: int = 3

    name: ClassVar[str] = "ott"

    def trials(self) -> tuple[Self, ...]:
        """Two pools, three residuals."""
        return tuple(
            type(self)(num_outliers=count, residual_tokens=residual)
            for count in (3, 6)
            for residual in (32, 0, 64)
        )

    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> list[TracedIntegers]:
        """All widths."""
        return [
            TracedIntegers(
                kivi_codec(geometry, k, v, group=TRACED_GROUP), num_outliers=self.num_outliers
            )
            for k, v in WIDTHS
        ]
