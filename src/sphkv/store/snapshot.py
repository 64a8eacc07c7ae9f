# SPDX-License-Identifier: Apache-2.0
"""A sequence out of the store and into it again, as whole pages."""

import torch
from torch import Tensor

from sphkv.core.contract import StateCodec
from sphkv.errors import CacheFileError
from sphkv.store.allocator import PoolKey
from sphkv.store.encoding import EncodedPages
from sphkv.store.layout import PageView
from sphkv.store.persist import SavedSequence
from sphkv.store.pool import LayerChange, PagePool
from sphkv.store.sequence import SequenceState, page_groups
from sphkv.store.tail import OpenTail


def export_sequence(pool: PagePool, state: SequenceState) -> SavedSequence:
    """Copy the pages and tails of a sequence."""
    found: dict[PoolKey, list[tuple[Tensor, Tensor]]] = {}
    for layer, table in enumerate(state.tables):
        for group in page_groups(table, pool.layout):
            heads = group.head_ids().cpu().to(torch.int32)
            owners = torch.stack([torch.full_like(heads, layer), heads], dim=1)
            key = (group.layout.tier_id, group.layout.position_mode)
            found.setdefault(key, []).append((pool.allocator.gather(group.flat_ids()), owners))
    pages = {
        key: (torch.cat([page for page, _ in parts]), torch.cat([owner for _, owner in parts]))
        for key, parts in found.items()
    }
    tails = {
        layer: (tail.view().keys, tail.view().values)
        for layer, tail in enumerate(state.tails)
        if tail is not None and tail.num_tokens
    }
    return SavedSequence(list(state.next_position), state.seal_tier_id, pages, tails)


def import_sequence(
    pool: PagePool, saved: SavedSequence, codec: StateCodec | None
) -> tuple[SequenceState, list[LayerChange]]:
    """Prepare a sequence; its pages come with the commit of the changes.

    Args:
        pool: Pool that will own the pages.
        saved: The sequence, already checked.
        codec: Encoder of the sequence.

    Returns:
        The sequence with its tails and empty tables, and one change per layer.

    Raises:
        CacheFileError: A tail is longer than this store's tails, or sealed at a tier whose pages
            do not divide them.
    """
    tiers = pool.config.tiers
    try:
        state = SequenceState.blank(pool.config, codec, tiers[saved.seal_tier_id].name)
    except ValueError as error:
        raise CacheFileError(f"sequence cannot be sealed in this store: {error}") from error
    state.next_position = list(saved.next_position)
    for layer, (keys, values) in saved.tails.items():
        num_tokens, capacity = keys.shape[1], pool.config.tail_capacity
        if num_tokens > capacity:
            raise CacheFileError(
                f"tail of layer {layer} holds {num_tokens} states, this store's {capacity}"
            )
        tail = OpenTail.blank(pool.config, state.next_position[layer] - num_tokens)
        tail.append(keys, values)
        state.tails[layer] = tail
    changes = [
        LayerChange(table, pending=_pages_of_layer(pool, saved, layer))
        for layer, table in enumerate(state.tables)
    ]
    return state, changes


def _pages_of_layer(pool: PagePool, saved: SavedSequence, layer: int) -> list[EncodedPages]:
    found = []
    for key, (pages, owners) in saved.pages.items():
        mine = (owners[:, 0] == layer).nonzero()[:, 0]
        if mine.numel() == 0:
            continue
        heads = owners[mine, 1].to(torch.int64)
        order = heads.argsort(stable=True)
        view = PageView(pool.layout(key), pages[mine[order]].to(pool.device))
        kept = pool.allocator.to_slab(view.layout, view.pages)
        num_heads = pool.config.geometry.num_kv_heads
        found.append(EncodedPages.of(key, heads[order], view.counts(), kept, num_heads))
    return found
