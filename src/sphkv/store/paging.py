# SPDX-License-Identifier: Apache-2.0
"""From kept states to pages: which states share a page, and how it stores positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.core.devices import constant
from sphkv.core.tiers import RUN_TOKENS

MAX_POSITION = 2**31 - 1


class PositionMode(IntEnum):
    """How a page stores the positions of its states."""

    CONTIGUOUS = 0
    RUNS = 1
    TOKENS = 2


@dataclass(frozen=True, slots=True, eq=False)
class PageRows:
    """What pages hold besides keys and values.

    Attributes:
        positions: ``[rows, tokens]`` int64.
        counts: ``[rows]`` int64 live states of each page, at least one.
        flags: ``[rows, tokens]`` bool, set for protected states.
    """

    positions: Tensor
    counts: Tensor
    flags: Tensor

    def live(self) -> Tensor:
        """``[rows, tokens]`` bool, true for states below the count."""
        return live_mask(self.counts, self.positions.shape[1])

    def to(self, device: torch.device | str) -> "PageRows":
        """The same on a device."""
        return PageRows(self.positions.to(device), self.counts.to(device), self.flags.to(device))

    def select(self, index: Tensor | slice) -> "PageRows":
        """The rows that ``index`` names."""
        return PageRows(self.positions[index], self.counts[index], self.flags[index])


@dataclass(frozen=True, slots=True, eq=False)
class StateList:
    """States of one layer in one flat list, sorted by head, then by position.

    Attributes:
        head_ids: ``[states]`` int64, not decreasing.
        positions: ``[states]`` int64, increasing inside a head.
        flags: ``[states]`` bool, set for protected states.
        source: ``[states]`` int64 row of each state in the flat keys and values.
    """

    head_ids: Tensor
    positions: Tensor
    flags: Tensor
    source: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PageBatch:
    """Pages to be written, all of one tier and position mode.

    Attributes:
        tier_id: Tier of the pages.
        position_mode: How they store positions.
        head_ids: ``[rows]`` int64 KV head of each page, not decreasing.
        source: ``[rows, tokens]`` int64 row of each state in the flat keys and values; 0 for
            unused states.
        rows: Positions, counts and flags.
        on_cpu: Heads and counts again, on the CPU, where that is known without waiting for them.
    """

    tier_id: int
    position_mode: PositionMode
    head_ids: Tensor
    source: Tensor
    rows: PageRows
    on_cpu: tuple[Tensor, Tensor] | None = None

    @property
    def is_full(self) -> bool:
        """Whether all pages are known to have no unused state."""
        if self.on_cpu is None:
            return False
        return bool((self.on_cpu[1] == self.rows.positions.shape[1]).all())

    @property
    def num_pages(self) -> int:
        """Pages of the batch."""
        return self.head_ids.shape[0]


def live_mask(counts: Tensor, num_tokens: int) -> Tensor:
    """``[rows, num_tokens]`` bool, true below each row's count."""
    return torch.arange(num_tokens, device=counts.device) < counts[:, None]


def choose_position_modes(positions: Tensor, counts: Tensor) -> Tensor:
    """Cheapest mode that can express the positions of each page.

    Args:
        positions: ``[rows, tokens]`` int64.
        counts: ``[rows]`` int64.

    Returns:
        ``[rows]`` int64 values of ``PositionMode``.
    """
    index = torch.arange(positions.shape[1], device=positions.device)
    dead = ~live_mask(counts, positions.shape[1])
    contiguous = (positions == positions[:, :1] + index) | dead
    run_start = index - index % RUN_TOKENS
    runs = (positions == positions[:, run_start] + index % RUN_TOKENS) | dead
    modes = torch.full_like(counts, PositionMode.TOKENS)
    modes[runs.all(dim=1)] = PositionMode.RUNS
    modes[contiguous.all(dim=1)] = PositionMode.CONTIGUOUS
    return modes


def select_states(tier_id: Tensor, protected: Tensor, positions: Tensor, tier: int) -> StateList:
    """States that a contract sends to one tier.

    Args:
        tier_id: ``[heads, tokens]`` uint8.
        protected: ``[heads, tokens]`` bool.
        positions: ``[tokens]`` int64.
        tier: The tier to select.

    Returns:
        The states; ``source`` counts head by head through ``[heads * tokens]``.
    """
    head_ids, tokens = (tier_id == tier).nonzero(as_tuple=True)
    return StateList(
        head_ids,
        positions[tokens],
        protected[head_ids, tokens],
        head_ids * tier_id.shape[1] + tokens,
    )


