# SPDX-License-Identifier: Apache-2.0
"""The vLLM worker that serves from coded blocks on an NVIDIA GPU."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_worker import Worker

from sphkv.attention.cuda.geometry import PAGE_TOKENS
from sphkv.integrations.vllm.coded_worker import CodedWorker, read_options, stop_on_nans
from sphkv.integrations.vllm.cuda.backend import CudaSphericalImpl
from sphkv.integrations.vllm.cuda.runtime import CudaRuntime
from sphkv.integrations.vllm.options import SCHEDULER_PATH
from sphkv.integrations.vllm.runtime import activate

_log = init_logger("vllm.sphkv")
_VALUE_BITS = 4


class CudaWorker(CodedWorker, Worker):  # type: ignore[misc]
    """A GPU worker with coded blocks."""

    _impl_class = CudaSphericalImpl

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self._options = read_options(vllm_config, value_bits=_VALUE_BITS)
        stop_on_nans()
        if not vllm_config.use_v2_model_runner:
            raise ValueError("coded blocks on a GPU need vLLM's model runner V2")
        cache = vllm_config.cache_config
        if cache.user_specified_block_size and cache.block_size != PAGE_TOKENS:
            raise ValueError(f"block size must be {PAGE_TOKENS} on a GPU, got {cache.block_size}")
        attention = vllm_config.attention_config
        if attention.backend not in (None, AttentionBackendEnum.CUSTOM):
            raise ValueError(
                f"attention backend {attention.backend.name} does not read coded blocks; leave "
                "--attention-backend out"
            )
        attention.backend = AttentionBackendEnum.CUSTOM
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        """Find the GPU, then see whether its kernels can serve the model."""
        super().init_device()
        model, config = self.model_config, self.vllm_config
        self._runtime = CudaRuntime(
            self._options,
            num_kv_heads=model.get_num_kv_heads(self.parallel_config),
            num_query_heads=model.get_num_attention_heads(self.parallel_config),
            head_dim=model.get_head_size(),
            max_sequences=config.scheduler_config.max_num_seqs,
            max_tokens=model.max_model_len,
            device=self.device,
            keeps_prefixes=bool(config.cache_config.enable_prefix_caching),
        )
        states = self.model_runner.req_states
        self._runtime.requests = states.index_to_req_id
        self._runtime.prompt_tokens = states.prompt_len.np
        self._runtime.heeds_requests = config.scheduler_config.scheduler_cls == SCHEDULER_PATH
        activate(self._runtime)

    def load_model(self, **kwargs: Any) -> None:
        """Load the weights, then the codebooks and kernels."""
        super().load_model(**kwargs)
        self._layers = self._name_layers()
        with torch.no_grad():
            self._runtime.use(self._calibration())
        self._runtime.reserve_sinks(self._cache_bytes())

    def _cache_bytes(self) -> int:
        """About how many bytes blocks will have."""
        given = self.cache_config.kv_cache_memory_bytes
        if given:
            return int(given)
        free, _ = torch.cuda.mem_get_info(self.device)
        return max(0, int(self.requested_memory - (self.init_snapshot.free_memory - free)))

    def determine_available_memory(self) -> int:
        """Bytes for blocks: what vLLM would give them less all that is dense."""
        available = int(super().determine_available_memory())
        dense: int = self._runtime.expected_bytes(len(self._layers))
        if available <= dense:
            raise ValueError(
                f"{available} bytes of cache are too few: dense tails and sinks of "
                f"{self._runtime.max_sequences} sequences take {dense}; lower max_num_seqs, or "
                "give more memory"
            )
        return available - dense

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate blocks and say what serves."""
        super().initialize_from_config(kv_cache_config)
        runtime = self._runtime
        runtime.bind({name: layer.kv_cache for name, layer in self._layers.items()})
        runtime.order_groups([group.layer_names for group in kv_cache_config.kv_cache_groups])
        dense = 4 * len(runtime.layer_ids) * runtime.num_kv_heads * runtime.head_dim
        _log.info(
            "sphkv serves: CUDA kernels, FlashAttention 3 for prompts, tier %s with %d dense "
            "sinks, %.1f bytes per token (bfloat16: %d), %d tokens in %d blocks, dense memory of "
            "%d sequences %d bytes",
            runtime.tier_name,
            runtime.options.sink_tokens,
            runtime.block_bytes_per_token,
            dense,
            # layers of another kind, such as windowed ones, have block tables of their own
            kv_cache_config.num_blocks // len(kv_cache_config.kv_cache_groups) * PAGE_TOKENS,
            kv_cache_config.num_blocks,
            runtime.max_sequences,
            runtime.dense_bytes,
        )

    @torch.inference_mode()
    def execute_model(self, scheduler_output: Any) -> Any:
        """One step, then the blocks that it filled."""
        self._runtime.begin_step(scheduler_output)
        output = super().execute_model(scheduler_output)
        self._runtime.finish_step()
        return output
