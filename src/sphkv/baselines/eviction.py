# SPDX-License-Identifier: Apache-2.0
"""The part that all methods which drop tokens share.

A policy scores the tokens of a prompt; each KV head keeps the highest ones that its pages have
room for, in a page store with the tiers drop and dense, and attention runs on the same kernels as
every other cache. So these methods are kernel-realized: bytes are those of the store's ledger and
step times those of the kernels.

The budget holds after every token. New tokens are dense; whenever 16 of them fill the tail and
their pages would not fit, the layer is packed anew without the lowest scores. What scores low then
is the policy's ``decode`` rule:

- ``"window"``: the prompt's choice stays, the oldest of the new tokens go. The prompt leaves
  room for ``num_new`` tokens or for ``new_share`` of the budget, whichever is less.
- ``"votes"``: the attention of the newest query decides about all tokens but the last 16, as in
  TOVA. The prompt takes all the room there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from sphkv.attention.request import AttentionOptions
from sphkv.baselines.attention_scores import SharedAttention, SharedScores
from sphkv.baselines.held_states import (
    HeldStates,
    Tagged,
    add_ledgers,
    check_query,
    check_states,
    held_weights,
    ledger_of,
)
from sphkv.baselines.layer_pages import PAGE_TOKENS, LayerPages
from sphkv.baselines.settings import MethodShape, changed_fields
from sphkv.cache.method import CacheMethodBase
from sphkv.core.rope import RopeSpec
from sphkv.store.ledger import ByteLedger

PROTECTED = float("inf")
"""Score of a token that is kept whatever the others score."""

DecodeRule = Literal["window", "votes"]
Weights = Literal["never", "evicting", "always"]

DECODE_TRIALS: tuple[tuple[DecodeRule, float], ...] = (
    ("window", 0.5),
    ("window", 0.25),
    ("votes", 0.5),
)
"""Rules for new tokens that methods are tried with, and the share of the room they take."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerPrompt:
    """What a policy may look at when it scores the tokens of a prompt.

    Attributes:
        layer: The layer.
        query: ``[query_heads, tokens, head_dim]`` after RoPE.
        keys: ``[kv_heads, tokens, head_dim]`` after RoPE.
        values: ``[kv_heads, tokens, head_dim]``.
        rope: Rotary embedding of the layer.
        shared: Attention that other caches of the same prompt have found; None finds it anew.
    """

    layer: int
    query: Tensor
    keys: Tensor
    values: Tensor
    rope: RopeSpec
    shared: SharedAttention | None = None


class EvictionPolicy(Protocol):
    """Says which tokens of a layer matter."""

    @property
    def name(self) -> str:
        """Label in reports."""
        ...

    @property
    def weights(self) -> Weights:
        """When attention weights of decode steps are needed, which kernels do not return.

        They are then computed a second time in torch, and the step's time has that in it.
        """
        ...

    @property
    def carries_scores(self) -> bool:
        """Whether a float32 score is kept beside each state, and charged."""
        ...

    def least_tokens(self) -> int:
        """Tokens every head must have room for."""
        ...

    def reserved_pages(self, room: int, num_new: int) -> int:
        """Of ``room`` pages of a head, those that the prompt leaves to new tokens."""
        ...

    def layer_pages(self, layer: int, num_layers: int, room: int, prompt: int) -> int:
        """Pages per head of a layer, when the average over layers may be ``room``."""
        ...

    def head_pages(self, scores: Tensor, total: int) -> list[int]:
        """Pages of each head, given scores ``[kv_heads, tokens]`` and the pages of all."""
        ...

    def prompt_scores(self, prompt: LayerPrompt) -> Tensor:
        """Scores ``[kv_heads, tokens]`` of a prompt's tokens, whatever the budget.

        Where scores are carried, these are the first to be carried, and ``decode_scores`` ranks.
        """
        ...

    def decode_scores(
        self, positions: Tensor, weights: Tensor | None, num_kept: int, prompt: int
    ) -> Tensor:
        """Scores ``[kv_heads, most]`` of held tokens when room is needed.

        Args:
            positions: ``[kv_heads, most]`` int64, -1 where nothing is held.
            weights: ``[kv_heads, most]`` carried scores, or the weights of the newest query.
            num_kept: Tokens a head will keep.
            prompt: Tokens of the prompt.
        """
        ...

    def place_keys(self, rope: RopeSpec, held: HeldStates, sinks: Tensor) -> Tensor:
        """Keys as they are to be stored, ``[kv_heads, most, head_dim]``.

        Args:
            rope: Rotary embedding of the layer.
            held: States that stay.
            sinks: ``[kv_heads, num_moved, head_dim]`` first keys of the prompt as they came.
        """
        ...

    @property
    def num_moved(self) -> int:
        """First keys that ``place_keys`` moves, whose originals are kept and charged."""
        ...


