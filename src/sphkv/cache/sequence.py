# SPDX-License-Identifier: Apache-2.0
"""One sequence of a batch: its states in the page store, and how they stay resident."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from sphkv.attention.api import decode_attention
from sphkv.attention.partial import PartialAttention, attend_logits, merge_partials
from sphkv.attention.reference import mask_logits
from sphkv.attention.request import AttentionOptions, DecodeBackend, DecodeRequest
from sphkv.cache.config import CacheConfig, ResidencyPlan
from sphkv.cache.residency import Residency, window_start
from sphkv.store.store import PageStore

# Queries given to a backend at once: bounds the logits it holds.
_QUERY_BLOCK = 128


class CacheSequence:
    """A sequence whose older tokens are packed angle codes.

    Attributes:
        sequence: Its id in the store.
        store: Pages and tails, perhaps of other sequences too.
        residency: Where its states go.
        backend: What runs decode attention.
        first_kept: First position each layer still stores; above 0 behind sliding windows.
    """

    def __init__(
        self,
        config: CacheConfig,
        plan: ResidencyPlan,
        store: PageStore,
        sequence: int,
        backend: DecodeBackend,
        residency: Residency,
        *,
        orphans: list[int] | None = None,
    ) -> None:
        """Take over a sequence that is in the store.

        Args:
            config: The cache.
            plan: How states stay resident.
            store: Pages and tails.
            sequence: Id in the store.
            backend: What runs decode attention.
            residency: Where its states go.
            orphans: Sequences of the store whose owners are gone; one list for all forks.
        """
        self.sequence = sequence
        self.store = store
        self.residency = residency
        self._config = config
        self._plan = plan
        self.backend = backend
        self.first_kept = [0] * config.geometry.num_layers
        self._versions = [-1] * config.geometry.num_layers
        self._waiting: dict[int, tuple[Tensor, Tensor]] = {}
        # A fork that nobody holds any more must not keep its pages. It may go at any moment, also
        # inside a step of the store, so the next pass frees them.
        self._orphans = [] if orphans is None else orphans
        self._orphan = weakref.finalize(self, self._orphans.append, sequence)
        self._orphan.atexit = False

    def fork(self) -> CacheSequence:
        """A sequence of its own with the same states; pages are shared."""
        sequence = max(self.store.sequences) + 1
        self.store.raise_limit(self._plan.max_bytes or 0)
        self.store.fork(self.sequence, sequence)
        residency = self.residency.fork(self.store, sequence)
        other = CacheSequence(
            self._config,
            self._plan,
            self.store,
            sequence,
            self.backend,
            residency,
            orphans=self._orphans,
        )
        other.first_kept = list(self.first_kept)
        return other

    def free(self) -> None:
        """Give all states back."""
        self._orphan.detach()
        self._free(self.sequence)

    def free_orphans(self) -> None:
        """Give back what forks held that nobody holds any more."""
        while self._orphans:
            self._free(self._orphans.pop())

    def _free(self, sequence: int) -> None:
        self.store.free(sequence)
        self.store.raise_limit(-(self._plan.max_bytes or 0))

    def num_tokens(self, layer: int = 0) -> int:
        """Tokens a layer has been given."""
        return self.store.num_tokens(self.sequence, layer)

    def room(self) -> int:
        """Tokens that the tail takes before a page must seal."""
        tail = self.store.open_tail(self.sequence, 0)
        return self.store.config.tail_capacity - (0 if tail is None else tail.num_tokens)

    def take_prompt(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Take a layer of the prompt; see ``Residency.take_prompt``."""
        self.residency.take_prompt(layer, query, keys, values)
        self.note_prompt(layer, keys.shape[1])

    def end_prompt(self) -> None:
        """The pass with the prompt is over; see ``Residency.end_prompt``."""
        self.residency.end_prompt()

    def note_prompt(self, layer: int, tokens: int) -> None:
        """A layer of a prompt of so many tokens is there."""
        self.first_kept[layer] = window_start(self._config, self._plan, layer, tokens)

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        options: AttentionOptions,
        *,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Attend with new tokens to pages and tail, dense among themselves, and store them.

        Args:
            layer: The layer.
            query: ``[query_heads, tokens, head_dim]`` after RoPE.
            keys: ``[kv_heads, tokens, head_dim]`` after RoPE.
            values: ``[kv_heads, tokens, head_dim]``.
            options: Scale, soft-cap and window.
            sink_logits: ``[query_heads]`` learned sink logits.

        Returns:
            ``[query_heads, tokens, head_dim]`` float32.
        """
        num_new = query.shape[1]
        start = self.num_tokens(layer)
        if num_new <= self.room_of(layer):
            # all of them stay in the tail, where they are dense; one pass reads pages and tail
            self.store.append(self.sequence, layer, keys, values)
            request = self._request(layer, query, start, options)
            return decode_attention(request, sink_logits=sink_logits, backend=self.backend)
        past = [
            self.backend.attend(self._request(layer, part, start + at, options))
            for at, part in _parts(query)
        ]
        merged = merge_partials(
            [
                PartialAttention(
                    torch.cat([part.output for part in past], 1),
                    torch.cat([part.lse for part in past], 1),
                ),
                _attend_chunk(query, keys, values, options),
            ]
        )
        if sink_logits is not None:
            merged = merge_partials([merged, PartialAttention.of_sinks(sink_logits, merged)])
        if self.residency.waits_for_pass:
            self._waiting[layer] = (keys, values)
        else:
            self.store.append(self.sequence, layer, keys, values)
        return merged.output

    def room_of(self, layer: int) -> int:
        """Tokens that the tail of one layer takes."""
        tail = self.store.tail(self.sequence, layer)
        return self.store.config.tail_capacity - tail.num_tokens

    def finish_pass(self) -> None:
        """Store what waited for the end of a pass, as much at a time as the tails take."""
        waiting, self._waiting = self._waiting, {}
        if waiting:
            total, at = waiting[0][0].shape[1], 0
            while at < total:
                if self.room() == 0 and self.residency.settle(1):
                    self.store.make_room([self.sequence], 1)
                stop = min(total, at + self.room())
                for layer, (keys, values) in sorted(waiting.items()):
                    self.store.append(self.sequence, layer, keys[:, at:stop], values[:, at:stop])
                at = stop
        self.forget_outside_windows()

    def forget_waiting(self) -> None:
        """A pass failed: what waited for its end is not stored."""
        self._waiting.clear()

    def _request(
        self, layer: int, query: Tensor, first: int, options: AttentionOptions
    ) -> DecodeRequest:
        positions = torch.arange(first, first + query.shape[1])
        return DecodeRequest(self.store, self.sequence, layer, query, positions, options)

    def forget_outside_windows(self) -> None:
        """Drop pages that no later token of a windowed layer can see."""
        for layer, window in enumerate(self._config.windows):
            table = self.store.table(self.sequence, layer)
            if window is None or table.version == self._versions[layer]:
                continue
            oldest = self.num_tokens(layer) - window - self._plan.window_margin
            if oldest > self.first_kept[layer]:
                self._drop_before(layer, oldest)
            self._versions[layer] = self.store.table(self.sequence, layer).version

    def _drop_before(self, layer: int, oldest: int) -> None:
        gone = []
        first = self.store.tail(self.sequence, layer).first_position
        for group in self.store.pages(self.sequence, layer):
            view = self.store.view(group)
            positions, live = view.positions(), view.live()
            last = torch.where(live, positions, -1).amax(1)
            gone.append(group.flat_ids()[last < oldest])
            kept = last >= oldest
            if bool(kept.any()):
                first = min(first, int(positions[kept][:, 0].min()))
        self.store.drop(self.sequence, layer, torch.cat(gone).cpu())
        self.first_kept[layer] = first

    def check_crop(self, num_tokens: int) -> None:
        """Raise if a layer no longer has what the token after a crop must see."""
        for layer, window in enumerate(self._config.windows):
            if window is None or num_tokens >= self.num_tokens(layer):
                continue
            needed = max(0, num_tokens + 1 - window)
            if self.first_kept[layer] > needed:
                raise ValueError(
                    f"cannot crop to {num_tokens} tokens: layer {layer} keeps a window of {window} "
                    f"tokens and has given up those before {self.first_kept[layer]}"
                )

    def crop(self, num_tokens: int) -> None:
        """Forget the tokens from ``num_tokens`` on."""
        self.check_crop(num_tokens)
        if num_tokens < self.num_tokens() or num_tokens < max(
            self.num_tokens(layer) for layer in range(self._config.geometry.num_layers)
        ):
            is_into_pages = num_tokens < self.store.tail(self.sequence, 0).first_position
            self.store.crop(self.sequence, num_tokens)
            if is_into_pages:
                # what is left may be a page in each slab, and slabs are what takes memory
                self.store.compact()
            self.residency.crop(num_tokens)

    def save(self, path: Path, *, codec_hash: str) -> None:
        """Write the states to one file; see ``PageStore.save``."""
        self.store.save(self.sequence, path, codec_hash=codec_hash)


def _parts(query: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Queries, so many at once as a backend takes, with the place of each part's first."""
    return ((at, query[:, at : at + _QUERY_BLOCK]) for at in range(0, query.shape[1], _QUERY_BLOCK))


def _attend_chunk(
    query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> PartialAttention:
    """Dense causal attention of new tokens among themselves."""
    kv_heads, num_new, head_dim = keys.shape
    grouped = query.float().reshape(kv_heads, -1, head_dim) * options.scale
    index = torch.arange(num_new, device=query.device)
    rows = index.repeat(query.shape[0] // kv_heads)
    logits = grouped @ keys.float().transpose(1, 2)
    logits = mask_logits(logits, index.expand(kv_heads, -1), rows, options)
    partial = attend_logits(logits, values.float())
    return PartialAttention(
        partial.output.reshape(query.shape[0], num_new, head_dim),
        partial.lse.reshape(query.shape[0], num_new),
    )
