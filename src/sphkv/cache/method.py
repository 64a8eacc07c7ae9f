# SPDX-License-Identifier: Apache-2.0
"""What every way of keeping a KV cache has in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.store.ledger import ByteLedger

Realisation = Literal["kernel-realized", "format-only"]


@dataclass(frozen=True, slots=True)
class MethodRecord:
    """What a result says about the cache that it was measured with.

    Attributes:
        name: Name of the method.
        setting: Its setting in words, such as ``"k3v2"`` or ``"kernel=17"``; may be empty.
        realisation: ``"kernel-realized"`` if a decode step reads what is stored with a kernel,
            ``"format-only"`` if it rebuilds dense states first.
        tiers: Share of the states it has been given that are at each tier; they add up to 1.
        residency: What becomes of the states, in a word or two: ``"evicted"``, ``"coded"``.
    """

    name: str
    setting: str
    realisation: str
    tiers: dict[str, float]
    residency: str


class CacheMethod(Protocol):
    """Keeps the keys and values of one sequence and attends over them.

    A layer is first given a whole prompt by ``prefill``, whose attention the model computes
    itself, and then further tokens by ``attend``.

    Attributes:
        name: Label in reports.
    """

    name: str

    def num_tokens(self, layer: int = 0) -> int:
        """Tokens a layer has been given."""
        ...

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, *, query: Tensor | None = None
    ) -> None:
        """Store the prompt of a layer; layers come in order.

        Args:
            layer: A layer without tokens.
            keys: ``[kv_heads, tokens, head_dim]`` after RoPE, positions from 0 on.
            values: ``[kv_heads, tokens, head_dim]``.
            query: ``[query_heads, tokens, head_dim]`` after RoPE, for methods that choose by
                attention.
        """
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
        """Store the next tokens and attend with them, each to itself and what came before.

        Args:
            layer: Layer to read and extend.
            query: ``[query_heads, tokens, head_dim]`` after RoPE.
            keys: ``[kv_heads, tokens, head_dim]`` after RoPE.
            values: ``[kv_heads, tokens, head_dim]``.
            options: Scale, soft-cap and window.
            sink_logits: ``[query_heads]`` learned sink logits.

        Returns:
            ``[query_heads, tokens, head_dim]`` float32.
        """
        ...

    def crop(self, num_tokens: int) -> None:
        """Forget the tokens from ``num_tokens`` on."""
        ...

    def observe_logits(self, row: Tensor) -> None:
        """Learn how close the next decision is, from logits ``[vocabulary]``."""
        ...

    def keep_rebuilt(self) -> None:
        """No step is timed any more: a method that rebuilds states may keep them rebuilt."""
        ...

    def describe(self) -> MethodRecord:
        """What a result says about the cache."""
        ...

    def resident_bytes(self) -> int:
        """Bytes of every tensor the sequence keeps alive."""
        ...

    def ledger(self) -> ByteLedger:
        """The same bytes by kind."""
        ...


class CacheMethodBase:
    """What methods have in common besides storing and attending.

    Attributes:
        name: Label in reports.
        realisation: How decoding is carried out; see ``MethodRecord``.
        residency: What becomes of the states.
    """

    name: str = "method"
    realisation: Realisation = "kernel-realized"
    residency: str = "dense"

    @property
    def setting(self) -> str:
        """The setting in use, in words; empty if there is nothing to choose."""
        return ""

    def tier_shares(self) -> dict[str, float]:
        """Share of the given states at each tier."""
        return {"max": 1.0}

    def describe(self) -> MethodRecord:
        """What a record says about the method as it is now."""
        return MethodRecord(
            self.name, self.setting, self.realisation, self.tier_shares(), self.residency
        )

    def keep_rebuilt(self) -> None:
        """Nothing is rebuilt."""

    def observe_logits(self, row: Tensor) -> None:
        """Be told the logits ``[vocabulary]`` of the step that was decided; ignored by default."""
