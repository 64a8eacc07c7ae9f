# SPDX-License-Identifier: Apache-2.0
"""PyramidKV: SnapKV's votes with more room in lower layers than in upper ones.

Cai et al., 2024, "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information
Funneling". The room of a layer falls linearly with its index, from twice the average less the
smallest down to a twentieth (beta = 20) of the average; window 8, max pooling with kernel 7.

Deviations: rooms are rounded down to whole pages of 16 tokens; grouped queries as for SnapKV.
"""

from __future__ import annotations

from dataclasses import dataclass

from sphkv.baselines.eviction import EvictionCache
from sphkv.baselines.paged_states import PAGE_TOKENS
from sphkv.baselines.snapkv import WindowVotes
from sphkv.core.geometry import KVGeometry


@dataclass(frozen=True)
class PyramidVotes(WindowVotes):
    """Window votes under a room that falls from layer to layer.

    Attributes:
        beta: Average room over the room of the last layer.
    """

    window: int = 8
    beta: int = 20

    name = "pyramidkv"

    def layer_tokens(self, layer: int, num_layers: int, room: int, prompt: int) -> int:
        """The line from the first layer's room to the last one's, in whole pages."""
        # the observation window is kept in every layer and takes no part in the pyramid
        free = room - self.window
        least = free // self.beta
        most = 2 * free - least
        if most > prompt - self.window:
            most = max(free, prompt - self.window)
            least = 2 * free - most
        step = (most - least) / max(1, num_layers - 1)
        first = most if num_layers > 1 else free
        pages = [
            max(1, int(first - step * index + self.window) // PAGE_TOKENS)
            for index in range(num_layers)
        ]
        # a layer below one page was rounded up; the widest layers pay for it
        excess = max(0, sum(pages) - num_layers * room // PAGE_TOKENS)
        for index in range(excess):
            pages[index % num_layers] -= 1
        return PAGE_TOKENS * pages[layer]


def pyramidkv(geometry: KVGeometry, budget: float) -> EvictionCache:
    """PyramidKV with the paper's window and slope."""
    return EvictionCache(geometry, PyramidVotes(), budget)
