# SPDX-License-Identifier: Apache-2.0
"""Changes of a layer's pages, planned before anything moves: write, drop, demote, crop."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sphkv.core.contract import LayerContract
from sphkv.store.encoding import (
    FlatStates,
    PendingPages,
    decode_pages,
    encode_pages,
    merge_states,
    shorten_pages,
)
from sphkv.store.layout import PageView
from sphkv.store.paging import PageBatch, PageRows, PositionMode, plan_pages, select_states
from sphkv.store.pointers import PointerTable, pool_of_tag
from sphkv.store.pool import LayerChange, PagePool
from sphkv.store.sequence import SequenceState
from sphkv.store.tail import OpenTail


def plan_write(
    pool: PagePool,
    state: SequenceState,
    layer: int,
    contract: LayerContract,
    states: FlatStates,
    positions: Tensor,
) -> LayerChange:
    """Encode states as a contract says.

    Args:
        pool: Owner of the layouts.
        state: Sequence to extend.
        layer: Layer of the states.
        contract: Tier of each head and token.
        states: Keys and values, ``[heads, tokens, head_dim]`` each.
        positions: ``[tokens]`` int64.

    Returns:
        The new pages.
    """
    tier_ids, protected = contract.tier_id.to(pool.device), contract.protected.to(pool.device)
    positions = positions.to(pool.device)
    batches: list[PageBatch] = []
    for tier_id, tier in enumerate(pool.config.tiers):
        if tier.kind != "drop":
            chosen = select_states(tier_ids, protected, positions, tier_id)
            batches += plan_pages(chosen, tier_id=tier_id, page_tokens=tier.page_tokens)
    flat = FlatStates(states.keys.flatten(0, 1), states.values.flatten(0, 1))
    pending = _encode(pool, state, layer, flat, batches)
    return LayerChange(state.tables[layer], pending=pending)


def _encode(
    pool: PagePool, state: SequenceState, layer: int, flat: FlatStates, batches: list[PageBatch]
) -> PendingPages:
    return encode_pages(
        flat,
        batches,
        layer=layer,
        codec=state.codec,
        layout_of=pool.layout,
        order=pool.allocator.order,
    )


def plan_seal(
    pool: PagePool, state: SequenceState, layer: int, states: FlatStates, first_position: int
) -> LayerChange:
    """Encode the oldest states of a tail, ``[heads, tokens, head_dim]``, at the seal tier."""
    shape = states.keys.shape[:2]
    contract = LayerContract(
        torch.full(shape, pool.config.tiers.id_of(pool.config.seal_tier), dtype=torch.uint8),
        torch.zeros(shape, dtype=torch.bool),
    )
    positions = torch.arange(shape[1]) + first_position
    return plan_write(pool, state, layer, contract, states, positions)


FullTails = tuple[int, Sequence[SequenceState], Sequence[OpenTail]]
"""A layer, sequences of one codec, and the tail of each, which holds a page at least."""


def plan_seals(pool: PagePool, full: Sequence[FullTails]) -> list[LayerChange]:
    """Encode the oldest page of many tails, those of a layer at once.

    Args:
        pool: Owner of the layouts.
        full: The tails, layer by layer.

    Returns:
        The new pages of each layer and sequence.
    """
    tokens, changes = pool.config.seal_tokens, []
    # layers are alike, so what their pages have in common is made once
    common: dict[tuple[int, ...], tuple[PageBatch, list[PageBatch]]] = {}
    for layer, states, tails in full:
        first = tuple(tail.first_position for tail in tails)
        if first not in common:
            common[first] = _seal_batches(pool, first)
        batch, parts = common[first]
        keys = torch.stack([tail.keys[:, :tokens] for tail in tails]).flatten(0, 1)
        values = torch.stack([tail.values[:, :tokens] for tail in tails]).flatten(0, 1)
        pages = _encode_sealed(pool, states[0], layer, batch, (keys, values))
        for state, part, own in zip(states, parts, pages.split(parts[0].num_pages), strict=True):
            changes.append(LayerChange(state.tables[layer], pending=PendingPages([part], [own])))
    return changes


def _seal_batches(pool: PagePool, first: tuple[int, ...]) -> tuple[PageBatch, list[PageBatch]]:
    """One page per head of tails that begin at ``first``: all of them, and those of each tail."""
    tier_id = pool.config.tiers.id_of(pool.config.seal_tier)
    heads, tokens = pool.config.geometry.num_kv_heads, pool.config.seal_tokens
    num_pages = heads * len(first)
    index = torch.arange(tokens, device=pool.device)
    rows = PageRows(
        torch.tensor(first, device=pool.device).repeat_interleave(heads)[:, None] + index,
        torch.full((num_pages,), tokens, device=pool.device),
        torch.zeros(num_pages, tokens, dtype=torch.bool, device=pool.device),
    )
    source = torch.arange(num_pages * tokens, device=pool.device).view(num_pages, tokens)
    every_head, mode = torch.arange(heads), PositionMode.CONTIGUOUS
    parts = []
    for place in range(len(first)):
        own = slice(place * heads, (place + 1) * heads)
        owned = PageRows(rows.positions[own], rows.counts[own], rows.flags[own])
        parts.append(PageBatch(tier_id, mode, every_head, source[own], owned))
    all_heads = every_head.to(pool.device).repeat(len(first))
    return PageBatch(tier_id, mode, all_heads, source, rows), parts


def _encode_sealed(
    pool: PagePool,
    state: SequenceState,
    layer: int,
    batch: PageBatch,
    states: tuple[Tensor, Tensor],
) -> Tensor:
    """Pages of states that lie page by page already, ``[pages, tokens, head_dim]``."""
    layout, order = pool.layout((batch.tier_id, batch.position_mode)), pool.allocator.order
    if order is not None and layout.tier.is_coded:
        pages = order.encode(layout, layer, state.codec, states, batch.rows, batch.head_ids)
        if pages is not None:
            return pages
    flat = FlatStates(states[0].flatten(0, 1), states[1].flatten(0, 1))
    return _encode(pool, state, layer, flat, [batch]).pages[0]


def read_by_layout(
    pool: PagePool, table: PointerTable, page_ids: Tensor
) -> Iterator[tuple[Tensor, Tensor, PageView]]:
    """Read pages of a layer, one layout at a time.

    Args:
        pool: Owner of the pages.
        table: Pointer table of the layer.
        page_ids: ``[pages]`` int64 ids, each once and in the table.

    Yields:
        Ids ``[rows]``, heads ``[rows]`` (rising) and the pages of one layout.
    """
    heads, tags = table.find(page_ids)
    by_head = heads.argsort(stable=True)
    page_ids, heads, tags = page_ids.to(heads.device)[by_head], heads[by_head], tags[by_head]
    for tag in sorted(set(tags.tolist())):
        chosen = (tags == tag).nonzero()[:, 0]
        view = PageView(pool.layout(pool_of_tag(tag)), pool.allocator.gather(page_ids[chosen]))
        yield page_ids[chosen].to(pool.device), heads[chosen].to(pool.device), view


def plan_drop(pool: PagePool, table: PointerTable, page_ids: Tensor) -> LayerChange:
    """Give up pages that hold no protected state."""
    for ids, _, view in read_by_layout(pool, table, page_ids):
        _refuse_protected(ids, view)
    return LayerChange(table, removed=page_ids)


def plan_demotion(
    pool: PagePool, state: SequenceState, layer: int, page_ids: Tensor, tier_id: int
) -> LayerChange:
    """Re-encode pages at a lower tier, packing the states of each head together."""
    table = state.tables[layer]
    tiers = pool.config.tiers
    parts = []
    for ids, heads, view in read_by_layout(pool, table, page_ids):
        if view.layout.tier_id <= tier_id:
            raise ValueError(
                f"pages {ids.tolist()} are at tier {view.layout.tier.name!r}, which is not "
                f"above {tiers[tier_id].name!r}"
            )
        _refuse_protected(ids, view)
        parts.append(decode_pages(view, heads, layer=layer, codec=state.codec))
    if not parts:
        return LayerChange(table)
    states, flat = merge_states(parts)
    batches = plan_pages(states, tier_id=tier_id, page_tokens=tiers[tier_id].page_tokens)
    pending = _encode(pool, state, layer, flat, batches)
    return LayerChange(table, removed=page_ids, pending=pending)


def _refuse_protected(page_ids: Tensor, view: PageView) -> None:
    guarded = view.flags().any(dim=1)
    if bool(guarded.any()):
        raise ValueError(f"pages {page_ids[guarded].tolist()} hold protected states")


def plan_crop(pool: PagePool, table: PointerTable, num_tokens: int) -> LayerChange:
    """Give up states at positions from ``num_tokens`` on.

    A page of which only a part stays is shortened in place if the sequence is its only
    owner, and copied otherwise.
    """
    change = LayerChange(table)
    removed, batches, copies = [change.removed], [], []
    for ids, heads, view in read_by_layout(pool, table, table.all_ids()):
        rows = view.rows()
        kept = (rows.live() & (rows.positions < num_tokens)).sum(dim=1)
        removed.append(ids[kept == 0].cpu())
        partly = ((kept > 0) & (kept < rows.counts)).nonzero()[:, 0]
        if partly.numel() == 0:
            continue
        shared = (pool.allocator.refcounts(ids[partly]) > 1).to(partly.device)
        for is_copy, index in ((True, partly[shared]), (False, partly[~shared])):
            if index.numel() == 0:
                continue
            short = PageView(view.layout, shorten_pages(view.select(index), kept[index]))
            if is_copy:
                removed.append(ids[index].cpu())
                batches.append(finished_batch(short, heads[index]))
                copies.append(short.pages)
            else:
                change.truncated.append((ids[index], short.pages, kept[index]))
    change.removed = torch.cat(removed)
    change.pending = PendingPages(batches, copies)
    return change


def finished_batch(view: PageView, head_ids: Tensor) -> PageBatch:
    """Describe finished pages, whose states have no dense source any more."""
    rows = view.rows()
    layout = view.layout
    return PageBatch(
        layout.tier_id,
        layout.position_mode,
        head_ids,
        torch.zeros_like(rows.positions),
        rows,
    )
