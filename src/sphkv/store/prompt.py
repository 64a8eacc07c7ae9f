# SPDX-License-Identifier: Apache-2.0
"""Several layers of a prompt at once, as a contract says.

On a GPU most of the time of a layer is the host's: planning pages, asking for slabs, a launch for
every small step. Layers that are planned and encoded together share all of that.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sphkv.core.contract import WriteContract
from sphkv.core.devices import upload
from sphkv.core.tiers import RUN_TOKENS
from sphkv.store.order import PageRecoder
from sphkv.store.pages import FlatStates, PageEncoder, plan_write
from sphkv.store.paging import PageBatch, RunPages, plan_runs
from sphkv.store.pool import EncodedPages, LayerChange, PagePool, layer_parts, pages_by_layer
from sphkv.store.sequence import SequenceState

# Dense states of layers that are encoded together, so many bytes.
_TOGETHER_BYTES = 1 << 30


def plan_layers(
    pool: PagePool,
    state: SequenceState,
    first_layer: int,
    contract: WriteContract,
    dense: Sequence[tuple[Tensor, Tensor]],
) -> list[LayerChange]:
    """Encode the first states of consecutive layers, from position 0 on.

    Args:
        pool: Owner of the layouts.
        state: Sequence to extend.
        first_layer: The first of the layers.
        contract: Tier of each head and token of these layers.
        dense: Keys and values of each, ``[heads, tokens, head_dim]``, as many as it decides about.

    Returns:
        The new pages of each layer.
    """
    tokens = contract.num_tokens
    is_in_runs = contract.granularity == RUN_TOKENS and tokens % RUN_TOKENS == 0
    kernels = None if isinstance(pool.kernels, PageRecoder) else pool.kernels
    if kernels is None or not is_in_runs:
        positions = torch.arange(tokens)
        return [
            plan_write(
                pool, state, first_layer + at, contract.layer(at), FlatStates(*own), positions
            )
            for at, own in enumerate(dense)
        ]
    # the only wait for the device, which then works on some layers while the host plans others
    run_tiers = contract.tier_id[..., ::RUN_TOKENS].cpu().numpy()
    protected = contract.protected.to(pool.device)
    pending: list[list[EncodedPages]] = [[] for _ in dense]
    step = max(1, _TOGETHER_BYTES // max(1, 2 * dense[0][0].nbytes))
    for first in range(0, len(dense), step):
        own = slice(first, first + step)
        plan = _LayerPlan(pool, state, first_layer + first, dense[own])
        for layer, pages in plan.encode(run_tiers[own], protected[own].flatten(0, 1)):
            pending[first + layer].append(pages)
        # its copy of the states must not outlast the next one's making
        del plan
    return [
        LayerChange(state.tables[first_layer + at], pending=own) for at, own in enumerate(pending)
    ]


class _LayerPlan:
    """Pages of layers that are planned as if all their heads were those of one."""

    def __init__(
        self,
        pool: PagePool,
        state: SequenceState,
        first_layer: int,
        dense: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self._pool, self._codec, self._first_layer = pool, state.codec, first_layer
        self._num_heads = pool.config.geometry.num_kv_heads
        keys, values = zip(*dense, strict=True)
        self._states = FlatStates(torch.cat(keys).flatten(0, 1), torch.cat(values).flatten(0, 1))

    def _plan(self, run_tiers: NDArray[np.uint8]) -> list[RunPages]:
        """Pages of every tier; heads count through those of all layers here."""
        config, plans = self._pool.config, list[RunPages]()
        for tier_id, tier in enumerate(config.tiers):
            if tier.kind != "drop":
                plans += plan_runs(
                    run_tiers.reshape(-1, run_tiers.shape[-1]),
                    tier_id=tier_id,
                    page_tokens=tier.page_tokens,
                    as_runs=config.is_in_runs(tier_id),
                )
        return plans

    def encode(
        self, run_tiers: NDArray[np.uint8], protected: Tensor
    ) -> Iterator[tuple[int, EncodedPages]]:
        """Pages of every tier and layer; layers count from the first one here.

        Args:
            run_tiers: ``[layers, heads, runs]`` tier of every run.
            protected: ``[layers * heads, tokens]`` bool beside the states.
        """
        plans = self._plan(run_tiers)
        if not plans:
            return
        words = [plan.words() for plan in plans]
        every = upload(np.concatenate(words), self._pool.device)
        split = every.split([len(each) for each in words])
        for plan, own in zip(plans, split, strict=True):
            batch = plan.batch(own, protected, 0)
            pages = torch.cat([*self._encode(plan, batch)])
            key = (plan.tier_id, plan.position_mode)
            counts = plan.counts * RUN_TOKENS
            yield from pages_by_layer(key, plan.head_ids, counts, pages, self._num_heads)

    def _encode(self, plan: RunPages, batch: PageBatch) -> Iterator[Tensor]:
        """Pages of one layout, some at a time."""
        pool = self._pool
        layout = pool.layout((plan.tier_id, plan.position_mode))
        encoder = PageEncoder.of(pool, self._first_layer, self._codec)
        assert encoder.kernels is not None
        joins = encoder.kernels.joins_layers(layout, self._codec, pool.device)
        first_head, is_full = self._first_layer * self._num_heads, batch.is_full
        for at in self._pieces(plan, encoder.most_pages, apart=layout.tier.is_coded and not joins):
            rows, source = batch.rows.select(at), batch.source[at]
            states = (self._states.keys[source], self._states.values[source])
            if not is_full:
                live = rows.live()[:, :, None]
                states = (states[0] * live, states[1] * live)
            heads = batch.head_ids[at]
            if joins:
                half = (states[0].to(torch.bfloat16), states[1].to(torch.bfloat16))
                yield encoder.kernels.encode_layers(
                    layout, self._codec, half, rows, heads + first_head
                )
                continue
            layer = int(plan.head_ids[at.start]) // self._num_heads
            own = PageEncoder.of(pool, self._first_layer + layer, self._codec)
            yield own.encode(layout, states, rows, heads - layer * self._num_heads)

    def _pieces(self, plan: RunPages, most: int, *, apart: bool) -> Iterator[slice]:
        """Pages to be encoded at once: of one layer each where kernels take no more."""
        whole = [slice(0, len(plan.head_ids))]
        if apart:
            whole = [part for _, part in layer_parts(plan.head_ids, self._num_heads)]
        for part in whole:
            for first in range(part.start, part.stop, most):
                yield slice(first, min(first + most, part.stop))
