# SPDX-License-Identifier: Apache-2.0
"""KIVI: keys as integers per channel, values as integers per token, recent tokens dense.

Liu et al., 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache". Keys share a
float16 minimum and spacing per channel and 32 tokens, values per token and 32 channels. Keys wait
dense until 128 of them are coded together; of the values the newest 128 are always dense, and each
is coded when it leaves.

Deviations: where several widths fit the budget the widest is taken (the paper has 2 and 4 bits),
keys before values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from sphkv.baselines.coded_layer import Coded, CodedLayer, PairCodec, StateBlock, StateLayer
from sphkv.baselines.held_states import HeldStates, Tagged
from sphkv.baselines.integer_codes import ChannelIntegers, TokenIntegers
from sphkv.baselines.quantised import CodedSettings
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec

WIDTHS = ((8, 8), (8, 4), (4, 4), (4, 3), (3, 3), (3, 2), (2, 2))
"""Bits of keys and of values, the best first."""


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
    """KIVI.

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
