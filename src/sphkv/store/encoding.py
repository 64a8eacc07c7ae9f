# SPDX-License-Identifier: Apache-2.0
"""Dense states to page bytes through the codec, and back for demotion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.core.contract import StateCodec
from sphkv.core.geometry import KVGeometry
from sphkv.store.allocator import PoolKey
from sphkv.store.layout import PageLayout, PageView, write_dense_pages, write_pages
from sphkv.store.order import PageOrder
from sphkv.store.paging import MAX_POSITION, PageBatch, PageRows, StateList

# Pages encoded at once: bounds the float32 copies a codec makes of a long prompt.
_ENCODE_PAGES = 256
# Fused kernels make no such copies.
_KERNEL_PAGES = 4096
_LARGEST = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True, slots=True, eq=False)
class FlatStates:
    """Dense states that ``StateList.source`` counts through.

    Attributes:
        keys: ``[states, head_dim]`` after rotary embedding.
        values: ``[states, head_dim]``.
    """

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PendingPages:
    """Pages of one layer that are encoded but own no memory of the store yet.

    Attributes:
        batches: What the pages are.
        pages: ``[rows, page_bytes]`` uint8 of each batch.
    """

    batches: Sequence[PageBatch] = ()
    pages: Sequence[Tensor] = ()

    def requests(self) -> dict[PoolKey, int]:
        """Pages wanted from each pool."""
        wanted: dict[PoolKey, int] = {}
        for batch in self.batches:
            key = (batch.tier_id, batch.position_mode)
            wanted[key] = wanted.get(key, 0) + batch.num_pages
        return wanted

    def per_head(self, num_heads: int) -> Tensor:
        """``[heads]`` int64 pages of each head."""
        total = torch.zeros(num_heads, dtype=torch.int64)
        for batch in self.batches:
            total += batch.head_ids.cpu().bincount(minlength=num_heads)
        return total


def check_states(keys: Tensor, values: Tensor, geometry: KVGeometry) -> None:
    """Raise unless keys and values are finite ``[heads, tokens, head_dim]`` floats."""
    for name, tensor in (("keys", keys), ("values", values)):
        expected = (geometry.num_kv_heads, keys.shape[1] if keys.dim() == 3 else -1)
        if tensor.dim() != 3 or tuple(tensor.shape) != (*expected, geometry.head_dim):
            raise ValueError(
                f"{name} must have shape [{geometry.num_kv_heads}, tokens, "
                f"{geometry.head_dim}] with the same tokens, got {tuple(tensor.shape)}"
            )
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {tensor.dtype}")
        # One pass for NaN, infinity and what a dense page would turn into infinity.
        if tensor.numel() and not float(tensor.abs().amax()) <= _LARGEST:
            raise ValueError(f"{name} hold NaN, infinity or elements above {_LARGEST:.3g}")


def check_positions(positions: Tensor, num_tokens: int, first: int) -> None:
    """Raise unless positions are int64 ``[tokens]``, rising, and from ``first`` on."""
    if positions.dtype != torch.int64 or tuple(positions.shape) != (num_tokens,):
        raise ValueError(
            f"positions must be int64 [{num_tokens}], got {positions.dtype} "
            f"{tuple(positions.shape)}"
        )
    if num_tokens == 0:
        return
    if bool((positions.diff() <= 0).any()):
        raise ValueError("positions must rise strictly")
    low, high = int(positions[0]), int(positions[-1])
    if low < first or high > MAX_POSITION:
        raise ValueError(f"positions must be in {first}..{MAX_POSITION}, got {low}..{high}")


def encode_pages(
    states: FlatStates,
    batches: Sequence[PageBatch],
    *,
    layer: int,
    codec: StateCodec | None,
    layout_of: Callable[[PoolKey], PageLayout],
    order: PageOrder | None = None,
) -> PendingPages:
    """Encode and pack planned pages of one layer.

    Args:
        states: Dense states the batches refer to.
        batches: Planned pages.
        layer: Layer of the states.
        codec: Encoder of coded tiers; may be missing if all pages are dense.
        layout_of: Layout of each pool.
        order: What may encode instead of the codec.

    Returns:
        The bytes of every page.
    """
    packed = []
    step = _ENCODE_PAGES if order is None else _KERNEL_PAGES
    for batch in batches:
        layout = layout_of((batch.tier_id, batch.position_mode))
        parts = [
            _encode_rows(states, batch, index, layout, layer, codec, order)
            for index in torch.arange(batch.num_pages, device=batch.source.device).split(step)
        ]
        packed.append(torch.cat(parts))
    return PendingPages(batches, packed)


def _encode_rows(
    states: FlatStates,
    batch: PageBatch,
    index: Tensor,
    layout: PageLayout,
    layer: int,
    codec: StateCodec | None,
    order: PageOrder | None,
) -> Tensor:
    rows, source = batch.rows.select(index), batch.source[index]
    live = rows.live()[:, :, None]
    keys = states.keys[source] * live
    values = states.values[source] * live
    if not layout.tier.is_coded:
        return write_dense_pages(layout, keys, values, rows)
    if order is not None:
        heads = batch.head_ids[index]
        pages = order.encode(layout, layer, codec, (keys, values), rows, heads)
        if pages is not None:
            return pages
    encoded = _require(codec, layout).encode(
        layer,
        layout.tier,
        keys,
        values,
        rows.positions,
        head_ids=batch.head_ids[index],
        counts=rows.counts,
    )
    return write_pages(layout, encoded, rows)


def decode_pages(
    view: PageView, head_ids: Tensor, *, layer: int, codec: StateCodec | None
) -> tuple[StateList, FlatStates]:
    """Dense states of sealed pages, for re-encoding; never on the way of a decode step.

    Args:
        view: The pages.
        head_ids: ``[rows]`` int64 KV head of each page.
        layer: Layer of the pages.
        codec: Decoder of coded tiers.

    Returns:
        Live states in page order with ``source`` counting through the flat states.
    """
    rows, layout = view.rows(), view.layout
    if layout.tier.is_coded:
        keys, values = _require(codec, layout).decode(
            layer, layout.tier, view.encoded(), rows.positions, head_ids=head_ids
        )
    else:
        keys, values = view.dense_keys().float(), view.dense_values().float()
    live = rows.live()
    heads = head_ids[:, None].expand_as(live)[live]
    source = torch.arange(heads.numel(), device=heads.device)
    states = StateList(heads, rows.positions[live], rows.flags[live], source)
    return states, FlatStates(keys[live], values[live])


def merge_states(
    parts: Sequence[tuple[StateList, FlatStates]],
) -> tuple[StateList, FlatStates]:
    """Join decoded states, sorted by head, then by position."""
    heads = torch.cat([states.head_ids for states, _ in parts])
    positions = torch.cat([states.positions for states, _ in parts])
    flags = torch.cat([states.flags for states, _ in parts])
    order = (heads * (MAX_POSITION + 1) + positions).argsort()
    flat = FlatStates(
        torch.cat([flat.keys for _, flat in parts]), torch.cat([flat.values for _, flat in parts])
    )
    return StateList(heads[order], positions[order], flags[order], order), flat


def shorten_pages(view: PageView, counts: Tensor) -> Tensor:
    """The same pages with fewer live states and their slack zeroed.

    Args:
        view: The pages.
        counts: ``[rows]`` int64, at least one and at most the present counts.

    Returns:
        ``[rows, page_bytes]`` uint8.
    """
    rows = PageRows(view.positions(), counts, view.flags())
    if view.layout.tier.is_coded:
        return write_pages(view.layout, view.encoded(), rows)
    return write_dense_pages(view.layout, view.dense_keys(), view.dense_values(), rows)


def _require(codec: StateCodec | None, layout: PageLayout) -> StateCodec:
    if codec is None:
        raise ValueError(f"tier {layout.tier.name!r} needs a codec and the sequence has none")
    return codec
