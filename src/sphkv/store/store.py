# SPDX-License-Identifier: Apache-2.0
"""The page store: carries out write contracts under one byte limit."""

from collections.abc import Sequence
from pathlib import Path
from weakref import WeakSet

import torch
from torch import Tensor

from sphkv.core.contract import LayerContract, StateCodec, WriteContract
from sphkv.store.allocator import PageAllocator
from sphkv.store.append import Span, SpanWriter
from sphkv.store.config import StoreConfig
from sphkv.store.files import (
    FileIdentity,
    export_sequence,
    import_sequence,
    read_sequence,
    write_sequence,
)
from sphkv.store.layout import PageView
from sphkv.store.ledger import ByteLedger, measure_bytes
from sphkv.store.moves import PageMoves
from sphkv.store.order import PageCodec, PageOrder
from sphkv.store.page_list import PageIndex, PageList, list_on_device
from sphkv.store.pages import (
    FlatStates,
    check_positions,
    check_states,
    plan_crop,
    plan_demotion,
    plan_drop,
    plan_write,
)
from sphkv.store.pool import PagePool
from sphkv.store.prompt import SeenLayers
from sphkv.store.recode import plan_recoding
from sphkv.store.sequence import (
    OpenTail,
    PageGroup,
    PointerTable,
    SequenceState,
    TailView,
    page_groups,
    pool_of_tag,
)
from sphkv.store.slabs import Slab, held_page_bytes


class HeldPages:
    """Ids of pages that stay right when pages move.

    Attributes:
        page_ids: ``[pages]`` int64 on the CPU.
    """

    def __init__(self, page_ids: Tensor) -> None:
        """Follow pages of a store; see ``PageStore.hold``."""
        self.page_ids = page_ids

    def remap(self, moves: PageMoves) -> None:
        """Follow pages that changed their ids."""
        self.page_ids = moves.apply(self.page_ids)


