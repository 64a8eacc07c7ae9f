# SPDX-License-Identifier: Apache-2.0
"""Demotion with kernels: pages of many layers are coded again in a few calls.

On a device, what a page holds, and how many, is known on the host; which positions they are is not
asked for. So runs of 16 states are counted there, sorted on the device, decoded and encoded, and
nothing waits. Pages that hold parts of runs are left to the codec. In host memory any states will
do: they are sorted one by one, and kernels that are a ``PageRecoder`` code them again in one step.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.core.devices import upload
from sphkv.core.tiers import MAX_PAGE_TOKENS, RUN_TOKENS
from sphkv.store.layout import PageFrames, PageLayout, PageView
from sphkv.store.order import PageCodec, PageRecoder, PageRuns
from sphkv.store.pages import PageEncoder
from sphkv.store.paging import (
    MAX_POSITION,
    PageRows,
    PositionMode,
    StateList,
    live_mask,
    plan_pages,
)
from sphkv.store.pool import EncodedPages, LayerChange, PagePool, layer_parts, pages_by_layer
from sphkv.store.sequence import SequenceState, pool_of_tag

_Ids = NDArray[np.int64]
_HEAD_SHIFT = MAX_POSITION.bit_length()
_LAST = torch.iinfo(torch.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class _Sources:
    """Pages of one layout that are coded again.

    Attributes:
        layout: Their layout.
        page_ids: ``[pages]``.
        heads: ``[pages]`` head among those of all layers, layer by layer.
        num_runs: ``[pages]`` runs that each holds.
    """

    layout: PageLayout
    page_ids: _Ids
    heads: _Ids
    num_runs: _Ids

    @property
    def size(self) -> int:
        """Runs that a page has room for."""
        return self.layout.page_tokens // RUN_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class _Targets:
    """Pages that runs become, head by head.

    Attributes:
        heads: ``[pages]`` head among those of all layers, not decreasing.
        counts: ``[pages]`` states of each.
        places: ``[runs]`` place of each run, which are sorted by head and position.
    """

    heads: _Ids
    counts: _Ids
    places: _Ids

    @classmethod
    def of(cls, sources: Sequence[_Sources], num_heads: int, size: int) -> "_Targets":
        """Pack the runs of each head together, ``size`` to a page."""
        per_head = np.zeros(num_heads, dtype=np.int64)
        for each in sources:
            per_head += np.bincount(each.heads, each.num_runs, num_heads).astype(np.int64)
        pages = -(-per_head // size)
        rank = np.arange(per_head.sum()) - np.repeat(per_head.cumsum() - per_head, per_head)
        places = np.repeat(pages.cumsum() - pages, per_head) * size + rank
        counts = np.bincount(places // size, minlength=int(pages.sum())) * RUN_TOKENS
        return cls(np.repeat(np.arange(num_heads), pages), counts, places)


def plan_recoding(
    pool: PagePool,
    state: SequenceState,
    layers: Sequence[tuple[int, Tensor]],
    tier_id: int,
    *,
    is_checked: bool = False,
) -> list[LayerChange] | None:
    """Re-encode pages at a lower tier, as ``plan_demotion`` does, with kernels.

    Args:
        pool: Owner of the pages.
        state: Their sequence.
        layers: Layers, rising, and ``[pages]`` int64 ids of their pages.
        tier_id: A coded tier.
        is_checked: Whether the pages are known to hold no protected state.

    Returns:
        A change for every layer; None if the kernels do not take such pages.

    Raises:
        ValueError: A page is not of its layer, not above the tier, or holds a protected state.
    """
    kernels = pool.kernels
    if kernels is None or not pool.config.tiers[tier_id].is_coded:
        return None
    sources = _find(pool, state, layers, tier_id)
    if not sources or not _takes(pool, state, sources, tier_id):
        return None
    frames = [_read_frames(pool, each) for each in sources]
    if not is_checked:
        for each, frame in zip(sources, frames, strict=True):
            guarded = frame.is_protected().cpu().numpy()
            if guarded.any():
                ids = each.page_ids[guarded].tolist()
                raise ValueError(f"pages {ids} hold protected states")
    if isinstance(kernels, PageRecoder):
        pending = _recode_states(pool, state, tier_id, sources, frames)
        return _changes(state, layers, pending)
    num_heads = pool.config.geometry.num_kv_heads * pool.config.geometry.num_layers
    size = pool.config.tiers[tier_id].page_tokens // RUN_TOKENS
    targets = _Targets.of(sources, num_heads, size)
    return _changes(state, layers, _Recoding(pool, state, tier_id, sources, targets).plan(frames))


def _changes(
    state: SequenceState,
    layers: Sequence[tuple[int, Tensor]],
    found: Iterable[tuple[int, EncodedPages]],
) -> list[LayerChange]:
    """A change for every layer: its pages go, and those that were found for it come."""
    pending: dict[int, list[EncodedPages]] = {layer: [] for layer, _ in layers}
    for layer, encoded in found:
        pending[layer].append(encoded)
    return [
        LayerChange(state.tables[layer], removed=ids, pending=pending[layer])
        for layer, ids in layers
    ]


def _recode_states(
    pool: PagePool,
    state: SequenceState,
    tier_id: int,
    sources: Sequence[_Sources],
    frames: Sequence[PageFrames],
) -> Iterator[tuple[int, EncodedPages]]:
    """States of pages in host memory, packed as ``plan_demotion`` does, in new pages."""
    recoder, tier = pool.kernels, pool.config.tiers[tier_id]
    assert isinstance(recoder, PageRecoder)
    parts, first = [], 0
    for each, frame in zip(sources, frames, strict=True):
        live = live_mask(frame.counts(), each.layout.page_tokens)
        page, place = live.nonzero(as_tuple=True)
        key = torch.from_numpy(each.heads)[page] << _HEAD_SHIFT | frame.positions()[live]
        parts.append((key, (first + page) * MAX_PAGE_TOKENS + place))
        first += len(each.page_ids)
    keys, order = torch.cat([key for key, _ in parts]).sort()
    source = torch.cat([source for _, source in parts])[order]
    heads, positions = keys >> _HEAD_SHIFT, keys & MAX_POSITION
    batches = plan_pages(
        StateList(heads, positions, torch.zeros_like(keys, dtype=torch.bool), source),
        tier_id=tier_id,
        page_tokens=tier.page_tokens,
        as_runs=pool.config.is_in_runs(tier_id),
    )
    places = [
        (each.layout, pool.allocator.addresses(torch.from_numpy(each.page_ids))) for each in sources
    ]
    for batch in batches:
        pool_key = (tier_id, batch.position_mode)
        pages = recoder.recode(places, pool.layout(pool_key), state.codec, batch)
        told = (batch.head_ids.numpy(), batch.rows.counts.numpy())
        yield from pages_by_layer(pool_key, *told, pages, pool.config.geometry.num_kv_heads)


def _find(
    pool: PagePool, state: SequenceState, layers: Sequence[tuple[int, Tensor]], tier_id: int
) -> list[_Sources]:
    """Pages by layout."""
    tiers, num_heads = pool.config.tiers, pool.config.geometry.num_kv_heads
    found = [state.tables[layer].find(ids) for layer, ids in layers]
    first = np.repeat([layer * num_heads for layer, _ in layers], [len(ids) for _, ids in layers])
    every_id = torch.cat([ids for _, ids in layers])
    ids, head_ids = every_id.numpy(), first + torch.cat([heads for heads, _ in found]).numpy()
    tags = np.concatenate([tags.numpy() for _, tags in found])
    counts = pool.allocator.counts(every_id).numpy()
    sources = []
    for tag in sorted({*tags.tolist()}):
        at = np.flatnonzero(tags == tag)
        layout = pool.layout(pool_of_tag(tag))
        if layout.tier_id <= tier_id:
            raise ValueError(
                f"pages {ids[at].tolist()} are at tier {layout.tier.name!r}, which is not "
                f"above {tiers[tier_id].name!r}"
            )
        # a part of a run shows by a number that is not whole
        num_runs = np.where(counts[at] % RUN_TOKENS, 0, counts[at] // RUN_TOKENS)
        sources.append(_Sources(layout, ids[at], head_ids[at], num_runs))
    return sources


def _takes(pool: PagePool, state: SequenceState, sources: Sequence[_Sources], tier_id: int) -> bool:
    """Whether the kernels code such pages again."""
    kernels = pool.kernels
    assert kernels is not None
    if isinstance(kernels, PageRecoder):
        layout = pool.layout((tier_id, PositionMode.RUNS))
        is_plain = pool.device.type == "cpu" and pool.allocator.order is None
        return is_plain and kernels.recodes(layout, state.codec)
    is_taken = (_is_taken(kernels, state, each) for each in sources)
    return pool.allocator.has_copier and all(is_taken)


def _is_taken(kernels: PageCodec, state: SequenceState, sources: _Sources) -> bool:
    """Whether pages hold whole runs and are dense or decoded by the kernels."""
    layout = sources.layout
    is_dense = not layout.tier.is_coded and layout.position_mode is PositionMode.CONTIGUOUS
    return bool(sources.num_runs.all()) and (is_dense or kernels.decodes(layout, state.codec))


def _read_frames(pool: PagePool, sources: _Sources) -> PageFrames:
    ids = torch.from_numpy(sources.page_ids)
    return PageFrames(sources.layout, pool.allocator.gather_frames(ids))


class _Recoding:
    """Runs of some pages on their way into others."""

    def __init__(
        self,
        pool: PagePool,
        state: SequenceState,
        tier_id: int,
        sources: Sequence[_Sources],
        targets: _Targets,
    ) -> None:
        self._pool, self._state, self._tier_id = pool, state, tier_id
        self._sources, self._targets = sources, targets
        self._size = pool.config.tiers[tier_id].page_tokens // RUN_TOKENS

    def plan(self, frames: Sequence[PageFrames]) -> Iterator[tuple[int, EncodedPages]]:
        """The new pages, layer by layer."""
        runs, positions = self._sort(frames)
        states = self._decode(runs)
        starts = positions[:, ::RUN_TOKENS]
        mode = PositionMode.RUNS
        batches = [(mode, np.arange(len(self._targets.heads)))]
        if not self._pool.config.is_in_runs(self._tier_id):
            follow = torch.arange(0, positions.shape[1], RUN_TOKENS, device=starts.device)
            live = torch.from_numpy(self._targets.counts // RUN_TOKENS).to(starts.device)
            is_dead = torch.arange(starts.shape[1], device=starts.device) >= live[:, None]
            is_contiguous = ((starts == starts[:, :1] + follow) | is_dead).all(1).cpu().numpy()
            modes = ((PositionMode.CONTIGUOUS, is_contiguous), (mode, ~is_contiguous))
            batches = [(mode, np.flatnonzero(chosen)) for mode, chosen in modes if chosen.any()]
        for mode, at in batches:
            yield from self._encode(mode, at, states, positions)

    def _sort(self, frames: Sequence[PageFrames]) -> tuple[list[PageRuns], Tensor]:
        """Where runs are and go, and ``[pages, tokens]`` int64 positions of the new pages."""
        pool, targets = self._pool, self._targets
        told: list[_Ids] = [targets.places]
        for each in self._sources:
            address = pool.allocator.addresses(torch.from_numpy(each.page_ids)).numpy()
            told += [address, each.heads, each.num_runs]
        every = upload(np.concatenate(told), pool.device)
        places, *parts = every.split([len(part) for part in told])
        groups, keys, starts = [], [], []
        for at, (each, frame) in enumerate(zip(self._sources, frames, strict=True)):
            address, heads, num_runs = parts[3 * at : 3 * at + 3]
            start = frame.run_starts()
            place = torch.arange(each.size, device=pool.device)
            key = (heads << 32)[:, None] + start
            keys.append(torch.where(place < num_runs[:, None], key, _LAST).flatten())
            starts.append(start.flatten())
            groups.append((address, heads, start))
        # runs that are not there come last
        order = torch.cat(keys).argsort()[: len(targets.places)]
        first = torch.cat(starts)
        goes = torch.full_like(first, -1)
        goes[order] = places
        begins = first.new_zeros(len(targets.heads) * self._size)
        begins[places] = first[order]
        inside = torch.arange(RUN_TOKENS, device=pool.device)
        positions = (begins[:, None] + inside).view(len(targets.heads), -1)
        own = goes.split([start.numel() for _, _, start in groups])
        runs = [
            PageRuns(address, heads, start.contiguous(), place)
            for (address, heads, start), place in zip(groups, own, strict=True)
        ]
        return runs, positions

    def _decode(self, runs: Sequence[PageRuns]) -> tuple[Tensor, Tensor]:
        """Keys and values ``[pages, tokens, head_dim]`` bfloat16 of the new pages."""
        pool = self._pool
        assert pool.kernels is not None
        head_dim = pool.config.geometry.head_dim
        shape = (2, len(self._targets.heads) * self._size * RUN_TOKENS, head_dim)
        keys, values = torch.zeros(shape, dtype=torch.bfloat16, device=pool.device)
        for each, own in zip(self._sources, runs, strict=True):
            if each.layout.tier.is_coded:
                pool.kernels.decode_runs(each.layout, self._state.codec, own, (keys, values))
                continue
            pages = pool.allocator.gather(torch.from_numpy(each.page_ids))
            view = PageView(each.layout, pages)
            whole = own.places.clamp(min=0)
            for to, states in ((keys, view.dense_keys()), (values, view.dense_values())):
                to.view(-1, RUN_TOKENS, head_dim)[whole] = states.reshape(-1, RUN_TOKENS, head_dim)
        tokens = self._size * RUN_TOKENS
        return keys.view(-1, tokens, head_dim), values.view(-1, tokens, head_dim)

    def _encode(
        self, mode: PositionMode, at: _Ids, states: tuple[Tensor, Tensor], positions: Tensor
    ) -> Iterator[tuple[int, EncodedPages]]:
        """New pages ``at`` of every layer that has some."""
        pool, key = self._pool, (self._tier_id, mode)
        assert pool.kernels is not None
        layout, num_heads = pool.layout(key), pool.config.geometry.num_kv_heads
        heads, counts = self._targets.heads[at], self._targets.counts[at]
        if len(at) < len(self._targets.heads):
            chosen = upload(at, pool.device)
            states, positions = (states[0][chosen], states[1][chosen]), positions[chosen]
        on_device = upload(np.concatenate([heads, counts]), pool.device)
        flags = torch.zeros(positions.shape, dtype=torch.bool, device=pool.device)
        rows = PageRows(positions, on_device[len(at) :], flags)
        own = on_device[: len(at)]
        codec = self._state.codec
        if pool.kernels.joins_layers(layout, codec, pool.device):
            pages = pool.kernels.encode_layers(layout, codec, states, rows, own)
        else:
            pages = torch.cat([*self._encode_apart(layout, states, rows, heads)])
        yield from pages_by_layer(key, heads, counts, pages, num_heads)

    def _encode_apart(
        self, layout: PageLayout, states: tuple[Tensor, Tensor], rows: PageRows, heads: _Ids
    ) -> Iterator[Tensor]:
        """Pages of each layer in turn."""
        num_heads = self._pool.config.geometry.num_kv_heads
        for layer, part in layer_parts(heads, num_heads):
            encoder = PageEncoder.of(self._pool, layer, self._state.codec)
            local = upload(heads[part] - layer * num_heads, self._pool.device)
            dense = (states[0][part], states[1][part])
            yield encoder.encode(layout, dense, rows.select(part), local)
