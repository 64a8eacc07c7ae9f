# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls in every process through the entry point ``vllm.general_plugins``.

vLLM only logs a plugin that fails to *load* and then serves stock attention, so this module
imports nothing that can be missing. An exception out of ``register`` itself stops the process.
"""

BACKEND_PATH = "sphkv.integrations.vllm.backend.SphericalBackend"
CUDA_BACKEND_PATH = "sphkv.integrations.vllm.cuda.backend.CudaSphericalBackend"
WORKER_PATH = "sphkv.integrations.vllm.worker.SphericalWorker"
TESTED_VERSIONS = ("0.32",)
"""Series of vLLM releases that the tests have run with."""


def register() -> None:
    """Put our backend in the place of vLLM's CPU attention, and of its custom one on GPUs.

    It may be called any number of times. Without ``additional_config["sphkv"]`` the backend on CPUs
    hands everything on to the stock one; on GPUs nobody asks for it.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND_PATH)
    register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND_PATH)


def check_version(version: str) -> None:
    """Refuse a vLLM whose insides nobody has looked at.

    Raises:
        ValueError: Its version is outside the tested range.
    """
    if ".".join(version.split(".")[:2]) not in TESTED_VERSIONS:
        raise ValueError(
            f"vLLM {version} is not supported: coded blocks were tested with "
            f"{', '.join(f'{series}.x' for series in TESTED_VERSIONS)}"
        )
