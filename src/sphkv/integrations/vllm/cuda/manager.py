# SPDX-License-Identifier: Apache-2.0
"""vLLM's side of prompts cut to a budget: the blocks that no head kept go back to the pool.

Importing this registers the manager, so every process that reads the specification has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from sphkv.integrations.vllm.cuda.retain import kept_blocks


@dataclass(frozen=True, kw_only=True)
class CutPromptSpec(FullAttentionSpec):  # type: ignore[misc]
    """Coded blocks of a layer whose prompts are cut when they are complete.

    Attributes:
        kept_share: Part of a prompt's full blocks that stays.
    """

    kept_share: float = 1.0

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """The specification of a group of layers, which must be alike."""
        if any(spec != specs[0] for spec in specs):
            raise ValueError(f"layers of one group differ: {specs}")
        return specs[0]


class CutPromptManager(FullAttentionManager):  # type: ignore[misc]
    """Frees what workers left of a prompt's blocks, as windows free what they passed."""

    def __init__(self, kv_cache_spec: CutPromptSpec, **kwargs: Any) -> None:
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
        self._remove_blocks_in_range(request_id, kept_blocks(full, self._share), full)


KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(CutPromptSpec, CutPromptManager, FullAttentionSpec)
