# SPDX-License-Identifier: Apache-2.0
"""What writing would add to a store, to the byte, before anything is encoded."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.core.contract import WriteContract
from sphkv.store.append import Span
from sphkv.store.paging import (
    PositionMode,
    count_run_pages,
    count_tier_runs,
    plan_pages,
    select_states,
)
from sphkv.store.sequence import PointerTable
from sphkv.store.slabs import PoolKey
from sphkv.store.store import PageStore

# Units whose pages are planned at once: bounds the memory of counting a long prompt.
_PLANNED_UNITS = 1 << 22
# What ``count_run_pages`` tells of a tier.
_MODES = (PositionMode.CONTIGUOUS, PositionMode.RUNS)


def contract_bytes(store: PageStore, contract: WriteContract, num_tokens: int) -> int:
    """Bytes that ``PageStore.write_layers`` of all layers adds to an empty sequence.

    Args:
        store: The store as it is now.
        contract: Decision of all layers; only its first ``num_tokens`` are stored in pages, at
            positions from 0 on.
        num_tokens: How many these are; others follow, which open the tails.

    Returns:
        Growth of ``live_bytes``: pages with the free ones of new slabs, tables, and a tail per
        layer.
    """
    num_layers = contract.tier_id.shape[0]
    pages = {key: each.numpy() for key, each in count_pages(store, contract, num_tokens).items()}
    # all layers take theirs at once
    request = {key: int(each.sum()) for key, each in pages.items()}
    per_head = sum(pages.values(), np.zeros(contract.tier_id.shape[:2], dtype=np.int64))
    tables = _table_bytes(store, per_head.max(axis=1).tolist())
    return store.allocator.forecast([request]) + tables + num_layers * tail_bytes(store)


def span_bytes(
    store: PageStore, layers: Sequence[Sequence[Span]], num_tokens: int, *, num_sequences: int = 1
) -> int:
    """Bytes that ``PageStore.write_prompt`` of every layer adds to empty sequences.

    Args:
        store: The store as it is now.
        layers: Spans of each layer.
        num_tokens: Tokens of the prompt in every layer; those behind the spans fill the tails.
        num_sequences: Sequences that are written together.

    Returns:
        Growth of ``live_bytes``.
    """
    heads = store.config.geometry.num_kv_heads
    requests: list[dict[PoolKey, int]] = []
    most_pages, num_tails = [], 0
    for spans in layers:
        request: dict[PoolKey, int] = {}
        for span in spans:
            key = (span.tier_id, store.config.span_mode(span.tier_id))
            pages = -(-(span.stop - span.start) // store.config.tiers[span.tier_id].page_tokens)
            request[key] = request.get(key, 0) + pages
        most_pages.append(sum(request.values()))
        requests.append({key: pages * heads * num_sequences for key, pages in request.items()})
        num_tails += num_tokens > max((span.stop for span in spans), default=0)
    own = _table_bytes(store, most_pages) + num_tails * tail_bytes(store)
    return store.allocator.forecast(requests) + num_sequences * own


def tail_bytes(store: PageStore) -> int:
    """Bytes of the tail of one layer of one sequence."""
    geometry = store.config.geometry
    return geometry.num_kv_heads * store.config.tail_capacity * geometry.dense_state_bytes


def _table_bytes(store: PageStore, most_pages: Iterable[int]) -> int:
    """Bytes by which empty tables grow, given the pages of the fullest head of each."""
    heads = store.config.geometry.num_kv_heads
    capacity = sum(PointerTable.grown_capacity(0, pages) for pages in most_pages)
    return heads * capacity * PointerTable.entry_bytes


def count_pages(
    store: PageStore, contract: WriteContract, num_tokens: int
) -> dict[PoolKey, Tensor]:
    """Pages of every pool that a contract fills.

    Args:
        store: Its tiers say how many states a page holds.
        contract: Decision of all layers.
        num_tokens: How many of its first tokens are written, at positions from 0 on.

    Returns:
        ``[layers, heads]`` int64 for every tier id and position mode that occurs.
    """
    # runs of 16 share a tier, so counting runs is counting states
    if contract.granularity > 1 and num_tokens % contract.granularity == 0:
        return _count_runs(store, contract, num_tokens)
    tier_id, protected = contract.tier_id[..., :num_tokens].cpu(), contract.protected.cpu()
    layers, heads, tokens = tier_id.shape
    positions = torch.arange(tokens)
    found: dict[PoolKey, Tensor] = {}
    step = max(1, _PLANNED_UNITS // (heads * max(1, tokens)))
    for first in range(0, layers, step):
        part = slice(first, first + step)
        # heads of several layers are planned as if they were those of one
        flat = (tier_id[part].flatten(0, 1), protected[part, :, :num_tokens].flatten(0, 1))
        for tier, spec in enumerate(store.config.tiers):
            if spec.kind == "drop":
                continue
            states = select_states(*flat, positions, tier)
            as_runs = store.config.is_in_runs(tier)
            for batch in plan_pages(
                states, tier_id=tier, page_tokens=spec.page_tokens, as_runs=as_runs
            ):
                pages = batch.head_ids.bincount(minlength=flat[0].shape[0]).view(-1, heads)
                key = (tier, batch.position_mode)
                total = found.setdefault(key, torch.zeros(layers, heads).long())
                total[part] += pages
    return found


def _count_runs(
    store: PageStore, contract: WriteContract, num_tokens: int
) -> dict[PoolKey, Tensor]:
    """``count_pages`` of whole runs, where the contract is, waiting for it once."""
    tiers, size = store.config.tiers, contract.granularity
    tier_id = contract.tier_id[..., :num_tokens:size]
    layers, heads, _ = tier_id.shape
    page_runs = tuple(max(1, spec.page_tokens // size) for spec in tiers)
    # pages of one run, and those that tell a position per run, are alike however runs lie
    is_alike = all(
        store.config.is_in_runs(tier) or runs == 1 for tier, runs in enumerate(page_runs)
    )
    step = max(1, _PLANNED_UNITS // max(1, tier_id[0].numel()))
    parts = [part.flatten(0, 1) for part in tier_id.split(step)]
    if is_alike:
        runs_of = torch.cat([count_tier_runs(part, len(tiers)) for part in parts]).cpu()
        pages = -(-runs_of.view(layers, heads, -1, 1).numpy() // np.array(page_runs)[:, None])
    else:
        counted = torch.cat([count_run_pages(part, page_runs) for part in parts])
        pages = counted.cpu().view(layers, heads, len(tiers), 2).numpy()
    found: dict[PoolKey, NDArray[np.int64]] = {}
    for tier, column in np.argwhere(pages.any(axis=(0, 1))).tolist():
        if tiers[tier].kind == "drop":
            continue
        is_in_runs = store.config.is_in_runs(tier)
        key = (tier, PositionMode.RUNS if is_in_runs else _MODES[column])
        each = pages[:, :, tier, column]
        found[key] = found[key] + each if key in found else each
    return {key: torch.from_numpy(each) for key, each in found.items()}
