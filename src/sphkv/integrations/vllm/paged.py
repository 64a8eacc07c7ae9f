# SPDX-License-Identifier: Apache-2.0
"""Attention over vLLM's blocks by the native kernels: full blocks in place, then the tail."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from sphkv.attention.native.backend import EXACT_VARIANT, CodebookCache
from sphkv.attention.partial import PartialAttention, attend_logits, merge_partials
from sphkv.attention.reference import mask_logits
from sphkv.attention.request import AttentionOptions
from sphkv.codec.states import SphericalCodec
from sphkv.core.devices import require_kernels
from sphkv.integrations.vllm.blocks import Block
from sphkv.integrations.vllm.steps import SequenceStep, StepPlan

# Query rows of one KV head per call: more would push their tables out of the cache.
_MAX_ROWS = 32
_MAX_PLANS = 8192
_DENSE_QUERIES = 256


class PagedAttention:
    """Reads the blocks of this process's layers.

    Attributes:
        variant: Instruction set of the kernels, such as ``"neon"``.
    """

    def __init__(self, block: Block, codec: SphericalCodec, *, variant: str | None = None) -> None:
        """Prepare the kernels.

        Args:
            block: Layout of a block.
            codec: What wrote the blocks.
            variant: Kernels to use; the fastest that can read the head dimension if None.

        Raises:
            ImportError: They were not built.
        """
        self._block = block
        self._codec = codec
        self._kernels = require_kernels()
        if variant is None:
            is_vectorised = block.head_dim % 4 == 0
            variant = str(self._kernels.variants()[0]) if is_vectorised else EXACT_VARIANT
        self.variant = variant
        self._engine = self._kernels.make_engine(self.variant)
        self._codebooks = CodebookCache()
        self._kinds: dict[int, list[Any]] = {}
        self._plans: OrderedDict[tuple[int, int, tuple[int, ...], int], Any] = OrderedDict()

    def attend_step(
        self,
        layer: int,
        states: tuple[Tensor, Tensor, Tensor],
        kv_cache: Tensor,
        step: StepPlan,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        """Attention of all new tokens of a step.

        New tokens of a prompt that come together see each other densely and only what was there
        before as codes.

        Args:
            layer: Index of the layer.
            states: Queries, keys and values of the batch, ``[rows, heads, head_dim]``.
            kv_cache: ``[blocks, heads, tokens, bytes]`` uint8.
            step: What the batch is.
            options: Scale, soft-cap and window of the layer.

        Returns:
            Output ``[rows, query_heads, head_dim]`` and log-sum-exp ``[rows, query_heads]``.
        """
        query = states[0].float().contiguous()
        output, lse = torch.zeros_like(query), query.new_zeros(query.shape[:2])
        for sequence in step.sequences:
            rows = slice(sequence.first_row, sequence.first_row + sequence.num_queries)
            if sequence.is_single:
                # one row is [heads, 1, head_dim] as it stands, so nothing is copied
                where = (query[rows], step.positions[rows], output[rows], lse[rows])
                self._call(layer, kv_cache, sequence, step, options, where)
                continue
            part = self._attend_prompt(layer, states, kv_cache, (sequence, step), options)
            output[rows] = part.output.transpose(0, 1)
            lse[rows] = part.lse.transpose(0, 1)
        return output, lse

    def _attend_prompt(
        self,
        layer: int,
        states: tuple[Tensor, Tensor, Tensor],
        kv_cache: Tensor,
        where: tuple[SequenceStep, StepPlan],
        options: AttentionOptions,
    ) -> PartialAttention:
        sequence, step = where
        rows = slice(sequence.first_row, sequence.first_row + sequence.num_queries)
        query, keys, values = (part[rows].transpose(0, 1) for part in states)
        new = dense_attention(query, keys, values, options)
        if sequence.first_position == 0:
            return new
        old = self._attend_stored(layer, query, kv_cache, where, step.positions[rows], options)
        return merge_partials([old, new])

    def _attend_stored(
        self,
        layer: int,
        query: Tensor,
        kv_cache: Tensor,
        where: tuple[SequenceStep, StepPlan],
        positions: Tensor,
        options: AttentionOptions,
    ) -> PartialAttention:
        """Attention of queries ``[query_heads, queries, head_dim]`` to what was there before."""
        sequence, step = where
        group = query.shape[0] // kv_cache.shape[1]
        outputs, weights = [], []
        for part in torch.arange(query.shape[1]).split(max(1, _MAX_ROWS // group)):
            rows = query[:, part].float().contiguous()
            out, lse = torch.empty_like(rows), torch.empty(rows.shape[:2])
            call = (rows, positions[part].contiguous(), out, lse)
            self._call(layer, kv_cache, sequence, step, options, call)
            outputs.append(out)
            weights.append(lse)
        return PartialAttention(torch.cat(outputs, 1), torch.cat(weights, 1))

    def _call(
        self,
        layer: int,
        kv_cache: Tensor,
        sequence: SequenceStep,
        step: StepPlan,
        options: AttentionOptions,
        where: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> None:
        """One call of the kernels; ``where`` is queries, positions, output and log-sum-exp."""
        query, positions, output, lse = where
        tokens, head_dim = self._block.tokens, self._block.head_dim
        num_queries = positions.shape[0]
        call = self._kernels.Call()
        if sequence.tail_slot >= 0:
            keys = step.pool.keys[layer][sequence.tail_slot]
            values = step.pool.values[layer][sequence.tail_slot]
            call.set_tail(
                keys.data_ptr(),
                values.data_ptr(),
                tokens * head_dim,
                sequence.tail_tokens,
                len(sequence.blocks) * tokens,
            )
        rows = query.numel() // head_dim // kv_cache.shape[1]
        call.set_queries(query.data_ptr(), positions.data_ptr(), num_queries, rows)
        call.set_options(
            options.scale, options.softcap or 0.0, options.window or 0, torch.get_num_threads()
        )
        oldest = 0
        if options.window is not None:
            oldest = max(0, int(positions[0]) - options.window + 1)
        plan = self._plan(layer, kv_cache, sequence, oldest // tokens)
        self._kernels.attend(self._engine, plan, call, output.data_ptr(), lse.data_ptr())

    def _plan(self, layer: int, kv_cache: Tensor, sequence: SequenceStep, first: int) -> Any:
        """Addresses of a sequence's pages from block ``first`` on."""
        key = (layer, min(first, 1), sequence.blocks[first:], sequence.stamp)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan(layer, kv_cache, key[2], first == 0)
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan

    def _make_plan(
        self, layer: int, kv_cache: Tensor, blocks: tuple[int, ...], has_first: bool
    ) -> Any:
        place = self._block.locate(kv_cache, torch.tensor(blocks, dtype=torch.int64), has_first)
        return self._kernels.make_plan(
            kv_cache.shape[1],
            self._block.head_dim,
            self._layer_kinds(layer),
            place.addresses.data_ptr(),
            place.kinds.data_ptr(),
            place.first_page.data_ptr(),
        )

    def _layer_kinds(self, layer: int) -> list[Any]:
        if layer not in self._kinds:
            self._kinds[layer] = [
                self._kernels.make_kind(
                    fields, None if tier is None else self._codebooks.get(self._codec, layer, tier)
                )
                for fields, tier in self._block.page_kinds()
            ]
        return self._kinds[layer]


