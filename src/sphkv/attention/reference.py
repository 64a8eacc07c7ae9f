# SPDX-License-Identifier: Apache-2.0
"""Decode attention in plain torch; defines the right answer.

Logits come from the codes, a few slots at a time: no dense key is ever held. Pages are worked
on in chunks, each page a row with the codebook of its head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sphkv.attention.partial import (
    PartialAttention,
    attend_logits,
    merge_partials,
    softmax_parts,
)
from sphkv.attention.request import (
    AttentionOptions,
    BatchRequest,
    DecodeRequest,
    EagerBackend,
    attend_each,
)
from sphkv.codec.affine import AffineCode
from sphkv.codec.hadamard import unrotate
from sphkv.codec.keys import SphericalCode, angle_logits_reference
from sphkv.codec.states import SphericalCodec
from sphkv.codec.values import ValueCode, value_contribution
from sphkv.store.layout import PageView
from sphkv.store.order import PageCodec, PageOrder
from sphkv.store.sequence import PageGroup

_CHUNK_STATES = 1 << 15


class ReferenceBackend(EagerBackend):
    """Readable torch on any device; it reads pages through the store, in whatever order they lie.

    Attributes:
        name: ``"reference"``.
        page_order: None.
        page_codec: None.
    """

    name = "reference"
    page_order: PageOrder | None = None
    page_codec: PageCodec | None = None

    def attend(self, request: DecodeRequest) -> PartialAttention:
        """Attention over all pages and the tail; see ``DecodeBackend.attend``."""
        query = _grouped(request)
        parts = [_attend_tail(request, query)]
        for group in request.store.pages(request.sequence, request.layer):
            parts.append(_attend_group(request, group, query))
        merged = merge_partials(parts)
        shape = request.query.shape
        return PartialAttention(merged.output.reshape(shape), merged.lse.reshape(shape[:2]))

    def attend_rows(self, request: BatchRequest) -> PartialAttention:
        """One row after the other; see ``DecodeBackend.attend_rows``."""
        return attend_each(self, request)

    def table_bytes(self, codec: SphericalCodec) -> int:
        """None: it reads the codec's own codebooks."""
        return 0


def _grouped(request: DecodeRequest) -> Tensor:
    """Queries by KV head, scaled: ``[kv_heads, group * queries, head_dim]`` float32."""
    kv_heads = request.store.config.geometry.num_kv_heads
    head_dim = request.query.shape[2]
    rows = request.store.config.geometry.group_size * request.query.shape[1]
    query = request.query.float() * request.options.scale
    return query.reshape(kv_heads, rows, head_dim)


def _row_positions(request: DecodeRequest) -> Tensor:
    """Position of each row of ``_grouped``: ``[group * queries]``."""
    positions = request.positions.to(request.query.device, non_blocking=True)
    return positions.repeat(request.store.config.geometry.group_size)


def mask_logits(
    logits: Tensor, key_positions: Tensor, query_positions: Tensor, options: AttentionOptions
) -> Tensor:
    """Apply soft-cap, causality and window.

    Args:
        logits: ``[rows, queries, tokens]``.
        key_positions: ``[rows, tokens]``; slack is marked by a position past every query.
        query_positions: ``[queries]``.
        options: Soft-cap and window.
    """
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    distance = query_positions[None, :, None] - key_positions[:, None, :]
    hidden = distance < 0
    if options.window is not None:
        hidden |= distance >= options.window
    return logits.masked_fill(hidden, -torch.inf)


def _attend_tail(request: DecodeRequest, query: Tensor) -> PartialAttention:
    tail = request.store.tail(request.sequence, request.layer)
    positions = tail.first_position + torch.arange(tail.num_tokens, device=query.device)
    logits = query @ tail.keys.float().transpose(1, 2)
    rows = positions.expand(query.shape[0], -1)
    logits = mask_logits(logits, rows, _row_positions(request), request.options)
    return attend_logits(logits, tail.values.float())


def _attend_group(request: DecodeRequest, group: PageGroup, query: Tensor) -> PartialAttention:
    """Attend to pages of one layout, chunk by chunk, and merge them by head."""
    ids, head_ids = group.flat_ids(), group.head_ids()
    step = max(1, _CHUNK_STATES // group.layout.page_tokens)
    is_coded = group.layout.tier.is_coded
    by_page: list[PartialAttention] = []
    for at in range(0, len(ids), step):
        view = PageView(group.layout, request.store.allocator.gather(ids[at : at + step]))
        heads = head_ids[at : at + step]
        attend = _attend_coded if is_coded else _attend_dense
        by_page.append(attend(request, view, heads, query[heads]))
    output = torch.cat([part.output for part in by_page])
    lse = torch.cat([part.lse for part in by_page])
    merged = merge_by_head(PartialAttention(output, lse), head_ids, query.shape[0])
    if group.layout.tier.has_value_codes:
        return PartialAttention(unrotate(merged.output), merged.lse)
    return merged


def merge_by_head(pages: PartialAttention, head_ids: Tensor, heads: int) -> PartialAttention:
    """Merge partials ``[pages, queries]`` of single pages into ``[heads, queries]``."""
    queries = pages.lse.shape[1]
    index = head_ids.unsqueeze(1).expand(-1, queries)
    most = pages.lse.new_full((heads, queries), -torch.inf)
    most = most.scatter_reduce(0, index, pages.lse, "amax")
    safe = torch.where(torch.isneginf(most), 0.0, most)
    mass = (pages.lse - safe[head_ids]).exp()
    total = torch.zeros_like(most).index_add_(0, head_ids, mass)
    output = pages.output.new_zeros(heads, queries, pages.output.shape[-1])
    output.index_add_(0, head_ids, mass.unsqueeze(-1) * pages.output)
    lse = torch.where(total > 0, safe + total.clamp(min=1e-38).log(), -torch.inf)
    return PartialAttention(output / total.clamp(min=1e-38).unsqueeze(-1), lse)


def _key_positions(view: PageView, request: DecodeRequest) -> Tensor:
    """Positions with slack moved past every query, so that causality hides it."""
    beyond = int(request.positions.max()) + 1 if request.positions.numel() else 0
    return torch.where(view.live(), view.positions(), beyond)


def _attend_dense(
    request: DecodeRequest, view: PageView, head_ids: Tensor, query: Tensor
) -> PartialAttention:
    logits = query @ view.dense_keys().float().transpose(1, 2)
    positions = _key_positions(view, request)
    logits = mask_logits(logits, positions, _row_positions(request), request.options)
    return attend_logits(logits, view.dense_values().float())


def _attend_coded(
    request: DecodeRequest, view: PageView, head_ids: Tensor, query: Tensor
) -> PartialAttention:
    codec, tier = request.codec(), view.layout.tier
    rope = codec.calibration.ropes[request.layer]
    codebook = codec.codebook(request.layer, tier, query.device).rows(head_ids)
    phase = rope.phases(view.positions()).transpose(1, 2)  # [rows, planes, tokens]
    code = SphericalCode(view.key_codes(), view.radius())
    planes = rope.to_planes(query)
    logits = angle_logits_reference(planes, code, (phase.cos(), phase.sin()), codebook)
    positions = _key_positions(view, request)
    logits = mask_logits(logits, positions, _row_positions(request), request.options)
    if not tier.has_value_codes:
        return attend_logits(logits, view.dense_values().float())
    weight, lse = softmax_parts(logits)
    scale = AffineCode(view.scale_code(), *view.scale_affine())
    values = ValueCode(view.value_codes(), scale, tier.value_bits)
    return PartialAttention(value_contribution(weight, values), lse)
