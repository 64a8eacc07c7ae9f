# SPDX-License-Identifier: Apache-2.0
"""What transformers sees of one layer of the cache."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class LayerView(CacheLayerMixin):
    """A view of one layer; the cache holds the states of all of them together."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: Cache, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # a strong one would keep a cache that nobody uses attached to its model
        self._cache = weakref.proxy(cache)
        self._layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new states; see the cache's own ``update``."""
        keys, values = self._cache.update(key_states, value_states, self._layer)
        return keys, values

    def get_seq_length(self) -> int:
        """Slots of the padded batch."""
        return int(self._cache.get_seq_length())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys a mask must cover, and where they start."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def reset(self) -> None:
        """One layer alone cannot be changed."""
        raise RuntimeError("reset the cache, not one of its layers")

    def reorder_cache(self, beam_idx: Any) -> None:
        """One layer alone cannot be changed."""
        raise RuntimeError("reorder the cache, not one of its layers")

    def offload(self) -> None:
        """Offloading is not supported."""
        raise RuntimeError("this cache cannot be offloaded")
