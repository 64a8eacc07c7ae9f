# SPDX-License-Identifier: Apache-2.0
"""One sequence in the page store: sinks, coded pages and the dense tail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from sphkv.attention.api import decode_attention
from sphkv.attention.partial import PartialAttention, attend_logits, merge_partials
from sphkv.attention.reference import mask_logits
from sphkv.attention.request import AttentionOptions, DecodeBackend, DecodeRequest
from sphkv.cache.plan import CacheConfig
from sphkv.core.contract import StateCodec
from sphkv.store.append import Span
from sphkv.store.ledger import ByteLedger
from sphkv.store.order import PageCodec, PageOrder
from sphkv.store.store import PageStore

# Queries given to a backend at once: bounds the logits it holds.
_QUERY_BLOCK = 128


def open_store(
    config: CacheConfig, num_sequences: int, codec: StateCodec | None, backend: DecodeBackend
) -> PageStore:
    """An empty store for a batch, its pages in the order the backend wants."""
    order: PageOrder | None = getattr(backend, "order", None)
    kernels: PageCodec | None = getattr(backend, "page_codec", None)
    return PageStore(config.store_config(num_sequences), codec, order=order, kernels=kernels)


class SphericalSequence:
    """A sequence whose older tokens are packed angle codes; a ``CacheMethod``.

    Attributes:
        name: Label in reports.
        sequence: Its id in the store.
        first_kept: First position each layer still stores; above 0 behind sliding windows.
    """

    name = "spherical"

    def __init__(
        self, config: CacheConfig, store: PageStore, sequence: int, backend: DecodeBackend
    ) -> None:
        """Take over a sequence that is in the store."""
        self.sequence = sequence
        self._config = config
        self._store = store
        self._backend = backend
        self.first_kept = [0] * config.geometry.num_layers
        self._versions = [-1] * config.geometry.num_layers

    def fork(self) -> SphericalSequence:
        """A sequence of its own with the same states; pages are shared."""
        sequence = max(self._store.sequences) + 1
        self._store.fork(self.sequence, sequence)
        other = SphericalSequence(self._config, self._store, sequence, self._backend)
        other.first_kept = list(self.first_kept)
        return other

    def free(self) -> None:
        """Give all states back."""
        self._store.free(self.sequence)

    def num_tokens(self, layer: int = 0) -> int:
        """Tokens a layer has been given."""
        return self._store.num_tokens(self.sequence, layer)

    def resident_bytes(self) -> int:
        """Bytes of the whole store, which other sequences may share."""
        return self._store.live_bytes

    def ledger(self) -> ByteLedger:
        """The same bytes by kind."""
        return self._store.ledger()

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, *, query: Tensor | None = None
    ) -> None:
        """Store a prompt: sinks dense, whole pages coded, the rest in the tail.

        Of a layer with a sliding window only what its next token can see is stored.
        """
        _prefill([self], layer, keys[None], values[None])

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
        """Attend with new tokens, dense among themselves, to pages and tail; then store them."""
        num_new = query.shape[1]
        # so few stay in the tail, where they are dense; one pass reads pages and tail
        if num_new <= self._config.recent_tokens:
            self._store.append(self.sequence, layer, keys, values)
            request = self._request(layer, query, self.num_tokens(layer) - num_new, options)
            return decode_attention(request, sink_logits=sink_logits, backend=self._backend)
        start = self.num_tokens(layer)
        past = [
            self._backend.attend(self._request(layer, part, start + at, options))
            for at, part in zip(
                range(0, num_new, _QUERY_BLOCK), query.split(_QUERY_BLOCK, dim=1), strict=True
            )
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
        self._store.append(self.sequence, layer, keys, values)
        return merged.output

    def _request(
        self, layer: int, query: Tensor, first: int, options: AttentionOptions
    ) -> DecodeRequest:
        positions = torch.arange(first, first + query.shape[1], device=query.device)
        return DecodeRequest(self._store, self.sequence, layer, query, positions, options)

    def forget_outside_windows(self) -> None:
        """Drop pages that no later token of a windowed layer can see."""
        for layer, window in enumerate(self._config.windows):
            table = self._store.table(self.sequence, layer)
            if window is None or table.version == self._versions[layer]:
                continue
            oldest = self.num_tokens(layer) - window - self._config.window_margin
            if oldest > self.first_kept[layer]:
                self._drop_before(layer, oldest)
            self._versions[layer] = self._store.table(self.sequence, layer).version

    def _drop_before(self, layer: int, oldest: int) -> None:
        gone = []
        first = self._store.tail(self.sequence, layer).first_position
        for group in self._store.pages(self.sequence, layer):
            view = self._store.view(group)
            positions, live = view.positions(), view.live()
            last = torch.where(live, positions, -1).amax(1)
            gone.append(group.flat_ids()[last < oldest])
            kept = last >= oldest
            if bool(kept.any()):
                first = min(first, int(positions[kept][:, 0].min()))
        self._store.drop(self.sequence, layer, torch.cat(gone).cpu())
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

    def save(self, path: Path, *, codec_hash: str) -> None:
        """Write the sequence to one file; see ``PageStore.save``."""
        self._store.save(self.sequence, path, codec_hash=codec_hash)

    def crop(self, num_tokens: int) -> None:
        """Forget the tokens from ``num_tokens`` on."""
        self.check_crop(num_tokens)
        self._store.crop(self.sequence, num_tokens)


def prefill_rows(
    rows: Sequence[SphericalSequence], layer: int, keys: Tensor, values: Tensor, is_real: Tensor
) -> None:
    """``prefill`` of the sequences of a padded batch, at once where there is no padding.

    Args:
        rows: The sequences, of one store.
        layer: The layer.
        keys: ``[rows, kv_heads, slots, head_dim]`` after RoPE.
        values: ``[rows, kv_heads, slots, head_dim]``.
        is_real: ``[rows, slots]`` bool on the CPU: which slots hold tokens.
    """
    if bool(is_real.all()):
        _prefill(rows, layer, keys, values)
        return
    for row, real, row_keys, row_values in zip(rows, is_real, keys, values, strict=True):
        at = real.nonzero()[:, 0].to(keys.device)
        row.prefill(layer, row_keys[:, at], row_values[:, at])


def _prefill(rows: Sequence[SphericalSequence], layer: int, keys: Tensor, values: Tensor) -> None:
    """Store the prompts of sequences of one length, ``[rows, kv_heads, tokens, head_dim]``."""
    config, store, tokens = rows[0]._config, rows[0]._store, keys.shape[2]
    window = config.windows[layer]
    start = 0 if window is None else max(0, tokens - window - config.window_margin)
    sinks = min(config.sink_tokens, tokens) if start == 0 else 0
    page = config.spec.page_tokens
    num_coded = max(0, (tokens - start - sinks - config.recent_tokens) // page) * page
    # a window leaves its first tokens behind, so only full attention protects them
    spans = [Span(config.tiers.dense_id, 0, sinks, window is None)] if sinks else []
    if num_coded:
        spans.append(Span(config.tiers.id_of(config.tier), sinks, sinks + num_coded))
    sequences = [row.sequence for row in rows]
    states = (keys[:, :, start:], values[:, :, start:])
    store.write_prompt(sequences, layer, spans, *states, first_position=start)
    for row in rows:
        row.first_kept[layer] = start


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
