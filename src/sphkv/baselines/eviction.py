# SPDX-License-Identifier: Apache-2.0
"""The part that all methods which drop tokens share.

A policy gives every token of a prompt a score; each KV head keeps the highest ones that its
pages have room for. Dropped states are gone and their pages are free. Attention reads the kept
pages as any paged bfloat16 kernel would, so these methods are kernel-realized.

Policies that also evict while decoding do so once per page of 16 new tokens, not per token: one
page of the budget is set aside for the tokens that wait, so the bytes are never exceeded.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.baselines.attention_scores import SharedScores
from sphkv.baselines.held_states import (
    HeldStates,
    Tagged,
    attend_held,
    check_budget,
    check_query,
    check_states,
    ledger_of,
)
from sphkv.baselines.paged_states import PAGE_TOKENS, PagedStates
from sphkv.core.geometry import KVGeometry
from sphkv.store.ledger import ByteLedger

PROTECTED = float("inf")
"""Score of a token that is kept whatever the others score."""


class EvictionPolicy(Protocol):
    """Says which tokens of a layer matter."""

    @property
    def name(self) -> str:
        """Label in reports."""
        ...

    @property
    def evicts_in_decode(self) -> bool:
        """Whether the cache stays at its size while decoding."""
        ...

    @property
    def has_scores(self) -> bool:
        """Whether a score is carried with each kept token and charged."""
        ...

    def least_tokens(self) -> int:
        """Tokens every head must have room for."""
        ...

    def layer_tokens(self, layer: int, num_layers: int, room: int, prompt: int) -> int:
        """Tokens per head of a layer, when the average over layers may be ``room``."""
        ...

    def prompt_scores(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Scores ``[kv_heads, tokens]`` of a prompt's tokens, whatever the budget.

        Where scores are carried, these are the first to be carried, and ``decode_scores`` ranks.

        Args:
            layer: The layer.
            query: ``[query_heads, tokens, head_dim]`` after RoPE.
            keys: ``[kv_heads, tokens, head_dim]`` after RoPE.
            values: ``[kv_heads, tokens, head_dim]``.
        """
        ...

    def decode_scores(self, positions: Tensor, carried: Tensor | None, num_kept: int) -> Tensor:
        """Scores ``[kv_heads, most]`` of held tokens when room is needed.

        Args:
            positions: ``[kv_heads, most]`` int64, -1 where nothing is held.
            carried: ``[kv_heads, most]`` attention each token has received, if carried.
            num_kept: Tokens each head will keep.
        """
        ...

    def place_keys(self, layer: int, held: HeldStates) -> Tensor:
        """Keys as attention should see them, ``[kv_heads, most, head_dim]``."""
        ...


class PromptPolicy:
    """Defaults of a policy that decides once, after the prompt, the same room in all layers."""

    name = "prompt policy"
    evicts_in_decode = False
    has_scores = False

    def least_tokens(self) -> int:
        """One."""
        return 1

    def layer_tokens(self, layer: int, num_layers: int, room: int, prompt: int) -> int:
        """The average."""
        return room

    def decode_scores(self, positions: Tensor, carried: Tensor | None, num_kept: int) -> Tensor:
        """Never asked: nothing is evicted while decoding."""
        raise RuntimeError(f"{self.name} does not evict while decoding")

    def place_keys(self, layer: int, held: HeldStates) -> Tensor:
        """As stored."""
        return held.keys


