# SPDX-License-Identifier: Apache-2.0
"""Which token of which head is stored at which tier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sphkv.store.store import PageStore


def tier_ids(store: PageStore, layer: int, num_tokens: int, *, sequence: int = 0) -> Tensor:
    """``[kv_heads, num_tokens]`` int64 tier of each token; the drop tier where none is stored."""
    tiers = store.config.tiers
    shape = (store.config.geometry.num_kv_heads, num_tokens)
    found = torch.full(shape, tiers.drop_id, dtype=torch.int64)
    for group in store.pages(sequence, layer):
        view = store.view(group)
        live = view.live()
        heads = group.head_ids()[:, None].expand_as(live)[live]
        found[heads.cpu(), view.positions()[live].cpu()] = group.layout.tier_id
    tail = store.tail(sequence, layer)
    found[:, tail.first_position : tail.first_position + tail.num_tokens] = tiers.dense_id
    return found


def tier_map(store: PageStore, num_tokens: int, *, columns: int = 160) -> list[list[str]]:
    """Tier name of evenly spaced tokens, one row per layer and KV head."""
    at = torch.linspace(0, num_tokens - 1, columns).round().long()
    names = [tier.name for tier in store.config.tiers]
    rows = []
    for layer in range(store.config.geometry.num_layers):
        for head in tier_ids(store, layer, num_tokens)[:, at].tolist():
            rows.append([names[tier] for tier in head])
    return rows


def tier_histogram(store: PageStore, num_tokens: int) -> list[dict[str, Any]]:
    """Tokens at each tier, one row per layer and KV head."""
    names = [tier.name for tier in store.config.tiers]
    rows = []
    for layer in range(store.config.geometry.num_layers):
        for head, ids in enumerate(tier_ids(store, layer, num_tokens)):
            counts = torch.bincount(ids, minlength=len(names)).tolist()
            rows.append({"layer": layer, "head": head, **dict(zip(names, counts, strict=True))})
    return rows
