# SPDX-License-Identifier: Apache-2.0
"""A stock vLLM CPU worker whose cached keys and values are rounded to fp8 e4m3.

vLLM's own fp8 cache needs AVX-512 on a CPU. This has its rounding, with scale 1 as vLLM has by
default, and stock bytes: it says what fp8 costs in text, not what it saves.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def _rounded(x: Tensor) -> Tensor:
    return x.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).to(x.dtype)


class RoundingImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Rounds what is written."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        super().do_kv_cache_update(layer, _rounded(key), _rounded(value), kv_cache, slot_mapping)


class RoundingBackend(CPUAttentionBackend):  # type: ignore[misc]
    """Stock but for its implementation."""

    @staticmethod
    def get_impl_cls() -> type[RoundingImpl]:
        return RoundingImpl


class RoundingWorker(CPUWorker):  # type: ignore[misc]
    """Registers the backend, then is stock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        path = f"{RoundingBackend.__module__}.{RoundingBackend.__qualname__}"
        register_backend(AttentionBackendEnum.CPU_ATTN, path)
        super().__init__(*args, **kwargs)
