# SPDX-License-Identifier: Apache-2.0
"""What caches that store the same prompt need find out only once.

A sweep stores a prompt many times. Work that depends on the prompt alone is kept, with the seconds
it took, so that every point can still be charged for it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sphkv.baselines.attention_scores import SharedAttention
from sphkv.retention.controller import LayerInput


class MeasuredLayers(dict[int, LayerInput]):
    """Layers that the controller measured.

    ``RetainedSequence`` asks for a layer before it measures one, and puts it here afterwards.

    Attributes:
        reused_s: Seconds that measuring again would have taken, over all uses so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reused_s = 0.0
        self._asked_at = 0.0
        self._seconds: dict[int, float] = {}

    def get(self, layer: int, default: LayerInput | None = None) -> LayerInput | None:  # type: ignore[override]
        """A layer if it was measured; else its clock starts."""
        if layer in self:
            self.reused_s += self._seconds[layer]
            return self[layer]
        self._asked_at = time.perf_counter()
        return default

    def __setitem__(self, layer: int, found: LayerInput) -> None:
        """Keep a layer that was not there."""
        if layer not in self:
            self._seconds[layer] = time.perf_counter() - self._asked_at
            super().__setitem__(layer, found)


@dataclass(frozen=True, slots=True, eq=False)
class SharedWork:
    """Work on one prompt.

    Attributes:
        attention: What tokens receive, for caches that count it; prompts with the same beginning
            share it.
        layers: What the controller measured of this prompt.
    """

    attention: SharedAttention
    layers: MeasuredLayers = field(default_factory=MeasuredLayers)

    @property
    def reused_s(self) -> float:
        """Seconds saved so far."""
        return self.attention.reused_s + self.layers.reused_s
