# SPDX-License-Identifier: Apache-2.0
"""Prompts cut to a budget of bytes: every head keeps the pages that late queries look at.

When a prompt is complete each layer and head picks as many of its full blocks as the budget has
room for. Their pages move to the front of the sequence's block table, head by head, and vLLM gets
the other blocks back. A page says its own positions, so heads may keep different ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sphkv.attention.cuda.geometry import PAGE_TOKENS

# Last queries of a prompt whose attention decides.
_QUERIES = 16
# Keys of all heads that are looked at together: float32 copies of them live for a moment.
_MOST_KEYS = 1 << 18
_LEAST_BLOCKS = 2
_RECENCY = 1e-9

REQUEST_BUDGET = "sphkv_budget_bytes"
"""Name in ``extra_args`` of the budget that a request asks for."""


def request_share(sampling: Any, budget_bytes: int) -> float:
    """Part of the server's budget that a request asks for; all of it if it asks for more.

    Args:
        sampling: vLLM's ``SamplingParams``, or None.
        budget_bytes: The server's budget.

    Raises:
        ValueError: It asks for something that is no number of bytes.
    """
    asked = (getattr(sampling, "extra_args", None) or {}).get(REQUEST_BUDGET)
    if asked is None:
        return 1.0
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise ValueError(f"{REQUEST_BUDGET} must be an integer of at least 1, got {asked!r}")
    return min(1.0, asked / budget_bytes)


def kept_blocks(num_blocks: int, share: float) -> int:
    """Blocks of a prompt that stay; the first and the last always do."""
    return min(num_blocks, max(_LEAST_BLOCKS, int(num_blocks * share)))


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A prompt that becomes complete in a step.

    Attributes:
        row: Its row of the batch.
        blocks: ``[blocks]`` int64 ids of its full blocks, on the device.
        num_kept: How many stay.
        scores: ``[layers, heads, blocks]`` float32 what each page is worth; filled by the layers.
    """

    row: int
    blocks: Tensor
    num_kept: int
    scores: Tensor

    @classmethod
    def of(cls, row: int, blocks: Tensor, num_kept: int, layers: int, heads: int) -> Cut:
        """A cut whose scores, until layers fill them, prefer what is newest."""
        worth = _RECENCY * torch.arange(len(blocks), device=blocks.device)
        return cls(row, blocks, num_kept, worth.repeat(layers, heads, 1))

    def score(self, index: int, query: Tensor, keys: Tensor, scale: float) -> None:
        """Let a layer's late queries say what its pages are worth.

        Args:
            index: The layer in its group.
            query: ``[queries, query_heads, head_dim]`` of the prompt's last chunk.
            keys: ``[states, heads, head_dim]`` all keys of the prompt.
            scale: Factor on the dot product.
        """
        late = query[-_QUERIES:]
        heads, blocks = keys.shape[1], self.scores.shape[2]
        grouped = late.unflatten(1, (heads, -1)).permute(1, 0, 2, 3).flatten(1, 2)
        together = max(1, _MOST_KEYS // len(keys))
        for first in range(0, heads, together):
            part = slice(first, first + together)
            looked = keys[:, part].permute(1, 2, 0).float()
            logits = (grouped[part].float() * scale) @ looked  # [heads, rows, states]
            weight = logits.softmax(-1).sum(1)[:, : blocks * PAGE_TOKENS]
            self.scores[index, part] += weight.unflatten(1, (blocks, PAGE_TOKENS)).sum(-1)

    def pages(self) -> Tensor:
        """``[layers, heads, kept]`` int64 pages that stay, in the order of positions."""
        scores = self.scores.clone()
        scores[..., 0] = scores[..., -1] = torch.inf
        return scores.topk(self.num_kept, dim=-1).indices.sort(-1).values


def compact(cache: Tensor, blocks: Tensor, pages: Tensor) -> None:
    """Move the pages of one layer that stay to the first blocks.

    Args:
        cache: ``[blocks, heads, words]``.
        blocks: ``[n]`` int64 ids of a sequence's blocks.
        pages: ``[heads, kept]`` which of them each head keeps.
    """
    head = torch.arange(cache.shape[1], device=cache.device)[:, None]
    cache[blocks[: pages.shape[1]]] = cache[blocks[pages], head].transpose(0, 1)
