# SPDX-License-Identifier: Apache-2.0
"""The vLLM worker that serves from coded blocks, or does not serve.

vLLM resolves the worker class by its name in every worker process, so a package that is missing
or broken stops the server instead of leaving stock attention in place.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker

from sphkv.codec.calibration import Calibration, Calibrator
from sphkv.core.geometry import KVGeometry
from sphkv.integrations.vllm.backend import SphericalImpl
from sphkv.integrations.vllm.calibrate import (
    START_UP_CALIBRATION,
    built_in_text,
    check_ropes,
    layer_ropes,
    load_share,
)
from sphkv.integrations.vllm.options import CONFIG_KEY, ServeOptions, check_block_size
from sphkv.integrations.vllm.plugin import register
from sphkv.integrations.vllm.runtime import Runtime, activate

_log = init_logger("vllm.sphkv")
_LEARNING_TOKENS = 256


class SphericalWorker(CPUWorker):  # type: ignore[misc]
    """A CPU worker with coded blocks."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if not current_platform.is_cpu():
            raise ValueError(
                f"coded blocks are served on CPUs only, and this vLLM runs on "
                f"{current_platform.device_type!r}: the CUDA kernels are not connected to it"
            )
        options = ServeOptions.from_config(vllm_config.additional_config)
        if options is None:
            raise ValueError(
                f"SphericalWorker needs additional_config={{'{CONFIG_KEY}': {{...}}}}; "
                "an empty object takes the defaults"
            )
        if vllm_config.speculative_config is not None:
            raise ValueError("coded blocks do not support speculative decoding")
        if options.budget_bytes is not None and vllm_config.cache_config.enable_prefix_caching:
            raise ValueError(
                "what a block with budget_bytes keeps depends on later queries, so it cannot be "
                "shared: pass --no-enable-prefix-caching"
            )
        # the entry point may be switched off, so this does not rely on it
        register()
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
        # experts and other layers without a cache are in the same list
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        for name, layer in layers.items():
            if not isinstance(getattr(layer, "impl", None), SphericalImpl):
                raise RuntimeError(f"layer {name} is served by {type(layer).__name__}, not by us")
        if not layers:
            raise RuntimeError("the model has no attention layers to serve")
        self._runtime.layer_ids.update({name: index for index, name in enumerate(layers)})
        self._runtime.use(self._calibration())
        if self._runtime.retention is not None:
            self._runtime.is_learning = True
            self._observe_text(_LEARNING_TOKENS)
            self._runtime.is_learning = False

    def _calibration(self) -> Calibration:
        model, runtime = self.model_config, self._runtime
        layers = [extract_layer_index(name) for name in runtime.layer_ids]
        head_dim = runtime.block.head_dim
        ropes = layer_ropes(model.hf_text_config.to_dict(), layers, head_dim)
        check_ropes(self.model_runner.get_model(), ropes)
        share = KVGeometry(
            num_layers=len(layers),
            num_kv_heads=runtime.num_kv_heads,
            num_query_heads=model.get_num_attention_heads(self.parallel_config),
            head_dim=head_dim,
        )
        path = runtime.options.calibration
        if path is None:
            runtime.calibrator = Calibrator(
                share, tuple(ropes), model_id=model.model, options=START_UP_CALIBRATION
            )
            self._observe_text(runtime.options.calibration_tokens)
            calibration = runtime.calibrator.finish()
            runtime.calibrator = None
            return calibration
        whole = KVGeometry(
            num_layers=model.hf_text_config.num_hidden_layers,
            num_kv_heads=model.get_total_num_kv_heads(),
            num_query_heads=share.num_query_heads * self.parallel_config.tensor_parallel_size,
            head_dim=head_dim,
        )
        return load_share(path, whole, layers, self._heads(whole.num_kv_heads), ropes)

    def _heads(self, total: int) -> list[int]:
        """KV heads of this worker; with more workers than heads, neighbours share one."""
        count, size = self._runtime.num_kv_heads, self.parallel_config.tensor_parallel_size
        first = get_tensor_model_parallel_rank() * total // size
        return list(range(first, first + count))

    def _observe_text(self, wanted: int) -> None:
        """Run the model once over so many tokens of the built-in text."""
        if self.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("with pipeline parallelism, pass a calibration file")
        from vllm.tokenizers import cached_tokenizer_from_config

        tokenizer = cached_tokenizer_from_config(self.model_config)
        ids = tokenizer.encode(built_in_text())[:wanted]
        if len(ids) < wanted or wanted > self.model_config.max_model_len:
            raise ValueError(
                f"start-up reads {wanted} tokens, but the built-in text has {len(ids)} "
                f"and the server takes {self.model_config.max_model_len}"
            )
        tokens = torch.tensor(ids)
        context = set_forward_context(None, self.vllm_config, num_tokens=wanted, skip_compiled=True)
        with torch.no_grad(), set_current_vllm_config(self.vllm_config), context:
            self.model_runner.get_model()(input_ids=tokens, positions=torch.arange(wanted))

    def determine_available_memory(self) -> int:
        """Bytes for blocks: what vLLM would give them less the dense tails."""
        available = int(super().determine_available_memory())
        left = available - self._runtime.tail_bytes
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
