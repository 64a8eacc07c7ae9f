# SPDX-License-Identifier: Apache-2.0
"""A live probe: what coding would do to the logits of the newest states, which are still dense."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sphkv.cache.retained_config import RetainedConfig
from sphkv.retention.query_notes import LayerNotes
from sphkv.store.store import PageStore

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class DriftSample:
    """Attention-logit drift of one layer's open tail.

    Attributes:
        layer: The layer.
        num_tokens: Length of the sequence.
        tier: Tier the tail was coded at for the comparison.
        quantiles: Absolute drift at ``QUANTILES``.
    """

    layer: int
    num_tokens: int
    tier: str
    quantiles: tuple[float, ...]


def probe_tail(
    config: RetainedConfig,
    store: PageStore,
    place: tuple[int, int],
    notes: LayerNotes,
    tier_id: int,
) -> DriftSample | None:
    """Code the dense tail of a layer at a tier and compare logits of the heads' mean queries.

    Args:
        config: The cache.
        store: Its pages; nothing in it changes.
        place: Sequence and layer.
        notes: The layer's mean queries.
        tier_id: A coded tier.

    Returns:
        The drift, or None if the tail is empty.
    """
    sequence, layer = place
    tail, codec = store.tail(sequence, layer), store.codec(sequence)
    if tail.num_tokens == 0 or codec is None:
        return None
    tier, rope = config.tiers[tier_id], config.ropes[layer]
    heads = tail.keys.shape[0]
    device = tail.keys.device
    positions = tail.first_position + torch.arange(tail.num_tokens, device=device)
    at = positions.expand(heads, -1)
    keys, values = tail.keys.float(), tail.values.float()
    coded, _ = codec.decode(layer, tier, codec.encode(layer, tier, keys, values, at), at)
    last = positions[-1:].expand(heads, -1)
    mean = notes.queries.mean.to(device).float()
    query = rope.from_planes(rope.rotate(mean[:, None], last))
    drift = (query @ (coded - keys).transpose(1, 2)).abs().flatten()
    drift = drift * config.geometry.head_dim**-0.5
    found = torch.quantile(drift, torch.tensor(QUANTILES, device=device))
    total = store.num_tokens(sequence, layer)
    return DriftSample(layer, total, tier.name, tuple(found.tolist()))
