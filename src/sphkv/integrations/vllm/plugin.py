# SPDX-License-Identifier: Apache-2.0
"""What vLLM calls in every process through the entry point ``vllm.general_plugins``.

vLLM only logs a plugin that fails to *load* and then serves stock attention, so this module
imports nothing that can be missing. An exception out of ``register`` itself stops the process.
"""

BACKEND_PATH = "sphkv.integrations.vllm.backend.SphericalBackend"
WORKER_PATH = "sphkv.integrations.vllm.worker.SphericalWorker"


def register() -> None:
    """Put our backend in the place of vLLM's CPU attention; may be called any number of times.

    Without ``additional_config["sphkv"]`` the backend hands everything on to the stock one.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND_PATH)
