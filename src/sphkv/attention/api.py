# SPDX-License-Identifier: Apache-2.0
"""Decode attention over a paged cache, and which backend runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sphkv.attention.partial import PartialAttention, merge_partials
from sphkv.attention.reference import ReferenceBackend
from sphkv.attention.request import AttentionOptions, DecodeBackend, DecodeRequest
from sphkv.errors import BackendUnavailableError
from sphkv.store.store import PageStore

_log = logging.getLogger(__name__)


def _native() -> DecodeBackend:
    from sphkv.attention.native.backend import NativeBackend

    return NativeBackend()


def _triton() -> DecodeBackend:
    from sphkv.attention.triton.backend import TritonBackend

    return TritonBackend()


def _cuda() -> DecodeBackend:
    from sphkv.attention.cuda.backend import CudaBackend

    return CudaBackend()


BACKENDS: dict[str, Callable[[], DecodeBackend]] = {
    "reference": ReferenceBackend,
    "native": _native,
    "triton": _triton,
    "cuda": _cuda,
}
_FASTEST_FIRST = {"cpu": ("native",), "cuda": ("cuda", "triton")}


def get_backend(name: str = "auto", device: torch.device | str = "cpu") -> DecodeBackend:
    """The backend of that name; ``auto`` takes the fastest one that can run and logs a fallback.

    Args:
        name: ``"auto"`` or a key of ``BACKENDS``.
        device: Where the store lives; only ``auto`` looks at it.

    Raises:
        ValueError: No backend has this name.
        BackendUnavailableError: It exists but cannot run here; only ``auto`` falls back.
    """
    if name == "auto":
        return _fastest(torch.device(device).type)
    if name not in BACKENDS:
        raise ValueError(f"backend must be auto or one of {sorted(BACKENDS)}, got {name!r}")
    try:
        return BACKENDS[name]()
    except (ImportError, BackendUnavailableError) as error:
        raise BackendUnavailableError(f"backend {name!r} cannot run here: {error}") from error


def _fastest(device_type: str) -> DecodeBackend:
    for name in _FASTEST_FIRST.get(device_type, ()):
        try:
            return BACKENDS[name]()
        except (ImportError, BackendUnavailableError) as error:
            _log.warning("decode cannot run on the %s backend: %s", name, error)
    _log.warning("decode runs on the slow reference backend")
    return ReferenceBackend()


def decode_attention(
    request: DecodeRequest,
    *,
    sink_logits: Tensor | None = None,
    backend: DecodeBackend | None = None,
) -> Tensor:
    """One decode step of one sequence and layer.

    Args:
        request: Queries and cache.
        sink_logits: ``[query_heads]`` learned logits that take weight and give no value.
        backend: What runs it; the reference if None.

    Returns:
        ``[query_heads, queries, head_dim]`` float32; zero where a query sees no key.
    """
    partial = (backend or ReferenceBackend()).attend(request)
    if sink_logits is not None:
        heads = request.query.shape[0]
        if tuple(sink_logits.shape) != (heads,):
            raise ValueError(f"sink_logits must be [{heads}], got {tuple(sink_logits.shape)}")
        partial = merge_partials([partial, PartialAttention.of_sinks(sink_logits, partial)])
    return partial.output


def decode_attention_batch(
    store: PageStore,
    sequences: Sequence[int],
    layer: int,
    query: Tensor,
    options: AttentionOptions,
    *,
    sink_logits: Tensor | None = None,
    backend: DecodeBackend | None = None,
) -> Tensor:
    """One decode step of a ragged batch: every sequence has its own length.

    Args:
        store: Pages and tails.
        sequences: Sequence ids, one per batch row.
        layer: Layer to read.
        query: ``[batch, query_heads, queries, head_dim]`` after RoPE, the newest tokens of
            each sequence, whose keys are in the store already.
        options: Scale, soft-cap and window.
        sink_logits: ``[query_heads]`` learned sink logits.
        backend: What runs it; the reference if None.

    Returns:
        ``[batch, query_heads, queries, head_dim]`` float32.
    """
    if len(sequences) != query.shape[0]:
        raise ValueError(f"{len(sequences)} sequences for a batch of {query.shape[0]}")
    outputs = []
    for row, sequence in enumerate(sequences):
        end = store.num_tokens(sequence, layer)
        positions = torch.arange(end - query.shape[2], end, device=query.device)
        request = DecodeRequest(store, sequence, layer, query[row], positions, options)
        outputs.append(decode_attention(request, sink_logits=sink_logits, backend=backend))
    return torch.stack(outputs)
