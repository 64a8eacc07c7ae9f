# SPDX-License-Identifier: Apache-2.0
"""Decode attention over a paged cache, and which backend runs it."""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sphkv.attention.partial import PartialAttention, merge_partials
from sphkv.attention.reference import ReferenceBackend
from sphkv.attention.request import BatchRequest, DecodeBackend, DecodeRequest
from sphkv.core.prompt_rows import RowKernels
from sphkv.errors import BackendUnavailableError, CudaUnavailableError

if TYPE_CHECKING:
    from sphkv.attention.triton.prompt_rows import TritonRows

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
        names = ["auto", *BACKENDS]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"backend must be one of {names}, got {name!r}{hint}")
    try:
        return BACKENDS[name]()
    except (ImportError, CudaUnavailableError) as error:
        raise BackendUnavailableError(f"backend {name!r} cannot run here: {error}") from error


def _fastest(device_type: str) -> DecodeBackend:
    for name in _FASTEST_FIRST.get(device_type, ()):
        try:
            return BACKENDS[name]()
        except (ImportError, CudaUnavailableError) as error:
            _log.warning("decode cannot run on the %s backend: %s", name, error)
    _log.warning("decode runs on the slow reference backend")
    return ReferenceBackend()


def row_kernels(device: torch.device | str) -> RowKernels | None:
    """What streams rows of a prompt's attention on a device; None leaves them to torch."""
    device = torch.device(device)
    rows = _gpu_rows() if device.type == "cuda" else None
    return rows if rows is not None and rows.serves(device) else None


@functools.cache
def _gpu_rows() -> TritonRows | None:
    """Kernels of all GPUs of the process."""
    try:
        from sphkv.attention.triton.prompt_rows import TritonRows
    except ImportError as error:
        _log.info("rows of prompts are whole matrices: %s", error)
        return None
    return TritonRows()


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
        partial = _add_sinks(partial, sink_logits, heads_dim=0)
    return partial.output


def decode_rows(
    request: BatchRequest,
    *,
    sink_logits: Tensor | None = None,
    backend: DecodeBackend | None = None,
) -> Tensor:
    """One decode step of one layer of a ragged batch: every sequence has its own length.

    Args:
        request: One query per row, and the cache.
        sink_logits: ``[query_heads]`` learned logits that take weight and give no value.
        backend: What runs it; the reference if None.

    Returns:
        ``[rows, query_heads, head_dim]`` float32; zero where a query sees no key.
    """
    partial = (backend or ReferenceBackend()).attend_rows(request)
    if sink_logits is not None:
        partial = _add_sinks(partial, sink_logits, heads_dim=1)
    return partial.output


def _add_sinks(
    partial: PartialAttention, sink_logits: Tensor, *, heads_dim: int
) -> PartialAttention:
    num_heads = partial.lse.shape[heads_dim]
    if tuple(sink_logits.shape) != (num_heads,):
        raise ValueError(f"sink_logits must be [{num_heads}], got {tuple(sink_logits.shape)}")
    sinks = PartialAttention.of_sinks(sink_logits, partial, heads_dim=heads_dim)
    return merge_partials([partial, sinks])
