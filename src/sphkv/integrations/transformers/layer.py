# SPDX-License-Identifier: Apache-2.0
"""What transformers sees of one layer of the cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from sphkv.cache.engine import CacheEngine


class SphericalLayer(CacheLayerMixin):
    """A view of one layer; the engine holds the states of all of them together."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, engine: CacheEngine, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._engine = engine
        self._layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new states; see ``CacheEngine.update``."""
        return self._engine.update(self._layer, key_states, value_states)

    def get_seq_length(self) -> int:
        """Slots of the padded batch."""
        return self._engine.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys a mask must cover, and where they start."""
        return self._engine.length + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def reset(self) -> None:
        """One layer alone cannot be changed."""
        raise RuntimeError("reset the SphericalCache, not one of its layers")

    def reorder_cache(self, beam_idx: Any) -> None:
        """One layer alone cannot be changed."""
        raise RuntimeError("reorder the SphericalCache, not one of its layers")

    def offload(self) -> None:
        """Offloading is not supported."""
        raise RuntimeError("a SphericalCache cannot be offloaded")
