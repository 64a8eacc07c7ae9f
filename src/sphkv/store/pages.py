# SPDX-License-Identifier: Apache-2.0
"""Pages from states and back: encode, write, demote, drop, crop, planned before anything moves."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sphkv.core.contract import LayerContract, StateCodec
from sphkv.core.geometry import KVGeometry
from sphkv.core.tiers import RUN_TOKENS
from sphkv.store.layout import PageLayout, PageView, write_dense_pages, write_pages
from sphkv.store.order import PageCodec, PageOrder, PageRecoder
from sphkv.store.paging import (
    MAX_POSITION,
    PageBatch,
    PageRows,
    RunPages,
    StateList,
    plan_pages,
    plan_runs,
    select_states,
)
from sphkv.store.pool import EncodedPages, LayerChange, PagePool
from sphkv.store.sequence import PointerTable, SequenceState, pool_of_tag
from sphkv.store.slabs import PoolKey

# Pages encoded at once: bounds the float32 copies a codec makes of a long prompt.
_ENCODE_PAGES = 256
# Fused kernels make no such copies.
_KERNEL_PAGES = 8192
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


def check_states(keys: Tensor, values: Tensor, geometry: KVGeometry) -> None:
    """Raise unless keys and values are finite ``[heads, tokens, head_dim]`` floats."""
    check_shapes(keys, values, geometry)
    check_finite(extreme_elements(keys, values))


def check_shapes(keys: Tensor, values: Tensor, geometry: KVGeometry) -> None:
    """Raise unless keys and values are floats ``[..., heads, tokens, head_dim]`` of one shape."""
    expected = (geometry.num_kv_heads, keys.shape[-2] if keys.dim() >= 3 else -1, geometry.head_dim)
    for name, tensor in (("keys", keys), ("values", values)):
        if tuple(tensor.shape) != (*keys.shape[:-3], *expected):
            raise ValueError(
                f"{name} must have shape [{geometry.num_kv_heads}, tokens, "
                f"{geometry.head_dim}] with the same tokens, got {tuple(tensor.shape)}"
            )
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {tensor.dtype}")


def extreme_elements(keys: Tensor, values: Tensor) -> Tensor:
    """Least and largest element of keys, then of values; NaN if there is one. Waits for nothing."""
    if not keys.numel():
        return keys.new_zeros(4)
    return torch.stack([*keys.aminmax(), *values.aminmax()])


def largest_elements(states: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """``[layers, 2]`` largest magnitude of keys and values; NaN if there is one. Waits for nothing.

    A GPU looks at all of them in a few launches.
    """
    every = [part for own in states for part in own]
    if not every[0].numel():
        return every[0].new_zeros(len(states), 2)
    return torch.stack(torch._foreach_norm(every, torch.inf)).view(-1, 2)


def check_finite(extremes: Tensor) -> None:
    """Raise if ``extreme_elements`` tells of NaN, infinity or what bfloat16 would make infinite."""
    for name, low, high in zip(("keys", "values"), *extremes.view(2, 2).T.tolist(), strict=True):
        _check_range(name, low, high)


def are_finite(largest: Tensor) -> bool:
    """Whether nothing that is at most so large is NaN, or infinite as bfloat16."""
    return bool((largest <= _LARGEST).all())


def check_magnitudes(largest: Tensor) -> None:
    """``check_finite`` of what ``largest_elements`` tells, layer by layer."""
    for of_layer in largest.tolist():
        for name, high in zip(("keys", "values"), of_layer, strict=True):
            _check_range(name, -high, high)


def _check_range(name: str, low: float, high: float) -> None:
    if not (low >= -_LARGEST and high <= _LARGEST):
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


@dataclass(frozen=True, slots=True, eq=False)
class PageEncoder:
    """Encodes pages of one layer.

    Attributes:
        layer: Layer of the states.
        codec: Encoder of coded tiers; may be missing if all pages are dense.
        order: How slabs keep pages, if not as ``store/layout.py`` has them.
        kernels: What may encode instead of the codec.
    """

    layer: int
    codec: StateCodec | None
    order: PageOrder | None = None
    kernels: PageCodec | None = None

    @classmethod
    def of(cls, pool: PagePool, layer: int, codec: StateCodec | None) -> "PageEncoder":
        """Encoder of pages that a pool will own."""
        return cls(layer, codec, pool.allocator.order, pool.kernels)

    @property
    def most_pages(self) -> int:
        """Pages to be encoded at once."""
        is_on_host = self.kernels is None or isinstance(self.kernels, PageRecoder)
        return _ENCODE_PAGES if is_on_host else _KERNEL_PAGES

    def encode(
        self,
        layout: PageLayout,
        states: tuple[Tensor, Tensor],
        rows: PageRows,
        head_ids: Tensor,
        *,
        is_checked: bool = False,
    ) -> Tensor:
        """Pages ``[rows, page_bytes]``, as slabs keep them, of states that lie page by page.

        Args:
            layout: Layout of the pages.
            states: Keys and values, ``[rows, tokens, head_dim]`` each; zero past the counts.
            rows: Positions, counts and flags.
            head_ids: ``[rows]`` int64 KV head of each page.
            is_checked: Whether counts and positions are known to fit.
        """
        if not layout.tier.is_coded:
            pages = write_dense_pages(layout, *states, rows, is_checked=is_checked)
        else:
            if self.kernels is not None:
                found = self.kernels.encode(layout, self.layer, self.codec, states, rows, head_ids)
                if found is not None:
                    return found
            encoded = _require(self.codec, layout).encode(
                self.layer,
                layout.tier,
                *states,
                rows.positions,
                head_ids=head_ids,
                counts=rows.counts,
            )
            pages = write_pages(layout, encoded, rows)
        return pages if self.order is None else self.order.to_slab(layout, pages)


def encode_pages(
    encoder: PageEncoder,
    states: FlatStates,
    batches: Sequence[PageBatch],
    layout_of: Callable[[PoolKey], PageLayout],
    num_heads: int,
) -> list[EncodedPages]:
    """Encode and pack planned pages of one layer.

    Args:
        encoder: Encoder of the layer.
        states: Dense states the batches refer to.
        batches: Planned pages.
        layout_of: Layout of each pool.
        num_heads: KV heads of the layer.
    """
    packed = []
    for batch in batches:
        key = (batch.tier_id, batch.position_mode)
        parts, is_full = [], batch.is_full
        for first in range(0, batch.num_pages, encoder.most_pages):
            at = slice(first, first + encoder.most_pages)
            rows, source = batch.rows.select(at), batch.source[at]
            chosen = (states.keys[source], states.values[source])
            if not is_full:
                live = rows.live()[:, :, None]
                chosen = (chosen[0] * live, chosen[1] * live)
            parts.append(encoder.encode(layout_of(key), chosen, rows, batch.head_ids[at]))
        pages = parts[0] if len(parts) == 1 else torch.cat(parts)
        heads, counts = batch.on_cpu or (batch.head_ids, batch.rows.counts)
        packed.append(EncodedPages.of(key, heads, counts, pages, num_heads))
    return packed


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
    flat = FlatStates(states.keys.flatten(0, 1), states.values.flatten(0, 1))
    batches = _plan_batches(pool, contract, positions)
    pending = _encode(pool, state, layer, flat, batches)
    return LayerChange(state.tables[layer], pending=pending)


def _plan_batches(pool: PagePool, contract: LayerContract, positions: Tensor) -> list[PageBatch]:
    """Which states share a page; whole runs are planned on the CPU, waiting for the tiers once."""
    tokens = len(positions)
    is_gapless = tokens > 0 and int(positions[-1] - positions[0]) == tokens - 1
    if contract.granularity == RUN_TOKENS and tokens % RUN_TOKENS == 0 and is_gapless:
        return _plan_run_batches(pool, contract, int(positions[0]))
    tier_ids, protected = contract.tier_id.to(pool.device), contract.protected.to(pool.device)
    positions = positions.to(pool.device)
    batches: list[PageBatch] = []
    for tier_id, tier in enumerate(pool.config.tiers):
        if tier.kind != "drop":
            chosen = select_states(tier_ids, protected, positions, tier_id)
            batches += plan_pages(
                chosen,
                tier_id=tier_id,
                page_tokens=tier.page_tokens,
                as_runs=pool.config.is_in_runs(tier_id),
            )
    return batches


def _plan_run_batches(
    pool: PagePool, contract: LayerContract, first_position: int
) -> list[PageBatch]:
    tier_ids = contract.tier_id[:, ::RUN_TOKENS].cpu().numpy()
    plans: list[RunPages] = []
    for tier_id, tier in enumerate(pool.config.tiers):
        if tier.kind != "drop":
            plans += plan_runs(
                tier_ids,
                tier_id=tier_id,
                page_tokens=tier.page_tokens,
                as_runs=pool.config.is_in_runs(tier_id),
            )
    if not plans:
        return []
    words = [torch.from_numpy(plan.words()) for plan in plans]
    every = torch.cat(words)
    if pool.device.type == "cuda":
        # a copy from pinned memory waits for nothing
        every = every.pin_memory().to(pool.device, non_blocking=True)
    protected = contract.protected.to(pool.device)
    split = every.split([len(each) for each in words])
    return [
        plan.batch(each, protected, first_position) for plan, each in zip(plans, split, strict=True)
    ]


def _encode(
    pool: PagePool, state: SequenceState, layer: int, flat: FlatStates, batches: list[PageBatch]
) -> list[EncodedPages]:
    encoder = PageEncoder.of(pool, layer, state.codec)
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
    """Give up pages that hold no protected state, which reads them."""
    for ids, _, view in read_by_layout(pool, table, page_ids):
        _refuse_protected(ids, view)
    return LayerChange(table, removed=page_ids)


def plan_demotion(
    pool: PagePool,
    state: SequenceState,
    layer: int,
    page_ids: Tensor,
    tier_id: int,
    *,
    is_checked: bool = False,
) -> LayerChange:
    """Re-encode pages at a lower tier, packing the states of each head together.

    ``is_checked``: it is known that they hold no protected state.
    """
    table = state.tables[layer]
    tiers = pool.config.tiers
    parts = []
    for ids, heads, view in read_by_layout(pool, table, page_ids):
        if view.layout.tier_id <= tier_id:
            raise ValueError(
                f"pages {ids.tolist()} are at tier {view.layout.tier.name!r}, which is not "
                f"above {tiers[tier_id].name!r}"
            )
        if not is_checked:
            _refuse_protected(ids, view)
        parts.append(decode_pages(view, heads, layer=layer, codec=state.codec))
    if not parts:
        return LayerChange(table)
    states, flat = merge_states(parts)
    batches = plan_pages(
        states,
        tier_id=tier_id,
        page_tokens=tiers[tier_id].page_tokens,
        as_runs=pool.config.is_in_runs(tier_id),
    )
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
