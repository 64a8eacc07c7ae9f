# SPDX-License-Identifier: Apache-2.0
"""Changes of a layer's pages, planned before anything moves: write, drop, demote, crop."""

from collections.abc import Iterator

import torch
from torch import Tensor

from sphkv.core.contract import LayerContract
from sphkv.store.encoding import (
    EncodedPages,
    FlatStates,
    decode_pages,
    encode_pages,
    merge_states,
    shorten_pages,
)
from sphkv.store.layout import PageView
from sphkv.store.paging import PageBatch, plan_pages, select_states
from sphkv.store.pointers import PointerTable, pool_of_tag
from sphkv.store.pool import LayerChange, PagePool
from sphkv.store.sequence import SequenceState


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
) -> list[EncodedPages]:
    encoder = pool.encoder(layer, state.codec)
    return encode_pages(encoder, flat, batches, pool.layout, pool.config.geometry.num_kv_heads)


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
    removed, copies = [change.removed], []
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
            pages = pool.allocator.to_slab(view.layout, short.pages)
            if is_copy:
                removed.append(ids[index].cpu())
                key = (view.layout.tier_id, view.layout.position_mode)
                num_heads = pool.config.geometry.num_kv_heads
                copies.append(EncodedPages.of(key, heads[index], kept[index], pages, num_heads))
            else:
                change.truncated.append((ids[index], pages, kept[index]))
    change.removed = torch.cat(removed)
    change.pending = copies
    return change
