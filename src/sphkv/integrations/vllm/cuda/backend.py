# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention backend over coded blocks on NVIDIA GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from sphkv.attention.cuda.geometry import HEAD_DIMS, PAGE_TOKENS, ceil_div
from sphkv.attention.cuda.pages import HOPPER
from sphkv.attention.request import AttentionOptions
from sphkv.integrations.vllm.cuda.groups import CudaStep, DeviceChunks
from sphkv.integrations.vllm.cuda.manager import coded_spec
from sphkv.integrations.vllm.runtime import active_runtime

_FLASH_VERSION = 3


class CudaSphericalBackend(AttentionBackend):  # type: ignore[misc]
    """Decodes with our kernels and reads prompts with FlashAttention."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """The name that vLLM looks the backend up by."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CudaSphericalImpl]:
        """Attention of a layer."""
        return CudaSphericalImpl

    @staticmethod
    def get_builder_cls() -> type[CudaMetadataBuilder]:
        """What plans a step."""
        return CudaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """A block of one head is a page of the decode kernel."""
        return [PAGE_TOKENS]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The only one there is."""
        return PAGE_TOKENS

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Head dimensions that the kernels are written for."""
        return list(HEAD_DIMS)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Hopper: the kernel of dense states has been checked nowhere else."""
        return (capability.major, capability.minor) == HOPPER

    @classmethod
    def supports_sink(cls) -> bool:
        """Learned sink logits take their share of the weight."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Pages behind a window are not listed."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """The dense tail of a sequence is not part of its blocks."""
        return False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """A head's block is one run of bytes."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Say how many bytes a block takes; may be applied again to its own result."""
        if spec.state_content_bytes is not None:
            return spec
        page = active_runtime().layout.page_bytes
        if spec.block_size % PAGE_TOKENS:
            # vLLM asks what a token takes, to choose a block size
            content = ceil_div(page, PAGE_TOKENS)
            return replace(spec, dtype=torch.uint8, state_content_bytes=content)
        coded = replace(
            spec, dtype=torch.uint8, state_content_bytes=page, tokens_per_state=PAGE_TOKENS
        )
        return coded_spec(coded, active_runtime().kept_share)


@dataclass(frozen=True, slots=True, eq=False)
class CudaMetadata:
    """What the layers of one group read in a step.

    Attributes:
        num_actual_tokens: Tokens of the batch.
        step: What they write and read.
    """

    num_actual_tokens: int
    step: CudaStep


class CudaMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Plans a step for the layers that share a block table."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    reorder_batch_threshold = 1

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if kv_cache_spec.block_size != PAGE_TOKENS:
            raise ValueError(
                f"a group of layers has blocks of {kv_cache_spec.block_size} tokens, "
                f"a coded page has {PAGE_TOKENS}"
            )
        self._runtime = active_runtime()
        self._names = tuple(layer_names)
        window = getattr(kv_cache_spec, "sliding_window", None)
        self._group = self._runtime.add_group(self._names, window)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CudaMetadata:
        """Plan the step; see ``LayerGroup.plan``."""
        slots = common_attn_metadata.req_idx
        if slots is None or common_attn_metadata.seq_lens_cpu_upper_bound is None:
            raise RuntimeError("this model runner does not say which request a row belongs to")
        return self._plan(common_attn_metadata, slots)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> CudaMetadata:
        """Plan a step that touches no slot of a request."""
        spare = self._group.shape.num_slots
        return self._plan(common_attn_metadata, np.full(common_attn_metadata.num_reqs, spare))

    def _plan(self, common: Any, slots: Any) -> CudaMetadata:
        # padded rows of a graph have no request
        count = min(len(slots), common.num_reqs)
        starts = common.query_start_loc_cpu[: count + 1].numpy().astype(np.int64)
        lengths = common.seq_lens_cpu_upper_bound[:count].numpy().astype(np.int64)
        own = slots[:count].astype(np.int64)
        requests = self._runtime.request_names(own)
        # trial runs have rows without a request, and must not touch the slot of one
        own[[not name for name in requests]] = self._group.shape.num_slots
        step = self._group.plan(
            starts,
            lengths,
            own,
            requests,
            common.block_table_tensor,
            padded=common.num_reqs,
            prompts=self._runtime.prompt_lengths(own),
        )
        self._runtime.planned[self._names] = step
        return CudaMetadata(common.num_actual_tokens, step)


def attend_chunks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    chunks: DeviceChunks,
    options: AttentionOptions,
    sink_logits: Tensor | None,
) -> None:
    """FlashAttention of chunks to the states of their own rows; see ``ChunkAttention``."""
    # only there where vLLM was built for a GPU
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    plan = chunks.plan
    window = [-1, -1] if options.window is None else [options.window - 1, 0]
    flash_attn_varlen_func(
        q=query,
        k=keys,
        v=values,
        out=output,
        cu_seqlens_q=chunks.query_starts,
        cu_seqlens_k=chunks.key_starts,
        max_seqlen_q=plan.most_queries,
        max_seqlen_k=plan.most_keys,
        softmax_scale=options.scale,
        causal=True,
        window_size=window,
        softcap=options.softcap or 0.0,
        fa_version=_FLASH_VERSION,
        s_aux=None if sink_logits is None else sink_logits.to(query.dtype),
    )


class CudaSphericalImpl(AttentionImpl):  # type: ignore[misc]
    """Attention of one layer; vLLM dictates the signatures."""

    def __init__(  # noqa: PLR0913
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        unsupported = {
            "ALiBi": alibi_slopes is not None,
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            f"kv_cache_dtype {kv_cache_dtype!r}": kv_cache_dtype not in ("auto", "bfloat16"),
            "a cache shared between layers": kv_sharing_target_layer_name is not None,
        }
        for name, is_asked in unsupported.items():
            if is_asked:
                raise ValueError(f"coded blocks do not support {name}")
        runtime = active_runtime()
        shape = (num_heads, num_kv_heads, head_size)
        if shape != (runtime.num_query_heads, runtime.num_kv_heads, runtime.head_dim):
            raise ValueError(f"a layer has {shape} heads, KV heads and channels, unlike the others")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale, self.kv_cache_dtype = float(scale), kv_cache_dtype
        self.sinks = sinks
        self.sliding_window = sliding_window
        self._sink_logits: Tensor | None = None
        self._runtime = runtime
        self._options = AttentionOptions(
            scale=self.scale, softcap=logits_soft_cap or None, window=sliding_window
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Learned sinks as the decode kernel reads them."""
        if self.sinks is not None:
            self._sink_logits = self.sinks.float().contiguous()

    def forward(  # noqa: PLR0913
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CudaMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of all rows ``[rows, heads, head_dim]``, written into ``output``."""
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("coded blocks do not support quantised outputs")
        index = self._runtime.layer_ids.get(layer.layer_name, -1)
        if attn_metadata is None:
            seen = self._runtime.observe(index, (query, key, value), self._options)
            return output.zero_() if seen is None else output.copy_(seen)
        rows = attn_metadata.num_actual_tokens
        self._runtime.attend(
            index,
            (query[:rows], key[:rows], value[:rows]),
            kv_cache,
            attn_metadata.step,
            self._options,
            output[:rows],
            attend_chunks=attend_chunks,
            sink_logits=self._sink_logits,
        )
        return output
