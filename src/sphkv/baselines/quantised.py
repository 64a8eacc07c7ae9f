# SPDX-License-Identifier: Apache-2.0
"""The part that all methods which code states share.

Codes and metadata are real tensors, packed to the bits that are claimed, and the ledger counts
them. For every 128 coded tokens of a head the header and pointer of a page are charged as well; no
slack of a last page is, a favour to these methods. A decode step rebuilds the whole layer in
float32 and attends to that, so these methods are format-only: their bytes are real, their speed is
that of reconstruction, and ``peak_bytes`` has the rebuilt layer in it.

The setting is the best one whose bytes stay within the budget after the prompt and after every one
of the ``num_new`` tokens that follow, found by coding noise of one layer.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.baselines.coded_layer import (
    PAGE_HEADER_BYTES,
    PAGE_POINTER_BYTES,
    CacheCodec,
    StateBlock,
    StateLayer,
)
from sphkv.baselines.held_states import (
    HeldStates,
    Tagged,
    attend_held,
    check_query,
    check_states,
    ledger_of,
)
from sphkv.baselines.settings import NUM_TRIALS, MethodShape, changed_fields
from sphkv.cache.method import CacheMethodBase
from sphkv.core.geometry import KVGeometry
from sphkv.core.rope import RopeSpec
from sphkv.store.ledger import ByteLedger

_PROBE_SEED = 0


@dataclass(frozen=True)
class CodedSettings:
    """Hyper-parameters that every coding method has besides its bits.

    Attributes:
        sink_tokens: First tokens that stay dense; the method's own number if None.
        residual_tokens: Newest tokens that stay dense; the method's own number if None.
    """

    sink_tokens: int | None = None
    residual_tokens: int | None = None

    name: ClassVar[str] = "coded"

    @abstractmethod
    def codecs(self, geometry: KVGeometry, ropes: Sequence[RopeSpec]) -> Sequence[Any]:
        """The method's own codecs, dataclasses, the best first."""

    def trials(self) -> tuple[Self, ...]:
        """The paper's dense tokens and others."""
        dense = ((None, None), (4, 0), (16, 0), (0, 32), (4, 32), (16, 64))
        found = [dataclasses.replace(self, sink_tokens=s, residual_tokens=r) for s, r in dense]
        return tuple(found)[:NUM_TRIALS]

    def build(self, shape: MethodShape) -> QuantisedCache:
        """An empty cache."""
        return QuantisedCache(self.name, shape, self.chosen_codecs(shape), changed_fields(self))

    def chosen_codecs(self, shape: MethodShape) -> list[CacheCodec]:
        """The codecs with the dense tokens that were asked for."""
        asked = {
            name: value
            for name in ("sink_tokens", "residual_tokens")
            if (value := getattr(self, name)) is not None
        }
        own = self.codecs(shape.geometry, tuple(shape.ropes))
        return [dataclasses.replace(codec, **asked) for codec in own]


class HeldLayer(Protocol):
    """The states of one layer as ``LayeredCache`` sees them."""

    keeps_rebuilt: bool

    @property
    def num_tokens(self) -> int:
        """Tokens the layer has been given."""
        ...

    def read(self) -> HeldStates:
        """What queries see, rebuilt in float32."""
        ...

    def check_crop(self, num_tokens: int) -> None:
        """Refuse a cut that cannot be made."""
        ...

    def crop(self, num_tokens: int) -> None:
        """Forget tokens; ``check_crop`` has allowed it."""
        ...

    def tensors(self) -> list[Tagged]:
        """Every live tensor with its ledger kind."""
        ...

    def page_counts(self) -> int:
        """Pages that coded states are charged for."""
        ...


LayerT = TypeVar("LayerT", bound=HeldLayer)


