# SPDX-License-Identifier: Apache-2.0
"""What the worker of this process set up, for the attention layers to use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.codec.calibration import Calibration, Calibrator
from sphkv.codec.states import SphericalCodec
from sphkv.integrations.vllm.blocks import CodedBlock
from sphkv.integrations.vllm.budgeted import BudgetedBlock
from sphkv.integrations.vllm.options import ServeOptions
from sphkv.integrations.vllm.paged import PagedAttention, causal_attention
from sphkv.integrations.vllm.retention import BlockRetention
from sphkv.integrations.vllm.steps import TailPool, tail_bytes

if TYPE_CHECKING:
    from sphkv.integrations.vllm.steps import StepPlan, TailWrites


class WorkerRuntime:
    """What serving needs on every device.

    Attributes:
        options: What the server was asked for.
        num_kv_heads: KV heads of this worker.
        max_sequences: Sequences that may run at once.
        layer_ids: Index of every attention layer by its name.
        calibrator: Set while the worker calibrates itself.
    """

    def __init__(self, options: ServeOptions, num_kv_heads: int, max_sequences: int) -> None:
        self.options = options
        self.num_kv_heads = num_kv_heads
        self.max_sequences = max_sequences
        self.layer_ids: dict[str, int] = {}
        self.calibrator: Calibrator | None = None

    def observe(
        self, layer: int, states: tuple[Tensor, Tensor, Tensor], options: AttentionOptions
    ) -> Tensor | None:
        """Learn about a layer from the states of a text at start-up; None at other times.

        Returns:
            The layer's attention output ``[rows, query_heads, head_dim]``.
        """
        query, keys, values = (part.transpose(0, 1) for part in states)
        if not self._learn(layer, (query, keys, values), options):
            return None
        return causal_attention(query, keys, values, scale=options.scale).transpose(0, 1)

    def _learn(
        self, layer: int, states: tuple[Tensor, Tensor, Tensor], options: AttentionOptions
    ) -> bool:
        """Fit codebooks, if that is what the text is for; states are ``[heads, tokens, ...]``."""
        if self.calibrator is None:
            return False
        query, keys, _ = states
        positions = torch.arange(query.shape[1], device=query.device)
        self.calibrator.add_layer(layer, keys.float(), query.float(), positions)
        return True


class Runtime(WorkerRuntime):
    """Codebooks, block layout, kernels and tails of one worker on a CPU.

    Attributes:
        block: Layout of a block.
        is_learning: Set while the worker measures what the tiers do to its layers.
        retention: Shares a block's bytes among its heads; None where all have one tier.
    """

    def __init__(
        self,
        options: ServeOptions,
        *,
        block_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        max_sequences: int,
    ) -> None:
        super().__init__(options, num_kv_heads, max_sequences)
        self.block: CodedBlock | BudgetedBlock
        self.retention: BlockRetention | None = None
        if options.budget_bytes is None:
            self.block = CodedBlock(options.tier(block_tokens), head_dim, options.sink_tokens)
        else:
            self.block = BudgetedBlock(
                block_tokens,
                num_kv_heads,
                head_dim,
                content_bytes=options.budget_bytes,
                sink_tokens=options.sink_tokens,
            )
            self.retention = BlockRetention(self.block, max_sequences)
        self.is_learning = False
        self._pools: dict[tuple[str, ...], TailPool] = {}
        self._codec: SphericalCodec | None = None
        self._paged: PagedAttention | None = None

    @property
    def head_dim(self) -> int:
        """Elements of a key."""
        return self.block.head_dim

    @property
    def tail_shape(self) -> tuple[int, int, int]:
        """Heads, tokens and head dimension of one slot."""
        return self.num_kv_heads, self.block.tokens, self.block.head_dim

    @property
    def tier_name(self) -> str:
        """What blocks hold, in a word."""
        if isinstance(self.block, CodedBlock):
            return self.block.layout.tier.name
        return f"by need, at most {self.block.content_bytes} bytes per head,"

    @property
    def tail_bytes(self) -> int:
        """Bytes of all dense slots."""
        return tail_bytes(self.max_sequences, len(self.layer_ids), self.tail_shape)

    @property
    def block_bytes_per_token(self) -> int:
        """Bytes of one token in coded blocks, all layers and heads of this worker."""
        return len(self.layer_ids) * self.num_kv_heads * self.block.content_bytes

    @property
    def paged(self) -> PagedAttention:
        """The kernels over this worker's blocks."""
        if self._paged is None:
            raise RuntimeError("no calibration was loaded or fitted")
        return self._paged

    def use(self, calibration: Calibration, *, variant: str | None = None) -> None:
        """Code with this calibration from now on, and read with these kernels.

        Raises:
            ValueError: It has too few planes for the tier.
        """
        self._codec = SphericalCodec(calibration)
        for _, tier in self.block.page_kinds():
            if tier is not None:
                # fails now and not at the first full block
                self._codec.codebook(0, tier)
        self._paged = PagedAttention(self.block, self._codec, variant=variant)

    def add_pool(self, layer_names: Iterable[str]) -> TailPool:
        """Dense slots of the layers that share a block table; the same ones if asked again."""
        names = tuple(layer_names)
        if names not in self._pools:
            layers = [self.layer_ids[name] for name in names]
            self._pools[names] = TailPool(layers, self.max_sequences, self.tail_shape)
        return self._pools[names]

    def forget(self, blocks: Iterable[int]) -> None:
        """Give back the slots of a sequence that ended or lost its blocks."""
        held = list(blocks)
        for pool in self._pools.values():
            pool.release(held)

    def hold(self, layer: int, states: tuple[Tensor, Tensor], step: StepPlan) -> None:
        """Keep the single new keys and values ``[rows, heads, head_dim]`` of a step."""
        self._write(layer, states, step, step.early)

    def _write(
        self, layer: int, states: tuple[Tensor, Tensor], step: StepPlan, writes: TailWrites
    ) -> None:
        if writes.rows.numel() == 0:
            return
        tails = (step.pool.keys[layer], step.pool.values[layer])
        for tail, new in zip(tails, states, strict=True):
            tail[writes.slots, :, writes.offsets] = new[writes.rows].to(tail.dtype)

    def attend(
        self,
        layer: int,
        states: tuple[Tensor, Tensor, Tensor],
        kv_cache: Tensor,
        step: StepPlan,
        options: AttentionOptions,
    ) -> tuple[Tensor, Tensor]:
        """Attention of a step over what was there before; codes or keeps what is new.

        See ``PagedAttention.attend_step``.
        """
        if self.options.repeatable:
            # those of the same chunk are seen as those in a slot are
            query, keys, values = states
            states = (query, keys.to(torch.bfloat16), values.to(torch.bfloat16))
        if self.retention is None and step.sealed:
            # before anyone reads: a request may find what another fills in the same step
            self._seal(layer, states, None, kv_cache, step, options.scale)
        output, lse = self.paged.attend_step(layer, states, kv_cache, step, options)
        if self.retention is not None:
            seen = (states[0], output, lse)
            self.retention.observe(layer, seen, step, options.scale)
            if step.sealed:
                self._seal(layer, states, seen, kv_cache, step, options.scale)
        self._write(layer, states[1:], step, step.late)
        return output, lse

    def _seal(
        self,
        layer: int,
        states: tuple[Tensor, Tensor, Tensor],
        seen: tuple[Tensor, Tensor, Tensor] | None,
        kv_cache: Tensor,
        step: StepPlan,
        scale: float,
    ) -> None:
        """Code full blocks; those with a budget need what queries have ``seen``."""
        if self._codec is None:
            raise RuntimeError("no calibration was loaded or fitted")
        tokens = self.block.tokens

        def whole(tail: Tensor, new: Tensor) -> Tensor:
            blocks = []
            for one in step.sealed:
                rows = new[one.row : one.row + tokens - one.num_held].transpose(0, 1)
                held = tail[one.slot][:, : one.num_held]
                blocks.append(torch.cat([held, rows.to(tail.dtype)], 1))
            return torch.stack(blocks)

        keys, values = (
            whole(step.pool.keys[layer], states[1]),
            whole(step.pool.values[layer], states[2]),
        )
        first = torch.tensor([one.first_position for one in step.sealed])
        if isinstance(self.block, CodedBlock):
            pages = self.block.write(self._codec, layer, (keys, values), first)
        else:
            assert self.retention is not None
            assert seen is not None
            chosen = [
                self.retention.choose(layer, one, (keys[at], values[at]), seen, step, scale)
                for at, one in enumerate(step.sealed)
            ]
            pages = self.block.write(self._codec, layer, (keys, values), first, torch.stack(chosen))
        ids = torch.tensor([one.block for one in step.sealed])
        kv_cache[ids] = pages.view(len(ids), *kv_cache.shape[1:])

    def learn(self, layer: int, states: tuple[Tensor, Tensor, Tensor], *, scale: float) -> None:
        """Measure what the tiers do to queries, keys and values ``[heads, tokens, head_dim]``."""
        if self._codec is None or self.retention is None:
            raise RuntimeError("errors are learnt with a budget, after the calibration")
        self.retention.learn_errors(self._codec, layer, states, scale=scale)

    def _learn(
        self, layer: int, states: tuple[Tensor, Tensor, Tensor], options: AttentionOptions
    ) -> bool:
        if self.is_learning:
            self.learn(layer, states, scale=options.scale)
        return super()._learn(layer, states, options) or self.is_learning


_active: WorkerRuntime | None = None


def activate(runtime: WorkerRuntime | None) -> None:
    """Make a runtime the one of this process."""
    global _active
    _active = runtime


def active_runtime() -> Any:
    """The runtime of this process, of the kind that its worker set up.

    Raises:
        RuntimeError: The worker is not ours, so nothing was set up.
    """
    if _active is None:
        raise RuntimeError(
            "additional_config names sphkv, but the worker is not SphericalWorker: pass "
            "--worker-cls sphkv.integrations.vllm.worker.SphericalWorker or start the server "
            "with python -m sphkv.integrations.vllm.serve"
        )
    return _active
