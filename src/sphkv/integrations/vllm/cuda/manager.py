# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of coded blocks: when they may be found, and when they go back to the pool.

Importing this registers the managers, so every process that reads the specifications has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, replace_as
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from sphkv.integrations.vllm.cuda.retain import kept_blocks

request_shares: dict[str, float] = {}
"""Parts of the server's budget that requests of this process asked for, where it is not all."""


@dataclass(frozen=True, kw_only=True)
class CodedSpec(FullAttentionSpec):  # type: ignore[misc]
    """Coded blocks of a layer that sees everything.

    Attributes:
        kept_share: Part of a prompt's full blocks that stays when it is complete.
    """

    kept_share: float = 1.0

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """The specification of a group of layers, which must be alike."""
        if any(spec != specs[0] for spec in specs):
            raise ValueError(f"layers of one group differ: {specs}")
        return specs[0]


@dataclass(frozen=True, kw_only=True)
class CodedWindowSpec(SlidingWindowSpec):  # type: ignore[misc]
    """Coded blocks of a layer with a window."""


def coded_spec(spec: Any, kept_share: float) -> Any:
    """The same specification, with a manager of ours.

    Args:
        spec: What vLLM made of the layer, blocks already counted in coded bytes.
        kept_share: Part of a prompt's full blocks that stays when it is complete.

    Raises:
        ValueError: There is no manager for such layers.
    """
    if type(spec) is FullAttentionSpec:
        return replace_as(spec, CodedSpec, kept_share=kept_share)
    if type(spec) is SlidingWindowSpec:
        return replace_as(spec, CodedWindowSpec)
    raise ValueError(f"coded blocks do not support layers of {type(spec).__name__}")


class _CodedBlocks:
    """Lets nobody find a block in the step that fills it by a single token.

    Such a block is coded behind the step, and a request of one new token that found it would read
    it before. vLLM asks again after the step, so the block is found from then on. Blocks that
    chunks fill are coded before anyone reads.
    """

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Let blocks of a request be found by their prefix."""
        if num_tokens == request.num_computed_tokens + 1:
            num_tokens -= 1
        super().cache_blocks(request, num_tokens, *args, **kwargs)  # type: ignore[misc]


class CodedManager(_CodedBlocks, FullAttentionManager):  # type: ignore[misc]
    """Frees what workers left of a prompt's blocks, as windows free what they passed."""

    def __init__(self, kv_cache_spec: CodedSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self._share = kv_cache_spec.kept_share

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Give blocks back once the step that completed the prompt is done."""
        if num_prompt_tokens is None or processed_computed_tokens < num_prompt_tokens:
            return
        full = num_prompt_tokens // self.block_size
        share = self._share * request_shares.get(request_id, 1.0)
        self._remove_blocks_in_range(request_id, kept_blocks(full, share), full)


class CodedWindowManager(_CodedBlocks, SlidingWindowManager):  # type: ignore[misc]
    """Blocks of layers with a window."""


KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(CodedSpec, CodedManager, FullAttentionSpec)
KVCacheSpecRegistry.register(CodedWindowSpec, CodedWindowManager, SlidingWindowSpec)
