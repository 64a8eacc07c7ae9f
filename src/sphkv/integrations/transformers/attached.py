# SPDX-License-Identifier: Apache-2.0
"""What every cache of this package that is attached to a model has in common."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from typing import Self

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from sphkv.integrations.transformers.architecture import ModelLayout
from sphkv.integrations.transformers.attachment import hold_for
from sphkv.integrations.transformers.layer import LayerView


class AttachedCache(Cache):
    """A ``past_key_values`` through which a model's attention runs until ``detach``."""

    def __init__(self, model: PreTrainedModel, layout: ModelLayout) -> None:
        """Attach to a model."""
        layers = range(layout.geometry.num_layers)
        super().__init__(layers=[LayerView(self, layer) for layer in layers])
        self._model = weakref.ref(model)
        self._layout = layout
        self._release = hold_for(self, model, layout)

    @property
    @abstractmethod
    def length(self) -> int:
        """Places of the padded batch, as mask and positions count them."""

    @abstractmethod
    def _crop_to(self, length: int) -> None:
        """Forget places from ``length`` on."""

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer."""
        return self._layout.windows[layer]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Places of the padded batch, as mask and positions count them."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys a mask must cover, and where they start."""
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens.

        Args:
            tokens_to_remove: Minus the number of tokens; 0 does nothing.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, got {tokens_to_remove}"
            )
        self._crop_to(max(0, self.length + tokens_to_remove))

    def detach(self) -> None:
        """Let go of the model; the last cache to do so gives it back as it was."""
        self._release()

    def __enter__(self) -> Self:
        """Detach at the end of a ``with`` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Detach."""
        self.detach()

    def _check_inference(self) -> None:
        model = self._model()
        if model is not None and model.training:
            raise ValueError(
                f"{type(self).__name__} serves inference only: call model.eval() first"
            )

    def _check_attached(self) -> None:
        if not self._release.alive:
            raise RuntimeError("the cache is detached from its model: make one with for_model()")
