# SPDX-License-Identifier: Apache-2.0
"""How launches that run side by side share the multiprocessors, by what their pages and rows cost.

Times are estimates, in product steps of one team; see ``KernelShape.page_steps``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sphkv.attention.cuda.geometry import ROW_STEPS, KernelShape

_Integers = NDArray[np.int64]
# Of a block, before it is ready for its first page and behind its last one.
_LAUNCH_STEPS = 185
# Of a block of any launch but the first: it begins later, and finds its code in no cache.
_LATER_STEPS = 70
# Part of the others' time that short blocks may take, one after the other, by this estimate.
_SURE = 0.9


def head_blocks(work: _Integers, blocks: int) -> _Integers:
    """How many of a launch's blocks every head has; the kernel shares them in the same way.

    Args:
        work: Of each head, see :func:`head_work`.
        blocks: At least as many as there are heads with pages.
    """
    low, high = max(1, -(-int(work.sum()) // blocks)), max(1, int(work.max()))
    while low < high:
        middle = (low + high) // 2
        if (-(-work // middle)).sum() <= blocks:
            high = middle
        else:
            low = middle + 1
    return -(-work // low)


def head_work(shape: KernelShape, pages: _Integers) -> _Integers:
    """Pages of each head and what its rows cost beside them, in pages.

    Args:
        shape: The kernel.
        pages: ``[heads, rows]`` coded pages.
    """
    # every block begins a row, whatever its head has
    more: _Integers = ((pages > 0).sum(1) - 1).clip(0)
    work: _Integers = pages.sum(1) + shape.row_pages * more
    return work


def launch_steps(shape: KernelShape, pages: _Integers, blocks: int) -> float:
    """When a launch's last block is done, in product steps of one team.

    Args:
        shape: The kernel.
        pages: ``[heads, rows]`` coded pages.
        blocks: Thread blocks.
    """
    work = head_work(shape, pages)
    own = head_blocks(work, blocks).clip(1)
    return float((shape.page_steps * work / own + ROW_STEPS * (work > 0)).max())


def _share_evenly(work: Sequence[tuple[KernelShape, _Integers]], blocks: int) -> list[int]:
    """Blocks of launches that all have pages, so that the last one ends as early as can be.

    There are enough for every head of every launch.
    """
    heads = [head_work(*each).tolist() for each in work]
    # the one with most to do comes first
    costs = [shape.page_steps * sum(own) for own, (shape, _) in zip(heads, work, strict=True)]
    begins = [ROW_STEPS + _LATER_STEPS * (cost < max(costs)) for cost in costs]

    def needed(steps: float) -> list[int]:
        """Fewest blocks with which each is done after so many product steps."""
        most = [
            max(1, int((steps - begin) / shape.page_steps))
            for begin, (shape, _) in zip(begins, work, strict=True)
        ]
        blocks = (sum(-(-n // m) for n in own) for own, m in zip(heads, most, strict=True))
        return [max(own, len(pages)) for own, (_, pages) in zip(blocks, work, strict=True)]

    # a block for every head is enough by then; half a page more minds how floats round
    ends = [
        shape.page_steps * (max(own) + 0.5) for own, (shape, _) in zip(heads, work, strict=True)
    ]
    low, high = 0.0, max(begins) + max(ends)
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (low, middle) if sum(needed(middle)) <= blocks else (middle, high)
    shares = needed(high)
    # what is left does nothing for the last, but maybe for one that the estimate flatters
    most_work = max(range(len(work)), key=lambda at: sum(heads[at]))
    shares[most_work] += blocks - sum(shares)
    return shares


def share_blocks(
    work: Sequence[tuple[KernelShape, _Integers]], blocks: int, spare: int = 0
) -> list[int]:
    """Thread blocks of launches that run side by side, so that the last ends as early as can be.

    A block fills a multiprocessor: one too many would begin when others are done, and take as long
    again. Only a launch that is short enough may take turns on the spare ones.

    Args:
        work: Kernel and pages ``[heads, rows]`` of each launch; what has none yet is done at once
            and does not count.
        blocks: Multiprocessors.
        spare: Others that short blocks may use one after the other.

    Returns:
        Blocks of each launch, at least one for every head; all of them for every launch, one after
        the other, where heads leave too few to share.
    """
    shares = [len(pages) for _, pages in work]
    busy = [at for at, (_, pages) in enumerate(work) if pages.any()]
    if sum(shares[at] for at in busy) > blocks:
        return [max(blocks, heads) for heads in shares]
    if spare and len(busy) > 1:
        costs = {at: work[at][0].page_steps * head_work(*work[at]).sum() for at in busy}
        small = min(busy, key=lambda at: costs[at])
        others = [at for at in busy if at != small]
        rest = _share_evenly([work[at] for at in others], blocks)
        ends = [launch_steps(*work[at], share) for at, share in zip(others, rest, strict=True)]
        turns, own = -(-shares[small] // spare), launch_steps(*work[small], shares[small])
        if turns * (own + _LAUNCH_STEPS) <= _SURE * (max(ends) + _LAUNCH_STEPS):
            busy = others
    if busy:
        even = _share_evenly([work[at] for at in busy], blocks)
        for at, share in zip(busy, even, strict=True):
            shares[at] = share
    return shares


def longest_first(
    work: Sequence[tuple[KernelShape, _Integers]], shares: Sequence[int]
) -> list[int]:
    """Places of launches in ``work``, those whose last block is done latest first.

    Args:
        work: Kernel and pages of each launch, see :func:`share_blocks`.
        shares: Thread blocks of each.
    """
    ends = [
        launch_steps(*each, share) if each[1].any() else 0.0
        for each, share in zip(work, shares, strict=True)
    ]
    return sorted(range(len(work)), key=lambda at: -ends[at])