class PageStore:
    """KV cache of many sequences in tier-homogeneous pages.

    Every method either succeeds or raises and leaves the store as it was. Tensors it keeps
    alive never pass ``max_bytes``; copies made inside a call are not counted.
    """

    def __init__(
        self,
        config: StoreConfig,
        codec: StateCodec | None = None,
        *,
        order: PageOrder | None = None,
        kernels: PageCodec | None = None,
    ) -> None:
        """Start empty.

        Args:
            config: Sizes, tiers and limit.
            codec: Encoder of sequences that bring none of their own.
            order: How slabs keep the bytes of a page, where a kernel wants its own way.
            kernels: What encodes pages where it can; else the codec of a sequence does.
        """
        self.config = config
        self._codec = codec
        self._pool = PagePool(config, order, kernels)
        self._writer = SpanWriter(self._pool)
        self._indices: dict[int, PageIndex] = {}
        self._held: WeakSet[HeldPages] = WeakSet()
        self._sequences: dict[int, SequenceState] = {}

    @property
    def allocator(self) -> PageAllocator:
        """Owner of the pages: ``gather`` for reading, ``addresses`` for native kernels."""
        return self._pool.allocator

    @property
    def live_bytes(self) -> int:
        """Bytes of all live tensors."""
        return self._pool.meter.used

    def take_peak(self) -> int:
        """Most bytes that were live at any moment since the last time this was asked."""
        return self._pool.meter.take_peak()

    def raise_limit(self, num_bytes: int) -> None:
        """Move the hard limit by so many bytes, down if negative; nothing where there is none."""
        meter = self._pool.meter
        if meter.limit is not None:
            meter.limit = max(0, meter.limit + num_bytes)

    @property
    def sequences(self) -> tuple[int, ...]:
        """Sequences the store holds."""
        return tuple(self._sequences)

    @property
    def slack_bytes(self) -> int:
        """Bytes that belong to no sequence: free pages of slabs, and their alignment."""
        return self.allocator.slack_bytes

    def sequence_bytes(self, sequence: int) -> int:
        """Bytes of a sequence's pages, shared ones in full, tables and tails; reads no page.

        If it is the only one, ``slack_bytes`` is what is missing to ``live_bytes``.
        """
        state = self._get(sequence)
        num_pages: dict[int, int] = {}
        for table in state.tables:
            for tag, num in table.tag_counts().items():
                num_pages[tag] = num_pages.get(tag, 0) + num
        return state.nbytes + sum(
            num * held_page_bytes(self._pool.layout(pool_of_tag(tag)))
            for tag, num in num_pages.items()
        )

    def live_tensors(self) -> list[Tensor]:
        """Every tensor the store keeps alive."""
        owners: list[Slab | SequenceState] = [*self.allocator.slabs(), *self._sequences.values()]
        return [tensor for owner in owners for tensor in owner.tensors()]

    def ledger(self) -> ByteLedger:
        """Bytes of all live tensors, by kind."""
        states = self._sequences.values()
        return measure_bytes(
            self.allocator.slabs(),
            [table for state in states for table in state.tables],
            [tail for state in states for tail in state.live_tails()],
        )

    def create(
        self, sequence: int, *, codec: StateCodec | None = None, seal_tier: str | None = None
    ) -> None:
        """Begin an empty sequence.

        Args:
            sequence: An id that is not in use.
            codec: Its own encoder; the store's if None.
            seal_tier: Name of the tier of pages that its full tails become; the config's if None.
                Its pages divide ``StoreConfig.seal_tokens``.
        """
        self._check_new(sequence)
        state = SequenceState.blank(self.config, codec or self._codec, seal_tier)
        self._insert(sequence, state)

    def _insert(self, sequence: int, state: SequenceState) -> None:
        self._pool.meter.check(state.nbytes)
        self._pool.meter.add(state.nbytes)
        self._sequences[sequence] = state

    def fork(self, sequence: int, new_sequence: int) -> None:
        """Begin a sequence with the same states: pages are shared, tails are copied."""
        state = self._get(sequence)
        self._check_new(new_sequence)
        self._pool.meter.check(state.nbytes)
        copy = state.copy()
        self._insert(new_sequence, copy)
        self.allocator.share(state.all_ids())
        for table in copy.tables:
            self.allocator.own(table, table.all_ids())

    def free(self, sequence: int) -> None:
        """Forget a sequence and give back every page that no other one shares."""
        state = self._get(sequence)
        released = self.allocator.free(state.all_ids())
        self._pool.meter.add(-released - state.nbytes)
        del self._sequences[sequence]
        self._indices.pop(sequence, None)

    def _check_new(self, sequence: int) -> None:
        if isinstance(sequence, bool) or not isinstance(sequence, int):
            raise ValueError(f"sequence must be an integer, got {sequence!r}")
        if sequence in self._sequences:
            raise ValueError(f"sequence {sequence} exists already")

    def _get(self, sequence: int, layer: int = 0) -> SequenceState:
        if sequence not in self._sequences:
            raise ValueError(f"no sequence {sequence!r}")
        if not 0 <= layer < self.config.geometry.num_layers:
            raise ValueError(
                f"layer must be in 0..{self.config.geometry.num_layers - 1}, got {layer!r}"
            )
        return self._sequences[sequence]

    def codec(self, sequence: int) -> StateCodec | None:
        """Encoder of a sequence."""
        return self._get(sequence).codec

    def seal_tier(self, sequence: int) -> str:
        """Name of the tier of pages that full tails of a sequence become."""
        return self.config.tiers[self._get(sequence).seal_tier_id].name

    def seal_at(self, sequence: int, tier: str, *, layers: Sequence[int] | None = None) -> None:
        """Have full tails of a sequence become pages of another tier from now on.

        Args:
            sequence: The sequence.
            tier: Name of the tier.
            layers: Only these, all others as they were; None takes all.

        Raises:
            ValueError: The tier stores nothing, or its pages do not divide what seals at once.
        """
        state, tier_id = self._get(sequence), self.config.seal_tier_id(tier)
        if layers is None:
            state.seal_tier_id, state.own_seal_tiers = tier_id, {}
        else:
            state.own_seal_tiers |= dict.fromkeys(layers, tier_id)

    def num_tokens(self, sequence: int, layer: int = 0) -> int:
        """Tokens a layer has been given: the position of the next one."""
        return self._get(sequence, layer).next_position[layer]

    def state_counts(self, sequence: int) -> dict[str, int]:
        """States of a sequence at each tier, over all layers and heads; no page is read."""
        state, counts = self._get(sequence), dict[str, int]()
        for tail in state.live_tails():
            dense = self.config.tiers[self.config.tiers.dense_id].name
            counts[dense] = counts.get(dense, 0) + tail.num_tokens * tail.keys.shape[0]
        for table in state.tables:
            for tag in table.present_tags():
                name = self.config.tiers[pool_of_tag(tag)[0]].name
                ids = table.page_ids[table.tags == tag]
                counts[name] = counts.get(name, 0) + int(self.allocator.counts(ids).sum())
        return counts

    def table(self, sequence: int, layer: int) -> PointerTable:
        """Pointer table of a layer, to be read only; its version rises with every change."""
        return self._get(sequence, layer).tables[layer]

    def pages(
        self, sequence: int, layer: int, *, device: torch.device | str | None = None
    ) -> list[PageGroup]:
        """Pages of a layer, grouped by tier and position mode, lowest tier first.

        Args:
            sequence: Owner of the pages.
            layer: Their layer.
            device: Where the lists of ids go; beside the pages by default.
        """
        table = self.table(sequence, layer)
        return page_groups(table, self._pool.layout, device or self._pool.device)

    def view(self, group: PageGroup) -> PageView:
        """Copy of the pages of a group, in the order of ``flat_ids``."""
        return PageView(group.layout, self.allocator.gather(group.flat_ids()))

    def page_list(self, sequence: int) -> PageList:
        """All pages of a sequence, which hold runs of 16; those since the last call are read.

        On a GPU whose kernels copy pages of many slabs at once, the list is made there.

        Raises:
            ValueError: A page holds other states.
        """
        state = self._get(sequence)
        if self.allocator.has_copier:
            return list_on_device(self._pool, state.tables)
        if sequence not in self._indices:
            self._indices[sequence] = PageIndex(self._pool, state.tables)
        return self._indices[sequence].look()

    def forget_page_list(self, sequence: int) -> None:
        """Give up what ``page_list`` keeps: the next call reads every page again."""
        for table in self._get(sequence).tables:
            table.forget_marks()
        self._indices.pop(sequence, None)

    def page_list_bytes(self, sequence: int) -> int:
        """Bytes of what ``page_list`` keeps for the next call; not part of ``live_bytes``."""
        self._get(sequence)
        return self._indices[sequence].num_bytes if sequence in self._indices else 0

    def read(self, page_ids: Tensor, tag: int) -> PageView:
        """Copy of pages that share a ``page_tag``, in the order of ``page_ids``."""
        return PageView(self._pool.layout(pool_of_tag(tag)), self.allocator.gather(page_ids))

    def tail(self, sequence: int, layer: int) -> TailView:
        """Dense states of a layer that no page holds yet."""
        state = self._get(sequence, layer)
        tail = state.tails[layer]
        if tail is not None:
            return tail.view()
        return TailView.empty(self.config, state.next_position[layer])

    def open_tail(self, sequence: int, layer: int) -> OpenTail | None:
        """The buffer behind ``tail``, to be read only; None where there was no state yet."""
        return self._get(sequence, layer).tails[layer]

    def append(self, sequence: int, layer: int, keys: Tensor, values: Tensor) -> None:
        """Add the next tokens of a layer to its tail, which may be full then.

        Before that, as many of its oldest pages are sealed as the new states need room.

        Args:
            sequence: Sequence to extend.
            layer: Layer the states belong to.
            keys: ``[heads, tokens, head_dim]`` after rotary embedding; kept as bfloat16.
            values: ``[heads, tokens, head_dim]``; kept as bfloat16.

        Raises:
            BudgetError: The states do not fit.
        """
        state = self._get(sequence, layer)
        keys, values = self._check_states(keys, values, torch.bfloat16)
        self._writer.append(state, layer, keys, values)

    def make_room(self, sequences: Sequence[int], num_new: int = 1) -> bool:
        """Seal the oldest pages of all tails that the next tokens would overflow, all or none.

        A tail that has fewer whole pages than that seals those it has; ``append`` seals the rest
        together with new states. That cannot be while ``num_new`` is at most one more than
        ``recent_tokens``.

        Args:
            sequences: Sequences of any lengths.
            num_new: Tokens that come next in every layer.

        Returns:
            Whether anything was sealed.

        Raises:
            BudgetError: The pages do not fit.
        """
        if num_new < 1:
            raise ValueError(f"num_new must be positive, got {num_new}")
        return self._writer.make_room([self._get(sequence) for sequence in sequences], num_new)

    def prepare_seals(self, sequence: int, layer: int) -> None:
        """Have the kernels make what sealing tails of a layer needs, before one is full."""
        state = self._get(sequence, layer)
        tier_id = state.seal_tier_of(layer)
        layout = self._pool.layout((tier_id, self.config.span_mode(tier_id)))
        if self._pool.kernels is not None and layout.tier.is_coded:
            self._pool.kernels.prepare(layout, layer, state.codec, self._pool.device)

    def absorb(self, sequences: Sequence[int]) -> None:
        """Count one state per layer and head that a kernel wrote behind each tail's last one.

        Args:
            sequences: Sequences whose tails ``make_room`` has seen to; they may be full then.

        Raises:
            ValueError: A layer has no tail, or one that was full.
        """
        states = [self._get(sequence) for sequence in sequences]
        capacity = self.config.tail_capacity
        for state in states:
            if any(tail is None or tail.num_tokens >= capacity for tail in state.tails):
                raise ValueError(f"a layer of {list(sequences)} has no room in its tail")
        for state in states:
            state.next_position = [position + 1 for position in state.next_position]
            for tail in state.live_tails():
                tail.num_tokens += 1

    def _check_states(
        self, keys: Tensor, values: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        check_states(keys, values, self.config.geometry)
        return keys.to(self._pool.device, dtype), values.to(self._pool.device, dtype)

    def write(
        self,
        sequence: int,
        layer: int,
        contract: LayerContract,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
    ) -> None:
        """Store states of a layer as a contract says; dropped ones are never stored.

        Args:
            sequence: Sequence to extend.
            layer: Layer the states belong to; its tail must be empty.
            contract: Tier of each head and token, ``WriteContract.layer(layer)``.
            keys: ``[heads, tokens, head_dim]`` after rotary embedding.
            values: ``[heads, tokens, head_dim]``.
            positions: ``[tokens]`` int64, rising, none below ``num_tokens``.

        Raises:
            BudgetError: The states do not fit.
        """
        state = self._get(sequence, layer)
        keys, values = self._check_states(keys, values)
        num_new = keys.shape[1]
        contract.check(self.config.tiers, self.config.geometry, num_new)
        check_positions(positions, num_new, state.next_position[layer])
        tail = state.tails[layer]
        if tail is not None and tail.num_tokens:
            raise ValueError(
                f"layer {layer} of sequence {sequence} has {tail.num_tokens} states in its "
                "open tail; a contract is written before tokens are appended"
            )
        if num_new == 0:
            return
        states = FlatStates(keys, values)
        self._pool.commit([plan_write(self._pool, state, layer, contract, states, positions)])
        state.next_position[layer] = int(positions[-1]) + 1
        if tail is not None:
            tail.restart(state.next_position[layer])

    def write_layers(
        self,
        sequence: int,
        first_layer: int,
        contract: WriteContract,
        states: Sequence[tuple[Tensor, Tensor]],
        *,
        seen: SeenLayers | None = None,
    ) -> None:
        """Store a prompt in several layers as a contract says, all or none.

        Args:
            sequence: Sequence to extend.
            first_layer: The first of consecutive layers, which hold nothing yet.
            contract: Tier of each head and token of these layers.
            states: Keys after rotary embedding and values of each layer, ``[heads, tokens,
                head_dim]``; tokens behind those that are decided about open the layer's tail.
            seen: What ``see_layers`` said of both; None has this wait for it.

        Raises:
            BudgetError: The states do not fit.
            ValueError: The layers hold states or tails, or are not as many as the contract's.
        """
        decided = contract.tier_id.shape[0]
        if not states or decided != len(states):
            raise ValueError(f"a contract about {decided} layers got states of {len(states)}")
        state = self._get(sequence, first_layer)
        last = first_layer + len(states) - 1
        self._get(sequence, last)
        own = slice(first_layer, last + 1)
        if any(state.next_position[own]) or any(tail is not None for tail in state.tails[own]):
            raise ValueError(f"layers {first_layer} to {last} of sequence {sequence} hold states")
        self._writer.write_layers(state, first_layer, contract, states, seen)

    def see_layers(self, contract: WriteContract, largest: Tensor) -> SeenLayers:
        """Wait for what ``write_layers`` must know of a contract and of states on a device.

        Args:
            contract: The contract.
            largest: ``[layers, 2]`` magnitudes that no element of keys and values is above.
        """
        return SeenLayers.of(self._pool, contract, largest)

    def write_prompt(
        self,
        sequences: Sequence[int],
        layer: int,
        spans: Sequence[Span],
        keys: Tensor,
        values: Tensor,
        *,
        first_position: int = 0,
    ) -> None:
        """Store the first states of a layer of several sequences: spans in pages, then a tail.

        Args:
            sequences: Sequences of one codec that hold nothing in this layer.
            layer: Layer the states belong to.
            spans: One behind the other from the first token on; the tokens behind them fit a tail.
            keys: ``[sequences, heads, tokens, head_dim]`` after rotary embedding.
            values: ``[sequences, heads, tokens, head_dim]``.
            first_position: Position of the first token.

        Raises:
            BudgetError: The states do not fit.
        """
        states = [self._get(sequence, layer) for sequence in sequences]
        self._writer.write_prompt(states, layer, spans, (keys, values), first_position)

    def demote(
        self,
        sequence: int,
        layer: int,
        page_ids: Sequence[int] | Tensor,
        tier: int | str,
    ) -> None:
        """Re-encode pages at a lower tier; states of one head are packed together.

        Args:
            sequence: Owner of the pages; other owners keep the old ones.
            layer: Layer of the pages.
            page_ids: Ids of pages of any heads and tiers above ``tier``.
            tier: Id or name; the drop tier drops the pages.

        Raises:
            ValueError: A page is not of this layer, not above ``tier``, or holds a
                protected state.
            BudgetError: The new pages do not fit beside those that stay.
        """
        state = self._get(sequence, layer)
        tiers = self.config.tiers
        tier_id = tiers.id_of(tier) if isinstance(tier, str) else tier
        if tiers[tier_id].kind == "drop":
            self.drop(sequence, layer, page_ids)
            return
        ids = torch.as_tensor(page_ids, dtype=torch.int64).cpu()
        changes = plan_recoding(self._pool, state, [(layer, ids)], tier_id)
        if changes is None:
            changes = [plan_demotion(self._pool, state, layer, ids, tier_id)]
        self._pool.commit(changes)

    def drop(self, sequence: int, layer: int, page_ids: Sequence[int] | Tensor) -> None:
        """Give up pages of a layer.

        Raises:
            ValueError: A page is not of this layer or holds a protected state.
        """
        state = self._get(sequence, layer)
        ids = torch.as_tensor(page_ids, dtype=torch.int64)
        self._pool.commit([plan_drop(self._pool, state.tables[layer], ids)])

    def demote_listed(
        self, sequence: int, layer_ids: Tensor, page_ids: Tensor, tier_id: int
    ) -> None:
        """Re-encode pages of several layers at one lower tier, all or none; see ``demote``.

        Args:
            sequence: Their owner.
            layer_ids: ``[pages]`` int64 layer of each.
            page_ids: ``[pages]`` int64 ids, which ``page_list`` has told to be unprotected.
            tier_id: A coded tier.

        Raises:
            ValueError: A page is not of its layer, or not above the tier.
            BudgetError: The new pages do not fit beside those that stay.
        """
        state = self._get(sequence)
        parts = [
            (layer, page_ids[layer_ids == layer].cpu()) for layer in sorted(set(layer_ids.tolist()))
        ]
        changes = plan_recoding(self._pool, state, parts, tier_id, is_checked=True)
        if changes is None:
            changes = [
                plan_demotion(self._pool, state, layer, ids, tier_id, is_checked=True)
                for layer, ids in parts
            ]
        self._pool.commit(changes)

    def drop_listed(self, sequence: int, layer_ids: Tensor, page_ids: Tensor) -> None:
        """Give up pages of several layers at once; none of them is read.

        Args:
            sequence: Their owner.
            layer_ids: ``[pages]`` int64 layer of each.
            page_ids: ``[pages]`` int64 ids, which ``page_list`` has told to be unprotected.

        Raises:
            ValueError: A page is not of its layer.
        """
        tables = self._get(sequence).tables
        parts = [
            (tables[layer], page_ids[layer_ids == layer])
            for layer in sorted(set(layer_ids.tolist()))
        ]
        for table, ids in parts:
            table.check_holds(ids)
        for table, ids in parts:
            self._pool.meter.add(-self.allocator.free(ids))
            table.remove(ids)

    def crop(self, sequence: int, num_tokens: int) -> None:
        """Forget all states at positions from ``num_tokens`` on, protected ones too.

        A layer that is shorter already stays as it is.

        Raises:
            BudgetError: A page shared with another sequence must be cut, and its copy
                does not fit.
        """
        state = self._get(sequence)
        if num_tokens < 0:
            raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
        changes = [
            plan_crop(self._pool, state.tables[layer], num_tokens)
            for layer, tail in enumerate(state.tails)
            if num_tokens < (tail.first_position if tail else state.next_position[layer])
        ]
        self._pool.commit(changes)
        if changes:
            self._indices.pop(sequence, None)
        for layer, tail in enumerate(state.tails):
            if tail is not None:
                tail.crop(num_tokens)
            state.next_position[layer] = min(state.next_position[layer], num_tokens)

    def compact(self, max_pages: int | None = None) -> PageMoves | None:
        """Fill free places of slabs with pages of the emptiest ones, and release those.

        Afterwards every pool of pages (a tier and position mode) has fewer free pages than its
        smallest slab has pages. Tables of all sequences follow; where a page moved, the version
        rises.

        Args:
            max_pages: Stop when so many were moved, a slab's more at most; None moves all.

        Returns:
            Old and new ids of the pages that moved; None if no slab could be released.
        """
        moves, released = self.allocator.compact(max_pages)
        self._pool.meter.add(-released)
        if moves is None:
            return None
        for index in self._indices.values():
            index.remap(moves)
        for held in self._held:
            held.remap(moves)
        return moves

    def hold(self, page_ids: Tensor) -> "HeldPages":
        """Ids ``[pages]`` int64 on the CPU that follow pages which move, while they are kept."""
        held = HeldPages(page_ids)
        self._held.add(held)
        return held

    def save(self, sequence: int, path: Path, *, codec_hash: str = "") -> None:
        """Write a sequence to one safetensors file, whole or not at all.

        Args:
            sequence: Sequence to save.
            path: File to create or replace.
            codec_hash: Names the codebooks; ``load`` must give the same.
        """
        write_sequence(
            path, export_sequence(self._pool, self._get(sequence)), self._identity(codec_hash)
        )

    def _identity(self, codec_hash: str) -> FileIdentity:
        return FileIdentity(self.config.geometry, self.config.tiers, codec_hash)

    def load(
        self,
        sequence: int,
        path: Path,
        *,
        codec: StateCodec | None = None,
        codec_hash: str = "",
    ) -> None:
        """Begin a sequence from a file that ``save`` made.

        Args:
            sequence: An id that is not in use.
            path: The file.
            codec: Encoder of the sequence; the store's if None.
            codec_hash: Must be the one given to ``save``.

        Raises:
            CacheFileError: The file is damaged or belongs to another store.
            BudgetError: The states do not fit.
        """
        self._check_new(sequence)
        saved = read_sequence(
            path,
            self._identity(codec_hash),
            layout_of=self._pool.layout,
            check_room=self._pool.check_room,
        )
        state, changes = import_sequence(self._pool, saved, codec or self._codec)
        self._pool.commit(changes, state.nbytes)
        self._sequences[sequence] = state