def dense_attention(
    query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> PartialAttention:
    """Causal attention of consecutive tokens to each other.

    Args:
        query: ``[query_heads, tokens, head_dim]``.
        keys: ``[kv_heads, tokens, head_dim]``.
        values: ``[kv_heads, tokens, head_dim]``.
        options: Scale, soft-cap and window.
    """
    group = query.shape[0] // keys.shape[0]
    tokens = query.shape[1]
    keys = keys.float().repeat_interleave(group, 0)
    values = values.float().repeat_interleave(group, 0)
    if options.softcap is None and options.window is None:
        # the operator behind scaled_dot_product_attention, which keeps its log-sum-exp to itself
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        states = (part[None] for part in (query.float(), keys, values))
        output, lse = flash(*states, is_causal=True, scale=options.scale)
        return PartialAttention(output[0], lse[0])
    at = torch.arange(tokens)
    outputs, weights = [], []
    for part in at.split(_DENSE_QUERIES):
        seen = slice(0, int(part[-1]) + 1)
        logits = (query[:, part].float() * options.scale) @ keys[:, seen].transpose(1, 2)
        rows = at[seen].expand(query.shape[0], -1)
        partial = attend_logits(mask_logits(logits, rows, part, options), values[:, seen])
        outputs.append(partial.output)
        weights.append(partial.lse)
    return PartialAttention(torch.cat(outputs, 1), torch.cat(weights, 1))


def causal_attention(query: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> Tensor:
    """Plain causal attention ``[heads, tokens, head_dim]``, quick and without log-sum-exp."""
    output: Tensor = functional.scaled_dot_product_attention(
        query[None].float(),
        keys[None].float(),
        values[None].float(),
        is_causal=True,
        scale=scale,
        enable_gqa=True,
    )
    return output[0]
