# SPDX-License-Identifier: Apache-2.0
"""The vLLM worker that serves from coded blocks on a CPU."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker

from sphkv.integrations.vllm.backend import SphericalImpl
from sphkv.integrations.vllm.coded_worker import CodedWorker, read_options, stop_on_nans
from sphkv.integrations.vllm.options import check_block_size
from sphkv.integrations.vllm.runtime import Runtime, activate

_log = init_logger("vllm.sphkv")
_LEARNING_TOKENS = 256
_VALUE_BITS = 3


class CpuWorker(CodedWorker, CPUWorker):  # type: ignore[misc]
    """A CPU worker with coded blocks."""

    _impl_class = SphericalImpl

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        options = read_options(vllm_config, value_bits=_VALUE_BITS)
        stop_on_nans()
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        self._runtime = Runtime(
            options,
            block_tokens=check_block_size(vllm_config.cache_config.block_size),
            num_kv_heads=model.get_num_kv_heads(parallel),
            head_dim=model.get_head_size(),
            max_sequences=vllm_config.scheduler_config.max_num_seqs,
        )
        activate(self._runtime)
        super().__init__(vllm_config, *args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the weights, then the codebooks."""
        super().load_model(*args, **kwargs)
        self._name_layers()
        self._runtime.use(self._calibration())
        if self._runtime.retention is not None:
            self._runtime.is_learning = True
            self._observe_text(_LEARNING_TOKENS)
            self._runtime.is_learning = False

    def determine_available_memory(self) -> int:
        """Bytes for blocks: what vLLM would give them less the dense tails."""
        available = int(super().determine_available_memory())
        left: int = available - self._runtime.tail_bytes
        if left <= 0:
            raise ValueError(
                f"{available} bytes of cache are too few: the dense tails of "
                f"{self._runtime.max_sequences} sequences take {self._runtime.tail_bytes}; "
                "lower max_num_seqs or the block size, or give more memory"
            )
        return left

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate blocks and say what serves."""
        super().initialize_from_config(kv_cache_config)
        runtime = self._runtime
        dense = (
            4 * len(runtime.layer_ids) * runtime.num_kv_heads * self.model_config.get_head_size()
        )
        _log.info(
            "sphkv serves: backend native (%s), tier %s with %d dense sinks, %d bytes per token "
            "(bfloat16: %d), %d tokens in %d blocks, dense tails of %d sequences %d bytes",
            runtime.paged.variant,
            runtime.tier_name,
            runtime.options.sink_tokens,
            runtime.block_bytes_per_token,
            dense,
            # layers of another kind, such as windowed ones, have block tables of their own
            kv_cache_config.num_blocks
            // len(kv_cache_config.kv_cache_groups)
            * runtime.block.tokens,
            kv_cache_config.num_blocks,
            runtime.max_sequences,
            runtime.tail_bytes,
        )

    def execute_model(self, scheduler_output: Any) -> Any:
        """One step; first give back what ended sequences held."""
        gone = set(scheduler_output.finished_req_ids)
        gone |= set(scheduler_output.preempted_req_ids or ())
        for request in gone:
            held = self.model_runner.requests.get(request)
            if held is not None:
                # blocks before this one are full; a window may have passed them on already
                first = held.num_computed_tokens // self._runtime.block.tokens
                for blocks in held.block_ids:
                    self._runtime.forget(blocks[first:])
        return super().execute_model(scheduler_output)
