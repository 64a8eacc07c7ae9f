# SPDX-License-Identifier: Apache-2.0
"""The vLLM worker that serves from coded blocks, or does not serve.

vLLM resolves the worker class by its name in every worker process, so a package that is missing
or broken stops the server instead of leaving stock attention in place.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform


def worker_class(platform: Any) -> type:
    """The worker of a platform.

    Raises:
        ValueError: There is none.
    """
    if platform.is_cpu():
        from sphkv.integrations.vllm.cpu_worker import CpuWorker

        return CpuWorker
    if platform.is_cuda():
        from sphkv.integrations.vllm.cuda.worker import CudaWorker

        return CudaWorker
    raise ValueError(
        f"coded blocks are served on CPUs and NVIDIA GPUs, and this vLLM runs on "
        f"{platform.device_type!r}"
    )


SphericalWorker = worker_class(current_platform)
