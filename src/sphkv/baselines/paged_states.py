# SPDX-License-Identifier: Apache-2.0
"""Dense states of one layer in pages of 16, every KV head with as many as it keeps.

The substrate of the methods that drop tokens. A page costs what a dense page of the page store
costs: 64 bytes of header, a position for each state, and the states a page has room for whether
or not they are filled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sphkv.baselines.held_states import UNUSED, HeldStates, Tagged
from sphkv.store.layout import HEADER_BYTES

PAGE_TOKENS = 16

_COUNT_BYTES = torch.int64.itemsize
_POINTER_BYTES = torch.int64.itemsize


class PagedStates:
    """Pages of one layer and the table that says which head owns which.

    Attributes:
        counts: ``[kv_heads]`` int64 states of each head.
        scores: ``[pages, 16]`` float32 importance of each state, for policies that carry one
            from step to step; None for the others.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        has_scores: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """Start without pages."""
        self._shape = (num_heads, head_dim)
        self._device = device
        self._clear(has_scores)

    def _clear(self, has_scores: bool) -> None:
        num_heads, head_dim = self._shape
        device = self._device
        states = (0, PAGE_TOKENS, head_dim)
        self._keys = torch.empty(states, dtype=torch.bfloat16, device=device)
        self._values = torch.empty(states, dtype=torch.bfloat16, device=device)
        self._positions = torch.empty((0, PAGE_TOKENS), dtype=torch.int32, device=device)
        self._headers = torch.empty((0, HEADER_BYTES), dtype=torch.uint8, device=device)
        self._table = torch.empty((num_heads, 0), dtype=torch.int64, device=device)
        self.counts = torch.zeros(num_heads, dtype=torch.int64, device=device)
        self.scores = torch.empty((0, PAGE_TOKENS), device=device) if has_scores else None

    @staticmethod
    def page_bytes(head_dim: int, *, has_scores: bool = False) -> int:
        """Bytes one page adds, its pointer included."""
        state = 2 * torch.bfloat16.itemsize * head_dim + torch.int32.itemsize
        state += torch.float32.itemsize * int(has_scores)
        return PAGE_TOKENS * state + HEADER_BYTES + _POINTER_BYTES

    @classmethod
    def pages_within(cls, num_bytes: float, head_dim: int, *, has_scores: bool = False) -> int:
        """Pages of one head that fit into so many bytes."""
        page = cls.page_bytes(head_dim, has_scores=has_scores)
        return max(0, int((num_bytes - _COUNT_BYTES) // page))

    def tensors(self) -> list[Tagged]:
        """Every live tensor with its ledger kind."""
        tensors = [
            ("codes", self._keys),
            ("values", self._values),
            ("positions", self._positions),
            ("headers", self._headers),
            ("ptr", self._table),
            ("ptr", self.counts),
        ]
        if self.scores is not None:
            tensors.append(("prot", self.scores))
        return tensors

    @property
    def slack_bytes(self) -> int:
        """Key and value bytes of page entries that hold no state."""
        empty = self._keys.shape[0] * PAGE_TOKENS - int(self.counts.sum())
        return empty * 2 * torch.bfloat16.itemsize * self._shape[1]

    def read(self) -> HeldStates:
        """The states of every head, in the order they were stored."""
        heads, dim = self._shape
        pages = self._table.clamp(min=0)
        shape = (heads, self._table.shape[1] * PAGE_TOKENS)
        keys = self._keys[pages].reshape(*shape, dim).float()
        values = self._values[pages].reshape(*shape, dim).float()
        positions = self._positions[pages].reshape(shape).long()
        is_empty = torch.arange(shape[1], device=self._device) >= self.counts[:, None]
        return HeldStates(
            keys.masked_fill_(is_empty[..., None], 0.0),
            values.masked_fill_(is_empty[..., None], 0.0),
            positions.masked_fill(is_empty, UNUSED),
        )

    def read_scores(self) -> Tensor:
        """Scores ``[kv_heads, most]`` in the order of ``read``; zero where nothing is held."""
        assert self.scores is not None
        heads = self._shape[0]
        scores = self.scores[self._table.clamp(min=0)].reshape(heads, -1)
        is_empty = torch.arange(scores.shape[1], device=self._device) >= self.counts[:, None]
        return scores.masked_fill(is_empty, 0.0)

    def write_scores(self, scores: Tensor) -> None:
        """Replace the scores by ``[kv_heads, most]`` in the order of ``read``."""
        assert self.scores is not None
        order = torch.arange(scores.shape[1], device=self._device).expand_as(scores)
        is_held = order < self.counts[:, None]
        self.scores.view(-1)[self._rows(is_held, order)] = scores[is_held]

    def append(
        self, keys: Tensor, values: Tensor, positions: Tensor, scores: Tensor | None = None
    ) -> None:
        """Add the same number of states to every head.

        Args:
            keys: ``[kv_heads, tokens, head_dim]``.
            values: ``[kv_heads, tokens, head_dim]``.
            positions: ``[kv_heads, tokens]``.
            scores: ``[kv_heads, tokens]``; zero if None.
        """
        everything = torch.ones(positions.shape, dtype=torch.bool, device=positions.device)
        self.append_some(everything, keys, values, positions, scores)

    def append_some(
        self,
        is_kept: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        scores: Tensor | None = None,
    ) -> None:
        """Add the states marked in ``[kv_heads, tokens]``."""
        before = self.counts.clone()
        self.counts = before + is_kept.sum(1)
        self._grow()
        rows = self._rows(is_kept, is_kept.cumsum(1) + (before[:, None] - 1))
        dim = self._shape[1]
        self._keys.view(-1, dim)[rows] = keys[is_kept].to(torch.bfloat16)
        self._values.view(-1, dim)[rows] = values[is_kept].to(torch.bfloat16)
        self._positions.view(-1)[rows] = positions[is_kept].int()
        if self.scores is not None and scores is not None:
            self.scores.view(-1)[rows] = scores[is_kept].float()
        self._write_headers()

    def keep(self, is_kept: Tensor) -> None:
        """Forget all states but those marked in ``[kv_heads, most]``, and free their pages."""
        held = self.read()
        scores = None if self.scores is None else self.read_scores()
        self._clear(self.scores is not None)
        self.append_some(
            is_kept & (held.positions >= 0), held.keys, held.values, held.positions, scores
        )

    def _rows(self, is_chosen: Tensor, order: Tensor) -> Tensor:
        """Rows of the flattened pool where chosen states live, head by head.

        Args:
            is_chosen: ``[kv_heads, entries]``.
            order: ``[kv_heads, entries]`` place of each entry among the states of its head.
        """
        heads = is_chosen.nonzero()[:, 0]
        places = order[is_chosen]
        pages = self._table[heads, places // PAGE_TOKENS]
        return pages * PAGE_TOKENS + places % PAGE_TOKENS

    def _write_headers(self) -> None:
        """Put the number of states of each page into its header."""
        column = torch.arange(self._table.shape[1], device=self._device) * PAGE_TOKENS
        filled = (self.counts[:, None] - column).clamp(0, PAGE_TOKENS)
        is_used = self._table >= 0
        self._headers[self._table[is_used], 0] = filled[is_used].to(torch.uint8)

    def _grow(self) -> None:
        """Add the pages that the counts call for."""
        needed = (self.counts + PAGE_TOKENS - 1) // PAGE_TOKENS
        owned = (self._table >= 0).sum(1)
        fresh = (needed - owned).clamp(min=0)
        total = int(fresh.sum())
        if not total:
            return
        first = self._keys.shape[0]
        width = max(self._table.shape[1], int(needed.max()))
        table = self._table.new_full((self._shape[0], width), UNUSED)
        table[:, : self._table.shape[1]] = self._table
        column = torch.arange(width, device=self._device)
        is_new = (column >= owned[:, None]) & (column < needed[:, None])
        table[is_new] = torch.arange(first, first + total, device=self._device)
        self._table = table
        for name in ("_keys", "_values", "_positions", "_headers", "scores"):
            held = getattr(self, name)
            if held is not None:
                setattr(self, name, torch.cat([held, held.new_zeros(total, *held.shape[1:])]))
