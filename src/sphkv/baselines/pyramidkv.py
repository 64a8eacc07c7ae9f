# SPDX-License-Identifier: Apache-2.0
"""PyramidKV: SnapKV's votes with more room in lower layers than in upper ones.

Cai et al., 2024, "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information
Funneling". The room of a layer falls linearly with its index, from twice the average less the
smallest down to a twentieth (beta = 20) of the average; window 8, max pooling with kernel 7.

Deviations: rooms are rounded down to whole pages of 16 tokens; grouped queries and tokens after
the prompt as for SnapKV here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from sphkv.baselines.layer_pages import PAGE_TOKENS
from sphkv.baselines.snapkv import WindowVotes


@dataclass(frozen=True)
class PyramidVotes(WindowVotes):
    """Window votes under a room that falls from layer to layer.

    Attributes:
        beta: Average room over the room of the last layer.
    """

    window: int = 8
    beta: int = 20

    @property
    def name(self) -> str:
        """Label in reports."""
        return "pyramidkv"

    @classmethod
    def trials(cls) -> tuple[Self, ...]:
        """Two kernels, three slopes."""
        return tuple(cls(kernel=kernel, beta=beta) for kernel in (7, 17) for beta in (20, 5, 2))

    def layer_pages(self, layer: int, num_layers: int, room: int, prompt: int) -> int:
        """The line from the first layer's room to the last one's, in whole pages."""
        # the observation window is kept in every layer and takes no part in the pyramid
        free = max(1, room * PAGE_TOKENS - self.window)
        least = free // self.beta
        most = 2 * free - least
        if most > prompt - self.window:
            most = max(free, prompt - self.window)
            least = 2 * free - most
        step = (most - least) / max(1, num_layers - 1)
        first = most if num_layers > 1 else free
        # two pages: one to pack into while the tail's page comes
        least_pages = min(2, room)
        pages = [
            max(least_pages, int(first - step * index + self.window) // PAGE_TOKENS)
            for index in range(num_layers)
        ]
        # a layer below that was rounded up; the widest layers pay for it
        while sum(pages) > num_layers * room:
            pages[pages.index(max(pages))] -= 1
        return pages[layer]
