# SPDX-License-Identifier: Apache-2.0
"""What calibration needs to know about the queries of a head."""

from __future__ import annotations

import torch
from torch import Tensor

from sphkv.core.rope import RopeSpec


def query_moments(queries: Tensor, positions: Tensor, rope: RopeSpec, num_kv_heads: int) -> Tensor:
    """Second moment of pre-RoPE queries in each plane, averaged over a KV head's group.

    Args:
        queries: ``[query_heads, tokens, head_dim]`` after RoPE.
        positions: ``[tokens]`` integers.
        rope: The layer's rotary embedding.
        num_kv_heads: Groups to average over.

    Returns:
        ``[kv_heads, planes, 2, 2]`` float32.
    """
    z = rope.unrotate(rope.to_planes(queries.float()), positions)
    moments = torch.einsum("htni,htnj->hnij", z, z) / max(1, z.shape[1])
    return moments.reshape(num_kv_heads, -1, *moments.shape[1:]).mean(1)


def key_frame_metric(moments: Tensor, rope: RopeSpec, *, max_distance: int) -> Tensor:
    """Average the query moments over how far queries stand from the key.

    A query ``distance`` tokens later meets the key's plane turned by ``w * distance``. Its
    isotropic part is unchanged; its anisotropic part turns twice as fast and averages out in
    quick planes, but not in slow ones. Distances are uniform up to ``max_distance``.

    Args:
        moments: ``[kv_heads, planes, 2, 2]`` pre-RoPE second moments of queries.
        rope: The layer's rotary embedding.
        max_distance: Tokens between key and query at most.

    Returns:
        ``[kv_heads, planes, 2, 2]``: the expected squared logit error of a key error ``e`` in
        plane ``n`` is ``e' metric[n] e``.
    """
    turn = 2 * rope.frequencies(moments.device) * max_distance
    safe = torch.where(turn.abs() < 1e-6, torch.ones_like(turn), turn)
    cos = torch.where(turn.abs() < 1e-6, torch.ones_like(turn), safe.sin() / safe).float()
    sin = torch.where(turn.abs() < 1e-6, torch.zeros_like(turn), (1 - safe.cos()) / safe).float()
    xx, yy, xy = moments[..., 0, 0], moments[..., 1, 1], moments[..., 0, 1]
    even, odd = xx - yy, 2 * xy
    turned_even, turned_odd = even * cos - odd * sin, even * sin + odd * cos
    trace = xx + yy
    return torch.stack(
        [
            torch.stack([(trace + turned_even) / 2, turned_odd / 2], -1),
            torch.stack([turned_odd / 2, (trace - turned_even) / 2], -1),
        ],
        -2,
    )
