# SPDX-License-Identifier: Apache-2.0
"""The shape of a model's KV cache."""

from dataclasses import dataclass

DENSE_ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Sizes that every part of the cache agrees on.

    Attributes:
        num_layers: Layers that own a KV cache.
        num_kv_heads: Key/value heads of each layer.
        num_query_heads: Query heads of each layer, a multiple of ``num_kv_heads``.
        head_dim: Elements of one key, and of one value; even.
    """

    num_layers: int
    num_kv_heads: int
    num_query_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        """Reject sizes that are no positive integers or do not divide."""
        for name in ("num_layers", "num_kv_heads", "num_query_heads", "head_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(
                f"num_query_heads {self.num_query_heads} is no multiple of "
                f"num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def dense_state_bytes(self) -> int:
        """Bytes of one bfloat16 key and value of one head."""
        return 2 * DENSE_ELEMENT_BYTES * self.head_dim

    @property
    def dense_bytes_per_token(self) -> int:
        """Bytes of one token in a dense bfloat16 cache, all layers and KV heads."""
        return self.num_layers * self.num_kv_heads * self.dense_state_bytes