class EvictionCache:
    """A ``CacheMethod`` that keeps some tokens of each KV head in bfloat16 pages.

    Attributes:
        name: Label in reports.
        realisation: How decoding is carried out.
        policy: Scores the tokens.
        budget: Share of dense bytes, everything charged, that the prompt may take.
        shared: Scores that earlier caches of the same prompt have found; None finds all anew.
    """

    realisation = "kernel-realized"

    def __init__(self, geometry: KVGeometry, policy: EvictionPolicy, budget: float) -> None:
        """Start empty."""
        self.name = policy.name
        self.policy = policy
        self.budget = check_budget(budget)
        self.geometry = geometry
        self.shared: SharedScores | None = None
        self._layers: list[PagedStates | None] = [None] * geometry.num_layers
        self._given = [0] * geometry.num_layers
        self._room = [0] * geometry.num_layers
        # tokens a layer had been given when it last dropped some
        self._evicted_at = [0] * geometry.num_layers

    def num_tokens(self, layer: int = 0) -> int:
        """Tokens a layer has been given."""
        return self._given[layer]

    def plan(self, num_tokens: int) -> int:
        """Tokens per head, averaged over layers, that the budget has room for.

        Raises:
            ValueError: The policy needs more; the message says which share would do.
        """
        dense = self.geometry.dense_state_bytes * num_tokens
        dim, scored = self.geometry.head_dim, self.policy.has_scores
        pages = PagedStates.pages_within(self.budget * dense, dim, has_scores=scored)
        spare = int(self.policy.evicts_in_decode)
        needed = -(-self.policy.least_tokens() // PAGE_TOKENS) + spare
        if pages < needed:
            page = PagedStates.page_bytes(dim, has_scores=scored)
            least = (needed * page + torch.int64.itemsize) / dense
            raise ValueError(
                f"{self.name} needs at least {least:.4f} of the dense bytes of {num_tokens} "
                f"tokens, the budget is {self.budget:g}"
            )
        return (pages - spare) * PAGE_TOKENS

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, *, query: Tensor | None = None
    ) -> None:
        """Keep the tokens of a prompt that score highest."""
        self._check_empty(layer)
        check_states(self.geometry, keys, values)
        tokens = keys.shape[1]
        if query is None:
            raise ValueError(f"{self.name} chooses by attention: prefill needs the query")
        check_query(self.geometry, query, tokens)
        room = self.plan(tokens)
        limit = self.policy.layer_tokens(layer, self.geometry.num_layers, room, tokens)
        self._room[layer] = limit
        kept = min(limit, tokens)
        score = functools.partial(self.policy.prompt_scores, layer, query, keys, values)
        scores = score() if self.shared is None else self.shared.find(self.name, layer, score)
        self._store_prompt(layer, keys, values, scores, kept)

    def _check_empty(self, layer: int) -> None:
        if self._layers[layer] is not None:
            raise ValueError(f"layer {layer} holds {self._given[layer]} tokens already")

    def _store_prompt(
        self, layer: int, keys: Tensor, values: Tensor, scores: Tensor, num_kept: int
    ) -> None:
        heads, tokens, dim = keys.shape
        pages = PagedStates(heads, dim, has_scores=self.policy.has_scores, device=keys.device)
        positions = torch.arange(tokens, device=keys.device).expand(heads, tokens)
        carried = None
        if pages.scores is not None:
            carried, scores = scores, self.policy.decode_scores(positions, scores, num_kept)
        if num_kept < tokens:
            self._evicted_at[layer] = tokens
        pages.append_some(highest(scores, num_kept), keys, values, positions, carried)
        self._layers[layer] = pages
        self._given[layer] = tokens

    def read(self, layer: int) -> HeldStates:
        """What queries of a layer see."""
        pages = self._pages(layer)
        held = pages.read()
        return HeldStates(self.policy.place_keys(layer, held), held.values, held.positions)

    def attend(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        options: AttentionOptions,
        *,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Store the next tokens, attend, and evict where the policy does so in decode."""
        check_states(self.geometry, keys, values)
        check_query(self.geometry, query, keys.shape[1])
        outputs = []
        at = 0
        while at < keys.shape[1]:
            stop = min(keys.shape[1], at + self._make_room(layer, keys.shape[1] - at))
            part = slice(at, stop)
            outputs.append(
                self._attend_part(
                    layer, query[:, part], keys[:, part], values[:, part], options, sink_logits
                )
            )
            at = stop
        return torch.cat(outputs, 1) if outputs else query.float()

    def _make_room(self, layer: int, wanted: int) -> int:
        """How many tokens may be appended now, after evicting if there is no room."""
        if not self.policy.evicts_in_decode:
            return wanted
        pages, limit = self._pages(layer), self._room[layer]
        most = int(pages.counts.max())
        if most >= limit + PAGE_TOKENS:
            held = pages.read()
            carried = pages.read_scores() if pages.scores is not None else None
            scores = self.policy.decode_scores(held.positions, carried, limit)
            scores = scores.masked_fill(held.positions < 0, -torch.inf)
            pages.keep(highest(scores, limit))
            self._evicted_at[layer] = self._given[layer]
            most = limit
        return limit + PAGE_TOKENS - most

    def _attend_part(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        options: AttentionOptions,
        sink_logits: Tensor | None,
    ) -> Tensor:
        pages, heads, tokens = self._pages(layer), keys.shape[0], keys.shape[1]
        begin = self._given[layer]
        positions = torch.arange(begin, begin + tokens, device=keys.device)
        pages.append(keys, values, positions.expand(heads, tokens))
        self._given[layer] += tokens
        held = self.read(layer)
        carried = None if pages.scores is None else pages.read_scores()
        output = attend_held(
            query, held, positions, options, sink_logits=sink_logits, received=carried
        )
        if carried is not None:
            pages.write_scores(carried)
        return output

    def crop(self, num_tokens: int) -> None:
        """Forget the tokens from ``num_tokens`` on; scores keep what their queries added.

        Raises:
            ValueError: Tokens that would have to come back have been dropped.
        """
        for layer, at in enumerate(self._evicted_at):
            if num_tokens < min(at, self._given[layer]):
                raise ValueError(
                    f"cannot crop to {num_tokens} tokens: layer {layer} dropped states when it "
                    f"had {at}"
                )
        for layer, pages in enumerate(self._layers):
            if pages is not None and num_tokens < self._given[layer]:
                pages.keep(pages.read().positions < num_tokens)
                self._given[layer] = num_tokens

    def _pages(self, layer: int) -> PagedStates:
        pages = self._layers[layer]
        if pages is None:
            raise ValueError(f"layer {layer} has no prompt yet")
        return pages

    def tensors(self) -> list[Tagged]:
        """Every live tensor with its ledger kind."""
        return [tagged for pages in self._layers if pages is not None for tagged in pages.tensors()]

    def resident_bytes(self) -> int:
        """Bytes of every live tensor."""
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def peak_bytes(self) -> int:
        """Resident bytes and what one step stages: nothing, pages are read in place."""
        return self.resident_bytes()

    def ledger(self) -> ByteLedger:
        """The same bytes by kind; a carried score counts as protection state."""
        slack = sum(pages.slack_bytes for pages in self._layers if pages is not None)
        return ledger_of(self.tensors(), slack)


def highest(scores: Tensor, count: int) -> Tensor:
    """Mark the ``count`` highest scores of each row; among equal ones the later token wins."""
    tokens = scores.shape[1]
    if count >= tokens:
        return torch.ones_like(scores, dtype=torch.bool)
    order = scores.flip(1).argsort(dim=1, descending=True, stable=True)[:, :count]
    mask = torch.zeros_like(scores, dtype=torch.bool)
    return mask.scatter_(1, tokens - 1 - order, True)
