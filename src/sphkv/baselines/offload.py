# SPDX-License-Identifier: Apache-2.0
"""CPU offload: every token is kept, most pages in host memory, fetched for each step.

The plain form of what FlexGen (Sheng et al., 2023, "FlexGen: High-Throughput Generative Inference
of Large Language Models with a Single GPU") does to the cache. The newest pages stay on the device,
as many as the budget allows; each step streams all older pages of a layer through the device, so
attention is exact and the price is the bytes moved. A step reads every page once, and for such a
scan least-recently-used replacement would never hit; keeping a fixed set resident is the best any
rule can do.

Deviations: both memories are the same here, so only the bytes are accounted, not their transfer
time; new tokens push the oldest device page to the host as soon as it is needed. The layer being
streamed counts in ``peak_bytes``, not in ``resident_bytes``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sphkv.baselines.dense import KeepAll
from sphkv.baselines.eviction import EvictionCache
from sphkv.baselines.held_states import HeldStates, Tagged, join_states
from sphkv.baselines.paged_states import PAGE_TOKENS, PagedStates
from sphkv.core.geometry import KVGeometry


class _Offload(KeepAll):
    name = "offload"
    evicts_in_decode = True


class OffloadCache(EvictionCache):
    """Device pages within the budget, host pages without one.

    Attributes:
        moved_bytes: Bytes of pages moved so far between host and device, either way.
    """

    def __init__(self, geometry: KVGeometry, budget: float) -> None:
        """Start empty."""
        super().__init__(geometry, _Offload(), budget)
        self._host: list[PagedStates | None] = [None] * geometry.num_layers
        self.moved_bytes = 0

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, *, query: Tensor | None = None
    ) -> None:
        """Keep the newest pages on the device and move the others to the host."""
        if query is None:
            query = keys.new_zeros(self.geometry.num_query_heads, *keys.shape[1:])
        super().prefill(layer, keys, values, query=query)

    def _store_prompt(
        self, layer: int, keys: Tensor, values: Tensor, scores: Tensor, num_kept: int
    ) -> None:
        heads, tokens, dim = keys.shape
        kept = tokens
        if num_kept < tokens:
            # whole pages go to the host, so the device keeps up to a page less than it may
            kept = tokens - -(-(tokens - num_kept) // PAGE_TOKENS) * PAGE_TOKENS
        positions = torch.arange(tokens, device=keys.device).expand(heads, tokens)
        device = PagedStates(heads, dim, device=keys.device)
        host = PagedStates(heads, dim, device="cpu")
        old = slice(0, tokens - kept)
        host.append(keys[:, old].cpu(), values[:, old].cpu(), positions[:, old].cpu())
        new = slice(tokens - kept, tokens)
        device.append(keys[:, new], values[:, new], positions[:, new])
        self._layers[layer], self._host[layer] = device, host
        self._given[layer] = tokens
        self.moved_bytes += _page_bytes(host)

    def _make_room(self, layer: int, wanted: int) -> int:
        device, host = self._pages(layer), self._host_pages(layer)
        room = self._room[layer] + PAGE_TOKENS - int(device.counts[0])
        if room <= 0:
            held = device.read()
            oldest = slice(0, PAGE_TOKENS)
            before = _page_bytes(host)
            host.append(
                held.keys[:, oldest].cpu(),
                held.values[:, oldest].cpu(),
                held.positions[:, oldest].cpu(),
            )
            keep = held.positions >= int(held.positions[0, PAGE_TOKENS])
            device.keep(keep)
            self.moved_bytes += _page_bytes(host) - before
            room = PAGE_TOKENS
        return min(room, wanted)

    def read(self, layer: int) -> HeldStates:
        """Host pages, then device pages."""
        host, device = self._host_pages(layer).read(), self._pages(layer).read()
        where = device.keys.device
        moved = HeldStates(host.keys.to(where), host.values.to(where), host.positions.to(where))
        return join_states([moved, device])

    def _attend_part(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, *rest: object
    ) -> Tensor:
        # each token is a step of its own and streams the host pages once
        self.moved_bytes += _page_bytes(self._host_pages(layer)) * keys.shape[1]
        return super()._attend_part(layer, query, keys, values, *rest)  # type: ignore[arg-type]

    def crop(self, num_tokens: int) -> None:
        """Forget the tokens from ``num_tokens`` on, wherever they are."""
        for layer, host in enumerate(self._host):
            if host is None or num_tokens >= self._given[layer]:
                continue
            host.keep(host.read().positions < num_tokens)
            device = self._pages(layer)
            device.keep(device.read().positions < num_tokens)
            self._given[layer] = num_tokens

    def _host_pages(self, layer: int) -> PagedStates:
        host = self._host[layer]
        if host is None:
            raise ValueError(f"layer {layer} has no prompt yet")
        return host

    def host_tensors(self) -> list[Tagged]:
        """Live tensors in host memory, which ``tensors`` and the ledger leave out."""
        return [tagged for host in self._host if host is not None for tagged in host.tensors()]

    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(tensor.nbytes for _, tensor in self.host_tensors())

    def peak_bytes(self) -> int:
        """Resident bytes and the largest layer that a step brings in."""
        layers = [_page_bytes(host) for host in self._host if host is not None]
        return self.resident_bytes() + max(layers, default=0)


def _page_bytes(pages: PagedStates) -> int:
    """Bytes of whole pages, without the table that points to them."""
    return sum(tensor.nbytes for kind, tensor in pages.tensors() if kind != "ptr")