class LayeredCache(CacheMethodBase, Generic[LayerT]):
    """A cache of layers whose states are rebuilt to be attended to.

    Attributes:
        shape: Model, budget and tokens to come.
        geometry: Sizes of the model.
        keeps_rebuilt: Whether every layer stays rebuilt between steps. It makes long runs of
            many steps cheap to evaluate and changes no output; ``peak_bytes`` then has all
            layers in it, and step times are not those of the method.
    """

    realisation = "format-only"

    def __init__(self, name: str, shape: MethodShape) -> None:
        """Start empty.

        Args:
            name: Label in reports.
            shape: Model, budget and tokens to come.
        """
        self.name = name
        self.shape = shape
        self.geometry = shape.geometry
        self.keeps_rebuilt = False
        self._layers: list[LayerT | None] = [None] * self.geometry.num_layers

    def _held(self) -> list[LayerT]:
        """The layers that have a prompt."""
        return [held for held in self._layers if held is not None]

    def _layer(self, layer: int) -> LayerT:
        held = self._layers[layer]
        if held is None:
            raise ValueError(f"layer {layer} has no prompt yet")
        return held

    def _check_prompt(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if self._layers[layer] is not None:
            raise ValueError(f"layer {layer} holds {self.num_tokens(layer)} tokens already")
        check_states(self.geometry, keys, values)

    def num_tokens(self, layer: int = 0) -> int:
        """Tokens a layer has been given."""
        held = self._layers[layer]
        return 0 if held is None else held.num_tokens

    def read(self, layer: int) -> HeldStates:
        """What queries of a layer see, rebuilt from the codes."""
        return self._layer(layer).read()

    def crop(self, num_tokens: int) -> None:
        """Forget the tokens from ``num_tokens`` on.

        Raises:
            ValueError: The cut goes through a block that was coded as a whole, or dropped tokens
                would have to come back.
        """
        for held in self._held():
            held.check_crop(num_tokens)
        for held in self._held():
            held.crop(num_tokens)

    def keep_rebuilt(self) -> None:
        """From now on, keep every layer rebuilt between steps."""
        self.keeps_rebuilt = True
        for held in self._held():
            held.keeps_rebuilt = True

    def tensors(self) -> list[Tagged]:
        """Every live tensor with its ledger kind."""
        return [pair for held in self._held() for pair in held.tensors()]

    def live_tensors(self) -> list[Tensor]:
        """Every live tensor."""
        return [tensor for _, tensor in self.tensors()]

    def metadata_bytes(self) -> int:
        """Headers and pointers of pages, which are charged and not allocated."""
        pages = sum(held.page_counts() for held in self._held())
        return pages * (PAGE_HEADER_BYTES + PAGE_POINTER_BYTES)

    def resident_bytes(self) -> int:
        """Bytes of every live tensor, and ``metadata_bytes``."""
        return sum(tensor.nbytes for tensor in self.live_tensors()) + self.metadata_bytes()

    def _num_states(self, held: LayerT) -> int:
        """States of a layer that are rebuilt, over all heads."""
        return held.num_tokens * self.geometry.num_kv_heads

    def peak_bytes(self) -> int:
        """Resident bytes and the layer, or layers, rebuilt in float32."""
        counts = [self._num_states(held) for held in self._held()]
        states = sum(counts) if self.keeps_rebuilt else max(counts, default=0)
        return self.resident_bytes() + states * 2 * torch.float32.itemsize * self.geometry.head_dim

    def ledger(self) -> ByteLedger:
        """The same bytes by kind: what belongs to keys besides codes counts as radii."""
        held = ledger_of(self.tensors())
        pages = sum(layer.page_counts() for layer in self._held())
        return dataclasses.replace(
            held,
            headers=held.headers + pages * PAGE_HEADER_BYTES,
            ptr=held.ptr + pages * PAGE_POINTER_BYTES,
        )


class QuantisedCache(LayeredCache[StateLayer]):
    """A ``CacheMethod`` that codes every token but a few.

    Attributes:
        codec: The setting in use; None until the length of the prompt is known.
    """

    residency = "coded"

    def __init__(
        self, name: str, shape: MethodShape, codecs: Sequence[CacheCodec], label: str = ""
    ) -> None:
        """Start empty.

        Args:
            name: Label in reports.
            shape: Model, budget and tokens to come.
            codecs: The settings of the method, the best first.
            label: What else was set, for reports.
        """
        if not codecs:
            raise ValueError(f"{name} has no setting for {shape.geometry}")
        super().__init__(name, shape)
        self.codec: CacheCodec | None = None
        self._label = label
        self._codecs = tuple(codecs)

    @property
    def setting(self) -> str:
        """Label of the setting in use; empty until there is one."""
        chosen = "" if self.codec is None else self.codec.label
        return ",".join(part for part in (chosen, self._label) if part)

    def tier_shares(self) -> dict[str, float]:
        """Coded and dense states."""
        given = sum(layer.num_tokens for layer in self._held())
        share = sum(layer.num_coded for layer in self._held()) / max(1, given)
        label = "coded" if self.codec is None else self.codec.label
        return {label: share, "max": 1 - share}

    def plan(self, num_tokens: int) -> CacheCodec:
        """Take the best setting that fits the budget from so many tokens on.

        Raises:
            ValueError: None fits; the message says which share would do.
        """

        def share(codec: CacheCodec) -> float:
            return worst_share(codec, self.geometry, num_tokens, self.shape.num_new)

        least = share(self._codecs[-1])
        if least > self.shape.budget:
            raise ValueError(
                f"{self.name} needs at least {least:.4f} of the dense bytes of {num_tokens} "
                f"tokens and the {self.shape.num_new} after, the budget is {self.shape.budget:g}"
            )
        # the settings shrink, so those that fit are the last ones
        first = bisect.bisect_left(
            self._codecs[:-1], True, key=lambda codec: share(codec) <= self.shape.budget
        )
        self.codec = self._codecs[first]
        return self.codec

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, *, query: Tensor | None = None
    ) -> None:
        """Code a prompt but for the tokens that the method keeps dense."""
        self._check_prompt(layer, keys, values)
        if query is not None:
            check_query(self.geometry, query, keys.shape[1])
        codec = self.codec or self.plan(keys.shape[1])
        held = codec.layer(layer, keys, values)
        held.keeps_rebuilt = self.keeps_rebuilt
        held.store_prompt(StateBlock(keys, values, 0, query))
        self._layers[layer] = held

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
        """Store the next tokens and attend; full blocks are coded afterwards."""
        check_states(self.geometry, keys, values)
        check_query(self.geometry, query, keys.shape[1])
        held = self._layer(layer)
        outputs = []
        at = 0
        while at < keys.shape[1]:
            part = slice(at, min(keys.shape[1], at + held.room()))
            begin = held.num_tokens
            held.append(keys[:, part], values[:, part])
            positions = torch.arange(begin, held.num_tokens, device=keys.device)
            outputs.append(
                attend_held(
                    query[:, part], held.read(), positions, options, sink_logits=sink_logits
                )
            )
            held.seal()
            at = part.stop
        return torch.cat(outputs, 1) if outputs else query.float()

    def tensors(self) -> list[Tagged]:
        """Every live tensor with its ledger kind, the codec's tables among them."""
        return super().tensors() + (self.codec.tables() if self.codec is not None else [])