def count_tier_runs(tier_id: Tensor, num_tiers: int) -> Tensor:
    """``[heads, num_tiers]`` int64 runs of every tier, given the tiers ``[heads, runs]`` uint8."""
    tiers = constant(tuple(range(num_tiers)), device=tier_id.device, dtype=torch.uint8)
    return (tier_id[:, None] == tiers[:, None]).sum(2)


def count_run_pages(tier_id: Tensor, page_runs: Sequence[int]) -> Tensor:
    """Pages that runs of tokens fill, without planning any.

    Args:
        tier_id: ``[heads, runs]`` uint8 tier of every run; 0 drops it.
        page_runs: Runs of a page of each tier.

    Returns:
        ``[heads, tiers, 2]`` int64: pages whose runs follow one another, and pages whose do not.
    """
    heads, runs = tier_id.shape
    own = tier_id.long()
    tiers = torch.arange(len(page_runs), device=own.device)
    # runs of the same tier up to each run, itself included
    seen = (own[:, None] == tiers[:, None]).cumsum(2)  # [heads, tiers, runs]
    size = constant(tuple(page_runs), device=own.device)
    pages = -(-seen[..., -1:].sum(2) // size) if runs else seen.sum(2)
    rank = seen.gather(1, own[:, None])[:, 0] - 1
    place = size[own]
    # a page breaks where a run is not its first and the run before has another tier
    is_break = (rank % place > 0) & (own != torch.nn.functional.pad(own[:, :-1], (1, 0), value=-1))
    index = torch.where(is_break, own * (runs + 1) + rank // place, len(page_runs) * (runs + 1))
    broken = own.new_zeros((heads, len(page_runs) * (runs + 1) + 1), dtype=torch.uint8)
    broken.scatter_(1, index, 1)
    apart = broken[:, :-1].unflatten(1, (len(page_runs), -1)).sum(2)
    return torch.stack([pages - apart, apart], 2)


@dataclass(frozen=True, slots=True, eq=False)
class RunPages:
    """Pages of whole runs, all of one tier and position mode, planned on the CPU.

    Attributes:
        tier_id: Tier of the pages.
        position_mode: How they store positions.
        head_ids: ``[rows]`` int64 KV head of each page, not decreasing.
        runs: ``[rows, page runs]`` int64 run of each place, 0 where there is none.
        counts: ``[rows]`` int64 live runs of each page.
    """

    tier_id: int
    position_mode: PositionMode
    head_ids: NDArray[np.int64]
    runs: NDArray[np.int64]
    counts: NDArray[np.int64]

    def words(self) -> NDArray[np.int64]:
        """Everything that a device must know, in one row of numbers."""
        return np.concatenate([self.head_ids, self.counts, self.runs.ravel()])

    def batch(self, words: Tensor, protected: Tensor, first_position: int) -> PageBatch:
        """The pages with their states.

        Args:
            words: ``words`` on the device of the states.
            protected: ``[heads, tokens]`` bool there.
            first_position: Position of the first token; the others follow it.
        """
        head_ids, source, rows = place_runs(words, self.runs.shape, protected, first_position)
        on_cpu = torch.from_numpy(self.head_ids), torch.from_numpy(self.counts * RUN_TOKENS)
        return PageBatch(self.tier_id, self.position_mode, head_ids, source, rows, on_cpu)


def place_runs(
    words: Tensor,
    shape: tuple[int, ...],
    protected: Tensor,
    first_position: int = 0,
    *,
    is_full: bool = False,
) -> tuple[Tensor, Tensor, PageRows]:
    """Where pages of whole runs have their states, and what they hold besides.

    Args:
        words: ``RunPages.words`` on the device of the states.
        shape: Rows, and runs of a page.
        protected: ``[heads, tokens]`` bool there.
        first_position: Position of the first token; the others follow it.
        is_full: Whether it is known that no page has an unused place.

    Returns:
        ``[rows]`` int64 heads, ``[rows, tokens]`` int64 rows of the flat states as in
        ``PageBatch``, and positions, counts and flags.
    """
    rows, size = shape
    head_ids, counts, runs = words.split([rows, rows, rows * size])
    each = torch.arange(RUN_TOKENS, device=words.device)
    token = (runs.view(rows, size, 1) * RUN_TOKENS + each).flatten(1)
    counts = counts * RUN_TOKENS
    source = token + head_ids[:, None] * protected.shape[1]
    positions = token + first_position if first_position else token
    if is_full:
        return head_ids, source, PageRows(positions, counts, protected.reshape(-1)[source])
    is_live = live_mask(counts, size * RUN_TOKENS)
    source = torch.where(is_live, source, 0)
    flags = protected.reshape(-1)[source] & is_live
    return head_ids, source, PageRows(torch.where(is_live, positions, 0), counts, flags)


def plan_runs(
    tier_ids: NDArray[np.uint8], *, tier_id: int, page_tokens: int, as_runs: bool = False
) -> list[RunPages]:
    """``plan_pages`` of whole runs.

    Args:
        tier_ids: ``[heads, runs]`` tier of every run.
        tier_id: The tier to plan.
        page_tokens: States that fit one page, whole runs.
        as_runs: Whether pages of consecutive runs tell a position per run as well.
    """
    num_heads, num_runs = tier_ids.shape
    found = np.flatnonzero(tier_ids == tier_id)
    if not len(found):
        return []
    size = page_tokens // RUN_TOKENS
    head_starts = np.arange(num_heads + 1) * num_runs
    ends = found.searchsorted(head_starts)
    per_head = np.diff(ends)
    pages = -(-per_head // size)
    ends_of_pages = pages.cumsum()
    # a head's runs follow one another in its pages, so that all of them move by as many places
    shift = (ends_of_pages - pages) * size - ends[:-1]
    table = np.zeros((int(ends_of_pages[-1]), size), dtype=np.int64)
    to = np.arange(len(found)) + shift.repeat(per_head)
    table.ravel()[to] = found - head_starts[:-1].repeat(per_head)
    counts = np.full(len(table), size)
    has_pages = pages > 0
    counts[ends_of_pages[has_pages] - 1] -= (pages * size - per_head)[has_pages]
    page_heads = np.arange(num_heads).repeat(pages)
    if as_runs:
        return [RunPages(tier_id, PositionMode.RUNS, page_heads, table, counts)]
    last = table[np.arange(len(table)), counts - 1]
    is_contiguous = last - table[:, 0] == counts - 1
    if is_contiguous.all():
        return [RunPages(tier_id, PositionMode.CONTIGUOUS, page_heads, table, counts)]
    modes = ((PositionMode.CONTIGUOUS, is_contiguous), (PositionMode.RUNS, ~is_contiguous))
    return [
        RunPages(tier_id, mode, page_heads[chosen], table[chosen], counts[chosen])
        for mode, chosen in modes
        if chosen.any()
    ]


def plan_pages(
    states: StateList, *, tier_id: int, page_tokens: int, as_runs: bool = False
) -> list[PageBatch]:
    """Cut the states of each head into pages, split by position mode.

    Args:
        states: States of one tier.
        tier_id: That tier.
        page_tokens: States that fit one page.
        as_runs: Whether pages of consecutive states tell a position per run as well.

    Returns:
        One batch per position mode that occurs.
    """
    num_states = states.head_ids.shape[0]
    if num_states == 0:
        return []
    per_head = states.head_ids.bincount()
    pages_per_head = (per_head + page_tokens - 1) // page_tokens
    order = torch.arange(num_states, device=per_head.device)
    # States before a state in its own head, and pages before that head's first page.
    rank = order - (per_head.cumsum(0) - per_head).repeat_interleave(per_head)
    first_row = (pages_per_head.cumsum(0) - pages_per_head).repeat_interleave(per_head)
    row, column = first_row + rank // page_tokens, rank % page_tokens
    num_rows = int(pages_per_head.sum())

    def spread(column_data: Tensor) -> Tensor:
        table = column_data.new_zeros((num_rows, page_tokens))
        table[row, column] = column_data
        return table

    rows = PageRows(
        spread(states.positions), row.bincount(minlength=num_rows), spread(states.flags)
    )
    source = spread(states.source)
    heads = torch.arange(per_head.shape[0], device=per_head.device)
    page_heads = heads.repeat_interleave(pages_per_head)
    modes = choose_position_modes(rows.positions, rows.counts)
    if as_runs:
        modes[modes == PositionMode.CONTIGUOUS] = PositionMode.RUNS
    batches = []
    for mode in PositionMode:
        index = (modes == mode).nonzero()[:, 0]
        if index.numel():
            batches.append(
                PageBatch(tier_id, mode, page_heads[index], source[index], rows.select(index))
            )
    return batches