@dataclass(frozen=True)
class PromptPolicy:
    """Defaults of a policy: the same room in all layers and heads.

    Attributes:
        decode: What goes while decoding when there is no room.
        new_share: Share of the pages that the prompt leaves to new tokens, at most; with the
            rule ``"window"`` only.
    """

    decode: DecodeRule = "window"
    new_share: float = 0.5

    @property
    def name(self) -> str:
        """Label in reports."""
        return "prompt policy"

    @property
    def weights(self) -> Weights:
        """Those of the newest query, where it votes."""
        return "evicting" if self.decode == "votes" else "never"

    @property
    def carries_scores(self) -> bool:
        """None."""
        return False

    @property
    def num_moved(self) -> int:
        """None."""
        return 0

    def least_tokens(self) -> int:
        """One."""
        return 1

    def reserved_pages(self, room: int, num_new: int) -> int:
        """Enough for all new tokens but the tail's, or ``new_share``."""
        if self.decode == "votes":
            return 0
        needed = max(0, math.ceil(num_new / PAGE_TOKENS) - 1)
        return min(needed, max(1, round(self.new_share * room)))

    def layer_pages(self, layer: int, num_layers: int, room: int, prompt: int) -> int:
        """The average."""
        return room

    def head_pages(self, scores: Tensor, total: int) -> list[int]:
        """The same for every head."""
        heads = scores.shape[0]
        return [total // heads] * heads

    def decode_scores(
        self, positions: Tensor, weights: Tensor | None, num_kept: int, prompt: int
    ) -> Tensor:
        """The prompt's tokens first, then the newest; or the newest query's weights."""
        if weights is None:
            return positions.float().masked_fill((positions >= 0) & (positions < prompt), PROTECTED)
        recent = positions.max() - PAGE_TOKENS
        return weights.masked_fill(positions > recent, PROTECTED)

    def place_keys(self, rope: RopeSpec, held: HeldStates, sinks: Tensor) -> Tensor:
        """As they are."""
        return held.keys


class EvictionCache(CacheMethodBase):
    """A ``CacheMethod`` that keeps some tokens of each KV head in dense pages.

    Attributes:
        name: Label in reports.
        policy: Scores the tokens.
        shape: Model, budget and tokens to come.
        shared: Scores that earlier caches of the same prompt have found; None finds all anew.
    """

    residency = "evicted"

    def __init__(self, shape: MethodShape, policy: EvictionPolicy) -> None:
        """Start empty."""
        self.name = policy.name
        self.policy = policy
        self.shape = shape
        self.geometry = shape.geometry
        self.shared: SharedScores | None = None
        self._backend = shape.decode_backend()
        self._layers: list[LayerPages | None] = [None] * self.geometry.num_layers
        self._prompt = 0
        # tokens a layer had been given when it last dropped some
        self._evicted_at = [0] * self.geometry.num_layers
        self._scores: dict[int, Tensor] = {}
        self._moved: dict[int, Tensor] = {}
        self._probe = self._new_layer(torch.device("cpu"))

    @property
    def setting(self) -> str:
        """What differs from the paper's setting."""
        return changed_fields(self.policy)

    def tier_shares(self) -> dict[str, float]:
        """Kept and dropped states."""
        held = sum(pages.num_states for pages in self._layers if pages is not None)
        given = sum(pages.num_tokens for pages in self._layers if pages is not None)
        share = held / max(1, given * self.geometry.num_kv_heads)
        return {"max": share, "drop": 1 - share}

    def num_tokens(self, layer: int = 0) -> int:
        """Tokens a layer has been given."""
        pages = self._layers[layer]
        return 0 if pages is None else pages.num_tokens

    def plan(self, num_tokens: int) -> int:
        """Tokens of a prompt that a head keeps, on the average over layers.

        Raises:
            ValueError: The policy needs more; the message says which share would do.
        """
        room = self._average_pages(num_tokens)
        last = self._average_pages(num_tokens + self.shape.num_new)
        kept = min(room, last - self.policy.reserved_pages(room, self.shape.num_new))
        needed = -(-self.policy.least_tokens() // PAGE_TOKENS)
        if kept < needed:
            wanted = needed + self.policy.reserved_pages(needed + 1, self.shape.num_new)
            heads = self.geometry.num_kv_heads
            least = (self._probe.bytes_for([wanted] * heads) + self._extra_bytes(wanted)) / (
                num_tokens * heads * self.geometry.dense_state_bytes
            )
            raise ValueError(
                f"{self.name} needs at least {least:.4f} of the dense bytes of {num_tokens} "
                f"tokens, the budget is {self.shape.budget:g}"
            )
        return kept * PAGE_TOKENS

    def _average_pages(self, num_tokens: int) -> int:
        """Pages of each head, the same everywhere, that fit the budget at so many tokens."""
        probe = self._probe
        heads, limit = self.geometry.num_kv_heads, self.shape.layer_limit_bytes(num_tokens)
        page = probe.bytes_for([1] * heads) - probe.bytes_for([0] * heads)
        pages = max(0, limit // page)
        while pages > 0 and probe.bytes_for([pages] * heads) + self._extra_bytes(pages) > limit:
            pages -= 1
        return pages

    def _extra_bytes(self, pages: int) -> int:
        """Bytes beside the pages of a layer whose heads have so many: scores and moved keys."""
        heads, policy = self.geometry.num_kv_heads, self.policy
        scores = (pages + 1) * PAGE_TOKENS * torch.float32.itemsize if policy.carries_scores else 0
        moved = policy.num_moved * self.geometry.head_dim * torch.bfloat16.itemsize
        return heads * (scores + moved)

    def _new_layer(self, device: torch.device) -> LayerPages:
        return LayerPages(self.geometry, self._backend, device)

    def _layer_pages(self, layer: int, num_tokens: int) -> int:
        """Pages per head of a layer when so many tokens have been given."""
        room = self._average_pages(num_tokens)
        return self.policy.layer_pages(layer, self.geometry.num_layers, room, self._prompt)

    def _head_pages(self, layer: int, scores: Tensor, num_tokens: int, reserved: int) -> list[int]:
        """Pages of each head of a layer.

        Args:
            layer: The layer.
            scores: ``[kv_heads, tokens]``.
            num_tokens: Tokens given, which say what the budget is.
            reserved: Pages of each head that must stay free.
        """
        heads = self.geometry.num_kv_heads
        even = self._layer_pages(layer, num_tokens)
        probe = self._probe
        limit = probe.bytes_for([even] * heads)
        total = max(1, even - reserved) * heads
        pages = self.policy.head_pages(scores, total)
        # an uneven layer has a wider table
        while probe.bytes_for([count + reserved for count in pages]) > limit and total > heads:
            total -= 1
            pages = self.policy.head_pages(scores, total)
        return pages

    def prefill(
        self, layer: int, keys: Tensor, values: Tensor, *, query: Tensor | None = None
    ) -> None:
        """Keep the tokens of a prompt that score highest."""
        if self._layers[layer] is not None:
            raise ValueError(f"layer {layer} holds {self.num_tokens(layer)} tokens already")
        check_states(self.geometry, keys, values)
        tokens = keys.shape[1]
        if query is None:
            raise ValueError(f"{self.name} chooses by attention: prefill needs the query")
        check_query(self.geometry, query, tokens)
        self.plan(tokens)
        self._prompt = tokens
        scores = self._find_scores(layer, query, keys, values)
        pages = self._layers[layer] = self._new_layer(keys.device)
        if self.policy.num_moved:
            self._moved[layer] = keys[:, : self.policy.num_moved].to(torch.bfloat16, copy=True)
        positions = torch.arange(tokens, device=keys.device)
        ranked = scores
        if self.policy.carries_scores:
            kept = self._prompt_pages(layer)[1] * PAGE_TOKENS
            ranked = self._rank(positions.expand(keys.shape[:2]), scores, kept)
        # the position of the next token is that of the last one stored, plus one
        ranked = ranked.masked_fill(positions == tokens - 1, PROTECTED)
        is_kept = highest(ranked, self._prompt_counts(layer, ranked))
        self._store(layer, pages, keys, values, is_kept)
        self._note_prompt(layer, ranked, is_kept)
        if self.policy.carries_scores:
            self._scores[layer] = scores[is_kept].view(len(scores), -1)

    def _note_prompt(self, layer: int, ranked: Tensor, is_kept: Tensor) -> None:
        """For methods that look at a layer again: its scores and which of them are kept."""

    def _find_scores(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shared = None if self.shared is None else self.shared.attention
        prompt = LayerPrompt(layer, query, keys, values, self.shape.ropes[layer], shared)
        find: Callable[[], Tensor] = lambda: self.policy.prompt_scores(prompt)  # noqa: E731
        if self.shared is None:
            return find()
        return self.shared.find(f"{self.name}({self.setting})", layer, find)

    def _prompt_pages(self, layer: int) -> tuple[int, int]:
        """Pages per head that are left to new tokens, and those of the prompt."""
        now = self._layer_pages(layer, self._prompt)
        last = self._layer_pages(layer, self._prompt + self.shape.num_new)
        reserved = self.policy.reserved_pages(now, self.shape.num_new)
        kept = max(1, min(now, last - reserved))
        return now - kept, kept

    def _prompt_counts(self, layer: int, scores: Tensor) -> Tensor:
        reserved, _ = self._prompt_pages(layer)
        pages = self._head_pages(layer, scores, self._prompt, reserved)
        return torch.tensor(pages) * PAGE_TOKENS

    def _store(
        self, layer: int, pages: LayerPages, keys: Tensor, values: Tensor, is_kept: Tensor
    ) -> None:
        tokens = keys.shape[1]
        if not bool(is_kept.all()):
            self._evicted_at[layer] = tokens
        positions = torch.arange(tokens, device=keys.device)
        if self.policy.num_moved:
            every = positions.masked_fill(~is_kept, -1).expand(keys.shape[:2])
            held = HeldStates(keys.float(), values, every)
            keys = self.policy.place_keys(self.shape.ropes[layer], held, self._moved[layer].float())
        pages.write(is_kept, keys, values, positions)

    def _rank(self, positions: Tensor, weights: Tensor | None, num_kept: int) -> Tensor:
        scores = self.policy.decode_scores(positions, weights, num_kept, self._prompt)
        return scores.masked_fill(positions < 0, -torch.inf)

    def read(self, layer: int) -> HeldStates:
        """What queries of a layer see."""
        return self._pages(layer).read()

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
        """Store the next tokens and attend, after dropping what has no room beside them."""
        check_states(self.geometry, keys, values)
        check_query(self.geometry, query, keys.shape[1])
        outputs = []
        at = 0
        while at < keys.shape[1]:
            room = self._make_room(layer, query[:, at : at + 1], keys.shape[1] - at, options)
            part = slice(at, min(keys.shape[1], at + room))
            outputs.append(
                self._attend_part(
                    layer, query[:, part], keys[:, part], values[:, part], options, sink_logits
                )
            )
            at = part.stop
        return torch.cat(outputs, 1) if outputs else query.float()

    def _make_room(self, layer: int, query: Tensor, wanted: int, options: AttentionOptions) -> int:
        """How many tokens may be appended now, after dropping others if they fill the tail."""
        pages = self._pages(layer)
        free = PAGE_TOKENS - pages.num_open
        if wanted < free:
            return wanted
        after = pages.num_tokens + min(wanted, free)
        if not self._fits(layer, [count + 1 for count in pages.pages_per_head()], after):
            self._evict(layer, query, options, after)
            free = PAGE_TOKENS - pages.num_open
        return max(1, free)

    def _fits(self, layer: int, pages: list[int], num_tokens: int) -> bool:
        """Whether heads may have so many pages beside the tail."""
        heads = self.geometry.num_kv_heads
        even = self._layer_pages(layer, num_tokens)
        return self._probe.bytes_for(pages) <= self._probe.bytes_for([even] * heads)

    def _evict(self, layer: int, query: Tensor, options: AttentionOptions, num_tokens: int) -> None:
        """Pack a layer anew with its tail, so that one more page per head would fit."""
        pages = self._pages(layer)
        held = pages.read()
        weights = self._scores.get(layer)
        if self.policy.weights == "evicting":
            at = torch.tensor([pages.num_tokens], device=query.device)
            weights = held_weights(query, held, at, options)
        kept = max(1, self._layer_pages(layer, num_tokens) - 1) * PAGE_TOKENS
        scores = self._rank(held.positions, weights, kept)
        counts = self._decode_counts(layer, held, scores, num_tokens)
        newest = held.positions == pages.num_tokens - 1
        is_kept = highest(scores.masked_fill(newest, PROTECTED), counts) & (held.positions >= 0)
        if layer in self._moved:
            left = HeldStates(held.keys, held.values, held.positions.masked_fill(~is_kept, -1))
            moved = self.policy.place_keys(
                self.shape.ropes[layer], left, self._moved[layer].float()
            )
            held = HeldStates(moved, held.values, held.positions)
        self._evicted_at[layer] = pages.num_tokens
        pages.keep(held, is_kept)
        if layer in self._scores:
            self._scores[layer] = self._scores[layer][is_kept].view(len(is_kept), -1)

    def _decode_counts(
        self, layer: int, held: HeldStates, scores: Tensor, num_tokens: int
    ) -> Tensor:
        """States each head keeps when a layer is packed anew."""
        pages = self._head_pages(layer, scores, num_tokens, reserved=1)
        return torch.tensor(pages) * PAGE_TOKENS

    def _attend_part(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        options: AttentionOptions,
        sink_logits: Tensor | None,
    ) -> Tensor:
        pages, tokens = self._pages(layer), keys.shape[1]
        begin = pages.num_tokens
        positions = torch.arange(begin, begin + tokens, device=keys.device)
        pages.append(keys, values)
        output = pages.attend(query, positions, options, sink_logits=sink_logits)
        if self.policy.weights == "always":
            carried = torch.nn.functional.pad(self._scores[layer], (0, tokens))
            carried += held_weights(query, pages.read(), positions, options, is_mean=False)
            self._scores[layer] = carried
        return output

    def crop(self, num_tokens: int) -> None:
        """Forget the tokens from ``num_tokens`` on; scores keep what their queries added.

        Raises:
            ValueError: Tokens that would have to come back have been dropped.
        """
        for layer, at in enumerate(self._evicted_at):
            if num_tokens < min(at, self.num_tokens(layer)):
                raise ValueError(
                    f"cannot crop to {num_tokens} tokens: layer {layer} dropped states when it "
                    f"had {at}"
                )
        for layer, pages in enumerate(self._layers):
            if pages is None or num_tokens >= pages.num_tokens:
                continue
            if layer in self._scores:
                stays = (pages.read().positions < num_tokens)[0]
                self._scores[layer] = self._scores[layer][:, stays]
            pages.crop(num_tokens)

    def _pages(self, layer: int) -> LayerPages:
        pages = self._layers[layer]
        if pages is None:
            raise ValueError(f"layer {layer} has no prompt yet")
        return pages

    def extra_tensors(self) -> list[Tagged]:
        """Live tensors beside the pages, with their ledger kind: carried scores, moved keys."""
        held = [*self._scores.values(), *self._moved.values()]
        return [("prot", tensor) for tensor in held]

    def live_tensors(self) -> list[Tensor]:
        """Every live tensor."""
        held = [pages for pages in self._layers if pages is not None]
        return [
            *(tensor for pages in held for tensor in pages.live_tensors()),
            *(tensor for _, tensor in self.extra_tensors()),
        ]

    def resident_bytes(self) -> int:
        """Bytes of every live tensor."""
        held = sum(pages.nbytes for pages in self._layers if pages is not None)
        return held + sum(tensor.nbytes for _, tensor in self.extra_tensors())

    def peak_bytes(self) -> int:
        """Resident bytes: a decode step reads pages in place and stages nothing."""
        return self.resident_bytes()

    def ledger(self) -> ByteLedger:
        """The same bytes by kind; carried scores and moved keys count as protection state."""
        held = [pages.ledger() for pages in self._layers if pages is not None]
        return add_ledgers([*held, ledger_of(self.extra_tensors())])


def highest(scores: Tensor, counts: Tensor | int) -> Tensor:
    """Mark the highest scores of each row; among equal ones the later token wins.

    Args:
        scores: ``[rows, tokens]``.
        counts: Marks of each row, ``[rows]`` or one for all.
    """
    rows, tokens = scores.shape
    wanted = torch.as_tensor(counts, device=scores.device).expand(rows)
    order = scores.flip(1).argsort(dim=1, descending=True, stable=True)
    mask = torch.zeros_like(scores, dtype=torch.bool)
    is_first = torch.arange(tokens, device=scores.device) < wanted[:, None]
    return mask.scatter_(1, tokens - 1 - order, is_first)
