# SPDX-License-Identifier: Apache-2.0
"""How the states of one sequence stay resident: one tier for all, or what a controller decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from sphkv.cache.config import CacheConfig, ResidencyPlan
from sphkv.store.append import Span
from sphkv.store.store import PageStore


class Residency(Protocol):
    """Decides where the states of a sequence go; the sequence itself knows nothing of tiers.

    Attributes:
        kind: ``"uniform"`` or ``"retention"``.
        waits_for_pass: Whether a long part of a prompt is stored only after its pass, when the
            budget can be met piece by piece.
    """

    kind: str
    waits_for_pass: bool

    @property
    def num_bytes(self) -> int:
        """Bytes of what is remembered besides the states."""
        ...

    def take_prompt(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Take a layer of the prompt, to store it now or in ``end_prompt``; layers come in order.

        Args:
            layer: A layer without states.
            query: ``[query_heads, queries, head_dim]`` after RoPE, the newest tokens' ones.
            keys: ``[kv_heads, tokens, head_dim]`` after RoPE, positions from 0 on.
            values: ``[kv_heads, tokens, head_dim]``.
        """
        ...

    def decide_prompt(self) -> None:
        """Decide about the prompt if all of its layers came: ``end_prompt`` then only stores them.

        Raises:
            BudgetError: What must stay dense does not fit a budget.
        """
        ...

    def end_prompt(self) -> None:
        """The pass with the prompt is over: have all of its layers stored.

        Raises:
            BudgetError: What must stay dense does not fit a budget.
        """
        ...

    @property
    def num_changes(self) -> int:
        """Rises when pages come otherwise than by sealing tails at one tier."""
        ...

    def settle(self, num_new: int, *, is_ahead: bool = False) -> bool:
        """Before a pass: have room under the ceiling for what so many new tokens make seal.

        Args:
            num_new: Tokens that come.
            is_ahead: Meet the ceiling of now, not that of the new tokens.

        Returns:
            Whether the store may have to seal full tails; see ``PageStore.make_room``.

        Raises:
            BudgetError: Nothing is left that may be dropped.
        """
        ...

    def plan_ahead(self) -> None:
        """Once tails have sealed: begin to make room for the next time, if there is none.

        Nothing changes but by ``work_ahead``; a ``settle`` that comes too early does the rest.
        """
        ...

    @property
    def work_left(self) -> int:
        """Steps that ``work_ahead`` should have, about twice as many as it has parts left."""
        ...

    def work_ahead(self) -> bool:
        """Do a bounded part of what ``plan_ahead`` began; False if there is nothing to do."""
        ...

    def observe_logits(self, row: Tensor) -> None:
        """Learn how close the next decision is, from logits ``[vocabulary]``."""
        ...

    def crop(self, num_tokens: int) -> None:
        """Forget what is known of tokens from ``num_tokens`` on, once the store is cropped."""
        ...

    def fork(self, store: PageStore, sequence: int) -> Residency:
        """The same for a copy of the sequence."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What a file must keep of it, by name."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what ``state`` gave."""
        ...

    def describe(self) -> str:
        """The setting in use, for a record."""
        ...


class UniformResidency:
    """Every sealed page at one tier; sinks and the newest tokens dense."""

    kind = "uniform"
    waits_for_pass = False
    num_bytes = 0
    num_changes = 0
    work_left = 0

    def __init__(
        self, config: CacheConfig, plan: ResidencyPlan, store: PageStore, sequence: int
    ) -> None:
        """Take over an empty sequence of the store."""
        self._config = config
        self._plan = plan
        self._store = store
        self._sequence = sequence

    def take_prompt(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store a layer: sinks dense, whole pages coded, the rest in the tail."""
        write_uniform(
            self._config, self._plan, self._store, [self._sequence], layer, keys[None], values[None]
        )

    def decide_prompt(self) -> None:
        """There is nothing to decide."""

    def end_prompt(self) -> None:
        """Every layer is stored as it comes."""

    def settle(self, num_new: int, *, is_ahead: bool = False) -> bool:
        """Nothing has to give way."""
        return True

    def plan_ahead(self) -> None:
        """Nothing has to give way."""

    def work_ahead(self) -> bool:
        """Nothing has to give way."""
        return False

    def observe_logits(self, row: Tensor) -> None:
        """One tier has no decision to change."""

    def crop(self, num_tokens: int) -> None:
        """Nothing is remembered of tokens."""

    def fork(self, store: PageStore, sequence: int) -> UniformResidency:
        """The same for a copy of the sequence."""
        return UniformResidency(self._config, self._plan, store, sequence)

    def state(self) -> dict[str, Tensor]:
        """Nothing besides the pages."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Nothing besides the pages."""

    def describe(self) -> str:
        """The tier."""
        return self._plan.tier


def write_uniform(
    config: CacheConfig,
    plan: ResidencyPlan,
    store: PageStore,
    sequences: Sequence[int],
    layer: int,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Store the prompts of sequences of one length at one tier.

    Of a layer with a sliding window only what its next token can see is stored.

    Args:
        config: The cache.
        plan: The tier.
        store: Where the sequences are.
        sequences: Their ids.
        layer: The layer.
        keys: ``[sequences, kv_heads, tokens, head_dim]`` after RoPE.
        values: ``[sequences, kv_heads, tokens, head_dim]``.
    """
    tokens, window = keys.shape[2], config.windows[layer]
    start = window_start(config, plan, layer, tokens)
    sinks = min(config.sink_tokens, tokens) if start == 0 else 0
    page = plan.spec.page_tokens
    num_coded = max(0, (tokens - start - sinks - plan.recent_tokens) // page) * page
    # a window leaves its first tokens behind, so only full attention protects them
    spans = [Span(plan.tiers.dense_id, 0, sinks, window is None)] if sinks else []
    if num_coded:
        spans.append(Span(plan.tiers.id_of(plan.tier), sinks, sinks + num_coded))
    states = (keys[:, :, start:], values[:, :, start:])
    store.write_prompt(sequences, layer, spans, *states, first_position=start)


def window_start(config: CacheConfig, plan: ResidencyPlan, layer: int, tokens: int) -> int:
    """First position of a prompt that a layer stores; above 0 behind a sliding window."""
    window = config.windows[layer]
    return 0 if window is None else max(0, tokens - window - plan.window_margin)
