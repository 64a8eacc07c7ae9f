# SPDX-License-Identifier: Apache-2.0
"""One layer of a quantising method: dense sinks, coded blocks, a dense tail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sphkv.baselines.held_states import HeldStates, Tagged, dense_states, join_states
from sphkv.core.rope import RopeSpec
from sphkv.store.layout import HEADER_BYTES

CODED_PAGE_TOKENS = 128
PAGE_HEADER_BYTES = HEADER_BYTES
PAGE_POINTER_BYTES = 8
"""What a page of coded tokens is charged besides what it holds."""


@dataclass(frozen=True, slots=True, eq=False)
class StateBlock:
    """Consecutive tokens of a layer that are coded together.

    Attributes:
        keys: ``[kv_heads, tokens, head_dim]`` after RoPE.
        values: ``[kv_heads, tokens, head_dim]``.
        first_position: Position of the first token.
        query: ``[query_heads, tokens, head_dim]`` of the tokens; None while decoding.
    """

    keys: Tensor
    values: Tensor
    first_position: int
    query: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """Positions ``[tokens]`` int64."""
        last = self.first_position + self.keys.shape[1]
        return torch.arange(self.first_position, last, device=self.keys.device)

    def part(self, start: int, stop: int) -> StateBlock:
        """Some of the tokens."""
        return StateBlock(
            self.keys[:, start:stop],
            self.values[:, start:stop],
            self.first_position + start,
            None if self.query is None else self.query[:, start:stop],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """A block as it is stored.

    Attributes:
        tensors: By name; the part before the dot is the ledger kind. Where tokens are coded
            one by one, dimension 1 of every tensor is the token.
        first_position: Position of the first token.
        num_tokens: Tokens of the block.
    """

    tensors: dict[str, Tensor]
    first_position: int
    num_tokens: int


class CacheCodec(Protocol):
    """One setting of a method that codes states."""

    @property
    def label(self) -> str:
        """Bits and the like, for reports."""
        ...

    def layer(self, layer: int, keys: Tensor, values: Tensor) -> StateLayer:
        """An empty layer on the device of the given states."""
        ...

    def tables(self) -> list[Tagged]:
        """Tensors that all layers share, such as a rotation."""
        ...


class BlockCodec(Protocol):
    """How a block of tokens is stored, keys and values together."""

    @property
    def block_tokens(self) -> int:
        """Tokens coded together while decoding; 1 codes each token as it comes."""
        ...

    @property
    def residual_tokens(self) -> int:
        """Newest tokens that always stay dense."""
        ...

    @property
    def sink_tokens(self) -> int:
        """First tokens that stay dense."""
        ...

    def encode(self, layer: int, block: StateBlock) -> dict[str, Tensor]:
        """Code a block; see ``Coded.tensors``."""
        ...

    def decode(self, layer: int, coded: Coded) -> tuple[Tensor, Tensor]:
        """Keys and values ``[kv_heads, tokens, head_dim]`` float32."""
        ...


class StateLayer(Protocol):
    """The states of one layer, dense and coded."""

    keeps_rebuilt: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of the layer."""
        ...

    @property
    def num_coded(self) -> int:
        """Tokens that are coded."""
        ...

    def store_prompt(self, block: StateBlock) -> None:
        """Divide a prompt into sinks, coded tokens and the tail."""
        ...

    def room(self) -> int:
        """Tokens that may be appended before something must be coded."""
        ...

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens."""
        ...

    def seal(self) -> None:
        """Code what has waited long enough."""
        ...

    def read(self) -> HeldStates:
        """Everything the layer holds, rebuilt in float32."""
        ...

    def check_crop(self, num_tokens: int) -> None:
        """Refuse a cut through a block that was coded as a whole."""
        ...

    def crop(self, num_tokens: int) -> None:
        """Forget tokens; ``check_crop`` has allowed it."""
        ...

    def tensors(self) -> list[Tagged]:
        """Every live tensor with its ledger kind."""
        ...

    def page_counts(self) -> int:
        """Pages that coded tokens are charged for."""
        ...


class PartCodec(Protocol):
    """How keys alone, or values alone, are stored."""

    @property
    def label(self) -> str:
        """Bits and the like, for reports."""
        ...

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """Code ``[kv_heads, tokens, head_dim]``; an entry ``"codes"`` holds the codes."""
        ...

    def decode(self, tensors: dict[str, Tensor], num_tokens: int) -> Tensor:
        """``[kv_heads, tokens, head_dim]`` float32."""
        ...

    def tables(self) -> list[Tensor]:
        """Tensors that all layers share."""
        ...


@dataclass(frozen=True)
class PairCodec:
    """Keys and values coded apart.

    Attributes:
        keys: Codec of the keys.
        values: Codec of the values.
        block_tokens: Tokens coded together while decoding.
        residual_tokens: Newest tokens that always stay dense.
        sink_tokens: First tokens that stay dense.
        ropes: Rotary embedding of each layer, if keys are coded before it; else empty.
    """

    keys: PartCodec
    values: PartCodec
    block_tokens: int = 1
    residual_tokens: int = 0
    sink_tokens: int = 0
    ropes: Sequence[RopeSpec] = ()

    @property
    def label(self) -> str:
        """Settings of keys and values."""
        return f"k{self.keys.label}v{self.values.label}"

    def encode(self, layer: int, block: StateBlock) -> dict[str, Tensor]:
        """Both parts, under the ledger kinds of keys and of values."""
        keys = block.keys.float()
        if self.ropes:
            rope = self.ropes[layer]
            keys = rope.from_planes(rope.unrotate(rope.to_planes(keys), block.positions))
        tensors = {}
        for name, tensor in self.keys.encode(keys).items():
            tensors["codes.codes" if name == "codes" else f"radii.{name}"] = tensor
        for name, tensor in self.values.encode(block.values.float()).items():
            tensors[f"values.{name}"] = tensor
        return tensors

    def decode(self, layer: int, coded: Coded) -> tuple[Tensor, Tensor]:
        """Both parts."""
        keys: dict[str, Tensor] = {}
        values: dict[str, Tensor] = {}
        for name, tensor in coded.tensors.items():
            kind, _, own = name.partition(".")
            (values if kind == "values" else keys)[own] = tensor
        decoded = self.keys.decode(keys, coded.num_tokens)
        if self.ropes:
            rope, first = self.ropes[layer], coded.first_position
            positions = torch.arange(first, first + coded.num_tokens, device=decoded.device)
            decoded = rope.from_planes(rope.rotate(rope.to_planes(decoded), positions))
        return decoded, self.values.decode(values, coded.num_tokens)

    def layer(self, layer: int, keys: Tensor, values: Tensor) -> StateLayer:
        """An empty layer."""
        return CodedLayer(self, layer, keys, values)

    def tables(self) -> list[Tagged]:
        """Shared tensors of both; one that both use counts once."""
        unique = {id(tensor): tensor for tensor in (*self.keys.tables(), *self.values.tables())}
        return [("headers", tensor) for tensor in unique.values()]


class CodedLayer:
    """The states of one layer.

    Attributes:
        keeps_rebuilt: Whether what was rebuilt once is kept for later reads.
    """

    def __init__(self, codec: BlockCodec, layer: int, keys: Tensor, values: Tensor) -> None:
        """Start empty, on the device of the given states."""
        self.keeps_rebuilt = False
        self._rebuilt: HeldStates | None = None
        self._codec = codec
        self._layer = layer
        self._sinks = _dense_copy(keys[:, :0], values[:, :0])
        self._tail = _dense_copy(keys[:, :0], values[:, :0])
        self._blocks: list[Coded] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the layer."""
        return self._coded_end + self._tail[0].shape[1]

    @property
    def _coded_end(self) -> int:
        return self._sinks[0].shape[1] + sum(block.num_tokens for block in self._blocks)

    @property
    def _is_per_token(self) -> bool:
        return self._codec.block_tokens == 1

    def store_prompt(self, block: StateBlock) -> None:
        """Divide a prompt into sinks, one coded block and the tail."""
        codec, tokens = self._codec, block.keys.shape[1]
        sinks = min(codec.sink_tokens, tokens)
        rest = max(0, tokens - sinks - codec.residual_tokens)
        end = sinks + rest // codec.block_tokens * codec.block_tokens
        self._sinks = _dense_copy(block.keys[:, :sinks], block.values[:, :sinks])
        if end > sinks:
            self._code(block.part(sinks, end))
        self._tail = _dense_copy(block.keys[:, end:], block.values[:, end:])

    def room(self) -> int:
        """Tokens that may be appended before something must be coded."""
        codec = self._codec
        if self._is_per_token and codec.residual_tokens == 0:
            return 1 << 30
        return codec.residual_tokens + codec.block_tokens - self._tail[0].shape[1]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens: coded at once if the codec works token by token, else to the tail."""
        if self._is_per_token and self._codec.residual_tokens == 0:
            self._code(StateBlock(keys, values, self.num_tokens))
            return
        held = self._tail
        self._tail = (
            torch.cat([held[0], keys.to(torch.bfloat16)], 1),
            torch.cat([held[1], values.to(torch.bfloat16)], 1),
        )

    def seal(self) -> None:
        """Code the oldest block of the tail if it is full."""
        block, keys, values = self._codec.block_tokens, *self._tail
        if keys.shape[1] < self._codec.residual_tokens + block:
            return
        self._code(StateBlock(keys[:, :block], values[:, :block], self._coded_end))
        self._tail = _dense_copy(keys[:, block:], values[:, block:])

    def _code(self, block: StateBlock) -> None:
        tensors = self._codec.encode(self._layer, block)
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        coded = Coded(tensors, block.first_position, block.keys.shape[1])
        if self._is_per_token and self._blocks:
            last = self._blocks.pop()
            tensors = {n: torch.cat([last.tensors[n], t], 1) for n, t in coded.tensors.items()}
            coded = Coded(tensors, last.first_position, last.num_tokens + coded.num_tokens)
        self._blocks.append(coded)

    @property
    def num_coded(self) -> int:
        """Tokens that are coded."""
        return sum(block.num_tokens for block in self._blocks)

    def page_counts(self) -> int:
        """Pages of 128 tokens that the coded tokens of all heads take."""
        return self._sinks[0].shape[0] * -(-self.num_coded // CODED_PAGE_TOKENS)

    def read(self) -> HeldStates:
        """Everything the layer holds, rebuilt in float32."""
        parts = [] if self._rebuilt is None else [self._rebuilt]
        for block in self._pending_blocks():
            keys, values = self._codec.decode(self._layer, block)
            parts.append(dense_states(keys, values, block.first_position))
        if self.keeps_rebuilt and parts:
            self._rebuilt = join_states(parts) if len(parts) > 1 else parts[0]
            parts = [self._rebuilt]
        tail = dense_states(*self._tail, self._coded_end)
        return join_states([dense_states(*self._sinks, 0), *parts, tail])

    def _pending_blocks(self) -> list[Coded]:
        """Coded tokens that are not rebuilt yet."""
        if self._rebuilt is None:
            return self._blocks
        done = self._sinks[0].shape[1] + self._rebuilt.keys.shape[1]
        if not self._is_per_token:
            return [block for block in self._blocks if block.first_position >= done]
        last = self._blocks[-1]
        skip = done - last.first_position
        if skip == last.num_tokens:
            return []
        rest = {name: tensor[:, skip:] for name, tensor in last.tensors.items()}
        return [Coded(rest, done, last.num_tokens - skip)]

    def check_crop(self, num_tokens: int) -> None:
        """Refuse a cut through a block that was coded as a whole."""
        if self._is_per_token or num_tokens >= self._coded_end:
            return
        borders = {block.first_position for block in self._blocks}
        if num_tokens > self._sinks[0].shape[1] and num_tokens not in borders:
            raise ValueError(
                f"cannot crop to {num_tokens} tokens: layer {self._layer} coded blocks that "
                f"begin at {sorted(borders)} and end at {self._coded_end}"
            )

    def crop(self, num_tokens: int) -> None:
        """Forget tokens; ``check_crop`` has allowed it."""
        self._rebuilt = None
        kept = max(0, num_tokens - self._coded_end)
        self._tail = _dense_copy(self._tail[0][:, :kept], self._tail[1][:, :kept])
        blocks = [block for block in self._blocks if block.first_position < num_tokens]
        if blocks and self._is_per_token:
            last = blocks.pop()
            count = min(last.num_tokens, num_tokens - last.first_position)
            tensors = {name: t[:, :count].clone() for name, t in last.tensors.items()}
            blocks.append(Coded(tensors, last.first_position, count))
        self._blocks = blocks
        sinks = self._sinks
        self._sinks = _dense_copy(sinks[0][:, :num_tokens], sinks[1][:, :num_tokens])

    def tensors(self) -> list[Tagged]:
        """Every live tensor with its ledger kind."""
        tagged: list[Tagged] = []
        for keys, values in (self._sinks, self._tail):
            tagged += [("codes", keys), ("values", values)]
        for block in self._blocks:
            tagged += [(name.partition(".")[0], tensor) for name, tensor in block.tensors.items()]
        return tagged


def _dense_copy(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """bfloat16 copies that keep no larger tensor alive."""
    return (
        keys.to(torch.bfloat16, copy=True).contiguous(),
        values.to(torch.bfloat16, copy=True).contiguous(),
    )
