# SPDX-License-Identifier: Apache-2.0
"""What every way of keeping a KV cache has in common."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.store.ledger import ByteLedger


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

    def resident_bytes(self) -> int:
        """Bytes of every tensor the sequence keeps alive."""
        ...

    def ledger(self) -> ByteLedger:
        """The same bytes by kind."""
        ...