@functools.lru_cache(maxsize=4096)
def worst_share(codec: CacheCodec, geometry: KVGeometry, num_tokens: int, num_new: int) -> float:
    """Largest share of dense bytes that a cache has after a prompt or any later token.

    Noise of one layer is coded as the method codes states; bytes do not depend on their values.
    Tokens that come after a step's append and before its seal count.
    """
    shape = (geometry.num_kv_heads, num_tokens, geometry.head_dim)
    generator = torch.Generator().manual_seed(_PROBE_SEED)
    keys, values = torch.randn(2, *shape, generator=generator).unbind(0)
    query = keys.repeat_interleave(geometry.group_size, 0)
    held = codec.layer(0, keys, values)
    held.store_prompt(StateBlock(keys, values, 0, query))
    tables = sum(tensor.nbytes for _, tensor in codec.tables())

    def share() -> float:
        size = sum(tensor.nbytes for _, tensor in held.tensors())
        size += held.page_counts() * (PAGE_HEADER_BYTES + PAGE_POINTER_BYTES)
        dense = geometry.dense_bytes_per_token * held.num_tokens
        return (size * geometry.num_layers + tables) / dense

    worst = share()
    while (left := num_tokens + num_new - held.num_tokens) > 0:
        # dense tokens only raise the share, so it is worst just before some are coded
        part = slice(0, min(left, held.room(), num_tokens))
        held.append(keys[:, part], values[:, part])
        worst = max(worst, share())
        held.seal()
    return max(worst, share())
