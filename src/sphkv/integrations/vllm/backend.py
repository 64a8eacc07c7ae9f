# SPDX-License-Identifier: Apache-2.0
"""vLLM's attention backend over coded blocks; the stock one where nothing asks for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from sphkv.attention.request import AttentionOptions
from sphkv.integrations.vllm.options import BLOCK_SIZES, CONFIG_KEY
from sphkv.integrations.vllm.runtime import active_runtime
from sphkv.integrations.vllm.steps import StepPlan, plan_step

_DEFAULT_BLOCK_SIZE = 128


def _is_wanted() -> bool:
    """Whether the engine that is being built asks for coded blocks."""
    config = get_current_vllm_config_or_none()
    if config is None:
        try:
            active_runtime()
        except RuntimeError:
            return False
        return True
    given = config.additional_config
    return isinstance(given, dict) and CONFIG_KEY in given


class SphericalBackend(CPUAttentionBackend):  # type: ignore[misc]
    """Takes the place of ``CPU_ATTN``, whose name vLLM looks it up by."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Block sizes that one coded page can hold."""
        if not _is_wanted():
            return list(CPUAttentionBackend.get_supported_kernel_block_sizes(kv_cache_spec))
        return list(BLOCK_SIZES)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The largest page, which has the least overhead."""
        if not _is_wanted():
            return int(super().get_preferred_block_size(default_block_size))
        return _DEFAULT_BLOCK_SIZE

    @classmethod
    def supports_sink(cls) -> bool:
        """Learned sink logits are merged after the kernels."""
        return _is_wanted() or bool(super().supports_sink())

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Decoders only, where blocks are coded."""
        if not _is_wanted():
            return bool(super().supports_attn_type(attn_type))
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Coded blocks are read causally."""
        return not _is_wanted()

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Say how many bytes a token takes; may be applied again to its own result."""
        if not _is_wanted() or spec.state_content_bytes is not None:
            return spec
        content = active_runtime().block.content_bytes
        return replace(spec, dtype=torch.uint8, state_content_bytes=content)

    @staticmethod
    def get_impl_cls() -> Any:
        """Our attention, or stock."""
        return SphericalImpl if _is_wanted() else CPUAttentionBackend.get_impl_cls()

    @staticmethod
    def get_builder_cls() -> Any:
        """Our metadata, or stock."""
        return SphericalMetadataBuilder if _is_wanted() else CPUAttentionBackend.get_builder_cls()


@dataclass(frozen=True, slots=True, eq=False)
class SphericalMetadata:
    """What the layers of one group read in a step.

    Attributes:
        num_actual_tokens: Rows of the batch without padding.
        step: What they write and read.
    """

    num_actual_tokens: int
    step: StepPlan


class SphericalMetadataBuilder(AttentionMetadataBuilder):  # type: ignore[misc]
    """Works a step out for the layers that share a block table."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        runtime = active_runtime()
        self._tokens = runtime.block.tokens
        self._is_repeatable = runtime.options.repeatable
        if kv_cache_spec.block_size != self._tokens:
            raise ValueError(
                f"a group of layers has blocks of {kv_cache_spec.block_size} tokens, "
                f"the coded page has {self._tokens}"
            )
        self._pool = runtime.add_pool(layer_names)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> SphericalMetadata:
        """Plan the step; see ``plan_step``."""
        common = common_attn_metadata
        step = plan_step(
            self._pool,
            common.query_start_loc_cpu[: common.num_reqs + 1].tolist(),
            common.seq_lens[: common.num_reqs].tolist(),
            common.block_table_tensor,
            self._tokens,
            is_repeatable=self._is_repeatable,
        )
        return SphericalMetadata(common.num_actual_tokens, step)


class SphericalImpl(AttentionImpl):  # type: ignore[misc]
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
        runtime = active_runtime()
        if runtime.retention is not None:
            unsupported |= {
                "a window together with budget_bytes": sliding_window is not None,
                "a soft-cap together with budget_bytes": bool(logits_soft_cap),
                "learned sinks together with budget_bytes": sinks is not None,
            }
        for name, is_asked in unsupported.items():
            if is_asked:
                raise ValueError(f"coded blocks do not support {name}")
        shape = (num_kv_heads, head_size)
        if shape != (runtime.num_kv_heads, runtime.block.head_dim):
            raise ValueError(f"a layer has {shape} KV heads and channels, unlike the first one")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale = float(scale)
        self.sinks = sinks
        self.sliding_window = sliding_window
        self._runtime = runtime
        self._options = AttentionOptions(
            scale=self.scale,
            softcap=logits_soft_cap or None,
            window=sliding_window,
        )

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Keep new states dense; ``forward`` codes the blocks that became full."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict) or kv_cache.numel() == 0:
            return
        step = metadata[layer.layer_name].step
        index = self._runtime.layer_ids[layer.layer_name]
        self._runtime.hold(index, (key, value), step)

    def forward(  # noqa: PLR0913
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: SphericalMetadata | None,
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
        states = (query[:rows], key[:rows], value[:rows])
        result, lse = self._runtime.attend(
            index, states, kv_cache, attn_metadata.step, self._options
        )
        if self.sinks is not None:
            # a sink takes its share of the weight and adds no value
            result *= torch.sigmoid(lse - self.sinks.float())[..., None]
        output[:rows] = result.view_as(output[:rows])
        return output
