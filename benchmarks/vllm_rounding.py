# SPDX-License-Identifier: Apache-2.0
"""A stock vLLM CPU worker whose cached keys and values are rounded.

vLLM's own fp8 cache needs AVX-512 on a CPU, and its bfloat16 kernels an ARM processor that has
bfloat16. This has the rounding of either, with scale 1 as vLLM has by default, and stock bytes:
it says what a cache type costs in text, not what it saves.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker


class RoundingImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Rounds what is written to the type that ``additional_config["round_to"]`` names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dtype = getattr(torch, get_current_vllm_config().additional_config["round_to"])

    def _rounded(self, x: Tensor) -> Tensor:
        largest = torch.finfo(self._dtype).max
        return x.clamp(-largest, largest).to(self._dtype).to(x.dtype)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        states = self._rounded(key), self._rounded(value)
        super().do_kv_cache_update(layer, *states, kv_cache, slot_mapping)


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
