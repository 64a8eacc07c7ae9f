# SPDX-License-Identifier: Apache-2.0
"""The rows of a padded batch once they are coded, one sequence each in one page store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from sphkv.attention.api import row_kernels
from sphkv.attention.partial import PartialAttention, merge_partials
from sphkv.attention.request import AttentionOptions, BatchRequest, DecodeBackend, StepGraph
from sphkv.cache.config import CacheConfig, ResidencyPlan
from sphkv.cache.residency import Residency, write_uniform
from sphkv.cache.sequence import CacheSequence
from sphkv.core.devices import join_beside
from sphkv.errors import BudgetError
from sphkv.store.store import PageStore


class CodedRows:
    """The coded sequences of a batch: their prompts, attention, and room for new tokens.

    Attributes:
        store: Pages and tails, perhaps those of forks too.
        rows: The sequences.
        graph: Captured attention of single steps; None while steps are not captured.
    """

    def __init__(
        self, config: CacheConfig, plan: ResidencyPlan, store: PageStore, backend: DecodeBackend
    ) -> None:
        """Start without rows.

        Args:
            config: The cache.
            plan: How states stay resident.
            store: Where they go.
            backend: What runs decode attention.
        """
        self._config = config
        self._plan = plan
        self._backend = backend
        self.store = store
        self.rows: list[CacheSequence] = []
        self.graph: StepGraph | None = None
        self._has_room_ahead = False

    @property
    def has_room_ahead(self) -> bool:
        """Whether pages and lists are ready for a captured step that is yet to begin."""
        return self._has_room_ahead

    @property
    def has_work_next(self) -> bool:
        """Whether pages will seal, or old ones give way, beside the next captured step."""
        rooms = [row.room() - 1 for row in self.rows]
        return min(rooms) <= 0 or self._parts_due(rooms) > 0

    @property
    def _ids(self) -> list[int]:
        return [row.sequence for row in self.rows]

    @property
    def owns_store(self) -> bool:
        """Whether no other cache shares the pages, who might move them."""
        return len(self.store.sequences) == len(self.rows)

    @property
    def note_bytes(self) -> int:
        """Bytes of what residencies remember besides the states."""
        return sum(row.residency.num_bytes for row in self.rows)

    def add(self, sequence: int, residency: Residency) -> CacheSequence:
        """Make a sequence that is in the store the next row."""
        row = CacheSequence(
            self._config, self._plan, self.store, sequence, self._backend, residency
        )
        self.rows.append(row)
        return row

    def take_prompt(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, is_real: Tensor
    ) -> None:
        """Hand a layer of the prompts to the rows, at once where they are alike.

        Args:
            layer: The layer.
            query: ``[rows, query_heads, queries, head_dim]`` after RoPE, of the newest places.
            keys: ``[rows, kv_heads, length, head_dim]`` after RoPE.
            values: ``[rows, kv_heads, length, head_dim]``.
            is_real: ``[rows, length]`` bool on the CPU, false for padding.
        """
        if not self._plan.is_retention:
            # codebooks may have been fitted beside
            join_beside(keys.device)
        if not self._plan.is_retention and bool(is_real.all()):
            write_uniform(self._config, self._plan, self.store, self._ids, layer, keys, values)
            for row in self.rows:
                row.note_prompt(layer, keys.shape[2])
            return
        watched = is_real[:, is_real.shape[1] - query.shape[2] :]
        seen = {index: own[0] for index, _, own in real_states(watched, query)}
        for index, _, own in real_states(is_real, keys, values):
            row_query = seen.get(index, query[index][:, :0])
            self.rows[index].take_prompt(layer, row_query, *own)
        if len(self.rows) == 1:
            # rows that share a store must know what those before them have written
            self.rows[0].residency.decide_prompt()

    def end_prompt(self) -> None:
        """The pass with the prompts is over, and what it computes last is queued.

        Raises:
            BudgetError: What must stay dense does not fit a budget.
        """
        for row in self.rows:
            row.end_prompt()
        for layer in range(self._config.geometry.num_layers):
            self.store.prepare_seals(self.rows[0].sequence, layer)

    def attend(
        self,
        layer: int,
        states: tuple[Tensor, Tensor, Tensor],
        is_real: Tensor,
        options: AttentionOptions,
        *,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Attention of every row's new tokens.

        Args:
            layer: The layer.
            states: Queries, keys and values ``[rows, heads, tokens, head_dim]`` after RoPE.
            is_real: ``[rows, tokens]`` bool, false for padding.
            options: Scale, soft-cap and window.
            sink_logits: ``[query_heads]`` learned sink logits.

        Returns:
            ``[rows, query_heads, tokens, head_dim]`` in the query's dtype; zero for padding.
        """
        if states[0].shape[2] == 1 and len(self.rows) > 1 and bool(is_real.all()):
            return self._attend_single(layer, states, options, sink_logits)
        output = torch.zeros_like(states[0])
        for index, at, own in real_states(is_real, *states):
            query, keys, values = own
            row = self.rows[index]
            seen = row.attend(layer, query, keys, values, options, sink_logits=sink_logits)
            output[index][:, at] = seen.to(output.dtype)
        return output

    def _attend_single(
        self,
        layer: int,
        states: tuple[Tensor, Tensor, Tensor],
        options: AttentionOptions,
        sink_logits: Tensor | None,
    ) -> Tensor:
        """One token of every row: one request of the backend for all of them."""
        query, keys, values = states
        positions = torch.tensor([row.num_tokens(layer) for row in self.rows])
        for sequence, own_keys, own_values in zip(self._ids, keys, values, strict=True):
            self.store.append(sequence, layer, own_keys, own_values)
        request = BatchRequest(
            self.store, tuple(self._ids), layer, query[:, :, 0], positions, options
        )
        partial = self._backend.attend_rows(request)
        if sink_logits is not None:
            sinks = PartialAttention.of_sinks(sink_logits, partial, heads_dim=1)
            partial = merge_partials([partial, sinks])
        return partial.output.unsqueeze(2).to(query.dtype)

    def make_room(self, is_real: Tensor) -> None:
        """Have every tail take its new tokens, if they are few enough for one.

        Args:
            is_real: ``[rows, tokens]`` bool, false for padding.

        Raises:
            BudgetError: Nothing is left that may be dropped.
        """
        if self.graph is not None:
            if not self._has_room_ahead:
                self._follow(self._seal)
            self._has_room_ahead = False
            return
        capacity = self.store.config.tail_capacity
        counts = is_real.sum(1).tolist()
        if len(set(counts)) == 1 and 0 < counts[0] <= capacity:
            self._seal(counts[0])
            return
        for row, count in zip(self.rows, counts, strict=True):
            if 0 < count <= capacity and row.residency.settle(count):
                self.store.make_room([row.sequence], count)

    def _follow(self, make_room: Callable[[], bool]) -> None:
        """Change pages, and have captured steps read what is there then."""
        assert self.graph is not None
        if not self.graph.prepare(make_room):
            room, self.graph = self.graph.max_tokens, None
            self.begin_graph(max_tokens=room)

    def _seal(self, num_new: int = 1, *, is_ahead: bool = False) -> bool:
        """Seal all tails at once that so many new tokens would overflow.

        Returns:
            Whether no pages came but those of the seal tier.
        """
        before = self._num_changes
        full = [row for row in self.rows if row.residency.settle(num_new, is_ahead=is_ahead)]
        if full:
            self.store.make_room([row.sequence for row in full], num_new)
        if self.graph is not None:
            for row in full:
                row.residency.plan_ahead()
        return self._num_changes == before

    @property
    def _num_changes(self) -> int:
        return sum(row.residency.num_changes for row in self.rows)

    def _work_ahead(self) -> bool:
        """While the device computes a step: seal full tails, or go on making room for the next.

        Room is made in parts, beside the last steps before the next tail is full: until they are
        dropped, old pages are worth having.

        Returns:
            Whether no pages came but those of the seal tier.
        """
        before = self._num_changes
        rooms = [row.room() for row in self.rows]
        if min(rooms) == 0:
            return self._seal(is_ahead=True)
        wanted = self._parts_due(rooms)
        for at in _by_room(rooms):
            while wanted > 0 and self.rows[at].residency.work_ahead():
                wanted -= 1
        return self._num_changes == before

    def _parts_due(self, rooms: Sequence[int]) -> int:
        """Parts of making room that a step should have, if tails take so many tokens more."""
        # whose tail is full first comes first, and all are done when theirs are full
        order = _by_room(rooms)
        due = accumulate(self.rows[at].residency.work_left for at in order)
        # about half as many parts are left as steps are due, which is what must be kept up with
        steps = ((left, rooms[at]) for at, left in zip(order, due, strict=True))
        return max(-(-left // (2 * room)) if left >= room else 0 for left, room in steps)

    def begin_graph(self, *, max_tokens: int) -> bool:
        """Have the next single steps captured, where backend and residency allow it.

        Args:
            max_tokens: Tokens a sequence may reach before ``end_graph``.
        """
        if self.graph is None and self.owns_store:
            if (kernels := row_kernels(self.store.config.device)) is not None:
                kernels.settle()
            self.graph = self._backend.capture(
                self.store, self._ids, max_tokens=max_tokens, windows=self._config.windows
            )
            if self.graph is not None:
                for row in self.rows:
                    row.residency.plan_ahead()
        return self.graph is not None

    def end_graph(self) -> None:
        """Captured steps are over: something else changes the pages."""
        self.graph = None
        self._has_room_ahead = False

    def prepare_next(self) -> None:
        """Beside the captured step that was queued, make ready for the one to come."""
        try:
            self._follow(self._work_ahead)
            self._has_room_ahead = self.graph is not None
        except BudgetError:
            # whether the budget holds is told when a step needs it
            self.end_graph()

    def undo(self, counts: Sequence[int]) -> None:
        """A pass failed: go back to so many tokens of each row."""
        for row, count in zip(self.rows, counts, strict=True):
            row.forget_waiting()
            row.crop(count)

    def crop(self, counts: Sequence[int]) -> None:
        """Keep so many tokens of each row.

        Raises:
            ValueError: A layer with a sliding window has given up what would be needed.
        """
        for row, count in zip(self.rows, counts, strict=True):
            row.check_crop(count)
        for row, count in zip(self.rows, counts, strict=True):
            row.crop(count)

    def select(self, index: Sequence[int]) -> None:
        """Make row ``i`` a copy of row ``index[i]``; pages are shared, not copied."""
        for source, row in enumerate(self.rows):
            if source not in index:
                row.free()
        taken: set[int] = set()
        rows = []
        for source in index:
            row = self.rows[source]
            rows.append(row.fork() if source in taken else row)
            taken.add(source)
        self.rows = rows

    def fork(self) -> CodedRows:
        """Rows of their own with the same tokens; pages are shared."""
        other = CodedRows(self._config, self._plan, self.store, self._backend)
        other.rows = [row.fork() for row in self.rows]
        return other

    def free(self) -> None:
        """Give all states back, one row after the other: other caches may share the store."""
        for row in self.rows:
            row.free()

    def free_orphans(self) -> None:
        """Give back the pages of forks that nobody holds any more."""
        self.rows[0].free_orphans()

    def tier_shares(self) -> dict[str, float]:
        """Share of the given states at each tier; what is gone is ``"drop"``."""
        counts: dict[str, int] = {}
        total = 0
        for row in self.rows:
            for tier, states in self.store.state_counts(row.sequence).items():
                counts[tier] = counts.get(tier, 0) + states
            total += row.num_tokens()
        every = total * self._config.geometry.num_layers * self._config.geometry.num_kv_heads
        tiers = {tier: states / max(1, every) for tier, states in sorted(counts.items())}
        tiers["drop"] = max(0.0, 1 - sum(tiers.values()))
        return tiers


def _by_room(rooms: Sequence[int]) -> list[int]:
    """Rows, those whose tails take the fewest tokens first."""
    return sorted(range(len(rooms)), key=rooms.__getitem__)


def real_states(
    is_real: Tensor, *states: Tensor
) -> Iterator[tuple[int, slice | Tensor, tuple[Tensor, ...]]]:
    """Each row that has tokens: its index, their places, and their states without padding.

    Args:
        is_real: ``[rows, length]`` bool.
        states: ``[rows, heads, length, head_dim]`` each.
    """
    for index, real in enumerate(is_real.cpu()):
        own = tuple(part[index] for part in states)
        if bool(real.all()):
            yield index, slice(None), own
        elif bool(real.any()):
            at = real.nonzero()[:, 0].to(states[0].device)
            yield index, at, tuple(part[:, at] for part in own)
