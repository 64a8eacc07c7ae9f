# SPDX-License-Identifier: Apache-2.0
"""Dense memory of blocks that are not full yet.

A block is coded when its last token arrives. Until then its states are bfloat16 in a slot of
this pool: a running sequence has one such block per group of layers, so as many slots as
sequences may run are enough. The pool's bytes come off the memory that vLLM may fill with pages.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def tail_bytes(num_slots: int, num_layers: int, shape: tuple[int, int, int]) -> int:
    """Bytes of the pools of ``num_layers`` layers; ``shape`` is heads, tokens, head_dim."""
    heads, tokens, head_dim = shape
    return 2 * torch.bfloat16.itemsize * num_slots * num_layers * heads * tokens * head_dim


class TailPool:
    """Slots of the layers that share a block table.

    Attributes:
        keys: By layer, ``[slots, heads, tokens, head_dim]`` bfloat16.
        values: The same for values.
    """

    def __init__(self, layers: Iterable[int], num_slots: int, shape: tuple[int, int, int]) -> None:
        def zeros() -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=torch.bfloat16)

        self.keys = {layer: zeros() for layer in layers}
        self.values = {layer: zeros() for layer in self.keys}
        self._slot_of: dict[int, int] = {}
        self._free = list(range(num_slots))
        self._sealed: list[int] = []
        self._passed_on: list[int] = []
        self._stamp_of: dict[int, int] = {}
        self._num_seals = 0

    @property
    def num_open(self) -> int:
        """Blocks that have a slot."""
        return len(self._slot_of)

    def begin_step(self) -> None:
        """Give back the slots of blocks that the last step sealed in every layer."""
        self.release(self._sealed)
        self._free += self._passed_on
        self._sealed, self._passed_on = [], []

    def open(self, block: int, offset: int, *, is_late: bool = False) -> int:
        """The slot of a block whose token at ``offset`` comes next.

        Args:
            block: The block.
            offset: Place of the token in it.
            is_late: Whether the token is written after blocks are sealed, so that it may take
                a slot which one of them gives up in this step.

        Raises:
            RuntimeError: The block's earlier tokens are not here, or more sequences run than
                the pool was sized for; either would be our mistake.
        """
        slot = self._slot_of.get(block)
        if slot is not None:
            return slot
        if offset:
            raise RuntimeError(f"tokens of block {block} before offset {offset} are not held")
        free = self._passed_on if is_late and self._passed_on else self._free
        if not free:
            raise RuntimeError(f"all {self.num_open} dense slots are in use")
        self._slot_of[block] = free.pop()
        return self._slot_of[block]

    def slot(self, block: int) -> int:
        """The slot of a block that is open.

        Raises:
            RuntimeError: It is not.
        """
        if block not in self._slot_of:
            raise RuntimeError(f"block {block} is not full and its tokens are not held")
        return self._slot_of[block]

    def seal(self, block: int, *, is_late: bool = False) -> None:
        """Note that the block becomes full in this step.

        Its slot is free in the next step; with ``is_late``, tokens written late may have it in
        this one.
        """
        self._num_seals += 1
        self._stamp_of[block] = self._num_seals
        if not is_late:
            self._sealed.append(block)
        elif block in self._slot_of:
            self._passed_on.append(self._slot_of.pop(block))

    def stamp(self, blocks: Iterable[int]) -> int:
        """Number of the latest seal of some blocks; 0 if none was sealed here."""
        return max((self._stamp_of.get(block, 0) for block in blocks), default=0)

    def release(self, blocks: Iterable[int]) -> None:
        """Forget blocks that are sealed or whose sequence is gone."""
        for block in blocks:
            slot = self._slot_of.pop(block, None)
            if slot is not None:
                self._free.append(slot)
